"""What the process tests share: launches, small programs that behave badly, and the proof that nobody is left.

Programs are real, and carry the stage's token in their command line, so that a survivor is seen whatever it did to its
group, session, parents or environment.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ports import free_ports

from grpo_tui.keeper_process import Stat
from grpo_tui.services.base import Launch, RestartPolicy
from grpo_tui.supervisor.keeper.client import Keeper, start_keeper
from grpo_tui.supervisor.keeper.proc import command_line, descendants, living, send_signal

DEADLINE_S = 60.0

HOLDER = """
import signal, socket, sys
if "deaf" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
listening = socket.socket()
listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listening.bind(("127.0.0.1", int(sys.argv[1])))
listening.listen()
while True: signal.pause()
"""
"""Listens on a port; `deaf` ignores SIGTERM."""

FAMILY = """
import os, signal, subprocess, sys
holder, token, *ports = sys.argv[1:]
def argv(port): return [sys.executable, "-I", "-S", "-c", holder, port, "deaf", token]
ways = [dict(), dict(process_group=0), dict(start_new_session=True), dict(start_new_session=True, env={})]
for port, way in zip(ports, ways): subprocess.Popen(argv(port), **way)
if len(ports) > len(ways) and os.fork() == 0:
    os.setsid()
    if os.fork() == 0: os.execve(sys.executable, argv(ports[-1]), {})
    os._exit(0)
while True: signal.pause()
"""
"""Starts deaf holders: in its own group, in theirs, in a session of their own, there with a cleaned environment, and
the last one double-forked besides."""


def python(program: str, *arguments: object) -> tuple[str, ...]:
    """The command line of a small Python program that starts fast."""
    return (sys.executable, "-I", "-S", "-c", program, *map(str, arguments))


def is_open(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that other processes bring about."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.005)


@dataclass(kw_only=True)
class Stage:
    """A run folder, and whoever acts in it."""

    folder: Path
    run: str
    token: str
    ports: list[int] = field(default_factory=list)

    def launch(self, *argv: str, env: Mapping[str, str] | None = None, **changes: object) -> Launch:
        """A service named `a` that runs `argv` with the token as its last argument where it is a Python program."""
        values: dict[str, object] = {
            "name": "a",
            "kind": "command",
            "argv": argv,
            "env": env or {},
            "cwd": self.folder,
            "needs": {},
            "ready": None,
            "live": None,
            "restart": RestartPolicy.NEVER,
            "restart_unhealthy": False,
            "max_restarts": 0,
            "restart_window_s": 1.0,
            "backoff_s": 1.0,
            "stop_grace_s": 10.0,
            "stop_signal": signal.SIGTERM,
            "ports": (),
            "gpus": (),
            "ends_run": None,
        }
        return Launch(**{**values, **changes})  # type: ignore[arg-type]

    async def start(self, *argv: str, attempt: int = 1, **changes: object) -> Keeper:
        """Start a keeper for `argv`."""
        return await start_keeper(
            self.launch(*argv, **changes),  # type: ignore[arg-type]
            run=self.run,
            attempt=attempt,
            run_folder=self.folder,
        )

    async def start_family(self, num_members: int, **changes: object) -> Keeper:
        """A leader with so many deaf children, each in its own way, every one holding a port."""
        self.ports = free_ports(num_members)
        keeper = await self.start(*python(FAMILY, HOLDER, self.token, *self.ports), **changes)
        await until(lambda: all(map(is_open, self.ports)))
        # The one that forked the last holder has exited too.
        await until(lambda: len(descendants(keeper.identity.pid)) == 1 + num_members)
        return keeper

    async def says(self, line: str) -> None:
        """Wait until the log of `a` holds a line."""
        await until(lambda: line in self.log().splitlines())

    def log(self) -> str:
        """The log of `a`."""
        return (self.folder / "a.log").read_text(errors="replace")

    def survivors(self) -> list[Stat]:
        """Everybody alive who carries the token or keeps a service of this stage."""
        marks = (self.token, str(self.folder))
        return [
            each for each in living() if each.pid != os.getpid() and any(m in command_line(each.pid) for m in marks)
        ]


@contextmanager
def open_stage(folder: Path) -> Iterator[Stage]:
    """A stage that must be empty at the end; a survivor fails the test, and is ended by its pid."""
    token = f"token-{os.getpid()}-{time.monotonic_ns()}"
    stage = Stage(folder=folder, run=f"run-{token}", token=token)
    yield stage
    left = stage.survivors()
    names = [command_line(each.pid)[-120:] for each in left]
    for each in left:
        send_signal(each, signal.SIGKILL)
    assert not names
    assert not [port for port in stage.ports if is_open(port)]
