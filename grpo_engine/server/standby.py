"""A parent that has imported everything and forks the server, so that a restart costs no imports.

    SIGHUP            ends the server with all that is below it, and forks the next one ("restart in place")
    SIGTERM, SIGINT   are passed on; twice, and the server is killed
    end of the server is the parent's end, with the same exit code or signal: whoever supervises it starts a cold one

A process can be forked safely as long as it has one thread and has not initialised CUDA, so the parent never has an
event loop or a model, and sleeps in `poll`. Where an import leaves a thread behind, servers are started as programs of
their own: every restart then pays for its imports, and nothing else changes.

A server does not outlive its parent. It leads a process group of its own.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import re
import resource
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from grpo_engine.errors import GrpoError
from grpo_engine.flags import to_flags
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.preloading import preload
from grpo_engine.server.vllm_processes import is_resource_tracker
from grpo_engine.server.vllm_sockets import sockets_of_a_server
from grpo_engine.wire.standby import NOTHING_LEFT_LINE, RESTART_SIGNAL

PARENT_VARIABLE = "GRPO_STANDBY_PID"
"""Of a server that was started as a program: the standby without which it must not live."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_HEARD = frozenset({RESTART_SIGNAL, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
_GRACE_S = 3.0
"""A server that is to be restarted gets so long to answer what runs, and to take its shared memory along."""
_TRACKER_GRACE_S = 0.5
"""Resource trackers end by themselves, after removing what the others left in shared memory."""
_GONE_WITHIN_S = 10.0
_KILL_ROUND_S = 0.01
"""Between two rounds of SIGKILL: a process may fork while its siblings die."""
_FORK_SAFE_THREAD = re.compile(r"cuda[0-9a-f]{11}|jemalloc_bg_thd")
"""What NVML leaves when it has looked at the GPUs (driver 580), which waits for events and holds nothing; and what
frees memory for libraries with jemalloc in them, which ends it before a fork and starts it on both sides after."""
_CUDA_DRIVER, _CUDA_NOT_INITIALIZED = "libcuda.so.1", 3

logger = logging.getLogger(__name__)


