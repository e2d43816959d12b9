"""The folder through which whole checkpoints reach inference: `current` in it is the newest, whole one.

    <folder>/current                 a symlink, replaced by renaming: there is always one, and it is whole
    <storage>/version-000006/        what it points at, with `handover.json`, which is written last
    <storage>/kept-handovers/        files that every checkpoint has in common, linked into each

One writer, the trainer, and any number of readers: the server asks for the newest as it starts. Whatever dies in the
middle leaves the old one in place. Not forced to the disk: after a power cut nobody is left who would read it, and the
next trainer hands over anew. Torch-free.
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

from grpo_engine.bridges.fence import SHARED_MEMORY
from grpo_engine.bridges.saving import saying_why_unwritten
from grpo_engine.bridges.shared_names import make_own_folder, run_of, stem_of
from grpo_engine.errors import BridgeError
from grpo_engine.wire.codec import write_json_atomically
from grpo_engine.wire.handover import HandoverNote

_CURRENT, _NOTE, _KEPT = "current", "handover.json", "kept-handovers"
_VERSIONS = f"version-{6 * '[0-9]'}*"
"""What is removed here goes by these names: the folder may be anybody's."""
_HANDOVER = "handover-"
_MOST_OF_SHARED_MEMORY = 0.75
"""What checkpoints may take of the shared memory and of the main memory that are free: others live there too."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """A whole checkpoint."""

    path: Path
    policy_version: int


def newest_handover(folder: Path, model: str) -> HandedOver | None:
    """The newest checkpoint in a hand-over folder; None where there is none, or none of this model that is whole.

    Args:
        model: what the model is loaded from, as `resolve_model` says it.
    """
    path = Path(os.path.realpath(folder / _CURRENT))
    if not path.is_dir():
        return None
    try:
        note = HandoverNote.model_validate_json((path / _NOTE).read_bytes())
        num_tensors = _count_tensors(path)
    except (OSError, ValidationError, BridgeError) as error:
        logger.warning("%s: not a whole checkpoint (%s); it is not used", path, error)
        return None
    if note.model != model:
        logger.warning("%s: a checkpoint of %s, not of %s; it is not used", path, note.model, model)
        return None
    if num_tensors != note.num_tensors:
        logger.warning("%s: has %d tensors of %d; it is not used", path, num_tensors, note.num_tensors)
        return None
    return HandedOver(path=path, policy_version=note.policy_version)


class Handover:
    """The folder, as the trainer sees it."""

    def __init__(self, folder: Path, storage: Path, *, model: str) -> None:
        """Take the folder over, with the checkpoint that an earlier trainer may have left in it.

        Args:
            folder: where `current` is looked for.
            storage: where checkpoints are written; may be the same.
            model: what the model is loaded from.

        Raises:
            BridgeError: the disk refuses, or another trainer writes there.
        """
        with saying_why_unwritten(storage):
            if storage.is_relative_to(SHARED_MEMORY):
                make_own_folder(storage)
            for place in (folder, storage):
                place.mkdir(parents=True, exist_ok=True)
        self._claim: int | None = None
        try:
            self._claim = _claim(storage)
        except BlockingIOError:
            raise BridgeError(
                f"{storage}: another trainer hands its checkpoints over there: end it, or choose another --handover"
            ) from None
        except OSError as error:  # file systems without locks
            logger.warning("%s: cannot be locked (%s), so start no second trainer there", storage, error.strerror)
        # Without symlinks, as `current` is read: paths are compared below.
        self._folder, self._storage, self._model = folder.resolve(), storage.resolve(), model
        self.kept = self._storage / _KEPT
        """For files that every checkpoint has in common; on the checkpoints' own disk, so that they can be linked."""
        self._places = {self._folder, self._storage, self.current().parent}
        self._remove_kept()

    @contextmanager
    def writing(self, policy_version: int) -> Iterator[Path]:
        """Within, a folder to write a checkpoint into; afterwards it is `current`.

        There are two of them until `forget_older`, and never more.

        Raises:
            BridgeError: the disk refuses; the one before stays in place.
        """
        with saying_why_unwritten(self._storage):
            self.forget_older()
            path = self._storage / f"version-{policy_version:06d}"
            while path.exists():  # the same version again, for a server that lost it
                path = path.with_name(f"{path.name}+")
            path.mkdir()
            try:
                yield path
                note = HandoverNote(policy_version=policy_version, model=self._model, num_tensors=_count_tensors(path))
                write_json_atomically(path / _NOTE, note)
                self._point_at(path)
            except BaseException:
                shutil.rmtree(path, ignore_errors=True)
                raise

    def current(self) -> Path:
        """The newest checkpoint."""
        return Path(os.path.realpath(self._folder / _CURRENT))

    def forget_older(self) -> None:
        """Remove every checkpoint but the newest, once nobody reads the others any more."""
        self._remove_all_but(self.current())

    def close(self) -> None:
        """Remove everything."""
        (self._folder / _CURRENT).unlink(missing_ok=True)
        self._remove_all_but(None)
        self._remove_kept()
        for place in self._places:
            with suppress(OSError):  # there is something of somebody else's in it, or it is gone
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
        link = self._folder / f".{_CURRENT}.next"  # one name, so that what a killed trainer left is replaced
        link.unlink(missing_ok=True)
        link.symlink_to(path)
        link.replace(self._folder / _CURRENT)


