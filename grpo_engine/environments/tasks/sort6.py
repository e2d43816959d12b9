"""Sort six digits: `sort 660487` → `046678`."""

from __future__ import annotations

from typing import Annotated, Literal

from grpo_engine.environments.tasks.puzzles import PuzzleTaskBase
from grpo_engine.flags import Flag


class Sort6(PuzzleTaskBase):
    """Sort six digits: `sort 660487` → `046678`. The reward is the share of positions that are right."""

    name: Annotated[Literal["sort6"], Flag(("--task", "--task.name"))] = "sort6"
