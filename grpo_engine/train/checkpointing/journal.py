"""The batches since the newest checkpoint, from which a killed trainer repeats its steps exactly.

    <save_path>/journal/step_<n>.jsonl    the batch of step n: its head in the first line, its groups in the second

Written before the step, while the lease on the batch is held, and removed once a checkpoint includes the step. Not
compressed: compression takes longer than the write, and only a few files exist at a time.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from grpo_engine.data.source import batch_limits
from grpo_engine.errors import CheckpointError
from grpo_engine.serving.reporting import Reporter
from grpo_engine.train.checkpointing import checkpoints
from grpo_engine.wire.checkpoints import JournalHead, read_journal_head
from grpo_engine.wire.codec import fail_fast, read_whole, write_atomically
from grpo_engine.wire.rollouts import ScoredGroup
from grpo_engine.wire.run_folder import JOURNAL, journal_file, journal_steps

_HALF_WRITTEN = re.compile(r"\.step_\d+\.jsonl\.\d+\.tmp")
_GROUPS = fail_fast(TypeAdapter(list[ScoredGroup]))

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """What a step is made of."""

    head: JournalHead
    groups: list[ScoredGroup]
    """Those that were fresh enough: which ones is decided once."""


class Journal:
    """The journal of one run."""

    def __init__(
        self, save_path: Path, *, is_kept: bool = True, num_tokens: int = 0, reporter: Reporter | None = None
    ) -> None:
        """Nothing is read or written yet.

        Args:
            is_kept: whether new steps are written; what is there can be read all the same.
            num_tokens: of the longest batch that the trainer asks for.
            reporter: takes that a step cannot be written.
        """
        self._reporter = reporter or Reporter()
        self._save_path, self._folder = save_path, save_path / JOURNAL
        self._is_kept = is_kept
        self._max_bytes, self._max_marks = batch_limits(num_tokens)
        self._has_failed = False

    def heads(self, after: int) -> list[JournalHead]:
        """Of the steps that follow step `after` without a gap, in order.

        Raises:
            CheckpointError: a file is damaged.
        """
        there = self._steps()
        return [_read_head(self._path(step)) for step in takewhile(there.__contains__, count(after + 1))]

    def read(self, step: int) -> JournalEntry | None:
        """What `step` was made of; None where no trainer came so far.

        Raises:
            CheckpointError: the file is damaged.
        """
        path = self._path(step)
        if not path.exists():
            return None
        try:
            content = read_whole(path, max_bytes=self._max_bytes, max_marks=self._max_marks)
            head, groups = content.splitlines()
            return JournalEntry(head=JournalHead.model_validate_json(head), groups=_GROUPS.validate_json(groups))
        except (OSError, ValueError) as error:
            raise _damaged(path, error) from error

    def keep(self, entry: JournalEntry) -> None:
        """Have what a step is about to be made of on the disk; where that refuses, it is said, and training goes on."""
        if self._is_kept and not self._path(entry.head.step).exists():
            self._write(entry)

    def restate(self, heads: Iterable[JournalHead]) -> None:
        """Give entries other heads."""
        for head in heads:
            entry = self.read(head.step)
            assert entry is not None
            self._write(JournalEntry(head=head, groups=entry.groups))

    def forget(self, *, through: int) -> None:
        """Remove the steps up to `through`, which a checkpoint has in it now, and what was left half-written."""
        gone = [self._path(step) for step in self._steps() if step <= through]
        for path in (*gone, *filter(_is_half_written, self._files())):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # where steps are left, or there never was one
            self._folder.rmdir()

    def forget_later(self, step: int) -> int:
        """Remove the steps after `step`, which nothing leads to any more; returns how many there were."""
        lost = [other for other in self._steps() if other > step]
        for other in lost:
            self._path(other).unlink(missing_ok=True)
        return len(lost)

    def _write(self, entry: JournalEntry) -> None:
        # Groups as plain dictionaries: a model of pydantic's would write NaN, which foreign clients may send, as null.
        lines = (entry.head.model_dump_json().encode(), _to_json(entry.groups))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path(entry.head.step), b"\n".join(lines) + b"\n")
            checkpoints.sync(self._folder)
            self._has_failed = False
            self._reporter.can_write(self._folder)
        except OSError as error:
            effect = "a trainer that is killed now loses the steps since its checkpoint"
            self._reporter.cannot_write(self._folder, error, effect=effect)
            if not self._has_failed:
                log.error(
                    "%s: step %d cannot be kept: %s; training goes on, but a trainer that is killed now would lose it "
                    "and what follows, up to the next checkpoint: make room",
                    self._folder,
                    entry.head.step,
                    error.strerror,
                )
            self._has_failed = True

    def _path(self, step: int) -> Path:
        return journal_file(self._save_path, step)

    def _files(self) -> list[Path]:
        return list(self._folder.iterdir()) if self._folder.is_dir() else []

    def _steps(self) -> set[int]:
        return set(journal_steps(self._save_path))


def _is_half_written(path: Path) -> bool:
    return _HALF_WRITTEN.fullmatch(path.name) is not None


def _to_json(groups: Iterable[ScoredGroup]) -> bytes:
    return to_json([dict(group) for group in groups], inf_nan_mode="constants")


def _read_head(path: Path) -> JournalHead:
    try:
        return read_journal_head(path)
    except (OSError, ValidationError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path}: unreadable ({checkpoints.read_failure(error)}); "
        "remove it to go on without this step and those after it"
    )
