"""What a player may know, and the prompt made of it. Every player, model or script, sees only `Knowledge`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from grpo_engine.environments.tasks.mafia.grammar import PASS, Action, Verb
from grpo_engine.environments.tasks.mafia.rules import (
    Dawned,
    Event,
    Investigated,
    Phase,
    Role,
    Rules,
    Said,
    State,
    Voted,
    targets,
    verb,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """Visible information of a player whose turn it is. Other players are identified by name."""

    rules: Rules
    name: str
    role: Role
    mates: tuple[str, ...]
    """The other mafia players, for a mafia player; else empty."""
    names: tuple[str, ...]
    """All players."""
    living: tuple[str, ...]
    num_mafia: int
    """At the start."""
    phase: Phase
    day: int
    num_talks: int
    verb: Verb
    targets: tuple[str, ...]
    """Names that the verb can be applied to."""
    news: tuple[str, ...]
    """Events since the last turn, one line each."""
    said_today: tuple[tuple[str, str], ...]
    """Speaker and text of each statement of this day."""
    known_mafia: tuple[str, ...]
    """Players that a sheriff has found to be mafia."""
    investigated: tuple[str, ...]
    """Players that a sheriff has investigated."""


def knowledge(state: State, place: int, *, since: int = 0) -> Knowledge:
    """The knowledge of the player at `place`, whose turn it is; `news` starts at event number `since`."""
    deal = state.deal
    is_mafia = deal.roles[place] is Role.MAFIA
    visible = [event for event in state.events if _may_know(event, place)]
    found = [event for event in visible if isinstance(event, Investigated)]
    of_today = _of_today(state.events)
    return Knowledge(
        rules=state.rules,
        name=deal.names[place],
        role=deal.roles[place],
        mates=tuple(
            name
            for other, (name, role) in enumerate(zip(deal.names, deal.roles, strict=True))
            if is_mafia and other != place and role is Role.MAFIA
        ),
        names=deal.names,
        living=tuple(deal.names[other] for other in sorted(state.alive)),
        num_mafia=deal.roles.count(Role.MAFIA),
        phase=state.phase,
        day=state.day,
        num_talks=state.num_talks,
        verb=verb(state, place),
        targets=tuple(deal.names[target] for target in targets(state, place)),
        news=tuple(
            line for event in state.events[since:] if _may_know(event, place) for line in _lines(event, state, place)
        ),
        said_today=tuple((deal.names[event.place], event.text) for event in of_today if isinstance(event, Said)),
        known_mafia=tuple(deal.names[event.place] for event in found if event.is_mafia),
        investigated=tuple(deal.names[event.place] for event in found),
    )


def prompt_text(known: Knowledge, *, is_first: bool, explains: bool) -> str:
    """The text that a model gets at its turn.

    Args:
        is_first: whether this is its first turn.
        explains: whether to include the rules of the game.
    """
    lines = [_introduction(known, explains=explains)] if is_first else []
    return "\n".join([*lines, *known.news, _request(known)])


def _may_know(event: Event, place: int) -> bool:
    return not isinstance(event, Investigated) or event.sheriff == place


def _of_today(events: Sequence[Event]) -> Sequence[Event]:
    """Events after the last night."""
    last = max((number for number, event in enumerate(events) if isinstance(event, Dawned)), default=-1)
    return events[last + 1 :]


def _lines(event: Event, state: State, place: int) -> list[str]:
    names, roles = state.deal.names, state.deal.roles
    match event:
        case Said(speaker, text):
            return [] if speaker == place else [f"{names[speaker]}: {text}"]  # own statements are in the conversation
        case Voted(votes, out):
            result = "Nobody is out." if out is None else f"{names[out]} is out: {roles[out]}."
            return [f"Votes: {', '.join(f'{names[a]}-{names[b]}' for a, b in votes) or 'none'}. {result}"]
        case Dawned(killed):
            return ["Nobody died." if killed is None else f"{names[killed]} was killed: {roles[killed]}."]
        case Investigated(_, suspect, is_mafia):
            return [f"{names[suspect]} is {'' if is_mafia else 'not '}mafia."]
        case _:
            assert_never(event)


def _introduction(known: Knowledge, *, explains: bool) -> str:
    others = ", ".join(name for name in known.names if name != known.name)
    you = f"You are {known.name}, {known.role}" + (f" with {', '.join(known.mates)}" if known.mates else "") + "."
    if not explains:
        return f"{you} Others: {others}."
    num_mafia = f"{known.num_mafia} of you {'is' if known.num_mafia == 1 else 'are'} mafia"
    return (
        f"A game of Mafia with {others}; {num_mafia}. {you} Each day all talk, then vote one out. Each night the mafia "
        "kills, the doctor protects, the sheriff investigates. The town wins when no mafia is left, the mafia when it "
        "is half. Answer with one tag."
    )


def _request(known: Knowledge) -> str:
    moment = f"Night {known.day}" if known.phase is Phase.NIGHT else f"Day {known.day}, {known.phase}"
    if known.verb is Verb.SAY:
        return f"{moment}: {Action(Verb.SAY, 'text')} of {known.rules.max_statement} letters at most, or {PASS}"
    return f"{moment}: {Action(known.verb, 'name')} of {', '.join(known.targets)}, or {PASS}"
