"""Ends the screen when its terminal is gone, whatever Textual does.

Textual (8.2.8) writes from a thread, `textual.drivers._writer_thread.WriterThread`. A write to a terminal that is gone
raises there and ends the thread; its queue holds 30 texts, so that `write` and `stop` then block the main thread for
ever, in `put`, with SIGHUP and SIGTERM handled by an event loop that no longer runs. Such screens stayed for hours.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

LEAVE_WITHIN_S = 1.5
"""From the hang-up or signal to the end of the process."""
LEAVING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
RESTORE = b"\x1b[?1049l\x1b[?25h\x1b[?1000l\x1b[?1003l\x1b[?1006l\x1b[?1004l\x1b[?2004l\x1b[<u\x1b[0m\x1b[23;0t"
"""What is written at the end: main screen, cursor, no mouse, focus or paste reports, plain keys and colours, title."""
EXIT_CODE = 128 + signal.SIGHUP


class TerminalWatch:
    """A thread that waits for the end of the terminal; a context around everything that uses the terminal."""

    def __init__(self, leave: Callable[[], object]) -> None:
        """Watch nothing yet.

        Args:
            leave: asks the app to exit; called in the main thread by a signal, else in the thread of the watch.
        """
        self._leave = leave
        self._terminal = sys.__stdin__.fileno() if sys.__stdin__ is not None and sys.__stdin__.isatty() else -1
        self._settings = termios.tcgetattr(self._terminal) if self._terminal >= 0 else None
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._is_over = False
        self._is_leaving = False
        self._thread = threading.Thread(target=self._watch, name="terminal-watch", daemon=True)
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> TerminalWatch:
        for number in LEAVING_SIGNALS:  # not the event loop's: these run also while the main thread waits for a lock
            self._handlers[number] = signal.signal(number, self._on_signal)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the watch; once the terminal is gone it goes on until the process has ended."""
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
        self._restore_terminal()
        os._exit(EXIT_CODE)

    def _restore_terminal(self) -> None:
        """Restore the terminal where it still exists; never blocks."""
        if self._settings is None:
            return
        with suppress(OSError, termios.error):
            os.set_blocking(self._terminal, False)
            os.write(self._terminal, RESTORE)
            termios.tcsetattr(self._terminal, termios.TCSANOW, self._settings)
