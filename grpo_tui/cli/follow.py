"""`grpo-tui logs`: the log of a service from its file, without its supervisor; and reading any file as it grows."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, BinaryIO, TextIO

import typer

from grpo_engine.errors import NO_PATTERN, GrpoError
from grpo_engine.wire.run_folder import logged_services, service_log
from grpo_tui.cli.arguments import RunAndService, note_unsupervised, run_to_read, split
from grpo_tui.cli.printing import one_line, write_line
from grpo_tui.client.api import look_at
from grpo_tui.run_files.log_file import ATTEMPT_START, HEADER_START, Part, Place, place, read_part
from grpo_tui.run_files.opening import open_file
from grpo_tui.view.format import bytes_text
from grpo_tui.view.logs.tail import RESET, ended, on_terminal, without_colours

POLL_S = 0.1
BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 20
"""A longer line is passed on in pieces: a log may contain one that never ends."""
ERASE_LINE = "\r\x1b[K"

FollowOption = Annotated[bool, typer.Option("-f", "--follow", help="Continue as it grows, until the run is over.")]


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("logs")(logs_command)


def logs_command(
    words: RunAndService,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Lines from the end; with --grep, of those.")] = 50,
    follow: FollowOption = False,
    grep: Annotated[str | None, typer.Option("--grep", metavar="RE", help="Only lines that match.")] = None,
) -> None:
    """Show the end of a service's log over all its attempts. Works for ended runs too."""
    prefix, service = split(words)
    run = run_to_read(prefix)
    note_unsupervised(run)
    path = service_log(run.folder, service)
    if not path.exists():
        names = ", ".join(logged_services(run.folder))
        if not _is_service(run.folder, service):
            refusal = f"{service!r} is not a service of {run.id}; logs: {names or 'none yet'}"
            raise typer.BadParameter(one_line(refusal))  # names of a folder that may be from elsewhere
    pattern = _pattern(grep)

    def keep(line: bytes) -> bool:
        return pattern is None or pattern.search(line.rstrip(b"\r\n").rpartition(b"\r")[2]) is not None

    printer = _Printer(sys.stdout, is_terminal=sys.stdout.isatty(), whole_lines=pattern is not None)
    last = tail(path, lines, keep, with_unfinished=not follow)
    for line in last.lines:
        printer.put(line)
    sys.stdout.flush()
    if follow:

        def wait(unfinished: bytes) -> None:
            printer.put_unfinished(unfinished if keep(unfinished) else b"")
            time.sleep(POLL_S)

        for line in grown(path, last, lambda: look_at(run.folder).is_live, wait=wait, report_gap=_report_gap):
            if keep(line):
                printer.put(line)
                sys.stdout.flush()
    printer.end()


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a file. Lines keep their newline; a piece of a line that is too long has none."""

    lines: list[bytes]
    end: int = 0
    """Absolute offset behind what was read."""
    unfinished: bytes = b""
    """The text behind the last newline: the beginning of an unfinished line."""


def tail(path: Path, count: int, keep: Callable[[bytes], bool], *, with_unfinished: bool) -> Tail:
    """The last lines of a file that `keep` accepts; read backwards, block by block.

    Args:
        with_unfinished: include a last line without a newline; else `grown` yields it once it is complete.
    """
    try:
        with _opened(path) as file:
            end = place(file.fileno()).end
            pieces = _backwards(file.fileno(), end)
            first = next(pieces, b"")
            unfinished = b"" if first.endswith(b"\n") or len(first) > MAX_LINE_BYTES else first
            if unfinished and not with_unfinished:
                first = b""
            kept = islice(
                (piece for piece in chain((first,), pieces) if piece and keep(piece)), min(count, sys.maxsize)
            )
            return Tail(list(kept)[::-1], end, unfinished)
    except FileNotFoundError:
        return Tail([])


def _backwards(descriptor: int, position: int) -> Iterator[bytes]:
    """The lines before an absolute offset, the last one first; parts that are dropped meanwhile are skipped."""
    rest = b""
    while position > 0:
        start = max(0, position - BLOCK_BYTES)
        part = read_part(descriptor, start, position - start)
        if part.offset >= position:
            break
        rest, *later = _lines(part.data[: position - part.offset] + rest)
        yield from reversed(later)
        if len(rest) > MAX_LINE_BYTES:
            yield rest
            rest = b""
        position = 0 if part.is_start else part.offset
    if rest:
        yield rest


def grown(
    path: Path,
    last: Tail,
    is_live: Callable[[], bool],
    *,
    wait: Callable[[bytes], None] = lambda unfinished: time.sleep(POLL_S),
    report_gap: Callable[[int], None] = lambda num_bytes: None,
) -> Iterator[bytes]:
    """Lines that are added after a tail, until the run is over; a file that was emptied is read from its start.

    Args:
        wait: called when there is nothing new, with the unfinished line.
        report_gap: called with the number of bytes that were dropped before they could be read.
    """
    offset, rest = last.end, last.unfinished
    while True:
        is_last_read = not is_live()
        part = _read_from(path, offset)
        if not part.follows(offset):
            if rest:
                yield rest + b"\n"
            if part.offset > offset:
                report_gap(part.offset - offset)
            rest = b""
        offset = part.end
        *whole, rest = _lines(rest + part.data)
        yield from whole
        if len(rest) > MAX_LINE_BYTES:
            rest = rest.rstrip(b"\r").rpartition(b"\r")[2]  # a progress bar overwrites itself
        if len(rest) > MAX_LINE_BYTES:
            yield rest
            rest = b""
        if not part.data and is_last_read:
            if rest:
                yield rest
            return
        if not part.data:
            wait(rest)


def _lines(block: bytes) -> list[bytes]:
    """Lines with their newlines; the last one has none, and may be empty."""
    *whole, rest = block.split(b"\n")
    return [*(line + b"\n" for line in whole), rest]


def _read_from(path: Path, offset: int) -> Part:
    """The part of the file from an absolute offset on."""
    try:
        with _opened(path) as file:
            return read_part(file.fileno(), offset, BLOCK_BYTES)
    except FileNotFoundError:
        return Part(b"", 0, Place(0, 0, 0))


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file; what cannot be read of it is one message too, as of a disk that fails."""
    try:
        with open_file(path) as file:
            yield file
    except FileNotFoundError:
        raise
    except OSError as error:
        raise GrpoError(f"{path}: cannot be read: {error.strerror}") from None


