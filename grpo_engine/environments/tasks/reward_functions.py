"""Calling reward functions as their author wrote them: by parameter name, one completion or a group, sync or async.

Two forms are understood. One completion a call: `score(completion, answer)`, or whatever of the item it names. A group
a call, as TRL's trainers do it: `score(completions, prompts, **columns)`, with a list for each column of the data set.
What such a function raises or returns wrongly is told with its name, its line and the item.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_engine.config import did_you_mean
from grpo_engine.environments.tasks.base import Item
from grpo_engine.environments.tasks.loading import told
from grpo_engine.environments.tasks.threads import Threads, in_the_background
from grpo_engine.errors import ConfigError, DataError

log = logging.getLogger(__name__)

CompletionFormat = Literal["auto", "text", "messages"]

_OF_THE_GROUP = frozenset({"completions", "prompts"})
"""Parameters by which a function of a whole group is known."""
_NOT_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})
"""What TRL leaves out of the columns that it hands on."""
_SHOWN = 80
"""Characters of an item's texts in a message."""


class RewardFailed(DataError):
    """A reward function raised something, or gave no reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """One function of the user's and what its signature says of it."""

    name: str
    """As the user wrote it, e.g. my_rewards:score."""
    call: Callable[..., Any]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_all: bool
    """Whether it takes `**kwargs`."""
    is_async: bool

    @property
    def is_of_a_group(self) -> bool:
        """Whether one call scores all completions of an item."""
        return not _OF_THE_GROUP.isdisjoint((*self.required, *self.optional))

    def arguments(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """What to call it with: `known` by name.

        A name that says nothing here stands for the completion, and the next one for the answer.

        Raises:
            ConfigError: it asks for something else, or not for the completion.
        """
        completion = "completions" if self.is_of_a_group else "completion"
        named = {name: name for name in (*self.required, *self.optional) if name in known}
        unknown = [name for name in self.required if name not in known]
        for meant in (completion, "answer"):
            if unknown and meant not in named and meant in known and not did_you_mean(unknown[0], known):
                named[unknown.pop(0)] = meant
        if unknown:
            raise ConfigError(
                f"task.functions: {self.name} asks for {unknown[0]!r}{did_you_mean(unknown[0], known)}, which nothing "
                f"gives it: it may ask for {', '.join(known)}"
            )
        if completion not in named.values() and not self.takes_all:
            raise ConfigError(f"task.functions: {self.name} has no parameter for the completion: add `{completion}`")
        chosen = {name: known[meant] for name, meant in named.items()}
        return {**known, **chosen} if self.takes_all else chosen


def reward_function(name: str, call: Any) -> RewardFunction:
    """Read a function's signature.

    Raises:
        ConfigError: it is none that can be called by parameter name.
    """
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError(
            f"task.functions: {name} is a {type(call).__name__}, not a function with named parameters: "
            "write def score(completion, answer): ..."
        ) from None
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return RewardFunction(
        name=name,
        call=call,
        required=tuple(p.name for p in named if p.default is p.empty),
        optional=tuple(p.name for p in named if p.default is not p.empty),
        takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
        is_async=inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None)),  # noqa: B004
    )


