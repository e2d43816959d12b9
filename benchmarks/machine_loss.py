"""Seconds from the loss of a machine of a cluster to the status that names it, and to its service being ready again.

    .venv/bin/python benchmarks/machine_loss.py [--machines 3] [--rounds 5] [--ways WAY …] [--json]

A private Ray cluster of several raylets on this host, with a service on each machine but the last. The second
machine is lost in several ways: its raylet is killed (`kill -9`); raylet and actor are; all its processes are
stopped (SIGSTOP), as in a partition of the network; its actor alone is stopped, or its raylet alone. The supervisor
is asked for its status every 50 ms, as `grpo-tui status` does. After each loss stopped processes go on, and the
next one comes when every machine answers and every service is ready. Target: named within 5 s.

Links are taken down between as many machines made of namespaces (root), and one more for the supervisor, which `ray
start` has joined with Ray's own limits. `link down`: it comes up again once the machine is named. `link down, given
up`: it stays down until the service is ready on another machine; then the machine joins the cluster again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from machines import ClusterWorkplace, join, ray_machines, why_not

from grpo_engine.errors import PeerUnavailable
from grpo_engine.wire.supervisor import MachineStatus, RunStatus, ServiceState, ServiceStatus
from grpo_tui.client.socket import Daemon
from grpo_tui.keeper_process import Stat, all_processes
from grpo_tui.supervisor.keeper.proc import command_line, marker

TARGET_S, LIMIT_S, POLL_S = 5.0, 180.0, 0.05
NAMED = "machine-2"
WAITS = "import signal; print('up', flush=True); signal.pause()"
NAMED_S = "named_s"
READY = ServiceState.READY
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
WAYS: dict[str, tuple[signal.Signals, tuple[str, ...]]] = {
    "raylet killed": (KILL, ("raylet",)),
    "raylet and actor killed": (KILL, ("raylet", "actor")),
    "all processes stopped": (STOP, ("raylet", "actor", "agent", "others")),
    "actor stopped": (STOP, ("actor",)),
    "raylet stopped": (STOP, ("raylet",)),
}
LINK_DOWN, GIVEN_UP = "link down", "link down, given up"

Figures = dict[str, list[float]]
"""Seconds by what they count to, a round each."""


def main() -> None:
    options = flags().parse_args()
    ways = options.ways or [*WAYS, LINK_DOWN, GIVEN_UP]
    figures: dict[str, Figures] = {}
    if here := [way for way in ways if way in WAYS]:
        figures |= on_this_host(here, options)
    if links := [way for way in ways if way not in WAYS]:
        if (reason := why_not()) is not None:
            raise SystemExit(f"{', '.join(links)}: {reason}")
        figures |= over_links(links, options)
    if options.json:
        print(json.dumps(figures, indent=1))


def on_this_host(ways: Sequence[str], options: argparse.Namespace) -> dict[str, Figures]:
    """Lose a machine of a private cluster."""
    folder = Path(tempfile.mkdtemp(prefix="gml-"))
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    grpo = [sys.executable, "-m", "grpo_tui"]
    private = f"machines = {options.machines}\ndevices_per_machine = 1\n"
    write_profile(folder, private, options.machines)
    try:
        started = [*grpo, "up", "--profile", "p", "--detach", "--wait", "ready", "--timeout", "300"]
        subprocess.run(started, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        daemon = Daemon(run_folder_in(folder))
        return asyncio.run(measured({way: partial(lose, daemon, *WAYS[way]) for way in ways}, options.rounds))
    finally:
        subprocess.run([*grpo, "down"], cwd=folder, env=environment, stdout=subprocess.DEVNULL)
        shutil.rmtree(folder, ignore_errors=True)


def over_links(ways: Sequence[str], options: argparse.Namespace) -> dict[str, Figures]:
    """Take down the link of a machine made of namespaces."""
    folder = Path(tempfile.mkdtemp(prefix="gml-"))
    runtime = folder / "runtime"  # the socket of the supervisor is there for this process too
    runtime.mkdir(mode=0o700)
    try:
        with ray_machines(folder, *(f"m{number}" for number in range(1, options.machines + 2))) as place:
            environment = {**place.environment, "XDG_RUNTIME_DIR": str(runtime)}
            write_profile(folder, f'address = "{place.address}"\n', options.machines)
            started = place.argv("up", "--profile", "p", "--detach", "--wait", "ready", "--timeout", "300")
            try:
                subprocess.run(started, env=environment, check=True, stdout=subprocess.DEVNULL)
                daemon = Daemon(run_folder_in(folder))
                do = {way: partial(cut_off, daemon, place, is_for_good=way == GIVEN_UP) for way in ways}
                return asyncio.run(measured(do, options.rounds))
            finally:
                subprocess.run(place.argv("down"), env=environment, stdout=subprocess.DEVNULL)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_folder_in(folder: Path) -> Path:
    """The folder of the only run."""
    found = [path.parent for path in (folder / "logs").glob("p-*/plan.json") if not path.parent.is_symlink()]
    (run_folder,) = found
    return run_folder


def write_profile(folder: Path, cluster: str, machines: int) -> None:
    """A service on each machine but the last, whose raylet has room for one that was lost."""
    tables = [f'[cluster]\nkind = "ray"\n{cluster}']
    for number in range(1, machines):
        argv = json.dumps([sys.executable, "-I", "-S", "-c", WAITS])
        tables.append(
            f'[services.s{number}]\nkind = "command"\nargv = {argv}\nnum_devices = 1\nrestart = "on-failure"\n'
            "backoff_s = 0.2\nmax_restarts = 100\nready = { log = '^up', interval_s = 0.05, within_s = 300 }\n"
        )
    (folder / "profiles").mkdir()
    (folder / "profiles" / "p.toml").write_text("\n".join(tables))


async def measured(ways: Mapping[str, Callable[[], Awaitable[Mapping[str, float]]]], rounds: int) -> dict[str, Figures]:
    """The figures of each way, round by round."""
    figures: dict[str, Figures] = {}
    for way, lose_once in ways.items():
        found = [await lose_once() for _ in range(rounds)]
        figures[way] = {name: [round(each[name], 2) for each in found] for name in found[0]}
        named = figures[way][NAMED_S]
        verdict = "" if max(named) <= TARGET_S else f"  over the target of {TARGET_S:g} s"
        rows = [
            f"{name.removesuffix('_s').replace('_', ' ')} after {statistics.median(values):5.2f} s, at most "
            f"{max(values):5.2f} s"
            for name, values in figures[way].items()
        ]
        print(f"{way:26}{'; '.join(rows)}{verdict}", flush=True)
    return figures


async def cut_off(daemon: Daemon, place: ClusterWorkplace, *, is_for_good: bool) -> Mapping[str, float]:
    """Take down the link of the machine that the first service is on; all seconds count from there."""
    before = await until(daemon, lambda status: is_well(status, victim(status)))
    name, attempt = victim(before), first(before).attempt
    lost_at = machine(before, name).lost_at
    (there,) = [each for each in place.machines.all if each.name == name]
    began = time.monotonic()
    place.machines.unplug(there)
    await until(daemon, lambda status: is_named(status, name, lost_at))
    found = {NAMED_S: time.monotonic() - began}
    if is_for_good:
        await until(daemon, lambda status: machine(status, name).lost_at != lost_at)
        found["given_up_s"] = time.monotonic() - began
        await until(daemon, lambda status: first(status).attempt > attempt and first(status).state is READY)
        found["ready_elsewhere_s"] = time.monotonic() - began
    place.machines.plug_in(there)
    if is_for_good:
        while place.processes(there, "raylet/raylet "):  # noqa: ASYNC110 - it exits when it learns of that
            await asyncio.sleep(POLL_S)
        join(place, there)
        await until(daemon, lambda status: machine(status, name).state == "ready")
    else:
        await until(daemon, lambda status: is_well(status, name))
        found["ready_again_s"] = time.monotonic() - began
    return found


async def lose(daemon: Daemon, how: signal.Signals, parts: Sequence[str]) -> Mapping[str, float]:
    """Lose the machine once: seconds until the status names it, and from then until everything is as before."""
    before = await until(daemon, lambda status: is_well(status, NAMED))
    lost_at = machine(before, NAMED).lost_at
    hit = [process for part in parts for process in processes_of(part, daemon.run_folder)]
    assert hit, f"{NAMED} has no {' and '.join(parts)}"
    began = time.monotonic()
    for process in hit:
        os.kill(process.pid, how)
    await until(daemon, lambda status: is_named(status, NAMED, lost_at))
    named = time.monotonic()
    if how is STOP:
        for process in hit:
            os.kill(process.pid, signal.SIGCONT)
    await until(daemon, lambda status: is_well(status, NAMED))
    return {NAMED_S: named - began, "ready_again_s": time.monotonic() - named}


def is_named(status: RunStatus, name: str, lost_at: float | None) -> bool:
    found = machine(status, name)
    return found.state != "ready" or found.lost_at != lost_at


def is_well(status: RunStatus, name: str) -> bool:
    are_up = all(each.state is READY for each in status.services)
    return are_up and bool(machine(status, name).services) and all(each.state == "ready" for each in status.machines)


def machine(status: RunStatus, name: str) -> MachineStatus:
    return next(each for each in status.machines if each.name == name)


def first(status: RunStatus) -> ServiceStatus:
    return next(each for each in status.services if each.name == "s1")


def victim(status: RunStatus) -> str:
    """The machine of the first service."""
    return first(status).machine or ""


async def until(daemon: Daemon, holds: Callable[[RunStatus], bool]) -> RunStatus:
    """Ask for the status until it is so."""
    deadline, status = time.monotonic() + LIMIT_S, None
    while time.monotonic() < deadline:
        with suppress(PeerUnavailable):  # it counts as not named
            status = (await daemon.command("status")).status
            if status is not None and holds(status):
                return status
        await asyncio.sleep(POLL_S)
    raise SystemExit(f"not so within {LIMIT_S:g} s: {status and [each.model_dump() for each in status.machines]}")


def processes_of(part: str, run_folder: Path) -> list[Stat]:
    """The raylet of the machine, its actor, its agent, or all else below them."""
    living = all_processes()
    (raylet,) = [each for each in living if is_raylet(each, run_folder)]
    children = [each for each in living if each.parent == raylet.pid]
    actors = [each for each in children if command_line(each.pid).startswith("ray::MachineActor")]
    agents = [each for each in living if is_agent(each, raylet)]
    match part:
        case "raylet":
            return [raylet]
        case "actor":
            return actors
        case "agent":
            return agents
    return [each for each in children if each not in actors]


def is_raylet(process: Stat, run_folder: Path) -> bool:
    mark = marker(process.pid)
    is_of_run = mark is not None and mark.run_folder == str(run_folder.resolve())
    return is_of_run and f"{NAMED},1" in command_line(process.pid)


def is_agent(process: Stat, raylet: Stat) -> bool:
    words = command_line(process.pid).split()
    return "grpo_tui.supervisor.placement.agent" in " ".join(words) and words[-1] == str(raylet.pid)


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, LINK_DOWN, GIVEN_UP])
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    main()
