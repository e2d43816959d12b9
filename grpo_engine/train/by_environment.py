"""Which environment each sequence of a batch is from, in names that outlive its restarts, and what each of them got.

Environments that run under one name count as one. Only a batch of several says more than the batch as a whole does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from grpo_engine.data.batching import Batch
from grpo_engine.wire.metrics import environment_metric


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
