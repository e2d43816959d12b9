"""The grammar of a player's answer: exactly one action, with an optional thought before it.

    answer  = blanks [ "<think>" anything "</think>" blanks ] action blanks
    action  = "<say>" text "</say>" | "<pass/>"
            | "<vote>" name "</vote>" | "<kill>" name "</kill>"
            | "<protect>" name "</protect>" | "<investigate>" name "</investigate>"
    text    = printable characters without "<" and ">", not all blank: one line, so no player can imitate another
    name    = letters A to Z and a to z

`rules` decides whether an action is allowed at that time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Verb(StrEnum):
    """Kinds of actions."""

    SAY = "say"
    VOTE = "vote"
    KILL = "kill"
    PROTECT = "protect"
    INVESTIGATE = "investigate"
    PASS = "pass"


@dataclass(frozen=True, slots=True)
class Action:
    """`<vote>Bob</vote>` is `Action(Verb.VOTE, "Bob")`; `<pass/>` has no object."""

    verb: Verb
    object: str = ""
    """A name, or the text of a statement."""

    def __str__(self) -> str:
        """The action in the grammar."""
        return f"<{self.verb}/>" if self.verb is Verb.PASS else f"<{self.verb}>{self.object}</{self.verb}>"


PASS = Action(Verb.PASS)

_THOUGHT_BEGINS, _THOUGHT_ENDS = "<think>", "</think>"
_ACTION = re.compile(
    r"<(?P<verb>vote|kill|protect|investigate)>(?P<name>[A-Za-z]+)</(?P=verb)>|<say>(?P<text>[^<>]+)</say>|<pass/>"
)


def parse(answer: str) -> Action | None:
    """The action in an answer; None if it is malformed."""
    found = _ACTION.fullmatch(_without_thought(answer.strip()))
    if found is None:
        return None
    if found["verb"] is not None:
        return Action(Verb(found["verb"]), found["name"])
    if found["text"] is None:
        return PASS
    text = found["text"]
    return Action(Verb.SAY, text) if text.isprintable() and not text.isspace() else None


def _without_thought(answer: str) -> str:
    """What follows the thought. Not by an expression: one that backtracks needs 64 bytes for each character."""
    if not answer.startswith(_THOUGHT_BEGINS):
        return answer
    _, ends, action = answer.partition(_THOUGHT_ENDS)
    return action.lstrip() if ends else answer
