"""Lines of `metrics.jsonl` and `rollouts.jsonl`. Written by the trainer's recorder; read by the screen and by people.

Metric names are those of Atropos; the healthy bands are the documented ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import FiniteFloat

from grpo_engine.wire.codec import Message

METRIC_NAMES = (
    "train/loss", "train/grad_norm", "train/lr", "train/step_time", "train/sync_time", "train/data_fetch_time",
    "train/tokens_per_second", "train/gpu_memory_gb",
    "grpo/mean_ratio", "grpo/clipped_fraction", "grpo/ess", "grpo/entropy", "grpo/kl",
    "alignment/diff_mean", "alignment/diff_abs_mean", "alignment/diff_max",
    "logprobs/training_mean", "logprobs/inference_mean",
    "reward/mean", "reward/std", "reward/frac_zero_std",
    "rollout/length_mean", "rollout/truncated_fraction", "rollout/staleness_mean", "rollout/staleness_max",
)  # fmt: skip
"""Names that every run has, except those that the machine lacks (GPU memory on a CPU)."""

EVALUATION_PREFIX = "eval/"
"""Prefix of what is measured on held-out prompts every `eval_every` steps: `eval/avg@4`, `eval/pass@1` …,
each with its standard error over prompts (`…_se`), `eval/num_prompts`, `eval/length_mean`, `eval/truncated_fraction`,
`eval/other_version_fraction` (completions sampled from other weights than the published version) and `eval/time`
(seconds). With several environments, `eval/<environment>/…` as well."""


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

    time: float
    """Unix seconds at the end of the step."""
    step: int
    """Optimizer steps done, counted from 1; 0 is the evaluation before the first."""
    policy_version: int
    metrics: dict[str, FiniteFloat]


class SampledCompletion(Message):
    """One completion of a `RolloutLine`; the lists have one entry per generated token, the end token included."""

    text: str
    """From the first generated token to the last; with several turns also the text between them."""
    reward: float
    advantage: float
    token_ids: list[int]
    inference_logprobs: list[float]
    training_logprobs: list[float]
    """Empty where the completion was not trained on."""
    policy_versions: list[int]
    token_texts: list[str] = []
    """The text that each token adds, so that a reader needs no tokenizer. A character made of several tokens is at the
    last of them. Empty in files of earlier versions, like the fields below."""
    read_before: dict[int, str] = {}
    """With several turns, the text that the model read before it generated the token of that index."""
    entropies: list[float] = []
    """In nats, of the trainer's next-token distribution where each token was sampled; empty where not trained on."""
    is_truncated: bool | None = None
    """Whether the length limit ended it."""


class RolloutLine(Message):
    """One trained group, as the viewer shows it."""

    time: float
    step: int
    environment: str | None
    """Its name, as in evaluations; its id at the rollout API where that sends no names."""
    prompt: str
    completions: list[SampledCompletion]
