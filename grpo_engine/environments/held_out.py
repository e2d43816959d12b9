"""The items of an evaluation: always the same ones of a task, none of which training ever sees."""

from __future__ import annotations

from grpo_engine.environments.tasks.base import Item, Task, plain

EVALUATION_SEED = 0
"""Not the environment's own seed: runs that differ in it are measured on the same items."""
_DRAWS_A_FIND = 16
"""Draws without a new item, for each item found, after which there is none: e^-16 is the chance that one was missed."""


def held_out_items(task: Task, count: int) -> list[Item]:
    """`count` different held-out items, or all there are; those of a smaller count are the first of a larger one.

    Raises:
        ConfigError: the task has none.
    """
    found: dict[str, Item] = {}
    num_in_vain = 0
    for item in task.items(EVALUATION_SEED, "held_out"):
        is_new = plain(item.question) not in found
        found.setdefault(plain(item.question), item)
        num_in_vain = 0 if is_new else num_in_vain + 1
        if len(found) == count or num_in_vain > _DRAWS_A_FIND * len(found):
            break
    return list(found.values())
