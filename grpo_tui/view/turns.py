"""Which phase a trainer that samples and trains in turn was in, and is in: stretches of time. Pure.

Each line of metrics has the seconds of the three phases that end with its step, in the order in which they happen, so
that lines after each other cover the time without gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_engine.serving.reporting import SHORT_WAIT_S
from grpo_engine.wire.metrics import PHASE_MEMORY_METRICS, PHASE_METRICS, MetricsLine
from grpo_engine.wire.supervisor import RunStatus, ServiceState, WaitsFor

PHASES = tuple(name.rpartition("/")[2] for name in PHASE_METRICS)
"""sampling, training, syncing: in this order in each step."""
REPORTED_WITHIN_S = SHORT_WAIT_S + 2.0
"""After so long a wait of the trainer is known."""
WAITS = {WaitsFor.BATCH: 0, WaitsFor.EVALUATION: 0, WaitsFor.UPDATE: 2}
"""The phase in which a trainer waits for something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """One phase of one step."""

    phase: int
    """Its place in `PHASES`."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The newest steps."""

    stretches: tuple[Stretch, ...]
    """In the order of time; three a step."""
    last: tuple[float, ...]
    """Seconds of each phase in the newest step."""
    memory_gb: tuple[float | None, ...]
    """At the end of each phase in the newest step."""

    @property
    def seconds(self) -> float:
        """Of all stretches."""
        return sum(each.seconds for each in self.stretches)


def turns_of(lines: Sequence[MetricsLine], num_steps: int) -> Turns | None:
    """The phases of the newest steps; None where sampling and training are at the same time."""
    measured = [line.metrics for line in lines[-num_steps:] if all(name in line.metrics for name in PHASE_METRICS)]
    if not measured:
        return None
    stretches = [
        Stretch(phase=phase, seconds=max(0.0, metrics[name]))
        for metrics in measured
        for phase, name in enumerate(PHASE_METRICS)
    ]
    newest = measured[-1]
    return Turns(
        stretches=tuple(stretches),
        last=tuple(newest[name] for name in PHASE_METRICS),
        memory_gb=tuple(newest.get(name) for name in PHASE_MEMORY_METRICS),
    )


def cells_of(turns: Turns, width: int) -> list[tuple[int, float, int]]:
    """(phase, seconds, cells) of each stretch that has a cell, on a line of `width` cells.

    Cell borders are rounded, so that no error adds up.
    """
    total, reached, placed = turns.seconds, 0.0, 0
    cells: list[tuple[int, float, int]] = []
    for each in turns.stretches:
        reached += each.seconds
        end = round(width * reached / total) if total else 0
        if end > placed:
            cells.append((each.phase, each.seconds, end - placed))
            placed = end
    return cells


def phase_now(status: RunStatus, last: MetricsLine, now: float) -> tuple[int, float | None] | None:
    """The phase that goes on, and since when, if known; None while a step is too short to tell."""
    trainers = [service for service in status.services if service.kind == "trainer"]
    if len(trainers) != 1 or trainers[0].state is not ServiceState.READY:
        return None
    [trainer] = trainers
    if trainer.waits_for is not None:
        phase = WAITS.get(trainer.waits_for)
        return None if phase is None else (phase, trainer.waits_since)
    return (PHASES.index("training"), None) if now - last.time > REPORTED_WITHIN_S else None
