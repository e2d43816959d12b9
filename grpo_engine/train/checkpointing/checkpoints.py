"""Checkpoints: all state that a trainer needs to resume, and a model that `from_pretrained` loads.

    <save_path>/step_<n>/   model.safetensors, config.json, tokenizer …   what `from_pretrained` reads
                            trainer.json, trainer-00001.safetensors …     masters, optimizer, random numbers
                            checkpoint.json                               written last: marks it as complete
    <save_path>/adapter_step_<n>                                          link to it, where it holds an adapter

A checkpoint is written to a temporary folder, synced, and renamed; the one that it replaces is renamed first. So a
crash, also of the machine, leaves the previous checkpoint or the new one, and `tidy` finishes the renames.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import random
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from pydantic import ValidationError
from safetensors import SafetensorError

from grpo_engine.errors import CheckpointError
from grpo_engine.own_file import foreign_owner
from grpo_engine.train.checkpointing.state_files import read_state, write_state
from grpo_engine.wire.checkpoints import ADAPTER_CONFIG, TRAINER_STATE, CheckpointMarker
from grpo_engine.wire.codec import first_fault, read_whole, write_json_atomically
from grpo_engine.wire.run_folder import CHECKPOINT_MARKER, checkpoint_folder, checkpoint_steps

MAX_PID_BYTES = 20
UNFINISHED = re.compile(r"\.([^.]+)\.(partial|replaced|removed)")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The part of a checkpoint that only a trainer reads."""

    folder: Path
    marker: CheckpointMarker
    masters: dict[str, Any]
    """Empty where several ranks wrote theirs: see `sharded_state`."""
    optimizer: dict[str, Any]
    """Likewise."""
    random: list[dict[str, Any]]
    """See `random_state`; of each rank."""
    bad_steps: int = 0
    """Non-finite steps in a row until now."""
    loss_scale: dict[str, Any] = field(default_factory=dict)
    """State of torch's GradScaler; empty where the model is not float16."""


def save(save_path: Path, marker: CheckpointMarker, write: Callable[[Path], None], *, keep: int) -> Path:
    """Write a checkpoint, and remove all but the newest `keep`.

    Args:
        write: writes an HF-loadable model and the trainer's state into the folder it is given.

    Raises:
        CheckpointError: the disk is full or a write fails; earlier checkpoints are kept.
    """
    final = checkpoint_folder(save_path, marker.step)
    beside, replaced = unfinished_folder(save_path, marker.step), save_path / f".{final.name}.replaced"
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        write(beside)
        _bring_to_disk(beside)
        write_json_atomically(beside / CHECKPOINT_MARKER, marker)
        _bring_to_disk(beside)
        if final.exists():
            final.rename(replaced)
        beside.rename(final)
        sync(save_path)
    except (OSError, SafetensorError) as error:
        written = _size(beside)
        shutil.rmtree(beside, ignore_errors=True)
        tidy(save_path)
        raise CheckpointError(_why_unsaved(final, error, written, save_path)) from error
    log.info("checkpoint saved: %s", final)
    _prune(save_path, final, keep)
    _link_adapters(save_path)
    return final


def unfinished_folder(save_path: Path, step: int) -> Path:
    """Where a checkpoint is until it is complete."""
    return save_path / f".{checkpoint_folder(save_path, step).name}.partial"


def write_state_files(
    folder: Path,
    *,
    masters: dict[str, Any],
    optimizer: dict[str, Any],
    random: list[dict[str, Any]],
    bad_steps: int,
    loss_scale: dict[str, Any],
) -> None:
    """Write what `load` reads as `TrainerState`, whose fields these are."""
    content = {
        "masters": masters,
        "optimizer": optimizer,
        "random": random,
        "bad_steps": bad_steps,
        "loss_scale": loss_scale,
    }
    write_state(folder, TRAINER_STATE, content)


