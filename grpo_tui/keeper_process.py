"""The keeper: the shim process of one attempt, which starts the service, reaps it, and ends everything it leaves.

    python -I -S keeper_process.py SPEC.json < SPEC.json        (as `supervisor/keeper/client.py` runs it)

It is a session leader and a child subreaper, so whatever the service starts (own group, own session, double fork,
cleaned environment) stays below it and is found through /proc. The service gets the log file itself as stdout, so no
process is in the data path. How the attempt ended is written to a state file, for a supervisor that is started later.
SIGTERM stops the service with its grace period, SIGINT or SIGUSR1 kills it; a hang-up and the supervisor's exit change
nothing. SIGUSR2 opens the gate of a service that was started held: a pipe whose read end the service has, and from
which it gets one byte. If the keeper ends first the service reads the end of the file instead, and exits.

Standard library only, and little of it: one of these runs beside every service, so it must start fast and stay small.
It sleeps in `poll` without a timer unless something is being stopped. It knows no profile, no policy and no port. The
package imports from here what it shares with this script; the script imports nothing of the package.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import shlex
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple, NoReturn

STOP = signal.SIGTERM
KILL_NOW = (signal.SIGINT, signal.SIGUSR1)
OPEN_GATE = signal.SIGUSR2
LEFTOVER_GRACE_S = 0.15
"""From SIGTERM to SIGKILL for processes that outlive the main process: enough to clean up."""
LEFTOVER_GRACE_ON_GPU_S = 3.0
"""The same where they may compute on a GPU: under MPS, a client that is killed within a kernel can end all others."""
KILL_ROUND_S = 0.01
"""Between two rounds of SIGKILL: a process may fork while the others are killed."""
UNKILLABLE_AFTER_S = 5.0
"""Processes still alive this long after SIGKILL hang in the kernel (driver, dead mount) or belong to another user."""
EXIT_NOT_FOUND, EXIT_NOT_STARTED = 127, 126
"""Exit codes of shells for a command that is not found, and for one that is found and cannot be executed."""
STATE_BLOCK_BYTES = 4096
"""State files are padded to this size, so that on a full disk the existing one can be overwritten in place."""
PR_SET_CHILD_SUBREAPER = 36
CAPPED = re.compile(
    "=== capped · dropped (\\d+) bytes · header (\\d+) bytes(?: · dropped (\\d+) from (\\d+) bytes on)?".encode()
)
"""First line of a log whose older part was dropped; `supervisor/capped_log.py` writes it."""
MOST_BYTES = 1 << 62
"""No log has more written to it; sums of such offsets stay below what the kernel takes."""
ATTEMPT_OPENING = "=== attempt "
"""Begins the line of the log that opens an attempt."""
MOST_CORES = 8192
"""More than Linux can be built for."""
AUTOGROUP_TRIES, AUTOGROUP_ROUND_S = 50, 0.1


class Spec(NamedTuple):
    """What to start; written as JSON by `supervisor/keeper/client.py`. The environment is inherited, never on disk."""

    service: str
    attempt: int
    argv: list[str]
    cwd: str
    log: str
    state: str
    stop_signal: int
    grace_s: float
    cpus: list[int] | None = None
    """Cores to run on; None: those of the keeper."""
    nice: int = 0
    """Priority; 0: that of the keeper."""
    shown_argv: list[str] | None = None
    """`argv` with its secrets masked, for the log; None: it has none."""
    leftover_grace_s: float = LEFTOVER_GRACE_S
    """From SIGTERM to SIGKILL for processes that outlive the main process."""
    gate_variable: str | None = None
    """Variable that gets the number of the descriptor from which a service that is started held reads one byte before
    it begins; None: it is not held."""


class Stat(NamedTuple):
    """The fields of /proc/<pid>/stat that are used."""

    pid: int
    comm: str
    state: str
    """One letter: Z is a zombie, X dead, D stuck in the kernel for now."""
    parent: int
    group: int
    session: int
    cpu_ticks: int
    """User and system time together."""
    start_ticks: int
    """Since boot; with the pid it identifies a process uniquely."""
    rss_pages: int

    @property
    def is_dead(self) -> bool:
        """Whether it is a zombie, waiting to be reaped."""
        return self.state in "ZX"


def read_stat(pid: int) -> Stat | None:
    """Read the stat line of a process; None when there is no such process."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    try:
        line = os.read(descriptor, 4096)
    except ProcessLookupError:
        return None
    finally:
        os.close(descriptor)
    opening, closing = line.index(b"("), line.rindex(b")")  # the name may contain spaces and brackets
    fields = line[closing + 2 :].split()
    return Stat(
        pid=pid,
        comm=line[opening + 1 : closing].decode(errors="replace"),
        state=fields[0].decode(),
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        start_ticks=int(fields[19]),
        rss_pages=int(fields[21]),
    )


