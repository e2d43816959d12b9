"""Cost and leftovers of our supervisor beside supervisord and honcho, on the same programs in the same run.

    python benchmarks/supervisor.py [--only NAME…] [--json]

NAMES: stopping, escapees, logging, idling, starting, adopting. Each figure stands beside its target and beside the
peers' figures, with the ratio of theirs to ours. The peers come from PyPI into a temporary environment;
process-compose takes part where it is in PATH. About three minutes on two cores; the machine should have nothing else
to do. Everything happens in one temporary folder, and whoever is left by whichever manager is ended by its identity.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from _managers import (
    GRACE_S,
    GrpoTui,
    Manager,
    Program,
    end_below,
    free_ports,
    gone_within,
    has_text,
    is_alive,
    is_open,
    makers,
    seen_below,
    wait_until,
)

from grpo_tui.client.socket import Daemon
from grpo_tui.supervisor.keeper.proc import Stat, read_stat

RUNS = 3
SETTLE_S = 2.0
"""A process that is not ended so long after the manager could know of it counts as left."""
IDLE_S = 20.0
LINES = 1_000_000
PEER_LINES = {"honcho": 100_000}
"""Honcho takes half a minute for a million; its figures are scaled up."""
US = "grpo-tui"

HOLDER = """
import signal, socket, sys
if "deaf" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
listening = socket.socket()
listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listening.bind(("127.0.0.1", int(sys.argv[1])))
listening.listen()
while True: signal.pause()
"""
FAMILY = """
import os, signal, subprocess, sys
holder, *ports = sys.argv[1:]
def argv(port): return [sys.executable, "-I", "-S", holder, port, "deaf"]
ways = [dict(), dict(process_group=0), dict(start_new_session=True), dict(start_new_session=True, env={})]
for port, way in zip(ports, ways): subprocess.Popen(argv(port), **way)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: os.execve(sys.executable, argv(ports[-1]), {})
    os._exit(0)
while True: signal.pause()
"""
"""A leader with children that ignore SIGTERM: in its group, in separate groups and sessions, with a cleaned
environment, forked twice."""
TALKER = """
import os, pathlib, sys, time
lines, folder, line = int(sys.argv[1]), pathlib.Path(sys.argv[2]), b"x" * 99 + b"\\n"
began = time.monotonic()
for _ in range(lines): os.write(1, line)
(folder / "took.part").write_text(str(time.monotonic() - began))
(folder / "took.part").rename(folder / "took")
time.sleep(600)
"""
MARKER = """
import pathlib, signal, sys, time
pathlib.Path(sys.argv[1]).write_text(repr(time.time()))
signal.pause()
"""
HEALTHY_LATER = """
import http.server, pathlib, sys, threading, time
healthy = threading.Event()
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if healthy.is_set() else 503)
        self.end_headers()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Page)
threading.Thread(target=server.serve_forever, daemon=True).start()
time.sleep(float(sys.argv[3]))
pathlib.Path(sys.argv[2]).write_text(repr(time.time()))
healthy.set()
time.sleep(600)
"""
Values = dict[str, float | None]
"""A figure of every manager by name; None where it does not apply or was not reached."""
PROGRAMS = {"holder": HOLDER, "family": FAMILY, "talker": TALKER, "marker": MARKER, "healthy_later": HEALTHY_LATER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure for every manager; None where it does not apply."""

    name: str
    unit: str
    values: Mapping[str, float | None]
    target: float | None = None
    is_met: bool | None = field(init=False)

    def __post_init__(self) -> None:
        own = self.values[US]
        met = None if self.target is None else own is not None and own <= self.target
        object.__setattr__(self, "is_met", met)

    def line(self) -> str:
        """One printed line."""
        target = "" if self.target is None else f"≤ {self.target:g} {'met' if self.is_met else 'MISSED'}"
        peers = [f"{name} {self._beside(value)}" for name, value in self.values.items() if name != US]
        return f"{self.name:<70}{_number(self.values[US]):>9} {self.unit:<8}{target:<14}{'   '.join(peers)}".rstrip()

    def _beside(self, value: float | None) -> str:
        own = self.values[US]
        ratio = f" ({value / own:.1f}×)" if value and own else ""
        return f"{_number(value)}{ratio}"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value == int(value) else f"{value:.3f}" if value < 10 else f"{value:.1f}"


