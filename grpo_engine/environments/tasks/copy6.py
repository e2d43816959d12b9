"""Repeat six digits: `copy 660487` → `660487`."""

from __future__ import annotations

from typing import Annotated, Literal

from grpo_engine.environments.tasks.puzzles import PuzzleTaskBase
from grpo_engine.flags import Flag


class Copy6(PuzzleTaskBase):
    """Repeat six digits: `copy 660487` → `660487`. The reward is the share of positions that are right."""

    name: Annotated[Literal["copy6"], Flag(("--task", "--task.name"))] = "copy6"
