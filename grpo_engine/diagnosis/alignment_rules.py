"""Causes of differences between trainer and inference: each rule looks for one, and names the flag to change.

Each cause has a sign of its own (a scaling, a shift, a place in the completion, an age), so that a rule does not depend
on the size of the differences alone. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from itertools import pairwise

from grpo_engine.diagnosis.evidence import MIN_TOKENS, Evidence
from grpo_engine.diagnosis.finding import Certainty, Finding
from grpo_engine.diagnosis.text import RESTART_INFERENCE, count_text, number_text
from grpo_engine.diagnosis.token_differences import Part, PartAt

EQUAL = 1e-4
"""Below it both sides did the same arithmetic."""
FEW = 5
MIN_AT_EDGE = 4
"""First or last tokens, of which each completion has one."""
EDGE_LIMIT = 0.3
EDGE_FACTOR = 5
SCALED_LOW, SCALED_HIGH = 0.9, 1.11
"""A slope outside is a scaling …"""
FAR_SCALED_LOW, FAR_SCALED_HIGH = 0.8, 1.25
"""… and one outside these is also where no token is fresh."""
TIGHT = 0.93
"""Correlation from which the trainer's log-probabilities lie on a line."""
SHIFTED = 0.4
"""What remains of the differences when a shift explains them."""
ONE_SIDED = 0.97
GROWTH = 2.5
BIAS = 0.3
"""Share of the differences' magnitude that is on one side, from which they are not noise."""
OLD_VERSIONS = 4
MIXTURE = re.compile(r"moe|mixtral|\dx\d+b|-a\d+(\.\d+)?b|deepseek-v|gpt-oss", re.IGNORECASE)
"""Names of mixtures of experts."""

Rule = Callable[[Evidence], Iterator[Finding]]


def missing_logprobs(known: Evidence) -> Iterator[Finding]:
    """One side has no log-probabilities for many tokens."""
    numbers = known.numbers
    share = numbers.num_without / (numbers.num_without + numbers.all.num)
    if share >= 0.05:
        yield Finding(
            id="missing",
            severity="error",
            certainty=Certainty.SURE,
            cause="log-probs are missing",
            text=f"{100 * share:.0f}% of the trained tokens have no inference log-prob (it is positive or no "
            "number), so their ratio means nothing",
            hint="the environment must ask for them: --openai.server_type vllm, not openai, of a server with /generate",
        )


def shifted_by_one(known: Evidence) -> Iterator[Finding]:
    """The numbers belong to the token beside."""
    shift = known.numbers.shift
    if shift is None or shift.apart < known.limit or known.numbers.all.num < MIN_TOKENS:
        return
    best = min(shift.later, shift.earlier)
    if best <= SHIFTED * shift.apart:
        where = "the next token" if shift.later < shift.earlier else "the token before"
        yield Finding(
            id="shifted",
            severity="error",
            certainty=Certainty.SURE,
            cause="log-probs are shifted by one token",
            text=f"inference's log-probs fit {where}: so placed, the difference falls from "
            f"{number_text(shift.apart)} to {number_text(best)}",
            hint="the environment must post tokens, masks and inference_logprobs of one length, each log-prob at the "
            "token that was sampled; stock environments: --openai.server_type vllm",
            numbers={"fits": f"shift:{1 if shift.later < shift.earlier else -1:+d}", "fits_abs_mean": best},
        )


def end_token(known: Evidence) -> Iterator[Finding]:
    """Only the token that ends a completion differs."""
    ends, inner = known.numbers.ends, known.numbers.inner
    if _stands_out(ends, inner, known.limit):
        assert ends is not None
        assert inner is not None
        side = "the trainer finds it less likely" if ends.mean < 0 else "inference found it less likely"
        yield Finding(
            id="end-token",
            severity="error",
            certainty=Certainty.SURE if ends.num >= MIN_TOKENS else Certainty.LIKELY,
            cause="the end token is scored differently",
            text=f"log-probs of last tokens differ by {number_text(ends.abs_mean)}, the others by "
            f"{number_text(inner.abs_mean)}; {side}",
            hint="both need the same end token: one --model-name for trainer, server and environment (its "
            "generation_config and chat template); a text in --stop that cuts the end off must not be trained on",
        )


