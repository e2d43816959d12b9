"""One optimizer step: forward, loss and backward over micro-batches, then clip and update.

B rows, T tokens of a micro-batch; N trained tokens. Gradients of micro-batches add up to those of one big batch, since
every loss is divided by the whole batch's normaliser. Weights that inference reads are not touched here: the update
goes to the masters, and `Trainee.write_weights` carries it over when the bridge says so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_engine.algo.alignment import alignment_metrics
from grpo_engine.algo.loss import LossInputs, drift_metrics, policy_loss
from grpo_engine.algo.schedule import learning_rate
from grpo_engine.data.batching import Batch, batch_advantages, make_batch, micro_batches
from grpo_engine.errors import DataError
from grpo_engine.train.trainee import Trainee
from grpo_engine.wire.rollouts import ScoredGroup

log = logging.getLogger(__name__)

MAXIMA = frozenset({"alignment/diff_max"})
"""Metrics of which a batch has the largest of its micro-batches, not their mean."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """What one step did."""

    applied: bool
    """Whether the update was made; a step whose loss or gradient is not finite is skipped."""
    metrics: dict[str, float]
    advantages: Tensor
    """(B, T) of the whole batch, in its order."""
    logprobs: Tensor
    """(B, T) of the policy before the update, in the batch's order; 0 where not trained."""


def gradient_step(trainee: Trainee, batch: Batch, *, step: int, policy_version: int) -> StepResult:
    """Train on one batch.

    Args:
        step: optimizer steps done before this one.
        policy_version: version of the weights that inference serves now, for the staleness of the samples.

    Raises:
        TrainingDiverged: too many steps in a row were not finite.
    """
    config = trainee.config
    advantages = batch_advantages(batch, scale=trainee.advantage_scale)
    denominator = trainee.loss_config.denominator(num_sequences=batch.num_sequences, num_tokens=batch.num_tokens)
    sums = _Sums()
    logprobs = torch.zeros_like(batch.rollout_logprobs)
    for micro_batch in micro_batches(batch, config.batch_size):
        rows = micro_batch.batch.to(trainee.device)
        new_logprobs, entropy = trainee.logprobs(rows)
        outputs = policy_loss(
            LossInputs(
                logprobs=new_logprobs,
                rollout_logprobs=rows.rollout_logprobs,
                advantages=micro_batch.part_of(advantages).to(trainee.device),
                mask=rows.mask,
                entropy=entropy,
                denominator=denominator,
            ),
            trainee.loss_config,
        )
        torch.autograd.backward(outputs.loss)
        measured = alignment_metrics(new_logprobs.detach(), rows.rollout_logprobs, rows.mask)
        sums.add(outputs.loss, outputs.metrics, measured)
        logprobs[micro_batch.row_numbers, : rows.mask.shape[1]] = new_logprobs.detach().to(logprobs)

    rate = learning_rate(
        step,
        peak=config.lr,
        warmup_steps=config.warmup_steps,
        schedule=config.lr_schedule,
        total_steps=config.training_steps,
    )
    metrics = sums.means()
    metrics["grpo/ess"] = float(drift_metrics(logprobs - batch.rollout_logprobs, batch.mask)["ess"])
    norm = trainee.update(rate, is_finite=math.isfinite(metrics["train/loss"]))
    metrics |= {"train/grad_norm": norm, "train/lr": rate, **rollout_metrics(batch, policy_version)}
    applied = math.isfinite(norm) and math.isfinite(metrics["train/loss"])
    if not applied:
        log.warning("step %d: loss %s, gradient norm %s: skipped", step + 1, metrics["train/loss"], norm)
    return StepResult(applied=applied, metrics=metrics, advantages=advantages, logprobs=logprobs)


