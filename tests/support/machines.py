"""Machines of their own on this one: namespaces of network, processes, host name, mounts, joined by a switch.

Each has an address, loopback, PIDs, /dev/shm and /tmp to itself, and nothing of this machine's network. What they
share is one folder, as by NFS, and the disk with the Python environment. `unplug` takes the link of a machine down, as
a pulled cable does: no packet arrives, and no connection is told. Needs root, or as much; every process on a machine
ends with the machine.
"""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from workplace import Workplace

from grpo_tui.keeper_process import Stat
from grpo_tui.supervisor.keeper.proc import command_line, living

CODE = Path(__file__).parents[2]
NETWORK = "10.77.0"
RAY_PORT = 6379
NAMESPACES = ("--net", "--uts", "--mount", "--pid", "--ipc")
_INIT = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps for it
os.write(1, b"up\\n")
os.read(0, 1)
"""
"""The first process of a machine; it exits with the process that made it, and the kernel ends all others."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One of them."""

    name: str
    address: str
    pid: int
    """Of its first process, as this machine sees it."""

    def argv(self, argv: Sequence[str], *, cwd: Path) -> list[str]:
        """A command line that runs another one there."""
        return [*_inside(self.pid), "env", "-C", str(cwd), *argv]


@dataclass(frozen=True, slots=True)
class Machines:
    """Several, and the switch between them."""

    all: tuple[Machine, ...]
    switch: int
    """The first process of the switch."""

    def unplug(self, machine: Machine) -> None:
        """Take its link down; connections over it are not closed."""
        self._link(machine, "down")

    def plug_in(self, machine: Machine) -> None:
        """Take its link up again."""
        self._link(machine, "up")

    def _link(self, machine: Machine, state: str) -> None:
        _shell(self.switch, f"ip link set dev {machine.name} {state}")


@cache
def why_not() -> str | None:
    """Why machines cannot be made here; None where they can."""
    probe = (
        "ip link add name v0 type veth peer name v1 && ip link add name s0 type bridge && mount -t tmpfs none /dev/shm"
    )
    try:
        done = subprocess.run(["unshare", *NAMESPACES, "--fork", "sh", "-c", probe], capture_output=True, check=False)
    except FileNotFoundError as error:
        return f"{error.filename} is not installed"
    return None if done.returncode == 0 else f"namespaces are not permitted: {done.stderr.decode().strip()}"


@contextmanager
def machines(folder: Path, *names: str) -> Iterator[Machines]:
    """Machines of these names, with addresses from 10.77.0.1 on, that share `folder`."""
    with ExitStack() as opened:
        switch = opened.enter_context(_first_process())
        _shell(switch, "ip link add name bridge type bridge; ip link set bridge up")
        made = []
        for number, name in enumerate(names, start=1):
            pid, address = opened.enter_context(_first_process()), f"{NETWORK}.{number}"
            # By the PID, since a name would be a file that all see.
            subprocess.run(
                [*_inside(switch, "net"), "sh", "-ec", f"ip link add name {name} type veth peer name eth0 netns {pid}"],
                check=True,
            )
            _shell(switch, f"ip link set dev {name} master bridge; ip link set dev {name} up")
            _shell(pid, f"ip link set lo up; ip address add {address}/24 dev eth0; ip link set eth0 up")
            _shell(pid, f"hostname {name}; {_mounts(folder, f'{address} {name}')}")
            made.append(Machine(name=name, address=address, pid=pid))
        yield Machines(all=tuple(made), switch=switch)


def _mounts(folder: Path, host: str) -> str:
    """Commands that give a machine /dev/shm and /tmp of its own, the latter with what all share in it."""
    code = (each for each in (CODE, Path(sys.prefix)) if each.is_relative_to("/tmp"))
    binds = [f"mkdir -p /mnt{path}; mount --bind {path} /mnt{path}; " for path in map(_quoted, (folder, *code))]
    return (
        f"mount -t tmpfs none /mnt; mkdir /mnt/tmp; chmod 1777 /mnt/tmp; {''.join(binds)}"
        f"echo '127.0.0.1 localhost\n{host}' > /mnt/hosts; "
        "mount --bind /mnt/hosts /etc/hosts; mount --rbind /mnt/tmp /tmp; "
        "mount -t tmpfs -o mode=1777 none /dev/shm"
    )


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


