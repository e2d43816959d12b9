"""A thread that ends, or gets an error, at one of its operations on the disk: SIGKILL and full disks in process."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_CHANGES = frozenset({"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"})


class Killed(BaseException):
    """Stands for SIGKILL in the code that it ends."""


class DiskFaults:
    """Counts the operations of a thread that change the disk, and fails at one of them."""

    def __init__(self) -> None:
        self.count = 0
        self._first: int | None = None
        self._error: BaseException = Killed()
        self._thread = 0
        sys.addaudithook(self._audit)  # stays as long as the process, without effect outside of `failing`

    @contextmanager
    def failing(self, at: int | None, error: BaseException | None = None) -> Iterator[None]:
        """Raise `error` at one operation, the first being 1; None: only count them.

        Args:
            error: `Killed` by default, which is raised at every later operation too, so that nothing is cleaned up.
        """
        self.count, self._first, self._error, self._thread = 0, at, error or Killed(), threading.get_ident()
        try:
            yield
        finally:
            self._thread, self._error = 0, Killed()  # its traceback would keep everything of the ended code alive

    def add_operation(self) -> None:
        """Count an operation of this thread, and fail if it is the one."""
        if threading.get_ident() != self._thread:
            return
        self.count += 1
        is_later = isinstance(self._error, Killed) and self._first is not None and self.count > self._first
        if self.count == self._first or is_later:
            raise self._error

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        is_written = event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if is_written or event in _CHANGES:
            self.add_operation()
