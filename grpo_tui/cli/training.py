"""What `grpo-tui up` prints of the training while it waits: progress and warnings, at the pace of a log.

Steps and warnings are those that `status` and the screen show. `Training` is pure: lines, events and time come in.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from grpo_engine.diagnosis.evidence import RunSettings
from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.run_folder import METRICS_FILE
from grpo_engine.wire.supervisor import Bye, Event, RunState, RunStatus, Snapshot, Warning, what_comes_next
from grpo_tui.cli.printing import warning_text
from grpo_tui.run_files.metrics import MetricsChunk, MetricsTail
from grpo_tui.run_files.timeline import after_event
from grpo_tui.view.diagnosis import diagnose, merged_warnings
from grpo_tui.view.format import duration_text
from grpo_tui.view.metrics.history import MetricHistory, extended
from grpo_tui.view.metrics.summary import WINDOW, evaluated_names, names_of, reward_name, score_text, summarized
from grpo_tui.view.progress import progress_of, usual_step_s
from grpo_tui.view.run_settings import read_settings

LOOK_S = 2.0
PROGRESS_S = 30.0
"""Between two lines of progress, while there are new steps."""
AGAIN_S = 300.0
"""After so long a warning is printed again: one that was away meanwhile, or one because of which nothing moves."""
STANDSTILL = frozenset({"no-environment", "no-step", "rank-stalled", "failed", "unhealthy"})
"""Beginnings of the ids of warnings that may keep a run from its next step."""


@dataclass(slots=True, kw_only=True)
class Training:
    """A run as far as it was read, and what of it was printed. Times are monotonic, but for `now`."""

    settings: RunSettings
    status: RunStatus | None = None
    history: MetricHistory = field(default_factory=MetricHistory)
    _metric_warnings: tuple[Warning, ...] = ()
    _moved_at: float = -math.inf
    _told_step: int | None = None
    _told_at: float = -math.inf
    _warned_at: dict[str, float] = field(default_factory=dict)
    """By id of a warning: when it was printed."""
    _seen_at: dict[str, float] = field(default_factory=dict)
    """When it was last there."""

    def receive(self, message: Snapshot | Event | Bye) -> None:
        """Process a message of the supervisor."""
        if isinstance(message, Snapshot):
            self.status = message.status
        elif isinstance(message, Bye):
            self.status = self.status and self.status.model_copy(update={"state": message.state})
        elif self.status is not None:
            self.status = after_event(self.status, message)

    def extend(self, chunk: MetricsChunk, at: float) -> None:
        """Process what was added to the metrics."""
        if chunk.lines or chunk.is_restarted:
            self.history = extended(MetricHistory() if chunk.is_restarted else self.history, chunk.lines)
            self._metric_warnings = tuple(diagnose(self.history.lines, None, self.settings))
            self._moved_at = at

    def due(self, *, now: float, at: float) -> Iterator[str]:
        """What is to be printed now.

        Args:
            now: Unix time.
            at: monotonic time.
        """
        if self.status is None:
            return
        last = self._last
        if last is not None and last.step != self._told_step and at - self._told_at >= PROGRESS_S:
            yield self._progress(is_live=True)
            self._told_step, self._told_at = last.step, at
        for warning in merged_warnings(self.status, self._metric_warnings, self.history.lines, now):
            is_new = at - self._seen_at.get(warning.id, -math.inf) >= AGAIN_S
            self._seen_at[warning.id] = at
            quiet_since = max(self._moved_at, self._warned_at.get(warning.id, -math.inf))
            is_stuck = warning.id.partition(":")[0] in STANDSTILL and at - quiet_since >= AGAIN_S
            if is_new or is_stuck:
                yield warning_text(warning)
                self._warned_at[warning.id] = at

    def result(self, run_folder: Path) -> Iterator[str]:
        """What the run came to, and after its last step the commands that come next; nothing before the first one."""
        if self._last is None or self.status is None:
            return
        yield self._progress(is_live=False)
        if self.status.state is not RunState.FINISHED:  # its last notice is the command that resumes it
            return
        yield what_comes_next(run_folder)

    @property
    def _last(self) -> MetricsLine | None:
        """The newest step of this life of the run: a run that was resumed has those of earlier ones."""
        last = self.history.last
        began_at = (self.status.started_at if self.status else None) or 0.0
        return None if last is None or last.time < began_at else last

    def _progress(self, *, is_live: bool) -> str:
        """`step 12/150  reward 0.312  eval/avg@4 0.640 ± 0.012  0.4s a step  3m left`; what is unknown is left out."""
        lines = self.history.lines
        progress = progress_of(lines, self.settings.training_steps, is_live=is_live)
        reward, step_s = reward_name(lines), usual_step_s(lines)
        evaluation = next(iter(evaluated_names(names_of(lines))), None)
        means = None if reward is None else summarized(lines, reward, WINDOW)
        scores = None if evaluation is None else summarized(lines, evaluation)
        parts = (
            f"step {progress.of_steps}",
            means and f"reward {means.final.value:.3f}",
            scores and f"{evaluation} {score_text(scores.final)}",
            step_s and f"{duration_text(step_s)} a step",
            progress.left,
        )
        return "  ".join(part for part in parts if part)


class TrainingFollower:
    """Reads the metrics of a run as they grow, and prints what is due."""

    def __init__(self, run_folder: Path, say: Callable[[str], None]) -> None:
        self._folder = run_folder
        self._say = say
        self._tail = MetricsTail(run_folder / METRICS_FILE)
        self.training = Training(settings=read_settings(run_folder))

    async def follow(self) -> None:
        """Print until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self._read()
            for line in self.training.due(now=time.time(), at=time.monotonic()):
                self._say(line)

    async def finish(self) -> None:
        """Print what the run came to."""
        await self._read()
        for line in self.training.result(self._folder):
            self._say(line)

    async def _read(self) -> None:
        with suppress(OSError):  # a folder that was deleted, a disk that does not answer
            while True:
                chunk = await asyncio.to_thread(self._tail.read)
                self.training.extend(chunk, time.monotonic())
                if not chunk.has_more:
                    return
