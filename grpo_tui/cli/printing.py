"""What the commands print: the one exit to the terminal, which removes what a terminal would obey."""

from __future__ import annotations

import sys


def write_line(text: object, *, to_stderr: bool = False, flush: bool = False) -> None:
    """Print text to stdout, which is data, or to stderr, which is messages; without control characters."""
    from grpo_engine.wire.terminal_text import printable  # here: a command starts the supervisor before it imports

    print(printable(str(text), keep="\n\t"), file=sys.stderr if to_stderr else sys.stdout, flush=flush)
