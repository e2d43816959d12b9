"""Find lines in blocks of a log: those that hold a text or a regular expression, and those of a level. Pure.

Lines are judged as they are shown: without their colours, of a progress bar its latest state only, and a JSON object as
`structured.readable` writes it; levels are told by the line itself. Plain text is looked for by `bytes.find`, at
gigabytes a second, regular expressions by `re`. All of it is case-blind unless what was typed has a capital letter.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from grpo_engine.errors import NO_PATTERN
from grpo_tui.view.logs.structured import readable

_COLOUR = re.compile(rb"\x1b\[[0-9;:]*m")
_SPECIAL = frozenset(r".^$*+?{}[]\|()")

Span = tuple[int, int]
"""Of a line in a block: where it begins, and where it ends, before its newline."""


class InvalidPattern(ValueError):
    """What was typed is no regular expression; the message says why, and where."""


class Level(StrEnum):
    """Which lines are shown."""

    ALL = "all levels"
    WARNINGS = "warnings and errors"
    ERRORS = "errors"


class LineTest(Protocol):
    """Says which lines are wanted."""

    def spans(self, block: bytes) -> Iterator[Span]:
        """Those of a block without colours, from its first to its last."""
        ...

    def accepts(self, line: bytes) -> bool:
        """Whether a single line is one of them."""
        ...


@dataclass(frozen=True, slots=True)
class Text:
    """Lines that hold some text."""

    text: bytes
    is_case_blind: bool

    def spans(self, block: bytes) -> Iterator[Span]:
        """Each line once, however often the text is in it."""
        searched = block.lower() if self.is_case_blind else block
        place = searched.find(self.text)
        while place >= 0:
            start, end = _line_around(block, place)
            if b"\r" not in block[start:end] or self.accepts(block[start:end]):
                yield start, end
            place = searched.find(self.text, end + 1)

    def accepts(self, line: bytes) -> bool:
        """Whether its visible part holds the text."""
        shown = _visible(line)
        return self.text in (shown.lower() if self.is_case_blind else shown)


@dataclass(frozen=True, slots=True)
class Regex:
    """Lines in which a regular expression is found."""

    regex: re.Pattern[bytes]
    sure_text: bytes = b""
    """Part of all that it finds: a block without it is passed over at the speed of plain text."""

    def spans(self, block: bytes) -> Iterator[Span]:
        """Each line once; what is found across the end of a line does not count."""
        is_case_blind = self.regex.flags & re.IGNORECASE
        if self.sure_text and self.sure_text not in (block.lower() if is_case_blind else block):
            return
        place = 0
        while place < len(block) and (found := self.regex.search(block, place)):
            start, end = _line_around(block, found.start())
            if (found.end() <= end and b"\r" not in block[start:end]) or self.accepts(block[start:end]):
                yield start, end
            place = end + 1

    def accepts(self, line: bytes) -> bool:
        """Whether the expression is found in its visible part."""
        return self.regex.search(_visible(line)) is not None


@dataclass(frozen=True, slots=True)
class AsShown:
    """Lines that pass a test in the form in which they are shown, which is another one for a JSON object."""

    test: Text | Regex
    words: tuple[bytes, ...]
    """In lower case; an object without one of them passes in no form, and is not read."""

    def spans(self, block: bytes) -> Iterator[Span]:
        """Those of a block; as fast as the test itself where no line is an object."""
        if not block.startswith(b"{") and b"\n{" not in block:
            yield from self.test.spans(block)
            return
        for start, end in _every_line(block):
            if self.accepts(block[start:end]):
                yield start, end

    def accepts(self, line: bytes) -> bool:
        """Whether the line passes as it is shown."""
        if line.startswith(b"{"):
            plain = line.lower()
            if not all(word in plain for word in self.words):
                return False
            line = readable(line.decode(errors="replace").rstrip("\r")).encode()
        return self.test.accepts(line)


@dataclass(frozen=True, slots=True)
class OfLevel:
    """Lines that tell an error (or a warning too), and the indented ones below them, such as a traceback's."""

    regex: re.Pattern[bytes]
    needles: tuple[bytes, ...]
    """One of them is in every such line: most blocks have none, and are passed over quickly."""
    takes_indented: bool = True

    def spans(self, block: bytes) -> Iterator[Span]:
        """Those lines from the first to the last."""
        if not any(needle in block for needle in self.needles):
            return
        after = 0
        for start, end in Regex(self.regex).spans(block):
            if start < after:
                continue
            yield start, end
            after = end + 1
            while self.takes_indented and block[after : after + 1] in (b" ", b"\t"):
                start, end = _line_around(block, after)
                yield start, end
                after = end + 1

    def accepts(self, line: bytes) -> bool:
        """Whether the line itself tells so."""
        return self.regex.search(_visible(line)) is not None