def joined_text(known: Evidence) -> Iterator[Finding]:
    """Only the first token after the prompt differs."""
    firsts, inner = known.numbers.firsts, known.numbers.inner
    if _stands_out(firsts, inner, known.limit):
        assert firsts is not None
        assert inner is not None
        yield Finding(
            id="joint",
            severity="error",
            certainty=Certainty.LIKELY,
            cause="prompt and completion are joined differently",
            text=f"log-probs of first tokens differ by {number_text(firsts.abs_mean)}, the others by "
            f"{number_text(inner.abs_mean)}: the trainer sees another prompt or other token borders than inference did",
            hint="train on the token ids that the server sampled, not on text that is tokenised again "
            "(--openai.server_type vllm); the same --chat-template and --system-prompt on both sides",
        )


def retokenised(known: Evidence) -> Iterator[Finding]:
    """A few tokens contradict each other outright and the rest agree."""
    numbers = known.numbers
    num = numbers.num_contradicted
    is_rare = FEW <= num <= 0.1 * numbers.all.num
    if not is_rare or numbers.quantile(0.5) >= known.small or known.judged.abs_mean < EQUAL:
        return
    huge = sum(1 for size in numbers.magnitudes if size >= 2)
    if num < 0.5 * huge:
        return
    of_all = f"of {count_text(num, 'token')} in {numbers.all.num:,} one side is sure and the other had hardly a thought"
    if known.settings.model is not None and MIXTURE.search(known.settings.model):
        yield Finding(
            id="routing",
            severity="warning",
            certainty=Certainty.LIKELY,
            cause="experts are chosen differently",
            text=f"{of_all}, the others agree: in a mixture of experts a rounding sends a token to another expert",
            hint="use the same --dtype on both sides, correct with --correction truncate, or keep --clip-eps small",
        )
        return
    yield Finding(
        id="retokenised",
        severity="error",
        certainty=Certainty.LIKELY,
        cause="text was tokenised again",
        text=f"{of_all}, the others agree: at these places the trainer's tokens are not the ones that were sampled",
        hint="train on the token ids that the server sampled: --openai.server_type vllm, and one --model-name "
        "(tokenizer) for environment and trainer",
    )


def cut_vocabulary(known: Evidence) -> Iterator[Finding]:
    """Inference's log-probabilities are of a vocabulary that top_p or top_k cut down."""
    numbers, top_p = known.numbers, min(known.settings.top_ps, default=1.0)
    different = [value for value in numbers.differences if abs(value) > EQUAL]
    if numbers.all.num < MIN_TOKENS or len(different) < 0.1 * numbers.all.num:
        return
    share = sum(1 for value in different if value < 0) / len(different)
    is_processed = known.settings.logprobs_mode != "raw"
    is_set = top_p < 1 and is_processed
    if not is_processed or (
        share < ONE_SIDED and not (is_set and numbers.num_inference_certain > 0.05 * numbers.all.num)
    ):
        return
    certain = numbers.num_inference_certain / numbers.all.num
    told = f"; {100 * certain:.0f}% were given exactly 0, with no other token left to choose" if certain >= 0.01 else ""
    yield Finding(
        id="cut-vocabulary",
        severity="warning" if numbers.all.abs_mean < known.limit else "error",
        certainty=Certainty.SURE if is_set else Certainty.LIKELY if certain >= 0.01 else Certainty.POSSIBLE,
        cause="top_p or top_k cut inference's vocabulary",
        text=f"{100 * share:.0f}% of the tokens that differ are likelier for inference{told}"
        + (f"; the environment samples with top_p {top_p:g}" if top_p < 1 else ""),
        hint="sample from the whole vocabulary: --top-p 1 (and no top_k) in the environment; or --logprobs-mode raw",
    )


