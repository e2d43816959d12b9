"""The managers that `supervisor.py` compares, each driven as its manual says, and checks for processes that are left.

Every program is a file below the folder that a manager works in, so whatever a process does to its parents, group,
session or environment, the folder in its command line tells that it is one of ours to count and to end.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from grpo_tui.supervisor.keeper.client import living_keepers
from grpo_tui.supervisor.keeper.proc import Stat, command_line, living, read_stat, send_signal
from grpo_tui.supervisor.lock import read_address

PEERS = ("supervisor==4.3.0", "honcho==2.0.0")
GRACE_S = 1.0
"""Seconds from TERM to KILL, where configurable; honcho has 5 s, counted from the first program that exited."""
LIMIT_S = 60.0
END_LIMIT_S = 10.0
"""A manager that is still running that long after its stop command counts as not ending."""
GRPO_TUI = (sys.executable, "-m", "grpo_tui")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program for a manager to run."""

    name: str
    argv: tuple[str, ...]
    ports: tuple[int, ...] = ()
    settings: str = ""
    """More lines of its table in our profile: needs and probes, which the peers do not have."""


class Manager(Protocol):
    """One manager in one folder."""

    name: str
    folder: Path

    def start(self, programs: Sequence[Program], environment: Mapping[str, str]) -> None:
        """Run its start command; return when that returns, or at once if it stays in the foreground."""

    def pids(self) -> list[int]:
        """Its own processes: the supervisor first, then those between it and the programs."""

    def end(self) -> None:
        """Stop everything; return when it has exited, or at the limit."""

    def stop(self, program: str) -> None:
        """Stop one program, or everything if it cannot stop one."""

    def status_command(self) -> tuple[str, ...] | None:
        """Its status command."""


class GrpoTui:
    """This project."""

    name = "grpo-tui"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment: Mapping[str, str] = os.environ

    def start(self, programs: Sequence[Program], environment: Mapping[str, str]) -> None:
        """`up --detach`."""
        lines = []
        for program in programs:
            lines += [f"[services.{program.name}]", 'kind = "command"', f"argv = {json.dumps(program.argv)}"]
            lines += [f"stop_grace_s = {GRACE_S}", f"ports = {list(program.ports)}", program.settings]
        (self.folder / "p.toml").write_text("\n".join(lines))
        self._environment = {**environment, "XDG_RUNTIME_DIR": str(self.folder)}
        self.command("up", "--profile", "p.toml", "--detach")

    def command(self, *words: str) -> str:
        """Run one of our commands in the folder; its output."""
        done = subprocess.run(
            [*GRPO_TUI, *words], cwd=self.folder, env=self._environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"grpo-tui {' '.join(words)}: exit code {done.returncode}\n{done.stderr}")
        return done.stdout

    def run_folder(self) -> Path:
        """The folder of the newest run."""
        return max(path.parent for path in self.folder.glob("logs/*/plan.json"))

    def pids(self) -> list[int]:
        """The daemon, and its keepers."""
        address = read_address(self.run_folder())
        keepers = [state.keeper.pid for state in living_keepers(self.run_folder())]
        return [*([address.pid] if address else []), *keepers]

    def end(self) -> None:
        """`down`."""
        self.command("down")

    def stop(self, program: str) -> None:
        """`stop`, until no process of the service is left."""
        self.command("stop", program, "--wait")

    def status_command(self) -> tuple[str, ...]:
        """`status`."""
        return (*GRPO_TUI, "status")


class Supervisord:
    """supervisord, configured to signal whole groups, which is not its default."""

    name = "supervisord"

    def __init__(self, folder: Path, binaries: Path) -> None:
        self.folder = folder
        self._binaries = binaries
        self._control = (str(binaries / "supervisorctl"), "-c", str(folder / "supervisord.conf"))

    def start(self, programs: Sequence[Program], environment: Mapping[str, str]) -> None:
        """`supervisord`, which daemonizes."""
        here = self.folder
        lines = ["[unix_http_server]", f"file={here}/s.sock", "[supervisord]"]
        lines += [f"logfile={here}/supervisord.log", f"pidfile={here}/supervisord.pid"]
        lines += ["[rpcinterface:supervisor]"]
        lines += ["supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface"]
        lines += ["[supervisorctl]", f"serverurl=unix://{here}/s.sock"]
        for program in programs:
            lines += [f"[program:{program.name}]", f"command={shlex.join(program.argv)}", f"stopwaitsecs={GRACE_S:g}"]
            lines += ["autorestart=false", "startsecs=0", "stopasgroup=true", "killasgroup=true"]
            lines += ["redirect_stderr=true", f"stdout_logfile={here}/{program.name}.log", "stdout_logfile_maxbytes=0"]
        (here / "supervisord.conf").write_text("\n".join(lines))
        command = [str(self._binaries / "supervisord"), "-c", str(here / "supervisord.conf")]
        subprocess.run(command, cwd=here, env=environment, check=True, stdout=subprocess.DEVNULL)
        wait_until(lambda: has_text(here / "supervisord.pid"))

    def pids(self) -> list[int]:
        """Its only process."""
        return [int((self.folder / "supervisord.pid").read_text())]

    def end(self) -> None:
        """`supervisorctl shutdown`, which returns before it is done."""
        pids = self.pids()
        subprocess.run([*self._control, "shutdown"], check=True, stdout=subprocess.DEVNULL)
        gone_within(END_LIMIT_S, pids)

    def stop(self, program: str) -> None:
        """`supervisorctl stop`."""
        subprocess.run([*self._control, "stop", program], check=False, stdout=subprocess.DEVNULL)

    def status_command(self) -> tuple[str, ...]:
        """`supervisorctl status`."""
        return (*self._control, "status")


