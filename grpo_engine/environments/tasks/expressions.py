"""Compares mathematical expressions by math-verify, in a separate process that is killed on a time-out.

math-verify limits its time by alarms, which work only in a main thread, and some expressions
(`\\sum_{n=1}^{10^9} n^{0.5}`) never finish. In the environment's process they would block every other group.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import signal
import threading
from functools import cache
from multiprocessing.connection import Connection

from grpo_engine.errors import ConfigError

_LIMIT_S = 2
"""Time limit for parsing each expression, and for comparing them."""
_TIMEOUT_S = 3 * _LIMIT_S + 1
"""Time after which the process is killed, because its alarm had no effect."""
_STARTUP_TIMEOUT_S = 60.0
"""The same for the first comparison, during which it imports its libraries."""


def is_same_expression(expected: str, given: str) -> bool:
    """Whether two LaTeX expressions are equal; False on a time-out.

    Raises:
        ConfigError: math-verify is not installed.
    """
    return _verifier().is_same(expected, given)


class _Verifier:
    """The process, with one comparison at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection
        self._timeout_s = 0.0

    def is_same(self, expected: str, given: str) -> bool:
        with self._lock:
            if self._process is None or not self._process.is_alive():
                self._start(expected, given)
            try:
                self._connection.send((expected, given))
                if self._connection.poll(self._timeout_s):
                    self._timeout_s = _TIMEOUT_S
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
        # Not forked: the environment has threads, whose locks a fork would copy.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_answer, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._timeout_s = _STARTUP_TIMEOUT_S

    def _end(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.join()
        self._connection.close()
        self._process = None


@cache
def _verifier() -> _Verifier:
    return _Verifier()


def _answer(questions: Connection) -> None:
    """Main function of the process: compare until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the environment handles it
    import logging

    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs "Timeout during comparison" for wrong answers
    while True:
        try:
            expected, given = questions.recv()
        except EOFError:
            return
        gold = parse(f"${expected}$", parsing_timeout=_LIMIT_S)
        answer = parse(f"${given}$", parsing_timeout=_LIMIT_S)
        questions.send(bool(verify(gold, answer, timeout_seconds=_LIMIT_S)))
