"""What the alignment screen knows: which steps it looks at, what was measured in them, and what that means. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeVar

from grpo_engine.diagnosis.evidence import RunSettings
from grpo_engine.diagnosis.finding import Finding
from grpo_engine.diagnosis.token_differences import AlignmentNumbers
from grpo_engine.wire.metrics import MetricsLine
from grpo_tui.view.alignment.ratios import Ratios

LAST_STEPS = 10
ChoiceT = TypeVar("ChoiceT", bound=StrEnum)


class Window(StrEnum):
    """Which steps are looked at; each ends at the newest one, or at the one that was chosen."""

    LAST = "last 10 steps"
    ONE = "one step"
    ALL = "all steps"


class Page(StrEnum):
    """What is shown where not everything has room."""

    CHARTS = "charts"
    TOKENS = "worst tokens"
    PLACES = "position and version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the groups of a window say."""

    numbers: AlignmentNumbers | None
    """None where there is no group, or none with both log-probabilities."""
    ratios: Ratios | None = None
    findings: tuple[Finding, ...] = ()
    num_groups_known: int = 0
    """In the window; `numbers` may be of fewer, evenly taken."""
    newest_step: int | None = None
    """Of the file, up to the moment that is looked at."""
    why_none: str = ""
    """In words, where there are no numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentView:
    """What the alignment screen knows."""

    window: Window = Window.LAST
    until_step: int | None = None
    """The last step that is looked at; None is the newest, whatever comes."""
    page: Page = Page.CHARTS
    first_token: int = 0
    """The first of the worst tokens that is in sight."""
    settings: RunSettings = field(default_factory=RunSettings)
    measured: Measured | None = None
    """None until the recorded groups were looked at."""


class AlignmentChange:
    """Base of all that changes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTurned(AlignmentChange):
    """The next kind of window was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMoved(AlignmentChange):
    """The window is to end so many steps later."""

    by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestWanted(AlignmentChange):
    """The window is to end at the newest step again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTurned(AlignmentChange):
    """Another page was asked for."""

    page: Page | None = None
    """None: the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensScrolled(AlignmentChange):
    """The list of worst tokens is to begin so many further down."""

    by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsMeasured(AlignmentChange):
    """The groups of the window were read."""

    measured: Measured
    settings: RunSettings


def after(alignment: AlignmentView, change: AlignmentChange) -> AlignmentView:
    """What it is after a change."""
    match change:
        case WindowTurned():
            return replace(alignment, window=_next(Window, alignment.window), first_token=0)
        case PageTurned():
            return replace(alignment, page=change.page or _next(Page, alignment.page))
        case StepMoved():
            return _moved(alignment, change.by)
        case NewestWanted():
            return replace(alignment, until_step=None, first_token=0)
        case TokensScrolled():
            numbers = alignment.measured and alignment.measured.numbers
            last = len(numbers.worst) - 1 if numbers else 0
            return replace(alignment, first_token=min(max(0, alignment.first_token + change.by), max(0, last)))
        case GroupsMeasured():
            return replace(alignment, measured=change.measured, settings=change.settings)
    return alignment


def _moved(alignment: AlignmentView, by: int) -> AlignmentView:
    newest = alignment.measured.newest_step if alignment.measured else None
    if newest is None:
        return alignment
    wanted = max(1, (newest if alignment.until_step is None else alignment.until_step) + by)
    return replace(alignment, until_step=None if wanted >= newest else wanted, first_token=0)


def _next(choices: type[ChoiceT], now: ChoiceT) -> ChoiceT:
    every = list(choices)
    return every[(every.index(now) + 1) % len(every)]


def trained_version(step: int, lines: Sequence[MetricsLine]) -> int | None:
    """The policy version whose weights scored a step; None where the run says no versions.

    A line says the version after its step: one more than the one that was trained. A run without metrics counts its
    steps. Where no line has `rollout/staleness_mean`, no group said the version that sampled it.

    Args:
        lines: of `metrics.jsonl`, in order of their steps.
    """
    steps = [line for line in lines if line.step > 0]
    if steps and not any("rollout/staleness_mean" in line.metrics for line in steps):
        return None
    near = min(lines, key=lambda line: (abs(line.step - (step - 1)), -line.step), default=None)
    return step - 1 if near is None else max(0, near.policy_version + step - 1 - near.step)


def began_with(lines: Sequence[MetricsLine]) -> float | None:
    """Mean magnitude of the differences when a run began: the least of its first steps, before training moved it."""
    values = [line.metrics["alignment/diff_abs_mean"] for line in lines if "alignment/diff_abs_mean" in line.metrics]
    return min(values[:3], default=None)
