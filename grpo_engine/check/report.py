"""How the findings of a check are shown: each on the terminal as soon as it is made, or all as JSON at the end."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from grpo_engine.check.config import CheckConfig
from grpo_engine.diagnosis.finding import Finding, Severity
from grpo_engine.wire.terminal_text import printable

_MOST_COLUMNS = 100
_LEVELS: dict[Severity, str] = {"ok": "ok", "warning": "warn", "error": "fail"}
"""The documented names of `check --json`."""
_MARKS: dict[Severity, str] = {"ok": "✓", "warning": "!", "error": "✗"}
_COLOURS: dict[Severity, str] = {"ok": "32", "warning": "33", "error": "31;1"}
_ID_WIDTH = 13
_INDENT = " " * (_ID_WIDTH + 4)


class Report:
    """Shows each finding when it is there, or all of them as JSON at the end."""

    def __init__(self, config: CheckConfig) -> None:
        self.findings: list[Finding] = []
        self._as_json = config.as_json
        self._has_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self._width = min(shutil.get_terminal_size().columns, _MOST_COLUMNS)
        self._say(f"{printable(config.model_name)} by {config.bridge.mode}, server on port {config.vllm_port}\n")

    def add(self, *findings: Finding) -> None:
        """Take findings."""
        for finding in findings:
            self.findings.append(finding)
            self._say("\n".join(finding_lines(finding, width=self._width, has_colour=self._has_colour)))

    def end(self) -> None:
        """Say how it stands."""
        if self._as_json:
            sys.stdout.write(json.dumps(as_table(self.findings)) + "\n")
        self._say(f"\n{summary_line(self.findings, has_colour=self._has_colour)}")

    def _say(self, text: str) -> None:
        if not self._as_json:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()


def finding_lines(finding: Finding, *, width: int, has_colour: bool) -> list[str]:
    """A finding for a terminal of `width` columns: a mark, its name, what was seen; cause and advice below."""
    mark = _MARKS[finding.severity]
    if has_colour:
        mark = f"\x1b[{_COLOURS[finding.severity]}m{mark}\x1b[0m"
    first, *others = _wrapped(finding.text, width) or [""]
    lines = [f"{mark} {finding.id:<{_ID_WIDTH}}  {first}", *(f"{_INDENT}{line}" for line in others)]
    for label, text in (("cause: ", finding.cause), ("do:    ", finding.hint)):
        if text is not None:
            head, *rest = _wrapped(text, width - len(label))
            lines.append(f"{_INDENT}{label}{head}")
            lines += [f"{_INDENT}{' ' * len(label)}{line}" for line in rest]
    return [*lines, *(f"{_INDENT}{_cut(printable(line), width - len(_INDENT))}" for line in finding.details)]


def summary_line(findings: Sequence[Finding], *, has_colour: bool) -> str:
    """The last line: whether training may begin."""
    num_ok, num_warnings, num_errors = (
        sum(finding.severity == severity for finding in findings) for severity in _LEVELS
    )
    severity: Severity = "error" if num_errors else "warning" if num_warnings else "ok"
    verdict = {
        "ok": "sampler and trainer agree",
        "warning": "sampler and trainer agree, as far as could be checked",
        "error": "do not train with these settings",
    }[severity]
    text = f"{num_ok} ok, {num_warnings} warnings, {num_errors} errors: {verdict}"
    return f"\x1b[{_COLOURS[severity]}m{text}\x1b[0m" if has_colour else text


def as_table(findings: Sequence[Finding]) -> dict[str, Any]:
    """For JSON: `{"ok": bool, "findings": [{"id", "level", "seen", "cause", "advice", "details", "numbers"}]}`."""
    return {
        "ok": passes(findings),
        "findings": [
            {
                "id": finding.id,
                "level": _LEVELS[finding.severity],
                "seen": finding.text,
                "cause": finding.cause,
                "advice": finding.hint,
                "details": finding.details,
                "numbers": finding.numbers,
            }
            for finding in findings
        ],
    }


def passes(findings: Sequence[Finding]) -> bool:
    """Whether no check failed."""
    return all(finding.severity != "error" for finding in findings)


def _wrapped(text: str, width: int) -> list[str]:
    """The lines of a text, which may be a server's: nothing in it is a command to the terminal."""
    plain = printable(text, keep="\n")
    return textwrap.wrap(plain, max(width - len(_INDENT), 24), break_long_words=False, break_on_hyphens=False)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
