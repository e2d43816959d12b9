"""One diagnosis, as `grpo-engine check`, `grpo-tui doctor` and the alignment screen make it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

Number = float | int | str | bool | None
Numbers = Mapping[str, Number]
Severity = Literal["ok", "warning", "error"]
"""`warning`: training works, but not as well as it could, or something could not be checked. `error`: a start fails,
or training learns the wrong thing."""


class Certainty(StrEnum):
    """How sure a cause is."""

    SURE = "sure"
    LIKELY = "likely"
    POSSIBLE = "possible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is wrong with which value, why, and which flag fixes it; of severity `ok` where nothing is.

    Example: `temperature  error  at 0.7: |Δ| 0.41 …; cause: the server's log-probs are raw; do: --logprobs-mode raw`.
    """

    id: str
    severity: Severity
    text: str
    """What was measured, with its numbers."""
    cause: str | None = None
    """What most likely caused it, in a few words."""
    hint: str | None = None
    """What to do, with the flag."""
    certainty: Certainty = Certainty.SURE
    details: tuple[str, ...] = ()
    """Lines below, such as the worst tokens."""
    numbers: Numbers = field(default_factory=dict)
    """The measurements for programs."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check before its outcome: `Check("canary", {"moved": 0.4}).ok("…")` is a finding."""

    id: str
    numbers: Numbers = field(default_factory=dict)

    def ok(self, text: str) -> Finding:
        """The check passed."""
        return Finding(id=self.id, severity="ok", text=text, numbers=self.numbers)

    def warn(self, text: str, *, cause: str | None = None, hint: str | None = None) -> Finding:
        """The check passed with a remark, or could not be made."""
        return Finding(id=self.id, severity="warning", text=text, cause=cause, hint=hint, numbers=self.numbers)

    def fail(self, text: str, *, cause: str, hint: str, **more: Number) -> Finding:
        """The check failed; `more` is added to its numbers."""
        numbers = {**self.numbers, **more}
        return Finding(id=self.id, severity="error", text=text, cause=cause, hint=hint, numbers=numbers)