_ERROR = (
    rb"(?<![A-Za-z_])(?:ERROR|CRITICAL|FATAL)(?![A-Za-z_])"
    rb"|^Traceback \(most recent call last\)|^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)(?::|\s*$)"
    rb'|"level": ?"(?:error|critical|fatal)"'
)
_WARNING = rb'|(?<![A-Za-z_])WARN(?:ING)?(?![A-Za-z_])|[A-Za-z]Warning: |"level": ?"warn(?:ing)?"'
_ERROR_NEEDLES = (
    b"ERROR", b"CRITICAL", b"FATAL", b"Traceback", b"Error", b"Exception", b"Interrupt", b"Exit",
    b'"error"', b'"critical"', b'"fatal"',
)  # fmt: skip
ERRORS = OfLevel(re.compile(_ERROR, re.MULTILINE), _ERROR_NEEDLES)
ERRORS_ALONE = replace(ERRORS, takes_indented=False)
"""For who goes from one error to the next."""
WARNINGS = OfLevel(re.compile(_ERROR + _WARNING, re.MULTILINE), (*_ERROR_NEEDLES, b"WARN", b"Warning", b'"warn'))


def line_tests(level: Level, *patterns: str) -> tuple[LineTest, ...]:
    """All that a line has to pass, the one that is to look for candidates first.

    Raises:
        InvalidPattern: with a message for the person who typed it.
    """
    asked = [line_test(pattern) for pattern in patterns if pattern]
    of_level: list[LineTest] = [] if level is Level.ALL else [ERRORS if level is Level.ERRORS else WARNINGS]
    return (*of_level, *sorted(asked, key=lambda asked_for: isinstance(asked_for.test, Regex)))


def line_test(pattern: str) -> AsShown:
    """For a text or a regular expression; raises `InvalidPattern`."""
    is_case_blind = pattern == pattern.lower()
    if not _SPECIAL.intersection(pattern):
        if not is_case_blind or pattern.isascii():
            return AsShown(Text(pattern.encode(), is_case_blind), _words(pattern))
        pattern = re.escape(pattern)
    try:
        regex = re.compile(pattern.encode(), re.MULTILINE | (re.IGNORECASE if is_case_blind else 0))
        sure_text = _sure_text(pattern)
        return AsShown(Regex(regex, sure_text.encode()), _words(sure_text))
    except NO_PATTERN as error:
        pos = getattr(error, "pos", None)
        place = "" if pos is None or pos >= len(pattern) else f" at {pattern[pos]!r}"
        raise InvalidPattern(f"not yet a regular expression: {getattr(error, 'msg', error)}{place}") from None


def _words(text: str) -> tuple[bytes, ...]:
    """The parts of a text that a JSON object has too, whatever stands between them there."""
    return tuple(word.encode() for word in re.findall(r"[a-z0-9]+", text.lower()))


def _sure_text(pattern: str) -> str:
    """The longest text that is in everything that an expression finds; nothing where that is not easily seen."""
    if re.search(r"[|(\[{]|\\[0-9xuUN]", pattern):
        return ""
    return max(re.split(r"\\.|.[?*]|[.^$+?*]", pattern), key=len)


def marker(pattern: str) -> re.Pattern[str] | None:
    """What to mark in a line that was found by `pattern`; None where it is broken or empty."""
    if not pattern:
        return None
    try:
        return re.compile(pattern, re.IGNORECASE if pattern == pattern.lower() else 0)
    except NO_PATTERN:
        return None


def accepted(block: bytes, tests: tuple[LineTest, ...]) -> Iterator[Span]:
    """The lines of a block that pass all tests, from the first to the last, as they stand in the block."""
    if not tests:
        return _every_line(block)
    if b"\x1b" not in block:
        return _passing(block, tests)
    plain = _COLOUR.sub(b"", block)
    return _in_colours(block, plain, _passing(plain, tests))


def _passing(plain: bytes, tests: tuple[LineTest, ...]) -> Iterator[Span]:
    first, *others = tests
    if not others:
        return first.spans(plain)
    return (span for span in first.spans(plain) if all(test.accepts(plain[span[0] : span[1]]) for test in others))


def _in_colours(block: bytes, plain: bytes, spans: Iterator[Span]) -> Iterator[Span]:
    """The same lines where they stand in the block with its colours: lines are as many in both."""
    plain_starts: list[int] | None = None
    starts: list[int] = []
    for start, _ in spans:
        if plain_starts is None:
            plain_starts, starts = _starts(plain), _starts(block)
        begin = starts[bisect_right(plain_starts, start) - 1]
        yield begin, _line_around(block, begin)[1]


def _starts(block: bytes) -> list[int]:
    return [0, *(found.end() for found in re.finditer(b"\n", block))]


def _every_line(block: bytes) -> Iterator[Span]:
    start = 0
    while start < len(block):
        end = block.find(b"\n", start)
        end = len(block) if end < 0 else end
        yield start, end
        start = end + 1


def _line_around(block: bytes, place: int) -> Span:
    end = block.find(b"\n", place)
    return block.rfind(b"\n", 0, place) + 1, len(block) if end < 0 else end


def _visible(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2] if b"\r" in line else line