class _Printer:
    """Prints lines; on a terminal our own lines are dim, and a progress bar is redrawn."""

    def __init__(self, out: TextIO, *, is_terminal: bool, whole_lines: bool) -> None:
        """Print nothing yet.

        Args:
            whole_lines: end every piece of a long line with a newline, since its other pieces may be filtered out.
        """
        self._out = out
        self._is_terminal = is_terminal
        self._whole_lines = whole_lines
        self._unfinished = ""
        self._is_at_start_of_line = True

    def put(self, line: bytes) -> None:
        """Print a line, or a piece of a line that is too long."""
        text = ended(on_terminal(line.removesuffix(b"\n")))
        self._is_at_start_of_line = self._whole_lines or line.endswith(b"\n")
        if self._unfinished:
            self._out.write(ERASE_LINE)
            self._unfinished = ""
        if self._is_terminal and line.startswith((ATTEMPT_START, HEADER_START)):
            text = f"\x1b[2m{text}{RESET}"
        self._out.write(f"{text}\n" if self._is_at_start_of_line else text)

    def put_unfinished(self, line: bytes) -> None:
        """On a terminal, print an unfinished line over the one printed before."""
        text = without_colours(on_terminal(line[-MAX_LINE_BYTES:]))[: shutil.get_terminal_size().columns - 1]
        if self._is_terminal and text != self._unfinished:
            self._out.write(ERASE_LINE + text)
            self._out.flush()
            self._unfinished = text

    def end(self) -> None:
        """Print the missing newline of the last line."""
        if not self._is_at_start_of_line:
            self._out.write("\n")


def _report_gap(num_bytes: int) -> None:
    write_line(f"{bytes_text(num_bytes)} were dropped from the log before they could be read", to_stderr=True)


def _pattern(grep: str | None) -> re.Pattern[bytes] | None:
    try:
        return None if grep is None else re.compile(os.fsencode(grep))
    except NO_PATTERN as error:
        raise typer.BadParameter(f"--grep {grep!r} is not a valid regular expression: {error}") from None


def _is_service(folder: Path, service: str) -> bool:
    from grpo_tui.profile.plan_file import Plan

    return any(launch.name == service for launch in Plan.of(folder).launches)
