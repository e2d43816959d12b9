"""Start a supervisor process before its run is known, so that it imports its modules while the command imports its own.

Hence this module imports nothing slow at the top; what `supervise` needs is imported while the supervisor starts.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from grpo_engine.errors import GrpoError
from grpo_engine.python_command import module_command
from grpo_tui.paths import HOST_LOCK_FILE, host_folder

if TYPE_CHECKING:
    from pathlib import Path

    from grpo_tui.client.interrupts import HeldInterrupts

HELLO_WITHIN_S = 20.0
"""A supervisor answers within 0.3 s; on a machine that is starting eight engines it may take longer."""
HELLO_POLL_S = 0.01
OUTPUT_BYTES_MAX = 1 << 20
"""Read at most of what it prints before it has loaded: warnings, or the traceback of a broken program."""


class StartFailed(GrpoError):
    """The supervisor of a run did not start."""


def open_host_lock() -> int:
    """The lock of all starts on this host, not yet taken."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(host_folder() / HOST_LOCK_FILE, flags, 0o600)


class NewDaemon:
    """A supervisor process that waits for its run folder; without one it is killed at the end of this context."""

    def __init__(self, interrupts: HeldInterrupts | None = None) -> None:
        """Start it.

        Args:
            interrupts: are held from the moment in which it is given its run; the caller does what they ask.
        """
        self._interrupts = interrupts
        self._is_given = False
        self.host_lock = open_host_lock()
        """The lock of all starts on this host, which the process inherits; `alone_on_host` takes it."""
        # In memory, since the disk may be full: what it says is why no run can start. Closed by this object.
        self._output = open(os.memfd_create("supervisor-output"), "w+b")  # noqa: SIM115
        self._process = subprocess.Popen(
            module_command("grpo_tui.supervisor.daemon", "-", str(self.host_lock)),
            pass_fds=[self.host_lock],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )

    def __enter__(self) -> NewDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # once it has its run it has detached from this process
        self._process.communicate()
        self._output.close()
        self._close_host_lock()

    def release_host_lock(self) -> None:
        """Let others start runs. A process that was given its run, and has not yet locked it, keeps the lock."""
        if self._is_given:
            self._close_host_lock()
        else:
            fcntl.flock(self.host_lock, fcntl.LOCK_UN)

    def _close_host_lock(self) -> None:
        if self.host_lock >= 0:
            os.close(self.host_lock)
            self.host_lock = -1

    def wait_until_loaded(self) -> None:
        """Return once it waits for its run folder.

        Raises:
            StartFailed: it exits instead, e.g. since the program is broken; with the end of its output.
        """
        from grpo_tui.supervisor.lock import LOADED

        deadline = time.monotonic() + HELLO_WITHIN_S
        while LOADED.encode() not in os.pread(self._output.fileno(), OUTPUT_BYTES_MAX, 0):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise StartFailed(f"a new supervisor cannot be started: {self._output_tail()}")
            time.sleep(HELLO_POLL_S)

    def supervise(self, folder: Path) -> bool:
        """Send it its run folder and wait until it answers; False when the run was over before.

        Raises:
            StartFailed: it did not start; with the end of its log.
        """
        from grpo_tui.client.local import is_over
        from grpo_tui.client.socket import answers
        from grpo_tui.supervisor.registered import register

        if self._interrupts is not None:
            self._interrupts.hold()
        register(folder)
        self._is_given = True
        with suppress(BrokenPipeError):
            self._process.communicate(os.fsencode(folder) + b"\n")
        deadline = time.monotonic() + HELLO_WITHIN_S
        while self._process.returncode == 0 and time.monotonic() < deadline:
            if answers(folder):
                return True
            if is_over(folder):
                return False
            time.sleep(HELLO_POLL_S)
        raise StartFailed(f"the supervisor of {folder.name} did not start: {self._log_tail(folder)}")

    def _log_tail(self, folder: Path) -> str:
        from grpo_engine.wire.run_folder import SUPERVISOR_LOG

        log = folder / SUPERVISOR_LOG
        logged = log.read_text(errors="replace").splitlines() if log.exists() else []
        return "\n".join([f"{log} ends with:", *logged[-8:], self._output_tail()])

    def _output_tail(self) -> str:
        from grpo_tui.supervisor.lock import LOADED

        self._output.seek(0)
        words = self._output.read().decode(errors="replace").removeprefix(LOADED)
        return "\n".join(words.splitlines()[-8:])