def require_folder(save_path: Path) -> None:
    """Create the folder for checkpoints. A full disk is not an error: there may be space at the first save.

    Raises:
        CheckpointError: the folder cannot be created, is not writable, or is another user's.
    """
    try:
        save_path.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(save_path, os.W_OK | os.X_OK) else "not writable for this user"
        reason = reason or foreign_owner(save_path) or ""
    except OSError as error:
        reason = "" if error.errno == errno.ENOSPC else error.strerror or str(error)
    if reason:
        raise CheckpointError(f"{save_path}: no checkpoints can be saved: {reason}; choose another --save-path")


@contextmanager
def locked(save_path: Path) -> Iterator[None]:
    """Hold a lock that keeps other trainers of this machine out: each would prune what the other writes.

    The kernel releases the lock when the process exits. The lock file is beside the folder, which a run without resume
    moves away. Where it cannot be created, there is no lock, and a warning is logged.

    Raises:
        CheckpointError: another trainer holds the lock; names its process. Or another user laid something in its place.
    """
    lock = save_path.with_name(f".{save_path.name}.lock")
    try:
        file = _own_lock(lock)
    except OSError as error:
        log.warning("%s: cannot be created (%s): do not start a second trainer on %s", lock, error.strerror, save_path)
        yield
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = file.read(MAX_PID_BYTES).strip()
            raise CheckpointError(
                f"{save_path}: another trainer uses it (process {int(pid) if pid.isdigit() else 'unknown'}): stop it, "
                "or choose another --save-path"
            ) from None
        except OSError as error:  # file systems without locks
            log.warning("%s: cannot be locked (%s): do not start a second trainer there", save_path, error.strerror)
        with suppress(OSError):  # a full disk; the PID is only for the message
            os.ftruncate(file.fileno(), 0)
            os.pwrite(file.fileno(), str(os.getpid()).encode(), 0)
        yield


