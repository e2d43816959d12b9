"""What a player may answer: exactly one action, and nothing beside it but a thought in front.

    answer  = blanks [ "<think>" anything "</think>" blanks ] action blanks
    action  = "<say>" text "</say>" | "<pass/>"
            | "<vote>" name "</vote>" | "<kill>" name "</kill>"
            | "<protect>" name "</protect>" | "<investigate>" name "</investigate>"
    text    = printable characters without "<" and ">", not all blank: a line, so that nobody speaks for somebody else
    name    = letters A to Z and a to z

Whether an action is allowed just then is for `rules` to say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Verb(StrEnum):
    """What can be done."""

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
    """The name, or what is said."""

    def __str__(self) -> str:
        """As a player writes it."""
        return f"<{self.verb}/>" if self.verb is Verb.PASS else f"<{self.verb}>{self.object}</{self.verb}>"


PASS = Action(Verb.PASS)

_ANSWER = re.compile(
    r"\s*(?:<think>(?:(?!</think>).)*</think>\s*)?"
    r"(?:<(?P<verb>vote|kill|protect|investigate)>(?P<name>[A-Za-z]+)</(?P=verb)>"
    r"|<say>(?P<text>[^<>]+)</say>|<pass/>)\s*",
    re.DOTALL,
)


def parse(answer: str) -> Action | None:
    """The action of an answer; None where it is not well-formed."""
    found = _ANSWER.fullmatch(answer)
    if found is None:
        return None
    if found["verb"] is not None:
        return Action(Verb(found["verb"]), found["name"])
    if found["text"] is None:
        return PASS
    text = found["text"]
    return Action(Verb.SAY, text) if text.isprintable() and not text.isspace() else None
