"""Compares mathematical expressions by math-verify, in a separate process that is killed on a time-out.

math-verify limits its time by alarms, which work only in a main thread, and some expressions
(`\\sum_{n=1}^{10^9} n^{0.5}`) never finish. In the environment's process they would block every other group.
"""

from __future__ import annotations

import importlib.util
import os
import select
import signal
import subprocess
import sys
import threading
from functools import cache
from multiprocessing.connection import Connection, Pipe

from grpo_engine.errors import ConfigError, PeerError
from grpo_engine.python_command import module_command

_LIMIT_S = 2
"""Time limit for parsing each expression, and for comparing them."""
_TIMEOUT_S = 3 * _LIMIT_S + 1
"""Time after which the process is killed, because its alarm had no effect."""
_STARTUP_TIMEOUT_S = 60.0
"""Time limit for importing its libraries."""


def is_same_expression(expected: str, given: str) -> bool:
    """Whether two LaTeX expressions are equal; False on a time-out.

    Raises:
        ConfigError: math-verify is not installed.
        PeerError: the process does not start.
    """
    return _verifier().is_same(expected, given)


class _Verifier:
    """The process, with one comparison at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection

    def is_same(self, expected: str, given: str) -> bool:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start(expected, given)
            try:
                self._connection.send((expected, given))
                if self._connection.poll(_TIMEOUT_S):
                    return bool(self._connection.recv())
            except (OSError, EOFError):  # it crashed, e.g. out of memory
                pass
            self._end()
            return False

    def _start(self, expected: str, given: str) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                f"comparing {expected!r} with {given!r} needs math-verify: install the `data` extra, "
                "or use task.reward = 'exact'"
            )
        # Not by multiprocessing, which starts interpreters that look for modules in the working directory first. Not
        # forked: the environment has threads, whose locks a fork would copy.
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                module_command("grpo_engine.environments.tasks.expressions", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        try:
            if self._connection.poll(_STARTUP_TIMEOUT_S) and self._connection.recv():
                return
        except (OSError, EOFError):
            pass
        code = self._process.poll()
        self._end()
        raise PeerError(
            f"math-verify, in a process of its own, was not loaded within {_STARTUP_TIMEOUT_S:g} s (exit code {code}): "
            "see the log above, or use task.reward = 'exact'"
        )

    def _end(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._connection.close()
        self._process = None


@cache
def _verifier() -> _Verifier:
    return _Verifier()


def _answer(questions: Connection) -> None:
    """Main function of the process: compare until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the environment handles it
    threading.Thread(target=_exit_when_closed, args=(questions.fileno(),), daemon=True).start()
    import logging

    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs "Timeout during comparison" for wrong answers
    questions.send(True)
    while True:
        try:
            expected, given = questions.recv()
        except EOFError:
            return
        gold = parse(f"${expected}$", parsing_timeout=_LIMIT_S)
        answer = parse(f"${given}$", parsing_timeout=_LIMIT_S)
        questions.send(bool(verify(gold, answer, timeout_seconds=_LIMIT_S)))


def _exit_when_closed(descriptor: int) -> None:
    """Exit when the environment has, also during a comparison that never finishes."""
    closed = select.poll()
    closed.register(descriptor, 0)  # POLLHUP is reported unasked
    closed.poll()
    os._exit(0)


if __name__ == "__main__":
    _answer(Connection(int(sys.argv[1])))