class RewardFunctions:
    """The weighted sum of several reward functions."""

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        weights: Sequence[float],
        *,
        completion_format: CompletionFormat,
        num_threads: int,
        timeout_s: float,
        error_reward: float | None,
    ) -> None:
        self._functions = functions
        self._weights = weights
        self._completion_format = completion_format
        self._threads = Threads(num_threads)
        self._timeout_s = timeout_s
        self._error_reward = error_reward
        self._num_errors = 0

    async def rewards(self, item: Item, completions: Sequence[str]) -> list[float]:
        """One reward a completion: the sum over the functions that gave one.

        Raises:
            ConfigError: a function asks for something that the item does not have.
            RewardFailed: a function failed, and there is no `error_reward`.
        """
        columns = await asyncio.gather(*(self._of_function(each, item, completions) for each in self._functions))
        return [self._sum(item, text, row) for text, row in zip(completions, zip(*columns, strict=True), strict=True)]

    def _sum(self, item: Item, completion: str, row: Sequence[float | None]) -> float:
        given = [weight * value for weight, value in zip(self._weights, row, strict=True) if value is not None]
        if given:
            return sum(given)
        names = " and ".join(function.name for function in self._functions)
        return self._instead(RewardFailed(f"{names} gave None, so there is no reward{_of(item, completion)}"))

    async def _of_function(self, each: RewardFunction, item: Item, completions: Sequence[str]) -> list[float | None]:
        if each.is_of_a_group:
            return await self._of_group(each, item, completions)
        return list(await asyncio.gather(*(self._of_one(each, item, completion) for completion in completions)))

    async def _of_one(self, each: RewardFunction, item: Item, completion: str) -> float | None:
        arguments = each.arguments(known_of_one(item, self._formatted(item, completion)))
        try:
            return _reward(await self._called(each, arguments), each, item, completion)
        except RewardFailed as error:
            return self._instead(error)
        # The user's function can fail in any way.
        except Exception as error:
            return self._instead(RewardFailed(f"{each.name} failed: {told(error)}{_of(item, completion)}"), error)

    async def _of_group(self, each: RewardFunction, item: Item, completions: Sequence[str]) -> list[float | None]:
        formatted = [self._formatted(item, completion) for completion in completions]
        arguments = each.arguments(known_of_group(item, formatted, each))
        try:
            given = await self._called(each, arguments)
            try:
                values = list(given)
            except TypeError:
                raise RewardFailed(
                    f"{each.name} gave {_short(given)} where a list of {len(completions)} rewards belongs{_of(item)}"
                ) from None
            if len(values) != len(completions):
                raise RewardFailed(
                    f"{each.name} gave {len(values)} rewards for {len(completions)} completions{_of(item)}"
                )
            return [_reward(v, each, item, text) for v, text in zip(values, completions, strict=True)]
        except RewardFailed as error:
            return [self._instead(error)] * len(completions)
        # The user's function can fail in any way.
        except Exception as error:
            return [self._instead(RewardFailed(f"{each.name} failed: {told(error)}{_of(item)}"), error)] * len(
                completions
            )

    async def _called(self, each: RewardFunction, arguments: dict[str, Any]) -> Any:
        """What the function returns; its time counts from when it begins, not from when it waits for a thread."""
        if each.is_async:
            ended = in_the_background(each.call(**arguments))
        else:
            begun, ended = self._threads.submit(lambda: each.call(**arguments))
            await asyncio.wrap_future(begun)
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await asyncio.wrap_future(ended)
        except TimeoutError:
            if not limit.expired():
                raise
            if not each.is_async:
                self._threads.give_one_up()
            raise RewardFailed(
                f"{each.name} has not returned within {self._timeout_s:g} s: raise task.timeout_s, or look why it hangs"
            ) from None

    def _instead(self, problem: RewardFailed, cause: BaseException | None = None) -> float:
        """The reward in place of one that there is not; told at the 1st, 10th, 100th … time."""
        if self._error_reward is None:
            raise RewardFailed(
                f"task.functions: {problem}. Correct it, or give task.error_reward, which such completions then get"
            ) from cause
        self._num_errors += 1
        if math.log10(self._num_errors).is_integer():
            log.warning("reward %g instead (time %d): %s", self._error_reward, self._num_errors, problem)
        return self._error_reward

    def _formatted(self, item: Item, completion: str) -> Any:
        """The completion as text, or as the one message of a conversation, as TRL has it where the prompt is one."""
        kind = self._completion_format
        if kind == "auto":
            kind = "messages" if isinstance(_prompt(item), list) else "text"
        return [{"role": "assistant", "content": completion}] if kind == "messages" else completion


def known_of_one(item: Item, completion: Any) -> dict[str, Any]:
    """What a function of one completion may ask for: the item's parts, and every field of its record."""
    answer = {"answer": item.answer} if item.answer else {}
    entry = dict(item.entry or {})
    parts = {"question": item.question, "prompt": item.question, **answer, **entry}
    return {**parts, "completion": completion, "entry": entry, "item": item}


def known_of_group(item: Item, completions: list[Any], each: RewardFunction) -> dict[str, Any]:
    """What a function of a group may ask for: TRL's arguments, and each field of the record once a completion."""
    answer = {"answer": item.answer} if item.answer else {}
    columns = {"question": item.question, **answer, **(item.entry or {})}
    count = len(completions)
    known: dict[str, Any] = {name: [value] * count for name, value in columns.items() if name not in _NOT_COLUMNS}
    asked: dict[str, Any] = {name: _ignored for name in ("log_extra", "log_metric") if name in each.required}
    return {**known, **asked, "prompts": [_prompt(item)] * count, "completions": completions}


def _ignored(name: str, value: Any) -> None:
    """In place of TRL's functions that log from within a reward."""


def _prompt(item: Item) -> Any:
    return (item.entry or {}).get("prompt", item.question)


def _reward(value: Any, each: RewardFunction, item: Item, completion: str) -> float | None:
    """A number out of what the function gave; None is TRL's way to say that it does not apply."""
    if value is None:
        return None
    problem = f"{each.name} gave {_short(value)}{_of(item, completion)}"
    if isinstance(value, str | bytes):
        raise RewardFailed(f"{problem}: a reward is a number")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise RewardFailed(f"{problem}: a reward is a number") from None
    if not math.isfinite(number):
        raise RewardFailed(f"{problem}: a reward is finite")
    return number


def _of(item: Item, completion: str | None = None) -> str:
    texts = {"question": item.question, "answer": item.answer, "completion": completion}
    return "".join(f", {name} {_short(text)}" for name, text in texts.items() if text is not None)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
