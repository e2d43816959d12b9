"""Lines of `metrics.jsonl` and `rollouts.jsonl`. Written by the trainer's recorder; read by the screen and by people.

Metric names are those of Atropos; the healthy bands are the documented ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import FailFast, FiniteFloat

from grpo_engine.wire.codec import Message, Time, Whole

METRIC_NAMES = (
    "train/loss", "train/grad_norm", "train/lr", "train/step_time", "train/sync_time", "train/data_fetch_time",
    "train/tokens_per_second", "train/gpu_memory_gb",
    "grpo/mean_ratio", "grpo/clipped_fraction", "grpo/ess", "grpo/entropy", "grpo/kl",
    "alignment/diff_mean", "alignment/diff_abs_mean", "alignment/diff_max",
    "logprobs/training_mean", "logprobs/inference_mean",
    "reward/mean", "reward/std", "reward/frac_zero_std", "advantage/mean", "advantage/std", "advantage/abs_max",
    "rollout/length_mean", "rollout/truncated_fraction", "rollout/staleness_mean", "rollout/staleness_max",
)  # fmt: skip
"""Names that every run has, except those that the machine lacks (GPU memory on a CPU)."""

EVALUATION_PREFIX = "eval/"
"""Prefix of what is measured on held-out prompts every `eval_every` steps: `eval/avg@4`, `eval/pass@1` …,
each with its standard error over prompts (`…_se`), `eval/num_prompts`, `eval/length_mean`, `eval/truncated_fraction`,
`eval/other_version_fraction` (completions sampled from other weights than the published version) and `eval/time`
(seconds). With several environments, `eval/<environment>/…` as well."""


SYNC_METRICS = ("sync/pause_time", "sync/bytes", "sync/num_servers")
"""Of steps whose weights were sent to inference: seconds of the longest pause of a server, bytes to each server, and
servers that serve the new version."""

PHASE_METRICS = ("time/sampling", "time/training", "time/syncing")
"""Where sampling and training take turns (bridge modes colocate and turns): seconds in each phase since the weight
update before. With turns, sampling lasts from the update to the complete batch."""

PHASE_MEMORY_METRICS = ("memory/sampling_gb", "memory/training_gb", "memory/syncing_gb")
"""There as well: memory in use at the end of each phase, in 10⁹ bytes: of rank 0's GPU, by all processes; on a CPU the
resident memory of rank 0."""

SLEEP_METRICS = ("sync/sleep_time", "sync/freed_gb")
"""There as well: seconds in which inference freed its memory before the step, and on a GPU how much of it, in 10⁹
bytes."""

USE_METRICS = ("train/busy_fraction", "rollout/admission_wait_time", "rollout/busy_fraction")
"""Which side waits for the other: the share of a step in which the trainer has a batch; seconds since the batch before
in which environments had sampled as far ahead as they may; and the share in which they had not, both as means over
environments of ours. The latter two are not in steps that are repeated from the journal."""

STALE_GROUPS = "rollout/stale_groups"
"""Groups that were dropped since the batch before, because they were older than `max_staleness`; only with it."""

SAMPLING_SPEED = "inference/tokens_per_second"
"""Tokens of completions that environments posted since the batch before, a second; with `colocate`, that were sampled,
while they were."""

BATCHES_AHEAD, SERVERS_FULL, WORKERS_FULL = "rollout/batches_ahead", "rollout/servers_full", "rollout/workers_full"
"""How far environments may sample ahead, where that follows what the trainer needs (neither `max_batches_offpolicy` nor
`max_staleness` is set); and 1 where instead of it the servers, or `max_workers`, keep them from sampling more."""

CHECKPOINT_WAIT, CHECKPOINT_WRITE = "train/checkpoint_wait_time", "train/checkpoint_write_time"
"""Of the step after a checkpoint: seconds that training stood still for it, which are no part of a step's time. Of the
step in which one was complete: seconds that its writing took, in the background where the state is copied."""

RANK_PREFIX = "rank/"
"""Prefix of what is measured of each rank of a trainer that has several: `rank/<r>/step_time`, seconds of its share of
the step, and `rank/<r>/wait_time`, by how many of them it is longer in collective operations than the rank that is
there the least: a lower bound of what it waits for slower ranks. Not in steps that train no completion."""


def rank_metric(rank: int, name: str) -> str:
    """Name of a metric of one rank."""
    return f"{RANK_PREFIX}{rank}/{name}"


def environment_metric(room: str, environment: str, name: str) -> str:
    """Name of a metric of one environment, in steps whose batch has several: `reward/sort6/mean`.

    There are `reward/<environment>/mean` and `rollout/<environment>/num_groups`.
    """
    return f"{room}/{environment}/{name}"


def is_evaluated_score(name: str) -> bool:
    """Whether a metric is an avg@k or pass@k over all environments: the main scores."""
    return name.startswith(EVALUATION_PREFIX) and "@" in name and name.count("/") == 1 and not name.endswith("_se")


@dataclass(frozen=True, slots=True)
class Band:
    """The closed interval in which a metric is healthy; None: no bound on that side."""

    low: float | None
    high: float | None

    def holds(self, value: float) -> bool:
        """Whether `value` is healthy."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


HEALTHY_BANDS = {
    "grpo/mean_ratio": Band(0.8, 1.2),
    "grpo/clipped_fraction": Band(None, 0.3),
    "alignment/diff_abs_mean": Band(None, 0.1),
    "alignment/diff_mean": Band(-0.1, 0.1),
}
"""As documented; for diff_mean, documented as "about 0", the bound of the absolute mean is used."""


class MetricsLine(Message):
    """Measurements of one optimizer step: `{"time": 1.7e9, "step": 3, "policy_version": 3, "metrics": {…}}`."""

    time: Time
    """Unix seconds at the end of the step."""
    step: Whole
    """Optimizer steps done, counted from 1; 0 is the evaluation before the first."""
    policy_version: Whole
    metrics: dict[str, FiniteFloat]


class SampledCompletion(Message):
    """One completion of a `RolloutLine`; the lists have one entry per generated token, the end token included.

    Validation stops at the first fault of a list: a damaged line may have millions.
    """

    text: str
    """From the first generated token to the last; with several turns also the text between them."""
    reward: float
    advantage: float
    token_ids: Annotated[list[Whole], FailFast()]
    inference_logprobs: Annotated[list[float], FailFast()]
    training_logprobs: Annotated[list[float], FailFast()]
    """Empty where the completion was not trained on."""
    policy_versions: Annotated[list[Whole], FailFast()]
    token_texts: Annotated[list[str], FailFast()] = []
    """The text that each token adds, so that a reader needs no tokenizer. A character made of several tokens is at the
    last of them. Empty in files of earlier versions, like the fields below."""
    read_before: dict[Whole, str] = {}
    """With several turns, the text that the model read before it generated the token of that index."""
    entropies: Annotated[list[float], FailFast()] = []
    """In nats, of the trainer's next-token distribution where each token was sampled; empty where not trained on."""
    is_truncated: bool | None = None
    """Whether the length limit ended it."""


class RolloutLine(Message):
    """One trained group, as the viewer shows it."""

    time: Time
    step: Whole
    environment: str | None
    """Its name, as in evaluations; its id at the rollout API where that sends no names."""
    prompt: str
    completions: list[SampledCompletion]
