"""Whether two lists of log-probabilities are of the same tokens under the same distribution, and if not, why not.

Pure and torch-free: the sampler's values and what the trainer makes of the same tokens go in, findings come out. Lists
are `[completion][token]`; a difference is trainer minus sampler, in nats; |Δ| is its magnitude.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import NamedTuple

from grpo_engine.diagnosis.alignment import CLEARLY, diagnose_alignment
from grpo_engine.diagnosis.evidence import Evidence, Explanation, NoiseBand
from grpo_engine.diagnosis.finding import Check, Finding
from grpo_engine.diagnosis.token_differences import GroupTokens, alignment_numbers

Values = Sequence[Sequence[float]]
"""`[completion][token]`."""

ROUNDING = 1e-4
"""A log-probability may be above 0 by this much."""
LOWEST = -9998.0
"""Servers say -9999 for minus infinity: a token of probability zero was not sampled."""
_NUM_WORST = 3


class Scored(NamedTuple):
    """The trainer's scores of completions."""

    logprobs: Values
    entropies: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Log-probabilities of sampled completions, by sampler and trainer."""

    server: Values
    """As the server reported them."""
    trainer: Values
    """By the convention that the server declares."""
    groups: Sequence[int]
    """`[completion]`: number of the request that it answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """What either side would report under another cause."""

    key: str
    label: str
    """As in "it fits, if …"."""
    cause: str
    hint: str
    trainer: Values
    server: Values | None = None
    """None: as it was reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference of two lists."""

    mean: float
    abs_mean: float
    largest: float
    num_tokens: int
    worst: tuple[tuple[int, int], ...]
    """(completion, token) of the largest magnitudes, the largest first."""


def difference(trainer: Values, server: Values) -> Difference:
    """Trainer minus server.

    Raises:
        ValueError: the lists differ in shape.
    """
    places = [
        (left - right, row, column)
        for row, (lefts, rights) in enumerate(zip(trainer, server, strict=True))
        for column, (left, right) in enumerate(zip(lefts, rights, strict=True))
    ]
    largest_first = sorted(places, key=lambda place: -abs(place[0]))
    count = max(len(places), 1)
    return Difference(
        mean=sum(place[0] for place in places) / count,
        abs_mean=sum(abs(place[0]) for place in places) / count,
        largest=abs(largest_first[0][0]) if places else 0.0,
        num_tokens=len(places),
        worst=tuple((row, column) for _, row, column in largest_first[:_NUM_WORST]),
    )


def judge_alignment(
    reading: Reading,
    band: NoiseBand,
    alternatives: Sequence[Alternative],
    *,
    describe: Callable[[int, int], str],
    served_model: str,
) -> Finding:
    """Whether trainer and sampler agree on sampled tokens.

    Args:
        alternatives: causes to test where they disagree; shifted lists and swapped completions are always tested.
        describe: (completion, token) → the token in words, for the worst ones.
        served_model: which model the server says it serves, for the verdict that weights differ.
    """
    if (bad := _impossible(reading.server)) is not None:
        row, column = bad
        return Check("alignment").fail(
            f"the server reports {reading.server[row][column]:g} for {describe(row, column)}, which is not a "
            "log-probability of a sampled token",
            cause="the server's numbers overflow, or are not log-probabilities",
            hint="serve in bfloat16 or float32 rather than float16, and look at the server's log",
        )
    seen = difference(reading.trainer, reading.server)
    line = Check("alignment", {"diff_mean": seen.mean, "diff_abs_mean": seen.abs_mean, "diff_max": seen.largest})
    text = (
        f"mean |Δ| {seen.abs_mean:.2g} (mean {seen.mean:+.2g}, largest {seen.largest:.2g}) over "
        f"{seen.num_tokens:,} tokens; for {band.dtype} up to {band.normal:g} is normal"
    )
    numbers = alignment_numbers([_group(reading)])
    if numbers is None:
        return line.ok(text)
    tested = tuple(_explanation(each, reading) for each in (*alternatives, *_swapped(reading)))
    verdict, *_ = diagnose_alignment(Evidence(numbers=numbers, band=band, same_weights=True, explanations=tested))
    if verdict.severity == "ok":
        return line.ok(text)
    where = f"; {served_model}" if verdict.id == "weights" else ""
    worst = (
        f"trainer {reading.trainer[row][column]:.3f}, sampler {reading.server[row][column]:.3f}: "
        + describe(row, column)
        for row, column in seen.worst
    )
    return replace(
        verdict,
        id="alignment",
        text=text,
        cause=f"{verdict.cause}: {verdict.text}{where}",
        details=tuple(worst),
        numbers={**line.numbers, **verdict.numbers},
    )


