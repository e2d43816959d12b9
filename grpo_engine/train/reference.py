"""The reference policy, which a divergence term keeps the trained one close to.

With adapters it is the model under them: no second copy. Else it is a copy of its own, never what the bridge maps of an
inference server: that memory holds the policy of today. Or reference services hold it (`reference_client`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn

from grpo_engine.data.batching import Batch
from grpo_engine.errors import ModelError
from grpo_engine.models.config import DtypeName
from grpo_engine.models.loading import load_model, load_tokenizer
from grpo_engine.models.places import whole_shape
from grpo_engine.models.sharded import compute_device
from grpo_engine.models.vocabulary import vocabulary_digest
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.reference_client import RemoteReference
from grpo_engine.train.scoring import Scorer

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


class Reference(Protocol):
    """A policy whose log-probabilities a divergence is measured against."""

    def start(self, batches: Sequence[Batch]) -> Sequence[Callable[[], Tensor]]:
        """Functions that return the log-probabilities (B, T) of each batch's labels, 0 where not trained."""


class _InThisProcess:
    """A reference on the trainer's own device, which computes as soon as it is asked."""

    def logprobs(self, batch: Batch) -> Tensor:
        """Log-probabilities (B, T) of the labels, 0 where not trained, without a graph."""
        raise NotImplementedError

    def start(self, batches: Sequence[Batch]) -> list[Callable[[], Tensor]]:
        """As `Reference.start`."""
        return [partial(_same, self.logprobs(batch)) for batch in batches]


def _same(values: Tensor) -> Tensor:
    return values


class FrozenCopy(_InThisProcess):
    """A model that never changes."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._scorer = Scorer(model.eval().requires_grad_(False))

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Tensor:
        """Log-probabilities (B, T) of the labels, 0 where not trained, without a graph."""
        return self._scorer.logprobs(batch)[0]


class UnderAdapters(_InThisProcess):
    """The model in training with its adapters switched off, which is the one that training started from."""

    def __init__(self, model: PeftModel) -> None:
        self._model = model
        self._scorer = Scorer(model)

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Tensor:
        """Log-probabilities (B, T) of the labels, 0 where not trained, without a graph."""
        with _as_it_was(self._model), self._model.disable_adapter():
            return self._scorer.logprobs(batch)[0]


def load_reference(config: TrainConfig, model: PreTrainedModel | PeftModel) -> Reference | None:
    """The reference that the settings ask for, with the type and on the device of the model in training; None: none.

    Raises:
        ModelError: it cannot be loaded, or its vocabulary lacks tokens of the trained model's.
        ConfigError: reference services hold another model.
        PeerUnavailable: no reference service answers.
    """
    if not config.has_reference:
        return None
    name = config.reference_model or config.model_name
    has_adapters = hasattr(model, "disable_adapter")
    trained = cast("PreTrainedModel", model.get_base_model() if has_adapters else model)
    if config.reference_urls:
        return RemoteReference(
            config.reference_urls,
            model_name=name,
            vocabulary=vocabulary_digest(load_tokenizer(config.model_name)),
            num_tokens=_num_tokens(trained),
            seq_len=config.seq_len,
            patience_s=config.reference_timeout_s,
            device=compute_device(model),
        )
    if has_adapters and name == config.model_name:
        log.info("reference: %s without its adapters", name)
        return UnderAdapters(cast("PeftModel", model))
    some_weight = next(trained.parameters())
    copy = load_model(
        name,
        dtype=cast(DtypeName, str(some_weight.dtype).removeprefix("torch.")),
        device=some_weight.device,
    )
    num_tokens, num_known = _num_tokens(trained), _num_tokens(copy)
    if num_known < num_tokens:
        raise ModelError(
            f"reference_model {name} knows {num_known} tokens and {config.model_name} {num_tokens}: "
            "choose a reference with the same tokenizer"
        )
    log.info("reference: a copy of %s, %.2f GB", name, sum(p.nbytes for p in copy.parameters()) / 1e9)
    return FrozenCopy(copy)


def _num_tokens(model: PreTrainedModel) -> int:
    return whole_shape(model.get_output_embeddings().weight)[0]


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """In evaluation mode within, and afterwards as before: switching adapters on again lets all of them learn."""
    learns = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    is_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(is_training)
        for parameter, requires_grad in learns:
            parameter.requires_grad_(requires_grad)