@dataclass(slots=True)
class Bench:
    """The temporary folder, the managers, and cases that are cleaned up."""

    root: Path
    make: Mapping[str, Callable[[Path], Manager]]
    _num_cases: int = 0

    @contextmanager
    def running(
        self, name: str, build: Callable[[Path], Sequence[Program]], environment: Mapping[str, str] | None = None
    ) -> Iterator[tuple[Manager, list[Stat]]]:
        """A manager with its programs in a separate folder, its own processes first; always ended."""
        folder = self.folder()
        manager, managing = self.make[name](folder), list[Stat]()
        programs = build(folder)
        ports = [port for program in programs for port in program.ports]
        try:
            manager.start(programs, os.environ if environment is None else environment)
            if wait_until(lambda: all(map(is_open, ports))) is None:
                raise SystemExit(f"{name} did not start {[program.name for program in programs]}: see {folder}")
            managing += filter(None, map(read_stat, manager.pids()))
            yield manager, managing
        finally:
            end_below(folder, managing)

    def folder(self) -> Path:
        """A new folder with the programs in it."""
        self._num_cases += 1
        folder = self.root / f"c{self._num_cases}"
        folder.mkdir()
        for name, text in PROGRAMS.items():
            (folder / f"{name}.py").write_text(text)
        return folder


def python(folder: Path, program: str, *arguments: object) -> tuple[str, ...]:
    """The command line of one of the programs."""
    return (sys.executable, "-I", "-S", str(folder / f"{program}.py"), *map(str, arguments))


def holders(how: str, folder: Path) -> list[Program]:
    """Four programs, `polite` or `deaf`, each with a port."""
    ports = free_ports(4)
    return [
        Program(name=f"s{port}", argv=python(folder, "holder", port, how), ports=(port,))
        for port in ports
    ]  # fmt: skip


def family(folder: Path) -> list[Program]:
    """One program whose children escape in five ways."""
    ports = free_ports(5)
    return [Program(name="family", argv=python(folder, "family", folder / "holder.py", *ports), ports=ports)]


# --- the figures ---------------------------------------------------------------------------------------------------


def stopping(bench: Bench) -> Iterator[Figure]:
    """The whole stack down."""
    for how, runs, target_s in (("polite", RUNS, 1.0), ("deaf", 1, GRACE_S + 1.0)):
        seconds, left, ports_left = Values(), Values(), Values()
        for name in bench.make:
            took = list[float | None]()
            for _ in range(runs):
                with bench.running(name, partial(holders, how)) as (manager, managing):
                    ports = _ports_below(manager.folder)
                    began = time.monotonic()
                    manager.end()
                    took.append(None if any(map(_is_same, managing)) else time.monotonic() - began)
                    left[name] = float(len(_left(manager.folder, managing)))
                    ports_left[name] = float(sum(map(is_open, ports)))
            seconds[name] = _median(took)
        yield Figure(
            name=f"down of four {how} services, grace {GRACE_S:g} s", unit="s", values=seconds, target=target_s
        )
        yield Figure(name="  processes left", unit="", values=left, target=0)
        yield Figure(name="  ports left", unit="", values=ports_left, target=0)


