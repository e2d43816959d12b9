"""Learning rates: a pure function of the step. Holds no optimizer and no state, so a resumed run needs none."""

from __future__ import annotations

import math
from typing import Literal, assert_never

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int, *, peak: float, warmup_steps: int = 0, schedule: Schedule = "constant", total_steps: int | None = None
) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Rises as peak (step + 1) / warmup_steps, so that no step is wasted at 0. From step `warmup_steps` on it stays
    (`constant`), or falls along a line or half a cosine from the peak to 0, which it would reach at `total_steps`,
    one after the last. Steps beyond that get 0.

    Raises:
        ValueError: negative numbers, or a falling schedule without `total_steps` above `warmup_steps`.
    """
    if step < 0 or warmup_steps < 0 or not 0 <= peak < math.inf:
        raise ValueError(
            f"step = {step}, warmup_steps = {warmup_steps}, peak = {peak}: none may be negative or infinite"
        )
    if schedule != "constant" and (total_steps is None or total_steps <= warmup_steps):
        raise ValueError(
            f"schedule = {schedule!r} with total_steps = {total_steps} and warmup_steps = {warmup_steps}: "
            "a falling schedule needs more steps than its warm-up"
        )
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant" or total_steps is None:
        return peak
    done = min((step - warmup_steps) / (total_steps - warmup_steps), 1.0)
    match schedule:
        case "linear":
            return peak * (1 - done)
        case "cosine":
            return peak * (1 + math.cos(math.pi * done)) / 2
        case _:
            assert_never(schedule)
