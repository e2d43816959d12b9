"""Sharing vLLM's weights: the worker exports them, this process creates the weight lock and writes the bridge file."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_engine.bridges.memory.bridge_files import bridge_file_path
from grpo_engine.bridges.memory.shared_tensors import map_tensors, segments_of_file, unlink_segments
from grpo_engine.bridges.memory.stock_bridge_file import stock_form
from grpo_engine.bridges.memory.weight_lock import WeightLock
from grpo_engine.errors import BridgeError
from grpo_engine.models.stored_weights import checkpoint_folder
from grpo_engine.processes import ProcessIdentity
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.exports import (
    Adopted,
    Owner,
    fingerprint_of,
    need_no_checkpoint,
    take_over,
    withdraw,
    write_bridge_file,
)
from grpo_engine.server.vllm.checkpoint import Parameters
from grpo_engine.wire.bridge_file import BridgeFile, SharedTensor, WeightPart
from grpo_engine.wire.log_lines import WEIGHTS_EXPORTED

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_LOCK_POLL_S = 0.002

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Exported weights with their bridge file."""

    lock: WeightLock
    path: Path
    file: BridgeFile
    owner: Owner
    awaits: ProcessIdentity | None
    """The trainer that has newer weights and will publish them; nothing may be sampled before."""

    def withdraw(self) -> None:
        """Remove the export, unless it belongs to the run."""
        withdraw(self.path, self.file, self.owner)


def reads_no_checkpoint(config: ServerConfig, instance: str, environment: Mapping[str, str]) -> bool:
    """Whether a vLLM that starts now gets every weight from `share`, or later from the trainer that it awaits."""
    path, owner = bridge_file_path(config.bridge_file, environment), Owner.of(instance, environment)
    return (
        config.shared_weights
        and checkpoint_folder(config.model_name) is not None  # from which it would reload after all
        and need_no_checkpoint(path, owner, fingerprint_of(config))
    )


async def share(
    llm: AsyncLLM,
    parameters: Parameters,
    *,
    config: ServerConfig,
    instance: str,
    environment: Mapping[str, str],
    has_weights: bool,
) -> Sharing:
    """Export the weights of a vLLM that has no requests yet.

    Weights that the previous server of the same run left in shared memory are newer than the checkpoint, and copied.

    Args:
        has_weights: False: it has read none; where none are copied either, they are marked as half-written.

    Raises:
        BridgeError: the weights cannot be shared, or another server owns the bridge file.
    """
    path = bridge_file_path(config.bridge_file, environment)
    owner = Owner.of(instance, environment)
    fingerprint = fingerprint_of(config)
    adopted, awaited_trainer = take_over(path, owner, fingerprint)
    stem = f"{owner.stem}{instance}"
    try:
        folder = checkpoint_folder(config.model_name) if has_weights else None
        exported = await _exported(llm, parameters, f"{stem}-weights", folder)
        version = 0 if adopted is None else await copy_adopted(adopted, exported.manifests)
        lock = WeightLock.create(f"{stem}-fence", policy_version=version)
        if adopted is None and not has_weights:
            lock.expect(awaited_trainer)
        file = write_bridge_file(
            path,
            owner=owner,
            model=config.model_name,
            fingerprint=fingerprint,
            lock=lock,
            manifest=exported.tensors,
            parts=exported.parts,
            aliases=parameters.aliases,
            stock=None if exported.parts else stock_form(config.model_name, exported.fused),
            is_all_of_checkpoint=exported.is_all_of_checkpoint,
        )
    except BaseException:
        ranks = range(config.tensor_parallel_size)
        unlink_segments([f"{stem}-fence", f"{stem}-weights", *(f"{stem}-weights-{rank}" for rank in ranks)])
        raise
    logger.info(WEIGHTS_EXPORTED.text, len(parameters.shapes), path)
    return Sharing(lock=lock, path=path, file=file, owner=owner, awaits=awaited_trainer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exported:
    """The weights under transformers' names."""

    tensors: dict[str, SharedTensor]
    """Of one process, else empty."""
    parts: list[dict[str, WeightPart]]
    """Of each of several processes, else empty."""
    fused: dict[str, SharedTensor]
    """Of one process under vLLM's own names, if they are in CUDA memory."""
    is_all_of_checkpoint: bool
    """See `BridgeFile`."""

    @property
    def manifests(self) -> Sequence[Mapping[str, SharedTensor]]:
        """Of each process."""
        return self.parts or [self.tensors]


async def _exported(llm: AsyncLLM, parameters: Parameters, segment: str, folder: Path | None) -> _Exported:
    expected = {name: list(shape) for name, shape in parameters.shapes.items()}
    answers: list[Any] = await llm.collective_rpc(
        "grpo_share", args=(segment, expected, parameters.aliases, None if folder is None else str(folder))
    )
    for answer in answers:
        if problem := answer.get("problem"):
            raise BridgeError(str(problem))
    num_compared = min(answer["num_compared"] for answer in answers)
    if folder is not None and num_compared < len(expected):
        logger.warning(
            "Only %d of %d shared tensors could be compared with the checkpoint", num_compared, len(expected)
        )
    # Else whether a later server has read all of them could not be told.
    has_all_names = folder is None or num_compared == len(expected)
    is_all = has_all_names and all(answer["is_all_of_checkpoint"] for answer in answers)
    if len(answers) > 1:
        parts = [
            {name: WeightPart.model_validate(entry) for name, entry in answer["tensors"].items()} for answer in answers
        ]
        return _Exported(tensors={}, parts=parts, fused={}, is_all_of_checkpoint=is_all)
    tensors, fused = (
        {name: SharedTensor.model_validate(entry) for name, entry in answers[0][which].items()}
        for which in ("tensors", "fused")
    )
    return _Exported(tensors=tensors, parts=[], fused=fused, is_all_of_checkpoint=is_all)


async def copy_adopted(adopted: Adopted, manifests: Sequence[Mapping[str, SharedTensor]]) -> int:
    """Copy the previous server's weights into the exported ones; their version.

    Args:
        manifests: what is exported, of each process.

    A trainer that has not noticed the restart may still be writing the old ones: the copy waits for it.

    Raises:
        HalfWritten: that trainer exited in the middle of the write.
    """
    own = [map_tensors(manifest) for manifest in manifests]
    while True:
        before = adopted.lock.check()
        if not before.is_writing:
            for tensors, earlier in zip(own, adopted.parts, strict=True):
                for name, tensor in tensors.items():
                    tensor.copy_(earlier[name])
            if adopted.lock.read().sequence == before.sequence:
                break
        await asyncio.sleep(_LOCK_POLL_S)
    unlink_segments(segments_of_file(adopted.file))
    logger.info("Adopted the weights of version %d from shared memory", before.policy_version)
    return before.policy_version
