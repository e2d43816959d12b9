"""Whether two lists of log-probabilities are of the same tokens under the same distribution, and if not, why not.

Pure and torch-free: the sampler's values and what the trainer makes of the same tokens go in, findings come out. Lists
are `[completion][token]`; a difference is trainer minus sampler, in nats; |Δ| is its magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from grpo_engine.check.findings import Finding, Numbers, fail, ok, warn
from grpo_engine.wire.inference import LogprobsMode

Values = Sequence[Sequence[float]]
"""`[completion][token]`."""

CLEARLY = 3.0
"""An explanation counts where it leaves less than one third of the difference."""
ROUNDING = 1e-4
"""A log-probability may be above 0 by this much."""
LOWEST = -9998.0
"""Servers say -9999 for minus infinity: a token of probability zero was not sampled."""
_NUM_WORST = 3
_NUM_DEVIATIONS = 4.5
"""Of its own spread, by which a mean may be off: one right sampler in a hundred thousand."""


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
    """What the trainer would say if something were otherwise."""

    key: str
    label: str
    """As in "it fits, if …"."""
    cause: str
    advice: str
    trainer: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far two lists are apart."""

    mean: float
    abs_mean: float
    largest: float
    num_tokens: int
    worst: tuple[tuple[int, int], ...]
    """(completion, token) of the largest magnitudes, the largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The alternative that fits best."""

    key: str
    label: str
    cause: str
    advice: str
    abs_mean: float
    """What is left of |Δ|."""


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


def explain(reading: Reading, alternatives: Sequence[Alternative]) -> Explanation | None:
    """The alternative that fits clearly better than what was declared; None where none does.

    Of those that fit equally well the first counts. Shifted lists and swapped completions are always tried.
    """
    declared = difference(reading.trainer, reading.server).abs_mean
    tried = [
        Explanation(
            key=each.key,
            label=each.label,
            cause=each.cause,
            advice=each.advice,
            abs_mean=difference(each.trainer, reading.server).abs_mean,
        )
        for each in alternatives
    ]
    tried += [_shifted(reading, by) for by in (1, -1)]
    if (swapped := _swapped(reading)) is not None:
        tried.append(swapped)
    best = min((each.abs_mean for each in tried), default=math.inf)
    if best * CLEARLY > declared:
        return None
    return next(each for each in tried if each.abs_mean <= 1.2 * best + 1e-6)


def judge_alignment(
    id: str,
    reading: Reading,
    band: NoiseBand,
    alternatives: Sequence[Alternative] = (),
    *,
    describe: Callable[[int, int], str],
    whose_weights: str,
) -> Finding:
    """Whether trainer and sampler agree on sampled tokens.

    Args:
        alternatives: what else to try where they do not.
        describe: (completion, token) → the token in words, for the worst ones.
        whose_weights: what to look at where nothing else explains it.
    """
    if (bad := _impossible(reading.server)) is not None:
        row, column = bad
        return fail(
            id,
            f"the server reports {reading.server[row][column]:g} for {describe(row, column)}, which is no "
            "log-probability of a sampled token",
            cause="the server's numbers overflow, or are not log-probabilities",
            advice="serve in bfloat16 or float32 rather than float16, and look at the server's log",
        )
    seen = difference(reading.trainer, reading.server)
    numbers: Numbers = {
        "diff_mean": seen.mean,
        "diff_abs_mean": seen.abs_mean,
        "diff_max": seen.largest,
        "tokens": seen.num_tokens,
        "normal_abs_mean": band.normal,
    }
    text = (
        f"mean |Δ| {seen.abs_mean:.2g} (mean {seen.mean:+.2g}, largest {seen.largest:.2g}) over "
        f"{seen.num_tokens:,} tokens; for {band.dtype} up to {band.normal:g} is normal"
    )
    worst = tuple(
        f"trainer {reading.trainer[row][column]:.3f}, sampler {reading.server[row][column]:.3f}: "
        + describe(row, column)
        for row, column in seen.worst
    )
    if seen.abs_mean <= band.normal:
        if seen.largest <= band.outlier:
            return ok(id, text, numbers=numbers)
        found = warn(
            id,
            text,
            cause="single tokens are far off, though the rest agrees: a token that the server treats apart (forced, "
            "banned, an end token), or numbers at the edge of their type",
            advice="look at the tokens below; sample without min_tokens, logit_bias and stop_token_ids",
            numbers=numbers,
        )
        return replace(found, details=worst)
    best = explain(reading, alternatives)
    if best is not None:
        found = fail(
            id,
            text,
            cause=f"{best.cause} (mean |Δ| is {best.abs_mean:.2g} {best.label})",
            advice=best.advice,
            numbers={**numbers, "fits": best.key, "fits_abs_mean": best.abs_mean},
        )
    elif seen.abs_mean <= band.tolerable:
        found = warn(
            id,
            text,
            cause=f"more than {band.dtype} usually does, and nothing else fits: different kernels, or an output layer "
            "in low precision",
            advice="serve with --logprobs-mode processed, which computes the output layer in float32, or set "
            "--correction truncate",
            numbers=numbers,
        )
    else:
        found = fail(
            id,
            text,
            cause=f"nothing that was tried fits (temperature, shift, order, truncation), so most likely other weights: "
            f"{whose_weights}",
            advice="start the server with the same --model-name as the trainer, and restart it if it was used before",
            numbers=numbers,
        )
    return replace(found, details=worst)


