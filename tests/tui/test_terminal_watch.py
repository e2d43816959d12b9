"""What is left of a terminal whose screen ends, and of a screen whose terminal ended before it was drawn."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import termios

from grpo_tui.ui.terminal.terminal_watch import EXIT_CODE, RESTORE

WATCHED = """
import os, signal, sys, threading, tty
from grpo_tui.ui.terminal import terminal_watch
terminal_watch.LEAVE_WITHIN_S, terminal_watch.RESTORE_WITHIN_S = 0.0, 30.0
fill = "fill" in sys.argv
with terminal_watch.TerminalWatch(lambda: None):
    if fill:
        tty.setraw(0)
        os.set_blocking(1, False)
        try:
            while os.write(1, b"\\x1b[31m" * 1000):
                pass
        except BlockingIOError:
            os.set_blocking(1, True)
        threading.Thread(target=lambda: os.write(1, b"x" * 1000000), daemon=True).start()
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(50)
"""


def watched(terminal: int, *words: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-c", WATCHED, *words]
    return subprocess.Popen(argv, stdin=terminal, stdout=terminal, stderr=subprocess.DEVNULL, start_new_session=True)


def test_a_terminal_that_nobody_reads_gets_its_settings_back() -> None:
    """As over a connection that stalls: the shell had no echo, and descriptors that do not block."""
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    assert watched(theirs, "fill").wait(60) == EXIT_CODE
    assert termios.tcgetattr(theirs) == before
    assert os.get_blocking(theirs)
    os.set_blocking(ours, False)
    written = b""
    while not written.endswith(RESTORE):
        written += os.read(ours, 1 << 16)
    os.close(theirs)
    os.close(ours)


def test_a_screen_whose_terminal_was_gone_before_it_was_drawn_exits() -> None:
    """Started by `nohup`, which ignores SIGHUP, the screen never exited and used half a core."""
    ours, theirs = pty.openpty()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        os.close(ours)
        assert watched(theirs).wait(60) == EXIT_CODE
    finally:
        signal.signal(signal.SIGHUP, before)
        os.close(theirs)
