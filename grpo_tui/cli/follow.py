"""`grpo-tui logs | metrics`: what a service wrote and what was measured, from files of the run; no daemon is asked."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from grpo_tui.cli.arguments import JsonOption, RunAndService, RunArgument, run_to_read, split
from grpo_tui.client.api import look_at
from grpo_tui.paths import METRICS_FILE

POLL_S = 0.1
BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 20
"""A longer line is handed on in pieces: a log may hold one that never ends."""

FollowOption = Annotated[bool, typer.Option("-f", "--follow", help="Go on as it grows, until the run is over.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("metrics")(metrics_command)
    app.command("logs")(logs_command)


def logs_command(
    words: RunAndService,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Lines from the end; with --grep, of those.")] = 50,
    follow: FollowOption = False,
    grep: Annotated[str | None, typer.Option("--grep", metavar="RE", help="Only lines that match.")] = None,
) -> None:
    """Show the end of a service's log over all its attempts. Files do the work: the run may have ended."""
    prefix, service = split(words)
    run = run_to_read(prefix)
    path = run.folder / f"{service}.log"
    if not path.exists():
        names = ", ".join(sorted(each.stem for each in run.folder.glob("*.log")))
        if not _is_service(run.folder, service):
            raise typer.BadParameter(f"{service!r} is no service of {run.id}; logs there are: {names or 'none yet'}")
    pattern = _pattern(grep)

    def keep(line: bytes) -> bool:
        return pattern is None or pattern.search(line) is not None

    offset, last = tail(path, lines, keep)
    for line in last:
        _put(line)
    sys.stdout.flush()
    if follow:
        for line in grown(path, offset, lambda: look_at(run.folder).is_live):
            if keep(line):
                _put(line)
                sys.stdout.flush()


def metrics_command(run: RunArgument = None, follow: FollowOption = False, as_json: JsonOption = False) -> None:
    """Show the measurements of every step; --json prints the lines of metrics.jsonl as they stand."""
    found = run_to_read(run)
    path = found.folder / METRICS_FILE
    offset, lines = tail(path, sys.maxsize, lambda line: True)
    for line in lines:
        _put_metrics(line, as_json)
    sys.stdout.flush()
    if follow:
        for line in grown(path, offset, lambda: look_at(found.folder).is_live):
            _put_metrics(line, as_json)
            sys.stdout.flush()
    elif not lines:
        print(f"{found.id} has measured nothing yet", file=sys.stderr)


def tail(path: Path, count: int, keep: Callable[[bytes], bool]) -> tuple[int, list[bytes]]:
    """The last lines of a file that are to be kept, and where it ended; read backwards, block by block."""
    try:
        with path.open("rb") as file:
            end = position = file.seek(0, os.SEEK_END)
            kept: list[bytes] = []
            rest = b""
            while position > 0 and len(kept) < count:
                start = max(0, position - BLOCK_BYTES)
                file.seek(start)
                parts = (file.read(position - start) + rest).split(b"\n")
                rest, position = (parts.pop(0) if start else b""), start
                if end and not rest and start == 0 and parts and parts[-1] == b"":
                    parts.pop()
                kept = [line for line in parts if line and keep(line)] + kept
            return end, kept[-count:] if count else []
    except FileNotFoundError:
        return 0, []


def grown(path: Path, offset: int, goes_on: Callable[[], bool]) -> Iterator[bytes]:
    """Lines that are added from `offset` on, until nothing goes on; a file that was cut is read from its start."""
    rest = b""
    while True:
        is_last_look = not goes_on()
        block = _read_from(path, offset)
        if block is None:
            offset, rest = 0, b""
            continue
        offset += len(block)
        *whole, rest = (rest + block).split(b"\n")
        yield from whole
        if len(rest) > MAX_LINE_BYTES:
            yield rest
            rest = b""
        if not block and is_last_look:
            if rest:
                yield rest
            return
        if not block:
            time.sleep(POLL_S)


def _read_from(path: Path, offset: int) -> bytes | None:
    """What follows `offset`; None when the file has become shorter than that."""
    try:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < offset:
                return None
            file.seek(offset)
            return file.read(BLOCK_BYTES)
    except FileNotFoundError:
        return b"" if offset == 0 else None


def _put(line: bytes) -> None:
    """Print a line for a terminal: invalid UTF-8 replaced, a progress bar as it stood last."""
    text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
    sys.stdout.write(f"{text}\n")


def _put_metrics(line: bytes, as_json: bool) -> None:
    if as_json:
        _put(line)
        return
    try:
        record = json.loads(line)
        values = "  ".join(f"{name} {value:.5g}" for name, value in record["metrics"].items())
        text = f"step {record['step']}  {values}"
    except (ValueError, KeyError, TypeError):
        print(f"not a line of metrics: {line[:120]!r}", file=sys.stderr)
        return
    print(text)


def _pattern(grep: str | None) -> re.Pattern[bytes] | None:
    try:
        return None if grep is None else re.compile(grep.encode())
    except re.error as error:
        raise typer.BadParameter(f"--grep {grep!r} is no regular expression: {error}") from None


def _is_service(folder: Path, service: str) -> bool:
    from grpo_tui.paths import PLAN_FILE
    from grpo_tui.profile.plan_file import Plan

    return any(launch.name == service for launch in Plan.from_json((folder / PLAN_FILE).read_text()).launches)
