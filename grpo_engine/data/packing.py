"""Prompts once, padding never: completions share a row with their prompt, so that it goes through the network once.

A row holds a prompt and then one completion after the other, or several such bundles. Each completion sees its prompt
and itself, at the positions it would have alone, so that every hidden state is the same as in a row of its own. Who
sees whom is said by two numbers a position, `segments` and `parents`; `models.attention` makes of it what a kernel
takes.

B rows of a batch, T of their positions; R packed rows, L of their positions; N trained tokens.
"""

from __future__ import annotations

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


def pack(batch: Batch, *, in_one_row: bool) -> PackedRows:
    """Lay a batch out with each group's prompt once.

    Args:
        batch: on the CPU.
        in_one_row: all bundles one after the other, for kernels that skip what a position may not see; otherwise a
            row for each, so that a mask of L × L stays small.
    """
    shared = bundles(batch)
    prompts, lengths = prompt_lengths(batch).tolist(), batch.lengths.tolist()
    sizes = [prompts[rows[0]] + sum(lengths[row] - prompts[row] for row in rows) for rows in shared]
    width = sum(sizes) if in_one_row else max(sizes)
    shape = (1 if in_one_row else len(shared), width)
    inputs, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    segments, parents = torch.full(shape, NO_SEGMENT), torch.full(shape, NO_SEGMENT)
    place = torch.zeros_like(batch.inputs)  # (B, T) where each position of the batch went, in R × L
    steps = torch.arange(batch.inputs.shape[1])

    def lay(row: int, start: int, stop: int, at: int, segment: int, parent: int) -> None:
        """Put positions `start` to `stop` of a row of the batch at `at`."""
        to = slice(at, at + stop - start)
        inputs.view(-1)[to] = batch.inputs[row, start:stop]
        positions.view(-1)[to] = steps[start:stop]
        segments.view(-1)[to] = segment
        parents.view(-1)[to] = parent

    end = 0
    for index, rows in enumerate(shared):
        begin, parent = (end, 2 * rows[0]) if in_one_row else (index * width, 2 * rows[0])
        prompt = prompts[rows[0]]
        lay(rows[0], 0, prompt, begin, parent, parent)
        end = begin + prompt
        for row in rows:
            lay(row, prompt, lengths[row], end, 2 * row + 1, parent)
            place[row, :prompt] = begin + steps[:prompt]
            place[row, prompt : lengths[row]] = end + steps[: lengths[row] - prompt]
            end += lengths[row] - prompt
    return PackedRows(inputs=inputs, positions=positions, segments=segments, parents=parents, trained=place[batch.mask])
