"""A terminal at the far end of a slow line: every byte takes its time each way, and only so many go a second.

The line takes in all that is written, as ssh does with its window of megabytes: what a screen writes too much piles up
in it, and is seen as lateness.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from terminal import Terminal

ONE_WAY_S = 0.1
SLOW_LINE = 64_000
"""Bytes a second: a poor mobile line."""
READ_BYTES = 1 << 12


class FarTerminal(Terminal):
    """A program on a terminal; keys reach it late, and so does what it writes."""

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
        self._keys = deque[tuple[float, bytes]]()
        self._coming = deque[tuple[float, bytes]]()
        self._free_at = 0.0
        self._news = threading.Condition()
        self._heard, self._said = os.pipe()
        self._line = threading.Thread(target=self._carry, daemon=True)
        self._line.start()

    def take(self, limit_s: float) -> bytes:
        """What has come out of the line within the limit, as soon as there is something."""
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
        """Type at the far end."""
        self._keys.append((time.monotonic() + ONE_WAY_S, keys.encode()))
        os.write(self._said, b".")

    def close(self) -> None:
        """Take the line down, and the program behind it."""
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
