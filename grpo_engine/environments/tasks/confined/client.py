"""Has text scored in a confined process: one text at a time, each within a time limit.

The worker is forked again, which takes milliseconds, after a text that it did not score in time, that ended it, or that
called something while it was evaluated as Python: what that changed in the process is gone before the next text.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import re
import select
import socket
import subprocess
import threading
import time
from contextlib import suppress
from typing import Any, NoReturn

from grpo_engine.environments.tasks.confined.process import (
    EVALUATED,
    FORK,
    LENGTH,
    MAX_ANSWER_BYTES,
    MAX_SETTING_BYTES,
    PREPARE,
    RAISED,
    SCORE,
    SCORED,
)
from grpo_engine.errors import ConfigError, PeerError
from grpo_engine.python_command import module_command
from grpo_engine.wire.environment_variables import (
    ATTEMPT_VARIABLE,
    RUN_FOLDER_VARIABLE,
    RUN_VARIABLE,
    SERVICE_VARIABLE,
)

log = logging.getLogger(__name__)

TIMEOUT_S = 7.0
"""Time limit of a text."""
_STARTUP_TIMEOUT_S = 60.0
"""Time limit for importing the libraries, and for preparing a scorer."""
_LOWEST, _HIGHEST = -1.0, 1.0
"""Scores; text that runs code could give itself one beside which those of all others vanish, or overflow."""
_CHANGES_SOMETHING = re.compile(r"[^\s(+\-*/,\[=<>%]\s*\(|[#\\]|:=|for|lambda")
"""Python that calls or assigns something; a parenthesis after an operator, a comma or another one only groups."""
_PASSED_ON = re.compile(
    "PATH|HOME|LANG|LC_ALL|LC_CTYPE|TZ|LD_LIBRARY_PATH|VIRTUAL_ENV"
    "|PYTHON(PATH|HOME|HASHSEED|SAFEPATH|DONTWRITEBYTECODE|UTF8)"
    f"|{RUN_VARIABLE}|{RUN_FOLDER_VARIABLE}|{SERVICE_VARIABLE}|{ATTEMPT_VARIABLE}"
)
"""Environment variables of the process: no secret, and the marker by which a run finds its processes."""


class NotScored(Exception):
    """A text has no score: its scorer did not return in time, or raised an exception, or the process crashed."""


class ConfinedScorers:
    """The scorers of a module, `load_scorer(setting)`, in a process of their own."""

    def __init__(self, module: str, *, must_confine: bool = True) -> None:
        """Nothing is started yet.

        Args:
            must_confine: fail where the kernel cannot confine; else that is logged.
        """
        self._module = module
        self._must_confine = must_confine
        self._lock = threading.Lock()
        self._template: subprocess.Popen[bytes] | None = None
        self._control: socket.socket
        self._worker: socket.socket | None = None
        self._prepared: set[str] = set()
        self._num_not_scored = 0

    def prepare(self, setting: str) -> None:
        """Start the process, and have it load a scorer, where it has not.

        Raises:
            ConfigError: the kernel cannot confine it.
            PeerError: it does not start.
        """
        with self._lock:
            self._prepare(setting)

    def score(self, setting: str, text: str, *arguments: Any) -> float:
        """What the scorer returns for `(text, *arguments)`.

        Raises:
            NotScored: it returns nothing in time; logged at the 1st, 10th, 100th … time.
            ConfigError, PeerError: as `prepare`.
        """
        with self._lock:
            self._prepare(setting)
            if self._worker is None or _is_readable(self._worker):  # it ended, or wrote without a request
                self._fork()
            try:
                is_changed, score = self._ask(pickle.dumps((setting, (text, *arguments))))
            except TimeoutError:
                self._not_scored(f"was not scored within {TIMEOUT_S:g} s")
            except (OSError, EOFError):  # e.g. out of memory
                self._not_scored("ended the process that scores")
            if is_changed and _CHANGES_SOMETHING.search(text):
                self._fork()
            if score is None:
                self._not_scored("is no text that the scorer expects", is_fork_needed=False)
            return score

    def end(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _prepare(self, setting: str) -> None:
        if self._template is not None and self._template.poll() is not None:
            self._end()
        if self._template is None:
            self._start()
        if setting not in self._prepared:
            if len(setting.encode()) > MAX_SETTING_BYTES:
                raise ConfigError(f"task: its settings are longer than {MAX_SETTING_BYTES} bytes: shorten task.options")
            self._control.send(PREPARE + setting.encode())
            self._await_template()
            self._prepared.add(setting)
            self._fork()

    def _start(self) -> None:
        # Not by multiprocessing, which starts interpreters that look for modules in the working directory first. Not
        # forked: the environment has threads, whose locks a fork would copy, and secrets.
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_STARTUP_TIMEOUT_S)
        how = "confined" if self._must_confine else "if-possible"
        passed_on = {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}
        with theirs:
            self._template = subprocess.Popen(
                module_command(_PROCESS, self._module, str(theirs.fileno()), how),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**passed_on, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},  # a fork has one thread
            )
        problem = self._await_template()
        if not problem:
            return
        if self._must_confine:
            self._end()
            raise ConfigError(
                f"task: this kernel cannot confine the process that scores ({problem}), and some scorers evaluate "
                "completions as Python: run elsewhere, or allow it with task.allow_unconfined = true"
            )
        log.warning("scoring in a process that this kernel cannot confine: %s", problem)

    def _await_template(self) -> str:
        """What it answers.

        Raises:
            PeerError: nothing in time, or it has ended.
        """
        assert self._template is not None
        what = "has ended"
        try:
            if answer := self._control.recv(MAX_SETTING_BYTES):
                return answer.decode().strip("\0")
        except TimeoutError:
            what = f"took longer than {_STARTUP_TIMEOUT_S:g} s"
        except OSError:
            pass
        self._end()
        raise PeerError(f"scoring process: it {what} while it loaded {self._module}: see the log above")

    def _fork(self) -> None:
        """Have another worker, in place of the one that there is."""
        if self._worker is not None:
            self._worker.close()
        self._worker, theirs = socket.socketpair()
        with theirs, suppress(OSError):  # the template has ended: so has the worker, to whoever asks it
            socket.send_fds(self._control, [FORK], [theirs.fileno()])

    def _ask(self, question: bytes) -> tuple[bool, float | None]:
        """Whether Python compiled something while it scored, and the score; None where the scorer raised, or
        returned a number that is no score.

        Raises:
            TimeoutError: no answer in time.
            EOFError, OSError: the worker has ended, or wrote something else.
        """
        assert self._worker is not None
        until = time.monotonic() + TIMEOUT_S
        self._worker.settimeout(TIMEOUT_S)
        self._worker.sendall(LENGTH.pack(len(question)) + question)
        answer = b""
        while True:
            self._worker.settimeout(max(until - time.monotonic(), 0.001))
            part = self._worker.recv(MAX_ANSWER_BYTES)
            answer += part
            was_evaluated, said = answer.startswith(EVALUATED), answer.removeprefix(EVALUATED)
            if said == RAISED:
                return was_evaluated, None
            if said.startswith(SCORED) and len(said) == len(SCORED) + SCORE.size:
                (score,) = SCORE.unpack(said[len(SCORED) :])
                return was_evaluated, score if _LOWEST <= score <= _HIGHEST else None
            if not part or len(answer) >= MAX_ANSWER_BYTES or time.monotonic() > until:
                raise EOFError

    def _not_scored(self, what: str, *, is_fork_needed: bool = True) -> NoReturn:
        if is_fork_needed:
            self._fork()
        self._num_not_scored += 1
        if math.log10(self._num_not_scored).is_integer():
            log.warning("a completion %s and counts as wrong (occurrence %d)", what, self._num_not_scored)
        raise NotScored(what)

    def _end(self) -> None:
        if self._template is None:
            return
        self._template.kill()  # its worker dies with it
        self._template.wait()
        self._control.close()
        if self._worker is not None:
            self._worker.close()
        self._template = self._worker = None
        self._prepared.clear()


_PROCESS = "grpo_engine.environments.tasks.confined.process"


def _is_readable(worker: socket.socket) -> bool:
    waiting = select.poll()
    waiting.register(worker, select.POLLIN)
    return bool(waiting.poll(0))
