"""One batch: advantages, reference, then forward, loss and backward over micro-batches, update, and metrics.

B rows, T tokens of the batch; b rows, t tokens of a micro-batch. Gradients of micro-batches add up to those of one big
batch, since every loss is divided by the whole batch's normaliser. Weights that inference reads are not touched
here: the update changes the masters, and `Trainee.write_weights` copies them when the bridge publishes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_engine.algo.advantages import equal_groups, overlong_penalty
from grpo_engine.algo.alignment import alignment_metrics, staleness_metrics
from grpo_engine.algo.loss import LossInputs, LossOutputs, drift_metrics, policy_loss
from grpo_engine.algo.schedule import learning_rate
from grpo_engine.data.batching import Batch, MicroBatch, batch_advantages, micro_batches
from grpo_engine.ranks.group import RankGroup
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.trainee import Trainee
from grpo_engine.wire.metrics import rank_metric

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """The result of training on one batch."""

    applied: bool
    """Whether the weights changed: not if no row is trained, nor if the loss or gradient is not finite."""
    metrics: dict[str, float]
    """`train/*` and `grpo/*` are means over the batch's updates; `alignment/*`, `logprobs/*` and `grpo/ess` are of the
    policy before the first of them; `reward/*` is as environments sent it, before shaping. Complete on rank 0 alone."""
    is_trained: Tensor
    """(B,) bool: rows that are trained under the settings."""
    advantages: Tensor
    """(B, T) in the batch's order; 0 where not trained."""
    logprobs: Tensor
    """(B, T) of the policy before the first update, in the batch's order; 0 where not trained."""
    entropies: Tensor
    """(B, T) of its next-token distributions, likewise."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GradientStep:
    """Work of all ranks: `gradient_step` with these arguments."""

    batch: Batch
    step: int
    policy_version: int

    def __str__(self) -> str:
        return f"step {self.step + 1}"


class Scores(NamedTuple):
    """The model's outputs for a micro-batch, (b, t) each, without graph."""

    logprobs: Tensor
    entropies: Tensor


def gradient_step(trainee: Trainee, batch: Batch, *, step: int, policy_version: int) -> StepResult:
    """Train on one batch: one update of the weights, or `num_iterations` of them.

    Args:
        step: batches done before this one; the learning rate follows it.
        policy_version: version of the weights that inference serves now, for the staleness of the samples.

    Raises:
        TrainingDiverged: too many updates in a row were not finite.
    """
    with trainee.ranks.together(GradientStep(batch=batch, step=step, policy_version=policy_version)):
        return _gradient_step(trainee, batch, step=step, policy_version=policy_version)


def _gradient_step(trainee: Trainee, batch: Batch, *, step: int, policy_version: int) -> StepResult:
    config, ranks = trainee.config, trainee.ranks
    began = time.perf_counter()
    ranks.clock.take_s()  # of what was before this step
    rate = learning_rate(
        step,
        peak=config.lr,
        warmup_steps=config.warmup_steps,
        schedule=config.lr_schedule,
        total_steps=config.training_steps,
    )
    rewards = shaped_rewards(batch, config)
    is_trained = trained_rows(batch, rewards, config)
    advantages = batch_advantages(
        replace(batch, rewards=rewards), scale=config.advantage_divisor, baseline=config.advantage_baseline
    )
    advantages = torch.where(is_trained[:, None], advantages, 0.0)
    metrics = {"train/loss": 0.0, "train/grad_norm": 0.0, "train/lr": rate}
    if ranks.leads:  # the others would compute the same
        metrics |= rollout_metrics(batch, policy_version)
    logprobs, entropies = (torch.zeros_like(batch.rollout_logprobs) for _ in range(2))
    applied = False

    if is_trained.any():
        rows = is_trained.nonzero()[:, 0]
        parts = _split(batch.rows(rows), trainee)
        advantages_of = [part.part_of(advantages[rows]).to(trainee.device) for part in parts]
        ranks.position.at("the reference")
        references = _references(trainee, parts)
        before: list[Scores] = []  # of each part, before the first update
        updates: list[dict[str, float]] = []
        with trainee.private_weights() if config.num_iterations > 1 else nullcontext():
            for iteration in range(config.num_iterations):
                if iteration > 0:
                    trainee.write_weights()
                measured, scored = _backward(trainee, parts, advantages_of, references, before)
                before = before or scored
                norm, has_moved = _update(trainee, measured, rate, step=step)
                while trainee.has_overflowed:  # a lower scale of the loss fits, and the batch is not lost
                    measured, _ = _backward(trainee, parts, advantages_of, references, before)
                    norm, has_moved = _update(trainee, measured, rate, step=step)
                updates.append({**measured, "train/grad_norm": norm})
                if not has_moved:
                    break  # unchanged weights would give the same result again
                applied = True
        for part, scores in zip(parts, before, strict=True):
            if part.is_counted:
                width = scores.logprobs.shape[1]
                logprobs[rows[part.row_numbers], :width] = scores.logprobs.to(logprobs)
                entropies[rows[part.row_numbers], :width] = scores.entropies.to(entropies)
        own_times = [time.perf_counter() - began, ranks.clock.take_s()]
        logprobs, entropies, times = _of_all_ranks(
            logprobs / trainee.num_copies, entropies / trainee.num_copies, own_times, ranks
        )
        if ranks.leads:
            metrics |= rank_metrics(times)
            metrics |= {name: fmean(update[name] for update in updates) for name in updates[0]}
            metrics |= _initial_metrics(logprobs, batch, is_trained)
            metrics |= {**advantage_metrics(advantages, batch.mask & is_trained[:, None]), **trainee.scale_metrics()}
    else:
        log.warning("step %d: %s; weights unchanged", step + 1, _why_none_is_trained(batch, config))
    return StepResult(
        applied=applied,
        metrics=metrics,
        is_trained=is_trained,
        advantages=advantages,
        logprobs=logprobs,
        entropies=entropies,
    )


