"""Metric names: their groups and units, what other trainers call the same thing, and how one is found. Pure.

The other names are those that TRL (GRPO), verl, prime-rl and OpenRLHF write, read in their sources. An alias means the
same quantity to a reader of a curve; estimators and normalisers may differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from grpo_engine.diagnosis.evidence import RunSettings
from grpo_engine.wire.metrics import HEALTHY_BANDS, METRIC_NAMES, Band
from grpo_tui.view.format import number_text, whole_text

ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "train/loss": ("loss", "policy_loss", "actor/pg_loss", "actor/loss", "loss/mean", "loss/policy_avg"),
    "train/grad_norm": ("grad_norm", "actor/grad_norm", "optim/grad_norm", "actor_grad_norm"),
    "train/lr": ("learning_rate", "actor/lr", "optim/lr", "actor_lr"),
    "train/step_time": ("step_time", "timing_s/step", "perf/time_per_step", "time/step", "timing/step_total"),
    "train/sync_time": ("timing_s/update_weights", "time/update_weights", "timing/broadcast"),
    "train/data_fetch_time": ("timing_s/gen", "time/wait_for_batch", "timing/generation", "timing/make_experience"),
    "train/tokens_per_second": ("perf/throughput",),
    "train/gpu_memory_gb": ("perf/max_memory_allocated_gb", "perf/peak_memory"),
    "grpo/mean_ratio": ("sampling/importance_sampling_ratio/mean", "rollout_corr/rollout_is_mean", "val/ratio"),
    "grpo/clipped_fraction": (
        "clip_ratio/region_mean", "clip_ratio", "actor/pg_clipfrac", "ppo_clip_ratio", "policy/clipfrac_avg",
        "is_masked/mean", "cispo_clip_ratio", "clip_ratio/low_mean", "clip_ratio/high_mean",
    ),
    "grpo/ess": ("rollout_corr/rollout_is_eff_sample_size",),
    "grpo/entropy": (
        "entropy", "actor/entropy", "actor/entropy_loss", "entropy/mean", "entropy/all/mean", "policy/entropy_avg",
        "objective/entropy",
    ),
    "grpo/kl": ("kl", "objective/kl", "actor/ppo_kl", "actor/kl_loss", "ppo_kl", "policy/approxkl_avg"),
    "alignment/diff_abs_mean": (
        "sampling/sampling_logp_difference/mean", "training/rollout_probs_diff_mean", "mismatch_kl/mean",
        "mismatch_kl/all/mean", "rollout_corr/kl", "vllm_kl",
    ),
    "alignment/diff_max": (
        "sampling/sampling_logp_difference/max", "training/rollout_probs_diff_max", "mismatch_kl/all/max",
    ),
    "reward/mean": (
        "reward", "critic/score/mean", "critic/rewards/mean", "objective/scores", "reward/all/mean",
        "env/reward_mean", "return",
    ),
    "advantage/mean": ("advantage", "critic/advantages/mean", "advantages/mean"),
    "reward/std": ("reward_std",),
    "reward/frac_zero_std": ("frac_reward_zero_std",),
    "rollout/length_mean": (
        "completions/mean_length", "response_length/mean", "response_length", "decode_len/all/mean",
        "seq_len/all/mean", "total_length",
    ),
    "rollout/truncated_fraction": (
        "completions/clipped_ratio", "response_length/clip_ratio", "is_truncated/all/mean", "is_truncated/mean",
    ),
    "rollout/staleness_mean": (
        "training/off_policy/trajectory_staleness/mean", "off_policy_level/all/mean", "batch/off_policy_level/mean",
    ),
    "rollout/staleness_max": ("off_policy_level/all/max", "batch/off_policy_level/max", "scheduler/async_level"),
})  # fmt: skip
"""Our name, and what others write for it, the closest first."""

MEANINGS: Mapping[str, str] = MappingProxyType({
    "train/loss": "the policy-gradient loss; near 0 by construction, so its trend says little about learning",
    "train/grad_norm": "length of the gradient before it is clipped",
    "train/sync_time": "seconds in which new weights are handed to inference",
    "sync/pause_time": "seconds in which a server answered no request because of new weights",
    "sync/bytes": "size of the new weights as they are sent to each server; 0 where it shares the trainer's memory",
    "sync/num_servers": "inference servers that serve the new weights",
    "inference/tokens_per_second": "tokens of completions that are sampled in a second, by all servers together",
    "time/sampling": "seconds in which engines in the trainer sample, with rewards and the evaluation before",
    "time/training": "seconds in which engines in the trainer sleep, and it computes a step",
    "time/syncing": "seconds in which inference that slept takes new weights",
    "memory/sampling_gb": "GPU memory of rank 0 in use when sampling ends, by all processes; its own memory on a CPU",
    "memory/training_gb": "the same when the step ends, before inference wakes: what torch reserved is its peak",
    "memory/syncing_gb": "the same when inference has the new weights",
    "sync/sleep_time": "seconds in which inference freed its memory for the step",
    "sync/freed_gb": "GPU memory that it freed, in GB",
    "train/checkpoint_wait_time": "seconds in which training stood still for the checkpoint of the step before",
    "train/checkpoint_write_time": "seconds that writing the last checkpoint took, in the background if it was copied",
    "train/data_fetch_time": "seconds in which the trainer waits for a batch",
    "train/mfu": "share of the GPU's peak that the step reaches: model FLOPs utilization, waiting included",
    "train/busy_fraction": "share of a step in which the trainer does not wait for a batch",
    "rollout/admission_wait_time": "seconds in which environments had nothing to do, as far ahead as they may be",
    "rollout/batches_ahead": "batches that environments may sample ahead of the trainer; follows what it needs",
    "rollout/servers_full": "1 where requests queue at every inference server, so that more at a time would not help",
    "rollout/workers_full": "1 where every worker of the environments is busy (max_workers)",
    "rollout/busy_fraction": "share of the time in which environments did not wait for the trainer",
    "grpo/mean_ratio": "probability of sampled tokens under the trained weights over that when sampled; 1 is equal",
    "grpo/clipped_fraction": "share of tokens whose ratio is outside the clip: they give no gradient",
    "grpo/ess": "effective sample size: share of the tokens that count after weighting by their ratio; 1 is all",
    "grpo/entropy": "how undecided the policy is per token, in nats (natural logarithm); 0 is certain",
    "grpo/kl": "distance from the reference model per token, in nats (natural logarithm)",
    "alignment/diff_mean": "log-prob of the trainer minus that of inference for the same tokens, in nats; 0 is equal",
    "alignment/diff_abs_mean": "size of that difference per token, in nats (natural logarithm); 0 is equal",
    "alignment/diff_max": "the largest of these differences in the batch, in nats (natural logarithm)",
    "reward/mean": "mean reward of all completions of the batch",
    "reward/std": "spread of rewards within a group; 0 gives no gradient",
    "reward/frac_zero_std": "share of groups whose rewards are all equal: they give no gradient",
    "advantage/mean": "mean over tokens of what a completion is better than its group; above 0: the longer ones are",
    "advantage/std": "spread of advantages over tokens; 0 gives no gradient",
    "advantage/abs_max": "the largest advantage of the batch, for better or worse",
    "train/loss_scale": "factor of the loss of a float16 model, so that small gradients are not rounded to 0",
    "rollout/group_size_mean": "completions of a prompt that are compared with each other; 1 gives no gradient",
    "rollout/length_mean": "tokens of a completion",
    "rollout/truncated_fraction": "share of completions that were cut at the longest allowed length",
    "rollout/staleness_mean": "optimizer steps between the weights that sampled a token and those that train on it",
    "rollout/staleness_max": "the same, of the oldest token of the batch",
    "rollout/stale_groups": "groups that were sampled and dropped since the step before, older than max_staleness",
    "logprobs/training_mean": "mean log-prob of sampled tokens under the trainer's weights, in nats",
    "logprobs/inference_mean": "mean log-prob of sampled tokens as inference reported it, in nats",
})  # fmt: skip
"""What a metric is, in a line, where its name does not say it."""
_AT = re.compile(r"eval/(?:[^/]+/)?(avg|pass)@(\d+)(_se)?$")
_OF_RANK = re.compile(r"rank/\d+/(\w+)$")
_OF_RANK_MEANINGS: Mapping[str, str] = MappingProxyType({
    "step_time": "time of this rank of the trainer for its share of a step, without fetching and weight updates",
    "wait_time": "time that it is longer in collective operations than the rank that is there the least: it waits",
})  # fmt: skip

_EVALUATION_STARTS = ("eval/", "eval_", "val-", "val/test_score")
_UNITS: tuple[tuple[str, str], ...] = (
    (r"(tokens_per_second|throughput)(_per_gpu)?$", "tokens/s"),
    (r"(_time|/time|_seconds|_s)$|^(timing_s|time|timing)/", "s"),
    (r"(_gb|peak_memory)$", "GB"),
    (r"(^|/)bytes$", "bytes"),
    (r"(length|seq_len|decode_len)", "tokens"),
    (r"num_tokens$", "tokens"),
    (r"staleness|off_policy_level|async_level", "versions"),
    (r"(entropy|/kl|^kl|_kl|logprobs/|^alignment/|logp)", "nats"),
    (r"num_groups$", "groups"),
    (r"num_prompts$", "prompts"),
)
_COUNTS = re.compile(
    r"(^|[/_])(num_[a-z_]+|(global_)?steps?|policy_version)$"
    r"|(staleness|_level|/all|length)[/_](max|min)$|(max|min)_(terminated_)?length$|scheduler/async_level$"
)
"""Names of what is counted: steps, prompts, groups, tokens, versions; and the most and the least of such."""
_WORDS = re.compile(r"[^a-z0-9@]+")


def meaning_of(name: str) -> str:
    """What a metric is, in a line; empty where its name says it.

    >>> meaning_of("eval/avg@4")
    'mean score of 4 answers to each held-out prompt'
    """
    if found := _AT.match(name):
        what = "mean score of {} answers to each" if found[1] == "avg" else "share solved by one of {} answers, of each"
        se = "standard error of the " if found[3] else ""
        return se + what.format(found[2]) + " held-out prompt"
    if found := _OF_RANK.match(name):
        return _OF_RANK_MEANINGS.get(found[1], "")
    return MEANINGS.get(our_name(name) or "", "")


def is_evaluation(name: str) -> bool:
    """Whether a metric is measured on held-out prompts: every so many steps, and not at each."""
    return name.startswith(_EVALUATION_STARTS)


def our_name(name: str) -> str | None:
    """What this project calls it: itself, or the name that it is an alias of; None for what has no likeness here.

    >>> our_name("actor/pg_clipfrac")
    'grpo/clipped_fraction'
    """
    if name in ALIASES or name in METRIC_NAMES:
        return name
    bare = name.removeprefix("train/")  # how Transformers hands TRL's names to trackers
    return next((ours for ours, others in ALIASES.items() if name in others or bare in others), None)


def measured_as(ours: str, measured: Iterable[str]) -> str | None:
    """The name under which a run has one of our metrics: ours, else the closest of its aliases; None without."""
    names = set(measured)
    candidates = (ours, *(each for alias in ALIASES.get(ours, ()) for each in (alias, f"train/{alias}")))
    return next((name for name in candidates if name in names), None)


def bands_of(settings: RunSettings) -> Mapping[str, Band]:
    """The healthy bands of a run: the documented share of clipped tokens holds for ratios of tokens."""
    if not settings.clips_sequences:
        return HEALTHY_BANDS
    return {name: band for name, band in HEALTHY_BANDS.items() if name != "grpo/clipped_fraction"}


def band_of(name: str, bands: Mapping[str, Band]) -> Band | None:
    """The healthy band, if there is one; aliases with other units or meanings of "mean" have none."""
    if name in bands:
        return bands[name]
    ours = our_name(name)
    return bands.get(ours) if ours in ("grpo/mean_ratio", "grpo/clipped_fraction") else None


def unit_of(name: str) -> str:
    """`s`, `GB`, `tokens/s`, `nats`, …; nothing for fractions, ratios and rewards."""
    if name.endswith(("fraction", "ratio")):
        return ""
    return next((unit for pattern, unit in _UNITS if re.search(pattern, name)), "")


def value_text(name: str, value: float | None) -> str:
    """A measured value in at most eight characters: whole where it is a count, else four digits that matter.

    >>> value_text("eval/num_prompts", 64.0), value_text("rollout/length_mean", 64.0)
    ('64', '64.00')
    """
    return whole_text(value) if value is not None and _is_count(name, value) else number_text(value)


def printed(name: str, value: float) -> str:
    """A measured value for a command's output: whole and in full where it is a count, else five digits that matter."""
    return f"{value:.0f}" if _is_count(name, value) else f"{value:.5g}"


