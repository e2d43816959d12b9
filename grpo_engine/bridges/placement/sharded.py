"""Placement `sharded`: each rank of the trainer stores a part of the model, which is gathered to be written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_engine.bridges.protocol import BridgeContext, BridgeModel

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel

    from grpo_engine.ranks.group import RankGroup


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Work of all ranks: `ShardedPlacement.load`, the first that rank 0 announces, once it has found the servers."""

    def __str__(self) -> str:
        return "loading the model"


@dataclass(frozen=True, slots=True)
class GatherWeights:
    """Work of all ranks: `ShardedPlacement.stream`."""

    def __str__(self) -> str:
        return "gathering the weights"


class ShardedPlacement(ABC):
    """See `grpo_engine.bridges.protocol.RankPlacement`; rank 0 uses the same placement as the others."""

    @abstractmethod
    def load(self) -> PreTrainedModel | PeftModel:
        """Load this rank's part of the model, on all ranks."""

    @abstractmethod
    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """See `BridgeModel`."""

    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """The values that `save` writes; on all ranks."""

    @abstractmethod
    def stream(self, receive: Callable[[dict[str, Tensor]], None] | None = None) -> None:
        """Gather whole parameters, on all ranks."""

    def join(self, work: object) -> BridgeModel:
        """Load this rank's part."""
        assert isinstance(work, LoadModel), work
        return BridgeModel(model=self.load(), is_shared=False, policy_version=0, save=self.save, tensors=self.tensors)

    def take_part(self, work: object, write: Callable[[], None]) -> None:
        """Gather, where rank 0 does."""
        assert isinstance(work, GatherWeights), work
        self.stream()


class ShardedModel(ShardedPlacement):
    """The whole model is trained."""

    def __init__(self, context: BridgeContext) -> None:
        self._context = context
        self._model: PreTrainedModel

    def load(self) -> PreTrainedModel:
        """Load the model and shard it, on all ranks."""
        ranks = self._context.ranks
        assert ranks is not None
        with ranks.together(LoadModel()):
            return self._load(ranks)

    def _load(self, ranks: RankGroup) -> PreTrainedModel:
        import torch

        from grpo_engine.models.loading import load_model
        from grpo_engine.models.sharded import shard_model, without_values

        context = self._context
        self._model = load_model(context.model_name, dtype=context.dtype, device="cpu")
        self._dtype = next(self._model.parameters()).dtype
        self._unsharded = without_values(self._model)
        shard_model(
            self._model,
            ranks.mesh(),
            shard_dtype=self._dtype if context.sharding.rounds_weights else torch.float32,
            reshard_after_forward=not context.sharding.keeps_gathered,
            offload=context.sharding.offloads,
            around=ranks.collective,
        )
        return self._model

    def max_bytes(self) -> int:
        """Size of two checkpoints."""
        num_elements = sum(int(parameter.numel()) for parameter in self._model.parameters())
        return int(2 * num_elements * self._dtype.itemsize)

    def layers(self) -> list[dict[str, tuple[int, ...]]]:
        """Names and shapes of the parameters in the order of `stream`."""
        from grpo_engine.models.execution import shapes_by_layer

        return shapes_by_layer(self._model)

    def stream(self, receive: Callable[[dict[str, Tensor]], None] | None = None) -> None:
        """Gather the parameters layer by layer, on all ranks.

        Args:
            receive: called with those of each layer by their names in transformers, on this rank's device and in the
                model's dtype, which are freed after the call; it must not raise, since other ranks go on.
        """
        stream_on_all_ranks(self._context.ranks, self._model, self._dtype, receive)

    def write(self, folder: Path, kept: Path) -> None:
        """Write a whole checkpoint as its layers are gathered, on all ranks; `kept` is not used."""
        from grpo_engine.bridges.transport.saving import writing_in_parts
        from grpo_engine.models.loading import load_tokenizer

        with writing_in_parts(self._unsharded, folder) as receive:
            if receive is not None:
                self.stream(receive)
        if receive is None:
            self.save(folder, self.tensors())
        else:
            load_tokenizer(self._context.model_name).save_pretrained(folder)

    def tensors(self) -> Mapping[str, Tensor]:
        """The model's, gathered in main memory of rank 0."""
        tensors: dict[str, Tensor] = {}

        def keep(layer: dict[str, Tensor]) -> None:
            tensors.update({name: tensor.to("cpu", copy=True) for name, tensor in layer.items()})

        self.stream(keep if self._ranks.leads else None)
        return tensors

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the model and its tokenizer."""
        from grpo_engine.bridges.transport.saving import save_model

        save_model(self._unsharded, self._context.model_name, folder, tensors)

    @property
    def _ranks(self) -> RankGroup:
        assert self._context.ranks is not None
        return self._context.ranks


def stream_on_all_ranks(
    ranks: RankGroup | None,
    model: PreTrainedModel,
    dtype: torch.dtype,
    receive: Callable[[dict[str, Tensor]], None] | None,
) -> None:
    """Gather the parameters of a sharded model layer by layer, on all ranks, and hand each to `receive`."""
    from grpo_engine.models.sharded import weight_stream

    assert ranks is not None
    with ranks.together(GatherWeights()):
        for layer in weight_stream(model, dtype):
            if receive is not None:
                receive(layer)