class Standby:
    """One server after the other; `run` is the story."""

    def __init__(self, config: ServerConfig, serve: Callable[[ServerConfig], int]) -> None:
        self._config = config
        self._serve = serve
        self._had_terminal = _has_terminal()
        self._handlers = {number: signal.getsignal(number) for number in _HEARD}
        self._server = 0
        """The pid of the server at hand."""
        self._exit_code: int | None = None
        """Of the server at hand, negative for a signal; None while it runs."""
        self._wakeup = -1
        self._heard: deque[int] = deque()
        """Signals that came and were not looked at yet."""

    def run(self) -> int:
        """Import, serve and restart until the server ends; its exit code. Does not return in the forked servers.

        Raises:
            GrpoError: the settings or the model are wrong; raised in a forked server too, whose code is then ours.
        """
        self._heed_signals_while_importing()
        began = time.monotonic()
        logger.info("Standby: importing what a server needs, once for all of its restarts")
        preload(self._config)
        logger.info("Standby: everything is imported, in %.1f s", time.monotonic() - began)
        self._listen()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        gc.freeze()
        while True:
            with sockets_of_a_server(self._config, os.environ):
                obstacle = why_unforkable()
                if obstacle is not None:
                    logger.warning("Standby: %s; the server is started as a program of its own", obstacle)
                    self._server = self._start_program()
                elif self._fork():
                    _leave(self._serve(self._config))
                self._exit_code = None
                has_next = self._keep()
            if not has_next:
                return self._end()
            self._say_nothing_is_left()

    def _heed_signals_while_importing(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: os._exit(0))  # nothing was begun that could be left half-done
        signal.signal(signal.SIGHUP, self._on_hangup_while_importing)

    def _on_hangup_while_importing(self, _number: int, _frame: FrameType | None) -> None:
        """What is asked for is under way: nothing runs that would have to end first."""
        if self._is_hung_up():
            os._exit(0)
        _say(NOTHING_LEFT_LINE)

    def _listen(self) -> None:
        """Have every signal's number come out of a pipe: also one that another thread takes."""
        self._wakeup, write_end = self._pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in _HEARD:
            signal.signal(number, lambda *_: None)

    # --- starting ----------------------------------------------------------------------------------------------------

    def _fork(self) -> bool:
        """Whether this is the server."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)  # until they do not come out of the parent's pipe
        pid = os.fork()
        with suppress(ProcessLookupError):  # it has ended already
            os.setpgid(pid, pid)  # on both sides: neither goes on before it is so
        if pid == 0:
            die_with(parent)
            self._become_server()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._server = pid
        return pid == 0

    def _become_server(self) -> None:
        signal.set_wakeup_fd(-1)
        for descriptor in self._pipe:
            os.close(descriptor)
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _start_program(self) -> int:
        flags = to_flags(self._config, ServerConfig)
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "grpo_engine", "server", *flags, "--no-standby"],
            {**os.environ, PARENT_VARIABLE: str(os.getpid())},
            setpgroup=0,
            setsigmask=[],
            setsigdef=[signal.SIGTERM, signal.SIGINT, signal.SIGHUP],
        )

    # --- keeping and ending ------------------------------------------------------------------------------------------

    def _keep(self) -> bool:
        """Wait until the server has ended; whether another one is to follow."""
        is_stopping = False
        while self._reap() and self._exit_code is None:
            match self._hear():
                case signal.SIGHUP if not self._is_hung_up():
                    if not is_stopping:
                        self._stop_server()
                        return True
                case signal.SIGHUP if self._handlers[signal.SIGHUP] is signal.SIG_IGN:
                    continue  # nohup
                case signal.SIGTERM | signal.SIGINT | signal.SIGHUP:
                    self._signal_server(signal.SIGKILL if is_stopping else signal.SIGTERM)
                    is_stopping = True
        self._end_rest()
        return False

    def _is_hung_up(self) -> bool:
        """Whether a hang-up is one: the terminal that this was started from is gone."""
        return self._had_terminal and not _has_terminal()

    def _signal_server(self, number: signal.Signals) -> None:
        """SIGTERM goes to the server alone, which ends its engine itself: an engine that ends first is an error."""
        if self._exit_code is not None:
            return
        if number is signal.SIGKILL:
            os.killpg(self._server, number)
        else:
            os.kill(self._server, number)

    def _stop_server(self) -> None:
        """End the server and all below it: politely, and then not."""
        self._signal_server(signal.SIGTERM)
        until = time.monotonic() + _GRACE_S
        while self._reap() and self._exit_code is None and (left_s := until - time.monotonic()) > 0:
            self._wait(left_s)
        self._signal_server(signal.SIGKILL)
        self._end_rest()

    def _end_rest(self) -> None:
        """Kill whoever outlived the server, wherever it hid, and return when nobody is left.

        Raises:
            GrpoError: somebody does not end.
        """
        began = time.monotonic()
        while self._reap():
            left, waited_s = psutil.Process().children(recursive=True), time.monotonic() - began
            if waited_s > _GONE_WITHIN_S:
                names = ", ".join(f"process {each.pid}" for each in left)
                raise GrpoError(f"standby: {names} outlived SIGKILL: stuck in the kernel, usually in a driver")
            for process in left:
                if waited_s > _TRACKER_GRACE_S or not is_resource_tracker(process):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
            self._wait(_KILL_ROUND_S)

    def _reap(self) -> bool:
        """Bury the dead; whether anybody is left. Orphans become children, so no child means no descendant."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._server and self._exit_code is None:
                self._exit_code = os.waitstatus_to_exitcode(status)

    def _hear(self) -> int:
        """The next signal that came."""
        while not self._heard:
            self._wait(None)
        return self._heard.popleft()

    def _wait(self, timeout_s: float | None) -> None:
        """Sleep until a signal comes or the time is up; keep what came."""
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        if poll.poll(None if timeout_s is None else 1000 * timeout_s):
            self._heard.extend(os.read(self._wakeup, 65536))

    def _say_nothing_is_left(self) -> None:
        """Tell the supervisor, whatever the log level is: who answers from here on is the next server.

        Signals that came until here are answered by this restart: their sender reads the log from the moment before.
        """
        self._wait(0)
        self._heard = deque(number for number in self._heard if number != signal.SIGHUP)
        _say(NOTHING_LEFT_LINE)

    def _end(self) -> int:
        """End as the server did."""
        assert self._exit_code is not None
        if self._exit_code >= 0:
            return self._exit_code
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the server's own core is the one to look at
        number = signal.Signals(-self._exit_code)
        if number is not signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return 128 + number


def die_with(parent: int) -> None:
    """Have this process killed when `parent`, whose child it is, ends; at once where it has ended already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        _give_up()


def die_with_standby(environment: Mapping[str, str]) -> None:
    """Do so where a standby started this process as a program."""
    if parent := environment.get(PARENT_VARIABLE):
        die_with(int(parent))


def why_unforkable() -> str | None:
    """Why a fork of this process might hang or fail, in words; None where it is safe."""
    others = [_thread_name(task) for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    names = sorted(name for name in others if not _FORK_SAFE_THREAD.fullmatch(name))
    if names:
        return f"importing left {len(names)} threads behind ({', '.join(names)}), with which a fork may hang"
    if has_cuda(_loaded_cuda_driver()):
        return "importing initialised CUDA, which does not survive a fork"
    return None


def has_cuda(driver: ctypes.CDLL | None) -> bool:
    """Whether CUDA was initialised in this process, as the driver's own library says, if it is loaded."""
    return driver is not None and driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _CUDA_NOT_INITIALIZED


def _loaded_cuda_driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(_CUDA_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # nobody has loaded it
        return None


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _thread_name(task: Path) -> str:
    return (task / "comm").read_text(errors="replace").strip()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _leave(code: int) -> NoReturn:
    """End a forked server, of which nothing is left to be put away: taking torch and vLLM apart takes half a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _give_up() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)
