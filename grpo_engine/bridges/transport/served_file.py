"""What inference may stay at while steps are repeated: the note of what it was sent last. Torch-free.

A trainer that is started after one was killed repeats steps whose versions inference has. It is removed during an
update, since one that is cut off leaves a server with other weights, or half-written ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from grpo_engine.wire.checkpoints import ServedNote
from grpo_engine.wire.codec import read_whole, write_json_atomically


class Repetition:
    """The versions that are computed again from the journal; see `BridgeModel.repeat`."""

    def __init__(self) -> None:
        self._versions = range(0)

    def begin(self, versions: range) -> None:
        """Take them; the last one is that to which the journal leads."""
        self._versions = versions

    def __contains__(self, version: int) -> bool:
        return version in self._versions

    def goes_on_after(self, version: int) -> bool:
        """Whether it is one of them, and a later one follows."""
        return version in self._versions[:-1]


class ServedFile:
    """The file of a run; without a path, nothing is noted."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @property
    def is_possible(self) -> bool:
        """Whether there is a folder for it: not before the first step, when nothing leads to a version."""
        return self._path is not None and self._path.parent.is_dir()

    def read(self, repetition: Repetition) -> ServedNote | None:
        """What the note says; None where there is none, or it is damaged, or of another version than those."""
        if self._path is None:
            return None
        try:
            note = ServedNote.model_validate_json(read_whole(self._path))
        except (OSError, ValidationError):
            return None
        return note if note.policy_version in repetition else None

    def write(self, policy_version: int, updates: Mapping[str, int]) -> None:
        """Note what is served, where that is possible; a disk that refuses costs the next trainer a weight update.

        Of version 0 nothing is noted: it is that of every untrained model.
        """
        if self._path is not None and self.is_possible and policy_version > 0:
            with suppress(OSError):
                write_json_atomically(self._path, ServedNote(policy_version=policy_version, updates=dict(updates)))

    def remove(self) -> None:
        """Say nothing of what is served."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
