"""The CUDA MPS daemon of a run, as a service: starts it, waits until its server runs, and ends both.

    python -m grpo_tui.mps_process [GPU ...]        (as the launch of `grpo_tui/profile/mps.py`)

Without MPS the driver time-slices processes that share a GPU: each stands still while another computes. The daemon
listens in CUDA_MPS_PIPE_DIRECTORY, where the CUDA driver of each service looks for it; a service that finds none there
runs without MPS. Where MPS cannot be had, it says why in its last line and exits with 0.

`nvidia-cuda-mps-control` starts the server for its first client. Here it is asked for one before there are clients, so
that a driver or container that refuses one is known before a service is started. When the daemon or its server ends,
this process ends the other one and exits with 1: their clients fail at their next call to CUDA, and are restarted.
So it does after a fatal fault on a GPU, which the server logs: that may be of any client, and new ones are refused.
Imports nothing of the package.

Source: NVIDIA, Multi-Process Service (docs.nvidia.com/deploy/mps), and nvidia-cuda-mps-control(1).
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
DEFAULT_PIPES = Path("/tmp/nvidia-mps")
READY = "MPS: ready"
"""Begins the line that says that services can be started."""
START_LIMIT_S = 30.0
"""For the server: without persistence mode the driver initialises every GPU first."""
INITIALIZING_LIMIT_S = 5.0
"""For a server that runs to say that it takes clients; one that is refused by the driver exits before."""
QUIT_LIMIT_S = 2
"""For clients to exit after `quit`; the daemon then ends its server. Services that use it have ended before."""
END_LIMIT_S = 5.0
"""For the daemon to exit: it outlives `quit` by more than a second (measured)."""
ANSWER_LIMIT_S = 5.0
POLL_S = 0.1
FOLDER_POLL_S = 5.0
"""For the folder of the socket to be seen gone."""
MAX_PATH_BYTES = 4096
"""Of the command of a process, whose line may have no end."""
SHOWN_LINES = 20
"""Of the server's log, where it failed."""
FATAL = b"Server is handling a fatal GPU error"
"""In a line of the server's log. Such a fault comes from a kernel, or from the end of a client within one."""
Answer = TypeVar("Answer")
STOP = frozenset({signal.SIGTERM, signal.SIGINT})


class CannotHave(Exception):
    """Why MPS cannot be had here."""


def main(arguments: Sequence[str], environment: dict[str, str]) -> int:
    """Run the daemon until it is told to stop; 0 after that or where MPS cannot be had, 1 when daemon or server end."""
    wakeup = _take_signals()
    try:
        daemon = Daemon(environment)
        if (why := of_driver(lambda nvml: refusal(nvml, map(int, arguments)))) is not None:
            raise CannotHave(f"since {why}")
        with daemon:
            server = daemon.start_server(lambda: _signalled(wakeup))
            if server is None:
                return 0
            _say(f"{READY}, server pid {server}, {environment[PIPES]}")
            return daemon.watch(server, wakeup)
    except CannotHave as reason:
        _say(f"services that share a GPU are time-sliced: no MPS, {reason}")
        return 0


