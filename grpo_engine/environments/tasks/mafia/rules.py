"""The rules: legal actions and state transitions, without randomness.

A day has rounds of talk and then a vote; the player with most votes is out, none at a tie. At night the mafia kills,
the doctor protects and the sheriff investigates, simultaneously. The role of a player who is out is revealed, and the
player takes no more turns. The town wins when no mafia is left, the mafia when it is at least half of the living; after
the last night there is no winner. Players are identified by their place, 0 to n - 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from grpo_engine.environments.tasks.mafia.grammar import Action, Verb


class Role(StrEnum):
    """Roles of players."""

    CITIZEN = "citizen"
    SHERIFF = "sheriff"
    DOCTOR = "doctor"
    MAFIA = "mafia"


class Side(StrEnum):
    """Sides that win together."""

    TOWN = "town"
    MAFIA = "mafia"


class Phase(StrEnum):
    """Phases of a game."""

    TALK = "talk"
    VOTE = "vote"
    NIGHT = "night"
    OVER = "over"


NIGHT_VERBS = {Role.MAFIA: Verb.KILL, Role.DOCTOR: Verb.PROTECT, Role.SHERIFF: Verb.INVESTIGATE}
"""Night action of each role; citizens have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Parameters of a game."""

    max_days: int
    num_talks: int
    """Rounds of talk a day."""
    max_statement: int
    """Characters of a statement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """Names and roles by place."""

    names: tuple[str, ...]
    roles: tuple[Role, ...]

    def side(self, place: int) -> Side:
        """The side of a player."""
        return Side.MAFIA if self.roles[place] is Role.MAFIA else Side.TOWN


@dataclass(frozen=True, slots=True)
class Said:
    """A statement; visible to all."""

    place: int
    text: str


@dataclass(frozen=True, slots=True)
class Voted:
    """The result of a vote; visible to all."""

    votes: tuple[tuple[int, int], ...]
    """Pairs of voter and target."""
    out: int | None


@dataclass(frozen=True, slots=True)
class Dawned:
    """The end of a night; visible to all."""

    killed: int | None


@dataclass(frozen=True, slots=True)
class Investigated:
    """The result of an investigation; visible to the sheriff only."""

    sheriff: int
    place: int
    is_mafia: bool


Event = Said | Voted | Dawned | Investigated


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """State of a game; `knowledge` selects what a player sees."""

    rules: Rules
    deal: Deal
    alive: frozenset[int]
    phase: Phase
    day: int = 1
    num_talks: int = 0
    """Rounds of talk so far today."""
    events: tuple[Event, ...] = ()


def begin(deal: Deal, rules: Rules) -> State:
    """The state of the first morning."""
    return State(rules=rules, deal=deal, alive=frozenset(range(len(deal.names))), phase=_morning(rules))


def acting(state: State) -> tuple[int, ...]:
    """The players whose turn it is, simultaneously; empty once the game is over."""
    match state.phase:
        case Phase.TALK | Phase.VOTE:
            return tuple(sorted(state.alive))
        case Phase.NIGHT:
            return tuple(place for place in sorted(state.alive) if state.deal.roles[place] in NIGHT_VERBS)
        case Phase.OVER:
            return ()


def verb(state: State, place: int) -> Verb:
    """The action of a player whose turn it is; passing is always legal too."""
    by_day = {Phase.TALK: Verb.SAY, Phase.VOTE: Verb.VOTE}
    return by_day.get(state.phase) or NIGHT_VERBS[state.deal.roles[place]]


def targets(state: State, place: int) -> tuple[int, ...]:
    """Legal targets: living players; the doctor may protect itself, and mafia cannot kill mafia."""
    others = tuple(other for other in sorted(state.alive) if other != place)
    match verb(state, place):
        case Verb.SAY:
            return ()
        case Verb.PROTECT:
            return tuple(sorted(state.alive))
        case Verb.KILL:
            return tuple(other for other in others if state.deal.roles[other] is not Role.MAFIA)
        case _:
            return others


def is_legal(state: State, place: int, action: Action) -> bool:
    """Whether an action is legal for a player now."""
    if place not in acting(state):
        return False
    if action.verb is Verb.PASS:
        return True
    if action.verb is not verb(state, place):
        return False
    if action.verb is Verb.SAY:
        return len(action.object) <= state.rules.max_statement
    return action.object in [state.deal.names[target] for target in targets(state, place)]


def advance(state: State, actions: Mapping[int, Action]) -> State:
    """The state after the actions of the players whose turn it is; missing ones pass.

    Raises:
        ValueError: an action is not legal.
    """
    for place, action in actions.items():
        if not is_legal(state, place, action):
            raise ValueError(f"{state.deal.names[place]}: {action} is not legal on day {state.day}, {state.phase}")
    done = {place: actions[place] for place in sorted(actions) if actions[place].verb is not Verb.PASS}
    match state.phase:
        case Phase.TALK:
            return _talked(state, done)
        case Phase.VOTE:
            return _voted(state, done)
        case _:
            return _slept(state, done)


def winner(state: State) -> Side | None:
    """The winning side, if any."""
    num_mafia = sum(state.deal.side(place) is Side.MAFIA for place in state.alive)
    if num_mafia == 0:
        return Side.TOWN
    return Side.MAFIA if 2 * num_mafia >= len(state.alive) else None


def _talked(state: State, done: Mapping[int, Action]) -> State:
    said = tuple(Said(place, action.object) for place, action in done.items())
    num_talks = state.num_talks + 1
    phase = Phase.TALK if num_talks < state.rules.num_talks else Phase.VOTE
    return replace(state, events=state.events + said, num_talks=num_talks, phase=phase)


def _voted(state: State, done: Mapping[int, Action]) -> State:
    votes = _named(state, done)
    most = Counter(votes.values()).most_common(2)
    is_tie = len(most) == 2 and most[0][1] == most[1][1]
    out = None if not most or is_tie else most[0][0]
    after = replace(state, alive=state.alive - {out}, events=(*state.events, Voted(tuple(votes.items()), out)))
    return replace(after, phase=Phase.NIGHT if winner(after) is None else Phase.OVER)


def _slept(state: State, done: Mapping[int, Action]) -> State:
    named = _named(state, done)
    roles = state.deal.roles
    kills = [target for place, target in named.items() if roles[place] is Role.MAFIA]
    protected = {target for place, target in named.items() if roles[place] is Role.DOCTOR}
    chosen = Counter(kills).most_common(1)  # at a tie the first mafia player decides
    killed = chosen[0][0] if chosen and chosen[0][0] not in protected else None
    alive = state.alive - {killed}
    found = tuple(
        Investigated(place, target, roles[target] is Role.MAFIA)
        for place, target in named.items()
        if roles[place] is Role.SHERIFF and place in alive
    )
    after = replace(state, alive=alive, events=(*state.events, Dawned(killed), *found), day=state.day + 1, num_talks=0)
    is_over = winner(after) is not None or after.day > state.rules.max_days
    return replace(after, phase=Phase.OVER if is_over else _morning(state.rules))


def _morning(rules: Rules) -> Phase:
    return Phase.TALK if rules.num_talks > 0 else Phase.VOTE


def _named(state: State, done: Mapping[int, Action]) -> dict[int, int]:
    """Place of whom each names."""
    return {place: state.deal.names.index(action.object) for place, action in done.items()}