def temperature(known: Evidence) -> Iterator[Finding]:
    """One side divides logits by the sampling temperature and the other does not."""
    line, settings = known.numbers.line, known.settings
    if line is None or line.num < MIN_TOKENS or known.judged.abs_mean < known.small or line.correlation < TIGHT:
        return
    if SCALED_LOW <= line.slope <= SCALED_HIGH or known.began_well:
        return
    other = [one for one in settings.temperatures if one != 1]
    fits = any(_is_near(line.slope, one) or _is_near(line.slope, 1 / one) for one in other)
    processed = settings.logprobs_mode == "processed"
    if not fits and not known.has_fresh and FAR_SCALED_LOW <= line.slope <= FAR_SCALED_HIGH:
        return  # old weights stretch log-probabilities too, if less
    if fits:
        certainty = Certainty.SURE
        sampled = f"; the environment samples at temperature {', '.join(f'{one:g}' for one in other)}"
    else:
        is_doubtful = not known.has_fresh or (settings.temperatures and not other)
        certainty = Certainty.POSSIBLE if is_doubtful else Certainty.LIKELY
        sampled = ""
    mode = f", and the server says {settings.logprobs_mode} log-probs" if settings.logprobs_mode else ""
    turn = "raw" if processed else "processed"
    why = (
        "the environment does not tell the trainer its temperature"
        if processed
        else "raw log-probs are those before the temperature"
    )
    yield Finding(
        id="temperature",
        severity="error" if known.judged.abs_mean >= known.limit else "warning",
        certainty=certainty,
        cause="one side applies the temperature, the other does not",
        text=f"the trainer's log-probs are {line.slope:.2f} times inference's (slope; correlation "
        f"{line.correlation:.2f}), a scaling and no noise{sampled}{mode}",
        hint=f"use one convention: --temperature 1 in the environment, or --logprobs-mode {turn} on the server ({why})",
    )


