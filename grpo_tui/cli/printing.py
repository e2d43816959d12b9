"""What the commands print: the one exit to the terminal, which removes what a terminal would obey."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_engine.wire.supervisor import Warning

MAX_CELL = 1000
"""Characters: each row is as wide as the widest cell of each column."""


def open_stdout() -> None:
    """Make stdout take every text: a shell may have closed it, and a locale may lack letters of ours."""
    if getattr(sys, "stdout", None) is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the whole process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as that of stderr


def drop_stdout() -> None:
    """Discard what stdout could not take, which would fail again as the process exits."""
    with suppress(io.UnsupportedOperation), open(os.devnull, "w") as nothing:  # it is no file
        os.dup2(nothing.fileno(), sys.stdout.fileno())


def write_line(text: object, *, to_stderr: bool = False, flush: bool = False) -> None:
    """Print text to stdout, which is data, or to stderr, which is messages; without control characters."""
    from grpo_engine.wire.terminal_text import printable  # here: a command starts the supervisor before it imports

    if to_stderr:
        with suppress(OSError, ValueError):  # the last flush reports it
            sys.stdout.flush()  # in a file or pipe that both go to, a note follows the table that it is about
    print(printable(str(text), keep="\n\t"), file=sys.stderr if to_stderr else sys.stdout, flush=flush)


def one_line(text: object) -> str:
    """Text from elsewhere for a part of a line: without line feeds, which would begin lines that look like ours."""
    from grpo_engine.wire.terminal_text import printable

    return printable(str(text))


def indented(text: str) -> str:
    """Text from elsewhere that may have several lines: those after its first do not begin as ours do."""
    return text.replace("\n", "\n  ")


def warning_text(warning: Warning) -> str:
    """A warning with what to do about it, on the line after it."""
    hint = f"\n  → {indented(warning.hint)}" if warning.hint else ""
    return f"{warning.severity}: {indented(warning.text)}{hint}"


def write_bytes(content: bytes) -> None:
    """Write data that is not text to stdout, which is no terminal."""
    sys.stdout.flush()
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


def write_file(path: Path, content: bytes) -> None:
    """Write a file that a user named: it is replaced atomically, but a pipe or a device (`/dev/stdout`) is written to.

    Raises:
        OSError: it cannot be written.
    """
    from grpo_engine.wire.codec import write_atomically

    if _is_stream(path):
        with path.open("ab") as stream:  # the file behind /dev/stdout may have been opened by `>>`
            stream.write(content)
    else:
        write_atomically(path, content)


def _is_stream(path: Path) -> bool:
    """Whether it is a pipe, a device or a descriptor, and not one that another user has put there.

    In /tmp that could be a pipe that nobody reads, or a link to a pipe or file of this user.
    """
    is_trusted = os.path.lexists(path) and path.lstat().st_uid in (0, os.geteuid())
    return is_trusted and path.exists() and (not path.is_file() or str(path.parent) in ("/dev", "/dev/fd"))


def table(lines: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, without the import time of a library."""
    rows = [[_cell(text) for text in line] for line in lines]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _cell(text: str) -> str:
    return one_line(text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 1]}…")
