"""Kills random processes of an asynchronous training run on a Ray cluster, and counts its steps and groups afterwards.

    .venv/bin/python benchmarks/random_kills.py [--seconds 600] [--seed 1] [--buffer once] [--capacity 64] [--json]

A private cluster of three raylets on this host runs the trainer and the inference server; environment and rollout API
run beside the supervisor. At random moments one process is killed (`kill -9`): of a service, of Ray, of ours, or all at
once, as by a reboot; each kind once in a random order, then again. One kill in four comes before the run has recovered
from the one before. This program does what a user would: it attaches where there is no supervisor, and resumes where
the run has ended. Then the run trains to its end, and these must hold: each step is in the curve once; every group that
the rollout API accepted was trained as often as its buffer promises: exactly once (`once`, and `window`, which is never
full here), or four times (`replay`); those that are still queued as often as the store says. With `--capacity` a window
is full most of the time: a group is then trained once, or not at all where as many others followed as the window
holds. No process, port, shared memory or temporary file is left. Else the exit code is 1, and the folder is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import shutil
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from _group_tap import Fingerprint, GroupTap, posted_fingerprint, trained_fingerprint
from ports import free_ports
from terminal import Terminal
from workplace import Workplace, open_workplace

from grpo_engine.errors import PeerError, PeerUnavailable
from grpo_engine.wire.metrics import MetricsLine, RolloutLine
from grpo_engine.wire.run_folder import METRICS_FILE, ROLLOUT_STORE, ROLLOUTS_FILE
from grpo_engine.wire.supervisor import ENDED_RUN_STATES, RunStatus, ServiceState, ServiceStatus
from grpo_tui.client.socket import Daemon
from grpo_tui.keeper_process import Stat
from grpo_tui.supervisor.keeper.proc import command_line, read_stat

BATCH_GROUPS, GROUP_SIZE = 4, 8
LAST_STEPS = 20
"""Trained after the last kill."""
RECOVERED_WITHIN_S = 240.0
POLL_S = 0.25
OVERLAPS = 0.25
"""Share of kills that are not waited for."""
LONGEST_PAUSE_S = 4.0
MOST_USES = {"once": 1, "window": 1, "replay": 4}

KINDS: dict[str, tuple[str, ...]] = {
    "trainer": ("-m grpo_engine train ",),
    "server": ("-m grpo_engine server ",),
    "environment": ("-m grpo_engine env ",),
    "rollout API": ("-m grpo_engine api ",),
    "broker": ("ray_cluster broker ",),
    "cluster service": ("ray_cluster nodes ",),
    "actor": ("ray::MachineActor",),
    "agent": ("placement.agent ",),
    "raylet": ("/raylet/raylet ", "machine-2,1"),
    "head": ("/gcs/gcs_server ",),
    "stand-in": ("remote_process.py ",),
    "supervisor": (),
    "everything": (),
}
"""Words in the command line of each victim; of raylets those of the further machines (`_is_victim`)."""
SERVICES = {
    "trainer": ("trainer",),
    "server": ("vllm",),
    "environment": ("env",),
    "rollout API": ("api",),
    "broker": ("machines",),
    "cluster service": ("ray", "machines", "vllm", "trainer"),
    "head": ("ray", "machines", "vllm", "trainer"),
    "everything": ("ray", "machines", "vllm", "trainer", "api", "env"),
}
"""What ends with one of each kind; of a raylet and a stand-in it depends (`ended_with`)."""


@dataclass(slots=True, kw_only=True)
class Kill:
    """One kill, and how long it took until the run was as before."""

    at_s: float
    before: set[tuple[int, int]]
    """PIDs and start times of the processes whose successor must be there (a start time alone is 10 ms coarse, and some
    are there sooner)."""
    kind: str
    pids: list[int]
    step: int
    services: tuple[str, ...]
    """What must have been started again."""
    at: float
    """Unix seconds."""
    recovered_s: float | None = None
    """None where the next kill came before."""


@dataclass(kw_only=True)
class Ordeal:
    """A run that is killed at random."""

    place: Workplace
    rng: random.Random
    run: str = ""
    folder: Path = field(default_factory=Path)
    kills: list[Kill] = field(default_factory=list)
    deck: list[str] = field(default_factory=list)
    """Kinds that are still to come in this round, in which each comes once."""
    commands: Counter[str] = field(default_factory=Counter)
    """What this program did as a user."""

    # --- the run -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        flags = ("--profile", "p", "--detach", "--wait", "ready", "--timeout", "300")
        self.run = self.place.succeed("up", *flags, limit_s=400).strip()
        self.folder = self.place.folder / "logs" / self.run

    def finish(self) -> None:
        """Train to the end: some steps more than are done."""
        self.place.succeed("down", self.run, limit_s=200)
        more = ("--steps", f"+{LAST_STEPS}", "--detach", "--wait", "finished")
        self.place.succeed("resume", self.run, *more, limit_s=400)

    def status(self) -> RunStatus:
        """Of the supervisor, or of the files where there is none."""
        with suppress(PeerUnavailable, PeerError):
            status = asyncio.run(Daemon(self.folder).command("status")).status
            if status is not None:
                return status
        return RunStatus.model_validate_json(self.place.succeed("status", self.run, "--json"))

    def last_step(self) -> int:
        return max((line.step for line in metrics(self.folder)), default=0)

    # --- kills -------------------------------------------------------------------------------------------------------

    def victims(self, kind: str) -> list[Stat]:
        match kind:
            case "supervisor":
                supervisor = self.status().supervisor
                found = None if supervisor is None else read_stat(supervisor.pid)
                return [] if found is None else [found]
            case "everything":
                return [*self.victims("supervisor"), *self.place.survivors()]
        return [each for each in self.place.survivors() if _is_victim(kind, command_line(each.pid))]

    def kill_one(self, began: float) -> Kill | None:
        """Kill a random process of the next kind, if there is one just now."""
        self.deck = self.deck or self.rng.sample(list(KINDS), len(KINDS))
        kind = self.deck.pop()
        step, found, status = self.last_step(), self.victims(kind), self.status()
        if not found:
            return None
        hit = found if kind == "everything" else [self.rng.choice(found)]
        services, at = ended_with(kind, hit, status), time.time()
        before = {(each.pid, each.start_ticks) for each in self.victims(successor_of(kind))}
        for each in hit:
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)
        for each in hit:  # while one of many is still ending, the run does not look ended
            await_death(each)
        kill = Kill(
            at_s=time.monotonic() - began,
            before=before,
            at=at,
            kind=kind,
            services=services,
            pids=[each.pid for each in hit],
            step=step,
        )
        self.kills.append(kill)
        return kill

    def recover(self, kill: Kill) -> None:
        """Wait until there is a new process of that kind, what it ran is started again, all is ready, and a step was
        trained since."""
        began = time.monotonic()
        successor = successor_of(kill.kind)
        seen_before: set[tuple[int, int]] = set()
        status: RunStatus | None = None
        while time.monotonic() - began < RECOVERED_WITHIN_S:
            status = self.help_up()
            new = {(each.pid, each.start_ticks) for each in self.victims(successor)} - kill.before
            # Twice: between fork and exec a child has the command line of its parent.
            is_back = all((status_of(status, name).started_at or 0.0) > kill.at for name in kill.services)
            if new & seen_before and is_back and is_well(status) and self.last_step() > kill.step:
                kill.recovered_s = time.monotonic() - began
                return
            seen_before = new
            time.sleep(POLL_S)
        raise AssertionError(f"{kill}: not recovered within {RECOVERED_WITHIN_S:g} s: {described(status)}")

    def help_up(self) -> RunStatus:
        """Do what a user would, where something is to be done."""
        status = self.status()
        if status.state in ENDED_RUN_STATES:
            self.commands["resume"] += 1
            self.place.succeed("resume", self.run, "--detach", limit_s=120)
        elif status.supervisor is None:
            if self.rng.random() < 0.5:
                self.commands["attach"] += 1
                self.attach()
            else:
                self.commands["upgrade"] += 1
                self.place.succeed("upgrade", self.run)
        return self.status()

    def attach(self) -> None:
        """Open the screen, and leave it when it shows the services."""
        place = self.place
        screen = Terminal(place.argv("attach", self.run), cwd=place.folder, environment=place.environment)
        try:
            screen.shows("trainer", "vllm")
            screen.press("q")
            assert screen.ends() == 0, screen.text
        finally:
            screen.close()


def main() -> int:
    options = flags().parse_args()
    if options.capacity is not None and (
        options.buffer != "window" or options.capacity < 2 * BATCH_GROUPS * GROUP_SIZE
    ):
        raise SystemExit(
            f"--capacity {options.capacity}: is for --buffer window, and two batches fit in any: 64 at least"
        )
    folder = Path(tempfile.mkdtemp(prefix="grk-"))
    faults: list[str] = []
    try:
        with open_workplace(folder) as place:
            summary = torment(place, options, faults)
    except AssertionError as error:
        faults.append(str(error))
        summary = {}
    summary["faults"] = faults
    print(json.dumps(summary, indent=1) if options.json else "\n".join(told(summary)))
    if faults:
        print(f"what is left of the run: {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


def torment(place: Workplace, options: argparse.Namespace, faults: list[str]) -> dict[str, Any]:
    """Run, kill, end and count; what does not hold is added to `faults`."""
    api, server, tap = free_ports(3)
    place.ports += [api, server]
    place.profile(profile(api, server, tap, options))
    ordeal = Ordeal(place=place, rng=random.Random(options.seed))
    with GroupTap(tap, api) as groups:
        ordeal.begin()
        began = time.monotonic()
        while (now := time.monotonic()) - began < options.seconds:
            time.sleep(ordeal.rng.uniform(0.0, LONGEST_PAUSE_S))
            kill = ordeal.kill_one(began)
            if kill is None:  # nothing of that kind runs since the kill before
                ordeal.help_up()
                continue
            if ordeal.rng.random() >= OVERLAPS:
                ordeal.recover(kill)
            show(kill, options)
        while not is_well(ordeal.help_up()):
            assert time.monotonic() - now < RECOVERED_WITHIN_S, f"not well at the end: {described(ordeal.status())}"
            time.sleep(POLL_S)
        ordeal.finish()
        state = ordeal.status().state
    if state != "finished":
        faults.append(f"the run is {state}, not finished")
    if left := [command_line(each.pid)[:160] for each in place.survivors()]:
        faults.append(f"processes are left: {left}")
    steps = [line.step for line in metrics(ordeal.folder)]
    if steps != list(range(1, len(steps) + 1)):
        faults.append(f"the curve has not each step once: {steps}")
    versions = [line.policy_version for line in metrics(ordeal.folder)]
    if versions != sorted(set(versions)):
        faults.append(f"policy versions do not rise: {versions}")
    counts = count(ordeal.folder, groups, options, faults)
    return {
        "seed": options.seed,
        "seconds": options.seconds,
        "buffer": options.buffer,
        "capacity": options.capacity,
        "steps": len(steps),
        "groups": counts,
        "commands": dict(ordeal.commands),
        "kills": by_kind(ordeal.kills),
    }


def count(folder: Path, tap: GroupTap, options: argparse.Namespace, faults: list[str]) -> dict[str, int]:
    """Compare the groups that were accepted, trained, and left in the store."""
    lines = [RolloutLine.model_validate_json(line) for line in (folder / ROLLOUTS_FILE).read_text().splitlines()]
    trained = Counter(trained_fingerprint(line) for line in lines)
    in_steps = Counter((line.step, trained_fingerprint(line)) for line in lines)
    stored = dict(stored_groups(folder / ROLLOUT_STORE))
    queued = Counter(stored.keys())
    promised = {group: stored.get(group, MOST_USES[options.buffer]) for group in tap.accepted | trained | queued}
    num_held = math.inf if options.capacity is None else options.capacity // GROUP_SIZE
    num_later = {group: num for num, group in enumerate(reversed(tap.sent))}
    missing = Counter(group for group in tap.accepted | queued if trained[group] < promised[group])
    replaced = Counter(group for group in missing if group not in stored and num_later[group] >= num_held)
    lost = missing - replaced
    twice = Counter(group for group, uses in trained.items() if uses > promised[group])
    twice += Counter({group: uses for (_, group), uses in in_steps.items() if uses > 1})
    strangers = trained.keys() - tap.accepted.keys() - tap.unanswered.keys()
    counts = {
        "accepted": tap.accepted.total(),
        "trained": trained.total(),
        "queued at the end": queued.total(),
        "accepted without an answer": ((trained | queued) & tap.unanswered).total(),
        "replaced by newer ones": replaced.total(),
        "lost, or trained too seldom": lost.total(),
        "trained too often": len(twice),
        "never accepted": len(strangers),
    }
    for name in ("lost, or trained too seldom", "trained too often", "never accepted"):
        if counts[name]:
            faults.append(f"{counts[name]} groups: {name}")
    if options.capacity is not None and not replaced:
        faults.append(f"the window of {options.capacity} sequences was never full: use a smaller --capacity")
    whole = {step: number for step, number in Counter(line.step for line in lines).items() if number != BATCH_GROUPS}
    if whole:
        faults.append(f"steps with another number of groups than {BATCH_GROUPS}: {whole}")
    return counts


def stored_groups(path: Path) -> Iterator[tuple[Fingerprint, int]]:
    """Groups of the store, and in how many batches that were acknowledged each was."""
    query = "SELECT body, coalesce(number, 0) FROM bodies LEFT JOIN uses USING (id)"
    with sqlite3.connect(path) as database:
        for body, uses in database.execute(query):
            yield posted_fingerprint(json.loads(body)), uses


def metrics(folder: Path) -> list[MetricsLine]:
    """The complete lines of the curve."""
    with suppress(FileNotFoundError):
        complete, _, _ = (folder / METRICS_FILE).read_bytes().rpartition(b"\n")
        return [MetricsLine.model_validate_json(line) for line in complete.splitlines()]
    return []


def await_death(victim: Stat) -> None:
    while (now := read_stat(victim.pid)) is not None and now.start_ticks == victim.start_ticks and not now.is_dead:
        time.sleep(0.01)


def is_well(status: RunStatus) -> bool:
    are_up = all(each.state is ServiceState.READY for each in status.services)
    return status.supervisor is not None and are_up and all(each.state == "ready" for each in status.machines)


def status_of(status: RunStatus, name: str) -> ServiceStatus:
    return next(each for each in status.services if each.name == name)


def successor_of(kind: str) -> str:
    """The kind of which there is a process again once the run has recovered."""
    return "supervisor" if kind == "everything" else kind


def ended_with(kind: str, hit: Sequence[Stat], status: RunStatus) -> tuple[str, ...]:
    """The services that end with processes of this kind."""
    match kind:
        case "raylet":
            line = command_line(hit[0].pid)
            return tuple(each.name for each in status.services if each.machine and f"{each.machine},1" in line)
        case "stand-in":
            pids = {each.pid for each in hit}
            return tuple(each.name for each in status.services if each.pid in pids)
    return SERVICES.get(kind, ())


def described(status: RunStatus | None) -> str:
    if status is None:
        return "no status"
    services = {each.name: (str(each.state), each.why) for each in status.services}
    return (
        f"{status.state}, supervisor {status.supervisor}, {services}, {[each.model_dump() for each in status.machines]}"
    )


def _is_victim(kind: str, line: str) -> bool:
    words = KINDS[kind]
    if kind == "raylet":  # that of the first machine is a part of the head
        return words[0] in line and "machine-" in line and "machine-1,1" not in line
    is_stand_in = KINDS["stand-in"][0] in line
    is_keeper = "keeper_process.py" in line
    return words[0] in line and not is_keeper and (is_stand_in == (kind == "stand-in"))


def by_kind(kills: Sequence[Kill]) -> dict[str, dict[str, float | int | None]]:
    """Kills, and seconds of those before which the run had recovered from all earlier ones."""
    alone = [now for before, now in pairwise([None, *kills]) if before is None or before.recovered_s is not None]
    table: dict[str, dict[str, float | int | None]] = {}
    for kind in KINDS:
        of_kind = [each for each in kills if each.kind == kind]
        seconds = [each.recovered_s for each in alone if each.kind == kind and each.recovered_s is not None]
        table[kind] = {
            "kills": len(of_kind),
            "recovery_median_s": round(statistics.median(seconds), 1) if seconds else None,
            "recovery_max_s": round(max(seconds), 1) if seconds else None,
        }
    return table


def show(kill: Kill, options: argparse.Namespace) -> None:
    pids = kill.pids[0] if len(kill.pids) == 1 else f"{len(kill.pids)} processes"
    then = "the next kill came before" if kill.recovered_s is None else f"recovered after {kill.recovered_s:.1f} s"
    line = f"{kill.at_s:7.1f} s  step {kill.step:5}  {kill.kind:16} {pids}: {then}"
    print(line, file=sys.stderr if options.json else sys.stdout, flush=True)


def told(summary: dict[str, Any]) -> Iterator[str]:
    for kind, row in summary.get("kills", {}).items():
        if row["kills"]:
            seconds = f"median {row['recovery_median_s']} s, most {row['recovery_max_s']} s"
            yield f"{kind:16}{row['kills']:4} kills, recovery {seconds}"
    yield f"steps {summary.get('steps')}, groups {summary.get('groups')}, commands {summary.get('commands')}"
    yield from (f"FAULT: {fault}" for fault in summary["faults"])


def profile(api: int, server: int, tap: int, options: argparse.Namespace) -> str:
    """As `tiny-ray`, with small batches, all groups recorded, and restarts without a limit."""
    often = 'restart = "on-failure"\nmax_restarts = 1000\nbackoff_s = 0.2\n'
    capacity = "" if options.capacity is None else f"buffer_capacity = {options.capacity}"
    ahead = 2 if options.capacity is None else 2 * math.ceil(options.capacity / (BATCH_GROUPS * GROUP_SIZE))
    return f"""
