"""Export a model's weights to shared memory, or adopt those that the previous server of this run exported.

Ownership: a server started by hand removes segments and bridge file when it exits. Under a supervisor (`GRPO_TUI_RUN`
is set) they belong to the run: a restarted server adopts them and so keeps the newest weights and their version, and
the supervisor removes `/dev/shm/grpo-<run>-*` when the run ends.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_engine.bridges.memory.bridge_files import is_server_alive, read_bridge_file
from grpo_engine.bridges.memory.shared_names import run_of, stem_of
from grpo_engine.bridges.memory.shared_tensors import export_tensors, map_tensors, segments_of_file, unlink_segments
from grpo_engine.bridges.memory.weight_lock import WeightLock
from grpo_engine.errors import BridgeError, HalfWritten
from grpo_engine.models.loading import load_config
from grpo_engine.processes import ProcessIdentity
from grpo_engine.server.config import ServerConfig
from grpo_engine.wire.bridge_file import AnnouncedWeights, BridgeFile, SharedTensor, StockBridgeFile, WeightPart
from grpo_engine.wire.codec import write_json_atomically

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The owner of an export: this start of the server, and its run."""

    instance: str
    run: str | None
    """None: started by hand, and the memory is removed with the server."""

    @classmethod
    def of(cls, instance: str, environment: Mapping[str, str]) -> Owner:
        """The owner according to the environment."""
        return cls(instance=instance, run=run_of(environment))

    @property
    def stem(self) -> str:
        """Prefix of the names of this run's segments."""
        return stem_of(self.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """Weights that the previous server exported, mapped."""

    file: BridgeFile
    lock: WeightLock
    parts: list[dict[str, torch.Tensor]]
    """Of each process that had some of them."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Of the only process."""
        (only,) = self.parts
        return only


def fingerprint_of(config: ServerConfig) -> str:
    """Identifies a model, its dtype and its division; weights with another fingerprint are not adopted."""
    model_config = load_config(config.model_name).to_json_string(use_diff=False)
    parts = [config.engine, config.model_name, config.dtype, model_config]
    if config.tensor_parallel_size > 1:
        parts.append(f"{config.tensor_parallel_size} parts")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def need_no_checkpoint(path: Path, owner: Owner, fingerprint: str) -> bool:
    """Whether a server that starts now gets every weight from memory: as its predecessor left them, or its trainer has.

    Not yet certain: until `take_over` that trainer may exit.
    """
    try:
        file = read_bridge_file(path)
        lock = WeightLock.attach(file.fence_segment)
    except BridgeError:
        return False
    with closing(lock), suppress(HalfWritten):
        if is_server_alive(file) or file.fingerprint != fingerprint or not file.is_all_of_checkpoint:
            return False
        segments = segments_of_file(file)
        if segments == {file.fence_segment} or lock.is_expected():
            return lock.has_all() and lock.other_trainer(file.pid) is not None
        lock.check()
        return owner.run is not None and all(segment.startswith(owner.stem) for segment in segments)
    return False


def take_over(path: Path, owner: Owner, fingerprint: str) -> tuple[Adopted | None, ProcessIdentity | None]:
    """Adopt the previous server's weights; where that is impossible, the trainer to wait for.

    That trainer wrote the lost weights and will publish them again. Until then this server has those of the checkpoint,
    many versions old.

    Raises:
        BridgeError: a running server owns the bridge file.
    """
    trainer = _last_writer(path)
    adopted = adopt(path, owner, fingerprint)
    return adopted, trainer if adopted is None else None


def _last_writer(path: Path) -> ProcessIdentity | None:
    """The running trainer that wrote the weights of the exited server described by a bridge file."""
    try:
        file = read_bridge_file(path)
        lock = WeightLock.attach(file.fence_segment)
    except BridgeError:
        return None
    trainer = lock.other_trainer(file.pid)
    lock.close()
    return trainer


def adopt(path: Path, owner: Owner, fingerprint: str) -> Adopted | None:
    """Map what the exited previous server exported; None when nothing can be adopted.

    A stale bridge file will be replaced; its segments are removed unless another run owns them.

    Raises:
        BridgeError: a running server owns the file.
    """
    if not path.exists():
        return None
    try:
        file = read_bridge_file(path)
    except BridgeError as error:
        logger.warning("%s; replacing it", error)
        return None
    if is_server_alive(file):
        raise BridgeError(
            f"{path}: belongs to a running inference server (pid {file.pid}); stop it, or give this one another "
            "--bridge-file"
        )
    segments = segments_of_file(file)
    if owner.run is None or not all(segment.startswith(owner.stem) for segment in segments):
        logger.warning("%s: left by an exited server (pid %d); replacing it", path, file.pid)
        unlink_segments(segment for segment in segments if segment.startswith(stem_of(None)))
        return None
    if file.fingerprint != fingerprint:
        logger.warning("%s: its weights are of another model or dtype (%s); replacing them", path, file.model)
        unlink_segments(segments)
        return None
    if segments == {file.fence_segment}:
        logger.info("%s: weights in GPU memory were freed with the server that held them", path)
        unlink_segments(segments)
        return None
    try:
        lock = WeightLock.attach(file.fence_segment)
        if lock.check().is_writing and lock.is_expected():
            raise BridgeError("a trainer was still to write them")
        manifests: Sequence[Mapping[str, SharedTensor]] = file.parts or [file.tensors]
        return Adopted(file=file, lock=lock, parts=[map_tensors(manifest) for manifest in manifests])
    except (BridgeError, HalfWritten) as error:
        logger.warning("%s: %s; its weights are not adopted", path, error)
    unlink_segments(segments)
    return None


def export(
    tensors: Mapping[str, torch.Tensor], owner: Owner
) -> tuple[WeightLock, dict[str, SharedTensor], dict[str, torch.Tensor]]:
    """Move tensors into shared memory beside a new weight lock; the lock, the manifest, and the tensors to serve from.

    CUDA tensors stay where they are and are described by IPC handles; CPU tensors are copied into one segment.

    Raises:
        BridgeError: shared memory is full, or the tensors cannot be exported.
    """
    stem = f"{owner.stem}{owner.instance}"
    lock = WeightLock.create(f"{stem}-fence")
    try:
        if all(tensor.is_cuda for tensor in tensors.values()):
            from grpo_engine.bridges.memory.cuda_tensors import export_cuda_tensors

            return lock, export_cuda_tensors(tensors), dict(tensors)
        manifest, shared = export_tensors(tensors, f"{stem}-weights")
    except BaseException:
        unlink_segments([f"{stem}-fence"])
        raise
    return lock, manifest, shared


def write_bridge_file(
    path: Path,
    *,
    owner: Owner,
    model: str,
    fingerprint: str,
    lock: WeightLock,
    manifest: dict[str, SharedTensor],
    aliases: dict[str, str],
    parts: list[dict[str, WeightPart]] | None = None,
    stock: StockBridgeFile | None = None,
    is_all_of_checkpoint: bool = False,
) -> BridgeFile:
    """Write the bridge file atomically.

    Args:
        parts: of each process of a tensor parallel server; `manifest` is empty then.
        stock: the same memory in the form that Atropos's trainer reads, if it can.
        is_all_of_checkpoint: see `BridgeFile`.
    """
    me = ProcessIdentity.of_this_process()
    assert lock.segment is not None
    file = BridgeFile(
        model=model,
        pid=me.pid,
        pid_start_ticks=me.start_ticks,
        instance=owner.instance,
        fingerprint=fingerprint,
        fence_segment=lock.segment,
        tensors=manifest,
        parts=parts or [],
        aliases=aliases,
        is_all_of_checkpoint=is_all_of_checkpoint,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    stock = stock or StockBridgeFile(model=model, shared_weights_enabled=True)
    announced = AnnouncedWeights.model_validate(stock.model_dump() | file.model_dump())
    write_json_atomically(path, announced, mode=0o600)
    return file


def withdraw(path: Path, file: BridgeFile, owner: Owner) -> None:
    """Remove bridge file and memory at exit, unless they belong to a run."""
    if owner.run is not None:
        return
    try:
        if read_bridge_file(path).instance == file.instance:
            path.unlink(missing_ok=True)
    except BridgeError as error:
        logger.warning("%s", error)
    unlink_segments(segments_of_file(file))
