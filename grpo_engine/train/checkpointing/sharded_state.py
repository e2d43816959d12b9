"""Masters and optimizer state of a trainer of several ranks, in torch's distributed checkpoint format.

Every rank writes its parts at once. A trainer of another number of ranks, or of one, reads the parts that it needs:
https://docs.pytorch.org/docs/stable/distributed.checkpoint.html.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from grpo_engine.errors import CheckpointError
from grpo_engine.models.places import Place, place_of, whole_shape
from grpo_engine.ranks.group import RankGroup
from grpo_engine.train.checkpointing.stored_parts import METADATA, PartsReader, read_metadata

FOLDER = "trainer"
"""Below a checkpoint."""
MASTER, OPTIMIZER, OF_RANK = "masters/", "optimizer/", "@rank"
"""Key of a master: `masters/<parameter>`; of its optimizer state: `optimizer/<parameter>/<name>`; of state that is no
part of a whole, as the scales of 8-bit state: with the rank behind it."""


class WritingRanks(Protocol):
    """The ranks that write, as `RankGroup` or `BackgroundRanks`."""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""

    @property
    def announcements(self) -> ProcessGroup | None:
        """All ranks by Gloo."""

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks by rank, on every rank."""


def stored_parts(
    parameters: Mapping[str, Tensor],
    masters: Mapping[str, Tensor],
    optimizer: Mapping[str, Mapping[str, Any]],
    rank: int,
) -> dict[str, Any]:
    """This rank's part of the state, as `write_sharded` takes it; not copied.

    Args:
        parameters: of the model, sharded or split, by name.
        masters: this rank's part of each, or copies in main memory.
        optimizer: its state for this rank's part of each, likewise.
    """
    state = {MASTER + name: _part(local, parameters[name]) for name, local in masters.items()}
    for name, values in optimizer.items():
        for kind, value in values.items():
            state[_key(name, kind, value, masters[name], rank)] = _part(value, parameters[name])
    return state


def write_sharded(folder: Path, parts: Mapping[str, Any], ranks: WritingRanks) -> None:
    """Write the parts of all ranks; called on all of them.

    Raises:
        OSError: a rank could not write; on all ranks.
    """
    try:
        save(dict(parts), checkpoint_id=folder / FOLDER, process_group=ranks.announcements)
    except CheckpointException as error:  # no Exception, and of all ranks
        first = next(iter(error.failures.values()))[0]
        raise OSError(getattr(first, "errno", None), str(first)) from error


def is_sharded_state(folder: Path) -> bool:
    """Whether the checkpoint in `folder` was written by several ranks."""
    return (folder / FOLDER / METADATA).is_file()


