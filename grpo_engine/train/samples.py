"""Sampled groups for the viewer: what was asked, what came, what it earned, and what both sides thought of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from grpo_engine.data.batching import Batch
from grpo_engine.train.by_environment import row_names, spread_groups
from grpo_engine.train.step import StepResult
from grpo_engine.train.token_texts import Decode, token_texts
from grpo_engine.wire.metrics import RolloutLine, SampledCompletion

__all__ = ["Decode", "sampled_rollouts"]


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
    """Few decimals: a file that people read, of log-probabilities that differ in the third."""
    return [round(value, decimals) for value in values.tolist()]
