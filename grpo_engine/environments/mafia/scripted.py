"""Players that are no model: plain habits, and what is open drawn from the randomness that they are given.

They listen: whom the talk of the day names most often gets their vote, so that it pays to say the right name.
"""

from __future__ import annotations

import random
import re
from collections import Counter

from grpo_engine.environments.mafia.grammar import PASS, Action, Verb
from grpo_engine.environments.mafia.knowledge import Knowledge


def scripted(known: Knowledge, rng: random.Random) -> Action:
    """What a player does who knows this; always legal."""
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
    """Whom to vote for: one who is known to be mafia, else whom most have named today, else anybody."""
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
    """Whom one may suspect aloud: the living of whom one is not a mate."""
    return [name for name in known.living if name != known.name and name not in known.mates]