def choose_storage(
    folder: Path, configured: Path | None, *, num_bytes: int, on_gpu: bool, environment: Mapping[str, str]
) -> Path:
    """Where checkpoints are written that take `num_bytes` at most, all together.

    What was configured; else, beside a GPU, shared memory if they have ample room there: a disk would be what everybody
    waits for. Else `folder` itself. Under a supervisor, shared memory has one of the names that it removes at the end
    of a run; by hand, what a killed trainer left there goes with the next. The name follows from the folder, so that a
    trainer there takes over what the one before it left.
    """
    digest = hashlib.blake2b(str(folder).encode(), digest_size=6).hexdigest()
    stem = f"{stem_of(run_of(environment))}{_HANDOVER}"
    storage = (configured or SHARED_MEMORY).absolute() / f"{stem}{digest}"
    if configured is None and on_gpu and run_of(environment) is None:
        _remove_left(SHARED_MEMORY.glob(f"{stem}*"), spared=storage)
    if configured is None and not (on_gpu and _has_room(storage, num_bytes)):
        return folder
    return storage


def _remove_left(storages: Iterable[Path], *, spared: Path) -> None:
    """Remove those whose trainers are dead: the kernel has let go of their claims."""
    for storage in storages:
        if storage == spared:
            continue
        with suppress(OSError):  # somebody lives there, or it is another user's
            claim = _claim(storage)
            shutil.rmtree(storage, ignore_errors=True)
            os.close(claim)


def _claim(storage: Path) -> int:
    """A descriptor with which a folder is this process's until it is closed, or the process ends.

    Raises:
        BlockingIOError: it is another's.
        OSError: it is not there, or cannot be locked.
    """
    descriptor = os.open(storage, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _has_room(storage: Path, num_bytes: int) -> bool:
    """Whether they fit beside everything that is there, but for what an earlier trainer has left in their place."""
    import psutil

    try:
        free = min(shutil.disk_usage(storage.parent).free, psutil.virtual_memory().available)
        stats = [path.stat() for path in storage.rglob("*.safetensors")]
    except OSError:
        return False
    left = sum({stat.st_ino: stat.st_size for stat in stats}.values())  # a file may be linked into several folders
    return num_bytes <= _MOST_OF_SHARED_MEMORY * (free + left)


def _count_tensors(folder: Path) -> int:
    from safetensors import SafetensorError, safe_open

    count = 0
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, framework="np") as file:  # a file that is cut short is refused here
                count += len(file.keys())
        except SafetensorError as error:
            raise BridgeError(f"{path}: {error}") from None
    return count
