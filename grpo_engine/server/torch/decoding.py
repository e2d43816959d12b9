"""One batch from prompts to completions: prefill, then one token per row and step, until every row has finished.

Letters: R prompts, B rows in flight, N rows at the start, T positions, V vocabulary, K extra log-probabilities.
Prompts are padded on the left and prefilled once; their cache is then repeated for every copy. The weights must not
change while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_engine.server.engine import LOWEST_LOGPROB, FinishReason, TopLogprobs
from grpo_engine.server.torch.growing_cache import new_cache
from grpo_engine.server.torch.sampling import RowTable, TokenCounts, draw, process_logits
from grpo_engine.server.torch.stop_strings import StopDetector, Tokenizer
from grpo_engine.wire.inference import GenerateRequest, LogprobsMode

_COMPACT_BELOW = 0.75
"""Share of running rows below which finished ones are dropped: dropping copies the whole cache."""
_PROMPT_CHUNK = 256
"""Positions whose logits are held at once for `prompt_logprobs`: (256, 150000) in fp32 is 150 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Some copies of one prompt."""

    prompt: list[int]
    params: GenerateRequest
    first_copy: int
    num_copies: int
    max_new_tokens: int
    is_cancelled: Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """One finished row."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: TopLogprobs | None
    finish_reason: FinishReason
    text: str | None
    """Set for rows with stop strings; None: not decoded to text yet."""


