"""Rules of diagnosis over metrics: each looks at the latest steps and yields what is wrong, why, and the flag to set.

Medians of the last few steps are judged, not single ones. Bands are those of `grpo_engine.wire.metrics`; the other
bounds stand below with their reasons. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import sqrt
from statistics import median
from types import MappingProxyType

from grpo_engine.diagnosis.evidence import USUAL_CLIP, RunSettings
from grpo_engine.diagnosis.text import RESTART_INFERENCE
from grpo_engine.wire.metrics import (
    BATCHES_AHEAD,
    EVALUATION_PREFIX,
    HEALTHY_BANDS,
    SERVERS_FULL,
    STALE_GROUPS,
    WORKERS_FULL,
    MetricsLine,
)
from grpo_engine.wire.rollouts import MOST_BATCHES_AHEAD
from grpo_engine.wire.supervisor import Warning
from grpo_tui.view.format import number_text

RECENT = 5
"""Steps whose median is judged."""
YOUNG = 10
"""Steps before which nothing is said about trends."""
DIFF_LIMIT = HEALTHY_BANDS["alignment/diff_abs_mean"].high or 0.1
RATIO_BAND = HEALTHY_BANDS["grpo/mean_ratio"]
MANY_CLIPPED = HEALTHY_BANDS["grpo/clipped_fraction"].high or 0.3
MANY_CLIPPED_SEQUENCES = 0.6
"""Share of tokens whose gradient the clip of whole sequences takes away. Its band is so narrow that arithmetic alone
leaves it, which takes away up to one half: ratios above it have A > 0 as often as A < 0."""
LOOK_CLOSER = "; the alignment screen (3) finds the cause from the tokens"
SAME_REWARDS = 0.9
"""Share of groups without a difference in reward: at 0.9 only a tenth of the work teaches anything."""
SOLVED = 0.9
"""Mean reward from which on a task is solved, where rewards are 1 at most."""
NO_DIFFERENCE = 1e-9
"""Rewards that differ by less are one value, whatever their size."""
FEW_PROMPTS = 16
"""Held-out prompts below which pass@1 is uncertain by more than 0.12."""
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
FALLEN_SHARE = 0.3
"""Share of its best mean that the reward must have lost …"""
FALLEN_NOISE = 3.0
"""… and how many times more than it usually changes from one step to the next, before it is said to fall."""
STALE_VERSIONS = 4.0
MUCH_WAITING, LITTLE_WAITING = 0.3, 0.1
"""Shares of the time in which a side waits for the other: from the one on it is named, up to the other it is none."""
SHORT_STEP_S = 1.0
"""Steps that are shorter say nothing about where the time goes."""


class Measurements:
    """Lines of metrics, asked by name."""

    def __init__(self, lines: Sequence[MetricsLine], settings: RunSettings) -> None:
        self.lines = lines
        self.settings = settings

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
    """Trainer and inference disagree about the same tokens: from the first step, or more and more.

    In the first step both have the same weights: only settings can make them disagree there.
    """
    now, began = measured.recent("alignment/diff_abs_mean"), measured.first("alignment/diff_abs_mean")
    if now is None or began is None or now < DIFF_LIMIT:
        return
    began = min(began, measured.values("alignment/diff_abs_mean")[0])
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
        cause = f"rollouts are {stale:.1f} policy versions old"
        hint = "train on fresher ones: --max-staleness 1, a lower --max-batches-offpolicy, or more inference"
        if round(stale, 1) <= 1:
            cause = "rollouts are one policy version old, and one step changes the policy by so much"
            hint = (
                "take smaller steps: a lower --lr, or more --warmup-steps; --max-staleness 0 trains on fresh ones only"
            )
    else:
        cause = "new weights do not reach inference, or training moves too fast for it"
        hint = (
            f"{RESTART_INFERENCE} starts vLLM with the newest weights; if that helps, lower --vllm-restart-interval or "
            f"change --weight-bridge-mode; if not, lower --lr{LOOK_CLOSER}"
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
    """The share of clipped tokens where it is large for the loss in use."""
    name, limit = "grpo/clipped_fraction", MANY_CLIPPED
    if measured.settings.clips_sequences:
        name, limit = "grpo/clipped_fraction_acting", MANY_CLIPPED_SEQUENCES
    clipped = measured.recent(name)
    return None if clipped is None or clipped < limit else clipped


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
    if measured.settings.clips_sequences:
        low, high = measured.settings.clip_low, measured.settings.clip_high
        yield Warning(
            id="clipped-fraction",
            severity="warning",
            text=f"the clip of whole sequences takes the gradient of {100 * clipped:.0f}% of the tokens away (healthy: "
            f"< {100 * MANY_CLIPPED_SEQUENCES:.0f}%; band: 1 - {low:g} to 1 + {high:g}): steps are too large for the "
            "age of the rollouts",
            hint="lower --lr, add --warmup-steps 20, or limit --max-staleness; --clip-low and --clip-high are the band",
        )
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
    newest, spread = rewards[-RECENT:], measured.recent("reward/std") or 0.0
    has_one_value = spread <= NO_DIFFERENCE and max(newest, default=0.0) - min(newest, default=0.0) <= NO_DIFFERENCE
    if reward is not None and reward >= SOLVED and max(rewards) <= 1:
        cause, hint = (
            "the task has become too easy",
            "make the task harder (--task.difficulty, where it has one), or end the run: it is solved",
        )
    elif reward is not None and reward <= NO_DIFFERENCE and has_one_value:
        often = "no answer is ever rewarded" if max(rewards) <= NO_DIFFERENCE else "no answer is rewarded any more"
        cause = f"{often}: the task is too hard, or the reward does not find the answer"
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


def single_groups(measured: Measurements) -> Iterator[Warning]:
    """Groups of one completion, which has nothing to be compared with."""
    size = measured.recent("rollout/group_size_mean")
    if size is None or size > 1:
        return
    yield Warning(
        id="single-groups",
        severity="error",
        text="every group has one completion, so there is nothing to compare its reward with: the advantage is 0 and "
        "rewards give no gradient",
        hint="set --group-size of the environment to 8, 4 at least",
    )


def few_held_out(measured: Measurements) -> Iterator[Warning]:
    """An evaluation of so few prompts that its scores are chance."""
    evaluated = next((line.metrics for line in reversed(measured.lines) if "eval/time" in line.metrics), {})
    counts = {
        name.removeprefix(EVALUATION_PREFIX).removesuffix("num_prompts").strip("/"): int(value)
        for name, value in evaluated.items()
        if name.startswith(EVALUATION_PREFIX) and name.endswith("num_prompts") and 1 <= value < FEW_PROMPTS
    }
    if not counts:
        return
    environment, num = min(counts.items(), key=lambda each: each[1])
    whose = f" of {environment}" if environment else ""
    wanted = measured.settings.eval_prompts
    hint = (
        "give the task more to hold out: a file of its own (held_out_path of the task, --task.held-out-path), or more "
        "records: without that file one in sixteen is held out"
    )
    if wanted is not None and wanted <= num:
        hint = f"set --eval-prompts to 64, {FEW_PROMPTS} at least"
    yield Warning(
        id="few-held-out",
        severity="warning",
        text=f"evaluations{whose} have {num} held-out prompt{'' if num == 1 else 's'}, fewer than {FEW_PROMPTS}: "
        f"their pass@1 is uncertain by up to ±{0.5 / sqrt(num):.2f}",
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


def falling_reward(measured: Measurements) -> Iterator[Warning]:
    """The policy has become worse than it was: the documented sign of updates that are too large."""
    rewards = measured.values("reward/mean")
    if len(rewards) < YOUNG + RECENT:
        return
    starts = range(0, len(rewards) - 2 * RECENT + 1, RECENT)
    best, now = max(median(rewards[start : start + RECENT]) for start in starts), median(rewards[-RECENT:])
    usual_change = median(abs(after - before) for before, after in pairwise(rewards))
    if best - now <= max(FALLEN_SHARE * abs(best), FALLEN_NOISE * usual_change, NO_DIFFERENCE):
        return
    cause, hint = _why_it_falls(measured)
    yield Warning(
        id="falling-reward",
        severity="warning",
        text=f"the mean reward fell from {number_text(best)} to {number_text(now)}: {cause}",
        hint=f"go back to the best checkpoint (grpo-tui branch RUN --from step_N) and {hint}; a curriculum that has "
        "become harder lowers it too",
    )


def _why_it_falls(measured: Measurements) -> tuple[str, str]:
    """The likeliest cause by the other metrics, and what to do about it."""
    difference, ratio, clipped = (
        measured.recent("alignment/diff_abs_mean"),
        _ratio_out_of_band(measured),
        _much_clipped(measured),
    )
    entropy, began = measured.recent("grpo/entropy"), measured.first("grpo/entropy")
    cut_off, at_first = measured.recent("rollout/truncated_fraction"), measured.first("rollout/truncated_fraction")
    if difference is not None and difference >= DIFF_LIMIT:
        return "trainer and inference disagree, so the gradient is of another policy", (
            "let them agree first: grpo-engine check with the flags of train"
        )
    if ratio is not None or clipped is not None:
        which = (
            f"mean_ratio is {number_text(ratio)}" if ratio is not None else f"{100 * (clipped or 0):.0f}% is clipped"
        )
        return f"updates are too large ({which})", "lower --lr, add --warmup-steps 20, keep --clip-eps 0.2"
    if measured.settings.is_clip_known and measured.settings.clip_high > 2 * USUAL_CLIP:
        return f"the clip is wide (1 + {measured.settings.clip_high:g})", "set --clip-eps 0.2"
    if cut_off is not None and cut_off >= MANY_TRUNCATED > (at_first or 0.0):
        return "completions have become longer than their limit", "raise --max-tokens, or set --overlong-buffer"
    if entropy is not None and began is not None and entropy > max(2 * began, began + 0.5):
        return f"the policy becomes random (entropy {number_text(began)}, now {number_text(entropy)})", (
            "lower --lr and --entropy-coef, or hold it near its start with --kl-coef 0.01"
        )
    return "no other metric says why", (
        "lower --lr, or hold the policy near its start with --kl-coef 0.01; read a few completions in rollouts.jsonl "
        "(screen 4): a reward that can be had by another answer than the intended one looks like this on held-out items"
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


def dropped_groups(measured: Measurements) -> Iterator[Warning]:
    """Groups that were sampled and became too old."""
    dropped = measured.recent(STALE_GROUPS)
    if dropped is not None and dropped >= 1:
        yield Warning(
            id="dropped-groups",
            severity="warning",
            text=f"{dropped:.0f} groups a step are sampled and dropped: faster ones overtake them, until they "
            "are older than max_staleness",
            hint="raise --max-staleness, or lower --max-tokens, so that lengths differ less; of a window or replay "
            "buffer, services.api.buffer_sampling=oldest leaves the fewest behind",
        )


def waiting_sides(measured: Measurements) -> Iterator[Warning]:
    """The trainer waits for groups, or environments wait for the trainer, or both in turns.

    The shares of the time in which the sides work are the work of a step in their own times, so their quotient is how
    many times as fast the slower side must be for neither to wait.
    """
    trainer, generation = measured.recent("train/busy_fraction"), measured.recent("rollout/busy_fraction")
    if trainer is None or generation is None or len(measured.values("rollout/busy_fraction")) < YOUNG:
        return
    if (measured.recent("train/step_time") or 0.0) < SHORT_STEP_S:
        return
    found = who_waits(trainer, generation, what_limits(measured))
    if found is None:
        return
    text, hint = found
    yield Warning(id="waiting-sides", severity="info", text=text, hint=hint)


def what_limits(measured: Measurements) -> tuple[str, str] | None:
    """What keeps sampling from keeping up where the number of batches ahead follows the trainer, and what helps."""
    batches = measured.recent(BATCHES_AHEAD)
    if batches is None:
        return None
    if measured.recent(SERVERS_FULL):
        return "requests queue at the inference servers, so that more batches ahead would not help", (
            "raise --max-batch-size of the server, its --gpu-memory-utilization (KV cache) or its gpu_share, or add "
            "replicas on more GPUs; or lower --max-tokens"
        )
    if measured.recent(WORKERS_FULL):
        return "every worker of the environments is busy", "raise --max-workers of the environment"
    if batches >= MOST_BATCHES_AHEAD:
        return f"environments sample {batches:.0f} batches ahead, as many as they may by themselves", (
            "set --max-batches-offpolicy of the environment above that, if groups may be that old; or give inference "
            "more GPUs (replicas), or lower --max-tokens"
        )
    return None


def who_waits(trainer: float, generation: float, limit: tuple[str, str] | None = None) -> tuple[str, str] | None:
    """In words which side waits for the other, and what helps; None where neither does for long.

    Args:
        trainer: share of the time in which it works.
        generation: share in which environments do.
        limit: what keeps sampling from keeping up, if it is known, and what helps then.
    """
    for_groups, for_trainer = 1 - trainer, 1 - generation
    if for_groups >= MUCH_WAITING and for_trainer >= MUCH_WAITING:
        text = (
            f"trainer and environments take turns: it waits for groups {100 * for_groups:.0f}% of the time, and they "
            f"for it {100 * for_trainer:.0f}%"
        )
        hint = (
            "raise --max-staleness of the trainer, or where it is unset --max-batches-offpolicy of environments, so "
            "that both work at once: a step then takes the longer of both times, and not their sum"
        )
    elif for_groups >= MUCH_WAITING and for_trainer <= LITTLE_WAITING:
        text = (
            f"the trainer waits for groups {100 * for_groups:.0f}% of the time: generation is the slower side, and "
            f"would keep up if it were {generation / max(trainer, 0.01):.1f} times as fast"
        )
        hint = (
            "give inference more: replicas of the server on more GPUs, a larger --gpu-memory-utilization, more "
            "--max-workers of the environment; spare vLLM a prefill at each update by --keep-kv-cache; or lower "
            "--max-tokens"
        )
        if limit is not None:
            text, hint = f"{text}; {limit[0]}", limit[1]
    elif for_trainer >= MUCH_WAITING and for_groups <= LITTLE_WAITING:
        text = (
            f"environments wait for the trainer {100 * for_trainer:.0f}% of the time: training is the slower side, and "
            f"would keep up if it were {trainer / max(generation, 0.01):.1f} times as fast"
        )
        hint = (
            "give training more: --compile-layers, --micro-batch-tokens, more ranks (gpus of the trainer); on a GPU "
            "that vLLM shares, --keep-kv-cache of vLLM spares it a prefill at each update"
        )
    else:
        return None
    return text, hint


TRAINING_RULES: tuple[Callable[[Measurements], Iterator[Warning]], ...] = (
    no_logprobs,
    alignment,
    mean_ratio,
    clipped_fraction,
    single_groups,
    equal_rewards,
    few_held_out,
    entropy_collapse,
    gradients,
    diverged_loss,
    falling_reward,
    truncated,
    stale_rollouts,
    dropped_groups,
    waiting_sides,
)


EXPLAINED_BY: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "alignment": frozenset({"inference-logprobs"}),
        "mean-ratio": frozenset({"inference-logprobs", "alignment"}),
        "clipped-fraction": frozenset({"inference-logprobs", "alignment"}),
        "equal-rewards": frozenset({"single-groups"}),
        "falling-reward": frozenset({"equal-rewards"}),
    }
)
"""By the id of a warning, those that name its cause: it is not told beside them."""


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
