"""Stands for a service that runs on another machine: the process that its keeper on this machine starts.

    python -I -S remote_process.py FILE -- PROGRAM ARGUMENTS…        (as `supervisor/placement/remote.py` runs it)

It asks the broker of the run, whose socket FILE names, to start the service; writes what the service prints to its own
stdout, passes signals on, and exits as the service did, also where that has parts on several machines. So logs, probes,
restarts, crash reports and adoption work as for a process of this machine. If it is killed, the broker ends the
service. If the broker is restarted, it connects again and goes on where it was. The environment is sent to the broker
in memory, never written to a disk.

Standard library only: one of these runs beside every service that is placed on a machine.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress

RECONNECT_WITHIN_S = 60.0
"""For a broker that is being restarted."""
RECONNECT_POLL_S = 0.2
ENDED_WITHIN_S = 3.0
"""More than the grace period of the service, within which the other machine has ended it."""
EXIT_LOST = 75
"""The machine is lost, or the broker cannot be reached: `EX_TEMPFAIL`."""
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class Remote:
    """One attempt of a service on another machine."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._wakeup = -1
        self._pending: list[int] = []
        """Signals that no broker has taken yet."""
        self._num_copied: dict[str, int] = {}
        """Bytes of the log of each part, from where the attempt begins."""
        self._received = b""

    def run(self) -> int:
        """Start the service and copy its log until it has exited; returns its exit code."""
        self._wakeup, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in PASSED_ON:
            signal.signal(number, lambda *_: None)  # the number arrives through the wake-up pipe
        lost_at: float | None = None
        while True:
            connection = self._connect()
            if connection is not None:
                code = self._follow(connection)
                connection.close()
                if code is not None:
                    return code
                lost_at = None
            lost_at = lost_at or time.monotonic()
            if time.monotonic() - lost_at > RECONNECT_WITHIN_S:
                write(f"grpo-tui: the broker of the cluster does not answer at {self._path}\n".encode())
                return EXIT_LOST
            self._take_signals(RECONNECT_POLL_S)

    def _connect(self) -> socket.socket | None:
        """A connection on which the attempt is requested, or taken up again; None without a broker."""
        connection = socket.socket(socket.AF_UNIX)
        request = {
            "service": os.environ["GRPO_TUI_SERVICE"],
            "attempt": int(os.environ["GRPO_TUI_ATTEMPT"]),
            "num_copied": self._num_copied,
            "environment": dict(os.environ),
        }
        try:
            with open(self._path) as file:
                connection.connect(file.read())
            connection.sendall(json.dumps({"follow": request}).encode() + b"\n")
        except OSError:
            connection.close()
            return None
        self._received = b""
        return connection

    def _follow(self, connection: socket.socket) -> int | None:
        """Copy the log until the service has exited; returns its exit code, or None where the connection is lost."""
        with suppress(OSError):
            while True:
                while self._pending:
                    connection.sendall(json.dumps({"signal": self._pending[0]}).encode() + b"\n")
                    self._pending.pop(0)
                self._take_signals(None, connection)
                if not self._is_readable(connection):
                    continue
                part = connection.recv(1 << 16)
                if not part:
                    return None
                *lines, self._received = (self._received + part).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    if "data" in message:
                        self._num_copied[str(message["part"])] = message["num_copied"]
                        write(base64.b64decode(message["data"]))
                    elif "words" in message:
                        write(f"grpo-tui: {message['words']}\n".encode())
                    if "exit" in message:
                        return int(message["exit"])
        return None

    def _take_signals(self, within_s: float | None, connection: socket.socket | None = None) -> None:
        """Wait for a signal, or for the connection; signals that arrived are passed on next."""
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        if connection is not None:
            poll.register(connection, select.POLLIN)
        poll.poll(None if within_s is None else int(1000 * within_s))
        with suppress(BlockingIOError):
            self._pending += [number for number in os.read(self._wakeup, 65536) if number in PASSED_ON]

    @staticmethod
    def _is_readable(connection: socket.socket) -> bool:
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        return bool(poll.poll(0))


def write(data: bytes) -> None:
    """Write all of it to the log; on a full disk the rest is dropped, and the service goes on."""
    with suppress(OSError):
        while data:
            data = data[os.write(1, data) :]


def exit_as(code: int) -> int:
    """End as the service did: by the signal of a negative exit code, without another core dump."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(exit_as(Remote(sys.argv[1]).run()))