@contextmanager
def _first_process() -> Iterator[int]:
    """New namespaces, and the PID of the first process in them."""
    argv = ["unshare", *NAMESPACES, "--mount-proc", "--fork", "--kill-child", sys.executable, "-I", "-S", "-c", _INIT]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"up\n"
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            yield int(children)
        finally:
            process.stdin.close()


def _shell(pid: int, commands: str) -> None:
    subprocess.run([*_inside(pid), "sh", "-ec", commands], check=True, stdin=subprocess.DEVNULL)


def _inside(pid: int, *kinds: str) -> list[str]:
    return ["nsenter", f"--target={pid}", *(f"--{kind}" for kind in kinds or ("net", "uts", "mount", "pid", "ipc"))]


_FEW = ("--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats")


@dataclass(kw_only=True)
class ClusterWorkplace(Workplace):
    """A workplace on the first of several machines, which `ray start` has joined to a cluster."""

    machines: Machines

    @property
    def environment(self) -> dict[str, str]:
        """Sockets and temporary files are in /tmp of each machine, and caches are those of this user."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "GRPO_"))}
        for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
            kept.pop(name, None)
        return {
            **kept,
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "ray.token"),
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    @property
    def head(self) -> Machine:
        """The machine of the supervisor."""
        return self.machines.all[0]

    @property
    def address(self) -> str:
        """Of the cluster."""
        return f"{self.head.address}:{RAY_PORT}"

    def argv(self, *arguments: object) -> list[str]:
        """The command line of `grpo-tui` on the first machine."""
        return self.head.argv(super().argv(*arguments), cwd=self.folder)

    def grpo(self, *arguments: object, limit_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run `grpo-tui` there, and wait."""
        return subprocess.run(self.argv(*arguments), timeout=limit_s, check=False, capture_output=True, **self._there())

    def on(self, machine: Machine, *words: str, limit_s: float = 120.0) -> str:
        """The output of a command on a machine, which must exit with 0."""
        argv = machine.argv(words, cwd=self.folder)
        done = subprocess.run(argv, timeout=limit_s, check=False, capture_output=True, **self._there())
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def processes(self, machine: Machine, words: str) -> list[Stat]:
        """Processes on a machine with these words in their command lines; PIDs as this process sees them."""
        own = os.readlink(f"/proc/{machine.pid}/ns/pid")
        return [each for each in living() if words in command_line(each.pid) and _pid_namespace(each.pid) == own]

    def _there(self) -> dict[str, Any]:
        return {"env": self.environment, "stdin": subprocess.DEVNULL, "text": True}


def _pid_namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:  # it has exited
        return None


@contextmanager
def ray_machines(folder: Path, *names: str) -> Iterator[ClusterWorkplace]:
    """Machines in a cluster, by the commands of docs/cluster.md; each but the first has one device."""
    with machines(folder, *names) as made:
        place = ClusterWorkplace(folder=folder, runtime=folder, machines=made)
        with (folder / "ray.token").open("x") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(secrets.token_hex(32))
        head = (f"--port={RAY_PORT}", f"--node-ip-address={place.head.address}", "--include-dashboard=false")
        place.on(place.head, "ray", "start", "--head", *head, "--num-gpus=0", *_FEW)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda machine: join(place, machine), made.all[1:]))
        yield place


def join(place: ClusterWorkplace, machine: Machine) -> None:
    """Add a machine to the cluster, also one that has left it."""
    place.on(machine, "ray", "start", f"--address={place.address}", "--num-gpus=1", *_FEW)
