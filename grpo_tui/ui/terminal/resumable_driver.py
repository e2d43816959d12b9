"""Textual's driver for a terminal, which also survives a SIGSTOP that it does not send itself, and has a title.

What the terminal sends may be in another encoding than UTF-8.
"""

from __future__ import annotations

import codecs
import os
import signal
import sys
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakSet

from textual.drivers import linux_driver
from textual.drivers.linux_driver import LinuxDriver
from textual.events import InputEvent
from textual.message import Message

from grpo_tui.ui.terminal.paste_parser import MAX_SIZE, PasteParser

SAVES_TITLE, RESTORES_TITLE = "\x1b[22;0t", "\x1b[23;0t"
"""XTWINOPS: push and pop the titles of icon and window."""
MAX_WAITING = 1024
"""Keys and events of the mouse that were read and are not handled yet. Text that a terminal without bracketed paste has
pasted is as many keys, each of which takes 2 kB and some milliseconds."""


class ResumableDriver(LinuxDriver):
    """Textual (8.2.8) sets the terminal up again at every SIGCONT.

    After its own SIGTSTP that is right. After a SIGSTOP from elsewhere it starts a second thread that reads keys, and
    the first is never ended: the process outlives the screen. So what runs is taken down first, as for SIGTSTP.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Draw on stdout where stderr, which Textual draws on, is a file: `grpo-tui 2> errors` shows a screen too."""
        super().__init__(*args, **options)
        if sys.__stderr__ is None or not sys.__stderr__.isatty():
            self._file = sys.__stdout__
        self._waiting: WeakSet[InputEvent] = WeakSet()
        """In whatever queue of Textual they are; an event ends when it is handled."""

    def _get_terminal_size(self) -> tuple[int, int]:
        """The part of the terminal that is used, which may say that it has 65,535 columns and rows."""
        width, height = super()._get_terminal_size()
        return min(width, MAX_SIZE.width), min(height, MAX_SIZE.height)

    def process_message(self, message: Message) -> None:
        """Send on what was read, in its thread; a key or event of the mouse is dropped while too many wait."""
        if isinstance(message, InputEvent):
            if len(self._waiting) >= MAX_WAITING:
                return
            self._waiting.add(message)
        super().process_message(message)

    def start_application_mode(self) -> None:
        """Save the title of the terminal too."""
        super().start_application_mode()  # type: ignore[no-untyped-call]
        if self._writer_thread is not None:  # else it stays in the background
            self.write(SAVES_TITLE)

    def stop_application_mode(self) -> None:
        """Restore the title too."""
        if self._writer_thread is not None:
            self.write(RESTORES_TITLE)
        super().stop_application_mode()

    def show_title(self, text: str) -> None:
        """Set the title of the terminal; `text` has no control characters."""
        if self._writer_thread is not None:
            self.write(f"\x1b]0;{text}\x07")

    def run_input_thread(self) -> None:
        """Read keys; a byte that is no UTF-8 is one that means nothing, and nothing in a paste is a key.

        Textual (8.2.8) ends the program at the first: at an ü of a terminal in Latin-1, or at a paste of such text.
        """
        linux_driver.getincrementaldecoder = _lenient_decoder  # type: ignore[attr-defined, assignment]
        linux_driver.XTermParser = PasteParser  # type: ignore[attr-defined]
        super().run_input_thread()

    def _sigcont_application(self, number: int = signal.SIGCONT, frame: FrameType | None = None) -> None:
        if self._must_signal_resume:
            super()._sigcont_application()
        elif self._auto_restart:  # from the event loop: a handler may interrupt a write, and would wait for its lock
            self._loop.call_soon_threadsafe(self._set_up_again)

    def _set_up_again(self) -> None:
        while os.isatty(self.fileno) and os.tcgetpgrp(self.fileno) != os.getpgrp():
            os.kill(os.getpid(), signal.SIGSTOP)  # continued in the background, where it must not write
        self.suspend_application_mode()
        self._must_signal_resume = True
        self.resume_application_mode()


def _lenient_decoder(encoding: str) -> partial[codecs.IncrementalDecoder]:
    return partial(codecs.getincrementaldecoder(encoding), errors="replace")
