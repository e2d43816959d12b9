"""Put a model's weights where a trainer can map them, or take over what a predecessor of this server put there.

Who owns the memory: a server run by hand removes segments and bridge file when it ends. Under a supervisor
(`GRPO_TUI_RUN` is set) they belong to the run: a restarted server adopts them and so keeps the newest weights and their
version, and the supervisor sweeps `/dev/shm/grpo-<run>-*` when the run ends.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_engine.bridges.bridge_files import is_server_alive, read_bridge_file
from grpo_engine.bridges.fence import Fence
from grpo_engine.bridges.process_identity import ProcessIdentity
from grpo_engine.bridges.shared_names import run_of, stem_of
from grpo_engine.bridges.shared_tensors import export_tensors, map_tensors, segments_of, unlink_segments
from grpo_engine.errors import BridgeError, HalfWritten
from grpo_engine.wire.bridge_file import AnnouncedWeights, BridgeFile, SharedTensor, StockBridgeFile
from grpo_engine.wire.codec import write_json_atomically

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who exports: this start of the server, and the run that it belongs to."""

    instance: str
    run: str | None
    """None: started by hand, and then the memory goes with the server."""

    @classmethod
    def of(cls, instance: str, environment: Mapping[str, str]) -> Owner:
        """The owner as the environment says it."""
        return cls(instance=instance, run=run_of(environment))

    @property
    def stem(self) -> str:
        """How the names of this run's segments begin."""
        return stem_of(self.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """What a predecessor left: the newest weights, mapped."""

    file: BridgeFile
    fence: Fence
    tensors: dict[str, torch.Tensor]


def awaited_trainer(path: Path) -> ProcessIdentity | None:
    """The living trainer that wrote the weights of this server's dead predecessor, and so brings them to this one.

    Until it has, a server that could not adopt them has those of the checkpoint, many versions old.
    """
    try:
        file = read_bridge_file(path)
        fence = Fence.attach(file.fence_segment)
    except BridgeError:
        return None
    trainer = fence.other_trainer(file.pid)
    fence.close()
    return trainer


def adopt(path: Path, owner: Owner, fingerprint: str) -> Adopted | None:
    """Map what the dead predecessor of this server exported; None when there is nothing to take over.

    A stale file is cleared away, with its segments where no run owns them.

    Raises:
        BridgeError: a living server holds the file.
    """
    if not path.exists():
        return None
    try:
        file = read_bridge_file(path)
    except BridgeError as error:
        logger.warning("%s; it is replaced", error)
        return None
    if is_server_alive(file):
        raise BridgeError(
            f"{path}: belongs to a living inference server (pid {file.pid}); end it, or give this one another "
            "--bridge-file"
        )
    segments = {file.fence_segment} | segments_of(file.tensors)
    if owner.run is None or not all(segment.startswith(owner.stem) for segment in segments):
        logger.warning("%s: left by a dead server (pid %d); it is replaced", path, file.pid)
        unlink_segments(segment for segment in segments if segment.startswith(stem_of(None)))
        return None
    if file.fingerprint != fingerprint:
        logger.warning("%s: its weights are of another model or dtype (%s); they are replaced", path, file.model)
        unlink_segments(segments)
        return None
    if not segments_of(file.tensors):
        logger.info("%s: weights in GPU memory ended with the server that held them; the model is loaded again", path)
        unlink_segments(segments)
        return None
    try:
        fence = Fence.attach(file.fence_segment)
        fence.check()
        return Adopted(file=file, fence=fence, tensors=map_tensors(file.tensors))
    except HalfWritten as error:
        logger.warning("%s: %s; the model is loaded again", path, error)
    except BridgeError as error:
        logger.warning("%s: %s; the model is loaded again", path, error)
    unlink_segments(segments)
    return None


def export(
    tensors: Mapping[str, torch.Tensor], owner: Owner
) -> tuple[Fence, dict[str, SharedTensor], dict[str, torch.Tensor]]:
    """Move tensors into shared memory beside a new fence: the fence, the manifest, and the tensors to serve from.

    CUDA tensors stay where they are and are described by IPC handles; CPU tensors are copied into one segment.

    Raises:
        BridgeError: no room, or memory that cannot be exported.
    """
    stem = f"{owner.stem}{owner.instance}"
    fence = Fence.create(f"{stem}-fence")
    try:
        if all(tensor.is_cuda for tensor in tensors.values()):
            from grpo_engine.bridges.cuda_tensors import export_cuda_tensors

            return fence, export_cuda_tensors(tensors), dict(tensors)
        manifest, shared = export_tensors(tensors, f"{stem}-weights")
    except BaseException:
        unlink_segments([f"{stem}-fence"])
        raise
    return fence, manifest, shared


def write_bridge_file(
    path: Path,
    *,
    owner: Owner,
    model: str,
    fingerprint: str,
    fence: Fence,
    manifest: dict[str, SharedTensor],
    aliases: dict[str, str],
    stock: StockBridgeFile | None = None,
) -> BridgeFile:
    """Announce the export; readers see the file whole or not at all.

    Args:
        stock: the same memory as Atropos's trainer takes it, where it can.
    """
    me = ProcessIdentity.of_this_process()
    assert fence.segment is not None
    file = BridgeFile(
        model=model,
        pid=me.pid,
        pid_start_ticks=me.start_ticks,
        instance=owner.instance,
        fingerprint=fingerprint,
        fence_segment=fence.segment,
        tensors=manifest,
        aliases=aliases,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    stock = stock or StockBridgeFile(model=model, shared_weights_enabled=True)
    announced = AnnouncedWeights.model_validate(stock.model_dump() | file.model_dump())
    write_json_atomically(path, announced, mode=0o600)
    return file


def withdraw(path: Path, file: BridgeFile, owner: Owner) -> None:
    """Take the announcement back at exit, and the memory with it where no run owns it."""
    if owner.run is not None:
        return
    try:
        if read_bridge_file(path).instance == file.instance:
            path.unlink(missing_ok=True)
    except BridgeError as error:
        logger.warning("%s", error)
    unlink_segments({file.fence_segment} | segments_of(file.tensors))
