"""Ends the screen when its terminal is gone, whatever Textual does.

Textual (8.2.8) writes from a thread, `textual.drivers._writer_thread.WriterThread`. A write to a terminal that is gone
raises there and ends the thread; its queue holds 30 texts, so that `write` and `stop` then block the main thread for
ever, in `put`, with SIGHUP and SIGTERM handled by an event loop that no longer runs. Such screens stayed for hours.
"""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
import termios
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

LEAVE_WITHIN_S = 1.5
"""From the hang-up or signal to the end of the process."""
LEAVING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
RESTORE = b"\x1b[?1049l\x1b[?25h\x1b[?1000l\x1b[?1003l\x1b[?1006l\x1b[?1004l\x1b[?2004l\x1b[<u\x1b[0m\x1b[23;0t"
"""What is written at the end: main screen, cursor, no mouse, focus or paste reports, plain keys and colours, title."""
CANCEL = b"\x18"
"""Ends the control sequence of which the rest was dropped."""
RESTORE_WITHIN_S = 0.3
EXIT_CODE = 128 + signal.SIGHUP


class TerminalWatch:
    """A thread that waits for the end of the terminal; a context around everything that uses the terminal."""

    def __init__(self, leave: Callable[[], object]) -> None:
        """Watch nothing yet.

        Args:
            leave: asks the app to exit; called in the main thread by a signal, else in the thread of the watch.
        """
        self._leave = leave
        self._terminal = _terminal()
        self._settings = _settings_of(self._terminal)
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._is_over = False
        self._is_leaving = False
        self._is_restoring = False
        self._thread = threading.Thread(target=self._watch, name="terminal-watch", daemon=True)
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> TerminalWatch:
        for number in LEAVING_SIGNALS:  # not the event loop's: these run also while the main thread waits for a lock
            self._handlers[number] = signal.signal(number, self._on_signal)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the watch; once the terminal is gone it goes on until the process has ended."""
        if self._is_restoring:  # which frees Textual's thread, and so this one
            self._thread.join()
        if self._is_leaving:
            return
        self._is_over = True
        os.write(self._wake_write, b".")
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # typeshed: what `signal` returns

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        os.write(self._wake_write, b".")
        self._leave()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        if self._terminal >= 0:
            poll.register(self._terminal, 0)  # only hang-up and errors, which are always reported
        poll.poll()
        if self._is_over:
            return
        self._is_leaving = True
        self._leave()
        threading.Event().wait(LEAVE_WITHIN_S)
        self._is_restoring = True
        self._restore_terminal()
        os._exit(EXIT_CODE)

    def _restore_terminal(self) -> None:
        """Restore the terminal where it still exists; never blocks for longer than `RESTORE_WITHIN_S`."""
        if self._settings is None:
            return
        with suppress(OSError, termios.error):
            termios.tcsetattr(self._terminal, termios.TCSANOW, self._settings)
            was_blocking = os.get_blocking(self._terminal)  # of the shell's descriptors too
            os.set_blocking(self._terminal, False)
            try:
                self._write_restore()
            finally:
                os.set_blocking(self._terminal, was_blocking)

    def _write_restore(self) -> None:
        """Write `RESTORE`; where the terminal's buffer is full, drop the unread frames in it first."""
        until, text = time.monotonic() + RESTORE_WITHIN_S, RESTORE
        while time.monotonic() < until:
            with suppress(BlockingIOError):  # no room, or Textual's thread still waits for some
                if os.write(self._terminal, text) == len(text):
                    return
            termios.tcflush(self._terminal, termios.TCOFLUSH)
            for action in (termios.TCOOFF, termios.TCOON):  # wakes Textual's thread, which has the lock of the terminal
                termios.tcflow(self._terminal, action)
            text = CANCEL + RESTORE
            time.sleep(0.001)


def _terminal() -> int:
    """The descriptor of stdin where it is a terminal, also one that is gone, for which `isatty` is false; else -1."""
    if sys.__stdin__ is None:
        return -1
    descriptor = sys.__stdin__.fileno()
    return descriptor if stat.S_ISCHR(os.fstat(descriptor).st_mode) else -1


def _settings_of(terminal: int) -> list[Any] | None:
    try:
        return termios.tcgetattr(terminal) if terminal >= 0 else None
    except termios.error:  # it is gone, or no terminal but /dev/null
        return None
