"""How far a run is: its step, the steps that are left, and the time that they will take. Pure but for `read_progress`.

The duration of a step is the median from one line of metrics to the next, so that a pause, a restart or an evaluation
among them does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from grpo_engine.wire.metrics import MetricsLine
from grpo_tui.run_files.metrics import append_step, newest_lines
from grpo_tui.view.format import age_text
from grpo_tui.view.run_settings import read_settings

RECENT_STEPS = 20
MIN_SPANS = 3
"""Of fewer, the median may be a pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """None is unknown."""

    step: int | None = None
    """The newest; None before the first."""
    steps: int | None = None
    """With the last one the run ends (`training_steps`)."""
    steps_left: int | None = None
    time_left_s: float | None = None
    """Only of a live run."""

    @property
    def of_steps(self) -> str | None:
        """`12/150`; `12` where the end is unknown, and None before the first step."""
        if self.step is None:
            return None
        return f"{self.step:,}" if self.steps is None else f"{self.step:,}/{self.steps:,}"

    @property
    def left(self) -> str | None:
        """`3m left`; None where it is unknown."""
        return None if self.time_left_s is None else f"{age_text(self.time_left_s)} left"


def progress_of(lines: Sequence[MetricsLine], training_steps: int | None, *, is_live: bool) -> Progress:
    """How far a run is.

    Args:
        lines: of its newest steps, in rising order.
        training_steps: at which it ends; None where unknown.
        is_live: whether it goes on.
    """
    step = lines[-1].step if lines else None
    left = None if training_steps is None else max(0, training_steps - (step or 0))
    step_s = usual_step_s(lines) if is_live else None
    return Progress(
        step=step,
        steps=training_steps,
        steps_left=left,
        time_left_s=None if left is None or step_s is None else left * step_s,
    )


def usual_step_s(lines: Sequence[MetricsLine]) -> float | None:
    """Seconds from one step to the next in recent steps; None before the first."""
    spans = step_spans(lines)
    if len(spans) < MIN_SPANS:  # what the trainer measured has no pauses in it
        recent = lines[-RECENT_STEPS:]
        spans = [line.metrics[name] for line in recent if (name := "train/step_time") in line.metrics] or spans
    return median(spans) if spans else None


def step_spans(lines: Sequence[MetricsLine]) -> list[float]:
    """Seconds from each recent step to the next; thinned lines are several steps apart."""
    recent = [line for line in lines[-RECENT_STEPS - 1 :] if line.step > 0]
    spans = ((after.time - before.time) / (after.step - before.step) for before, after in pairwise(recent))
    return [span for span in spans if span > 0]  # the clock may have been set back


def read_progress(run_folder: Path, *, is_live: bool) -> Progress:
    """How far the run in a folder is; unknown where its files cannot be read."""
    lines: list[MetricsLine] = []
    try:
        for line in newest_lines(run_folder):
            append_step(lines, line)
    except OSError:
        return Progress()
    return progress_of(lines, read_settings(run_folder).training_steps, is_live=is_live)