class Daemon:
    """The control daemon in the foreground; as a context manager it has exited, with its server, at the end."""

    def __init__(self, environment: dict[str, str]) -> None:
        """Start nothing yet.

        Raises:
            CannotHave: there is no such program, or the run has no temporary folder.
        """
        program = shutil.which(CONTROL, path=environment.get("PATH"))
        if program is None:
            raise CannotHave(f"since {CONTROL} is not in PATH: it comes with the driver (nvidia-compute-utils)")
        if PIPES not in environment:
            raise CannotHave("since the run has no temporary folder for its socket")
        self._program = program
        self._environment = environment
        self._pipes, self._logs = Path(environment[PIPES]), Path(environment.get(LOGS, environment[PIPES]))
        self._process: subprocess.Popen[bytes] | None = None
        self._made: tuple[int, int] | None = None
        """The folder of the socket, as `_folder` tells it."""
        self._has_failed = False
        """Whether it or its server has ended: `quit` would wait for clients, whose restart waits for this process."""
        self._servers: dict[int, int | None] = {}
        """By pid, when each was started."""
        self._fault, self._fault_end = os.pipe2(os.O_CLOEXEC)
        """Readable after a fatal fault."""
        self._log: threading.Thread | None = None

    def __enter__(self) -> Daemon:
        """Start it."""
        for folder in (self._pipes, self._logs):
            shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was killed
            folder.mkdir(mode=0o700, parents=True)
        self._made = self._folder()
        # A process group of its own: a stop signal for ours reaches it as `quit`, which ends the server too.
        self._process = process = subprocess.Popen(
            [self._program, "-f"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            process_group=0,
        )
        assert process.stdout is not None
        self._log = threading.Thread(target=self._pass_on, args=(process.stdout,), daemon=True)
        self._log.start()
        return self

    def _pass_on(self, output: IO[bytes]) -> None:
        """Copy the daemon's log; on to its end, since a daemon whose log nobody reads is ended by SIGPIPE."""
        with output:
            for line in output:
                if FATAL in line:
                    os.write(self._fault_end, b"!")
                _write(line)

    def __exit__(self, *_: object) -> None:
        """End it: `quit`, then SIGTERM and SIGKILL to what is left, each by its pid."""
        process = self._process
        assert process is not None
        if process.poll() is None and not self._has_failed:
            self._ask(f"quit -t {QUIT_LIMIT_S}", limit_s=QUIT_LIMIT_S + ANSWER_LIMIT_S)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_LIMIT_S)
        for number in (signal.SIGTERM, signal.SIGKILL):
            left = [process.pid] if process.poll() is None else []
            left += self._living_servers()
            for pid in left:
                _say(f"MPS: pid {pid} is left: {signal.Signals(number).name}")
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            _wait_until(lambda: process.poll() is not None and not self._living_servers(), 1.0)
        assert self._log is not None
        self._log.join(END_LIMIT_S)  # its last lines; a server that hangs keeps its end open
        for folder in (self._pipes, self._logs):
            shutil.rmtree(folder, ignore_errors=True)

    def start_server(self, is_stopped: Callable[[], bool]) -> int | None:
        """Start the server, and return its pid; None when it is told to stop before.

        Raises:
            CannotHave: the daemon or the server does not start.
        """
        assert self._process is not None
        has_asked, deadline = False, time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if is_stopped():
                return None
            if self._process.poll() is not None:
                raise CannotHave(f"since {CONTROL} exited with {self._process.returncode}{self._last_words()}")
            if not has_asked:
                has_asked = self._ask(f"start_server -uid {os.getuid()}") is not None
            elif pids := self._server_pids():
                _wait_until(lambda: not self._is_initializing(pids[0]), INITIALIZING_LIMIT_S)
                if self._living_servers():
                    return pids[0]
            time.sleep(POLL_S)
        raise CannotHave(f"since its server did not start in {START_LIMIT_S:g} s{self._last_words()}")

    def watch(self, server: int, wakeup: int) -> int:
        """Wait until one of the two exits, has a fatal fault, or their folder is gone (1), or a signal comes (0).

        Processes that use the daemon would go on without the folder; one that starts later would find no daemon, and be
        time-sliced beside them.
        """
        assert self._process is not None
        poll = select.poll()
        poll.register(wakeup, select.POLLIN)
        ends = {}
        for pid, what in ((self._process.pid, "control daemon"), (server, "server")):
            try:
                ends[os.pidfd_open(pid)] = f"its {what} (pid {pid}) ended"
            except ProcessLookupError:
                return self._report_end(f"its {what} (pid {pid}) ended")
        ends[self._fault] = "a GPU had a fatal fault, as the lines above say"
        for handle in ends:
            poll.register(handle, select.POLLIN)
        while True:
            happened = poll.poll(FOLDER_POLL_S * 1000)
            if not happened and self._folder() != self._made:
                return self._report_end(f"the folder of its socket, {self._pipes}, was removed, so it is ended")
            for ready, _ in happened:
                if ready != wakeup:
                    return self._report_end(ends[ready])
                if _signalled(wakeup):
                    return 0

    def _folder(self) -> tuple[int, int] | None:
        """What tells the folder of the socket from one of the same name; None where there is none."""
        with suppress(OSError):
            found = self._pipes.lstat()
            return found.st_dev, found.st_ino
        return None

    def _report_end(self, what: str) -> int:
        self._has_failed = True
        for line in self._log_lines():
            _say(f"server.log: {line}")
        _say(f"MPS: {what}: every service that uses it fails at its next call to CUDA")
        return 1

    def _ask(self, command: str, limit_s: float = ANSWER_LIMIT_S) -> str | None:
        """Send a command to the daemon; its answer, or None where it does not answer."""
        try:
            done = subprocess.run(
                [self._program],
                input=f"{command}\n",
                env=self._environment,
                capture_output=True,
                text=True,
                errors="replace",  # an answer that is no text must not leave the daemon behind
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
        return done.stdout if done.returncode == 0 else None

    def _server_pids(self) -> list[int]:
        pids = [int(word) for word in (self._ask("get_server_list") or "").split() if word.isdecimal()]
        self._servers |= {pid: _started(pid) for pid in pids if pid not in self._servers}
        return pids

    def _is_initializing(self, server: int) -> bool:
        """Whether the server says so; drivers that do not know the question answer something else."""
        answer = self._ask(f"get_server_status {server}") if self._living_servers() else None
        return answer is not None and "INITIALIZING" in answer.upper()

    def _living_servers(self) -> list[int]:
        return [pid for pid, started in self._servers.items() if started is not None and _started(pid) == started]

    def _log_lines(self) -> list[str]:
        try:
            return (self._logs / "server.log").read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        except OSError:
            return []

    def _last_words(self) -> str:
        lines = self._log_lines()
        return f": {lines[-1]}" if lines else ""


def refusal(nvml: Any, gpus: Iterable[int]) -> str | None:
    """Why MPS cannot use one of these GPUs, if so. One process at a time is no obstacle: the server is one.

    Args:
        nvml: `pynvml`, initialised.
    """
    for index in gpus:
        with suppress(nvml.NVMLError):  # a driver or GPU that does not report it
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if nvml.nvmlDeviceGetComputeMode(handle) == nvml.NVML_COMPUTEMODE_PROHIBITED:
                return f"GPU {index} has compute mode Prohibited: nvidia-smi -i {index} -c DEFAULT"
            if nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE:
                return f"GPU {index} is divided by MIG"
    return None


def uuids(nvml: Any) -> dict[int, str]:
    """The UUIDs of all GPUs by their number in nvidia-smi, as CUDA_VISIBLE_DEVICES takes them."""
    count = nvml.nvmlDeviceGetCount()
    return {index: str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index))) for index in range(count)}


