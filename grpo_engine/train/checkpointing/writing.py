"""The checkpoints of a run: each is copied to main memory and written by a thread while training goes on.

One is written at a time. It counts once it is durable: only then are older ones pruned and its steps taken out of the
journal, so a trainer that is killed before resumes from the one before, and repeats the steps. Where the copy does not
fit into memory, training waits while the checkpoint is written. The checkpoint of the end is always waited for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_engine.errors import CheckpointError
from grpo_engine.serving.reporting import Reporter
from grpo_engine.train.checkpointing.journal import Journal
from grpo_engine.train.checkpointing.staging import MOST_OF_FREE_MEMORY, free_memory
from grpo_engine.train.trainee import Trainee
from grpo_engine.wire.metrics import CHECKPOINT_WAIT, CHECKPOINT_WRITE

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Writing:
    step: int
    seconds: Future[float]


class CheckpointWriter:
    """Saves checkpoints of a trainee."""

    def __init__(
        self,
        trainee: Trainee,
        journal: Journal,
        save_path: Path,
        *,
        saved_step: int,
        settings: Mapping[str, Any],
        reporter: Reporter,
    ) -> None:
        """
        Args:
            saved_step: the newest that needs no checkpoint.
            settings: `decisive_settings` of this run.
            reporter: takes that a checkpoint cannot be written.
        """
        self._trainee = trainee
        self._journal = journal
        self._save_path = save_path
        self._saved_step = saved_step
        self._settings = settings
        self._reporter = reporter
        self._writing: _Writing | None = None
        self._copies: bool | None = None
        """Whether states are copied; decided at the first checkpoint."""
        self._waited_s = self._wrote_s = 0.0

    def save(self, step: int, *, policy_version: int, lease: str) -> None:
        """Save after this step, in the background if there is memory for it; a failure is logged."""
        if not self._trainee.config.save_checkpoints:
            return
        with self._waiting():
            self._finish_writing()
            if step == self._saved_step:
                return
            if self._copies is None:
                self._copies = self._chooses_copies()
            if self._copies:
                self._begin(step, policy_version, lease)
            else:
                self._save_now(step, policy_version, lease, required=False)

    def save_last(self, step: int, *, policy_version: int, lease: str, required: bool = True) -> None:
        """Save after this step, and return when it is durable.

        Raises:
            CheckpointError: it cannot be written, and is `required`.
        """
        if not self._trainee.config.save_checkpoints:
            return
        with self._waiting():
            self._finish_writing()
            if step != self._saved_step:
                self._save_now(step, policy_version, lease, required=required)

    def poll(self) -> None:
        """Take note of a checkpoint that was completed, or failed, meanwhile; never waits."""
        if self._writing is not None and self._writing.seconds.done():
            self._finish_writing()

    def wait(self) -> None:
        """Wait until nothing is being written; the result is for the next call."""
        if self._writing is not None:
            with self._waiting():
                wait([self._writing.seconds])

    def abandon(self) -> None:
        """Leave the thread alone that is writing; what it wrote may never become complete."""
        self._writing = None

    def metrics(self) -> dict[str, float]:
        """Since the last call: how long training waited for checkpoints, and the writing of one that was completed."""
        metrics = {CHECKPOINT_WAIT: self._waited_s, CHECKPOINT_WRITE: self._wrote_s}
        self._waited_s = self._wrote_s = 0.0
        return {name: seconds for name, seconds in metrics.items() if seconds}

    def _begin(self, step: int, policy_version: int, lease: str) -> None:
        seconds = self._trainee.begin_save(
            self._save_path, step=step, policy_version=policy_version, lease=lease, settings=self._settings
        )
        self._writing = _Writing(step, seconds)

    def _finish_writing(self) -> None:
        """Wait for the checkpoint that is being written, if any."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            self._wrote_s += writing.seconds.result()
        except CheckpointError as error:
            self._report_failure(writing.step, error)
        except BaseException as error:
            error.add_note(f"while the checkpoint of step {writing.step} was written in the background")
            raise
        else:
            self._completed(writing.step)

    def _save_now(self, step: int, policy_version: int, lease: str, *, required: bool) -> None:
        began = time.perf_counter()
        try:
            self._trainee.save(
                self._save_path, step=step, policy_version=policy_version, lease=lease, settings=self._settings
            )
        except CheckpointError as error:
            if required:
                raise
            self._report_failure(step, error)
        else:
            self._wrote_s += time.perf_counter() - began
            self._completed(step)

    def _completed(self, step: int) -> None:
        self._reporter.can_write(self._save_path)
        self._saved_step = step
        self._journal.forget(through=step)

    def _report_failure(self, step: int, error: CheckpointError) -> None:
        log.error("%s; training continues, the next checkpoint is tried when due", error)
        effect = f"no checkpoint of step {step}; training continues, the next one is tried when due"
        self._reporter.cannot_write(self._save_path, error.__cause__ or error, effect=effect)

    def _chooses_copies(self) -> bool:
        mode = self._trainee.config.checkpoint_async_mode
        if mode == "disabled":
            return False
        needed, free = self._trainee.num_copied_bytes(), free_memory()
        sizes = f"a copy of the state takes {needed / 1e9:.3g} GB of main memory, of which {free / 1e9:.3g} GB are free"
        if needed <= MOST_OF_FREE_MEMORY * free:
            log.info("checkpoints are written while training goes on: %s", sizes)
            return True
        if mode == "auto":
            log.warning("training waits while a checkpoint is written: %s", sizes)
            return False
        log.warning("checkpoint_async_mode %s: %s: training may run out of it; auto waits instead", mode, sizes)
        return True

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - began