def escapees(bench: Bench) -> Iterator[Figure]:
    """Five children that ignore SIGTERM and left their leader's group."""

    def kill_leader(manager: Manager, leader: Stat) -> None:
        os.kill(leader.pid, 9)

    def stop_leader(manager: Manager, leader: Stat) -> None:
        manager.stop("family")

    for words, end, target_s in (
        ("leader killed, to the last one gone", kill_leader, 0.2),
        ("it is told to stop it, with its grace", stop_leader, GRACE_S + 1.0),
    ):
        seconds, left = Values(), Values()
        for name in bench.make:
            with bench.running(name, family) as (manager, managing):
                everybody = [each for each in seen_below(manager.folder) if not _is_of(each, managing)]
                (leader,) = [each for each in everybody if _argv(each.pid)[3:4] == [f"{manager.folder}/family.py"]]
                began = time.monotonic()
                end(manager, leader)
                gone_after_s = gone_within(SETTLE_S, [each.pid for each in everybody])
                seconds[name] = None if gone_after_s is None else time.monotonic() - began
                left[name] = float(sum(is_alive(each.pid) for each in everybody))
        yield Figure(name=f"five escapees: {words}", unit="s", values=seconds, target=target_s)
        yield Figure(name="  processes left, each with its port", unit="", values=left, target=0)


def logging(bench: Bench) -> Iterator[Figure]:
    """A program that logs as fast as possible."""
    seconds, cpu = {name: list[float]() for name in ["file", *bench.make]}, {name: list[float]() for name in bench.make}
    for turn in range(RUNS):
        for name in (list(seconds), list(reversed(seconds)))[turn % 2]:
            if name == "file":
                seconds[name].append(_write_plainly(bench.folder()))
            elif name == US or turn == 0:
                took_s, cpu_s = _write_below(bench, name)
                seconds[name].append(took_s)
                cpu[name].append(cpu_s)
    plain_s = statistics.median(seconds["file"])
    times = {name: statistics.median(seconds[name]) / plain_s for name in bench.make}
    yield Figure(
        name=f"1,000,000 lines of 100 bytes, time over the {plain_s:.2f} s of a plain file",
        unit="×",
        values=times,
        target=1.1,
    )
    medians = {name: statistics.median(cpu[name]) for name in bench.make}
    yield Figure(name="  CPU seconds of the manager meanwhile", unit="s", values=medians, target=0.5)
    asked, typed = _answers_meanwhile(bench)
    yield Figure(name="  slowest answer to status on the socket meanwhile", unit="s", values=asked, target=0.2)
    yield Figure(name="  slowest status command meanwhile, with the start of Python", unit="s", values=typed)


def idling(bench: Bench) -> Iterator[Figure]:
    """Four idle services, all managers in the same seconds."""
    with _all_running(bench) as cases:
        before = {name: _usage(managing) for name, managing in cases.items()}
        switches = [_switches(each.pid) for each in cases[US][1:]]
        time.sleep(IDLE_S)
        used = {name: _usage(managing) - before[name] for name, managing in cases.items()}
        percent = {name: 100 * seconds / IDLE_S for name, seconds in used.items()}
        yield Figure(name=f"idle for {IDLE_S:g} s: CPU, percent of a core", unit="%", values=percent, target=0.3)
        switched = max(_switches(each.pid) - count for each, count in zip(cases[US][1:], switches, strict=True))
        yield Figure(name="  times that a keeper woke", unit="", values={US: float(switched)}, target=0)
        memory = {name: _rss_mb(managing[:1]) for name, managing in cases.items()}
        yield Figure(name="  resident memory of the main process", unit="MB", values=memory, target=60)
        beside = {name: max((_rss_mb([each]) for each in all_[1:]), default=None) for name, all_ in cases.items()}
        yield Figure(name="  and of what stands beside each program", unit="MB", values=beside, target=15)