def judge_temperature(
    declared: LogprobsMode,
    *,
    server: Values,
    processed: Values,
    raw: Values,
    temperatures: Sequence[float],
    band: NoiseBand,
    is_declared: bool = True,
) -> Finding:
    """Whether the convention that the server declares is the one that its numbers follow.

    Args:
        server: sampled at `temperatures`, none of them 1.
        processed: the trainer's, its logits divided by the temperature.
        raw: the trainer's, not divided.
        is_declared: whether the server said it; a stock server says nothing, and is taken at its default.
    """
    id = "temperature"
    other: LogprobsMode = "raw" if declared == "processed" else "processed"
    by_mode: dict[LogprobsMode, Values] = {"processed": processed, "raw": raw}
    fit = {mode: difference(values, server).abs_mean for mode, values in by_mode.items()}
    gap = difference(processed, raw).abs_mean
    where = "at temperature " + " and ".join(f"{temperature:g}" for temperature in temperatures)
    said = f"declared {declared}" if is_declared else f"taken as {declared}, since the server does not say"
    text = f"{said}: mean |Δ| {fit[declared]:.2g} {where}, and {fit[other]:.2g} if it were {other}"
    numbers: Numbers = {"declared": declared, "abs_mean": fit[declared], "other_abs_mean": fit[other], "gap": gap}
    # Logits are divided, so that their noise is as well.
    limit = band.normal / min(1.0, *temperatures)
    if gap < CLEARLY * limit:
        if fit[declared] <= limit:
            return warn(
                id,
                f"{text}: too near to tell them apart",
                cause="the model is so sure of these answers that the temperature hardly changes them",
                advice="give questions with more than one good answer by --prompts, or more --check-samples",
                numbers=numbers,
            )
    elif fit[declared] <= limit:
        return ok(id, text, numbers=numbers)
    if fit[other] * CLEARLY <= fit[declared]:
        causes = {
            "raw": "the server reports log-probs before the temperature, or samples at temperature 1 whatever is asked",
            "processed": "the server reports log-probs after the temperature",
        }
        return fail(
            id,
            text,
            cause=f"{causes[other]}, so the trainer would divide by it {'once too often' if other == 'raw' else 'not'}",
            advice=f"have the server report what it declares: restart it with --logprobs-mode {declared}, or declare "
            f"logprobs_mode {other} where groups are made; at temperature 1 both are the same",
            numbers={**numbers, "fits": other},
        )
    return fail(
        id,
        text,
        cause="neither convention fits: the line on alignment tells more, or the server changes the distribution "
        "besides the temperature",
        advice="mend alignment at temperature 1 first; sample with top_p 1, top_k -1 and no penalties",
        numbers=numbers,
    )


def judge_sampler(seen: Mapping[float, tuple[Values, Values]]) -> Finding:
    """Whether tokens are drawn from the distribution that the trainer believes in, by the trainer's own numbers.

    What a sampler is surprised by, -log p, is on average its entropy. Truncation (top_p, top_k, min_p) and a lower
    temperature make it less, and no reported log-probability need show that.

    Args:
        seen: temperature → the trainer's log-probabilities of what was sampled at it, and its entropies there.
    """
    id = "sampling"
    each = {temperature: _surprise(*values) for temperature, values in seen.items()}
    worst = max(each, key=lambda temperature: abs(each[temperature].standard_errors))
    found = each[worst]
    text = (
        f"surprise {found.mean:.2f} where {found.entropy:.2f} is expected, {found.standard_errors:+.1f} standard "
        f"errors at temperature {worst:g}"
    )
    numbers: Numbers = {
        "temperature": worst,
        "surprise": found.mean,
        "entropy": found.entropy,
        "standard_errors": found.standard_errors,
    }
    if abs(found.standard_errors) <= _NUM_DEVIATIONS:
        return ok(
            id,
            f"tokens come as often as the policy says, within {abs(found.standard_errors):.1f} standard errors at "
            "every temperature",
            numbers=numbers,
        )
    narrower = found.mean < found.entropy
    return fail(
        id,
        text,
        cause=(
            "the sampler is narrower than the policy: top_p, top_k, min_p or a penalty is at work, perhaps from "
            "generation_config.json, or the temperature is lower than asked for"
            if narrower
            else "the sampler is broader than the policy: a higher temperature than asked for, or other weights"
        ),
        advice="sample with top_p 1 and top_k -1; start a stock vLLM with --generation-config vllm",
        numbers=numbers,
    )


