"""Writes a checkpoint as a Hugging Face folder: weights, tokenizer, chat template, generation config, model card.

The folder is written beside its place under another name, loaded and sampled from once, and renamed: it is whole, or it
is not there. The trainer may go on, and remove the checkpoint meanwhile: all its files are opened first, and torch,
whose import takes seconds, is imported after that.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from grpo_engine.errors import CheckpointError, ConfigError
from grpo_engine.export.config import ExportConfig
from grpo_engine.python_command import others_may_rename_in
from grpo_engine.wire.checkpoints import ADAPTER_CONFIG, CheckpointMarker, files_of, open_regular
from grpo_engine.wire.codec import MAX_FILE_BYTES, first_fault, require_written
from grpo_engine.wire.run_folder import CHECKPOINT_MARKER

CARD = "README.md"
COPY_BYTES = 16 << 20
DESCRIPTORS = Path("/proc/self/fd")

log = logging.getLogger(__name__)


def run(config: ExportConfig) -> int:
    """Export a checkpoint; returns the exit code.

    Raises:
        CheckpointError: it is incomplete, or was removed before it was opened, or the disk fails.
        ConfigError: the folder is not empty, or settings do not fit the checkpoint.
        ModelError: what was written does not load, or samples nothing.
    """
    with ExitStack() as opened, _new_folder(config.folder) as folder:
        files = _opened(config.checkpoint, opened)
        marker = _read_marker(config.checkpoint, files)
        has_adapter = ADAPTER_CONFIG in files
        if config.merge_lora and not has_adapter:
            raise ConfigError(f"{config.checkpoint}: holds a whole model and no adapter: leave --merge-lora out")
        for name, file in files.items():
            if name not in (CHECKPOINT_MARKER, CARD):  # PEFT writes a card to fill in
                (folder / name).parent.mkdir(exist_ok=True)  # the tokenizer has a folder for a second chat template
                with (folder / name).open("wb") as copy:
                    shutil.copyfileobj(file, copy, COPY_BYTES)
        if config.card is not None:
            shutil.copyfile(config.card, folder / CARD)

        from grpo_engine.export.model import (
            add_generation_config,
            check,
            merge,
            name_base,
            require_adapter,
            require_base,
        )
        from grpo_engine.models.devices import require_device
        from grpo_engine.models.stored_weights import checkpoint_folder

        require_device(config.device)
        if has_adapter:
            require_adapter(folder)
            require_base(marker)
        if config.merge_lora:
            merge(folder, marker, config.device)
        elif has_adapter:
            name_base(folder, marker)
        add_generation_config(folder, marker)
        base = checkpoint_folder(marker.model_name) if has_adapter and not config.merge_lora else None
        log.info("checked: %s", check(folder, config.device, base))
    log.info("exported step %d of %s to %s", marker.step, marker.model_name, config.folder)
    return 0


def _opened(checkpoint: Path, stack: ExitStack) -> dict[str, BinaryIO]:
    """The files of a checkpoint by name: they can be read even after they are removed."""
    try:
        files: dict[str, BinaryIO] = {
            name: stack.enter_context(open_regular(path, follows_link=_is_descriptor(path)))
            for name, path in files_of(checkpoint).items()
        }
        for file in files.values():
            require_written(file)
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint}: cannot be read: {error.strerror}; the trainer removes old checkpoints "
            "(keep_checkpoints): export a newer one"
        ) from None
    if CHECKPOINT_MARKER not in files:
        raise CheckpointError(f"{checkpoint}: has no {CHECKPOINT_MARKER}, so it is no complete checkpoint")
    return files


def _is_descriptor(path: Path) -> bool:
    """Whether it is a link to a file that `grpo-tui export` opened and passed on."""
    return path.is_symlink() and path.readlink().parent == DESCRIPTORS


def _read_marker(checkpoint: Path, files: Mapping[str, BinaryIO]) -> CheckpointMarker:
    try:
        return CheckpointMarker.model_validate_json(files[CHECKPOINT_MARKER].read(MAX_FILE_BYTES))
    except ValidationError as error:
        raise CheckpointError(f"{checkpoint / CHECKPOINT_MARKER}: unreadable ({first_fault(error)})") from None


@contextmanager
def _new_folder(final: Path) -> Iterator[Path]:
    """Within, a folder to write into, which gets the name `final` at the end; on an error it is removed."""
    final = final.absolute()
    is_folder = os.path.isdir(final)  # not Path.is_dir: a name of 300 bytes is none
    if is_folder and any(final.iterdir()):
        raise ConfigError(f"{final}: is not empty, and nothing in it is replaced: choose another folder, or empty it")
    if os.path.exists(final) and not is_folder:
        raise ConfigError(f"{final}: is a file: choose another folder")
    partial, claim = final.with_name(f".{final.name}.partial"), None
    try:
        claim = _claim(partial)
        ours = _of_descriptor(claim)
        _empty(ours)  # of an export that was killed
        yield ours
        if not os.path.samestat(partial.lstat(), os.fstat(claim)):
            raise CheckpointError(f"{partial}: another user put something in its place: choose a folder of your own")
        os.umask(umask := os.umask(0o077))
        with suppress(PermissionError):
            os.fchmod(claim, os.fstat(claim).st_mode & 0o7777 | 0o777 & ~umask)
        partial.rename(final)
    except BaseException as error:
        with suppress(OSError):
            if claim is not None:
                _empty(_of_descriptor(claim))
            if claim is not None or not isinstance(error, Exception):  # interrupted once it was made
                partial.rmdir()
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(f"{final}: cannot be written: {error}; make room, or choose another folder") from error
    finally:
        if claim is not None:
            os.close(claim)


def _of_descriptor(claim: int) -> Path:
    """The folder, also where another user has put one of links in its place."""
    return Path(f"/proc/{os.getpid()}/fd/{claim}")


def _empty(folder: Path) -> None:
    for left in folder.iterdir():
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()


def _claim(partial: Path) -> int:
    """Make a folder, closed to others; a descriptor that locks it until it is closed or this process exits.

    Raises:
        ConfigError: it cannot be made, another export has locked it, or it is of another user, or has files where
            another user may have put a folder of ours.
    """
    try:
        partial.mkdir(0o700, parents=True, exist_ok=True)
        claim = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(f"{partial}: cannot be written: {error.strerror}; choose another folder") from None
    try:
        if os.fstat(claim).st_uid != os.geteuid():
            raise ConfigError(f"{partial}: belongs to another user: choose another folder")
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.listdir(claim) and others_may_rename_in(partial.parent):
            raise ConfigError(f"{partial}: has files, maybe put there by another user: look at them, and remove it")
        with suppress(PermissionError):  # a file system without modes
            os.fchmod(claim, os.fstat(claim).st_mode & 0o7700)
    except BlockingIOError:
        os.close(claim)
        raise ConfigError(f"{partial}: another export writes it: wait for it, or choose another folder") from None
    except BaseException:
        os.close(claim)
        raise
    return claim