def _own_lock(lock: Path) -> BinaryIO:
    """Open the lock file, or make it.

    Raises:
        CheckpointError: it is a link, or not a file of this user alone: another could keep every trainer out by it.
        OSError: it cannot be made, as in a folder that this user may not write to.
    """
    what = f"{lock}, which keeps a second trainer out, is"
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(lock, flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise CheckpointError(f"{what} no regular file: remove it, or choose another --save-path") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink != 1:
        os.close(descriptor)
        raise CheckpointError(
            f"{what} no file of this user alone (user {status.st_uid}, {status.st_nlink} names): remove it, or choose "
            "another --save-path"
        )
    with suppress(OSError):  # a file system without modes
        os.fchmod(descriptor, 0o600)
    return cast(BinaryIO, os.fdopen(descriptor, "r+b", buffering=0))


def tidy(save_path: Path) -> None:
    """Finish interrupted saves: complete checkpoints get their final name, incomplete ones are removed."""
    if not save_path.is_dir():
        return
    matches = (UNFINISHED.fullmatch(path.name) for path in save_path.iterdir())
    for match in sorted((match for match in matches if match), key=lambda match: match[0]):  # partial before replaced
        folder, final = save_path / match[0], save_path / match[1]
        if match[2] != "removed" and (folder / CHECKPOINT_MARKER).is_file() and not final.exists():
            folder.rename(final)
            sync(save_path)
            log.info("checkpoint %s was complete and got its final name", final)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def move_away(save_path: Path) -> None:
    """Rename the folder of an earlier run, for a run without resume; nothing is deleted.

    Raises:
        CheckpointError: the folder cannot be renamed, as a mount point.
    """
    if not save_path.is_dir() or not any(save_path.iterdir()):
        return
    stem = f"{save_path.name}-until-{time.strftime('%m%d-%H%M%S')}"
    number, aside = 1, save_path.with_name(stem)
    while aside.exists():
        number += 1
        aside = save_path.with_name(f"{stem}-{number}")
    try:
        save_path.rename(aside)
    except OSError as error:
        raise CheckpointError(
            f"{save_path}: the earlier run's folder cannot be moved to {aside} ({error.strerror}); "
            "move it, or choose another --save-path"
        ) from error
    log.info("%s: the earlier run's files were moved to %s", save_path, aside)


def newest(save_path: Path) -> Path | None:
    """The newest complete checkpoint below `save_path`; None when there is none."""
    steps = checkpoint_steps(save_path)
    return checkpoint_folder(save_path, steps[-1]) if steps else None


def require_own(path: Path) -> None:
    """Refuse a checkpoint, or a journal, that another user has put into the folder: training would go on from it.

    Raises:
        CheckpointError: it, or a link in its place, is another user's.
    """
    if (fault := foreign_owner(path)) is not None:
        raise CheckpointError(f"{path}: {fault}: remove it, or copy it to go on from it; or choose another --save-path")


def load(folder: Path, *, model_name: str) -> TrainerState:
    """Read the trainer's part of a checkpoint.

    Raises:
        CheckpointError: it is incomplete, unreadable, or of another model.
    """
    try:
        marker = CheckpointMarker.model_validate_json(read_whole(folder / CHECKPOINT_MARKER))
    except (OSError, ValidationError) as error:
        raise CheckpointError(
            f"{folder / CHECKPOINT_MARKER}: unreadable ({read_failure(error)}); "
            f"remove {folder} to resume from the previous checkpoint"
        ) from error
    if marker.model_name != model_name:
        raise CheckpointError(
            f"{folder}: of model {marker.model_name!r}, but this run trains {model_name!r}; "
            "choose another --save-path, or start from the beginning with --no-resume"
        )
    try:
        content = read_state(folder, TRAINER_STATE)
        of_ranks = content.pop("random")
        random = [of_ranks] if isinstance(of_ranks, dict) else of_ranks  # a dict: of an earlier version
        return TrainerState(folder=folder, marker=marker, random=random, **content)
    except Exception as error:  # readers raise any class on damaged files
        raise CheckpointError(
            f"{folder / TRAINER_STATE}*: unreadable ({read_failure(error)}); "
            f"remove {folder} to resume from the previous checkpoint"
        ) from error


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of every random number generator that a step may draw from."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": (version, torch.tensor(numbers), gauss),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),  # type: ignore[union-attr]
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore `random_state`; without a saved GPU generator the present one is kept."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_everything(seed: int) -> None:
    """Seed every random number generator that a step may draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def read_failure(error: Exception) -> str:
    """Why a file could not be read, in a few words."""
    return first_fault(error) if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}"


def _prune(save_path: Path, newest: Path, keep: int) -> None:
    try:
        for old in checkpoint_steps(save_path)[:-keep]:
            folder = checkpoint_folder(save_path, old)
            if folder != newest:  # the one just written
                folder.rename(save_path / f".{folder.name}.removed")  # atomic, unlike deletion
        tidy(save_path)
    except OSError as error:
        log.warning("%s: an old checkpoint cannot be removed: %s", save_path, error)


def _link_adapters(save_path: Path) -> None:
    """Give adapters the names of the stock trainer too, and take away the names of those that are gone."""
    folders = {step: checkpoint_folder(save_path, step) for step in checkpoint_steps(save_path)}
    names = {f"adapter_step_{step}": each.name for step, each in folders.items() if (each / ADAPTER_CONFIG).exists()}
    try:
        for path in save_path.glob("adapter_step_*"):
            if path.is_symlink() and path.name not in names:
                path.unlink()
        for name, target in names.items():
            with suppress(FileExistsError):
                (save_path / name).symlink_to(target)
    except OSError as error:  # a file system without links
        log.warning("%s: no adapter_step_… names beside the checkpoints: %s", save_path, error.strerror)


def _bring_to_disk(folder: Path) -> None:
    """Sync every file below `folder`, and the folders themselves."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Sync a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # folders of some network file systems
            raise
    finally:
        os.close(descriptor)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _why_unsaved(final: Path, error: Exception, written: int, save_path: Path) -> str:
    before = newest(save_path)
    space = ""
    if save_path.is_dir():
        needed = _size(before) if before else written
        at_least = "" if before else "more than "
        free = shutil.disk_usage(save_path).free
        space = f" (a checkpoint takes {at_least}{needed / 1e9:.3g} GB, {free / 1e9:.3g} GB are free)"
    kept = f"{before.name} is kept" if before else "there is none before it"
    return f"{final}: not saved: {error}{space}; {kept}; make room, lower --keep-checkpoints, or move --save-path"
