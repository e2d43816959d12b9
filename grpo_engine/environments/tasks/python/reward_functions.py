"""Calls a user's reward functions by parameter name: per completion or per group, synchronous or async.

Two signatures are supported. Per completion: `score(completion, answer)`, or other fields of the item. Per group, as
in TRL: `score(completions, prompts, **columns)`, with a list for each column of the data set. An exception or invalid
value is reported with the function's name, its line and the item.
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
from grpo_engine.environments.tasks.concurrency import Threads, run_in_background_loop
from grpo_engine.environments.tasks.python.loading import describe_error
from grpo_engine.errors import ConfigError

log = logging.getLogger(__name__)

CompletionFormat = Literal["auto", "text", "messages"]

_OF_THE_GROUP = frozenset({"completions", "completion_ids", "prompts"})
"""Parameters that mark a function as per group."""
_NOT_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})
"""Names that TRL does not pass as columns."""
_NOT_PASSED = frozenset({"trainer_state"})
"""Parameters that TRL passes."""
_COMPLETIONS = frozenset({"completion", "completions", "completion_ids"})
"""Parameters with what is scored."""
_SLOW_S = 2.0
"""A call that takes longer is logged."""
_HANGING_S = 10.0
"""A call that takes longer is logged before it has returned."""
_SHOWN = 80
"""Longest excerpt of an item's text in a message, in characters."""


class RewardFailed(ConfigError):
    """A reward function raised an exception, returned no valid reward, or did not return: a restart changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """A user's function and its signature."""

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
        """Arguments for a call, taken from `known` by name.

        An unknown parameter name gets the completion, and the next unknown one the answer.

        Raises:
            ConfigError: it has other unknown parameters, or none for the completion.
        """
        completion = "completions" if self.is_of_a_group else "completion"
        named = {name: name for name in (*self.required, *self.optional) if name in known}
        unknown = [name for name in self.required if name not in known]
        if not_passed := _NOT_PASSED.intersection(unknown):
            raise ConfigError(
                f"task.functions: {self.name} has the parameter {min(not_passed)!r} of TRL, which is not passed here: "
                f"use {', '.join(known)}"
            )
        for meant in (completion, "answer"):
            if unknown and meant not in named and meant in known and not did_you_mean(unknown[0], known):
                named[unknown.pop(0)] = meant
        if unknown:
            raise ConfigError(
                f"task.functions: {self.name} has an unknown parameter {unknown[0]!r}"
                f"{did_you_mean(unknown[0], known)}: "
                f"available are {', '.join(known)}"
            )
        if _COMPLETIONS.isdisjoint(named.values()) and not self.takes_all:
            raise ConfigError(f"task.functions: {self.name} has no parameter for the completion: add `{completion}`")
        chosen = {name: known[meant] for name, meant in named.items()}
        return {**known, **chosen} if self.takes_all else chosen


