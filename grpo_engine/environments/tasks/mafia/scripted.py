"""Scripted players: simple rules, with a seeded random choice among equal options.

They vote for the player named most often in the talk of the day, so that naming the right player is rewarded.
"""

from __future__ import annotations

import random
import re
from collections import Counter

from grpo_engine.environments.tasks.mafia.grammar import PASS, Action, Verb
from grpo_engine.environments.tasks.mafia.knowledge import Knowledge


def scripted(known: Knowledge, rng: random.Random) -> Action:
    """A legal action for a player with this knowledge."""
    match known.verb:
        case Verb.SAY:
            suspects = [name for name in _others(known) if name in known.known_mafia] or _others(known)
            text = f"I suspect {rng.choice(suspects)}"
            return Action(Verb.SAY, text) if len(text) <= known.rules.max_statement else PASS
        case Verb.VOTE:
            return Action(Verb.VOTE, rng.choice(_suspects(known)))
        case Verb.INVESTIGATE:
            fresh = [name for name in known.targets if name not in known.investigated]
            return Action(Verb.INVESTIGATE, rng.choice(fresh or known.targets))
        case _:
            return Action(known.verb, rng.choice(known.targets))


def _suspects(known: Knowledge) -> list[str]:
    """Candidates for a vote: known mafia, else the players named most often today, else all."""
    eligible = [name for name in known.targets if name not in known.mates] or list(known.targets)
    if found := [name for name in eligible if name in known.known_mafia]:
        return found
    named = Counter(
        name
        for speaker, text in known.said_today
        if speaker != known.name
        for name in set(re.findall(r"[A-Za-z]+", text))
        if name in eligible
    )
    most = max(named.values(), default=0)
    return [name for name in eligible if named[name] == most]


def _others(known: Knowledge) -> list[str]:
    """Living players that are not on the own mafia team."""
    return [name for name in known.living if name != known.name and name not in known.mates]
