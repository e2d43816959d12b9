"""Whether two lists of log-probabilities are of the same tokens under the same distribution, and if not, why not.

Pure and torch-free: the sampler's values and what the trainer makes of the same tokens go in, findings come out. Lists
are `[completion][token]`; a difference is trainer minus sampler, in nats; |Δ| is its magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from grpo_engine.check.findings import Finding, Line

Values = Sequence[Sequence[float]]
"""`[completion][token]`."""

CLEARLY = 3.0
"""An explanation counts where it leaves less than one third of the difference."""
ROUNDING = 1e-4
"""A log-probability may be above 0 by this much."""
LOWEST = -9998.0
"""Servers say -9999 for minus infinity: a token of probability zero was not sampled."""
_NUM_WORST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseBand:
    """What arithmetic alone does to log-probabilities, between two programs with the same weights."""

    dtype: str
    normal: float
    """Mean |Δ| up to which all is well."""
    tolerable: float
    """Mean |Δ| up to which it may still be arithmetic."""
    outlier: float
    """|Δ| of one token that arithmetic does not explain."""


_BANDS = (
    NoiseBand(dtype="bfloat16", normal=0.03, tolerable=0.1, outlier=1.5),
    NoiseBand(dtype="float16", normal=0.006, tolerable=0.04, outlier=0.5),
    NoiseBand(dtype="float32", normal=0.001, tolerable=0.01, outlier=0.05),
)
"""The coarsest first. bfloat16: 0.005 to 0.02 is usual for models of 1 to 8 billion parameters."""


class Scored(NamedTuple):
    """What the trainer makes of completions."""

    logprobs: Values
    entropies: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Sampled completions, as the sampler and as the trainer sees them."""

    server: Values
    """As the server reported them."""
    trainer: Values
    """By the convention that the server declares."""
    groups: Sequence[int]
    """`[completion]`: number of the request that it answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """What either side would say if something were otherwise."""

    key: str
    label: str
    """As in "it fits, if …"."""
    cause: str
    advice: str
    trainer: Values
    server: Values | None = None
    """None: as it was reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far two lists are apart."""

    mean: float
    abs_mean: float
    largest: float
    num_tokens: int
    worst: tuple[tuple[int, int], ...]
    """(completion, token) of the largest magnitudes, the largest first."""


def noise_band(dtypes: Iterable[str]) -> NoiseBand:
    """The band of the coarsest of these types; an unknown one counts as bfloat16."""
    known = {band.dtype: place for place, band in enumerate(_BANDS)}
    return _BANDS[min((known.get(dtype, 0) for dtype in dtypes), default=0)]


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
    whose_weights: str,
) -> Finding:
    """Whether trainer and sampler agree on sampled tokens.

    Args:
        alternatives: what else to try where they do not; shifted lists and swapped completions are always tried.
        describe: (completion, token) → the token in words, for the worst ones.
        whose_weights: what to look at where nothing else explains it.
    """
    if (bad := _impossible(reading.server)) is not None:
        row, column = bad
        return Line("alignment").fail(
            f"the server reports {reading.server[row][column]:g} for {describe(row, column)}, which is no "
            "log-probability of a sampled token",
            cause="the server's numbers overflow, or are not log-probabilities",
            advice="serve in bfloat16 or float32 rather than float16, and look at the server's log",
        )
    seen = difference(reading.trainer, reading.server)
    line = Line("alignment", {"diff_mean": seen.mean, "diff_abs_mean": seen.abs_mean, "diff_max": seen.largest})
    text = (
        f"mean |Δ| {seen.abs_mean:.2g} (mean {seen.mean:+.2g}, largest {seen.largest:.2g}) over "
        f"{seen.num_tokens:,} tokens; for {band.dtype} up to {band.normal:g} is normal"
    )
    if seen.abs_mean <= band.normal and seen.largest <= band.outlier:
        return line.ok(text)
    if seen.abs_mean <= band.normal:
        found = line.warn(
            text,
            cause="single tokens are far off, though the rest agrees: a token that the server treats apart (forced, "
            "banned, an end token), or numbers at the edge of their type",
            advice="look at the tokens below; sample without min_tokens, logit_bias and stop_token_ids",
        )
    elif (best := _explanation(reading, alternatives)) is not None:
        left = _left(best, reading)
        found = line.fail(
            text,
            cause=f"{best.cause} (mean |Δ| is {left:.2g} {best.label})",
            advice=best.advice,
            fits=best.key,
            fits_abs_mean=left,
        )
    elif seen.abs_mean <= band.tolerable:
        found = line.warn(
            text,
            cause=f"more than {band.dtype} usually does, and nothing else fits: different kernels, or an output layer "
            "in low precision",
            advice="serve with --logprobs-mode processed, which computes the output layer in float32, or set "
            "--correction truncate",
        )
    else:
        found = line.fail(
            text,
            cause="nothing that was tried fits (temperature, shift, order, truncation), so most likely other weights: "
            f"{whose_weights}",
            advice="start the server with the same --model-name as the trainer, and restart it if it was used before",
        )
    worst = (
        f"trainer {reading.trainer[row][column]:.3f}, sampler {reading.server[row][column]:.3f}: "
        + describe(row, column)
        for row, column in seen.worst
    )
    return replace(found, details=tuple(worst))


def judge_order(
    reading: Reading, *, repeated: Sequence[tuple[Sequence[int], Sequence[int]]], band: NoiseBand
) -> Finding:
    """Whether tokens and log-probabilities of a group belong together, and answers come in a stable order.

    Args:
        reading: of groups of several completions each.
        repeated: (completion, the same one of the same request with the same seed, asked again).
    """
    line = Line("group order")
    declared = difference(reading.trainer, reading.server).abs_mean
    swapped = _swapped(reading)
    if swapped is not None and declared > band.normal and _left(swapped, reading) * CLEARLY <= declared:
        return line.fail(
            f"mean |Δ| {declared:.2g} as they come, {_left(swapped, reading):.2g} in another order",
            cause=swapped.cause,
            advice=swapped.advice,
        )
    first, again = [tuple(pair[0]) for pair in repeated], [tuple(pair[1]) for pair in repeated]
    if first != again and sorted(first) == sorted(again):
        return line.fail(
            f"the same request, with the same seed, brought the same {len(first)} completions in another order",
            cause="the server hands completions out as they finish, not as they are numbered",
            advice="sort the completions of an answer by their index before they are scored",
        )
    num_same = sum(left == right for left, right in zip(first, again, strict=True))
    seeded = (
        "the same completions in the same order"
        if num_same == len(first)
        else f"{num_same} of {len(first)} completions again: sums depend on what else is in the batch"
    )
    return line.ok(f"{len(set(reading.groups))} groups hold together; a seeded request brings {seeded}")


def _explanation(reading: Reading, alternatives: Sequence[Alternative]) -> Alternative | None:
    """The alternative that fits clearly better than what was declared; None where none does.

    Of those that fit equally well the first counts.
    """
    declared = difference(reading.trainer, reading.server).abs_mean
    tried = [(_left(each, reading), each) for each in (*alternatives, *_shifted(reading))]
    if (swapped := _swapped(reading)) is not None:
        tried.append((_left(swapped, reading), swapped))
    best = min(left for left, _ in tried)
    if best * CLEARLY > declared:
        return None
    return next(each for left, each in tried if left <= 1.2 * best + 1e-6)


def _left(alternative: Alternative, reading: Reading) -> float:
    """Mean |Δ| under the alternative; infinite where it leaves nothing to compare."""
    server = reading.server if alternative.server is None else alternative.server
    seen = difference(alternative.trainer, server)
    return seen.abs_mean if seen.num_tokens else math.inf


def _shifted(reading: Reading) -> Iterator[Alternative]:
    """As if the server's value `i` were that of token `i + 1`, or of `i - 1`."""
    but_first, but_last = slice(1, None), slice(None, -1)
    for by, whose, place, of_trainer, of_server in (
        (+1, "next", "previous", but_first, but_last),
        (-1, "previous", "next", but_last, but_first),
    ):
        yield Alternative(
            key=f"shift:{by:+d}",
            label=f"if every value is taken for the {whose} token's",
            cause=f"log-probs are shifted by one: each stands at the {place} token",
            advice="have the server report one log-prob a generated token, from the first to the end token",
            trainer=[row[of_trainer] for row in reading.trainer],
            server=[row[of_server] for row in reading.server],
        )


def _swapped(reading: Reading) -> Alternative | None:
    """As if completions of a group had changed places; None where every one fits its own place best."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(reading.groups):
        members.setdefault(group, []).append(row)
    placed: dict[int, int] = {}
    for rows in members.values():
        placed |= _best_places(reading, rows)
    num_moved = sum(left != right for left, right in placed.items())
    if num_moved == 0:
        return None
    return Alternative(
        key="order",
        label=f"if {num_moved} completions change places within their groups",
        cause="log-probs and tokens of a group are not of the same completions: the order is mixed up",
        advice="pair each completion's tokens with its own log-probs; with a stock vLLM, by the choice's index",
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
