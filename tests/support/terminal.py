"""A program in a pseudo-terminal: the characters that its screen shows, and keys.

pyte emulates the terminal. It has no alternate screen: whether that was left is read from the output.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyte

DEADLINE_S = 60.0
ENTERS_ALTERNATE, LEAVES_ALTERNATE = b"\x1b[?1049h", b"\x1b[?1049l"
HIDES_CURSOR, SHOWS_CURSOR = b"\x1b[?25l", b"\x1b[?25h"
UP, DOWN, CTRL_L = "\x1b[A", "\x1b[B", "\x0c"


class Terminal:
    """One program, and its controlling terminal."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str],
        columns: int = 120,
        rows: int = 36,
    ) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._ours, self._theirs = pty.openpty()  # theirs stays open: its settings are read at the end
        self._set_size(columns, rows)
        self.settings_before = self.settings
        self._is_open = True
        self.written = bytearray()
        """All output of the program."""
        self.last_heard_at = self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            list(argv),
            cwd=cwd,
            env={**environment, "TERM": "xterm-256color", "COLORTERM": "truecolor", "LC_ALL": "C.UTF-8"},
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )

    @property
    def rows(self) -> list[str]:
        """The lines of the screen."""
        return self._screen.display

    @property
    def text(self) -> str:
        """The same in one piece."""
        return "\n".join(self._screen.display)

    @property
    def settings(self) -> list[Any]:
        """The settings of the terminal, such as echo."""
        return termios.tcgetattr(self._theirs)

    def take(self, limit_s: float) -> bytes:
        """Read what the program writes within the limit, as soon as there is something; it is not on the screen yet."""
        if not select.select([self._ours], [], [], max(0.0, limit_s))[0]:
            return b""
        data = os.read(self._ours, 1 << 16)
        self.last_heard_at = time.monotonic()
        self.written += data
        return data

    def put(self, data: bytes) -> None:
        """Write to the screen."""
        self._stream.feed(data)

    def listen(self, limit_s: float) -> bytes:
        """Show what the program writes within the limit; returns as soon as there is something."""
        data = self.take(limit_s)
        self.put(data)
        return data

    def until(self, is_so: Callable[[], bool]) -> None:
        """Show what is written until a condition holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < deadline, f"the condition did not become true; the screen shows:\n{self.text}"
            self.listen(0.05)

    def shows(self, *words: str) -> None:
        """Wait until the screen shows all of these."""
        self.until(lambda: all(word in self.text for word in words))

    def press(self, keys: str, encoding: str = "utf-8") -> None:
        """Type."""
        os.write(self._ours, keys.encode(encoding))

    def resize(self, columns: int, rows: int) -> None:
        """Change the size of the terminal, which sends SIGWINCH."""
        self._screen.resize(rows, columns)
        self._set_size(columns, rows)

    def ends(self) -> int:
        """Wait until the program has ended and its output is shown; its exit code."""
        self.until(lambda: self.process.poll() is not None)
        while self.listen(0.0):
            pass
        assert self.process.returncode is not None
        return self.process.returncode

    def drop(self) -> None:
        """Close the terminal under the program, as a dropped connection does."""
        os.close(self._theirs)
        os.close(self._ours)
        self._is_open = False

    def close(self) -> None:
        """Close the terminal, and kill the program if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self._is_open:
            self.drop()

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
