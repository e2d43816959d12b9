"""User-defined rewards: `python:my_rewards:score`, with items from a JSON Lines file or from the same module."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_engine.config import ModuleText, PathText
from grpo_engine.environments.tasks.base import Item, Split, Task
from grpo_engine.environments.tasks.python.items import items_from_module
from grpo_engine.environments.tasks.python.loading import load_attribute
from grpo_engine.environments.tasks.python.reading import check_attribute
from grpo_engine.environments.tasks.records import FIRST_LINES, endless, fields_instead, of_files, read_records
from grpo_engine.errors import ConfigError
from grpo_engine.flags import Flag
from grpo_engine.wire.codec import shortened

if TYPE_CHECKING:
    from grpo_engine.environments.tasks.python.reward_functions import RewardFunctions


_ROLES = ("system", "user", "assistant")
"""Roles of the messages of a prompt."""
_NO_NUMBER = "I do not know."
"""A completion as policies write them; a reward that only reads numbers fails on it."""
_ITEMS = "define it (a list, a data set or a function), name another one as task.items_from, or a file as task.path"


class Python(Task):
    """Reward functions from a user's module; `python:my_rewards:score` is short for module and functions.

    A function is called by parameter name: `score(completion, answer)`, also with question, entry, item or any field of
    the record; or per group, as in TRL: `score(completions, prompts, **columns) -> list[float]`.
    """

    name: Annotated[Literal["python"], Flag(("--task", "--task.name"))] = "python"
    module: Annotated[str, PathText(r".*\.py"), ModuleText()]
    """Module on the path, the current folder first, or a file that ends in .py."""
    functions: tuple[str, ...] = Field(min_length=1)
    """Functions of the module; the reward is the sum of their values, without those that return None. Where `module` is
    not set, with it: my_rewards:right,brief."""
    weights: tuple[float, ...] = ()
    """Factor of each function's value; unset: 1."""
    path: Path | None = None
    """JSON Lines file with the items; unset: from the module."""
    held_out_path: Path | None = None
    """File with the held-out items; unset: one in sixteen of the others."""
    items_from: str = "items"
    """Function of the module that returns the items (it may take `split` and `seed`), or a list or data set there."""
    question_field: str = "question"
    """Field of a record with the question; if missing, `prompt`."""
    answer_field: str = "answer"
    """Field of a record with the reference answer, if any."""
    completion_format: Literal["auto", "text", "messages"] = "auto"
    """Type of the completions that functions get: text, or a list with one message; auto: messages if the record's
    `prompt` is a list of messages, as in TRL."""
    threads: int = Field(1, ge=1)
    """Concurrent calls of a synchronous function; more than one for thread-safe functions that wait."""
    timeout_s: float = Field(60.0, gt=0)
    """Time limit of one call."""
    error_reward: float | None = None
    """Reward of a completion for which a function fails, with a warning; unset: the environment exits."""

    @model_validator(mode="before")
    @classmethod
    def _names_a_function(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("module") and not given.get("functions"):
            raise ValueError(
                f"functions: no function of {given['module']} is named: write "
                f"python:{given['module']}:FUNCTION, or set task.functions"
            )
        if isinstance(given, Mapping) and any(":" in str(name) for name in given.get("functions") or ()):
            raise ValueError(
                f"functions: {', '.join(map(str, given['functions']))} with module {given.get('module')!r}: all are of "
                "one module, so name it once"
            )
        return given

    @model_validator(mode="after")
    def _has_a_weight_for_each_function(self) -> Python:
        if self.weights and len(self.weights) != len(self.functions):
            raise ValueError(
                f"weights: {len(self.weights)} entries for {len(self.functions)} functions: give one per function"
            )
        return self

    def label(self) -> str:
        """Name of the module."""
        return Path(self.module).stem if self.module.endswith(".py") else self.module.rpartition(".")[2]

    @property
    def has_user_code(self) -> bool:
        """Always."""
        return True

    def check(self) -> None:
        """Import the functions, and score a group of two for the first item: its answer, and one that is no number."""
        functions = _reward_functions(self)
        item = next(self.items(0))
        _run(functions.rewards(item, [item.answer, _NO_NUMBER]))

    def check_files(self, folder: Path, search_path: Sequence[Path] = ()) -> None:
        """Read the first lines of the files, and the source of the module."""
        for key, path in {"path": self.path, "held_out_path": self.held_out_path}.items():
            if path is not None:
                self._read(folder / path, f"task.{key}", FIRST_LINES)
        for function in self.functions:
            check_attribute(self.module, function, (folder, *search_path), where="task.functions")
        if self.path is None:
            check_attribute(
                self.module, self.items_from, (folder, *search_path), where="task.items_from", remedy=_ITEMS
            )

    def items(self, seed: int, split: Split = "train") -> Iterator[Item]:
        """Records of the file, or items of the module."""
        if self.path is None:
            source = load_attribute(self.module, self.items_from, where="task.items_from", remedy=_ITEMS)
            where = f"{self.module}:{self.items_from}"
            return items_from_module(source, self._item, where=where, task=self.label(), seed=seed, split=split)
        records = of_files(split, self.path, self.held_out_path, self._read)
        return endless(records, task=self.label(), seed=seed, split=split)

    def score(self, item: Item, completion: str) -> float:
        """Weighted sum of the functions for one completion."""
        return _run(self.rewards(item, [completion]))[0]

    async def rewards(
        self, item: Item, completions: Sequence[str], token_ids: Sequence[Sequence[int]] | None = None
    ) -> list[float]:
        """Weighted sum of the functions for each completion of an item.

        Raises:
            RewardFailed: a function failed, and `error_reward` is not set.
        """
        return await _reward_functions(self).rewards(item, completions, token_ids)

    def _read(self, path: Path, where: str, most_lines: int | None = None) -> list[Item]:
        records = read_records(path, where=where, most_lines=most_lines)
        return [self._item(record, f"{where}: {path}:{line}") for line, record in records]

    def _item(self, given: Any, where: str) -> Item:
        """An item from a record, a pair of question and answer, a question, or an item."""
        if isinstance(given, Item):
            return given
        if isinstance(given, str):
            return Item(question=given, answer="", entry={})
        if isinstance(given, tuple) and len(given) == 2:
            return Item(question=str(given[0]), answer=str(given[1]), entry={})
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"{where}: {given!r} is not an item: give a dict with {self.question_field!r}, or (question, answer)"
            )
        asked = given.get(self.question_field, given.get("prompt"))
        if asked is None:
            missing = self.question_field
            raise ConfigError(f"{where}: no field {missing!r}{fields_instead(missing, given)}")
        question, before = _messages(asked, where)
        answer = str(given.get(self.answer_field, ""))
        return Item(question=question, answer=answer, entry=dict(given), before=before)