def rollout_metrics(batch: Batch, policy_version: int) -> dict[str, float]:
    """What the batch itself says: rewards, lengths, truncation, staleness."""
    lengths = batch.mask.sum(dim=1)
    says_version = batch.mask & batch.has_policy_versions[:, None]
    staleness = (policy_version - batch.policy_versions)[says_version].clamp(min=0).float()
    _, group = torch.unique(batch.group_ids, return_inverse=True)
    lowest, highest = (
        torch.zeros(int(group.max()) + 1).scatter_reduce(0, group, batch.rewards, how, include_self=False)
        for how in ("amin", "amax")
    )
    return {
        "reward/mean": float(batch.rewards.mean()),
        "reward/std": float(batch.rewards.std()) if len(batch.rewards) > 1 else 0.0,
        "reward/frac_zero_std": float((lowest == highest).float().mean()),
        "rollout/length_mean": float(lengths.float().mean()),
        "rollout/truncated_fraction": float(batch.is_truncated.float().mean()),
        **(
            {"rollout/staleness_mean": float(staleness.mean()), "rollout/staleness_max": float(staleness.max())}
            if len(staleness)
            else {}  # a stock environment does not say which weights it sampled from
        ),
    }


def drop_stale(groups: Sequence[ScoredGroup], version: int, max_staleness: int | None) -> list[ScoredGroup]:
    """The groups whose oldest token is at most `max_staleness` policy versions old; the rest is said in the log."""
    if max_staleness is None:
        return list(groups)
    fresh = [group for group in groups if version - _oldest_version(group) <= max_staleness]
    if len(fresh) < len(groups):
        log.warning(
            "%d of %d groups are over %d versions old: dropped", len(groups) - len(fresh), len(groups), max_staleness
        )
    return fresh


def fitting_batch(groups: Sequence[ScoredGroup], seq_len: int) -> Batch:
    """A batch of the groups that can be trained on; others are named in the log and left out, so that one ends no run.

    Raises:
        DataError: none can be, so that it is the environment that is wrong and not a group.
    """
    try:
        return make_batch(groups, seq_len=seq_len)
    except DataError:
        return make_batch(list(_fitting(groups, seq_len)) or groups, seq_len=seq_len)


def _fitting(groups: Sequence[ScoredGroup], seq_len: int) -> Iterator[ScoredGroup]:
    for group in groups:
        try:
            make_batch([group], seq_len=seq_len)
        except DataError as error:
            log.error("group left out: %s", error)
        else:
            yield group


def _oldest_version(group: ScoredGroup) -> int:
    """Version of the oldest trained token; a group that does not say counts as fresh, as from a stock environment."""
    versions = [
        version
        for labels, row in zip(group.masks, group.policy_versions or [], strict=False)
        for label, version in zip(labels, row, strict=True)
        if label >= 0
    ]
    return min(versions, default=2**62)


class _Sums:
    """Metrics of micro-batches on their way to a batch's: means weighed by trained tokens, read off the device once."""

    def __init__(self) -> None:
        self._loss: list[Tensor] = []
        self._tokens: list[Tensor] = []
        self._metrics: list[Mapping[str, Tensor]] = []

    def add(self, loss: Tensor, of_loss: Mapping[str, Tensor], of_alignment: Mapping[str, Tensor]) -> None:
        names = {name: f"grpo/{name}" for name in of_loss if name != "num_tokens"}
        alignment = {"training_mean": "logprobs/training_mean", "inference_mean": "logprobs/inference_mean"}
        self._loss.append(loss.detach())
        self._tokens.append(of_loss["num_tokens"])
        self._metrics.append(
            {
                **{new: of_loss[old] for old, new in names.items()},
                **{alignment.get(name, f"alignment/{name}"): value for name, value in of_alignment.items()},
            }
        )

    def means(self) -> dict[str, float]:
        tokens = torch.stack(self._tokens).double()
        weights = tokens / tokens.sum().clamp(min=1)
        names = list(self._metrics[0])
        table = torch.stack([torch.stack([m[name].double() for m in self._metrics]) for name in names])
        means, maxima = (table * weights).sum(dim=1).tolist(), table.amax(dim=1).tolist()
        reduced = {n: maxima[i] if n in MAXIMA else means[i] for i, n in enumerate(names)}
        return {"train/loss": float(torch.stack(self._loss).sum()), **reduced}
