"""What a check found, and how it is shown: lines for people, JSON for programs. Pure and torch-free."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

Number = float | int | str | bool | None
Numbers = Mapping[str, Number]

_MARKS = {"ok": "✓", "warn": "!", "fail": "✗"}
_COLOURS = {"ok": "32", "warn": "33", "fail": "31;1"}
_ID_WIDTH = 13
_INDENT = " " * (_ID_WIDTH + 4)


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """Training works, but not as well as it could, or something could not be checked."""
    FAIL = "fail"
    """Training would learn the wrong thing, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one check.

    Example: `temperature  fail  at 0.7: |Δ| 0.41 …; cause: the server's log-probs are raw; do: --logprobs-mode raw`.
    """

    id: str
    level: Level
    seen: str
    """What was measured, in words with its numbers."""
    cause: str | None = None
    """What most likely brought it about."""
    advice: str | None = None
    """What to do, with the flag."""
    details: tuple[str, ...] = ()
    """Lines below, such as the worst tokens."""
    numbers: Numbers = field(default_factory=dict)
    """The same for programs."""


@dataclass(frozen=True, slots=True)
class Line:
    """One check before its outcome: `Line("canary", {"moved": 0.4}).ok("…")` is a finding."""

    id: str
    numbers: Numbers = field(default_factory=dict)

    def ok(self, seen: str) -> Finding:
        """All is well."""
        return Finding(id=self.id, level=Level.OK, seen=seen, numbers=self.numbers)

    def warn(self, seen: str, *, cause: str | None = None, advice: str | None = None) -> Finding:
        """Something to know."""
        return Finding(id=self.id, level=Level.WARN, seen=seen, cause=cause, advice=advice, numbers=self.numbers)

    def fail(self, seen: str, *, cause: str, advice: str, **more: Number) -> Finding:
        """A red line, with `more` numbers."""
        numbers = {**self.numbers, **more}
        return Finding(id=self.id, level=Level.FAIL, seen=seen, cause=cause, advice=advice, numbers=numbers)


def finding_lines(finding: Finding, *, width: int, has_colour: bool) -> list[str]:
    """A finding for a terminal of `width` columns: a mark, its name, what was seen; cause and advice below."""
    mark = _MARKS[finding.level]
    if has_colour:
        mark = f"\x1b[{_COLOURS[finding.level]}m{mark}\x1b[0m"
    first, *others = _wrapped(finding.seen, width) or [""]
    lines = [f"{mark} {finding.id:<{_ID_WIDTH}}  {first}", *(f"{_INDENT}{line}" for line in others)]
    for label, text in (("cause: ", finding.cause), ("do:    ", finding.advice)):
        if text is not None:
            head, *rest = _wrapped(text, width - len(label))
            lines.append(f"{_INDENT}{label}{head}")
            lines += [f"{_INDENT}{' ' * len(label)}{line}" for line in rest]
    return [*lines, *(f"{_INDENT}{_cut(line, width - len(_INDENT))}" for line in finding.details)]


def summary_line(findings: Sequence[Finding], *, has_colour: bool) -> str:
    """The last line: whether training may begin."""
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    level = Level.FAIL if counts[Level.FAIL] else Level.WARN if counts[Level.WARN] else Level.OK
    verdict = {
        Level.OK: "sampler and trainer agree",
        Level.WARN: "sampler and trainer agree, as far as could be checked",
        Level.FAIL: "do not train like this",
    }[level]
    text = f"{counts[Level.OK]} ok, {counts[Level.WARN]} to know, {counts[Level.FAIL]} wrong: {verdict}"
    return f"\x1b[{_COLOURS[level]}m{text}\x1b[0m" if has_colour else text


def as_table(findings: Sequence[Finding]) -> dict[str, Any]:
    """For JSON: `{"ok": bool, "findings": [{"id", "level", "seen", "cause", "advice", "details", "numbers"}]}`."""
    return {"ok": is_all_right(findings), "findings": [asdict(finding) for finding in findings]}


def is_all_right(findings: Sequence[Finding]) -> bool:
    """Whether there is no red line."""
    return all(finding.level is not Level.FAIL for finding in findings)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width - len(_INDENT), 24), break_long_words=False, break_on_hyphens=False)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
