"""What a trainer leaves beside its weights, for the trainer and the commands that resume and branch the run.

The trainer writes markers, journal heads and `ServedNote`. `grpo-tui resume --from` writes `UsedVersions`, which the
trainer reads; `grpo-tui branch` writes `ParentRun`, which the screen reads.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import Field

from grpo_engine.errors import CheckpointError
from grpo_engine.wire.codec import MAX_FILE_BYTES, MAX_FILE_MARKS, Message, num_marks, open_file

TRAINER_STATE = "trainer"
"""Prefix of the files of a checkpoint that only a trainer reads."""
TRAINER_SETTINGS = f"{TRAINER_STATE}-settings.json"
"""All settings of the trainer that wrote the checkpoint; `grpo-engine train --config` takes it."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""In a checkpoint of an adapter; PEFT's names."""


def is_trainer_state(name: str) -> bool:
    """Whether only a trainer reads this file, named relative to its checkpoint; several ranks write a folder."""
    return name == f"{TRAINER_STATE}.json" or name.startswith((f"{TRAINER_STATE}-", f"{TRAINER_STATE}/"))


def files_of(checkpoint: Path) -> dict[str, Path]:
    """The files of a checkpoint by their names relative to it, without those that only a trainer reads.

    Raises:
        OSError: it was removed.
    """
    paths = {path.relative_to(checkpoint).as_posix(): path for top in checkpoint.iterdir() for path in _files_in(top)}
    return {name: path for name, path in sorted(paths.items()) if not is_trainer_state(name)}


def open_regular(path: Path, *, follows_link: bool = False) -> BinaryIO:
    """Open a file of a checkpoint that may be somebody else's work: no link out of it, and no pipe that blocks.

    Raises:
        CheckpointError: it is no regular file.
        OSError: it cannot be read.
    """
    try:
        return open_file(path, follows_link=follows_link)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise CheckpointError(f"{path}: is no regular file: remove it from the checkpoint") from None
        if error.errno == errno.ELOOP:
            raise CheckpointError(
                f"{path}: is a link, and may lead out of the checkpoint: put the file itself there, or remove the link"
            ) from None
        raise


def read_journal_head(path: Path) -> JournalHead:
    """The head of the batch of a step.

    Raises:
        OSError, ValidationError: it cannot be read, or is damaged.
    """
    with open_file(path) as file:
        line = file.readline(MAX_FILE_BYTES)
    if num_marks(line) > MAX_FILE_MARKS:
        raise OSError(errno.EFBIG, f"more than {MAX_FILE_MARKS:,} brackets, braces and quotes")
    return JournalHead.model_validate_json(line)


def _files_in(path: Path) -> Iterator[Path]:
    is_folder = path.is_dir() and not path.is_symlink()
    yield from (each for each in path.rglob("*") if not each.is_dir()) if is_folder else [path]


class CheckpointMarker(Message):
    """The content of `checkpoint.json`."""

    step: int = Field(ge=0)
    policy_version: int = Field(ge=0)
    model_name: str
    bridge: str
    lease: str = ""
    """Lease of the last batch that was trained on, which the rollout API resumes after."""
    settings: dict[str, Any] = {}
    """See `decisive_settings`."""


class JournalHead(Message):
    """What a step needs besides its groups and the weights: the first line of its file in the journal."""

    step: int
    """The step that is made of it, counted from 1."""
    policy_version: int
    """Of the weights before it."""
    lease: str
    """The rollout API's name for the batch; empty where it gives none."""
    environments: dict[int, str] = Field(default_factory=dict)
    """Names of the environments in it, by id."""
    settings: dict[str, Any]
    """Those that decide what the step does."""


class UsedVersions(Message):
    """Policy versions that name weights of steps that were set aside: no later step may use them again."""

    through: int = Field(0, ge=0)
    """The highest of them."""


class ServedNote(Message):
    """What a trainer sent last: a later one sends nothing to servers that still serve it. Absent during an update."""

    policy_version: int = Field(ge=0)
    updates: dict[str, int]
    """Of each server by its instance: how many updates it had counted then, so that those of another trainer show."""


class ParentRun(Message):
    """The run that another branched off, and where."""

    run: str = Field(pattern=r"^[^./\x00][^/\x00]*$")
    """Its id; its folder is beside that of the branch."""
    step: int = Field(ge=0)
    """Of the checkpoint from which the branch goes on."""
