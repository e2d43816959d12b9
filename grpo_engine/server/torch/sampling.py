"""From logits to tokens: penalties, temperature, truncation and sampling, for many rows at once.

Letters: B rows (sequences in flight), V vocabulary, S stop tokens of the whole batch, N rows at the start of the batch.
Pure tensor functions; the loop is in `decoding.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from grpo_engine.wire.inference import GenerateRequest


@dataclass(slots=True, kw_only=True)
class RowTable:
    """The sampling parameters of all rows; tensors with one entry per row, on the model's device."""

    temperature_B: Tensor
    top_p_B: Tensor
    top_k_B: Tensor
    """0: no limit."""
    min_p_B: Tensor
    presence_B: Tensor
    frequency_B: Tensor
    repetition_B: Tensor
    min_tokens_B: Tensor
    limit_B: Tensor
    """Maximum number of tokens of the row."""
    stops_BS: Tensor
    """bool: whether the row ends at this stop token."""
    id_B: Tensor
    """Index of the row's results: its number at the start of the batch."""
    stop_ids_S: Tensor
    has_greedy: bool
    has_only_greedy: bool
    has_truncation: bool
    has_penalty: bool
    most_min_tokens: int

    @classmethod
    def of(
        cls, rows: Sequence[GenerateRequest], limits: Sequence[int], eos_ids: frozenset[int], device: torch.device
    ) -> RowTable:
        """Build the table from the requests of all rows, in order."""

        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        stops = [set(row.stop_token_ids or ()) | (set() if row.ignore_eos else eos_ids) for row in rows]
        stop_ids = sorted(set().union(*stops))
        return cls(
            temperature_B=column([row.temperature for row in rows]),
            top_p_B=column([row.top_p for row in rows]),
            top_k_B=torch.tensor([max(row.top_k, 0) for row in rows], device=device),
            min_p_B=column([row.min_p for row in rows]),
            presence_B=column([row.presence_penalty for row in rows]),
            frequency_B=column([row.frequency_penalty for row in rows]),
            repetition_B=column([row.repetition_penalty for row in rows]),
            min_tokens_B=torch.tensor([row.min_tokens for row in rows], device=device),
            limit_B=torch.tensor(limits, device=device),
            stops_BS=torch.tensor([[i in stop for i in stop_ids] for stop in stops], dtype=torch.bool, device=device),
            id_B=torch.arange(len(rows), device=device),
            stop_ids_S=torch.tensor(stop_ids, dtype=torch.long, device=device),
            has_greedy=any(row.temperature == 0 for row in rows),
            has_only_greedy=all(row.temperature == 0 for row in rows),
            has_truncation=any(row.top_p < 1 or row.top_k > 0 or row.min_p > 0 for row in rows),
            has_penalty=any(
                row.presence_penalty or row.frequency_penalty or row.repetition_penalty != 1 for row in rows
            ),
            most_min_tokens=max(row.min_tokens for row in rows),
        )

    def select(self, index_B: Tensor) -> None:
        """Keep the rows of `index_B`."""
        for field in fields(self):
            if "_B" in field.name:
                setattr(self, field.name, getattr(self, field.name)[index_B])


class TokenCounts:
    """How often each token occurs in a row, for penalties."""

    def __init__(self, prompts: Sequence[Sequence[int]], vocabulary: int, device: torch.device) -> None:
        self.in_prompt_BV = torch.zeros(len(prompts), vocabulary, dtype=torch.bool, device=device)
        self.generated_BV = torch.zeros(len(prompts), vocabulary, dtype=torch.int32, device=device)
        for row, prompt in enumerate(prompts):
            self.in_prompt_BV[row, torch.tensor(prompt, device=device)] = True

    def add(self, tokens_B: Tensor) -> None:
        """Count one more token per row."""
        ones_B1 = torch.ones_like(tokens_B, dtype=torch.int32)[:, None]
        self.generated_BV.scatter_add_(1, tokens_B[:, None], ones_B1)

    def select(self, index_B: Tensor) -> None:
        """Keep the rows of `index_B`."""
        self.in_prompt_BV = self.in_prompt_BV[index_B]
        self.generated_BV = self.generated_BV[index_B]


