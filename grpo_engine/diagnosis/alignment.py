"""The verdict on alignment: what makes trainer and inference disagree on sampled tokens, or that they agree.

One implementation for `grpo-engine check`, which samples with the same weights on both sides and can test explanations,
and for the recorded groups of a run.
"""

from __future__ import annotations

from collections.abc import Iterator

from grpo_engine.diagnosis.alignment_rules import ALIGNMENT_RULES, EQUAL
from grpo_engine.diagnosis.evidence import MIN_TOKENS, Evidence, noise_band
from grpo_engine.diagnosis.finding import Certainty, Finding
from grpo_engine.diagnosis.text import count_text, number_text

CLEARLY = 3.0
"""An explanation counts where it leaves less than one third of the difference."""
_CERTAINTY_RANK = {certainty: rank for rank, certainty in enumerate(Certainty)}


def diagnose_alignment(known: Evidence) -> tuple[Finding, ...]:
    """What makes trainer and inference disagree, the surest cause first; where they agree, a finding that says so."""
    if known.same_weights and known.is_noise:
        return (_healthy(known),)
    found = [*_tested(known), *(finding for rule in ALIGNMENT_RULES for finding in rule(known))]
    return tuple(sorted(found, key=lambda finding: _CERTAINTY_RANK[finding.certainty])) or (_without_sign(known),)


def _tested(known: Evidence) -> Iterator[Finding]:
    """The tested explanation that fits clearly better than what both sides declare; of equally good ones the first."""
    declared = known.numbers.all.abs_mean
    best = min((each.abs_mean for each in known.explanations), default=declared)
    if declared <= known.band.normal or best * CLEARLY > declared:
        return
    fit = next(each for each in known.explanations if each.abs_mean <= 1.2 * best + 1e-6)
    yield Finding(
        id="tested",
        severity="error",
        cause=fit.cause,
        text=f"mean |Δ| is {fit.abs_mean:.2g} {fit.label}",
        hint=fit.hint,
        numbers={"fits": fit.key, "fits_abs_mean": fit.abs_mean},
    )


def _without_sign(known: Evidence) -> Finding:
    """The verdict where no rule applies: by the size of the differences alone."""
    size = known.numbers.all.abs_mean
    if size >= known.limit:
        return _unexplained(known)
    if not known.same_weights:
        return _healthy(known)
    if size <= known.band.normal:
        return Finding(
            id="single-tokens",
            severity="warning",
            certainty=Certainty.LIKELY,
            cause="single tokens are far off",
            text="the rest agrees: the server treats a token differently (forced, banned, an end token), or numbers "
            "are at the edge of their type",
            hint="look at the tokens below; sample without min_tokens, logit_bias and stop_token_ids",
        )
    return Finding(
        id="noise",
        severity="warning",
        certainty=Certainty.POSSIBLE,
        cause=f"more noise than {known.band.dtype} usually has",
        text="nothing else fits: different kernels, or an output layer in low precision",
        hint="serve with --logprobs-mode processed, which computes the output layer in float32, or set "
        "--correction truncate",
    )


def _unexplained(known: Evidence) -> Finding:
    numbers, settings = known.numbers, known.settings
    part = known.judged
    dtypes = f", dtypes {' and '.join(settings.dtypes)}" if len(settings.dtypes) > 1 else ""
    if abs(part.mean) >= 0.3 * part.abs_mean:
        side = "lower" if part.mean < 0 else "higher"
        told = f"the trainer's are {side} on average ({part.mean:+.3f})"
    else:
        told = "in both directions"
    return Finding(
        id="weights",
        severity="error",
        certainty=Certainty.POSSIBLE,
        cause="the two sides have different weights",
        text=f"log-probs differ by {number_text(numbers.all.abs_mean)} per token (healthy: < {known.limit:g}), "
        f"{told}{dtypes}, without the sign of another cause",
        hint="the same --model-name and --dtype on both sides, then --weight-bridge-mode; with shared_vllm try "
        "--enforce-eager, with LoRA --lora-dropout 0",
    )


def _healthy(known: Evidence) -> Finding:
    numbers = known.numbers
    size = numbers.all.abs_mean
    fresh = numbers.fresh
    is_explained_by_age = (
        fresh is not None
        and fresh.num >= MIN_TOKENS
        and size >= EQUAL
        and len(numbers.by_age) > 1
        and fresh.abs_mean <= 0.3 * size
    )
    noise = noise_band(known.settings.dtypes) if known.settings.dtypes else known.band
    is_plain = is_explained_by_age or size < known.band.normal
    if is_explained_by_age:
        assert fresh is not None
        evidence = (
            f"tokens of the newest weights agree ({number_text(fresh.abs_mean)}); what differs "
            f"({number_text(size)} on average) is the age of the others, up to "
            f"{count_text(numbers.by_age[-1].high, 'version')}, and the ratio accounts for that"
        )
    elif size < EQUAL:
        evidence = f"log-probs are equal to the last digits: mean difference {number_text(size)} per token"
    elif size < noise.normal and abs(numbers.all.mean) <= 0.5 * size:
        evidence = (
            f"mean |difference| {number_text(size)} per token, as often above as below 0 "
            f"(mean {numbers.all.mean:+.4f}): the noise of {noise.dtype} and different kernels, which is harmless"
        )
    else:
        evidence = (
            f"mean |difference| {number_text(size)} per token (healthy: < {known.limit:g}), "
            f"mean {numbers.all.mean:+.4f}"
        )
        if numbers.by_age and numbers.by_age[0].low > 0:
            ago = count_text(numbers.by_age[0].low, "version")
            evidence += f"; all were sampled at least {ago} ago, which makes differences of this size"
    return Finding(
        id="healthy",
        severity="ok",
        certainty=Certainty.SURE if is_plain and numbers.all.num >= 100 else Certainty.LIKELY,
        cause="trainer and inference agree",
        text=evidence,
    )