def judge_order(
    reading: Reading, *, repeated: Sequence[tuple[Sequence[int], Sequence[int]]], band: NoiseBand
) -> Finding:
    """Whether tokens and log-probabilities of a group belong together, and answers come in a stable order.

    Args:
        reading: of groups of several completions each.
        repeated: (completion, the same one of the same request with the same seed, asked again).
    """
    id = "group order"
    swapped = _swapped(reading)
    declared = difference(reading.trainer, reading.server).abs_mean
    num_groups = len(set(reading.groups))
    if swapped is not None and declared > band.normal and swapped.abs_mean * CLEARLY <= declared:
        return fail(
            id,
            f"mean |Δ| {declared:.2g} as they come, {swapped.abs_mean:.2g} in another order",
            cause=swapped.cause,
            advice=swapped.advice,
            numbers={"abs_mean": declared, "swapped_abs_mean": swapped.abs_mean},
        )
    first, again = [tuple(pair[0]) for pair in repeated], [tuple(pair[1]) for pair in repeated]
    if first != again and sorted(first) == sorted(again):
        return fail(
            id,
            f"the same request, with the same seed, brought the same {len(first)} completions in another order",
            cause="the server hands completions out as they finish, not as they are numbered",
            advice="sort the completions of an answer by their index before they are scored",
        )
    num_same = sum(left == right for left, right in zip(first, again, strict=True))
    text = f"{num_groups} groups hold together"
    if num_same == len(first):
        return ok(
            id,
            f"{text}; a seeded request brings the same completions in the same order",
            numbers={"groups": num_groups},
        )
    return ok(
        id,
        f"{text}; a seeded request brought {num_same} of {len(first)} completions again: sums depend on what else "
        "is in the batch",
        numbers={"groups": num_groups, "repeated": num_same},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Surprise:
    mean: float
    """Of -log p of what was sampled."""
    entropy: float
    standard_errors: float
    """By which the first is above the second."""


def _surprise(logprobs: Values, entropies: Values) -> _Surprise:
    surplus = [
        -value - entropy
        for values, row in zip(logprobs, entropies, strict=True)
        for value, entropy in zip(values, row, strict=True)
    ]
    count = max(len(surplus), 1)
    mean = sum(surplus) / count
    deviation = math.sqrt(sum((value - mean) ** 2 for value in surplus) / max(count - 1, 1))
    entropy = sum(sum(row) for row in entropies) / count
    standard_errors = mean / (deviation / math.sqrt(count)) if deviation > 0 else 0.0
    return _Surprise(mean=entropy + mean, entropy=entropy, standard_errors=standard_errors)


def _shifted(reading: Reading, by: int) -> Explanation:
    """As if the server's value `i` were that of token `i + by`."""
    pairs = [
        (trainer[by:], server[: len(server) - by]) if by > 0 else (trainer[:by], server[-by:])
        for trainer, server in zip(reading.trainer, reading.server, strict=True)
    ]
    seen = difference([left for left, _ in pairs], [right for _, right in pairs])
    whose = "next" if by > 0 else "previous"
    return Explanation(
        key=f"shift:{by:+d}",
        label=f"if every value is taken for the {whose} token's",
        cause=f"log-probs are shifted by one: each stands at the {'previous' if by > 0 else 'next'} token",
        advice="have the server report one log-prob a generated token, from the first to the end token",
        abs_mean=seen.abs_mean if seen.num_tokens else math.inf,
    )


def _swapped(reading: Reading) -> Explanation | None:
    """As if completions of a group had changed places; None where every one fits its own place best."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(reading.groups):
        members.setdefault(group, []).append(row)
    placed: dict[int, int] = {}
    for rows in members.values():
        placed |= _best_places(reading, rows)
    if all(left == right for left, right in placed.items()):
        return None
    left, right = zip(*sorted(placed.items()), strict=True)
    num_moved = sum(a != b for a, b in placed.items())
    return Explanation(
        key="order",
        label=f"if {num_moved} completions change places within their groups",
        cause="log-probs and tokens of a group are not of the same completions: the order is mixed up",
        advice="pair each completion's tokens with its own log-probs; with a stock vLLM, by the choice's index",
        abs_mean=difference([reading.trainer[row] for row in left], [reading.server[row] for row in right]).abs_mean,
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
