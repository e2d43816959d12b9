"""Rows of a batch as a reference service gets them, and its log-probabilities as they come back.

B rows, T positions, N wanted log-probabilities, in the order of `Batch.mask`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_engine.data.batching import Batch
from grpo_engine.errors import DataError
from grpo_engine.wire.codec import first_fault, to_line
from grpo_engine.wire.reference import LOGPROB_BYTES, MOST_HEAD_BYTES, MOST_TOKENS, TOKEN_BYTES, ScoresHead, ScoringHead

MOST_LOGPROB = 1e-3
"""Rounding may take a certain token a little above 0."""
_MOST_POSITIONS = 4 << 20
"""Of a batch that is scored, padding included: 29 bytes each."""
_MOST_PADDED, _FEW_POSITIONS = 8, 1 << 14
"""Positions of a batch for each of its tokens, where it has more than a few: else rows of two tokens beside a long one
would take thousands of times the memory and time of what was sent."""


def encode_rows(batch: Batch) -> bytes:
    """The body of a request for the log-probabilities of a batch's trained labels."""
    lengths = batch.lengths.tolist()
    tokens: list[Tensor] = []
    wanted: list[Tensor] = []
    for row, length in enumerate(lengths):
        tokens += [batch.inputs[row, :length], batch.labels[row, length - 1 : length]]
        wanted += [torch.zeros(1, dtype=torch.bool), batch.mask[row, :length]]
    head = ScoringHead(
        lengths=[length + 1 for length in lengths],
        groups=batch.group_ids.tolist(),
        temperatures=batch.temperatures.tolist(),
    )
    return to_line(head) + _bytes(torch.cat(tokens).to(torch.int32)) + _bytes(torch.cat(wanted).to(torch.uint8))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoringRows:
    """The rows of a request."""

    tokens: tuple[Tensor, ...]
    wanted: tuple[Tensor, ...]
    """Of each row, which of its tokens are to be scored."""
    head: ScoringHead

    def scored_by(self, score: Callable[[Batch], Tensor]) -> Tensor:
        """(N,) log-probabilities of all rows, in their order.

        Args:
            score: gives those of one batch, in the order of its mask.
        """
        scores: dict[int, Tensor] = {}
        for numbers, batch in self.batches():
            scores |= zip(numbers, torch.split(score(batch), batch.mask.sum(1).tolist()), strict=True)
        return torch.cat([scores[number] for number in range(len(self.tokens))])

    def batches(self) -> Iterator[tuple[list[int], Batch]]:
        """Batches of rows and the numbers of these rows; of the batches only what scoring reads is meaningful.

        Rows of one group stay together as far as that takes little padding: they often have one prompt.
        """
        lengths, groups = self.head.lengths, self.head.groups
        of_group: dict[int, int] = {}
        for group, length in zip(groups, lengths, strict=True):
            of_group[group] = max(length, of_group.get(group, 0))
        numbers: list[int] = []
        num_tokens = longest = 0
        for row in sorted(range(len(lengths)), key=lambda row: (-of_group[groups[row]], groups[row], -lengths[row])):
            num_tokens, longest = num_tokens + lengths[row], max(longest, lengths[row])
            most = min(_MOST_POSITIONS, max(_FEW_POSITIONS, _MOST_PADDED * num_tokens))
            if numbers and (len(numbers) + 1) * longest > most:
                yield numbers, self._batch(numbers)
                numbers, num_tokens, longest = [], lengths[row], lengths[row]
            numbers.append(row)
        yield numbers, self._batch(numbers)

    def _batch(self, numbers: list[int]) -> Batch:
        tokens, wanted = [self.tokens[row] for row in numbers], [self.wanted[row] for row in numbers]
        inputs = pad_sequence([row[:-1] for row in tokens], batch_first=True)  # (B, T)
        labels = pad_sequence([row[1:] for row in tokens], batch_first=True)
        mask = pad_sequence([each[1:] for each in wanted], batch_first=True)
        zeros, no = torch.zeros(len(numbers)), torch.zeros(len(numbers), dtype=torch.bool)
        return Batch(
            inputs=inputs,
            labels=labels,
            mask=mask,
            lengths=torch.tensor([len(row) for row in tokens]) - 1,
            rollout_logprobs=torch.zeros(mask.shape),
            temperatures=torch.tensor([self.head.temperatures[row] for row in numbers], dtype=torch.float32),
            rewards=zeros,
            group_ids=torch.tensor([self.head.groups[row] for row in numbers]),
            is_zeroed=no,
            is_truncated=no,
            token_advantages=None,
            has_token_advantages=no,
            ref_logprobs=None,
            has_ref_logprobs=no,
            policy_versions=torch.zeros(mask.shape, dtype=torch.int64),
            has_policy_versions=no,
            env_ids=(None,) * len(numbers),
            is_cut=no,
        )


