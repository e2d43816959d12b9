"""Turn six digits round: `reverse 660487` → `784066`."""

from __future__ import annotations

from typing import Annotated, Literal

from grpo_engine.environments.tasks.puzzles import PuzzleTaskBase
from grpo_engine.flags import Flag


class Reverse6(PuzzleTaskBase):
    """Turn six digits round: `reverse 660487` → `784066`. The reward is the share of positions that are right."""

    name: Annotated[Literal["reverse6"], Flag(("--task", "--task.name"))] = "reverse6"
