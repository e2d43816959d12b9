"""From delivered groups to the batch of one step, and what each environment contributed to it.

Groups that are too old or cannot be trained on are dropped here and logged; B is the number of sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import torch

from grpo_engine.data.batching import Batch, make_batch
from grpo_engine.data.groups import sender_words
from grpo_engine.errors import DataError
from grpo_engine.wire.metrics import environment_metric
from grpo_engine.wire.rollouts import ScoredGroup

log = logging.getLogger(__name__)


def drop_stale(groups: Sequence[ScoredGroup], version: int, max_staleness: int | None) -> list[ScoredGroup]:
    """The groups whose oldest token is at most `max_staleness` policy versions old; others are logged."""
    if max_staleness is None:
        return list(groups)
    fresh = [group for group in groups if version - _oldest_version(group) <= max_staleness]
    if len(fresh) < len(groups):
        log.warning(
            "%d of %d groups dropped: sampled more than %d policy versions ago (max_staleness)",
            len(groups) - len(fresh),
            len(groups),
            max_staleness,
        )
    return fresh


def trainable_batch(
    groups: Sequence[ScoredGroup],
    seq_len: int,
    *,
    vocab_size: int,
    environment_names: Mapping[int, str] | None = None,
) -> Batch:
    """A batch of the groups that can be trained on; others are logged and left out, so that one cannot end a run.

    Args:
        vocab_size: of the model; a larger token id is an index error, after which a CUDA context is unusable.
        environment_names: env_id to name, for messages; a stock rollout API sends none.

    Raises:
        DataError: no group can be trained on, so the environment is at fault.
    """
    names = environment_names or {}
    try:
        return _checked_batch(groups, seq_len, vocab_size, names)
    except DataError:
        remaining = list(_trainable_groups(groups, seq_len, vocab_size, names))
        return _checked_batch(remaining or groups, seq_len, vocab_size, names)


def row_names(batch: Batch, environments: Mapping[int, str]) -> list[str | None]:
    """(B,) names; the id where it has no name, None where a sequence has no environment.

    Args:
        environments: names by id.
    """
    return [None if id_ is None else environments.get(id_, str(id_)) for id_ in batch.env_ids]


def metrics_by_environment(batch: Batch, environments: Mapping[int, str]) -> dict[str, float]:
    """Mean reward and number of groups of each named environment; empty where they are all of one."""
    names = row_names(batch, environments)
    if len(set(names)) < 2:
        return {}
    metrics: dict[str, float] = {}
    for name in sorted({name for name in names if name is not None}):
        rows = torch.tensor([row for row, other in enumerate(names) if other == name])
        metrics[environment_metric("reward", name, "mean")] = float(batch.rewards[rows].mean())
        metrics[environment_metric("rollout", name, "num_groups")] = float(len(set(batch.group_ids[rows].tolist())))
    return metrics


def _checked_batch(
    groups: Sequence[ScoredGroup], seq_len: int, vocab_size: int, environment_names: Mapping[int, str]
) -> Batch:
    """Raises DataError where `make_batch` does, and for tokens that the model does not have."""
    batch = make_batch(groups, seq_len=seq_len, environment_names=environment_names)
    for tokens in (batch.inputs, torch.where(batch.mask, batch.labels, 0)):
        is_unknown = (tokens < 0) | (tokens >= vocab_size)
        if is_unknown.any():
            row, position = is_unknown.nonzero()[0].tolist()
            raise DataError(
                f"group of {sender_words(batch.env_ids[row], environment_names)}: "
                f"token id {tokens[row, position]} is outside the model's vocabulary ({vocab_size}), so another "
                "tokenizer made it: give the environment and the inference server the model that is trained"
            )
    return batch


def _trainable_groups(
    groups: Sequence[ScoredGroup], seq_len: int, vocab_size: int, environment_names: Mapping[int, str]
) -> Iterator[ScoredGroup]:
    for group in groups:
        try:
            _checked_batch([group], seq_len, vocab_size, environment_names)
        except DataError as error:
            log.error("group dropped: %s", error)
            _warn_of_positive_logprobs(group)
        else:
            yield group


def _warn_of_positive_logprobs(group: ScoredGroup) -> None:
    """Log the stock trainer's sentences, which people and scripts look for, where log-probabilities are none."""
    logprobs = [
        logprob
        for labels, row in zip(group.masks, group.inference_logprobs or [], strict=False)
        for label, logprob in zip(labels, row, strict=False)
        if label >= 0
    ]
    mean = fmean(logprobs) if logprobs else 0.0
    if mean > 0:
        log.warning("[WARNING] ref_logprobs avg %.3f (should be negative!)", mean)
        log.warning("[WARNING] ref_logprobs at generated positions avg %.3f (should be negative!)", mean)
        log.warning("[WARNING] This suggests inference_logprobs alignment is wrong")


def _oldest_version(group: ScoredGroup) -> int:
    """Version of the oldest trained token; a group without versions, as from a stock environment, counts as fresh."""
    versions = [
        version
        for labels, row in zip(group.masks, group.policy_versions or [], strict=False)
        for label, version in zip(labels, row, strict=False)  # `make_batch` checks the lengths
        if label >= 0
    ]
    return min(versions, default=2**62)