def decode_rows(body: bytes, *, num_tokens: int, max_tokens: int) -> ScoringRows:
    """The rows of a request.

    Args:
        num_tokens: ids that the model knows.
        max_tokens: longest row.

    Raises:
        DataError: it is not such a request, or has tokens or rows that cannot be scored.
    """
    line, newline, rest = body.partition(b"\n")
    if len(line) > MOST_HEAD_BYTES:
        raise DataError(f"a first line of {len(line):,} bytes, and it has at most {MOST_HEAD_BYTES:,}")
    try:
        head = ScoringHead.model_validate_json(line)
    except ValidationError as error:
        raise DataError(f"not a {ScoringHead.__name__} in the first line: {first_fault(error)}") from None
    num_rows, total = len(head.lengths), sum(head.lengths)
    if not newline or len(head.groups) != num_rows or len(head.temperatures) != num_rows:
        raise DataError(f"{num_rows} lengths, {len(head.groups)} groups, {len(head.temperatures)} temperatures")
    if total > MOST_TOKENS:
        raise DataError(f"{total:,} tokens, and a request has at most {MOST_TOKENS:,}: send fewer rows at once")
    if len(rest) != total * (TOKEN_BYTES + 1):
        raise DataError(f"{len(rest):,} bytes after the first line, and {total:,} tokens have {total * 5:,}")
    if max(head.lengths) > max_tokens:
        raise DataError(
            f"a row of {max(head.lengths)} tokens, and the reference service has max_model_len {max_tokens}: raise it "
            "to the seq_len of the trainer"
        )
    buffer = bytearray(rest)
    tokens = torch.frombuffer(buffer, dtype=torch.int32, count=total).long()
    wanted = torch.frombuffer(buffer, dtype=torch.uint8, offset=total * TOKEN_BYTES)
    if int(tokens.min()) < 0 or int(tokens.max()) >= num_tokens:
        raise DataError(f"token ids from {int(tokens.min())} to {int(tokens.max())}, and the model knows {num_tokens}")
    ends, is_wanted = torch.tensor(head.lengths).cumsum(0), wanted.bool()
    first_tokens = torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1]])
    num_wanted = is_wanted.cumsum(0)[ends - 1].diff(prepend=torch.zeros(1, dtype=torch.int64))
    if is_wanted[first_tokens].any() or not num_wanted.all():
        raise DataError("a row without a token to score, or whose first token is one, which nothing predicts")
    rows, masks = torch.split(tokens, head.lengths), torch.split(is_wanted, head.lengths)
    return ScoringRows(tokens=rows, wanted=masks, head=head)


def encode_scores(logprobs: Tensor, request: bytes, *, model_name: str, vocabulary: str) -> bytes:
    """The answer to a request: (N,) log-probabilities."""
    head = ScoresHead(model_name=model_name, vocabulary=vocabulary, request=digest(request), num_logprobs=len(logprobs))
    return to_line(head) + _bytes(logprobs.to("cpu", torch.float32))


def decode_scores(answer: bytes, request: bytes, mask: Tensor) -> tuple[ScoresHead, Tensor]:
    """The head of an answer, and its log-probabilities (B, T), 0 outside the mask.

    Raises:
        DataError: it does not answer this request, or its values are no log-probabilities.
    """
    line, _, rest = answer.partition(b"\n")
    if len(line) > MOST_HEAD_BYTES:
        raise DataError(f"a first line of {len(line):,} bytes, and it has at most {MOST_HEAD_BYTES:,}")
    try:
        head = ScoresHead.model_validate_json(line)
    except ValidationError as error:
        raise DataError(f"not a {ScoresHead.__name__} in the first line: {first_fault(error)}") from None
    wanted = int(mask.sum())
    if head.request != digest(request) or head.num_logprobs != wanted or len(rest) != wanted * LOGPROB_BYTES:
        raise DataError(
            f"{head.num_logprobs} log-probabilities in {len(rest):,} bytes for request {head.request[:12]}, and "
            f"{wanted} were asked for by {digest(request)[:12]}"
        )
    values = torch.frombuffer(bytearray(rest), dtype=torch.float32)
    if not (values.isfinite() & (values <= MOST_LOGPROB)).all():
        raise DataError("values that are no log-probabilities: not finite, or above 0")
    return head, torch.zeros(mask.shape, dtype=torch.float32).masked_scatter(mask, values)


def digest(request: bytes) -> str:
    """By which an answer says what it answers."""
    return hashlib.sha256(request).hexdigest()


def _bytes(values: Tensor) -> bytes:
    return values.contiguous().numpy().tobytes()
