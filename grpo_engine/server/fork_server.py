"""The fork server: a parent that has imported everything and forks the inference server, so a restart costs no imports.

    SIGHUP            ends the inference server with all its descendants, and forks the next one ("restart in place")
    SIGTERM, SIGINT   are passed on; the second one kills the inference server
    When the inference server exits, the fork server exits with the same code or signal: its supervisor starts it cold.
    When it was killed, the fork server tells the supervisor, and waits a few seconds for SIGHUP before it exits

A process can be forked safely while it has one thread and has not initialised CUDA. So the fork server has no event
loop and no model, and sleeps in `poll`. Where an import leaves a thread behind, inference servers are started as
programs instead: every restart then pays for its imports.

An inference server does not outlive its fork server. It leads a process group.
"""

from __future__ import annotations

import logging
import os
import resource
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from grpo_engine.errors import GrpoError
from grpo_engine.flags import to_flags
from grpo_engine.forking import why_unforkable
from grpo_engine.importing import collecting_nothing
from grpo_engine.processes import (
    ProcessIdentity,
    become_subreaper,
    children,
    descendants,
    die_with_parent,
    is_resource_tracker,
    kill_trackers_last,
    running,
    terminate,
)
from grpo_engine.python_command import module_command
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.preloading import preload
from grpo_engine.server.vllm.sockets import socket_folder
from grpo_engine.serving.listening import refuse_connections
from grpo_engine.wire.environment_variables import FORK_SERVER_VARIABLE, LISTENER_VARIABLE, RESTARTS_VARIABLE
from grpo_engine.wire.fork_server import ASKED_WITHIN_S, RESTART_SIGNAL, tell_supervisor
from grpo_engine.wire.log_lines import FORK_SERVER_HAS_IMPORTED, FORK_SERVER_IMPORTS, FORK_SERVER_RESTARTS
from grpo_engine.wire.secrets import without_secrets

