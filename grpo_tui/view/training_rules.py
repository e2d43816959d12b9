"""Rules of diagnosis over metrics: each looks at the latest steps and yields what is wrong, why, and the flag to set.

Medians of the last few steps are judged, not single ones. Bands are those of `grpo_engine.wire.metrics`; the other
bounds stand below with their reasons. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from types import MappingProxyType

from grpo_engine.wire.metrics import HEALTHY_BANDS, MetricsLine
from grpo_engine.wire.supervisor import Warning
from grpo_tui.view.format import number_text

RECENT = 5
"""Steps whose median is judged."""
YOUNG = 10
"""Steps before which nothing is said about trends."""
DIFF_LIMIT = HEALTHY_BANDS["alignment/diff_abs_mean"].high or 0.1
RATIO_BAND = HEALTHY_BANDS["grpo/mean_ratio"]
MANY_CLIPPED = HEALTHY_BANDS["grpo/clipped_fraction"].high or 0.3
LOOK_CLOSER = "; the alignment screen (3) finds the cause from the tokens"
SAME_REWARDS = 0.9
"""Share of groups without a difference in reward: at 0.9 only a tenth of the work teaches anything."""
COLLAPSED_ENTROPY = 0.05
"""Nats a token: the policy is sure of nearly everything …"""
COLLAPSE_FACTOR = 5
"""… and was not when the run began (arithmetic is certain from the start, and healthy)."""
HUGE_GRADIENT_FACTOR = 10
HUGE_GRADIENT = 1.0
"""A norm below the usual clip of 1.0 is never huge, however small the ones before it were."""
DIVERGED_LOSS = -10.0
"""The documented sign of missing clipping."""
MANY_TRUNCATED = 0.3
STALE_VERSIONS = 4.0


class Measurements:
    """Lines of metrics, asked by name."""

    def __init__(self, lines: Sequence[MetricsLine]) -> None:
        self.lines = lines

    def values(self, name: str) -> list[float]:
        """Every measurement, the oldest first."""
        return [line.metrics[name] for line in self.lines if name in line.metrics]

    def first(self, name: str) -> float | None:
        """The median of the first three measurements: how the run began."""
        return _median(self.values(name)[:3])

    def recent(self, name: str) -> float | None:
        """The median of the latest steps."""
        return _median([line.metrics[name] for line in self.lines[-RECENT:] if name in line.metrics])

    def is_missing_now(self, name: str) -> bool:
        """Whether the newest step lacks a metric that earlier ones have: what is not finite is not written."""
        return name not in self.lines[-1].metrics and any(name in line.metrics for line in self.lines)


def no_logprobs(measured: Measurements) -> Iterator[Warning]:
    """Log-probabilities of inference that cannot be any."""
    mean = measured.recent("logprobs/inference_mean")
    if mean is not None and mean > 0:
        yield Warning(
            id="inference-logprobs",
            severity="error",
            text=f"inference log-probs average {number_text(mean)}, but a log-prob is never positive: they are missing "
            "or belong to other tokens, so every ratio is wrong",
            hint="the environment must ask for them: --openai.server_type vllm, not openai, of a server with /generate",
        )


def alignment(measured: Measurements) -> Iterator[Warning]:
    """Trainer and inference disagree about the same tokens: from the first step, or more and more."""
    now, began = measured.recent("alignment/diff_abs_mean"), measured.first("alignment/diff_abs_mean")
    if now is None or began is None or now < DIFF_LIMIT:
        return
    if began >= DIFF_LIMIT:
        yield _misaligned_from_the_start(measured, now)
    else:
        yield _drifted_apart(measured, began, now)


def _misaligned_from_the_start(measured: Measurements, now: float) -> Warning:
    bias = measured.recent("alignment/diff_mean") or 0.0
    if abs(bias) >= 0.5 * now:
        side = "lower" if bias < 0 else "higher"
        cause = f"the trainer's are {side} throughout, as with different temperature conventions or weights"
        hint = (
            "agree on one convention: --logprobs-mode processed on the server if the environment's --temperature is "
            "not 1; "
            f"check that both have the same --model-name and that the adapter is loaded{LOOK_CLOSER}"
        )
    else:
        cause = "in both directions, as with other weights, shifted tokens or another dtype"
        hint = (
            "check --weight-bridge-mode and that both have the same --model-name and --dtype; with shared_vllm try "
            f"--enforce-eager; with LoRA set --lora-dropout 0{LOOK_CLOSER}"
        )
    return Warning(
        id="alignment",
        severity="error",
        text=f"trainer and inference disagree since the first step: log-probs differ by {number_text(now)} "
        f"(healthy: < {DIFF_LIMIT}), {cause}{_what_follows(measured)}",
        hint=hint,
    )


def _drifted_apart(measured: Measurements, began: float, now: float) -> Warning:
    stale = measured.recent("rollout/staleness_mean")
    if stale is not None and stale >= 1:
        cause = f"rollouts are {number_text(stale)} policy versions old"
        hint = "train on fresher ones: --max-staleness 1, a lower --max-batches-offpolicy, or more inference"
    else:
        cause = "new weights do not reach inference, or training moves too fast for it"
        hint = (
            "press v to restart vLLM with the newest weights; if that helps, lower --vllm-restart-interval or change "
            f"--weight-bridge-mode; if not, lower --lr{LOOK_CLOSER}"
        )
    return Warning(
        id="alignment",
        severity="error",
        text=f"trainer and inference drift apart: log-probs differed by {number_text(began)}, now by "
        f"{number_text(now)} (healthy: < {DIFF_LIMIT}): {cause}{_what_follows(measured)}",
        hint=hint,
    )


def _what_follows(measured: Measurements) -> str:
    """Which other metrics are out of their bands because log-probs disagree: the ratio is made of them."""
    ratio, clipped = _ratio_out_of_band(measured), _much_clipped(measured)
    follows = []
    if ratio is not None:
        follows.append(f"mean_ratio is {number_text(ratio)}")
    if clipped is not None:
        follows.append(f"{100 * clipped:.0f}% of the tokens are outside the clip")
    return f"; so {' and '.join(follows)}" if follows else ""


def _ratio_out_of_band(measured: Measurements) -> float | None:
    ratio = measured.recent("grpo/mean_ratio")
    return None if ratio is None or RATIO_BAND.holds(ratio) else ratio


def _much_clipped(measured: Measurements) -> float | None:
    clipped = measured.recent("grpo/clipped_fraction")
    return None if clipped is None or clipped < MANY_CLIPPED else clipped


def mean_ratio(measured: Measurements) -> Iterator[Warning]:
    """The policy has moved away from the one that sampled."""
    ratio = _ratio_out_of_band(measured)
    if ratio is None:
        return
    yield Warning(
        id="mean-ratio",
        severity="warning",
        text=f"mean_ratio is {number_text(ratio)} (healthy: {RATIO_BAND.low} to {RATIO_BAND.high}): updates are too "
        "large, or rollouts too old",
        hint="lower --lr, add --warmup-steps 20, keep --clip-eps 0.2, limit --max-staleness",
    )


def clipped_fraction(measured: Measurements) -> Iterator[Warning]:
    """So many ratios are outside the clip that training is mostly switched off."""
    clipped = _much_clipped(measured)
    if clipped is None:
        return
    yield Warning(
        id="clipped-fraction",
        severity="warning",
        text=f"{100 * clipped:.0f}% of the tokens are outside the clip (healthy: < {100 * MANY_CLIPPED:.0f}%), so "
        "they teach little: steps are too large for the age of the rollouts",
        hint="lower --lr, add --warmup-steps 20, or limit --max-staleness; widening --clip-eps hides it",
    )


def equal_rewards(measured: Measurements) -> Iterator[Warning]:
    """Groups without a difference have no advantage, and so no gradient."""
    same, reward = measured.recent("reward/frac_zero_std"), measured.recent("reward/mean")
    if same is None or same < SAME_REWARDS:
        return
    rewards = measured.values("reward/mean")
    least, most = min(rewards, default=0.0), max(rewards, default=0.0)
    if reward is not None and reward >= 0.9:
        cause, hint = (
            "the task has become too easy",
            "make the task harder (--task.difficulty, where it has one), or end the run: it is solved",
        )
    elif reward is not None and reward <= max(0.05, least) and most <= 0.1:
        cause = "no answer is ever rewarded: the task is too hard, or the reward does not find the answer"
        hint = (
            "make the task easier (--task.difficulty, where it has one), leave more room (--max-tokens, "
            "--max-token-length), and read a few completions in rollouts.jsonl"
        )
    else:
        cause = "all answers to a prompt are alike"
        hint = "raise --temperature of the environment (1.0), raise --group-size, or set --entropy-coef 0.001"
    yield Warning(
        id="equal-rewards",
        severity="warning",
        text=f"in {100 * same:.0f}% of the groups all rewards are equal, so they give no gradient: {cause}",
        hint=hint,
    )


def entropy_collapse(measured: Measurements) -> Iterator[Warning]:
    """The policy has become certain, and explores no more."""
    now, began = measured.recent("grpo/entropy"), measured.first("grpo/entropy")
    if now is None or began is None or len(measured.values("grpo/entropy")) < YOUNG:
        return
    if now < COLLAPSED_ENTROPY and now * COLLAPSE_FACTOR < began:
        yield Warning(
            id="entropy",
            severity="warning",
            text=f"entropy fell from {number_text(began)} to {number_text(now)}: completions become identical",
            hint="set --entropy-coef 0.001, widen only the upper clip (--clip-high 0.28), or lower --lr",
        )


def gradients(measured: Measurements) -> Iterator[Warning]:
    """A loss or gradient that is no number, or suddenly far larger than before."""
    for name in ("train/loss", "train/grad_norm"):
        if measured.is_missing_now(name):
            yield Warning(
                id="not-finite",
                severity="error",
                text=f"{name} is not finite in step {measured.lines[-1].step}: the step was skipped",
                hint="lower --lr, add --warmup-steps 20; with --dtype float16 change to bfloat16",
            )
            return
    norms = measured.values("train/grad_norm")
    if len(norms) < YOUNG:
        return
    now, before = median(norms[-3:]), median(norms[:-3])
    if now >= HUGE_GRADIENT and now >= HUGE_GRADIENT_FACTOR * before:
        yield Warning(
            id="grad-norm",
            severity="warning",
            text=f"the gradient norm jumped from {number_text(before)} to {number_text(now)}: training is unstable",
            hint="lower --lr, add --warmup-steps 20, or clip harder with --max-grad-norm 0.5",
        )


def diverged_loss(measured: Measurements) -> Iterator[Warning]:
    """The documented symptom of training without a working clip."""
    loss = measured.recent("train/loss")
    if loss is not None and loss < DIVERGED_LOSS:
        yield Warning(
            id="loss",
            severity="error",
            text=f"the loss is {number_text(loss)}: below {DIVERGED_LOSS:.0f} it has diverged, as without a clip",
            hint="keep --clip-eps 0.2 and go back to the last good checkpoint with a lower --lr",
        )


def truncated(measured: Measurements) -> Iterator[Warning]:
    """Completions that were cut off before their end are scored as if they were wrong."""
    share = measured.recent("rollout/truncated_fraction")
    if share is not None and share >= MANY_TRUNCATED:
        yield Warning(
            id="truncated",
            severity="warning",
            text=f"{100 * share:.0f}% of the completions are cut off before their end, and are scored as they are",
            hint="raise --max-tokens of the environment, or --max-token-length where conversations run out of room, "
            "and --seq-len and --max-model-len with it",
        )


def stale_rollouts(measured: Measurements) -> Iterator[Warning]:
    """Groups that an old policy sampled."""
    mean, most = measured.recent("rollout/staleness_mean"), measured.recent("rollout/staleness_max")
    if mean is not None and mean >= STALE_VERSIONS:
        oldest = f", the oldest {number_text(most)}" if most is not None else ""
        yield Warning(
            id="staleness",
            severity="warning",
            text=f"rollouts are {number_text(mean)} policy versions old on average{oldest}: too many wait in the queue",
            hint="limit --max-staleness, or let the environment run less far ahead: --max-batches-offpolicy 1",
        )


TRAINING_RULES: tuple[Callable[[Measurements], Iterator[Warning]], ...] = (
    no_logprobs,
    alignment,
    mean_ratio,
    clipped_fraction,
    equal_rewards,
    entropy_collapse,
    gradients,
    diverged_loss,
    truncated,
    stale_rollouts,
)


EXPLAINED_BY: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "alignment": frozenset({"inference-logprobs"}),
        "mean-ratio": frozenset({"inference-logprobs", "alignment"}),
        "clipped-fraction": frozenset({"inference-logprobs", "alignment"}),
    }
)
"""By the id of a warning, those that name its cause: it is not told beside them."""


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
