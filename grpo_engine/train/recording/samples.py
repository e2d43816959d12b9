"""Sampled groups for the viewer: prompt, completions, rewards, and log-probs of both sides."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

import torch

from grpo_engine.data.batching import Batch
from grpo_engine.train.batch import row_names
from grpo_engine.train.step import StepResult
from grpo_engine.wire.metrics import RolloutLine, SampledCompletion

Decode = Callable[[list[int]], str]
"""Token ids to text, special tokens included: an end token that is missing must be seen."""
HALF_CHARACTER = "\ufffd"
"""What tokenizers write for bytes that are not a complete character."""
MAX_TOKENS_A_CHARACTER = 8
"""Beyond this many the bytes are not a character: models write such early in training."""


def sampled_rollouts(
    batch: Batch, result: StepResult, decode: Decode, *, environments: Mapping[int, str], step: int, count: int
) -> list[RolloutLine]:
    """Up to `count` groups of a batch, from its environments in turn, as lines of `rollouts.jsonl`.

    Args:
        environments: names by id.
    """
    names = row_names(batch, environments)
    lines = []
    for group in spread_groups(batch, names, count):
        rows = (batch.group_ids == group).nonzero()[:, 0].tolist()
        lines.append(_group(batch, result, decode, step, rows, environment=names[rows[0]]))
    return lines


def spread_groups(batch: Batch, names: Sequence[str | None], count: int) -> list[int]:
    """The ids of `count` groups, or of all, taken from the environments in turn and given in the batch's order.

    Args:
        names: (B,) of `row_names`.
    """
    turns: dict[str | None, int] = {}
    ranked: list[tuple[int, int]] = []
    for group, name in dict(zip(batch.group_ids.tolist(), names, strict=True)).items():
        turn = turns.get(name, 0)
        turns[name] = turn + 1
        ranked.append((turn, group))
    return sorted(group for _, group in sorted(ranked, key=lambda entry: entry[0])[:count])


def token_texts(tokens: Sequence[int], decode: Decode) -> list[str]:
    """One piece a token, of one token at least."""
    pieces = [decode([tokens[0]]), *(_within_a_text(decode, token) for token in tokens[1:])]
    begun = 0  # the first token without its text
    for place, piece in enumerate(pieces):
        if begun < place or HALF_CHARACTER in piece:
            together = decode(list(tokens[begun : place + 1]))
            can_go_on = place + 1 < len(tokens) and place + 1 - begun < MAX_TOKENS_A_CHARACTER
            if together.endswith(HALF_CHARACTER) and can_go_on:
                pieces[place] = ""
                continue
            pieces[place] = together
        begun = place + 1
    return pieces


@lru_cache(maxsize=1 << 16)
def _within_a_text(decode: Decode, token: int) -> str:
    """What a token adds to itself: some tokenizers drop the space of the first one."""
    return decode([token, token])[len(decode([token])) :]


def _group(
    batch: Batch, result: StepResult, decode: Decode, step: int, rows: Sequence[int], *, environment: str | None
) -> RolloutLine:
    first = rows[0]
    prompt_length = int(batch.mask[first].nonzero()[0]) + 1  # the label at t is the token after input t
    return RolloutLine(
        time=time.time(),
        step=step,
        environment=environment,
        prompt=decode(batch.inputs[first, :prompt_length].tolist()),
        completions=[_completion(batch, result, decode, row) for row in rows],
    )


def _completion(batch: Batch, result: StepResult, decode: Decode, row: int) -> SampledCompletion:
    trained = batch.mask[row]
    tokens = batch.labels[row][trained].tolist()
    positions = trained.nonzero()[:, 0].tolist()
    first, last = positions[0], positions[-1]
    is_trained = bool(result.is_trained[row])
    return SampledCompletion(
        text=decode(batch.labels[row, first : last + 1].tolist()),
        reward=float(batch.rewards[row]),
        advantage=float(result.advantages[row][trained].mean()),
        token_ids=tokens,
        inference_logprobs=_rounded(batch.rollout_logprobs[row][trained]),
        training_logprobs=_rounded(result.logprobs[row][trained]) if is_trained else [],
        policy_versions=batch.policy_versions[row][trained].tolist(),
        token_texts=token_texts(tokens, decode),
        read_before={
            number: decode(batch.labels[row, before + 1 : at].tolist())
            for number, (before, at) in enumerate(pairwise(positions), start=1)
            if at > before + 1
        },
        entropies=_rounded(result.entropies[row][trained], decimals=4) if is_trained else [],
        is_truncated=bool(batch.is_truncated[row]),
    )


def _rounded(values: torch.Tensor, decimals: int = 6) -> list[float]:
    """Rounded, since differences of log-probabilities matter in the third decimal."""
    return [round(value, decimals) for value in values.tolist()]
