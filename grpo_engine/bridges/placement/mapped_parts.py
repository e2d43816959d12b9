"""Placement `mapped`, over ranks: each rank maps the part that one process of a tensor parallel server has.

Rank 0 decides, and announces what all ranks do with their parts; each thing is done when all have done it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_engine.bridges.placement.mapped import MappedModel
from grpo_engine.bridges.protocol import BridgeContext, BridgeModel
from grpo_engine.bridges.transport.saving import save_model
from grpo_engine.errors import BridgeError, GrpoError
from grpo_engine.models.execution import parameters_by_layer
from grpo_engine.models.places import gathered, place_of
from grpo_engine.models.sharded import without_values
from grpo_engine.wire.bridge_file import BridgeFile

if TYPE_CHECKING:
    from grpo_engine.ranks.group import RankGroup


@dataclass(frozen=True, slots=True)
class MapWeights:
    """Work of all ranks, the first: build the model on the memory of a server."""

    file: BridgeFile

    def __str__(self) -> str:
        return "mapping the weights"


@dataclass(frozen=True, slots=True)
class MapAgain:
    """Work of all ranks: move the model to the memory of another server."""

    file: BridgeFile

    def __str__(self) -> str:
        return "mapping the weights of the next server"


@dataclass(frozen=True, slots=True)
class WriteWeights:
    """Work of all ranks: write what was trained into the memory of the server; rank 0 holds its weight lock."""

    def __str__(self) -> str:
        return "writing the weights"


@dataclass(frozen=True, slots=True)
class ReleaseWeights:
    """Work of all ranks: unmap the memory of a server that has exited."""

    kept: frozenset[str]
    """Names of tensors whose values each rank keeps."""

    def __str__(self) -> str:
        return "unmapping the weights"


class MappedPart(MappedModel):
    """A model of which this rank maps a part; every method is called on all ranks, on others as rank 0 announces."""

    def __init__(self, model_name: str, file: BridgeFile, ranks: RankGroup) -> None:
        """Build the model, split over the ranks.

        Raises:
            BridgeError, ModelError: the parts cannot be mapped, or not be trained; on all ranks.
        """
        self._ranks = ranks
        with ranks.together(MapWeights(file)), self._agreeing():
            check_parts(file, ranks)
            super().__init__(model_name, file, ranks)
        self._without_values = without_values(self.model)

    def remap(self, file: BridgeFile) -> None:
        """See `MappedModel`."""
        with self._ranks.together(MapAgain(file)), self._agreeing():
            check_parts(file, self._ranks)
            super().remap(file)

    def write(self, write: Callable[[], None]) -> None:
        """See `MappedModel`; returns when all ranks have written."""
        with self._ranks.together(WriteWeights()), self._agreeing():
            super().write(write)

    def release(self, *, is_kept: Callable[[Tensor], bool]) -> None:
        """See `MappedModel`."""
        self.release_except(frozenset(name for name, tensor in self.tensors.items() if is_kept(tensor)))

    def release_except(self, kept: frozenset[str]) -> None:
        """Unmap the memory, and keep the tensors of these names."""
        kept_ids = {id(self.tensors[name]) for name in kept}
        with self._ranks.together(ReleaseWeights(kept)), self._agreeing():
            super().release(is_kept=lambda tensor: id(tensor) in kept_ids)

    def tensors_to_save(self) -> Mapping[str, Tensor]:
        """The whole model's, gathered in main memory of rank 0; on all ranks."""
        tensors: dict[str, Tensor] = {}
        own = dict(self.model.named_parameters())
        for name in (name for names in parameters_by_layer(self.model) for name in names):
            place = place_of(own[name])
            assert place is not None
            whole = gathered(own[name].data, place, self._ranks)
            if self._ranks.leads:
                tensors[name] = whole.cpu()
        return tensors

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the whole model and its tokenizer."""
        save_model(self._without_values, self._model_name, folder, tensors)

    @contextmanager
    def _agreeing(self) -> Iterator[None]:
        """Within, all ranks do the same; where one cannot, all raise.

        Raises:
            GrpoError: what this rank raised. BridgeError: another one could not do it.
        """
        own: GrpoError | None = None
        try:
            yield
        except GrpoError as error:
            own = error
        problems = self._ranks.gather(None if own is None else str(own))
        if own is not None:
            raise own
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise BridgeError(f"rank {rank}: {problem}")


class FollowingPart:
    """See `grpo_engine.bridges.protocol.RankPlacement`: the part of a rank other than 0."""

    def __init__(self, context: BridgeContext) -> None:
        self._context = context
        self._part: MappedPart

    def join(self, work: object) -> BridgeModel:
        """Build the model on the memory that rank 0 has announced."""
        assert isinstance(work, MapWeights), work
        assert self._context.ranks is not None
        self._part = MappedPart(self._context.model_name, work.file, self._context.ranks)
        part = self._part
        return BridgeModel(
            model=part.model, is_shared=True, policy_version=0, save=part.save, tensors=part.tensors_to_save
        )

    def take_part(self, work: object, write: Callable[[], None]) -> None:
        """Do what rank 0 has announced; if that fails on any rank, rank 0 goes on or ends the training."""
        try:
            match work:
                case MapAgain():
                    self._part.remap(work.file)
                case WriteWeights():
                    self._part.write(write)
                case ReleaseWeights():
                    self._part.release_except(work.kept)
                case _:
                    raise AssertionError(work)
        except BridgeError:
            return


def check_parts(file: BridgeFile, ranks: RankGroup) -> None:
    """Refuse a server whose parts are not those of the ranks.

    Raises:
        BridgeError: other numbers, or a part on another GPU than the rank's.
    """
    if len(file.parts) != ranks.size:
        raise BridgeError(
            f"the inference server has its weights in {len(file.parts) or 1} processes, and the trainer has "
            f"{ranks.size} ranks: start as many ranks as the server's tensor_parallel_size"
        )
    if not ranks.device.startswith("cuda"):
        return
    from grpo_engine.bridges.memory.cuda_tensors import gpu_uuid

    own = gpu_uuid(torch.device(ranks.device).index)
    where = {entry.handle.gpu_uuid for entry in file.parts[ranks.rank].values() if entry.handle.kind == "cuda_ipc"}
    if where != {own}:
        there = " and ".join(sorted(where)) or "the CPU"
        raise BridgeError(
            f"rank {ranks.rank} of the trainer is on GPU {own}, and process {ranks.rank} of the inference server has "
            f"its part of the weights on {there}: give both the same gpus in the same order"
        )