def shaped_rewards(batch: Batch, config: TrainConfig) -> Tensor:
    """(B,) rewards from which advantages are computed: less the penalty near the length limit."""
    if not config.overlong_buffer or config.overlong_length is None:
        return batch.rewards
    lengths = batch.mask.sum(dim=1)
    return batch.rewards + config.overlong_penalty * overlong_penalty(
        lengths, config.overlong_length, config.overlong_buffer
    )


def trained_rows(batch: Batch, rewards: Tensor, config: TrainConfig) -> Tensor:
    """(B,) bool: rows that go through the model and into the normaliser.

    Args:
        rewards: (B,) from which advantages are computed.
    """
    is_trained = batch.mask.any(dim=1)
    if config.mask_truncated:
        is_trained = is_trained & ~batch.is_truncated
    if config.drop_equal_groups:
        is_equal, group = equal_groups(rewards, batch.group_ids)
        is_trained = is_trained & (~is_equal[group] | batch.has_token_advantages)
    return is_trained


def _split(batch: Batch, trainee: Trainee) -> list[MicroBatch]:
    max_tokens = trainee.config.micro_batch_tokens
    return micro_batches(
        batch,
        trainee.config.batch_size if max_tokens is None else None,
        max_tokens=max_tokens,
        shares_prompts=trainee.shares_prompts,
        rank=trainee.ranks.rank // trainee.num_copies,
        num_ranks=trainee.num_shares,
    )


def _references(trainee: Trainee, parts: Sequence[MicroBatch]) -> Sequence[Callable[[], Tensor] | None]:
    """Functions that return (b, t) of the reference policy for every part, as environments gave them or else from the
    reference model; or None for every part, since a divergence over some would depend on how rows were split.

    A reference model computes them from here on, beside the trainer where it is a service.
    """
    missing = [part for part in parts if not part.batch.has_ref_logprobs.all()]
    if missing and trainee.reference is None:
        return [None] * len(parts)  # also where some rows have theirs
    computed = iter(() if trainee.reference is None else trainee.reference.start([part.batch for part in missing]))
    return [
        partial(_reference_logprobs, trainee, part, None if part.batch.has_ref_logprobs.all() else next(computed))
        for part in parts
    ]


def _reference_logprobs(trainee: Trainee, part: MicroBatch, computed: Callable[[], Tensor] | None) -> Tensor:
    """(b, t) as environments gave them, and those of the reference model for the other rows."""
    given, is_given = part.batch.ref_logprobs, part.batch.has_ref_logprobs
    if computed is None:
        assert given is not None
        return given.to(trainee.device)
    own = computed()
    return own if given is None else torch.where(is_given[:, None].to(own.device), given.to(own), own)


