"""Rows without padding in which completions share their prompt, so that it goes through the network once.

A row holds a prompt and then one completion after the other, or several such bundles. Each completion sees its prompt
and itself, at the positions it would have alone, so that every hidden state is the same as in a row of its own. Two
numbers per position, `segments` and `parents`, say what it attends to; `models.attention` makes the mask of a kernel
from them.

B rows of a batch, T of their positions; R packed rows, L of their positions; M of these hold a token, N see a trained
label.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional

from grpo_engine.data.batching import Batch, bundles, prompt_lengths

NO_SEGMENT = -1
"""Of padding."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRows:
    """Rows with shared prompts.

    Example: prompt `[5, 9]` with completions `[7, 2]` and `[8, 4, 2]`, whose last tokens are labels only, become
    `inputs [5, 9, 7, 8, 4]`, `positions [0, 1, 2, 2, 3]`, `segments [0, 0, 1, 3, 3]`, `parents [0, 0, 0, 0, 0]`; the
    token 9 predicts both 7 and 8.
    """

    inputs: Tensor
    """(R, L) int64, 0 where padded."""
    positions: Tensor
    """(R, L) int64, as in a row of its own."""
    segments: Tensor
    """(R, L) int64: number of its prompt (even) or completion (odd) in the batch; -1 where padded."""
    parents: Tensor
    """(R, L) int64: the segment of the prompt that it follows; a prompt's own."""
    trained: Tensor
    """(N,) int64 place in R × L of the hidden state that predicts each trained label, in the order of `Batch.mask`."""

    @property
    def size(self) -> int:
        """R × L: positions that go through the network."""
        return self.inputs.numel()

    def padded(self, width: int) -> PackedRows:
        """The same in one row of `width` positions."""
        added = (0, width - self.inputs.shape[1])
        return replace(
            self,
            inputs=functional.pad(self.inputs, added),
            positions=functional.pad(self.positions, added),
            segments=functional.pad(self.segments, added, value=NO_SEGMENT),
            parents=functional.pad(self.parents, added, value=NO_SEGMENT),
        )

    def to(self, device: torch.device | str) -> PackedRows:
        """The same on another device."""
        return PackedRows(
            **{field.name: getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)}
        )


def pack(batch: Batch, *, in_one_row: bool, most_positions: float = math.inf) -> PackedRows | None:
    """Lay a batch out with each group's prompt once; None where that takes more positions than `most_positions`.

    Args:
        batch: on the CPU.
        in_one_row: all bundles one after the other, for kernels that skip what a position may not see; otherwise a
            row for each, so that a mask of L × L stays small.
    """
    shared = bundles(batch)
    prompts, lengths = prompt_lengths(batch).tolist(), batch.lengths.tolist()
    sizes = [prompts[rows[0]] + sum(lengths[row] - prompts[row] for row in rows) for rows in shared]
    width = sum(sizes) if in_one_row else max(sizes)
    num_rows = 1 if in_one_row else len(shared)
    if num_rows * width > most_positions:
        return None
    pieces: list[tuple[int, int, int, int, int, int]] = []  # row of the batch, from, to, first place, segment, parent
    last_of_prompt = torch.zeros(len(lengths), dtype=torch.int64)  # (B,) its place, from where the first label is seen
    end = 0
    for index, rows in enumerate(shared):
        end = end if in_one_row else index * width
        parent, prompt = 2 * rows[0], prompts[rows[0]]
        pieces.append((rows[0], 0, prompt, end, parent, parent))
        end += prompt
        last_of_prompt[rows] = end - 1
        for row in rows:
            pieces.append((row, prompt, lengths[row], end, 2 * row + 1, parent))
            end += lengths[row] - prompt

    table = torch.tensor(pieces)  # (pieces, 6)
    sizes_of = table[:, 2] - table[:, 1]
    step = torch.arange(int(sizes_of.sum())) - (sizes_of.cumsum(0) - sizes_of).repeat_interleave(sizes_of)
    row_of, start, _, first, segment, parent_of = table.repeat_interleave(sizes_of, dim=0).unbind(1)  # (M,) each
    position, place = start + step, first + step

    def laid(values: Tensor, empty: int) -> Tensor:
        rows = torch.full((num_rows, width), empty)
        rows.view(-1)[place] = values
        return rows

    place_of = torch.zeros_like(batch.inputs)  # (B, T) of every position from which a label is seen
    place_of[torch.arange(len(lengths)), prompt_lengths(batch) - 1] = last_of_prompt
    is_completion = segment % 2 == 1
    place_of[row_of[is_completion], position[is_completion]] = place[is_completion]
    return PackedRows(
        inputs=laid(batch.inputs[row_of, position], 0),
        positions=laid(position, 0),
        segments=laid(segment, NO_SEGMENT),
        parents=laid(parent_of, NO_SEGMENT),
        trained=place_of[batch.mask],
    )