def of_driver(question: Callable[[Any], Answer], limit_s: float = ANSWER_LIMIT_S) -> Answer | None:
    """The answer to a question about `pynvml`; None without a driver, or with one that does not answer in time."""
    answers: list[Answer] = []

    def ask() -> None:
        try:
            import pynvml
        except ImportError:
            return
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            answers.append(question(pynvml))
            pynvml.nvmlShutdown()

    asking = threading.Thread(target=ask, daemon=True)  # a driver that hangs must not block the exit
    asking.start()
    asking.join(limit_s)
    return answers[0] if answers else None


def daemon_of_all(pipes: Path = DEFAULT_PIPES, processes: Path = Path("/proc")) -> str | None:
    """Who runs a daemon where every CUDA program looks for one by default; None where none runs.

    Any user can make that folder, and name a process so: only one of root's or our own user's counts.
    """
    try:
        found = pipes.lstat()
    except OSError:
        return None
    owner = found.st_uid
    if not stat.S_ISDIR(found.st_mode) or owner not in (0, os.geteuid()):
        return None
    for process in processes.glob("[0-9]*"):
        with suppress(OSError):  # it has exited
            if _users(process) != [owner, owner]:
                continue
            with open(process / "cmdline", "rb") as line:
                program = line.read(MAX_PATH_BYTES).partition(b"\0")[0].rpartition(b"/")[2]
            if program == CONTROL.encode():
                return f"uid {owner} (pid {process.name})"
    return None


def _users(process: Path) -> list[int]:
    """The real and the effective user of a process: any process can have its files in `/proc` owned by root."""
    lines = (process / "status").read_bytes().splitlines()
    return next((list(map(int, line.split()[1:3])) for line in lines if line.startswith(b"Uid:")), [])


def _started(pid: int) -> int | None:
    """When a process started, in ticks since boot, by which it is told from a later one; None once it has exited."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in b"ZX" else int(fields[19])


def _take_signals() -> int:
    """Make stop signals readable from the descriptor that is returned, so that none is lost between two waits."""
    wakeup, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in STOP:
        signal.signal(number, lambda *_: None)
    return wakeup


def _signalled(wakeup: int) -> bool:
    try:
        return not STOP.isdisjoint(os.read(wakeup, 4096))
    except BlockingIOError:
        return False


def _say(line: str) -> None:
    """Write a line of the log at once: the supervisor reads it."""
    _write(f"{line}\n".encode())


def _write(line: bytes) -> None:
    with suppress(OSError):  # a full disk, which others may fill: clients of the daemon go on
        os.write(sys.stdout.fileno(), line)


def _wait_until(holds: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(POLL_S / 5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], dict(os.environ)))