class Honcho:
    """honcho: no commands except start; all programs end when any one ends."""

    name = "honcho"

    def __init__(self, folder: Path, binaries: Path) -> None:
        self.folder = folder
        self._binaries = binaries
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, programs: Sequence[Program], environment: Mapping[str, str]) -> None:
        """`honcho start`, in the foreground."""
        procfile = self.folder / "Procfile"
        procfile.write_text("".join(f"{program.name}: exec {shlex.join(program.argv)}\n" for program in programs))
        command = [str(self._binaries / "honcho"), "start", "-f", str(procfile)]
        with (self.folder / "honcho.log").open("wb") as log:
            self._process = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log)

    def pids(self) -> list[int]:
        """The main process, and its fork for each program."""
        assert self._process is not None
        return [each.pid for each in living() if f"honcho start -f {self.folder}" in command_line(each.pid)]

    def end(self) -> None:
        """SIGTERM, as Ctrl-C."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_LIMIT_S)

    def stop(self, program: str) -> None:
        """honcho cannot stop one program."""
        self.end()

    def status_command(self) -> None:
        """honcho has no status command."""
        return


class ProcessCompose:
    """process-compose, where it is in PATH."""

    name = "process-compose"

    def __init__(self, folder: Path, binary: str) -> None:
        self.folder = folder
        self._client = (binary, "-U", "-u", str(folder / "pc.sock"))

    def start(self, programs: Sequence[Program], environment: Mapping[str, str]) -> None:
        """`up --detached`."""
        processes = {
            program.name: {
                "command": f"exec {shlex.join(program.argv)}",
                "shutdown": {"timeout_seconds": int(GRACE_S)},
                "log_location": str(self.folder / f"{program.name}.log"),
            }
            for program in programs
        }
        file = self.folder / "process-compose.yaml"
        file.write_text(json.dumps({"version": "0.5", "processes": processes}))  # JSON is YAML
        with (self.folder / "compose.log").open("wb") as log:
            command = [*self._client, "up", "--detached", "-f", str(file), "-L", str(self.folder / "pc.log")]
            subprocess.run(command, cwd=self.folder, env=environment, check=True, stdout=log, stderr=log)

    def pids(self) -> list[int]:
        """The server."""
        return [each.pid for each in living() if str(self.folder / "pc.sock") in command_line(each.pid)]

    def end(self) -> None:
        """`down`."""
        pids = self.pids()
        subprocess.run([*self._client, "down"], check=True, stdout=subprocess.DEVNULL)
        gone_within(END_LIMIT_S, pids)

    def stop(self, program: str) -> None:
        """`process stop`."""
        subprocess.run([*self._client, "process", "stop", program], check=False, stdout=subprocess.DEVNULL)

    def status_command(self) -> tuple[str, ...]:
        """`process list`."""
        return (*self._client, "process", "list")


def makers(root: Path) -> dict[str, Callable[[Path], Manager]]:
    """Every available manager by name: ours, those of PyPI in a separate environment, and one from PATH.

    What cannot be had is named on stderr.
    """
    found: dict[str, Callable[[Path], Manager]] = {"grpo-tui": GrpoTui}
    home, binaries = root / "peers", root / "peers" / "bin"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(binaries / "python"), "install", "-qq", *PEERS]
    installed = subprocess.run(pip, check=False, stdout=sys.stderr)
    if installed.returncode == 0:
        found["supervisord"] = lambda folder: Supervisord(folder, binaries)
        found["honcho"] = lambda folder: Honcho(folder, binaries)
    else:
        print(f"no supervisord and no honcho here: pip cannot install {' '.join(PEERS)}", file=sys.stderr)
    compose = shutil.which("process-compose")
    if compose is not None:
        found["process-compose"] = lambda folder: ProcessCompose(folder, compose)
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    stat = read_stat(pid)
    return stat is not None and not stat.is_dead


def has_text(path: Path) -> bool:
    """Whether a file has content."""
    return path.exists() and path.stat().st_size > 0


def seen_below(folder: Path) -> list[Stat]:
    """Live processes whose command line contains the folder."""
    return [each for each in living() if each.pid != os.getpid() and str(folder) in command_line(each.pid)]


def is_open(port: int) -> bool:
    """Whether the port has a listener."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_ports(count: int) -> tuple[int, ...]:
    """Ports without a listener, below the kernel's range for outgoing connections."""
    free = (port for port in random.sample(range(20_000, 32_000), 1000) if not is_open(port))
    return tuple(itertools.islice(free, count))


def wait_until(holds: Callable[[], bool], limit_s: float = LIMIT_S) -> float | None:
    """Seconds until the condition holds; None after the limit."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > limit_s:
            return None
        time.sleep(0.002)
    return time.monotonic() - began


def gone_within(limit_s: float, pids: Collection[int]) -> float | None:
    """Seconds until all of these have exited; None after the limit."""
    return wait_until(lambda: not any(map(is_alive, pids)), limit_s)


def end_below(folder: Path, managing: Sequence[Stat]) -> None:
    """Kill the remaining processes of a case, by PID and start time: its programs and their managers."""
    left = {each.pid: each for each in [*managing, *seen_below(folder)]}
    for each in left.values():
        send_signal(each, signal.SIGKILL)
    wait_until(lambda: not seen_below(folder), 5.0)
