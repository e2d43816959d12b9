"""The folder through which whole checkpoints reach inference: `current` in it is the newest complete one.

    <folder>/current                 a symlink, replaced by renaming, so it always points at a complete checkpoint
    <storage>/version-000006/        its target, with `handover.json`, which is written last
    <storage>/kept-handovers/        files that all checkpoints share, linked into each

One writer, the trainer, and any number of readers: a server loads the newest as it starts. A process that is killed
while writing leaves the previous one in place. No fsync: after a power failure the next trainer writes a new one.
Torch-free.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from grpo_engine.bridges.memory.shared_names import make_own_folder, own_entries, own_or_free, run_of, stem_of
from grpo_engine.bridges.memory.weight_lock import SHARED_MEMORY
from grpo_engine.bridges.transport.saving import explain_write_errors
from grpo_engine.errors import BridgeError
from grpo_engine.wire.codec import read_whole, require_regular, write_json_atomically
from grpo_engine.wire.handover import HandoverNote
from grpo_engine.wire.run_folder import HANDOVER_CURRENT, HANDOVER_NOTE

_KEPT = "kept-handovers"
_VERSIONS = f"version-{6 * '[0-9]'}*"
"""Only these names are removed: the folder may hold other files."""
_HANDOVER = "handover-"
_MOST_OF_SHARED_MEMORY = 0.75
"""Share of free shared memory and free main memory that checkpoints may take."""
_MOST_HEADER_BYTES = 16 << 20
"""Of all files of a checkpoint: 100,000 tensors have less. One of 90 MB took 6 s, in which no other thread
ran, and 1.3 GB."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """A complete checkpoint."""

    path: Path
    policy_version: int


def newest_checkpoint(folder: Path, model: str) -> StoredCheckpoint | None:
    """The newest checkpoint in a folder; None if there is none, or it is incomplete or of another model.

    Args:
        model: what the model is loaded from, as `resolve_model` returns it.
    """
    path = Path(os.path.realpath(folder / HANDOVER_CURRENT))
    if not path.is_dir():
        return None
    try:
        note = HandoverNote.model_validate_json(read_whole(path / HANDOVER_NOTE))
        num_tensors = _count_tensors(path)
    except (OSError, ValidationError, BridgeError) as error:
        logger.warning("%s: not a complete checkpoint (%s); not used", path, error)
        return None
    if note.model != model:
        logger.warning("%s: a checkpoint of %s, not of %s; not used", path, note.model, model)
        return None
    if num_tensors != note.num_tensors:
        logger.warning("%s: has %d tensors of %d; not used", path, num_tensors, note.num_tensors)
        return None
    return StoredCheckpoint(path=path, policy_version=note.policy_version)


class CheckpointFolder:
    """The trainer's side of the folder."""

    def __init__(self, folder: Path, storage: Path, *, model: str) -> None:
        """Lock the folder; a checkpoint of an earlier trainer in it stays until the next one is written.

        Args:
            folder: where servers find `current`.
            storage: where checkpoints are written; may be the same.
            model: what the model is loaded from.

        Raises:
            BridgeError: the disk fails, or another trainer uses the folder.
        """
        with explain_write_errors(storage):
            if storage.is_relative_to(SHARED_MEMORY):
                make_own_folder(storage)
            for place in (folder, storage):
                place.mkdir(parents=True, exist_ok=True)
        self._claim: int | None = None
        try:
            self._claim = _claim(storage)
        except BlockingIOError:
            raise BridgeError(
                f"{storage}: another trainer writes its checkpoints there: stop it, or choose another --handover"
            ) from None
        except OSError as error:  # file systems without locks
            logger.warning("%s: cannot be locked (%s); do not start a second trainer there", storage, error.strerror)
        # Without symlinks, as `current` is read: paths are compared below.
        self._folder, self._storage, self._model = folder.resolve(), storage.resolve(), model
        self.kept = self._storage / _KEPT
        """For files that all checkpoints share; on the same disk, so that they can be hard-linked."""
        self._places = {self._folder, self._storage, self.current().parent}
        self._remove_kept()

    @contextmanager
    def writing(self, policy_version: int) -> Iterator[Path]:
        """Within, a folder to write a checkpoint into; afterwards it is `current`.

        There are at most two until `remove_older`.

        Raises:
            BridgeError: the disk fails; the previous checkpoint stays in place.
        """
        with explain_write_errors(self._storage):
            self.remove_older()
            path = self._storage / f"version-{policy_version:06d}"
            while path.exists():  # the same version again, for a server that lost it
                path = path.with_name(f"{path.name}+")
            path.mkdir()
            try:
                yield path
                note = HandoverNote(policy_version=policy_version, model=self._model, num_tensors=_count_tensors(path))
                write_json_atomically(path / HANDOVER_NOTE, note)
                self._point_at(path)
            except BaseException:
                shutil.rmtree(path, ignore_errors=True)
                raise

    def current(self) -> Path:
        """The newest checkpoint."""
        return Path(os.path.realpath(self._folder / HANDOVER_CURRENT))

    def remove_older(self) -> None:
        """Remove every checkpoint but the newest; call it when no server reads the others."""
        self._remove_all_but(self.current())

    def close(self) -> None:
        """Remove everything."""
        (self._folder / HANDOVER_CURRENT).unlink(missing_ok=True)
        self._remove_all_but(None)
        self._remove_kept()
        for place in self._places:
            with suppress(OSError):  # it has other files, or does not exist
                place.rmdir()
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def _remove_all_but(self, kept: Path | None) -> None:
        for path in (path for place in self._places for path in place.glob(_VERSIONS)):
            if path != kept:
                shutil.rmtree(path, ignore_errors=True)

    def _remove_kept(self) -> None:
        for place in self._places:
            shutil.rmtree(place / _KEPT, ignore_errors=True)

    def _point_at(self, path: Path) -> None:
        link = self._folder / f".{HANDOVER_CURRENT}.next"  # one name, so that a killed trainer's is replaced
        link.unlink(missing_ok=True)
        link.symlink_to(path)
        link.replace(self._folder / HANDOVER_CURRENT)


