"""A log in a pager: what a terminal would obey, reorder or hide is replaced, as on the screen, and colours stay."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

from grpo_tui.run_files.opening import open_file
from grpo_tui.view.logs.tail import ended, on_terminal

BLOCK_BYTES = 1 << 20


def pager_command(pager: str, line: int) -> list[str]:
    """The command that shows its standard input, at a line where the pager can.

    Args:
        pager: `$PAGER`; empty is less.
        line: counted from 1.
    """
    command = shlex.split(pager) or ["less"]
    if Path(command[0]).name == "less":
        command += ["-R", f"+{line}g"]
    return command


def line_at(path: Path, offset: int) -> int:
    """The number, from 1, of the line of a file in which a byte is.

    Raises:
        OSError: as `open_file`.
    """
    count = 0
    with open_file(path) as file:
        while offset > 0 and (block := file.read(min(BLOCK_BYTES, offset))):
            count += block.count(b"\n")
            offset -= len(block)
    return 1 + count


def show(command: list[str], path: Path) -> None:
    """Run a pager over a log until it is closed.

    Raises:
        OSError: it cannot be started, or as `open_file`.
    """
    with open_file(path) as file, subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        try:
            with process.stdin as out:
                for line in _cleaned(file):
                    out.write(line)
        except BrokenPipeError:
            pass  # it was closed before the end of the log


def _cleaned(lines: Iterator[bytes]) -> Iterator[bytes]:
    for line in lines:
        text = ended(on_terminal(line.rstrip(b"\n")))
        yield f"{text}\n".encode()