def spell_out_functions(table: dict[str, Any]) -> dict[str, Any]:
    """`functions` of a task's table as a list without the module, which goes into `module` where it is not set."""
    given = table.get("functions")
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, list | tuple) or not all(isinstance(each, str) for each in listed):
        return table
    parts = [each.rpartition(":") for each in listed]
    modules = {module for module, _, _ in parts if module} | ({table["module"]} if "module" in table else set())
    if len(modules) > 1:
        return table  # contradicts itself, which validation reports
    names = [name.strip() for _, _, several in parts for name in several.split(",")]
    return {**table, **({"module": modules.pop()} if modules else {}), "functions": names}


def _messages(asked: Any, where: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The question of a prompt and the messages before it; TRL's data sets may have a list of messages."""
    if not isinstance(asked, list):
        return str(asked), ()
    messages = [_message(each) for each in asked]
    match messages:
        case [*before, ("user", text)] if all(role in _ROLES for role, _ in before):
            return text, tuple(before)
        case _:
            roles = ", ".join(shortened(repr(role), 40) for role, _ in messages[:8])
            raise ConfigError(
                f"{where}: a prompt of the messages ({roles}) is not supported: give texts of {', '.join(_ROLES)}, the "
                "last of the user"
            )


def _message(given: Any) -> tuple[str, str]:
    """Role and text of a message; no role of a message that is not made of them alone, as one with tools."""
    match given:
        case {"role": str(role), "content": str(text), **rest} if not any(rest.values()):
            return role, text
        case _:
            return "", ""


def _run(rewards: Coroutine[Any, Any, list[float]]) -> list[float]:
    import asyncio  # imported late: reading settings does not need it

    return asyncio.run(rewards)


@lru_cache(maxsize=8)
def _reward_functions(task: Python) -> RewardFunctions:
    """Cached: its threads are kept."""
    from grpo_engine.environments.tasks.python.reward_functions import RewardFunctions, reward_function

    names = [f"{task.module}:{function}" for function in task.functions]
    return RewardFunctions(
        [
            reward_function(name, load_attribute(task.module, function, where="task.functions"))
            for name, function in zip(names, task.functions, strict=True)
        ],
        task.weights or (1.0,) * len(names),
        completion_format=task.completion_format,
        num_threads=task.threads,
        timeout_s=task.timeout_s,
        error_reward=task.error_reward,
    )
