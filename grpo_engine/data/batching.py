"""Groups to batches: right-padded rows, shifted so that position t predicts label t, and their micro-batches.

B rows, T positions, S sequences of a group. On the CPU until `to`. A mask says what is trained. Which rows share
a micro-batch is decided here, from lengths alone; `packing` is the other layout of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_engine.algo.advantages import Baseline, Scale, group_advantages
from grpo_engine.data.groups import GroupRows, check_group, read_group, sender_words
from grpo_engine.errors import DataError
from grpo_engine.wire.inference import LogprobsMode
from grpo_engine.wire.rollouts import ScoredGroup

__all__ = [
    "Batch",
    "MicroBatch",
    "batch_advantages",
    "bundles",
    "check_group",
    "make_batch",
    "micro_batches",
    "plan_bundles",
    "plan_rows",
    "plan_shares",
    "prompt_lengths",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Rows to train on.

    Example: `tokens [5, 9, 7, 2]`, of which 7 and 2 are the completion, become
    `inputs [5, 9, 7]`, `labels [9, 7, 2]`, `mask [no, yes, yes]`, `rollout_logprobs [0, -0.3, -0.01]`.
    """

    inputs: Tensor
    """(B, T) int64 tokens that the model reads, 0 where padded."""
    labels: Tensor
    """(B, T) int64 the token after each input: a valid id everywhere, 0 where padded."""
    mask: Tensor
    """(B, T) bool: which labels are trained; at least one a row."""
    lengths: Tensor
    """(B,) int64 inputs that are not padding."""
    rollout_logprobs: Tensor
    """(B, T) fp32 of the labels when they were sampled, 0 outside the mask."""
    temperatures: Tensor
    """(B,) fp32: divide the logits by it, to compare with `rollout_logprobs`."""
    rewards: Tensor
    """(B,) fp32."""
    group_ids: Tensor
    """(B,) int64: index of the row's group in the input."""
    is_zeroed: Tensor
    """(B,) bool: the environment excludes it from the gradient; its reward still counts in its group."""
    is_truncated: Tensor
    """(B,) bool: ended at a length limit, the sampler's or `seq_len`."""
    token_advantages: Tensor | None
    """(B, T) fp32 that environments gave; None where none did."""
    has_token_advantages: Tensor
    """(B,) bool: rows with `token_advantages`."""
    ref_logprobs: Tensor | None
    """(B, T) fp32 of a reference policy, as environments gave them, 0 outside the mask; None where none did."""
    has_ref_logprobs: Tensor
    """(B,) bool: rows with `ref_logprobs`."""
    policy_versions: Tensor
    """(B, T) int64: version of the weights that sampled each label; 0 outside the mask."""
    has_policy_versions: Tensor
    """(B,) bool: rows with `policy_versions`."""
    env_ids: tuple[int | None, ...]
    """(B,) environments that sent the rows."""
    is_cut: Tensor
    """(B,) bool: was longer than `seq_len` and was cut."""

    @property
    def attention_mask(self) -> Tensor:
        """(B, T) bool: which inputs are not padding."""
        return torch.arange(self.inputs.shape[1], device=self.lengths.device) < self.lengths[:, None]

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self.inputs)

    @property
    def num_tokens(self) -> int:
        """Trained tokens."""
        return int(self.mask.sum())

    @property
    def num_cut(self) -> int:
        """Rows that were longer than `seq_len`."""
        return int(self.is_cut.sum())

    @property
    def num_inputs(self) -> int:
        """Tokens that the model reads, padding left out."""
        return int(self.lengths.sum())

    def to(self, device: torch.device | str) -> Batch:
        """A copy on another device; copies to a GPU are asynchronous."""
        waits = torch.device(device).type == "cpu"
        return replace(self, **{n: value.to(device, non_blocking=not waits) for n, value in self._tensors().items()})

    def rows(self, rows: Tensor) -> Batch:
        """These rows, no wider than the longest of them."""
        width = int(self.lengths[rows].max())
        chosen = {
            name: value[rows] if value.ndim == 1 else value[rows, :width] for name, value in self._tensors().items()
        }
        return replace(self, **chosen, env_ids=tuple(self.env_ids[row] for row in rows.tolist()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Tensors as arrays: torch's own pickling takes a third of a millisecond a tensor."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        arrays = {name: value.numpy() for name, value in values.items() if isinstance(value, Tensor)}
        return _batch_of_arrays, ({**values, **arrays},)

    def _tensors(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _batch_of_arrays(values: Mapping[str, Any]) -> Batch:
    tensors = {name: torch.from_numpy(value) for name, value in values.items() if isinstance(value, np.ndarray)}
    return Batch(**{**values, **tensors})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Rows that go through the model together, and the normalisers of the batch that they are part of."""

    batch: Batch
    """Only these rows, trimmed to their longest."""
    row_numbers: Tensor
    """(b,) int64: where they stand in the whole batch."""
    num_sequences: int
    """Sequences of the whole batch."""
    num_tokens: int
    """Trained tokens of the whole batch."""
    is_counted: bool = True
    """Whether it contributes to gradients and metrics; not where a rank repeats one, so that all have as many."""

    def part_of(self, values: Tensor) -> Tensor:
        """This micro-batch's rows of values of the whole batch, (B,) or (B, T)."""
        part = values[self.row_numbers.to(values.device)]
        return part if values.ndim == 1 else part[:, : self.batch.inputs.shape[1]]

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same on another device; the row numbers stay."""
        return replace(self, batch=self.batch.to(device))


def make_batch(
    groups: Sequence[ScoredGroup],
    *,
    seq_len: int,
    default_logprobs_mode: LogprobsMode = "raw",
    environment_names: Mapping[int, str] | None = None,
) -> Batch:
    """Check groups and lay them out, in their order.

    A sequence of more than `seq_len` tokens is cut there, and marked `is_truncated` and `is_cut`.

    Args:
        groups: as the rollout API hands them out.
        seq_len: longest sequence, prompt included.
        default_logprobs_mode: convention of groups that do not declare one.
        environment_names: env_id to name, for messages.

    Raises:
        DataError: no groups, a group that `check_group` refuses, or a sequence whose prompt alone fills `seq_len`.
        ValueError: `seq_len` below 2.
    """
    if seq_len < 2:
        raise ValueError(f"seq_len = {seq_len}: a sequence needs at least 2 tokens, one to read and one to predict")
    if not groups:
        raise DataError("a batch without groups: wait for the rollout API to deliver some")
    names = environment_names or {}
    read = [read_group(group, environment_names=names, default_logprobs_mode=default_logprobs_mode) for group in groups]
    layout = _Layout.of(read, seq_len)
    is_trained = layout.padded(torch.cat([rows.is_trained for rows in read]))
    _refuse_untrained(is_trained, read, seq_len, names)
    tokens = layout.padded(torch.cat([rows.tokens for rows in read]))  # (B, T + 1)
    mask = is_trained[:, 1:]
    is_cut = torch.cat([rows.lengths for rows in read]) > seq_len
    has_advantages = _each_row(read, [rows.advantages is not None for rows in read])
    has_versions = _each_row(read, [rows.policy_versions is not None for rows in read])
    has_reference = _each_row(read, [rows.ref_logprobs is not None for rows in read])
    versions = layout.optional([rows.policy_versions for rows in read], read, torch.int64)
    return Batch(
        inputs=torch.where(layout.is_filled[:, 1:], tokens[:, :-1], 0),  # a last token predicts nothing
        labels=tokens[:, 1:].contiguous(),
        mask=mask.contiguous(),
        lengths=layout.lengths - 1,
        rollout_logprobs=layout.padded(torch.cat([rows.rollout_logprobs for rows in read]))[:, 1:].contiguous(),
        temperatures=torch.cat([rows.temperatures for rows in read]),
        rewards=torch.cat([rows.rewards for rows in read]),
        group_ids=_each_row(read, list(range(len(read)))),
        is_zeroed=torch.cat([rows.is_zeroed for rows in read]),
        is_truncated=torch.cat([rows.is_truncated for rows in read]) | is_cut,
        token_advantages=(
            layout.optional([rows.advantages for rows in read], read, torch.float32) if has_advantages.any() else None
        ),
        has_token_advantages=has_advantages,
        ref_logprobs=(
            layout.optional([rows.ref_logprobs for rows in read], read, torch.float32) if has_reference.any() else None
        ),
        has_ref_logprobs=has_reference,
        policy_versions=torch.where(mask, versions, 0),
        has_policy_versions=has_versions,
        env_ids=tuple(rows.env_id for rows in read for _ in range(len(rows.lengths))),
        is_cut=is_cut,
    )


def batch_advantages(
    batch: Batch,
    *,
    scale: Scale = "group",
    ddof: int = 1,
    epsilon: float = 1e-4,
    baseline: Baseline = "mean",
) -> Tensor:
    """(B, T) fp32: `group_advantages` of the rewards, the environment's own where it sent any, 0 where excluded.

    Computed on the whole batch, since a micro-batch may not have all rows of a group.
    """
    per_row = group_advantages(batch.rewards, batch.group_ids, scale, ddof, epsilon, baseline)
    advantages = per_row[:, None].expand(batch.mask.shape)
    if batch.token_advantages is not None:
        advantages = torch.where(batch.has_token_advantages[:, None], batch.token_advantages, advantages)
    return torch.where(batch.is_zeroed[:, None] | ~batch.mask, 0.0, advantages)


def micro_batches(
    batch: Batch,
    batch_size: int | None = None,
    *,
    max_tokens: int | None = None,
    shares_prompts: bool = False,
    rank: int = 0,
    num_ranks: int = 1,
) -> list[MicroBatch]:
    """Split a batch, by rows or by positions, so that the losses add up to the whole batch's.

    Args:
        max_tokens: positions of a micro-batch, padding included, or with a prompt that is shared counted once.
        shares_prompts: keep completions of one prompt together, for `packing`; otherwise rows of about one length.
        rank, num_ranks: return the share of one rank; every rank has as many micro-batches, since each takes part in
            the collective operations of all.

    Raises:
        ValueError: not exactly one limit, one below 1, or a row that alone exceeds `max_tokens`.
    """
    lengths, num_tokens = batch.lengths.tolist(), batch.num_tokens
    prompts = prompt_lengths(batch).tolist()
    shared = bundles(batch) if shares_prompts else [[row] for row in range(len(lengths))]
    plans = []
    for share in plan_shares(shared, prompts, lengths, num_ranks):
        if shares_prompts:
            plans.append(plan_bundles(share, prompts, lengths, batch_size, max_tokens=max_tokens))
        else:
            rows = [row for bundle in share for row in bundle]
            plans.append(plan_rows(lengths, batch_size, max_tokens=max_tokens, rows=rows))
    own, most = plans[rank], max(map(len, plans))
    shortest = own[-1] if own else [min(range(len(lengths)), key=lengths.__getitem__)]
    repeated = [shortest[-1:]] * (most - len(own))
    return [
        MicroBatch(
            batch=batch.rows(torch.tensor(rows)),
            row_numbers=torch.tensor(rows),
            num_sequences=batch.num_sequences,
            num_tokens=num_tokens,
            is_counted=number < len(own),
        )
        for number, rows in enumerate([*own, *repeated])
    ]


def plan_shares(
    shared: Sequence[Sequence[int]], prompts: Sequence[int], lengths: Sequence[int], num_ranks: int
) -> list[list[Sequence[int]]]:
    """The bundles of each rank, with about as many positions on each: the largest first, to the rank with the least.

    Fewer bundles than ranks are taken apart into rows.

    Args:
        shared: rows that stay together.
        prompts, lengths: of every row; a bundle's prompt counts once.
    """
    if num_ranks == 1:
        return [list(shared)]
    units = shared if len(shared) >= num_ranks else [[row] for bundle in shared for row in bundle]

    def size(unit: Sequence[int]) -> int:
        return sum(lengths[row] for row in unit) - (len(unit) - 1) * prompts[unit[0]]

    shares: list[list[Sequence[int]]] = [[] for _ in range(num_ranks)]
    sizes = [0] * num_ranks
    for unit in sorted(units, key=size, reverse=True):
        least = sizes.index(min(sizes))
        shares[least].append(unit)
        sizes[least] += size(unit)
    return shares


def prompt_lengths(batch: Batch) -> Tensor:
    """(B,) int64 inputs up to and with the one that predicts the first trained label."""
    return batch.mask.int().argmax(dim=1) + 1


def bundles(batch: Batch) -> list[list[int]]:
    """Rows that have one prompt: of one group, and equal up to the first trained label."""
    by_prompt: dict[tuple[int, bytes], list[int]] = {}
    groups, inputs = batch.group_ids.tolist(), batch.inputs.cpu().numpy()
    for row, length in enumerate(prompt_lengths(batch).tolist()):
        by_prompt.setdefault((groups[row], inputs[row, :length].tobytes()), []).append(row)
    return list(by_prompt.values())


def plan_rows(
    lengths: Sequence[int],
    batch_size: int | None = None,
    *,
    max_tokens: int | None = None,
    rows: Sequence[int] | None = None,
) -> list[list[int]]:
    """Which rows share a micro-batch: neighbours in length, so that little is padding.

    The longest come first: memory that suffices for the first micro-batch then suffices for all.

    Args:
        rows: which to plan; None: all.

    Raises:
        ValueError: as `micro_batches`.
    """
    most_rows, most_tokens = _limits(batch_size, max_tokens, max(lengths, default=0))
    plan: list[list[int]] = []
    for row in sorted(range(len(lengths)) if rows is None else sorted(rows), key=lambda row: -lengths[row]):
        # The first row of a micro-batch is its longest, to which the others are padded.
        if not plan or len(plan[-1]) >= most_rows or lengths[plan[-1][0]] * (len(plan[-1]) + 1) > most_tokens:
            plan.append([])
        plan[-1].append(row)
    return plan


def plan_bundles(
    shared: Sequence[Sequence[int]],
    prompts: Sequence[int],
    lengths: Sequence[int],
    batch_size: int | None = None,
    *,
    max_tokens: int | None = None,
) -> list[list[int]]:
    """Which rows share a micro-batch when those with one prompt stay together as far as the limit allows.

    Args:
        shared: `bundles`.
        prompts: `prompt_lengths`, of every row.

    Raises:
        ValueError: as `micro_batches`.
    """
    most_rows, most_tokens = _limits(batch_size, max_tokens, max(lengths, default=0))
    plan: list[list[int]] = []
    size = 0
    for rows in sorted(shared, key=lambda rows: -max(lengths[row] for row in rows)):
        prompt_is_there = False
        for row in rows:
            added = lengths[row] - (prompts[row] if prompt_is_there else 0)
            if not plan or len(plan[-1]) >= most_rows or size + added > most_tokens:
                plan.append([])
                size, added = 0, lengths[row]
            plan[-1].append(row)
            size += added
            prompt_is_there = True
    return plan


def _limits(batch_size: int | None, max_tokens: int | None, longest: int) -> tuple[float, float]:
    """Rows and positions a micro-batch, of which one is unlimited."""
    if (batch_size is None) == (max_tokens is None):
        raise ValueError(f"batch_size = {batch_size}, max_tokens = {max_tokens}: give exactly one of them")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size = {batch_size}: must be at least 1 row")
    if max_tokens is not None and max_tokens < longest:
        raise ValueError(f"max_tokens = {max_tokens}: a row of {longest} does not fit; raise it, or lower seq_len")
    return batch_size or math.inf, max_tokens or math.inf


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layout:
    """Where the tokens of ragged sequences stand among padded rows."""

    lengths: Tensor
    """(B,) tokens of each row, cut at `seq_len`."""
    is_kept: Tensor
    """(F,) bool: tokens that are not cut off."""
    is_filled: Tensor
    """(B, T + 1) bool: places that hold a token; as many as `is_kept` has, and in the same order."""

    @classmethod
    def of(cls, read: Sequence[GroupRows], seq_len: int) -> _Layout:
        full_lengths = torch.cat([rows.lengths for rows in read])
        lengths = full_lengths.clamp(max=seq_len)
        starts = full_lengths.cumsum(0) - full_lengths
        positions = torch.arange(int(full_lengths.sum())) - starts.repeat_interleave(full_lengths)
        width = int(lengths.max())
        return cls(lengths=lengths, is_kept=positions < seq_len, is_filled=torch.arange(width) < lengths[:, None])

    def padded(self, flat: Tensor) -> Tensor:
        """(B, T + 1) of (F,), 0 where padded."""
        rows = torch.zeros(self.is_filled.shape, dtype=flat.dtype)
        rows[self.is_filled] = flat[self.is_kept]
        return rows

    def optional(self, values: Sequence[Tensor | None], read: Sequence[GroupRows], dtype: torch.dtype) -> Tensor:
        """(B, T) aligned with the labels, 0 in groups that gave none."""
        given = [
            torch.zeros(len(rows.tokens), dtype=dtype) if value is None else value
            for value, rows in zip(values, read, strict=True)
        ]
        return self.padded(torch.cat(given))[:, 1:].contiguous()


def _each_row(read: Sequence[GroupRows], values: Sequence[int] | Sequence[bool]) -> Tensor:
    """(B,) of one value a group."""
    return torch.tensor(values).repeat_interleave(torch.tensor([len(rows.lengths) for rows in read]))


def _refuse_untrained(
    is_trained: Tensor, read: Sequence[GroupRows], seq_len: int, environment_names: Mapping[int, str]
) -> None:
    trains = is_trained.any(-1)
    if trains.all():
        return
    row = int((~trains).nonzero()[0])  # counted on through the groups
    for rows in read:
        if row < len(rows.lengths):
            raise DataError(
                f"group of {sender_words(rows.env_id, environment_names)}: sequence {row} has "
                f"{int(rows.lengths[row])} tokens, and none of its first {seq_len} is trained: "
                "raise seq_len, or send shorter prompts"
            )
        row -= len(rows.lengths)
