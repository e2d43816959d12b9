"""The environment's process: its output is ours, signals are passed on to it, and nobody of its group outlives it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

_PR_SET_PDEATHSIG = 1
_GRACE_S = 5.0
"""That those have whom the environment started and left behind."""
_POLL_S = 0.02


@contextmanager
def child(argv: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a process group of its own, SIGTERM and SIGINT passed on; at the end its group is empty."""
    libc, parent = ctypes.CDLL(None), os.getpid()

    def end_with_the_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died before that
            os._exit(1)

    process = subprocess.Popen(argv, env=environment, process_group=0, preexec_fn=end_with_the_parent)

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
        _end_group(process.pid)


def exit_code(returncode: int) -> int:
    """The code of an end as a shell tells it: 128 and the number where a signal did it."""
    return returncode if returncode >= 0 else 128 - returncode


def _end_group(group: int) -> None:
    """End who is left of a process group, politely first."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        while _has_living(group) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        os.killpg(group, signal.SIGKILL)


def _has_living(group: int) -> bool:
    """Whether a process group has a member that is no zombie: those wait for whoever inherited them."""
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
    return False