def _is_count(name: str, value: float) -> bool:
    return _COUNTS.search(name) is not None and float(value).is_integer()


def group_of(name: str) -> str:
    """What stands before its last part: `reward/sort6/mean` belongs to `reward/sort6`, `loss` to no group."""
    return name.rpartition("/")[0]


def in_groups(names: Iterable[str]) -> list[str]:
    """Names in the order of a list: groups together, ours in the order that people know, the rest by the alphabet."""
    order = {group: place for place, group in enumerate(dict.fromkeys(name.partition("/")[0] for name in _KNOWN_FIRST))}
    known = {name: place for place, name in enumerate(METRIC_NAMES)}

    def key(name: str) -> tuple[int, str, int, str]:
        room = name.partition("/")[0]
        return order.get(room, len(order)), group_of(name), known.get(name, len(known)), name

    return sorted(names, key=key)


_KNOWN_FIRST = ("reward/mean", "eval/avg@1", "grpo/mean_ratio", "alignment/diff_mean", *METRIC_NAMES)


def found(query: str, names: Sequence[str]) -> list[str]:
    """The names that a query means, the best first: by what they contain, by their aliases, then letter by letter.

    >>> found("ppo_kl", ["train/loss", "grpo/kl"])
    ['grpo/kl']
    """
    wanted = query.strip().lower()
    if not wanted:
        return list(names)
    ranked = [(rank, place) for place, name in enumerate(names) if (rank := _rank(wanted, name)) is not None]
    # Letters scattered over a name are a guess: they count only where nothing says the query itself.
    exact = [found_one for found_one in ranked if found_one[0] < _SCATTERED]
    return [names[place] for _, place in sorted(exact or ranked)]


_SCATTERED = 5


def _rank(wanted: str, name: str) -> int | None:
    """How well a name answers, 0 the best; None where it does not."""
    own = name.lower()
    others = [alias.lower() for alias in ALIASES.get(our_name(name) or "", ())]
    ours = (our_name(name) or "").lower()
    words = _WORDS.split(wanted)
    if own == wanted:
        return 0
    if wanted in others or ours == wanted:
        return 1
    if wanted in own:
        return 2
    if all(word in own for word in words):
        return 3
    if any(all(word in other for word in words) for other in (*others, ours)):
        return 4
    return _SCATTERED if _is_scattered(wanted, own) else None


def _is_scattered(letters: str, text: str) -> bool:
    """Whether the letters stand in the text in their order: `clpfr` in `clipped_fraction`."""
    rest = iter(text)
    return all(letter in rest for letter in letters if letter != " ")
