"""A rank as a process of its launcher: a fork of it, which has imported everything already, or a program."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from grpo_engine.processes import ProcessIdentity, die_with_parent

_HANDLED_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class RankProcess(Protocol):
    """As `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def start_program(argv: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int]) -> RankProcess:
    """Start a program with the environment, and with these descriptors of this process."""
    return subprocess.Popen(
        argv,
        env=environment,
        pass_fds=pass_fds,
        process_group=0,  # a signal to the launcher's group would reach rank 0 twice
        preexec_fn=partial(die_with_parent, os.getpid()),
    )


class ForkedRank:
    """A fork of this process that runs a function and exits with the code that it returns."""

    def __init__(self, run: Callable[[], int], environment: Mapping[str, str], closed: Collection[int] = ()) -> None:
        """
        Args:
            environment: of the fork, in place of this process's.
            closed: descriptors that the fork does not keep.
        """
        gc.freeze()  # the fork shares what was imported, until its collector would write to it
        self._process = multiprocessing.get_context("fork").Process(
            target=_run, args=(run, os.getpid(), dict(environment), closed)
        )
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)  # until the fork has handlers of its own
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._identity = ProcessIdentity.of(self.pid)
        with suppress(ProcessLookupError):  # it has exited
            os.setpgid(self.pid, self.pid)  # in both processes, so that neither goes on before

    @property
    def pid(self) -> int:
        """Of the fork."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has exited.

        Raises:
            subprocess.TimeoutExpired: it has not within that many seconds.
        """
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired([self._process.name], timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has exited; for any thread."""
        if self._identity is not None:
            self._identity.send_signal(sig)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _run(run: Callable[[], int], parent: int, environment: Mapping[str, str], closed: Collection[int]) -> None:
    """In the fork: take the place of a program that was started with the environment."""
    os.setpgid(0, 0)
    die_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for descriptor in closed:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(run())
