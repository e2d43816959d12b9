"""Prompts once: completions of one prompt share a row, so that the prompt goes through the network a single time.

A row holds the prompt and then one completion after the other. Each completion sees the prompt and itself, at the
positions it would have alone, so that every hidden state is the same as in a row of its own. Pays where prompts are a
good part of the tokens; the mask is L × L a row, so long rows are left as they are.

B rows of a batch, T of their positions; R packed rows, L of their positions; N trained tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_engine.data.batching import Batch

MAX_MASK_ELEMENTS = 2**26
"""R × L × L: 64 MB of mask. Beyond it a kernel that needs no mask is the better choice."""
LEAST_GAIN = 0.1
"""Share of the positions that packing must save; below it the plain layout's simpler kernel is as quick."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRows:
    """Rows with shared prompts.

    Example: prompt `[5, 9]` with completions `[7, 2]` and `[8, 4, 2]`, whose last tokens are labels only, become
    `inputs [5, 9, 7, 8, 4]`, `positions [0, 1, 2, 2, 3]`; the token 9 predicts both 7 and 8.
    """

    inputs: Tensor
    """(R, L) int64, 0 where padded."""
    positions: Tensor
    """(R, L) int64, as in a row of its own."""
    attention_mask: Tensor
    """(R, 1, L, L) bool: [r, 0, query, key] whether it may look."""
    trained: Tensor
    """(N,) int64 place in R × L of the hidden state that predicts each trained label, in the order of `Batch.mask`."""


def pack_prompts(batch: Batch) -> PackedRows | None:
    """Share the prompts of a batch's groups; None where that would not pay."""
    lengths = batch.lengths.tolist()
    prompt_lengths = (batch.mask.int().argmax(dim=1) + 1).tolist()  # up to the token that predicts the first label
    bundles = [list(rows) for rows in _bundles(batch, prompt_lengths)]
    widths = [prompt_lengths[b[0]] + sum(lengths[row] - prompt_lengths[row] for row in b) for b in bundles]
    width = max(widths)
    if len(bundles) * width**2 > MAX_MASK_ELEMENTS:
        return None
    if len(bundles) * width > (1 - LEAST_GAIN) * batch.inputs.numel():
        return None

    device = batch.inputs.device
    inputs = torch.zeros(len(bundles), width, dtype=torch.int64, device=device)
    positions = torch.zeros_like(inputs)
    owner = torch.full_like(inputs, -1)  # 0: the prompt; k: the k-th completion; -1: padding
    place = torch.zeros_like(batch.inputs)  # (B, T) where each position of the batch went, in R × L
    steps = torch.arange(max(width, batch.inputs.shape[1]), device=device)
    for index, rows in enumerate(bundles):
        end = prompt_lengths[rows[0]]
        inputs[index, :end] = batch.inputs[rows[0], :end]
        positions[index, :end] = steps[:end]
        owner[index, :end] = 0
        for number, row in enumerate(rows, start=1):
            shared, length = prompt_lengths[row], lengths[row]
            start, end = end, end + length - shared
            inputs[index, start:end] = batch.inputs[row, shared:length]
            positions[index, start:end] = steps[shared:length]
            owner[index, start:end] = number
            place[row, :shared] = index * width + steps[:shared]
            place[row, shared:length] = index * width + steps[start:end]
    query, key = owner[:, :, None], owner[:, None, :]
    may_look = (key == 0) | (key == query)
    is_past = steps[:width, None] >= steps[None, :width]
    itself = torch.eye(width, dtype=torch.bool, device=device)  # so that padding has something to look at
    mask = (may_look & is_past & (query >= 0) & (key >= 0)) | itself
    return PackedRows(inputs=inputs, positions=positions, attention_mask=mask[:, None], trained=place[batch.mask])


def _bundles(batch: Batch, prompt_lengths: list[int]) -> Iterator[list[int]]:
    """Rows that have one prompt: of one group, and equal up to the first trained label."""
    by_prompt: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    groups, tokens = batch.group_ids.tolist(), batch.inputs.tolist()
    for row, length in enumerate(prompt_lengths):
        by_prompt.setdefault((groups[row], tuple(tokens[row][:length])), []).append(row)
    yield from by_prompt.values()