def all_processes() -> list[Stat]:
    """Every process that is visible."""
    stats = (read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [stat for stat in stats if stat is not None]


def below(root: int, processes: Iterable[Stat]) -> list[Stat]:
    """The descendants of `root`, parents first, without itself."""
    children: dict[int, list[Stat]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process)
    found = list(children.get(root, ()))
    for process in found:
        found.extend(children.get(process.pid, ()))
    return found


def send_signal(process: Stat, number: int) -> None:
    """Signal exactly this process, never a later one with its pid; do nothing when it is gone or another user's."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    except OSError:
        handle = None  # no pidfd in this kernel, or no descriptor left: a race of some microseconds remains
    try:
        now = read_stat(process.pid)
        if now is None or now.start_ticks != process.start_ticks:
            return
        if handle is None:
            os.kill(process.pid, number)
        else:
            signal.pidfd_send_signal(handle, number)
    except (ProcessLookupError, PermissionError):
        return
    finally:
        if handle is not None:
            os.close(handle)


class Keeper:
    """One attempt, from start to exit; `run` is the whole course."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._main: Stat | None = None
        self._main_pid = 0
        self._exit_code: int | None = None
        self._error: str | None = None
        self._started_at = time.time()
        self._ended_at: float | None = None
        self._log_offset = 0
        self._kill_at: float | None = None
        """On the monotonic clock; None while nothing is being stopped."""
        self._signalled: set[tuple[int, int]] = set()
        self._ended: dict[int, tuple[str, str]] = {}
        self._unkillable: list[Stat] = []
        self._wakeup = -1
        self._gate: int | None = None
        """Write end of the pipe that holds the service; None: it is not held, or not any more."""
        self._is_saved = True

    def run(self) -> int:
        """Start the service and wait until none of its processes is left; return the keeper's own exit status."""
        self._become_keeper()
        self._start()
        self._save(self._state_of_running())
        self._report()
        signals: set[int] = set()
        while self._reap():
            self._act(signals)
            if self._unkillable:
                break
            signals = self._wait()
        self._save("gone")
        return 0 if self._is_saved else 1

    def _become_keeper(self) -> None:
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2:  # inherited by the supervisor, such as a pipe whose end an ssh session waits for
                with suppress(OSError):
                    os.close(int(name))
        if os.getsid(0) != os.getpid():
            os.setsid()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "cannot become a child subreaper")
        self._wakeup, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in (STOP, *KILL_NOW, OPEN_GATE, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # the number arrives through the wake-up pipe
        for number in (signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])

    # --- starting --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        spec = self._spec
        log = os.open(spec.log, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._started_at))
        gap = "" if ends_with_newline(spec.log) else "\n"
        write_line(log, f"{gap}{ATTEMPT_OPENING}{spec.attempt} · {when} · {on_one_line(spec.shown_argv or spec.argv)}")
        self._log_offset = written_bytes(log)
        failure, failure_write = os.pipe2(os.O_CLOEXEC)
        gate = None
        if spec.gate_variable is not None:
            gate, self._gate = os.pipe2(os.O_CLOEXEC)
        self._main_pid = os.fork()
        if self._main_pid == 0:
            if gate is not None and spec.gate_variable is not None:
                os.set_inheritable(gate, True)
                os.environ[spec.gate_variable] = str(gate)
            become_service(spec, log, failure_write)
        os.close(failure_write)
        if gate is not None:
            os.close(gate)
        with os.fdopen(failure, "rb") as pipe:
            words = pipe.read()  # ends when the child has executed the program, or has exited
        if words:
            self._error = words.decode()
            write_line(log, f"grpo-tui: {self._error}")
        else:
            self._main = read_stat(self._main_pid)
        os.close(log)

    def _report(self) -> None:
        """Write the state file's content to the supervisor once, on stdout, and close stdin and stdout."""
        with suppress(OSError):  # the supervisor has exited meanwhile: the next one reads the file
            write_all(1, self._record(self._state_of_running(), {}))
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.close(nothing)

    # --- waiting and stopping -------------------------------------------------------------------------------------

    def _reap(self) -> bool:
        """Reap exited children; return whether any is left. Orphans become children, so with none left all are gone."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._main_pid and self._exit_code is None:
                self._exit_code = os.waitstatus_to_exitcode(status)
                self._ended_at = time.time()
                self._save("exited")
                if self._kill_at is None:
                    self._kill_at = time.monotonic() + self._spec.leftover_grace_s

    def _wait(self) -> set[int]:
        """Sleep until a signal arrives or a grace period is over; return the signals that arrived."""
        timeout_ms = None
        if self._kill_at is not None:
            timeout_ms = 1 + int(1000 * max(self._kill_at - time.monotonic(), KILL_ROUND_S))
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        poll.poll(timeout_ms)
        try:
            return set(os.read(self._wakeup, 65536))
        except BlockingIOError:
            return set()

    def _act(self, signals: set[int]) -> None:
        """Do what the signals and the clock require: nothing, the stop signal, or SIGKILL to all."""
        now = time.monotonic()
        if OPEN_GATE in signals:
            self._open_gate()
        if not signals.isdisjoint(KILL_NOW):
            self._kill_at = now if self._kill_at is None else min(now, self._kill_at)
        elif STOP in signals and self._kill_at is None:
            self._send_stop_signal()
            self._kill_at = now + self._spec.grace_s
        if self._exit_code is not None:
            self._terminate_leftovers()
        if self._kill_at is not None and now >= self._kill_at:
            left = self._kill_leftovers()
            if now - self._kill_at > UNKILLABLE_AFTER_S:
                self._unkillable = left

    def _open_gate(self) -> None:
        """Let a service that was started held begin; nothing changes for one that has begun or has exited."""
        if self._gate is None or self._exit_code is not None:
            return
        with suppress(BrokenPipeError):  # a program that does not wait: it has closed its end
            os.write(self._gate, b"\n")
        os.close(self._gate)
        self._gate = None
        self._save("running")

    def _state_of_running(self) -> str:
        return "running" if self._gate is None else "held"

    def _send_stop_signal(self) -> None:
        """Send the stop signal to the process group of the main process, which is not reaped yet."""
        signalled = [process for process in self._below() if process.group == self._main_pid]
        self._signalled.update((process.pid, process.start_ticks) for process in signalled)
        for number in (self._spec.stop_signal, signal.SIGCONT):  # a suspended process gets no signal before SIGCONT
            with suppress(ProcessLookupError, PermissionError):  # it left its group, or runs as another user (sudo)
                os.killpg(self._main_pid, number)
            if self._main is not None and not any(process.pid == self._main_pid for process in signalled):
                send_signal(self._main, number)

    def _terminate_leftovers(self) -> None:
        """Send SIGTERM to each process that outlived its parent and has not got it yet: those below it end with it."""
        for process in self._below():
            is_child = process.parent == os.getpid()
            if not is_child or process.is_dead or (process.pid, process.start_ticks) in self._signalled:
                continue
            self._signalled.add((process.pid, process.start_ticks))
            self._ended.setdefault(process.pid, (process.comm, "SIGTERM"))
            send_signal(process, signal.SIGTERM)
            send_signal(process, signal.SIGCONT)

    def _kill_leftovers(self) -> list[Stat]:
        """Send SIGKILL to all processes below, the main process group first and at once; return them.

        Zombies too: one whose main thread has exited may have other threads that hang in a driver.
        """
        left = self._below()
        if any(process.group == self._main_pid for process in left):
            with suppress(ProcessLookupError, PermissionError):  # exited since it was listed, or another user's
                os.killpg(self._main_pid, signal.SIGKILL)
        for process in left:
            if not process.is_dead:
                self._ended[process.pid] = (process.comm, "SIGKILL")
            send_signal(process, signal.SIGKILL)
        return left

    def _below(self) -> list[Stat]:
        return below(os.getpid(), all_processes())

    # --- state file ------------------------------------------------------------------------------------------------

    def _save(self, state: str) -> None:
        """Replace the state file; on a full disk overwrite it in place, shortened so that it fits."""
        path = self._spec.state
        beside = f"{path}.tmp"
        try:
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                write_all(descriptor, self._record(state, self._ended))
            finally:
                os.close(descriptor)
            os.replace(beside, path)
            self._is_saved = True
        except OSError:
            self._is_saved = overwrite(path, self._record(state, {}))

    def _record(self, state: str, ended: dict[int, tuple[str, str]]) -> bytes:
        keeper = read_stat(os.getpid())
        assert keeper is not None
        record = {
            "service": self._spec.service,
            "attempt": self._spec.attempt,
            "state": state,
            "keeper": {"pid": keeper.pid, "start_ticks": keeper.start_ticks},
            "main": self._main and {"pid": self._main.pid, "start_ticks": self._main.start_ticks},
            "started_at": self._started_at,
            "ended_at": self._ended_at,
            "exit_code": self._exit_code,
            "error": self._error,
            "log_offset": self._log_offset,
            "ended": [{"pid": pid, "comm": comm, "how": how} for pid, (comm, how) in ended.items()],
            "unkillable": [{"pid": stuck.pid, "comm": stuck.comm, "how": "SIGKILL"} for stuck in self._unkillable],
        }
        return json.dumps(record).encode().ljust(STATE_BLOCK_BYTES)


def become_service(spec: Spec, log: int, failure: int) -> NoReturn:
    """In the forked child: undo the keeper's own settings and execute the service's program."""
    exit_code = EXIT_NOT_STARTED
    try:
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.setpgid(0, 0)
        for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
            os.dup2(descriptor, target)
        words = enter_folder(spec.cwd) or set_cores(spec.cpus) or set_priority(spec.nice)
        if not words:
            try:
                os.execvp(spec.argv[0], spec.argv)
            except OSError as error:
                exit_code, words = why_not_started(spec.argv[0], error)
        os.write(failure, words.encode())
    finally:
        os._exit(exit_code)


def enter_folder(cwd: str) -> str:
    """Change to the working directory; return the error message, empty on success."""
    try:
        os.chdir(cwd)
    except OSError as error:
        return f"cannot enter the working directory {cwd}: {error.strerror}"
    return ""


def set_cores(cpus: list[int] | None) -> str:
    """Run on these cores only; return the error message. The kernel silently ignores cores that are not available."""
    if cpus is None:
        return ""
    with suppress(OSError):  # none of them is available
        os.sched_setaffinity(0, cpus)
    if os.sched_getaffinity(0) == set(cpus):
        return ""
    with suppress(OSError):
        os.sched_setaffinity(0, range(MOST_CORES))
    absent = sorted(set(cpus) - os.sched_getaffinity(0))
    with open("/proc/self/status", errors="replace") as file:
        there = next(line.split()[1] for line in file if line.startswith("Cpus_allowed_list:"))
    return f"cannot run on cores {absent}: available are {there}; correct `cpus`"


def set_priority(nice: int) -> str:
    """Run at this priority; return the error message, empty on success."""
    if nice == 0:
        return ""
    now = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    except OSError as error:
        why = f"{error.strerror}, the supervisor has {now}"
        return f"cannot run at nice {nice}: {why}; correct `nice`, or raise `ulimit -e`"
    set_session_priority(nice)
    return ""


def set_session_priority(nice: int) -> None:
    """Set the autogroup's priority too: a kernel with autogroups ignores `nice` between sessions."""
    for _ in range(AUTOGROUP_TRIES):
        try:
            with open("/proc/self/autogroup", "w") as file:
                file.write(str(nice))
            return
        except BlockingIOError:  # the kernel allows ten such writes a second on the whole machine
            time.sleep(AUTOGROUP_ROUND_S)
        except OSError:  # no autogroups in this kernel
            return