def choose_storage(
    folder: Path, configured: Path | None, *, num_bytes: int, on_gpu: bool, environment: Mapping[str, str]
) -> Path:
    """Where checkpoints of at most `num_bytes` in total are written.

    The configured folder; else, with a GPU, shared memory if there is enough free, since a disk would be the
    bottleneck; else `folder` itself. Under a supervisor the name is one that it removes at the end of the run; without
    one, the next trainer removes what a killed one left. The name is derived from the folder, so a later trainer finds
    its storage.
    """
    digest = hashlib.blake2b(str(folder).encode(), digest_size=6).hexdigest()
    stem = f"{stem_of(run_of(environment))}{_HANDOVER}"
    storage = (configured or SHARED_MEMORY).absolute() / f"{stem}{digest}"
    if configured is None:  # any user may have made such a name
        storage = own_or_free(storage)
    if configured is None and on_gpu and run_of(environment) is None:
        _remove_left(own_entries(SHARED_MEMORY, stem), spared=storage)
    if configured is None and not (on_gpu and _has_room(storage, num_bytes)):
        return folder
    return storage


def room_in(folder: Path) -> int:
    """Bytes that another checkpoint may take there; of shared memory, which is main memory, not all that is free."""
    if not folder.is_relative_to(SHARED_MEMORY):
        return shutil.disk_usage(folder).free
    return int(_MOST_OF_SHARED_MEMORY * _free_memory(folder))


def _remove_left(storages: Iterable[Path], *, spared: Path) -> None:
    """Remove folders whose trainers have exited, which released their locks."""
    for storage in storages:
        if storage == spared:
            continue
        with suppress(OSError):  # locked by a running trainer, or owned by another user
            claim = _claim(storage)
            shutil.rmtree(storage, ignore_errors=True)
            os.close(claim)


def _claim(storage: Path) -> int:
    """A descriptor that locks a folder until it is closed or the process exits.

    Raises:
        BlockingIOError: another process has locked it.
        OSError: it does not exist, or cannot be locked.
    """
    descriptor = os.open(storage, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _has_room(storage: Path, num_bytes: int) -> bool:
    """Whether they fit in free memory, counting what an earlier trainer left in this folder as free."""
    try:
        free = _free_memory(storage.parent)
        stats = [path.stat() for path in storage.rglob("*.safetensors")]
    except OSError:
        return False
    left = sum({stat.st_ino: stat.st_size for stat in stats}.values())  # a file may be linked into several folders
    return num_bytes <= _MOST_OF_SHARED_MEMORY * (free + left)


def _free_memory(folder: Path) -> int:
    """Of a folder in shared memory, which is main memory too."""
    import psutil

    return min(shutil.disk_usage(folder).free, psutil.virtual_memory().available)


def _count_tensors(folder: Path) -> int:
    from safetensors import SafetensorError, safe_open

    count = num_header_bytes = 0
    for path in folder.glob("*.safetensors"):
        require_regular(path)
        with path.open("rb") as file:
            num_header_bytes += int.from_bytes(file.read(8), "little")
        if num_header_bytes > _MOST_HEADER_BYTES:
            raise BridgeError(f"{path}: its header, with those of other files, is above {_MOST_HEADER_BYTES:,} bytes")
        try:
            with safe_open(path, framework="np") as tensors:  # raises for a truncated file
                count += len(tensors.keys())
        except SafetensorError as error:
            raise BridgeError(f"{path}: {error}") from None
    return count