def _backward(
    trainee: Trainee,
    parts: Sequence[MicroBatch],
    advantages_of: Sequence[Tensor],
    references: Sequence[Callable[[], Tensor] | None],
    before: Sequence[Scores],
) -> tuple[dict[str, float], list[Scores]]:
    """Add up the gradients of all micro-batches; returns what was measured, and the scores of each.

    Args:
        before: scores before the first update on this batch; empty until then, when they are the present ones.
    """
    has_old = trainee.config.num_iterations > 1 or trainee.config.correction != "none"  # else the sampler's are old
    position = trainee.ranks.position
    measured: list[LossOutputs] = []
    scored: list[Scores] = []
    for number, (part, advantages, reference_of) in enumerate(zip(parts, advantages_of, references, strict=True)):
        micro_batch = f"micro-batch {number + 1} of {len(parts)}"
        trainee.begin_micro_batch(is_last=number + 1 == len(parts))
        position.at(f"the forward pass of {micro_batch}")
        logprobs, entropy = trainee.logprobs(part.batch)
        position.at(f"the reference of {micro_batch}")
        reference = None if reference_of is None else trainee.agreed(reference_of())
        position.at(f"the loss of {micro_batch}")
        rows = part.batch.to(trainee.device)
        present = Scores(logprobs.detach(), entropy.detach())
        old = before[number].logprobs if before else present.logprobs
        outputs = policy_loss(
            LossInputs(
                logprobs=logprobs,
                rollout_logprobs=rows.rollout_logprobs,
                advantages=advantages,
                mask=rows.mask,
                old_logprobs=old if has_old else None,
                ref_logprobs=reference,
                entropy=entropy,
                # Gradients are summed over ranks, so copies of a row count as one.
                denominator=trainee.num_summed
                * trainee.loss_config.denominator(num_sequences=part.num_sequences, num_tokens=part.num_tokens),
            ),
            trainee.loss_config,
        )
        if not part.is_counted:
            outputs = replace(outputs, loss=outputs.loss * 0)
        position.at(f"the backward pass of {micro_batch}", is_backward=True)
        torch.autograd.backward(trainee.scaled(outputs.loss))
        measured.append(replace(outputs, loss=outputs.loss.detach()))
        scored.append(present)
    position.at("the metrics")
    counted_times = trainee.num_copies // trainee.num_summed
    return _of_batch(measured, [part.is_counted for part in parts], trainee.ranks, counted_times), scored


def _update(trainee: Trainee, measured: Mapping[str, float], rate: float, *, step: int) -> tuple[float, bool]:
    """Step on the accumulated gradients; returns their norm, and whether the weights changed.

    Adam would change them by its momentum alone, so the gradients are dropped if the correction masks every token.
    """
    config, loss = trainee.config, measured["train/loss"]
    if measured.get("grpo/correction_mean") == 0 and not config.kl_coef and not config.entropy_coef:
        log.warning("step %d: the correction masks every token; weights unchanged", step + 1)
        trainee.drop_gradients()
        return 0.0, False
    trainee.ranks.position.at("the update")
    norm = trainee.update(rate, is_finite=math.isfinite(loss))
    has_moved = math.isfinite(loss) and math.isfinite(norm)
    if trainee.has_overflowed:
        log.info("step %d: gradients beyond float16: computed again with the loss scaled by less", step + 1)
    elif not has_moved:
        log.warning("step %d: loss %s, gradient norm %s: update skipped", step + 1, loss, norm)
    return norm, has_moved


def _of_batch(
    parts: Sequence[LossOutputs], is_counted: Sequence[bool], ranks: RankGroup, counted_times: int
) -> dict[str, float]:
    """Metrics of the whole batch from those of its micro-batches on all ranks, read off the device once.

    The losses add up; the rest are means over trained tokens. The effective sample size is no mean: it is left out.

    Args:
        counted_times: ranks that have the whole loss of the same rows.
    """
    tokens = torch.stack([part.metrics["num_tokens"] for part in parts]).double()
    tokens *= torch.tensor(is_counted, device=tokens.device)
    names = [name for name in parts[0].metrics if name not in ("num_tokens", "ess")]
    table = torch.stack([torch.stack([part.metrics[name].double() for part in parts]) for name in names])
    loss = torch.stack([part.loss.double() for part in parts]).sum()
    sums = ranks.sum(torch.cat([loss[None], tokens.sum()[None], (table * tokens).sum(dim=1)]), "metrics")
    with ranks.position.waiting("reading the metrics"):
        values = torch.cat([sums[:1] / counted_times, sums[2:] / sums[1]]).tolist()
    return dict(zip(["train/loss", *(f"grpo/{name}" for name in names)], values, strict=True))


