"""Whether tokens are drawn from the distribution that the trainer believes in, at temperatures other than 1 too.

Pure and torch-free, as `alignment` is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, pstdev

from grpo_engine.check.alignment import CLEARLY, NoiseBand, Scored, Values, difference
from grpo_engine.check.findings import Finding, Line
from grpo_engine.wire.inference import LogprobsMode

_NUM_DEVIATIONS = 4.5
"""Of its own spread, by which a mean may be off: one right sampler in a hundred thousand."""


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
    other: LogprobsMode = "raw" if declared == "processed" else "processed"
    by_mode: dict[LogprobsMode, Values] = {"processed": processed, "raw": raw}
    fit = {mode: difference(values, server).abs_mean for mode, values in by_mode.items()}
    gap = difference(processed, raw).abs_mean
    where = "at temperature " + " and ".join(f"{temperature:g}" for temperature in temperatures)
    said = f"declared {declared}" if is_declared else f"taken as {declared}, since the server does not say"
    text = f"{said}: mean |Δ| {fit[declared]:.2g} {where}, and {fit[other]:.2g} if it were {other}"
    line = Line("temperature", {"declared": declared, "abs_mean": fit[declared], "other_abs_mean": fit[other]})
    # Logits are divided, so that their noise is as well.
    limit = band.normal / min(1.0, *temperatures)
    if gap < CLEARLY * limit:
        if fit[declared] <= limit:
            return line.warn(
                f"{text}: too near to tell them apart",
                cause="the model is so sure of these answers that the temperature hardly changes them",
                advice="give questions with more than one good answer by --prompts, or more --check-samples",
            )
    elif fit[declared] <= limit:
        return line.ok(text)
    if fit[other] * CLEARLY <= fit[declared]:
        causes = {
            "raw": "the server reports log-probs before the temperature, or samples at temperature 1 whatever is asked",
            "processed": "the server reports log-probs after the temperature",
        }
        return line.fail(
            text,
            cause=f"{causes[other]}, so the trainer would divide by it {'once too often' if other == 'raw' else 'not'}",
            advice=f"have the server report what it declares: restart it with --logprobs-mode {declared}, or declare "
            f"logprobs_mode {other} where groups are made; at temperature 1 both are the same",
            fits=other,
        )
    return line.fail(
        text,
        cause="neither convention fits: the line on alignment tells more, or the server changes the distribution "
        "besides the temperature",
        advice="mend alignment at temperature 1 first; sample with top_p 1, top_k -1 and no penalties",
    )


def judge_sampler(seen: Mapping[float, Scored]) -> Finding:
    """Whether tokens are drawn from the distribution that the trainer believes in, by the trainer's own numbers.

    What a sampler is surprised by, -log p, is on average its entropy. Truncation (top_p, top_k, min_p) and a lower
    temperature make it less, and no reported log-probability need show that.

    Args:
        seen: temperature → what the trainer makes of what was sampled at it.
    """
    each = {temperature: _surprise(scored) for temperature, scored in seen.items()}
    worst = max(each, key=lambda temperature: abs(each[temperature].standard_errors))
    found = each[worst]
    text = (
        f"surprise {found.mean:.2f} where {found.entropy:.2f} is expected, {found.standard_errors:+.1f} standard "
        f"errors at temperature {worst:g}"
    )
    line = Line("sampling", {"surprise": found.mean, "entropy": found.entropy, "temperature": worst})
    if abs(found.standard_errors) <= _NUM_DEVIATIONS:
        return line.ok(
            f"tokens come as often as the policy says, within {abs(found.standard_errors):.1f} standard errors at "
            "every temperature",
        )
    narrower = found.mean < found.entropy
    return line.fail(
        text,
        cause=(
            "the sampler is narrower than the policy: top_p, top_k, min_p or a penalty is at work, perhaps from "
            "generation_config.json, or the temperature is lower than asked for"
            if narrower
            else "the sampler is broader than the policy: a higher temperature than asked for, or other weights"
        ),
        advice="sample with top_p 1 and top_k -1; start a stock vLLM with --generation-config vllm",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Surprise:
    mean: float
    """Of -log p of what was sampled."""
    entropy: float
    standard_errors: float
    """By which the first is above the second."""


def _surprise(scored: Scored) -> _Surprise:
    entropies = [entropy for row in scored.entropies for entropy in row]
    surplus = [-value - entropy for value, entropy in zip(chain(*scored.logprobs), entropies, strict=True)]
    excess, spread = fmean(surplus), pstdev(surplus)
    standard_errors = excess / spread * math.sqrt(len(surplus)) if spread > 0 else 0.0
    return _Surprise(mean=fmean(entropies) + excess, entropy=fmean(entropies), standard_errors=standard_errors)