def reward_function(name: str, call: Any) -> RewardFunction:
    """Read a function's signature.

    Raises:
        ConfigError: it cannot be called by parameter name.
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
        self._num_slow = 0
        self._num_hanging = 0

    async def rewards(
        self, item: Item, completions: Sequence[str], token_ids: Sequence[Sequence[int]] | None = None
    ) -> list[float]:
        """One reward per completion: the sum over the functions that returned one.

        Args:
            token_ids: of each completion; None: its bytes stand for them, as in a trial before anything is sampled.

        Raises:
            ConfigError: a function has a parameter that the item does not provide.
            RewardFailed: a function failed, and `error_reward` is not set.
        """
        if token_ids is None:
            token_ids = [list(text.encode()) for text in completions]
        columns = await asyncio.gather(
            *(self._of_function(each, item, completions, token_ids) for each in self._functions)
        )
        return [self._sum(item, text, row) for text, row in zip(completions, zip(*columns, strict=True), strict=True)]

    def _sum(self, item: Item, completion: str, row: Sequence[float | None]) -> float:
        given = [weight * value for weight, value in zip(self._weights, row, strict=True) if value is not None]
        if given:
            return sum(given)
        names = " and ".join(function.name for function in self._functions)
        return self._error_reward_for(
            RewardFailed(f"{names} returned None, so there is no reward{_of(item, completion)}")
        )

    async def _of_function(
        self, each: RewardFunction, item: Item, completions: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> list[float | None]:
        if each.is_of_a_group:
            return await self._of_group(each, item, completions, token_ids)
        return list(await asyncio.gather(*(self._of_one(each, item, completion) for completion in completions)))

    async def _of_one(self, each: RewardFunction, item: Item, completion: str) -> float | None:
        arguments = each.arguments(completion_arguments(item, self._formatted(item, completion)))
        try:
            return _reward(await self._called(each, arguments), each, item, completion)
        except RewardFailed as error:
            return self._error_reward_for(error)
        # User code can raise anything.
        except Exception as error:
            return self._error_reward_for(
                RewardFailed(f"{each.name} failed: {describe_error(error)}{_of(item, completion)}"), error
            )

    async def _of_group(
        self, each: RewardFunction, item: Item, completions: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> list[float | None]:
        formatted = [self._formatted(item, completion) for completion in completions]
        arguments = each.arguments(group_arguments(item, formatted, token_ids, each))
        try:
            given = await self._called(each, arguments)
            try:
                values = list(given)
            except TypeError:
                raise RewardFailed(
                    f"{each.name} returned {_short(given)} instead of a list of {len(completions)} rewards{_of(item)}"
                ) from None
            if len(values) != len(completions):
                raise RewardFailed(
                    f"{each.name} returned {len(values)} rewards for {len(completions)} completions{_of(item)}"
                )
            return [_reward(v, each, item, text) for v, text in zip(values, completions, strict=True)]
        except RewardFailed as error:
            return [self._error_reward_for(error)] * len(completions)
        # User code can raise anything.
        except Exception as error:
            return [
                self._error_reward_for(RewardFailed(f"{each.name} failed: {describe_error(error)}{_of(item)}"), error)
            ] * len(completions)

    async def _called(self, each: RewardFunction, arguments: dict[str, Any]) -> Any:
        """What the function returns; its time counts from when it begins, not from when it waits for a thread.

        A slow call, and one that does not return, are logged with their seconds, at growing intervals.
        """
        if each.is_async:
            ended = run_in_background_loop(each.call(**arguments))
        else:
            begun, ended = self._threads.submit(lambda: each.call(**arguments))
            await asyncio.wrap_future(begun)
        loop = asyncio.get_running_loop()
        began = loop.time()
        notice = loop.call_later(_HANGING_S, self._log_hanging, each)
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                returned = await asyncio.wrap_future(ended)
        except TimeoutError:
            if not limit.expired():
                raise
            if not each.is_async:
                self._threads.replace_hung_thread()
            raise RewardFailed(
                f"{each.name} has not returned within {self._timeout_s:g} s: raise task.timeout_s, or fix the hang"
            ) from None
        finally:
            notice.cancel()
        self._log_slow(each, loop.time() - began)
        return returned

    def _log_hanging(self, each: RewardFunction) -> None:
        self._num_hanging += 1
        if _is_logged(self._num_hanging):
            log.warning(
                "%s has not returned for %g s (call %d that takes so long); after %g s (task.timeout_s) it has failed",
                each.name,
                _HANGING_S,
                self._num_hanging,
                self._timeout_s,
            )

    def _log_slow(self, each: RewardFunction, seconds: float) -> None:
        if seconds <= _SLOW_S:
            return
        self._num_slow += 1
        if _is_logged(self._num_slow):
            how = (
                "" if each.is_async else ", and calls wait for each other: raise task.threads if it waits for something"
            )
            log.warning("%s took %.1f s (slow call %d)%s", each.name, seconds, self._num_slow, how)

    def _error_reward_for(self, problem: RewardFailed, cause: BaseException | None = None) -> float:
        """`error_reward` in place of a missing reward; logged at the 1st, 10th, 100th … time."""
        if self._error_reward is None:
            raise RewardFailed(
                f"task.functions: {problem}. Correct it, or set task.error_reward for such completions"
            ) from cause
        self._num_errors += 1
        if _is_logged(self._num_errors):
            log.warning("using error_reward %g (occurrence %d): %s", self._error_reward, self._num_errors, problem)
        return self._error_reward

    def _formatted(self, item: Item, completion: str) -> Any:
        """The completion as text, or as a list of one message, as in TRL for conversational prompts."""
        kind = self._completion_format
        if kind == "auto":
            kind = "messages" if isinstance(_prompt(item), list) else "text"
        return [{"role": "assistant", "content": completion}] if kind == "messages" else completion


def _is_logged(occurrence: int) -> bool:
    """Whether the 1st, 10th, 100th … time of something is reached."""
    return math.log10(occurrence).is_integer()


def completion_arguments(item: Item, completion: Any) -> dict[str, Any]:
    """Arguments available to a function per completion: the item's parts and every field of its record."""
    answer = {"answer": item.answer} if item.answer else {}
    entry = dict(item.entry or {})
    parts = {"question": item.question, "prompt": item.question, **answer, **entry}
    return {**parts, "completion": completion, "entry": entry, "item": item}


def group_arguments(
    item: Item, completions: list[Any], token_ids: Sequence[Sequence[int]], each: RewardFunction
) -> dict[str, Any]:
    """Arguments available to a function per group: TRL's, and each field of the record repeated per completion."""
    answer = {"answer": item.answer} if item.answer else {}
    columns = {"question": item.question, **answer, **(item.entry or {})}
    count = len(completions)
    known: dict[str, Any] = {name: [value] * count for name, value in columns.items() if name not in _NOT_COLUMNS}
    asked: dict[str, Any] = {name: _ignored for name in ("log_extra", "log_metric") if name in each.required}
    of_group = {"prompts": [_prompt(item)] * count, "completions": completions}
    return {**known, **asked, **of_group, "completion_ids": [list(each) for each in token_ids]}


def _ignored(name: str, value: Any) -> None:
    """Stands for TRL's log functions."""


def _prompt(item: Item) -> Any:
    return (item.entry or {}).get("prompt", item.question)


def _reward(value: Any, each: RewardFunction, item: Item, completion: str) -> float | None:
    """The returned value as a number; None means "not applicable", as in TRL."""
    if value is None:
        return None
    problem = f"{each.name} returned {_short(value)}{_of(item, completion)}"
    if isinstance(value, str | bytes):
        raise RewardFailed(f"{problem}: a reward must be a number")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise RewardFailed(f"{problem}: a reward must be a number") from None
    if not math.isfinite(number):
        raise RewardFailed(f"{problem}: a reward must be finite")
    return number


def _of(item: Item, completion: str | None = None) -> str:
    texts = {"question": item.question, "answer": item.answer, "completion": completion}
    return "".join(f", {name} {_short(text)}" for name, text in texts.items() if text is not None)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
