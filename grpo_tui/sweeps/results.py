"""What a sweep came to: a row for each point, and one for each combination of settings over its seeds. Pure.

The error of a combination is the standard error over its seeds, where it has several; of a single run, that of its
evaluation over prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Any, Literal

from grpo_engine.wire.metrics import MetricsLine
from grpo_tui.sweeps.grid import shown_setting
from grpo_tui.view.csv_text import csv_text
from grpo_tui.view.metrics.summary import WINDOW, Score, Summary, evaluated_names, names_of, reward_name, summarized


@dataclass(frozen=True, slots=True, kw_only=True)
class PointResult:
    """One run of a sweep."""

    point: int
    settings: Mapping[str, Any]
    seed: int | None
    state: str
    run: str | None = None
    folder: str | None = None
    steps: int | None = None
    reward: float | None = None
    """At the end, the mean over `WINDOW` steps."""
    best_reward: float | None = None
    evaluation: str | None = None
    """Name of the score on held-out prompts."""
    score: float | None = None
    """At the end."""
    score_error: float | None = None
    """Standard error over prompts."""
    best_score: float | None = None
    tokens: int | None = None
    """That were trained on, prompts included."""
    hours: float | None = None
    """From the first start to the end, or until now."""
    warnings: tuple[str, ...] = ()
    reason: str | None = None
    """Why it failed or was ended early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsResult:
    """One combination of settings, over the seeds that finished."""

    settings: Mapping[str, Any]
    num_runs: int
    num_finished: int
    reward: float | None
    reward_error: float | None
    """Standard error over seeds; None for a single run."""
    best_reward: float | None
    """Mean of the best of each run."""
    evaluation: str | None
    score: float | None
    score_error: float | None
    error_over: Literal["seeds", "prompts"] | None
    """What `score_error` is the standard error over."""
    best_score: float | None
    tokens: int | None
    hours: float | None
    """Sums over all runs of it."""
    warnings: tuple[str, ...]
    runs: tuple[str, ...]
    reason: str | None = None
    """Why none of them finished."""


def measured(lines: Sequence[MetricsLine]) -> dict[str, Any]:
    """The part of a `PointResult` that a run's metrics tell."""
    name = reward_name(lines)
    reward = None if name is None else summarized(lines, name, WINDOW)
    evaluation = next(iter(evaluated_names(names_of(lines))), None)
    scores = None if evaluation is None else summarized(lines, evaluation)
    final = _final(scores)
    return {
        "steps": lines[-1].step if lines else None,
        "reward": _value(_final(reward)),
        "best_reward": _value(None if reward is None else reward.best),
        "evaluation": evaluation,
        "score": _value(final),
        "score_error": None if final is None else final.error,
        "best_score": _value(None if scores is None else scores.best),
        "tokens": _tokens(lines),
    }


def objective(point: PointResult) -> float | None:
    """What is best where it is greatest: the evaluation of a run, or its reward where nothing was evaluated."""
    return point.reward if point.score is None else point.score


def by_settings(points: Sequence[PointResult]) -> list[SettingsResult]:
    """A row for each combination, the best one first: by its evaluation, or where there is none by its reward."""
    groups: dict[str, list[PointResult]] = {}
    for each in points:
        groups.setdefault(repr(sorted(each.settings.items())), []).append(each)
    rows = [_over_seeds(group) for group in groups.values()]
    has_scores = any(row.score is not None for row in rows)
    return sorted(rows, key=lambda row: _rank(row.score if has_scores else row.reward))


def _rank(value: float | None) -> float:
    return float("inf") if value is None else -value


def _over_seeds(group: Sequence[PointResult]) -> SettingsResult:
    finished = [each for each in group if each.state == "finished"]
    reward, reward_error = _mean(finished, "reward")
    score, score_error = _mean(finished, "score")
    over: Literal["seeds", "prompts"] | None = None if score_error is None else "seeds"
    if score_error is None and len(finished) == 1 and finished[0].score_error is not None:
        score_error, over = finished[0].score_error, "prompts"
    return SettingsResult(
        settings=group[0].settings,
        num_runs=len(group),
        num_finished=len(finished),
        reward=reward,
        reward_error=reward_error,
        best_reward=_mean(finished, "best_reward")[0],
        evaluation=next((each.evaluation for each in finished if each.evaluation), None),
        score=score,
        score_error=score_error,
        error_over=over,
        best_score=_mean(finished, "best_score")[0],
        tokens=_sum(group, "tokens"),
        hours=_sum(group, "hours"),
        warnings=tuple(dict.fromkeys(warning for each in group for warning in each.warnings)),
        runs=tuple(each.run for each in group if each.run is not None),
        reason=None if finished else next((f"{each.state}: {each.reason}" for each in group if each.reason), None),
    )


def _mean(group: Sequence[PointResult], name: str) -> tuple[float | None, float | None]:
    """The mean and its standard error."""
    values = [value for each in group if (value := getattr(each, name)) is not None]
    if not values:
        return None, None
    return fmean(values), stdev(values) / sqrt(len(values)) if len(values) > 1 else None


def _sum(group: Sequence[PointResult], name: str) -> Any:
    values = [value for each in group if (value := getattr(each, name)) is not None]
    return sum(values) if values else None


def _final(summary: Summary | None) -> Score | None:
    return None if summary is None else summary.final


def _value(score: Score | None) -> float | None:
    return None if score is None else score.value


def _tokens(lines: Sequence[MetricsLine]) -> int | None:
    rates = [
        line.metrics["train/tokens_per_second"] * line.metrics["train/step_time"]
        for line in lines
        if {"train/tokens_per_second", "train/step_time"} <= line.metrics.keys()
    ]
    return round(sum(rates)) if rates else None


def to_csv(rows: Sequence[PointResult] | Sequence[SettingsResult]) -> str:
    """Rows as CSV: a column for each setting, then the rest; lists are separated by spaces, unknown is empty."""
    keys = list(dict.fromkeys(key for row in rows for key in row.settings))
    records = []
    for row in rows:
        document = asdict(row)
        settings = document.pop("settings")
        shown = {key: shown_setting(key, settings[key]) for key in settings}
        rest = {name: " ".join(each) if isinstance(each, tuple) else each for name, each in document.items()}
        records.append({**shown, **rest})
    names = [name for name in records[0] if name not in keys] if records else []
    first = names[:1] if names[:1] == ["point"] else []
    return csv_text([*first, *keys, *names[len(first) :]], records)
