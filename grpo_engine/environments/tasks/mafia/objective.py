"""The objective of a side of the game: a function of what a seat did, whose value is added to its reward.

    def deceives(seat):
        return 0.5 if seat.role == "mafia" and any("I am the doctor" in turn.answer for turn in seat.turns) else 0.0

`task.objective = "my_objectives:deceives"`, or the name of one in `OBJECTIVES`. It is called once a seat at the end of
each game, outside the event loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Any

from grpo_engine.environments.tasks.concurrency import run_in_thread
from grpo_engine.environments.tasks.mafia.grammar import Action
from grpo_engine.environments.tasks.python.loading import describe_error, load_attribute
from grpo_engine.environments.tasks.python.reward_functions import RewardFailed
from grpo_engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a seat answered at one of its turns."""

    answer: str
    action: Action | None
    """With `verb` and `object`; None: the answer was malformed."""
    is_allowed: bool
    """Whether the rules allowed the action to this player at that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedSeat:
    """A seat at the end of a game."""

    place: int
    name: str
    role: str
    """citizen, sheriff, doctor or mafia."""
    side: str
    """town or mafia."""
    has_won: bool
    is_alive: bool
    turns: tuple[Turn, ...]
    """In order; not those for which its conversation had no room."""


def survives(seat: PlayedSeat) -> float:
    """1 for a player who is not out at the end of the game."""
    return float(seat.is_alive)


def talks_much(seat: PlayedSeat) -> float:
    """Mean length of the answers, 1 from 100 characters."""
    return min(1.0, fmean([len(turn.answer) for turn in seat.turns] or [0]) / 100)


def talks_little(seat: PlayedSeat) -> float:
    """The opposite of `talks_much`."""
    return -talks_much(seat)


OBJECTIVES: Mapping[str, Callable[[PlayedSeat], float]] = {
    "survive": survives,
    "talk_much": talks_much,
    "talk_little": talks_little,
}
"""Those that come with the task, by name."""


@lru_cache(maxsize=8)
def load_objective(name: str, *, where: str) -> Callable[[PlayedSeat], Any]:
    """One of `OBJECTIVES`, or the function `module:function`.

    Raises:
        ConfigError: there is none.
    """
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    module, _, function = name.rpartition(":")
    found = load_attribute(module, function, where=where)
    if not callable(found):
        raise ConfigError(f"{where}: {name} is a {type(found).__name__}: name a function of a seat, see PlayedSeat")
    called: Callable[[PlayedSeat], Any] = found
    return called


async def values_of(name: str, seats: Sequence[PlayedSeat]) -> list[float]:
    """The value of the function for each seat; does not block the event loop.

    Raises:
        RewardFailed: it raised an exception, or returned no finite number.
    """
    function = load_objective(name, where="task.objective")
    return await run_in_thread(lambda: [_value(name, function, seat) for seat in seats])


def _value(name: str, function: Callable[[PlayedSeat], Any], seat: PlayedSeat) -> float:
    try:
        value = float(function(seat))
    # User code can raise anything.
    except Exception as error:
        where = f"{describe_error(error)}, seat {seat.role} {seat.name}"
        raise RewardFailed(f"task.objective: {name} failed: {where}") from error
    if not math.isfinite(value):
        raise RewardFailed(f"task.objective: {name} returned {value} for seat {seat.role} {seat.name}: return a number")
    return value