_HANDLED_SIGNALS = frozenset({RESTART_SIGNAL, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
_GRACE_S = 3.0
"""For a server that is restarted to answer running requests and to release its shared memory."""

logger = logging.getLogger(__name__)


class ForkServer:
    """Runs one inference server after the other; read `run` first."""

    def __init__(
        self, config: ServerConfig, listener: socket.socket, serve: Callable[[ServerConfig, socket.socket], int]
    ) -> None:
        """Start nothing yet.

        Args:
            listener: has the port, here and in each server, so that it stays taken while there is none.
        """
        self._config = config
        self._listener = listener
        self._serve = serve
        self._had_terminal = _has_terminal()
        self._handlers = {number: signal.getsignal(number) for number in _HANDLED_SIGNALS}
        path = os.environ.get(RESTARTS_VARIABLE)
        self._restarts_file = Path(path) if path else None
        self._num_restarts = 0
        self._server = 0
        """PID of the current inference server."""
        self._exit_code: int | None = None
        """Of the current inference server, negative for a signal; None while it runs."""
        self._is_stopping = False
        """Whether the current inference server was asked to stop when it ended."""
        self._wakeup = -1
        self._signals: deque[int] = deque()
        """Signals that arrived and were not handled yet."""

    def run(self) -> int:
        """Import, serve and restart until the inference server exits; its exit code. Does not return in the forks.

        Raises:
            GrpoError: the settings or the model are wrong; raised in a forked server too, whose exit code is then ours.
        """
        self._handle_signals_while_importing()
        began = time.monotonic()
        logger.info(FORK_SERVER_IMPORTS.text)
        with collecting_nothing():  # nor do the forks, which would copy every page
            preload(self._config)
        logger.info(FORK_SERVER_HAS_IMPORTED.text, time.monotonic() - began)
        self._handle_signals()
        become_subreaper()
        while True:
            with socket_folder(self._config, os.environ):
                obstacle = why_unforkable()
                if obstacle is not None:
                    logger.warning("Fork server: %s; the inference server is started as a program instead", obstacle)
                    self._server = self._start_program()
                elif self._fork():
                    _exit_without_cleanup(self._serve(self._config, self._listener))
                self._exit_code = None
                restarts = self._run_server() or self._is_asked_after_a_kill()
            if not restarts:
                return self._exit_like_server()
            self._finish_restart()

    def _handle_signals_while_importing(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: os._exit(0))  # there is nothing to clean up yet
        signal.signal(signal.SIGHUP, self._on_hangup_while_importing)

    def _on_hangup_while_importing(self, _number: int, _frame: FrameType | None) -> None:
        """Report a restart at once: no inference server runs that would have to end first."""
        if self._lost_terminal():
            os._exit(0)
        self._count_restart()

    def _handle_signals(self) -> None:
        """Write every signal's number to a pipe, also for a signal that another thread receives."""
        self._wakeup, write_end = self._pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in _HANDLED_SIGNALS:
            signal.signal(number, lambda *_: None)

    # --- starting ----------------------------------------------------------------------------------------------------

    def _fork(self) -> bool:
        """Fork; whether this is the inference server."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        # Blocked until the child has left the parent's pipe.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
        pid = os.fork()
        with suppress(ProcessLookupError):  # it has exited already
            os.setpgid(pid, pid)  # in both processes, so that neither continues before it is set
        if pid == 0:
            die_with_parent(parent)
            self._restore_signals()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._server = pid
        return pid == 0

    def _restore_signals(self) -> None:
        signal.set_wakeup_fd(-1)
        for descriptor in self._pipe:
            os.close(descriptor)
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _start_program(self) -> int:
        flags, hidden = without_secrets(to_flags(self._config, ServerConfig))
        listener = self._listener.fileno()
        return os.posix_spawn(
            sys.executable,
            module_command("grpo_engine", "server", *flags, "--no-standby"),
            {**os.environ, **hidden, FORK_SERVER_VARIABLE: str(os.getpid()), LISTENER_VARIABLE: str(listener)},
            file_actions=[(os.POSIX_SPAWN_DUP2, listener, listener)],  # on itself: it stays open in the program
            setpgroup=0,
            setsigmask=[],
            setsigdef=[signal.SIGTERM, signal.SIGINT, signal.SIGHUP],
        )

    # --- running and ending ------------------------------------------------------------------------------------------

    def _run_server(self) -> bool:
        """Wait until the inference server and its descendants are gone; whether it is to be restarted."""
        is_stopping = False
        while self._reap() and self._exit_code is None:
            match self._next_signal():
                case signal.SIGHUP if not self._lost_terminal():
                    if not is_stopping:
                        terminate(self._find_server, grace_s=_GRACE_S, sleep=self._wait)
                        refuse_connections(self._listener)  # a server that was killed did not
                        self._end_descendants()
                        return True
                case signal.SIGHUP if self._handlers[signal.SIGHUP] is signal.SIG_IGN:
                    continue  # nohup
                case signal.SIGTERM | signal.SIGINT | signal.SIGHUP:
                    # To the server alone, which stops its engine: an engine that exits first counts as an error.
                    if self._exit_code is None:
                        os.kill(self._server, signal.SIGKILL if is_stopping else signal.SIGTERM)
                    is_stopping = True
        self._is_stopping = is_stopping
        self._end_descendants()
        return False

    def _is_asked_after_a_kill(self) -> bool:
        """Tell the supervisor of a server that was killed, and wait for it; whether it asks for the next server."""
        if self._restarts_file is None or self._is_stopping or self._exit_code != -signal.SIGKILL:
            return False
        refuse_connections(self._listener)
        logger.error("Fork server: the inference server (pid %d) was killed by SIGKILL", self._server)
        self._report(killed_by=signal.SIGKILL.name)
        deadline = time.monotonic() + ASKED_WITHIN_S
        while (left_s := deadline - time.monotonic()) > 0:
            self._wait(left_s)
            while self._signals:
                match self._signals.popleft():
                    case signal.SIGHUP:
                        return True
                    case signal.SIGTERM | signal.SIGINT:
                        return False
        return False

    def _lost_terminal(self) -> bool:
        """Whether SIGHUP means that the terminal is gone, rather than a restart."""
        return self._had_terminal and not _has_terminal()

    def _end_descendants(self) -> None:
        """End what is left of the inference server and its descendants, and return when no process is left.

        An engine whose server was killed ends its step first: under MPS, one that is killed within a kernel can end
        the trainer too.

        Raises:
            GrpoError: a process survives SIGKILL.
        """
        if self._exit_code is not None:
            terminate(self._find_orphans, grace_s=_GRACE_S, sleep=self._wait)
        if why := kill_trackers_last(self._find_descendants, sleep=self._wait):
            raise GrpoError(f"fork server: {why}")

    def _find_server(self) -> list[ProcessIdentity]:
        return running(self._server) if self._reap() and self._exit_code is None else []

    def _find_orphans(self) -> list[ProcessIdentity]:
        """Children, but for resource trackers, which exit after those that they serve."""
        found = children(os.getpid()) if self._reap() else []
        return [process for process in found if not is_resource_tracker(process)]

    def _find_descendants(self) -> list[ProcessIdentity]:
        return descendants(os.getpid()) if self._reap() else []

    def _reap(self) -> bool:
        """Reap exited children; whether any child is left. Orphans become children: no child, no descendant."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._server and self._exit_code is None:
                self._exit_code = os.waitstatus_to_exitcode(status)

    def _next_signal(self) -> int:
        """Wait for the next signal."""
        while not self._signals:
            self._wait(None)
        return self._signals.popleft()

    def _wait(self, timeout_s: float | None) -> None:
        """Sleep until a signal arrives or the time is up; queue what arrived."""
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        if poll.poll(None if timeout_s is None else 1000 * timeout_s):
            self._signals.extend(os.read(self._wakeup, 65536))

    def _finish_restart(self) -> None:
        """Count the restart, which also answers every SIGHUP that arrived until now."""
        self._wait(0)
        self._signals = deque(number for number in self._signals if number != signal.SIGHUP)
        self._count_restart()

    def _count_restart(self) -> None:
        """Tell the supervisor that only the next inference server answers from here on."""
        logger.info(FORK_SERVER_RESTARTS.text)
        self._num_restarts += 1
        self._report()

    def _report(self, killed_by: str | None = None) -> None:
        if self._restarts_file is not None:
            tell_supervisor(self._restarts_file, self._num_restarts, killed_by)

    def _exit_like_server(self) -> int:
        """The exit code of the inference server; does not return where a signal ended it."""
        assert self._exit_code is not None
        if self._exit_code >= 0:
            return self._exit_code
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core dump that matters is the inference server's
        number = signal.Signals(-self._exit_code)
        if number is not signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return 128 + number


def die_with_fork_server(environment: Mapping[str, str]) -> None:
    """Have this process killed with the fork server that started it as a program, if one did."""
    if parent := environment.get(FORK_SERVER_VARIABLE):
        die_with_parent(int(parent))


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _exit_without_cleanup(code: int) -> NoReturn:
    """Exit a forked server, which has closed all that outlives it: tearing down torch and vLLM takes half a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
