"""Tasks: items to ask and a reward for each completion, one file each. The union below is the registration."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from grpo_engine.environments.tasks.gsm8k import Gsm8k
from grpo_engine.environments.tasks.guess_number import GuessNumber
from grpo_engine.environments.tasks.ifeval.task import IFEval
from grpo_engine.environments.tasks.jsonl import Jsonl
from grpo_engine.environments.tasks.mafia.task import Mafia
from grpo_engine.environments.tasks.math_zero import MathZero
from grpo_engine.environments.tasks.puzzles import Arithmetic, Copy6, Reverse6, Sort6
from grpo_engine.environments.tasks.python.task import Python, spell_out_functions
from grpo_engine.environments.tasks.reasoning_gym import ReasoningGym

AnyTask = Annotated[
    Sort6
    | Copy6
    | Reverse6
    | Arithmetic
    | ReasoningGym
    | Gsm8k
    | MathZero
    | Jsonl
    | Python
    | IFEval
    | GuessNumber
    | Mafia,
    Field(discriminator="name"),
]
"""Every task, chosen by its `name`."""


def spell_out(value: Any) -> Any:
    """The table behind a task's short form: `"sort6"`, `"reasoning_gym:chain_sum"`, `"jsonl:questions.jsonl"`,
    `"python:my_rewards:score"`, or with several functions `"python:my_rewards:right,brief"`.

    A short form may also be the `name` in a table of further settings.
    """
    table = {"name": value} if isinstance(value, str) else value
    if not isinstance(table, dict) or not isinstance(table.get("name"), str):
        return table
    name, _, rest = table["name"].partition(":")
    if not rest:
        return spell_out_functions(table) if name == "python" else table
    match name:
        case "python":
            module, _, functions = rest.rpartition(":")
            own = {"module": module, "functions": functions.split(",")} if module else {"module": rest}
            return {**table, **own, "name": name}
        case "reasoning_gym":
            return {**table, "name": name, "dataset": rest}
        case _:
            return {**table, "name": name, "path": rest}