def process_logits(logits_BV: Tensor, table: RowTable, counts: TokenCounts | None, num_generated: int) -> Tensor:
    """The logits of the sampled distribution, fp32; the argument itself if no setting changes it.

    In vLLM's order: penalties, minimum length, temperature, min_p, top_k, top_p. Rows with temperature 0 keep
    temperature 1 and take the largest logit.
    """
    if counts is not None:
        logits_BV = _penalised(logits_BV, table, counts)
    if num_generated < table.most_min_tokens:
        too_short_B = table.min_tokens_B > num_generated
        forbidden_BV = torch.zeros_like(logits_BV, dtype=torch.bool)
        forbidden_BV[:, table.stop_ids_S] = too_short_B[:, None] & table.stops_BS
        logits_BV = logits_BV.masked_fill(forbidden_BV, -torch.inf)
    greedy_B = table.temperature_B == 0
    temperature_B = torch.where(greedy_B, 1.0, table.temperature_B)
    if not table.has_only_greedy:
        logits_BV = logits_BV / temperature_B[:, None]
    if table.has_truncation and not table.has_only_greedy:
        logits_BV = torch.where(greedy_B[:, None], logits_BV, _truncated(logits_BV, table))
    return logits_BV


def draw(logits_BV: Tensor, table: RowTable, uniform_N: Tensor) -> Tensor:
    """One token per row: (B,) int64. `uniform_N` float64 in [0, 1), one per row at the start of the batch.

    Inverts the cumulative distribution: one random number per row, so that a row with a seed samples the same tokens
    in every batch. float64, because an fp32 sum over 150,000 probabilities loses the rare ones.
    """
    if table.has_only_greedy:
        return logits_BV.argmax(-1)
    cumulative_BV = torch.softmax(logits_BV, -1).cumsum(-1, dtype=torch.float64)
    target_B1 = uniform_N[table.id_B, None] * cumulative_BV[:, -1:]
    drawn_B = torch.searchsorted(cumulative_BV, target_B1, right=True)[:, 0].clamp_(max=logits_BV.shape[-1] - 1)
    return torch.where(table.temperature_B == 0, logits_BV.argmax(-1), drawn_B) if table.has_greedy else drawn_B


def _penalised(logits_BV: Tensor, table: RowTable, counts: TokenCounts) -> Tensor:
    """Repetition over prompt and completion; frequency and presence over the completion (as OpenAI and vLLM)."""
    generated_BV = counts.generated_BV
    seen_BV = counts.in_prompt_BV | (generated_BV > 0)
    factor_BV = torch.where(seen_BV, table.repetition_B[:, None], 1.0)
    logits_BV = torch.where(logits_BV > 0, logits_BV / factor_BV, logits_BV * factor_BV)
    logits_BV = logits_BV - table.frequency_B[:, None] * generated_BV
    return logits_BV - table.presence_B[:, None] * (generated_BV > 0)


def _truncated(logits_BV: Tensor, table: RowTable) -> Tensor:
    """Minus infinity at every token that min_p, top_k or top_p excludes; the most probable one is always kept."""
    probs_BV = torch.softmax(logits_BV, -1)
    floor_B1 = table.min_p_B[:, None] * probs_BV.amax(-1, keepdim=True)
    logits_BV = logits_BV.masked_fill(probs_BV < floor_B1, -torch.inf)
    sorted_BV, order_BV = logits_BV.sort(-1, descending=True)
    rank_V = torch.arange(logits_BV.shape[-1], device=logits_BV.device)
    beyond_k_BV = (table.top_k_B[:, None] > 0) & (rank_V >= table.top_k_B[:, None])
    sorted_BV = sorted_BV.masked_fill(beyond_k_BV, -torch.inf)
    sorted_probs_BV = torch.softmax(sorted_BV, -1)
    before_BV = sorted_probs_BV.cumsum(-1) - sorted_probs_BV
    beyond_p_BV = (before_BV >= table.top_p_B[:, None]) & (table.top_p_B[:, None] < 1)
    beyond_p_BV[:, 0] = False
    sorted_BV = sorted_BV.masked_fill(beyond_p_BV, -torch.inf)
    return torch.full_like(logits_BV, -torch.inf).scatter_(1, order_BV, sorted_BV)
