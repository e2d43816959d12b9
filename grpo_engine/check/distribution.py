"""Whether tokens are sampled from the trainer's distribution, also at temperatures other than 1.

Pure and torch-free, as `alignment` is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, pstdev

from grpo_engine.check.alignment import Scored, Values, difference
from grpo_engine.diagnosis.alignment import CLEARLY
from grpo_engine.diagnosis.evidence import NoiseBand
from grpo_engine.diagnosis.finding import Check, Finding
from grpo_engine.wire.inference import LogprobsMode

_NUM_DEVIATIONS = 4.5
"""Standard errors by which a mean may be off: a false alarm in a hundred thousand."""


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
    """Whether the server's numbers follow the convention that it declares.

    Args:
        server: sampled at `temperatures`, none of them 1.
        processed: the trainer's, its logits divided by the temperature.
        raw: the trainer's, not divided.
        is_declared: whether the server said it; a stock server does not, so its default is assumed.
    """
    other: LogprobsMode = "raw" if declared == "processed" else "processed"
    by_mode: dict[LogprobsMode, Values] = {"processed": processed, "raw": raw}
    fit = {mode: difference(values, server).abs_mean for mode, values in by_mode.items()}
    gap = difference(processed, raw).abs_mean
    where = "at temperature " + " and ".join(f"{temperature:g}" for temperature in temperatures)
    said = f"declared {declared}" if is_declared else f"assumed {declared}, since the server declares nothing"
    text = f"{said}: mean |Δ| {fit[declared]:.2g} {where}, and {fit[other]:.2g} if it were {other}"
    line = Check("temperature", {"declared": declared, "abs_mean": fit[declared], "other_abs_mean": fit[other]})
    # Logits are divided, so that their noise is as well.
    limit = band.normal / min(1.0, *temperatures)
    if gap < CLEARLY * limit:
        if fit[declared] <= limit:
            return line.warn(
                f"{text}: too close to distinguish",
                cause="the distributions are so peaked that the temperature hardly changes them",
                hint="give questions with more than one good answer by --prompts, or more --check-samples",
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
            hint=f"have the server report what it declares: restart it with --logprobs-mode {declared}, or declare "
            f"logprobs_mode {other} where groups are made; at temperature 1 both are the same",
            fits=other,
        )
    return line.fail(
        text,
        cause="neither convention fits: see alignment, or the server changes the distribution by more than the "
        "temperature",
        hint="fix alignment at temperature 1 first; sample with top_p 1, top_k -1 and no penalties",
    )


def judge_sampler(seen: Mapping[float, Scored]) -> Finding:
    """Whether tokens are sampled from the trainer's distribution, by the trainer's own log-probabilities.

    The mean surprisal, -log p, equals the entropy. Truncation (top_p, top_k, min_p) and a lower temperature reduce it,
    even if the reported log-probabilities do not show it.

    Args:
        seen: temperature → the trainer's scores of completions that were sampled at it.
    """
    each = {temperature: _surprise(scored) for temperature, scored in seen.items()}
    worst = max(each, key=lambda temperature: abs(each[temperature].standard_errors))
    found = each[worst]
    text = (
        f"surprise {found.mean:.2f} where {found.entropy:.2f} is expected, {found.standard_errors:+.1f} standard "
        f"errors at temperature {worst:g}"
    )
    line = Check("sampling", {"surprise": found.mean, "entropy": found.entropy, "temperature": worst})
    if abs(found.standard_errors) <= _NUM_DEVIATIONS:
        return line.ok(
            f"token frequencies match the policy within {abs(found.standard_errors):.1f} standard errors at "
            "every temperature",
        )
    narrower = found.mean < found.entropy
    return line.fail(
        text,
        cause=(
            "the sampler is narrower than the policy: top_p, top_k, min_p or a penalty applies, perhaps from "
            "generation_config.json, or the temperature is lower than asked for"
            if narrower
            else "the sampler is broader than the policy: a higher temperature than asked for, or other weights"
        ),
        hint="sample with top_p 1 and top_k -1; start a stock vLLM with --generation-config vllm",
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
