"""A folder with profiles in which tests use the command line, and the check that nothing is left of its runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forked_commands import run_command
from ports import free_port
from stage import is_open

from grpo_engine.wire.supervisor import RunStatus, ServiceState, ServiceStatus, SupervisorInfo
from grpo_tui.keeper_process import Stat
from grpo_tui.supervisor.keeper.proc import command_line, living, marker, send_signal
from grpo_tui.supervisor.lock import has_daemon
from grpo_tui.supervisor.state_file import read_state

DEADLINE_S = 120.0
OF_HOST = {f"grpo-{os.getuid()}", "start.lock"}
"""What stays in TMPDIR: the folder of this user with the lock of all starts."""
PYTHON = sys.executable

SERVER = """
import http.server, sys, time
began, slow_s = time.monotonic(), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.monotonic() - began >= slow_s else 503)
        self.end_headers()
    def log_message(self, *_): pass
class Server(http.server.ThreadingHTTPServer):
    def server_bind(self):
        import socketserver
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]
print("listening", flush=True)
Server(("127.0.0.1", int(sys.argv[1])), Page).serve_forever()
"""
"""Answers 503 for a while, then 200. (The plain HTTPServer asks for the machine's name, which may take seconds.)"""

IDLE = "import signal; print('up', flush=True); signal.pause()"
IGNORES_SIGTERM = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{IDLE}"
RECORDS_START = f"import os, sys; open(sys.argv[1], 'a').write(f'{{sys.argv[2]}} {{os.getpid()}}\\n')\n{IDLE}"
UP = "{ log = '^up$', interval_s = 0.02 }"
"""The readiness probe of these three."""


def service(name: str, program: str, *arguments: object, **settings: object) -> str:
    """A `[services.NAME]` table that runs a small Python program; settings are written as TOML."""
    argv = json.dumps([PYTHON, "-I", "-S", "-c", program, *map(str, arguments)])
    lines = [f"{key} = {value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]
    return "\n".join([f"[services.{name}]", 'kind = "command"', f"argv = {argv}", *lines, ""])


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that other processes cause."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.01)


@dataclass(kw_only=True)
class Workplace:
    """The folder, and the commands that are run in it."""

    folder: Path
    runtime: Path
    ports: list[int] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of commands: sockets and temporary files go to folders of this test."""
        own = {"XDG_RUNTIME_DIR": str(self.runtime), "TMPDIR": str(self.temporary)}
        return {**os.environ, **own, "OMP_NUM_THREADS": "1"}

    @property
    def temporary(self) -> Path:
        """TMPDIR of all that is started here."""
        return self.runtime / "tmp"

    def profile(self, *services: str, name: str = "p") -> None:
        """Write a profile."""
        (self.folder / "profiles").mkdir(exist_ok=True)
        (self.folder / "profiles" / f"{name}.toml").write_text("\n".join(services))

    def recorded(self, name: str = "a", **settings: object) -> str:
        """A service whose starts `starts` lists."""
        return service(name, RECORDS_START, self.folder / "starts", name, **{"ready": UP, **settings})

    def server(self, *, loads_s: float = 0.0, within_s: float = 60, **settings: object) -> str:
        """A service `a` that answers 200 to its probe after `loads_s`, on a port that is appended to `ports`."""
        port = free_port()
        self.ports.append(port)
        ready = f"{{ http = 'http://127.0.0.1:{port}/health', interval_s = 0.05, within_s = {within_s} }}"
        return service("a", SERVER, port, loads_s, **{"ports": [port], "ready": ready, **settings})

    def starts(self) -> list[tuple[str, int]]:
        """Name and PID of every process that recorded services have started."""
        lines = (self.folder / "starts").read_text().splitlines()
        return [(name, int(pid)) for name, pid in map(str.split, lines)]

    def grpo(self, *arguments: object, limit_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run `grpo-tui` and wait."""
        return run_command([*map(str, arguments)], cwd=self.folder, env=self.environment, timeout_s=limit_s)

    def succeed(self, *arguments: object, limit_s: float = 120.0) -> str:
        """Run `grpo-tui`, which must exit with 0; its output."""
        done = self.grpo(*arguments, limit_s=limit_s)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """Run `grpo-tui` beside the test."""
        return subprocess.Popen(self.argv(*arguments), **self._how())

    def python(self, program: str) -> subprocess.CompletedProcess[str]:
        """Run a Python program that imports ours."""
        argv = [PYTHON, "-P", "-c", program]
        return subprocess.run(argv, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False)

    def argv(self, *arguments: object) -> list[str]:
        """The command line of a command."""
        return [PYTHON, "-P", "-m", "grpo_tui", *map(str, arguments)]

    def _how(self) -> dict[str, Any]:
        pipe = subprocess.PIPE
        return {"cwd": self.folder, "env": self.environment, "text": True, "stdout": pipe, "stderr": pipe}

    def launch(self, *services: str) -> None:
        """Start a run of these services, without waiting until they are ready."""
        self.profile(*services)
        self.succeed("up", "--profile", "p", "--detach")

    def up(self, *services: str, flags: Sequence[str] = ()) -> str:
        """Start a run of these services, or of the profile as it is, and wait until it is ready; the id of the run."""
        if services:
            self.profile(*services)
        return self.succeed("up", "--profile", "p", "--detach", "--wait", "ready", *flags).strip()

    def status(self) -> RunStatus:
        """The status document of the run."""
        return RunStatus.model_validate_json(self.succeed("status", "--json"))

    def service(self, name: str = "a") -> ServiceStatus:
        """The status of a service."""
        return next(each for each in self.status().services if each.name == name)

    def until_state(self, state: ServiceState, name: str = "a", *, attempt: int | None = None) -> None:
        """Wait until a service is in this state, in this attempt if one is given."""

        def is_reached() -> bool:
            now = self.service(name)
            return now.state is state and attempt in (None, now.attempt)

        until(is_reached)

    def pid(self, name: str = "a") -> int:
        """The main process of a service."""
        pid = self.service(name).pid
        assert pid is not None
        return pid

    def supervisor(self) -> SupervisorInfo:
        """The supervisor of the run, which must have one."""
        supervisor = self.status().supervisor
        assert supervisor is not None
        return supervisor

    def run_folder(self) -> Path:
        """The folder of the only run."""
        (found,) = [path for path in (self.folder / "logs").iterdir() if path.is_dir()]
        return found

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend the supervisor, so that it does not look at its files between two changes of a test to them."""
        pid = self.supervisor().pid
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: all(is_stopped(thread) for thread in Path(f"/proc/{pid}/task").iterdir()))
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def delete_run_folder(self) -> None:
        """Delete it under its live run, whose processes may write into it meanwhile."""
        folder = self.run_folder()
        while folder.exists():
            with suppress(OSError):
                shutil.rmtree(folder)

    def log(self, name: str = "supervisor") -> str:
        """The log of a service, or of the supervisor."""
        return (self.run_folder() / f"{name}.log").read_text(errors="replace")

    def until_written(self) -> RunStatus:
        """Wait until `state.json`, from which the next supervisor goes on, has what this one knows of its services."""

        def known(status: RunStatus | None) -> list[object]:
            return [] if status is None else [
                (status.state, each.name, each.state, each.attempt, each.restarts, each.prepared_at, each.exit_code)
                for each in status.services
            ]  # fmt: skip

        while known(now := self.status()) != known(read_state(self.folder / "logs" / now.run)):
            pass  # the limit is that of the test
        return now

    def kill_supervisor(self) -> None:
        """SIGKILL to the run's supervisor once its state is written, and wait until it is gone.

        Its main thread may be a zombie while others still end, and with them its lock.
        """
        status = self.until_written()
        assert status.supervisor is not None
        pid, folder = status.supervisor.pid, self.folder / "logs" / status.run
        os.kill(pid, signal.SIGKILL)
        until(lambda: all(each.pid != pid for each in living()) and not has_daemon(folder))

    def survivors(self) -> list[Stat]:
        """All processes that were started for a run below this folder, without their supervisors."""
        return [each for each in living() if each.pid != os.getpid() and self._is_ours(each.pid)]

    def supervisors(self) -> list[Stat]:
        """All supervisors of runs of this test, even one that is about to exit."""
        folder = f"XDG_RUNTIME_DIR={self.runtime}".encode()
        return [each for each in living() if each.pid != os.getpid() and folder in _environment(each.pid)]

    def _is_ours(self, pid: int) -> bool:
        mark = marker(pid)
        folder = str(self.folder)
        return (mark is not None and (mark.run_folder or "").startswith(folder)) or folder in command_line(pid)


def is_stopped(process: Path) -> bool:
    """Whether a signal has stopped a process or thread, by its folder in /proc."""
    return (process / "stat").read_text().rpartition(")")[2].split()[0] == "T"


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has exited, or is of another user
        return []


def print_logs(folder: Path) -> None:
    """The ends of all logs, which are shown where the test has failed."""
    for path in sorted(folder.glob("logs/*/*.log")):
        num_lines = 60 if path.name == "supervisor.log" else 15
        if not path.is_file():  # tests put pipes there
            continue
        with suppress(OSError):
            lines = path.read_bytes()[-20_000:].decode(errors="replace").splitlines()
            shown = (f"--- {path.relative_to(folder)}", *(line[:300] for line in lines[-num_lines:]))
            sys.stdout.write("\n".join(shown) + "\n")


@contextmanager
def open_workplace(folder: Path) -> Iterator[Workplace]:
    """A workplace of which nothing may be left; a process that is left fails the test, and is killed by its PID."""
    runtime = Path(tempfile.mkdtemp(prefix="grpo-test-"))
    place = Workplace(folder=folder, runtime=runtime)
    place.temporary.mkdir()
    shared_before = set(os.listdir("/dev/shm"))
    try:
        yield place
        if place.survivors() or place.supervisors():
            done = place.grpo("down")
            assert done.returncode in (0, 5), done.stderr  # 5: the run has ended meanwhile
        until(lambda: not place.supervisors())  # killed before it has exited, it would leave its files
    finally:
        left = place.survivors()
        names = [command_line(each.pid)[-160:] for each in left]
        for each in [*left, *place.supervisors()]:
            send_signal(each, signal.SIGKILL)
        sockets = [path.name for path in runtime.rglob("*.sock")]
        temporary = [path for path in place.temporary.rglob("*") if path.name not in OF_HOST]
        shutil.rmtree(runtime)
    assert not names, names
    assert not sockets, sockets
    assert not temporary, temporary
    still_open = [port for port in place.ports if is_open(port)]
    assert not still_open, still_open
    runs = {path.name for path in (folder / "logs").glob("*")} if (folder / "logs").is_dir() else set()
    shared = [name for name in set(os.listdir("/dev/shm")) - shared_before if any(run in name for run in runs)]
    assert not shared, shared