def judge_order(
    reading: Reading, *, repeated: Sequence[tuple[Sequence[int], Sequence[int]]], band: NoiseBand
) -> Finding:
    """Whether tokens and log-probabilities of a group belong together, and answers come in a stable order.

    Args:
        reading: of groups of several completions each.
        repeated: (completion, the same one of the same request with the same seed, asked again).
    """
    line = Check("group order")
    declared = difference(reading.trainer, reading.server).abs_mean
    for swapped in (_explanation(each, reading) for each in _swapped(reading)):
        if declared > band.normal and swapped.abs_mean * CLEARLY <= declared:
            return line.fail(
                f"mean |Δ| {declared:.2g} as they come, {swapped.abs_mean:.2g} in another order",
                cause=swapped.cause,
                hint=swapped.hint,
            )
    first, again = [tuple(pair[0]) for pair in repeated], [tuple(pair[1]) for pair in repeated]
    if first != again and sorted(first) == sorted(again):
        return line.fail(
            f"the same request, with the same seed, returned the same {len(first)} completions in another order",
            cause="the server returns completions in the order of their ends, not of their indices",
            hint="sort the completions of an answer by their index before they are scored",
        )
    num_same = sum(left == right for left, right in zip(first, again, strict=True))
    seeded = (
        "the same completions in the same order"
        if num_same == len(first)
        else f"{num_same} of {len(first)} completions again: sums depend on what else is in the batch"
    )
    return line.ok(f"{len(set(reading.groups))} groups are in order; a repeated seeded request returns {seeded}")


def _group(reading: Reading) -> GroupTokens:
    """The reading as one group whose tokens were all sampled with the weights that scored them."""
    ends = tuple(accumulate(len(row) for row in reading.server))
    return GroupTokens(
        step=0,
        environment=None,
        training=array("d", chain(*reading.trainer)),
        inference=array("d", chain(*reading.server)),
        positions=array("l", chain(*(range(len(row)) for row in reading.server))),
        ages=None,
        ends=ends,
        is_complete=(False,) * len(ends),  # `judge_endings` looks at end tokens
        num_without=0,
        num_untrained=0,
        worst=(),
    )


def _explanation(alternative: Alternative, reading: Reading) -> Explanation:
    server = reading.server if alternative.server is None else alternative.server
    remaining = difference(alternative.trainer, server)
    return Explanation(
        key=alternative.key,
        label=alternative.label,
        cause=alternative.cause,
        hint=alternative.hint,
        abs_mean=remaining.abs_mean if remaining.num_tokens else math.inf,
    )


def _swapped(reading: Reading) -> Iterator[Alternative]:
    """As if completions of a group were swapped; nothing where each fits its own place best."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(reading.groups):
        members.setdefault(group, []).append(row)
    placed: dict[int, int] = {}
    for rows in members.values():
        placed |= _best_places(reading, rows)
    num_moved = sum(left != right for left, right in placed.items())
    if num_moved == 0:
        return
    yield Alternative(
        key="order",
        label=f"if {num_moved} completions are swapped within their groups",
        cause="log-probs and tokens of a group are not of the same completions: the order is wrong",
        hint="pair each completion's tokens with its own log-probs; with a stock vLLM, by the choice's index",
        trainer=[reading.trainer[row] for row in placed],
        server=[reading.server[row] for row in placed.values()],
    )


def _best_places(reading: Reading, rows: Sequence[int]) -> Mapping[int, int]:
    """Completion → whose values fit it best, each given away once, the nearest first; only equal lengths can fit."""
    costs = sorted(
        (difference([reading.trainer[left]], [reading.server[right]]).abs_mean, left != right, left, right)
        for left in rows
        for right in rows
        if len(reading.trainer[left]) == len(reading.server[right])
    )
    placed: dict[int, int] = {}
    for _, _, left, right in costs:
        if left not in placed and right not in placed.values():
            placed[left] = right
    return placed


def _impossible(values: Values) -> tuple[int, int] | None:
    for row, row_values in enumerate(values):
        for column, value in enumerate(row_values):
            if not math.isfinite(value) or value > ROUNDING or value <= LOWEST:
                return row, column
    return None