def position_drift(known: Evidence) -> Iterator[Finding]:
    """Differences grow along the completion."""
    parts = [at for at in known.numbers.by_position if at.part.num >= MIN_TOKENS]
    if len(parts) < 4:
        return
    sizes = [at.part.abs_mean for at in parts]
    quarter = max(1, len(sizes) // 4)
    start, end = sum(sizes[:quarter]) / quarter, sum(sizes[-quarter:]) / quarter
    rises = sum(1 for left, right in pairwise(sizes) if right >= left)
    if end < known.limit or end < GROWTH * max(start, EQUAL) or rises < 0.7 * (len(sizes) - 1):
        return
    yield Finding(
        id="position",
        severity="error",
        certainty=Certainty.LIKELY,
        cause="differences grow along the completion",
        text=f"log-probs differ by {number_text(start)} at its start, by {number_text(end)} after token "
        f"{parts[-1].low}: positions, RoPE scaling, or padding are not the same on both sides",
        hint="the same model configuration on both sides: --model-name (its rope_scaling), no --max-model-len beyond "
        "what the model was made for, --seq-len long enough for prompt and completion",
    )


def old_weights(known: Evidence) -> Iterator[Finding]:
    """Differences grow with the age of the weights that sampled."""
    numbers = known.numbers
    ages = known.ages
    if not ages or numbers.all.abs_mean < known.limit:
        return
    youngest, oldest = ages[0], ages[-1]
    hint = (
        "train on fresher rollouts: --max-staleness 1, a lower --max-batches-offpolicy, or more inference; a lower "
        "--lr makes each version differ less"
    )
    if youngest.low >= OLD_VERSIONS and _mean_age(ages) >= OLD_VERSIONS:
        yield Finding(
            id="stale",
            severity="error",
            certainty=Certainty.LIKELY,
            cause="inference has old weights",
            text=f"no token was sampled with weights younger than {count_text(youngest.low, 'version')}, and they "
            f"differ by {number_text(numbers.all.abs_mean)}: new weights arrive late or not at all",
            hint=f"{RESTART_INFERENCE} starts vLLM with the newest weights; a lower --vllm-restart-interval, another "
            "--weight-bridge-mode; if they only wait in the queue, --max-staleness 1",
        )
    elif len(ages) >= 2 and oldest.part.abs_mean >= GROWTH * max(youngest.part.abs_mean, EQUAL):
        yield Finding(
            id="stale",
            severity="error",
            certainty=Certainty.SURE
            if youngest.low == 0 and youngest.part.abs_mean < known.small
            else Certainty.LIKELY,
            cause="rollouts are old",
            text=f"differences grow with the age of the weights: {number_text(youngest.part.abs_mean)} at "
            f"{count_text(youngest.low, 'version')}, {number_text(oldest.part.abs_mean)} at {oldest.low}",
            hint=hint,
        )
    elif youngest.low > 0 and known.began_well:
        yield Finding(
            id="stale",
            severity="error",
            certainty=Certainty.POSSIBLE,
            cause="rollouts are old",
            text=f"every token was sampled at least {count_text(youngest.low, 'version')} ago, and the first steps "
            f"agreed ({number_text(known.began)}): each update changes the policy much",
            hint=hint,
        )


def weights_not_applied(known: Evidence) -> Iterator[Finding]:
    """The newest tokens differ more and more, as training goes on without inference."""
    settings = known.settings
    youngest = next(iter(known.ages), None)
    part = known.numbers.fresh if youngest is None else youngest.part
    age = 0 if youngest is None else youngest.low
    if part is None or part.num < MIN_TOKENS or age > 1 or not known.began_well:
        return
    # Sampled from other weights, tokens are less likely for the trainer: the mean is −KL. One update has a small one.
    is_biased = part.mean <= -BIAS * part.abs_mean
    if part.abs_mean < known.limit or (age == 1 and not (is_biased and part.abs_mean >= 2 * known.limit)):
        return
    newest = "tokens of the newest version" if age == 0 else "tokens of one version before"
    grown = (
        f"the first steps agreed ({number_text(known.began)}), and {newest} now differ by "
        f"{number_text(part.abs_mean)} (mean {part.mean:+.3f})"
    )
    if settings.trains_adapter:
        yield Finding(
            id="lora",
            severity="error",
            certainty=Certainty.LIKELY if is_biased else Certainty.POSSIBLE,
            cause="the LoRA adapter is not applied",
            text=f"{grown}: inference answers as if the adapter had not moved",
            hint="--enable-lora on the server, --max-lora-rank at least --lora-r, --lora-dropout 0; lora_merged and "
            "lora_restart (--weight-bridge-mode) need no adapter in vLLM",
        )
    else:
        yield Finding(
            id="not-arriving",
            severity="error",
            certainty=Certainty.LIKELY if is_biased else Certainty.POSSIBLE,
            cause="new weights do not reach inference",
            text=f"{grown}: inference says a new version and answers with old weights",
            hint=f"{RESTART_INFERENCE}; another --weight-bridge-mode; with shared_vllm try --enforce-eager",
        )


ALIGNMENT_RULES: tuple[Rule, ...] = (
    missing_logprobs,
    shifted_by_one,
    end_token,
    joined_text,
    temperature,
    cut_vocabulary,
    position_drift,
    old_weights,
    weights_not_applied,
    retokenised,
)
"""From the sign that can mean nothing else to the one that can."""


def _stands_out(edge: Part | None, inner: Part | None, limit: float) -> bool:
    """Whether the tokens at an edge of completions differ, and the others do not."""
    if edge is None or inner is None or edge.num < MIN_AT_EDGE or inner.num < MIN_TOKENS:
        return False
    return inner.abs_mean < limit and edge.abs_mean >= max(EDGE_LIMIT, EDGE_FACTOR * inner.abs_mean)


def _is_near(slope: float, temperature: float) -> bool:
    """Whether a slope is about a temperature, and on its side of 1."""
    return (slope < 1) == (temperature < 1) and abs(math.log(slope / temperature)) < 0.35


def _mean_age(ages: list[PartAt]) -> float:
    return sum(at.low * at.part.num for at in ages) / sum(at.part.num for at in ages)
