"""A folder with profiles where the command line is used as a person would, and the proof that nothing is left of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forked_commands import run_command
from stage import is_open

from grpo_engine.wire.supervisor import RunStatus
from grpo_tui.keeper_process import Stat
from grpo_tui.supervisor.keeper.proc import command_line, living, marker, send_signal

DEADLINE_S = 30.0
PYTHON = f"{sys.executable}"

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

DEAF = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)\nwhile 1: signal.pause()"
)
POLITE = "import signal; print('up', flush=True); signal.pause()"


def service(name: str, program: str, *arguments: object, **settings: object) -> str:
    """A `[services.NAME]` table that runs a small Python program; settings are written as TOML."""
    argv = json.dumps([PYTHON, "-I", "-S", "-c", program, *map(str, arguments)])
    lines = [f"{key} = {value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]
    return "\n".join([f"[services.{name}]", 'kind = "command"', f"argv = {argv}", *lines, ""])


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that other processes bring about."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


@dataclass(kw_only=True)
class Workplace:
    """The folder, and what is done in it."""

    folder: Path
    runtime: Path
    ports: list[int] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """What commands run in: sockets and what is temporary in folders of this test's own."""
        own = {"XDG_RUNTIME_DIR": str(self.runtime), "TMPDIR": str(self.temporary)}
        return {**os.environ, **own, "OMP_NUM_THREADS": "1"}

    @property
    def temporary(self) -> Path:
        """Where whatever is started here puts what is temporary."""
        return self.runtime / "tmp"

    def profile(self, *services: str, name: str = "p") -> None:
        """Write a profile."""
        (self.folder / "profiles").mkdir(exist_ok=True)
        (self.folder / "profiles" / f"{name}.toml").write_text("\n".join(services))

    def grpo(self, *arguments: object, limit_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run `grpo-tui` and wait."""
        return run_command([*map(str, arguments)], cwd=self.folder, env=self.environment, timeout_s=limit_s)

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """Run `grpo-tui` beside the test."""
        return subprocess.Popen(self.argv(*arguments), **self._how())

    def argv(self, *arguments: object) -> list[str]:
        """The command line of a command."""
        return [PYTHON, "-P", "-m", "grpo_tui", *map(str, arguments)]

    def _how(self) -> dict[str, Any]:
        pipe = subprocess.PIPE
        return {"cwd": self.folder, "env": self.environment, "text": True, "stdout": pipe, "stderr": pipe}

    def up(self, *arguments: object) -> str:
        """Bring the profile `p` up until it is ready; the id of the run."""
        done = self.grpo("up", "--profile", "p", "--detach", "--wait", "ready", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def status(self, *arguments: object) -> RunStatus:
        """The status document of the run."""
        done = self.grpo("status", *arguments, "--json")
        assert done.returncode == 0, done.stderr
        return RunStatus.model_validate_json(done.stdout)

    def pid(self, name: str) -> int:
        """The main process of a service."""
        pid = next(each.pid for each in self.status().services if each.name == name)
        assert pid is not None
        return pid

    def run_folder(self) -> Path:
        """The folder of the only run."""
        (found,) = [path for path in (self.folder / "logs").iterdir() if path.is_dir()]
        return found

    def lose_daemon(self) -> None:
        """SIGKILL to the run's daemon, and wait until it is gone."""
        supervisor = self.status().supervisor
        assert supervisor is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        until(lambda: all(each.pid != supervisor.pid for each in living()))

    def survivors(self) -> list[Stat]:
        """Everybody alive who was started for a run below this folder, or supervises one."""
        return [each for each in living() if each.pid != os.getpid() and self._is_ours(each.pid)]

    def _is_ours(self, pid: int) -> bool:
        mark = marker(pid)
        folder = str(self.folder)
        return (mark is not None and (mark.run_folder or "").startswith(folder)) or folder in command_line(pid)


@contextmanager
def open_workplace(folder: Path) -> Iterator[Workplace]:
    """A workplace of which nothing may be left; a survivor fails the test, and is ended by its pid."""
    runtime = Path(tempfile.mkdtemp(prefix="grpo-test-"))
    place = Workplace(folder=folder, runtime=runtime)
    place.temporary.mkdir()
    shared_before = set(os.listdir("/dev/shm"))
    try:
        yield place
    finally:
        left = place.survivors()
        names = [command_line(each.pid)[-160:] for each in left]
        for each in left:
            send_signal(each, signal.SIGKILL)
        sockets = [path.name for path in runtime.rglob("*.sock")]
        temporary = os.listdir(place.temporary)
        shutil.rmtree(runtime)
    assert not names
    assert not sockets
    assert not temporary
    assert not [port for port in place.ports if is_open(port)]
    runs = {path.name for path in (folder / "logs").glob("*")} if (folder / "logs").is_dir() else set()
    shared = [name for name in set(os.listdir("/dev/shm")) - shared_before if any(run in name for run in runs)]
    assert not shared
