"""The frozen model of a reference service: its log-probabilities of rows, as the trainer's own reference gives them."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from grpo_engine.data.batching import Batch, micro_batches
from grpo_engine.models.devices import limit_threads, require_device, trainable_device
from grpo_engine.models.loading import load_model, load_tokenizer
from grpo_engine.models.vocabulary import vocabulary_digest
from grpo_engine.reference.config import ReferenceConfig
from grpo_engine.train.scoring import Scorer
from grpo_engine.wire.reference import ReferenceModel

log = logging.getLogger(__name__)


class FrozenModel:
    """A model that never changes; one caller at a time."""

    def __init__(self, config: ReferenceConfig) -> None:
        """Load it.

        Raises:
            ConfigError: there is no such device.
            ModelError: it cannot be loaded.
        """
        device = trainable_device(config.device)
        require_device(device)
        limit_threads(device, config.threads)
        model = load_model(config.model_name, dtype=config.dtype, device=device).requires_grad_(False)
        self._scorer = Scorer(model)
        self._most_tokens = config.tokens_at_once
        # On a CPU a bundle of rows with one prompt is padded to the largest of its micro-batch.
        self._keeps_bundles = self._scorer.shares_prompts and device != "cpu"
        self._device = torch.device(device)
        self.description = ReferenceModel(
            model_name=config.model_name,
            vocabulary=vocabulary_digest(load_tokenizer(config.model_name)),
            num_tokens=len(model.get_output_embeddings().weight),
            dtype=str(model.dtype).removeprefix("torch."),
            max_tokens=config.max_model_len,
        )
        size_gb = sum(parameter.nbytes for parameter in model.parameters()) / 1e9
        log.info("reference: %s on %s in %s, %.2f GB", config.model_name, device, self.description.dtype, size_gb)

    @torch.inference_mode()
    def logprobs(self, batch: Batch) -> Tensor:
        """(N,) fp32 of the batch's trained labels, in the order of its mask.

        Raises:
            torch.OutOfMemoryError: the memory of the GPU ran out; what could be freed is.
        """
        scores = torch.zeros(batch.mask.shape)
        try:
            for part in micro_batches(batch, max_tokens=self._most_tokens, shares_prompts=self._keeps_bundles):
                values, _ = self._scorer.logprobs(part.batch)  # (b, t)
                scores[part.row_numbers, : values.shape[1]] = values.float().cpu()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise
        return scores[batch.mask]