def why_not_started(program: str, error: OSError) -> tuple[int, str]:
    """Exit code and message for a program that could not be executed."""
    if isinstance(error, FileNotFoundError) and os.path.exists(program):
        return EXIT_NOT_STARTED, f"cannot start {program}: the interpreter in its first line does not exist"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        where = "no such file" if "/" in program else f"not found in PATH ({os.environ.get('PATH', '')})"
        return EXIT_NOT_FOUND, f"cannot start {program}: {where}"
    return EXIT_NOT_STARTED, f"cannot start {program}: {error.strerror}"


def on_one_line(argv: list[str]) -> str:
    """A command line in shell syntax, with line breaks inside arguments shown as escapes."""
    return shlex.join(argv).replace("\r", "\\r").replace("\n", "\\n")


def ends_with_newline(path: str) -> bool:
    """Whether a file is empty or ends with a newline."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return True
        file.seek(size - 1)
        return file.read(1) == b"\n"


class Extent(NamedTuple):
    """Size of a log file, and what its header says."""

    dropped: int
    """Bytes that were dropped from its beginning."""
    header: int
    """Length of the header, in bytes."""
    size: int
    is_moving: bool
    """Whether bytes are being copied to its front at the moment."""


def extent(log: int) -> Extent:
    """Read the size of a log and its header. A header that claims more than a file can have is text of the log."""
    header, size = CAPPED.match(os.pread(log, 200, 0)), os.fstat(log).st_size
    if header is None or int(header[2]) > size or max(int(each or 0) for each in header.groups()) > MOST_BYTES:
        return Extent(0, 0, size, False)
    is_moving = header[4] is not None and size >= int(header[4])
    return Extent(int(header[3 if is_moving else 1]), int(header[2]), size, is_moving)


def written_bytes(log: int) -> int:
    """How many bytes were ever written to a log, dropped ones included."""
    while True:
        now = extent(log)
        if extent(log).dropped == now.dropped:  # else its older part was dropped between the two reads
            return now.dropped + now.size


def write_line(log: int, line: str) -> None:
    """Append a line to the log."""
    with suppress(OSError):  # disk full: the service runs without this line, and the supervisor reports the disk
        write_all(log, f"{line}\n".encode(errors="replace"))


def write_all(descriptor: int, content: bytes) -> None:
    """Write all of it; a disk that fills up half-way raises OSError at the next part."""
    while content:
        content = content[os.write(descriptor, content) :]


def overwrite(path: str, content: bytes) -> bool:
    """Overwrite an existing file in the blocks that it has; return whether that was possible."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False  # the run folder was deleted
    try:
        write_all(descriptor, content)
        os.ftruncate(descriptor, len(content))
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def main() -> int:
    """Read the spec on stdin, whose name on the command line is for people, and run its service.

    It is not opened by its name, which may lead to another file by now: see `docs/security.md`.
    """
    with open(0, "rb", closefd=False) as file:
        spec = Spec(**json.load(file))
    return Keeper(spec).run()


if __name__ == "__main__":
    sys.exit(main())