def starting(bench: Bench) -> Iterator[Figure]:
    """From typing the command to the first process of a service."""
    for how, runs, target_s in (("cold: no compiled file", 1, None), ("warm", 2 * RUNS - 1, 0.7)):
        values = Values()
        for name in bench.make:
            took = list[float]()
            for _ in range(runs):
                environment = dict(os.environ)
                environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else our modules are never cached
                if how != "warm":
                    environment["PYTHONPYCACHEPREFIX"] = str(bench.folder() / "compiled")
                took.append(_first_spawn(bench, name, environment))
            values[name] = statistics.median(took)
        yield Figure(
            name=f"from typing the command to the first process ({how})", unit="s", values=values, target=target_s
        )
    delays = [_start_after_health(bench) for _ in range(RUNS)]
    after: Values = {name: statistics.median(delays) if name == US else None for name in bench.make}
    yield Figure(name="B needs A: from A's first 200 on /health to B's start", unit="s", values=after, target=0.3)


def adopting(bench: Bench) -> Iterator[Figure]:
    """kill -9 of the manager, and the same command typed again."""
    seconds: Values = dict.fromkeys(bench.make)
    unkept: Values = {}
    for name in bench.make:
        with bench.running(name, partial(holders, "polite")) as (manager, managing):
            services = {each.pid for each in seen_below(manager.folder) if not _is_of(each, managing)}
            os.kill(managing[0].pid, 9)
            gone_within(SETTLE_S, [managing[0].pid])
            if isinstance(manager, GrpoTui):
                began = time.monotonic()
                manager.command("up", "--profile", "p.toml", "--detach")
                adopted = {service["pid"] for service in json.loads(manager.command("status", "--json"))["services"]}
                seconds[name] = time.monotonic() - began
                managing += filter(None, map(read_stat, manager.pids()))
                unkept[name] = float(len(services - adopted))
            else:
                gone_within(SETTLE_S, services)
                unkept[name] = float(sum(map(is_alive, services)))
    yield Figure(name="manager killed: `up`, and `status` that shows all adopted", unit="s", values=seconds)
    yield Figure(name="  services that go on and nobody keeps", unit="", values=unkept, target=0)


FIGURES = {each.__name__: each for each in (stopping, escapees, logging, idling, starting, adopting)}


# --- how they are measured -----------------------------------------------------------------------------------------


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def _ports_below(folder: Path) -> list[int]:
    words = [word for each in seen_below(folder) for word in _argv(each.pid)]
    return sorted({int(word) for word in words if word.isdigit() and is_open(int(word))})


def _left(folder: Path, managing: Sequence[Stat]) -> list[Stat]:
    """Who is still there of a case that was ended, the manager included."""
    found = {each.pid: each for each in seen_below(folder)}
    found |= {each.pid: each for each in managing if _is_same(each)}
    return list(found.values())