def read_sharded(
    folder: Path, parameters: Mapping[str, Tensor], masters: Mapping[str, Tensor], ranks: RankGroup
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """This rank's part of masters and optimizer state; called on all ranks, whose number may differ from the writers'.

    Args:
        parameters: of the model, by name.
        masters: this rank's part of each, for its shape and device.

    Raises:
        CheckpointError: the state is of other parameters, or cannot be divided among so many ranks.
    """
    metadata = _read_metadata(folder)
    saved = metadata.state_dict_metadata
    names = {key.removeprefix(MASTER) for key in saved if key.startswith(MASTER)}
    if names != masters.keys():
        different = ", ".join(sorted(names ^ masters.keys())[:8])
        raise CheckpointError(
            f"{folder}: saved for other parameters than are trained now: {different}; resume with the same model, "
            "adapter and layer filter"
        )
    state: dict[str, Any] = {
        MASTER + name: _whole(torch.empty_like(m), parameters[name]) for name, m in masters.items()
    }
    writers = {key.rpartition(OF_RANK)[2] for key in saved if OF_RANK in key}
    if writers and writers != {str(rank) for rank in range(ranks.size)}:
        raise CheckpointError(
            f"{folder}: the optimizer's state was saved by {len(writers)} ranks and cannot be divided among "
            f"{ranks.size}: resume with {len(writers)}, or choose an optimizer with full-precision state"
        )
    for key, entry in saved.items():
        if not key.startswith(OPTIMIZER) or (OF_RANK in key and not key.endswith(f"{OF_RANK}{ranks.rank}")):
            continue
        assert isinstance(entry, TensorStorageMetadata)
        name = key.removeprefix(OPTIMIZER).rpartition("/")[0]
        master, properties = masters[name], entry.properties
        if OF_RANK not in key and tuple(entry.size) == whole_shape(parameters[name]) and master.ndim > 0:
            state[key] = _whole(torch.empty_like(master, dtype=properties.dtype), parameters[name])
        else:
            state[key] = torch.empty(entry.size, dtype=properties.dtype)
    try:
        reader = PartsReader(folder / FOLDER, metadata)
        load(state, storage_reader=reader, process_group=ranks.announcements, no_dist=ranks.size == 1)
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:  # the first is no Exception
        why = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise CheckpointError(
            f"{folder / FOLDER}: unreadable ({why}); remove {folder} to resume from the previous checkpoint"
        ) from error
    local = {key: _local(value) for key, value in state.items()}
    optimizer: dict[str, dict[str, Any]] = {name: {} for name in masters}
    for key, value in local.items():
        if key.startswith(OPTIMIZER):
            name, _, kind = key.removeprefix(OPTIMIZER).rpartition("/")
            optimizer[name][kind.partition(OF_RANK)[0]] = value
    return {name: local[MASTER + name] for name in masters}, optimizer


def _read_metadata(folder: Path) -> Metadata:
    """What is in the checkpoint.

    Raises:
        CheckpointError: it is damaged, or would run code when torch reads it.
    """
    try:
        return read_metadata(folder / FOLDER)
    except Exception as error:  # unpickling raises any class
        raise CheckpointError(
            f"{folder / FOLDER / METADATA}: unreadable ({type(error).__name__}: {error}); "
            f"remove {folder} to resume from the previous checkpoint"
        ) from error


def _key(name: str, kind: str, value: Any, master: Tensor, rank: int) -> str:
    is_part = isinstance(value, Tensor) and (value.ndim == 0 or value.shape == master.shape)
    return f"{OPTIMIZER}{name}/{kind}" + ("" if is_part else f"{OF_RANK}{rank}")


def _part(local: Any, parameter: Tensor) -> Any:
    """The part with its place in the whole, also where it is in other memory than its parameter; other values as they
    are."""
    if not isinstance(local, Tensor) or (place := place_of(parameter) or _place_of_shard(parameter)) is None:
        return local
    shape = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
    return StoredPart.of(local, place) if local.shape == shape else local


def _place_of_shard(parameter: Tensor) -> Place | None:
    if not isinstance(parameter, DTensor):
        return None
    _, start = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return Place(whole=tuple(parameter.shape), start=tuple(start))


def _whole(local: Any, parameter: Tensor) -> Any:
    """The whole tensor that a part belongs to; other values, and those of a trainer of one rank, as they are."""
    if (place := place_of(parameter)) is not None:
        is_part = isinstance(local, Tensor) and local.shape == parameter.shape
        return StoredPart.of(local, place) if is_part else local
    if not isinstance(parameter, DTensor) or not isinstance(local, Tensor) or local.shape != parameter.to_local().shape:
        return local
    return DTensor.from_local(
        local.detach(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _local(value: Any) -> Any:
    match value:
        case DTensor():
            return value.to_local()
        case StoredPart():
            return value.local
        case _:
            return value


class StoredPart(Tensor):
    """A rank's part of a whole tensor that is divided anyhow; a DTensor has parts of equal sizes only.

    Its methods are those that torch asks of a tensor in a checkpoint: `torch.distributed._checkpointable`.
    """

    place: Place
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, local: Tensor, place: Place) -> StoredPart:
        """This part, in its memory."""
        part = local.detach().as_subclass(cls)
        part.place = place
        return part

    @property
    def local(self) -> Tensor:
        """The part as a tensor."""
        return self.as_subclass(Tensor)

    def size(self) -> torch.Size:  # type: ignore[override]
        """Of the whole tensor."""
        return torch.Size(self.place.whole)

    def __create_write_items__(self, key: str, part: object) -> list[WriteItem]:
        [chunk] = self.__create_chunk_list__()
        properties = TensorProperties.create_from_tensor(self.local)
        about = TensorWriteData(chunk=chunk, properties=properties, size=self.size())
        return [WriteItem(index=MetadataIndex(key, chunk.offsets), type=WriteItemType.SHARD, tensor_data=about)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size(self.place.start), sizes=self.local.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.local