[cluster]
kind = "ray"
machines = 3
devices_per_machine = 1

[model]
name = "local/tiny"
dtype = "float32"
device = "cpu"
max_model_len = 64

[bridge]
mode = "none"
every_steps = 2

[services.api]
kind = "rollout_api"
port = {api}
buffer = "{options.buffer}"
{capacity}
{often}
[services.vllm]
kind = "inference"
engine = "torch"
port = {server}
num_devices = 1
logprobs_mode = "processed"
threads = 1
needs = {{ api = "ready" }}
{often}
[services.env]
kind = "environment"
task = "sort6"
group_size = {GROUP_SIZE}
max_tokens = 8
max_batches_offpolicy = {ahead}
rollout_server_url = "http://127.0.0.1:{tap}"
needs = {{ api = "ready", vllm = "ready" }}
{often}
[services.trainer]
kind = "trainer"
num_devices = 1
training_steps = 1000000
batch_size = {BATCH_GROUPS * GROUP_SIZE}
gradient_accumulation_steps = 1
lr = 3e-4
optimizer = "adamw"
checkpoint_interval = 20
rollouts_groups = {BATCH_GROUPS}
rollouts_max_mb = 4096
threads = 1
needs = {{ api = "ready", vllm = "ready", env = "ready" }}
{often}
"""


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--buffer", choices=list(MOST_USES), default="once")
    parser.add_argument("--capacity", type=int, help="of a window, in sequences, so that it is full; 64 at least")
    parser.add_argument("--json", action="store_true", help="the summary as JSON on stdout, kills on stderr")
    return parser


if __name__ == "__main__":
    sys.exit(main())