def _argv(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def _is_of(each: Stat, managing: Sequence[Stat]) -> bool:
    return any(each.pid == other.pid for other in managing)


def _is_same(each: Stat) -> bool:
    now = read_stat(each.pid)
    return now is not None and not now.is_dead and now.start_ticks == each.start_ticks


def _talker(lines: int, folder: Path) -> list[Program]:
    return [Program(name="talker", argv=python(folder, "talker", lines, folder), settings="log_limit_mb = 1000")]


def _took(folder: Path) -> float:
    if wait_until((folder / "took").exists) is None:
        raise SystemExit(f"the talker in {folder} did not come to its end")
    return float((folder / "took").read_text())


def _write_plainly(folder: Path) -> float:
    with (folder / "plain.log").open("wb") as log:
        talker = subprocess.Popen(python(folder, "talker", LINES, folder), stdout=log)
    try:
        return _took(folder)
    finally:
        talker.kill()
        talker.wait()
        (folder / "plain.log").unlink()


def _write_below(bench: Bench, name: str) -> tuple[float, float]:
    """Seconds for all lines, and CPU seconds of the manager, both for `LINES`."""
    lines = PEER_LINES.get(name, LINES)
    with bench.running(name, partial(_talker, lines)) as (manager, managing):
        before_s = _usage(managing)
        took_s = _took(manager.folder)
        cpu_s = _usage(managing) - before_s
        for log in manager.folder.rglob("*.log"):
            log.write_bytes(b"")
    return took_s * LINES / lines, cpu_s * LINES / lines


def _answers_meanwhile(bench: Bench) -> tuple[Values, Values]:
    """The slowest answer on our socket, and the slowest of each status command, while a program writes."""
    asked: Values = dict.fromkeys(bench.make)
    typed: Values = dict.fromkeys(bench.make)
    for name in bench.make:
        lines = PEER_LINES.get(name, 2 * LINES)
        with bench.running(name, partial(_talker, lines)) as (manager, _):
            command = manager.status_command()
            if command is None:
                continue
            environment = {**os.environ, "XDG_RUNTIME_DIR": str(manager.folder)}
            answers, commands = list[float](), list[float]()
            while not (manager.folder / "took").exists() or not commands:
                if isinstance(manager, GrpoTui):
                    answers.append(asyncio.run(_ask(manager.run_folder())))
                began = time.monotonic()
                subprocess.run(command, cwd=manager.folder, env=environment, stdout=subprocess.DEVNULL, check=True)
                commands.append(time.monotonic() - began)
            asked[name], typed[name] = max(answers, default=None), max(commands)
            for log in manager.folder.rglob("*.log"):
                log.write_bytes(b"")
    return asked, typed


async def _ask(run_folder: Path) -> float:
    daemon = Daemon(run_folder)
    began = time.monotonic()
    await daemon.command("status")
    return time.monotonic() - began


@contextmanager
def _all_running(bench: Bench) -> Iterator[dict[str, list[Stat]]]:
    """Every manager with four holders, past the work of their starts."""
    with ExitStack() as stack:
        cases = {name: stack.enter_context(bench.running(name, partial(holders, "polite")))[1] for name in bench.make}
        time.sleep(2.0)
        yield cases


def _usage(managing: Sequence[Stat]) -> float:
    """CPU seconds of processes so far, by the clock that Linux keeps for each: /proc counts in steps of 0.01 s."""
    return sum(time.clock_gettime((~each.pid << 3) | 2) for each in managing)


def _rss_mb(managing: Sequence[Stat]) -> float:
    now = [read_stat(each.pid) for each in managing]
    return sum(each.rss_pages for each in now if each is not None) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _switches(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


def _first_spawn(bench: Bench, name: str, environment: Mapping[str, str]) -> float:
    marks = list[Path]()

    def build(folder: Path) -> list[Program]:
        marks.append(folder / "started")
        return [Program(name="marker", argv=python(folder, "marker", folder / "started"))]

    began = time.time()
    with bench.running(name, build, environment):
        wait_until(lambda: has_text(marks[0]))
        return float(marks[0].read_text()) - began


def _start_after_health(bench: Bench) -> float:
    marks = list[Path]()

    def build(folder: Path) -> list[Program]:
        (port,) = free_ports(1)
        marks.extend((folder / "healthy", folder / "started"))
        ready = f'ready = {{ http = "http://127.0.0.1:{port}/health" }}'
        return [
            Program(name="a", argv=python(folder, "healthy_later", port, marks[0], 1.5), ports=(port,), settings=ready),
            Program(name="b", argv=python(folder, "marker", marks[1]), settings='needs = ["a"]'),
        ]

    with bench.running(US, build):
        wait_until(lambda: all(map(has_text, marks)))
        healthy_at, started_at = (float(mark.read_text()) for mark in marks)
        return started_at - healthy_at


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(FIGURES), default=list(FIGURES), metavar="NAME")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that its folder goes, and whoever runs in it
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        print(f"the machine is busy (load {load:.1f} on {cores} cores): times will be too long", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        bench = Bench(Path(name), makers(Path(name)))
        for only in arguments.only:
            if not arguments.json:
                print(f"{only}: {FIGURES[only].__doc__}")
            for figure in FIGURES[only](bench):
                print(json.dumps(asdict(figure)) if arguments.json else f"  {figure.line()}", flush=True)


if __name__ == "__main__":
    main()
