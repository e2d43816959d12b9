"""A terminal over a slow connection: a delay each way and a limited number of bytes per second.

The line takes in all that is written, as ssh does with its window of megabytes: what a screen writes too much piles up
in it, and is seen as lateness.
"""

from __future__ import annotations

import os
import select
import tarfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from _screen_runs import RECORDED
from terminal import DOWN, UP, Terminal

ONE_WAY_S = 0.1
SLOW_LINE = 64_000
"""Bytes per second: a poor mobile connection."""
READ_BYTES = 1 << 12
QUIET_S = 0.6
"""A frame is complete when no byte follows for so long; a run that has ended shows no ticking clock."""
REPEAT_S, HELD_S = 0.05, 5.0
"""A held key repeats twenty times per second."""
LEFT, PAGE_UP = "\x1b[D", "\x1b[5~"
FAR_KEYS = (
    ("run", "1", ("f", "f", "z", "z")),
    ("gpus", "2", ("h", "h", "h", "h")),
    ("alignment", "3", ("w", "w", DOWN, UP)),
    ("rollouts", "4", ("n", "n", "p", "c")),
    ("metrics", "5", (DOWN, DOWN, UP, "s")),
    ("logs", "6", (UP, PAGE_UP, "l", "w")),
)
"""Screens, the key that opens each, and keys that are pressed there."""
AWAY = {"1": "2", **dict.fromkeys("23456", "1")}
HELD_KEYS = (
    ("back in time on run", "1", LEFT),
    ("back in time on alignment", "3", LEFT),
    ("back in time on metrics", "5", LEFT),
    ("log scrolled", "6", UP),
    ("next group of rollouts", "4", "n"),
)
"""The timeline is open, since the run has ended."""


class FarTerminal(Terminal):
    """A program on a terminal whose input and output are delayed."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str],
        columns: int,
        rows: int,
        bytes_a_second: int | None = None,
    ) -> None:
        """Start the program.

        Args:
            bytes_a_second: what the line carries towards the person; None for as much as comes.
        """
        super().__init__(argv, cwd=cwd, environment=environment, columns=columns, rows=rows)
        self._rate = bytes_a_second
        self._is_carrying = True
        self._screen.write_process_input = self.press  # as every terminal, it answers cursor position requests
        self._keys = deque[tuple[float, bytes]]()
        self._coming = deque[tuple[float, bytes]]()
        self._free_at = 0.0
        self._news = threading.Condition()
        self._heard, self._said = os.pipe()
        self._line = threading.Thread(target=self._carry, daemon=True)
        self._line.start()

    def take(self, limit_s: float) -> bytes:
        """Bytes that arrived within the limit, as soon as there are any."""
        deadline = time.monotonic() + limit_s
        with self._news:
            while True:
                now = time.monotonic()
                if self._coming and self._coming[0][0] <= now:
                    self.last_heard_at, data = self._coming.popleft()
                    self.written += data
                    return data
                if now >= deadline:
                    return b""
                next_at = min(deadline, self._coming[0][0]) if self._coming else deadline
                self._news.wait(next_at - now)

    def press(self, keys: str) -> None:
        """Send keys."""
        self._keys.append((time.monotonic() + ONE_WAY_S, keys.encode()))
        os.write(self._said, b".")

    def close(self) -> None:
        """Close the connection and end the program."""
        if self._is_carrying:
            self._is_carrying = False
            os.write(self._said, b".")
            self._line.join()
            os.close(self._heard)
            os.close(self._said)
        super().close()

    def _carry(self) -> None:
        while self._is_carrying:
            due_s = max(0.0, self._keys[0][0] - time.monotonic()) if self._keys else None
            readable, _, _ = select.select([self._ours, self._heard], [], [], due_s)
            if self._heard in readable:
                os.read(self._heard, READ_BYTES)
            if self._ours in readable:
                self._send(os.read(self._ours, READ_BYTES))
            while self._keys and self._keys[0][0] <= time.monotonic():
                os.write(self._ours, self._keys.popleft()[1])

    def _send(self, data: bytes) -> None:
        self._free_at = max(self._free_at, time.monotonic()) + (len(data) / self._rate if self._rate else 0.0)
        with self._news:
            self._coming.append((self._free_at + ONE_WAY_S, data))
            self._news.notify()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Measured response to keys."""

    late_s: float
    """From the last key to the last byte received, minus the delay of the connection."""
    num_bytes: int


def recorded_run(root: Path) -> Path:
    """A folder with an ended run in its `logs`."""
    with tarfile.open(RECORDED) as tar:
        tar.extractall(root / "logs", filter="data")
    return root


def settled(terminal: Terminal) -> float:
    """Read until nothing more arrives; the time of the last byte."""
    while data := terminal.take(QUIET_S):
        terminal.put(data)
    return terminal.last_heard_at


def pressed(terminal: Terminal, key: str) -> Cost:
    """Press a key and wait for its complete frame."""
    before, pressed_at = len(terminal.written), time.monotonic()
    terminal.press(key)
    return _cost(terminal, pressed_at, before)


def held(terminal: Terminal, key: str) -> Cost:
    """Hold a key down for a while."""
    before, began = len(terminal.written), time.monotonic()
    for number in range(1, round(HELD_S / REPEAT_S) + 1):
        pressed_at = time.monotonic()
        terminal.press(key)
        while (left := began + number * REPEAT_S - time.monotonic()) > 0:
            terminal.put(terminal.take(left))
    return _cost(terminal, pressed_at, before)


def _cost(terminal: Terminal, pressed_at: float, before: int) -> Cost:
    late_s = settled(terminal) - pressed_at - 2 * ONE_WAY_S
    return Cost(late_s=max(0.0, late_s), num_bytes=len(terminal.written) - before)