class Decoder:
    """A causal model of transformers, a tokenizer, and the random numbers of requests without a seed."""

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        *,
        eos_ids: frozenset[int],
        logprobs_mode: LogprobsMode,
        generator: torch.Generator,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._logprobs_mode = logprobs_mode
        self._generator = generator
        self._device: torch.device = model.device

    @torch.inference_mode()
    def decode(self, works: Sequence[Work]) -> list[list[Decoded]]:
        """Complete every prompt: one list per work, one entry per copy."""
        rows = [(index, copy) for index, work in enumerate(works) for copy in range(work.num_copies)]
        batch = _Batch(works, rows, self._eos_ids, self._device)
        detectors = self._stop_detectors(works, rows)
        generators = _seeded_generators(works, rows)
        logits_BV, state = self._prefill(works, rows)
        counts = self._counts(works, rows, logits_BV.shape[-1])
        step = 0
        while True:
            tokens_B = self._one_token(logits_BV, batch, counts, self._uniforms(len(rows), generators), step)
            batch.end_rows(tokens_B, step, works, detectors)
            step += 1
            if not batch.num_alive:
                break
            if batch.num_alive < _COMPACT_BELOW * len(tokens_B):
                index_B = batch.compact()
                tokens_B = tokens_B[index_B]
                state.select(index_B)
                if counts is not None:
                    counts.select(index_B)
            logits_BV = self._step(tokens_B, state)
        return batch.results(works, detectors)

    @torch.inference_mode()
    def prompt_logprobs(self, prompt: list[int], num_extra: int) -> list[list[tuple[int, float]] | None]:
        """Log-probabilities of a prompt's tokens, always before temperature; None at the first position."""
        ids_1T = torch.tensor([prompt], device=self._device)
        cache = new_cache(self._model.config)
        answer: list[list[tuple[int, float]] | None] = [None]
        for start in range(0, len(prompt) - 1, _PROMPT_CHUNK):
            chunk_1T = ids_1T[:, start : min(start + _PROMPT_CHUNK, len(prompt) - 1)]
            logits_TV = self._model(chunk_1T, past_key_values=cache, use_cache=True).logits[0].float()
            next_T = ids_1T[0, start + 1 : start + 1 + chunk_1T.shape[1]]
            own_T, top_TK, top_ids_TK = _logprobs_of(logits_TV, next_T, num_extra)
            for token, own, ids, values in zip(
                next_T.tolist(), own_T.tolist(), top_ids_TK.tolist(), top_TK.tolist(), strict=True
            ):
                extra = [(i, v) for i, v in zip(ids, values, strict=True) if i != token]
                answer.append([(token, own), *extra[:num_extra]])
        return answer

    def _prefill(self, works: Sequence[Work], rows: list[tuple[int, int]]) -> tuple[Tensor, _CacheState]:
        longest = max(len(work.prompt) for work in works)
        lengths_R = torch.tensor([len(work.prompt) for work in works], device=self._device)
        ids_RT = torch.tensor([[0] * (longest - len(work.prompt)) + work.prompt for work in works], device=self._device)
        is_padded = any(len(work.prompt) != longest for work in works)
        positions_RT = torch.arange(longest, device=self._device) - (longest - lengths_R)[:, None]
        mask_RT = (positions_RT >= 0).long() if is_padded else None
        cache = new_cache(self._model.config)
        logits_RV = self._model(
            ids_RT,
            attention_mask=mask_RT,
            position_ids=positions_RT.clamp_min(0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        limits_R = torch.tensor([work.max_new_tokens for work in works], device=self._device)
        state = _CacheState(cache=cache, mask_BT=mask_RT, length_B=lengths_R, longest_B=lengths_R + limits_R)
        if len(rows) > len(works):
            index_B = torch.tensor([index for index, _ in rows], device=self._device)
            state.select(index_B)
            logits_RV = logits_RV[index_B]
        return logits_RV.float(), state

    def _step(self, tokens_B: Tensor, state: _CacheState) -> Tensor:
        """Logits (B, V) fp32 after one more token per row."""
        state.grow()
        logits_B1V = self._model(
            tokens_B[:, None],
            attention_mask=state.mask_BT,
            position_ids=state.length_B[:, None] - 1,
            past_key_values=state.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits_B1V[:, -1].float()  # type: ignore[no-any-return]

    def _one_token(
        self, logits_BV: Tensor, batch: _Batch, counts: TokenCounts | None, uniform_N: Tensor, step: int
    ) -> Tensor:
        table = batch.table
        processed_BV = process_logits(logits_BV, table, counts, step)
        tokens_B = draw(processed_BV, table, uniform_N)
        source_BV = processed_BV if self._logprobs_mode == "processed" else logits_BV
        batch.record(tokens_B, *_logprobs_of(source_BV, tokens_B, batch.num_extra), step)
        if counts is not None:
            counts.add(tokens_B)
        return tokens_B

    def _uniforms(self, num_rows: int, generators: dict[int, torch.Generator]) -> Tensor:
        uniform_N = torch.rand(num_rows, dtype=torch.float64, generator=self._generator)
        for row, generator in generators.items():
            uniform_N[row] = torch.rand((), dtype=torch.float64, generator=generator)
        return uniform_N.to(self._device)

    def _counts(self, works: Sequence[Work], rows: list[tuple[int, int]], vocabulary: int) -> TokenCounts | None:
        if not any(
            p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1 for p in (w.params for w in works)
        ):
            return None
        return TokenCounts([works[index].prompt for index, _ in rows], vocabulary, self._device)

    def _stop_detectors(self, works: Sequence[Work], rows: list[tuple[int, int]]) -> dict[int, StopDetector]:
        detectors: dict[int, StopDetector] = {}
        for row, (index, _) in enumerate(rows):
            params = works[index].params
            stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
            if any(stops):
                detectors[row] = StopDetector(
                    self._tokenizer, [s for s in stops if s], skip_special_tokens=params.skip_special_tokens
                )
        return detectors


@dataclass(slots=True, kw_only=True)
class _CacheState:
    """Keys and values so far, with the mask and lengths for the next token."""

    cache: Any
    mask_BT: Tensor | None
    """None where no row is padded: attention is faster without a mask."""
    length_B: Tensor
    longest_B: Tensor
    """Of a row that goes on to its last token. Rows that have ended stay at it: where positions are learned, there is
    none beyond the model's last one."""

    def select(self, index_B: Tensor) -> None:
        self.cache.batch_select_indices(index_B)
        self.length_B = self.length_B[index_B]
        self.longest_B = self.longest_B[index_B]
        if self.mask_BT is not None:
            self.mask_BT = self.mask_BT[index_B]

    def grow(self) -> None:
        self.length_B = torch.minimum(self.length_B + 1, self.longest_B)
        if self.mask_BT is not None:
            self.mask_BT = torch.cat([self.mask_BT, self.mask_BT.new_ones(len(self.mask_BT), 1)], dim=1)


class _Batch:
    """Which rows are running, and the tokens of each so far."""

    def __init__(
        self,
        works: Sequence[Work],
        rows: list[tuple[int, int]],
        eos_ids: frozenset[int],
        device: torch.device,
    ) -> None:
        limits = [works[index].max_new_tokens for index, _ in rows]
        self.table = RowTable.of([works[index].params for index, _ in rows], limits, eos_ids, device)
        self.num_extra = max(work.params.logprobs or 0 for work in works)
        self.num_alive = len(rows)
        self._rows = rows
        self._alive_B = torch.ones(len(rows), dtype=torch.bool, device=device)
        self._tokens: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
        """A step: row numbers, tokens, log-probs, top log-probs (B, K), their tokens (B, K)."""
        self._length = [0] * len(rows)
        self._reason: list[FinishReason] = ["length"] * len(rows)

    def record(self, tokens_B: Tensor, logprobs_B: Tensor, top_BK: Tensor, top_ids_BK: Tensor, step: int) -> None:
        assert step == len(self._tokens)
        self._tokens.append((self.table.id_B, tokens_B, logprobs_B, top_BK, top_ids_BK))

    def end_rows(self, tokens_B: Tensor, step: int, works: Sequence[Work], detectors: dict[int, StopDetector]) -> None:
        """Mark the rows that finish with this token."""
        table = self.table
        stopped_B = ((tokens_B[:, None] == table.stop_ids_S) & table.stops_BS).any(-1)
        ended_B = (stopped_B | (step + 1 >= table.limit_B)) & self._alive_B
        if bool(ended_B.any()):
            for row, stopped in zip(table.id_B[ended_B].tolist(), stopped_B[ended_B].tolist(), strict=True):
                self._end(row, step, "stop" if stopped else "length")
        overruled = self._stop_strings(tokens_B, step, works, detectors) if detectors else set()
        cancelled = {index for index, work in enumerate(works) if work.is_cancelled()}
        if cancelled:
            for row, (index, _) in enumerate(self._rows):
                if index in cancelled and not self._length[row]:
                    self._end(row, step, "abort")
                    overruled.add(row)
        self._alive_B = self._alive_B & ~ended_B
        if overruled:
            gone_B = [row in overruled for row in table.id_B.tolist()]
            self._alive_B = self._alive_B & ~torch.tensor(gone_B, device=tokens_B.device)
        self.num_alive = sum(not length for length in self._length)

    def compact(self) -> Tensor:
        """Drop the finished rows; returns the indices of the others."""
        index_B = self._alive_B.nonzero()[:, 0]
        self.table.select(index_B)
        self._alive_B = self._alive_B[index_B]
        return index_B

    def results(self, works: Sequence[Work], detectors: dict[int, StopDetector]) -> list[list[Decoded]]:
        num_rows, num_steps = len(self._rows), len(self._tokens)
        device = self._tokens[0][0].device
        tokens_NT = torch.zeros(num_rows, num_steps, dtype=torch.long, device=device)
        logprobs_NT = torch.zeros(num_rows, num_steps, device=device)
        top_NTK = torch.zeros(num_rows, num_steps, self.num_extra, device=device)
        top_ids_NTK = torch.zeros(num_rows, num_steps, self.num_extra, dtype=torch.long, device=device)
        for step, (id_B, tokens_B, logprobs_B, top_BK, top_ids_BK) in enumerate(self._tokens):
            tokens_NT[id_B, step] = tokens_B
            logprobs_NT[id_B, step] = logprobs_B
            if self.num_extra:
                top_NTK[id_B, step] = top_BK
                top_ids_NTK[id_B, step] = top_ids_BK
        all_tokens, all_logprobs = tokens_NT.tolist(), logprobs_NT.tolist()
        all_tops, all_top_ids = top_NTK.tolist(), top_ids_NTK.tolist()
        answer: list[list[Decoded]] = [[] for _ in works]
        for row, (index, _) in enumerate(self._rows):
            length, num_extra = self._length[row], works[index].params.logprobs or 0
            tops = None
            if num_extra:
                tops = [
                    list(zip(ids[:num_extra], values[:num_extra], strict=True))
                    for ids, values in zip(all_top_ids[row][:length], all_tops[row][:length], strict=True)
                ]
            answer[index].append(
                Decoded(
                    token_ids=all_tokens[row][:length],
                    logprobs=all_logprobs[row][:length],
                    top_logprobs=tops,
                    finish_reason=self._reason[row],
                    text=detectors[row].text if row in detectors and detectors[row].is_cut else None,
                )
            )
        return answer

    def _stop_strings(
        self, tokens_B: Tensor, step: int, works: Sequence[Work], detectors: dict[int, StopDetector]
    ) -> set[int]:
        """Add the tokens to the rows with stop strings; returns the rows that finish here."""
        ended: set[int] = set()
        for row, token in zip(self.table.id_B.tolist(), tokens_B.tolist(), strict=True):
            detector = detectors.get(row)
            if detector is None or (self._length[row] and self._length[row] != step + 1):
                continue
            if detector.add(token, may_end=step + 1 >= works[self._rows[row][0]].params.min_tokens):
                self._end(row, step, "stop")
                ended.add(row)
        return ended

    def _end(self, row: int, step: int, reason: FinishReason) -> None:
        self._length[row], self._reason[row] = step + 1, reason


def _logprobs_of(logits_BV: Tensor, tokens_B: Tensor, num_extra: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities (B,) of `tokens_B`, and the `num_extra` largest with their tokens, (B, K) each; finite."""
    normaliser_B1 = logits_BV.logsumexp(-1, keepdim=True)
    own_B = (logits_BV.gather(-1, tokens_B[:, None]) - normaliser_B1)[:, 0]
    values_BK, ids_BK = logits_BV.topk(min(num_extra, logits_BV.shape[-1]), -1)
    return own_B.clamp_min(LOWEST_LOGPROB), (values_BK - normaliser_B1).clamp_min(LOWEST_LOGPROB), ids_BK


def _seeded_generators(works: Sequence[Work], rows: list[tuple[int, int]]) -> dict[int, torch.Generator]:
    """A generator for every row with a seed: copy c of seed s samples as seed s + c (as in vLLM)."""
    generators: dict[int, torch.Generator] = {}
    for row, (index, copy) in enumerate(rows):
        work = works[index]
        if work.params.seed is not None:
            seed = (work.params.seed + work.first_copy + copy) % 2**63
            generators[row] = torch.Generator().manual_seed(seed)
    return generators
