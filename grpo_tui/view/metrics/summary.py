"""What the metrics of a run come to: its reward and its evaluations, at the end and at their best. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from grpo_engine.wire.metrics import MetricsLine
from grpo_tui.view.metrics.names import in_groups, is_evaluation, measured_as

REWARD = "reward/mean"
WINDOW = 10
"""Steps that a reward is averaged over: that of one batch is mostly noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A measured value."""

    step: int
    """The last that it is from."""
    value: float
    error: float | None = None
    """Its standard error, where it was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One metric of a run; the greatest value is the best."""

    name: str
    first: Score
    final: Score
    best: Score


def reward_name(lines: Sequence[MetricsLine]) -> str | None:
    """The run's name for the mean reward; None where it has none."""
    return measured_as(REWARD, names_of(lines))


def evaluated_names(names: Iterable[str]) -> list[str]:
    """The scores on held-out prompts among metrics: of all environments together first, then of each."""
    scores = (name for name in names if is_evaluation(name) and "@" in name and not name.endswith("_se"))
    return sorted(in_groups(scores), key=lambda name: name.count("/"))


def names_of(lines: Iterable[MetricsLine]) -> set[str]:
    """Every metric that was measured."""
    return set().union(*(line.metrics.keys() for line in lines))


def summarized(lines: Sequence[MetricsLine], name: str, window: int = 1) -> Summary | None:
    """A metric at its first and last measurement, and at its best; None where it was not measured.

    Args:
        window: measurements that each value is the mean of; fewer where there are fewer.
    """
    scores = [score for line in lines if (score := score_at(line, name)) is not None]
    if not scores:
        return None
    num = min(window, len(scores))
    means = [_mean(scores[end - num : end]) for end in range(num, len(scores) + 1)]
    return Summary(name=name, first=means[0], final=means[-1], best=max(means, key=lambda score: score.value))


def score_at(line: MetricsLine, name: str) -> Score | None:
    """A metric of one step, with its standard error; None where it was not measured."""
    value = line.metrics.get(name)
    return None if value is None else Score(step=line.step, value=value, error=line.metrics.get(f"{name}_se"))


def _mean(scores: Sequence[Score]) -> Score:
    """The mean, with an error where it is of one score alone."""
    last = scores[-1]
    return Score(
        step=last.step, value=fmean(score.value for score in scores), error=last.error if len(scores) == 1 else None
    )


def score_text(score: Score | None) -> str:
    """`0.727 ± 0.018`; a dash where there is none."""
    if score is None:
        return "–"
    return f"{score.value:.3f}" + ("" if score.error is None else f" ± {score.error:.3f}")