def _of_all_ranks(
    logprobs: Tensor, entropies: Tensor, own_times: Sequence[float], ranks: RankGroup
) -> tuple[Tensor, Tensor, list[list[float]]]:
    """The rows of all ranks, each of which has its own and 0 elsewhere, and their times by rank; in one operation."""
    if ranks.size == 1:
        return logprobs, entropies, []
    times = logprobs.new_zeros(ranks.size, len(own_times))
    times[ranks.rank] = times.new_tensor(own_times)
    parts = [logprobs, entropies, times]
    sums = ranks.sum(torch.cat([part.flatten() for part in parts]), "log-probs and times")
    logprobs, entropies, times = (
        part.view_as(like)
        for part, like in zip(torch.split(sums, [each.numel() for each in parts]), parts, strict=True)
    )
    return logprobs, entropies, times.tolist()


def rank_metrics(times: Sequence[Sequence[float]]) -> dict[str, float]:
    """`rank/<r>/step_time` and `rank/<r>/wait_time` from the seconds of each rank in the step and in collectives.

    All ranks transfer the same; what one is longer in collectives than the rank that is there the least, it waits.

    >>> rank_metrics([[2.0, 0.25], [2.0, 1.25]])["rank/1/wait_time"]
    1.0
    """
    least = min((in_collectives for _, in_collectives in times), default=0.0)
    return {
        rank_metric(rank, name): seconds
        for rank, (in_step, in_collectives) in enumerate(times)
        for name, seconds in (("step_time", in_step), ("wait_time", in_collectives - least))
    }


def _initial_metrics(logprobs: Tensor, batch: Batch, is_trained: Tensor) -> dict[str, float]:
    """Differences between trainer and sampler before the first update."""
    mask = batch.mask & is_trained[:, None]
    alignment = alignment_metrics(logprobs, batch.rollout_logprobs, mask)
    rooms = {"training_mean": "logprobs", "inference_mean": "logprobs"}
    return {
        **{f"{rooms.get(name, 'alignment')}/{name}": float(value) for name, value in alignment.items()},
        "grpo/ess": float(drift_metrics(logprobs - batch.rollout_logprobs, mask)["ess"]),
    }


def advantage_metrics(advantages: Tensor, mask: Tensor) -> dict[str, float]:
    """`advantage/mean`, `advantage/std` and `advantage/abs_max` over trained tokens.

    Over completions the mean of a group is 0; over tokens it is above 0 where the better completions are longer.

    Args:
        advantages, mask: (B, T).
    """
    of_tokens = advantages[mask]
    return {
        "advantage/mean": float(of_tokens.mean()),
        "advantage/std": float(of_tokens.std(correction=0)),
        "advantage/abs_max": float(of_tokens.abs().max()),
    }


def _why_none_is_trained(batch: Batch, config: TrainConfig) -> str:
    filters = [name for name in ("drop_equal_groups", "mask_truncated") if getattr(config, name)]
    return (
        f"{' and '.join(filters) or 'masks'} leave out all {batch.num_sequences} completions of the batch, "
        f"{int(batch.is_truncated.sum())} of them truncated"
    )


def rollout_metrics(batch: Batch, policy_version: int) -> dict[str, float]:
    """Metrics of the batch itself: rewards, lengths, truncation, staleness."""
    lengths = batch.mask.sum(dim=1)
    says_version = batch.mask & batch.has_policy_versions[:, None]
    staleness = staleness_metrics(batch.policy_versions, says_version, policy_version)
    is_equal, _ = equal_groups(batch.rewards, batch.group_ids)
    return {
        "reward/mean": float(batch.rewards.mean()),
        "reward/std": float(batch.rewards.std()) if len(batch.rewards) > 1 else 0.0,
        "reward/frac_zero_std": float(is_equal.float().mean()),
        "rollout/group_size_mean": batch.num_sequences / len(is_equal),
        "rollout/length_mean": float(lengths.float().mean()),
        "rollout/truncated_fraction": float(batch.is_truncated.float().mean()),
        # a stock environment does not say which weights it sampled from
        **({f"rollout/{name}": float(value) for name, value in staleness.items()} if says_version.any() else {}),
    }
