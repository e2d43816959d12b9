"""Services in processes without their import time: forked from a process that has imported everything.

Each is a real process with its own PID, environment, folder and log, and reacts to signals. It is not started by the
command line: `test_train_processes.py` and the system tests do that.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from grpo_engine import cli

_IMPORTED = [
    *("grpo_engine.rollouts.main", "grpo_engine.environments.main", "grpo_engine.train.main"),
    *("grpo_engine.server.main", "grpo_engine.server.torch.engine"),
    *("transformers.models.llama.modeling_llama", "transformers.models.auto.tokenization_auto", "peft"),
]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_IMPORTED)


class Forked:
    """`grpo-engine …` in a process, with the methods of `subprocess.Popen` that tests use."""

    def __init__(
        self, *words: str, log: Path, folder: Path, environment: Mapping[str, str], is_session: bool = False
    ) -> None:
        """Run `grpo-engine` with `words`.

        Args:
            log: its output is appended there.
            is_session: it leads a new session, as under a keeper: no terminal of this process is its own.
        """
        log.touch()
        # Not a daemonic process, because those may have no children, and an environment starts a verifier.
        self._process = _context.Process(target=_run, args=(words, log, folder, dict(environment), is_session))
        self._process.start()
        atexit.register(self.kill)  # before multiprocessing waits for it at exit
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("grpo-engine", timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def start_forked(function: Callable[..., object], *arguments: object) -> ForkServerProcess:
    """Start a function in such a process."""
    process = _context.Process(target=function, args=arguments)
    process.start()
    return process


def run_forked(function: Callable[..., object], *arguments: object) -> int:
    """Run a function in such a process; its exit code, negative for a signal."""
    process = start_forked(function, *arguments)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _run(words: Sequence[str], log: Path, folder: Path, environment: Mapping[str, str], is_session: bool) -> None:
    if is_session:
        os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # computed again from this environment
    import torch

    torch.set_num_threads(1)
    sys.exit(cli.main(words))
