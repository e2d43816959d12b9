"""Cost and latency of the screen: the real program in a pseudo-terminal, beside targets and peers.

    python benchmarks/screen.py [--only NAME…] [--json]

NAMES: attaching, keys, far, idling, gpus, remembering, logs. pyte says when a key's change stands on the terminal; the
time that counts is when the bytes that made it came. Peers in the same run: bpytop and toolong (a log viewer on our
library) from PyPI in a temporary environment, and process-compose where it is in PATH. About ten minutes on two cores;
the machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "system"))

from _screen_gpus import busy_gpus
from _screen_link import AWAY, FAR_KEYS, HELD_KEYS, HELD_S, SLOW_LINE, FarTerminal, held, pressed, recorded_run, settled
from _screen_logs import measure as measure_logs
from _screen_runs import FLOOD, GRPO_TUI, QUIET, LiveRun, environment, live_run, long_run, told_by_a_daemon
from terminal import DOWN, UP, Terminal

SIZE = (120, 36)
ATTACHES = 15
PRESSES = 120
IDLE_S = 30.0
LIMIT_S = 30.0
QUIET_S = 0.004
"""A frame is complete when no byte follows for so long; only then is it parsed, which takes longer."""
BETWEEN_KEYS_S = (0.05, 0.11, 0.17)
"""Pauses between keys of a fast user, not aligned with any timer of the screen."""
PEERS = ("bpytop==1.0.68", "toolong==1.5.0")
KEYS = "q detach"
FOUR = dict.fromkeys(("api", "vllm", "env", "trainer"), QUIET)
FLOODED = {**FOUR, "trainer": FLOOD}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure, its target and the peers' figures."""

    name: str
    unit: str
    value: float
    target: float | None = None
    is_more_better: bool = False
    peers: Mapping[str, float] = field(default_factory=dict)
    is_met: bool | None = field(init=False)

    def __post_init__(self) -> None:
        met = None
        if self.target is not None:
            met = self.value >= self.target if self.is_more_better else self.value <= self.target
        object.__setattr__(self, "is_met", met)

    def line(self) -> str:
        """One printed line; the ratio is target over figure."""
        target = ""
        if self.target is not None:
            ratio = self.value / self.target if self.is_more_better else self.target / max(self.value, 1e-9)
            sign = "≥" if self.is_more_better else "≤"
            target = f"{sign} {self.target:g} {'met' if self.is_met else 'MISSED'} ({ratio:.1f}×)"
        peers = "   ".join(f"{name} {_number(value)}" for name, value in self.peers.items())
        return f"{self.name:<66}{_number(self.value):>9} {self.unit:<6}{target:<24}{peers}".rstrip()


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A temporary folder and the available programs of peers."""

    root: Path
    peers: Path | None

    def peer(self, name: str) -> str | None:
        """The path of a peer's program, if it is there."""
        path = self.peers / name if self.peers else None
        return str(path) if path is not None and path.exists() else None


@contextmanager
def opened(argv: Sequence[str], folder: Path, variables: Mapping[str, str]) -> Iterator[Terminal]:
    """A program on a terminal, ended afterwards."""
    terminal = Terminal(argv, cwd=folder, environment=variables, columns=SIZE[0], rows=SIZE[1])
    try:
        yield terminal
    finally:
        terminal.close()


def attached(run: LiveRun) -> Terminal:
    """Our screen on a run."""
    return Terminal(
        [*GRPO_TUI, "attach"], cwd=run.folder, environment=run.environment, columns=SIZE[0], rows=SIZE[1]
    )  # fmt: skip


def came_at(terminal: Terminal, is_so: Callable[[], bool]) -> float:
    """Arrival time of the bytes that fulfil the condition; frames are parsed when complete."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        taken = list[tuple[float, bytes]]()
        while data := terminal.take(QUIET_S if taken else 0.05):
            taken.append((terminal.last_heard_at, data))
        for at, data in taken:
            terminal.put(data)
            if is_so():
                for _, rest in taken[taken.index((at, data)) + 1 :]:
                    terminal.put(rest)
                return at
        if not taken and is_so():
            return terminal.last_heard_at
    raise SystemExit(f"it never came true within {LIMIT_S:g} s; the screen says:\n{terminal.text}")


def is_complete(terminal: Terminal, names: Sequence[str]) -> bool:
    """Whether header, every service with its state, and the keys are shown."""
    rows = [row.lstrip(" ▌").split() for row in terminal.rows]
    ready = {row[0] for row in rows if len(row) > 2 and row[2] == "ready"}
    return "running" in terminal.rows[0] and ready >= set(names) and KEYS in terminal.text


# --- the figures ---------------------------------------------------------------------------------------------------


def attaching(bench: Bench) -> Iterator[Figure]:
    """From exec to the first frame with header, services and keys."""
    with live_run(bench.root / "attaching", FOUR) as run:
        took, cpu, num_bytes = list[float](), list[float](), list[float]()
        for turn in range(ATTACHES + 1):
            terminal = attached(run)
            at = came_at(terminal, lambda: is_complete(terminal, list(FOUR)))  # noqa: B023
            if turn:  # the first one compiles
                took.append(at - terminal.started_at)
                cpu.append(_cpu_s(terminal.process.pid))
                num_bytes.append(len(terminal.written) / 1000)
            terminal.press("q")
            terminal.ends()
            terminal.close()
        peers = {"python + import textual": _import_s()}
        toolong = bench.peer("tl")
        if toolong:
            log = next((run.folder / "logs").glob("*/trainer.log"))
            peers["toolong on one log"] = statistics.median(_toolong_opens_s(toolong, log) for _ in range(5))
    yield Figure(name="attach: to the first complete frame", unit="s", value=_median(took), target=0.8, peers=peers)
    yield Figure(name="  the slowest of 15", unit="s", value=max(took))
    yield Figure(name="  CPU until then", unit="s", value=_median(cpu))
    yield Figure(name="  written to the terminal until then", unit="kB", value=_median(num_bytes))


def keys(bench: Bench) -> Iterator[Figure]:
    """From a key to its change on the terminal."""
    for words, services in (("", FOUR), (" under 200,000 lines/s into its log", FLOODED)):
        with live_run(bench.root / f"keys{len(services)}{len(words)}", services) as run:
            terminal = attached(run)
            came_at(terminal, lambda: is_complete(terminal, list(services)))  # noqa: B023
            before, began = _lines_written(run), time.monotonic()
            took = [1000 * each for each in _pressed(terminal, _ways(terminal, is_flooded=bool(words)))]
            rate = (_lines_written(run) - before) / (time.monotonic() - began)
            terminal.press("q")
            terminal.ends()
            terminal.close()
        peers = {}
        if words and (toolong := bench.peer("tl")):
            with live_run(bench.root / "toolong", FLOODED) as run:
                log = next((run.folder / "logs").glob("*/trainer.log"))
                peers["toolong"] = _toolong_key_ms(toolong, log)
        yield Figure(name=f"key to screen{words}, p50", unit="ms", value=_median(took))
        yield Figure(name=f"key to screen{words}, p95", unit="ms", value=_p95(took), target=50, peers=peers)
        if words:
            yield Figure(name="  lines a second that came meanwhile", unit="", value=rate)


def idling(bench: Bench) -> Iterator[Figure]:
    """Four idle services, sampled every second; all programs in the same seconds."""
    with live_run(bench.root / "idling", FOUR) as run:
        log = next((run.folder / "logs").glob("*/trainer.log"))
        watched = {"grpo-tui": attached(run)}
        came_at(watched["grpo-tui"], lambda: is_complete(watched["grpo-tui"], list(FOUR)))
        for name, argv in (("bpytop", ()), ("tl", (str(log),))):
            if path := bench.peer(name):
                watched[name] = Terminal(
                    [path, *argv], cwd=run.folder, environment=run.environment, columns=SIZE[0], rows=SIZE[1]
                )
        if compose := shutil.which("process-compose"):
            watched["process-compose"] = _process_compose(compose, bench.root / "compose")
        _listen_for(5.0, watched.values())
        before = {name: (_cpu_s(each.process.pid), len(each.written)) for name, each in watched.items()}
        _listen_for(IDLE_S, watched.values())
        percent = {name: 100 * (_cpu_s(each.process.pid) - before[name][0]) / IDLE_S for name, each in watched.items()}
        rate = {name: (len(each.written) - before[name][1]) / IDLE_S / 1000 for name, each in watched.items()}
        memory = {name: _rss_mb(each.process.pid) for name, each in watched.items()}
        for each in watched.values():
            each.close()
    for name, unit, values, target in (
        (f"idle for {IDLE_S:g} s: CPU, percent of a core", "%", percent, 2.0),
        ("  written to the terminal a second", "kB", rate, 4.0),
        ("  resident memory", "MB", memory, None),
    ):
        own = values.pop("grpo-tui")
        yield Figure(name=name, unit=unit, value=own, target=target, peers=_named(values))


def gpus(bench: Bench) -> Iterator[Figure]:
    """The same while GPUs are busy: a fake supervisor sends new figures every second."""
    for num in (1, 8):
        root = bench.root / f"gpus{num}"
        with busy_gpus(root / "logs" / "busy", bench.root / f"gpus{num}.sock", num):
            for place, key in (("run", "1"), ("gpus", "2")):
                with opened([*GRPO_TUI, "attach", "busy"], root, environment(root)) as terminal:
                    came_at(terminal, lambda: is_complete(terminal, ["trainer"]))
                    terminal.press(key)
                    _listen_for(5.0, [terminal])
                    before, cpu_s = len(terminal.written), _cpu_s(terminal.process.pid)
                    _listen_for(IDLE_S, [terminal])
                    percent = 100 * (_cpu_s(terminal.process.pid) - cpu_s) / IDLE_S
                    rate = (len(terminal.written) - before) / IDLE_S / 1000
                name = f"{num} busy GPU{'s' if num > 1 else ''}, screen {place}"
                yield Figure(name=f"{name}: CPU, percent of a core", unit="%", value=percent, target=2.0)
                yield Figure(name="  written to the terminal a second", unit="kB", value=rate, target=4.0)


def far(bench: Bench) -> Iterator[Figure]:
    """A recorded run over a connection with 100 ms delay each way; those 200 ms are subtracted."""
    argv = [*GRPO_TUI, "attach"]
    for words, rate in (("", None), (", 64 kB/s", SLOW_LINE)):
        root = recorded_run(bench.root / f"far{rate}")
        terminal = FarTerminal(
            argv, cwd=root, environment=environment(root), columns=SIZE[0], rows=SIZE[1], bytes_a_second=rate
        )
        try:
            came_at(terminal, lambda: KEYS in terminal.text)  # noqa: B023
            settled(terminal)
            for name, opening, others in FAR_KEYS:
                pressed(terminal, opening)  # its first opening reads files
                pressed(terminal, AWAY[opening])
                costs = [pressed(terminal, opening), *(pressed(terminal, key) for key in others)]
                late, size = [1000 * each.late_s for each in costs], [each.num_bytes / 1000 for each in costs]
                yield Figure(name=f"line of 200 ms{words}: {name} opened, whole after", unit="ms", value=late[0])
                yield Figure(name="  written for that", unit="kB", value=size[0])
                yield Figure(name="  another key there, the median: whole after", unit="ms", value=_median(late[1:]))
                yield Figure(name="  written for that", unit="kB", value=_median(size[1:]))
            for name, opening, key in HELD_KEYS:
                for each in ("t", "t", opening):  # from the end of the run
                    pressed(terminal, each)
                cost = held(terminal, key)
                yield Figure(
                    name=f"line of 200 ms{words}: {name} held 5 s, whole after", unit="ms", value=1000 * cost.late_s
                )
                yield Figure(name="  written a second", unit="kB", value=cost.num_bytes / HELD_S / 1000)
        finally:
            terminal.close()


def remembering(bench: Bench) -> Iterator[Figure]:
    """An hour of a recorded run (its lines repeated), sent in half a minute; then every screen is opened."""
    root = bench.root / "remembering"
    run = long_run(root)
    socket = bench.root / "hour.sock"
    with told_by_a_daemon(run, socket) as is_told:
        argv = [*GRPO_TUI, "attach", run.folder.name]
        with opened(argv, root, environment(root)) as terminal:
            came_at(terminal, lambda: KEYS in terminal.text)
            deadline = time.monotonic() + 300
            peak_mb = 0.0
            while not is_told.is_set() and time.monotonic() < deadline:
                terminal.listen(0.1)
                peak_mb = max(peak_mb, _rss_mb(terminal.process.pid))
            came_at(terminal, lambda: f"step {run.last_step:,}" in terminal.rows[0])
            told_mb = _rss_mb(terminal.process.pid)
            for key in "23456123456":
                terminal.press(key)
                _listen_for(1.0, [terminal])
            seen_mb = _rss_mb(terminal.process.pid)
            assert terminal.process.poll() is None, terminal.text
            terminal.press("1")
            terminal.press("q")
            terminal.ends()
    size = sum(map(len, itertools.chain(run.events, *run.files().values()))) / 1e6
    name = f"memory after an hour of a run: {len(run.events):,} events, {run.last_step:,} steps, {size:.0f} MB of files"
    yield Figure(name=name, unit="MB", value=told_mb, target=150)
    yield Figure(name="  when every screen was open twice", unit="MB", value=seen_mb, target=150)
    yield Figure(name="  at its highest", unit="MB", value=max(peak_mb, told_mb, seen_mb))


def logs(bench: Bench) -> Iterator[Figure]:
    """A log of two gigabytes, opened at its tail and searched, beside tail and grep."""
    for row in measure_logs():
        is_speed = row.unit.endswith("/s")
        yield Figure(name=row.name, unit=row.unit, value=row.value, target=row.target, is_more_better=is_speed)


FIGURES: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "attaching": attaching,
    "keys": keys,
    "far": far,
    "idling": idling,
    "gpus": gpus,
    "remembering": remembering,
    "logs": logs,
}


# --- keys ------------------------------------------------------------------------------------------------------------


def _ways(terminal: Terminal, *, is_flooded: bool) -> list[tuple[str, Callable[[], bool]]]:
    """Keys and their expected frames; they form a cycle."""

    def is_log_of(name: str) -> Callable[[], bool]:
        return lambda: any(f"▌ {name}" in row for row in terminal.rows) and f"log {name}" in terminal.text

    def has_table() -> bool:
        return any(row.split()[:2] == ["service", "state"] for row in terminal.rows)

    stay = [
        ("z", lambda: not has_table()),
        ("f", lambda: "held" in terminal.text),
        ("z", has_table),
        ("f", lambda: "following" in terminal.text),
    ]
    if is_flooded:  # the flooded log stays shown
        return stay
    return [
        *stay,
        (UP, is_log_of("env")),
        (UP, is_log_of("vllm")),
        (DOWN, is_log_of("env")),
        (DOWN, is_log_of("trainer")),
    ]


def _pressed(terminal: Terminal, ways: Sequence[tuple[str, Callable[[], bool]]]) -> list[float]:
    """Seconds from each key to its change."""
    took = list[float]()
    pauses = itertools.cycle(BETWEEN_KEYS_S)
    for key, is_so in itertools.islice(itertools.cycle(ways), PRESSES):
        _listen_for(next(pauses), [terminal])
        pressed_at = time.monotonic()
        terminal.press(key)
        took.append(came_at(terminal, is_so) - pressed_at)
    return took


def _lines_written(run: LiveRun) -> int:
    """The number in the newest line of the flooded log; 0 without a flood."""
    log = next((run.folder / "logs").glob("*/trainer.log"))
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        newest = [line.split() for line in file.read().splitlines()[1:-1]]
    numbers = [int(words[2]) for words in newest if words[:2] == [b"INFO", b"step"]]
    return numbers[-1] if numbers else 0


# --- peers -----------------------------------------------------------------------------------------------------------


def _toolong_opens_s(program: str, log: Path) -> float:
    with opened([program, str(log)], log.parent, environment(log.parent)) as terminal:
        return came_at(terminal, lambda: "attempt 1" in terminal.text) - terminal.started_at


def _toolong_key_ms(program: str, log: Path) -> float:
    """p95 of showing and hiding its line numbers over a flooded log."""
    took = list[float]()
    with opened([program, str(log)], log.parent, environment(log.parent)) as terminal:
        came_at(terminal, lambda: "INFO step" in terminal.text)
        _listen_for(2.0, [terminal])
        for turn in range(40):
            _listen_for(BETWEEN_KEYS_S[turn % 3], [terminal])
            pressed_at = time.monotonic()
            terminal.press("\x0c")
            came = came_at(terminal, lambda: (terminal.rows[3].find("INFO") > 2) is (turn % 2 == 0))  # noqa: B023
            took.append(1000 * (came - pressed_at))
    return _p95(took)


def _process_compose(program: str, folder: Path) -> Terminal:
    folder.mkdir()
    processes = {name: {"command": "sleep 1000000"} for name in FOUR}
    (folder / "process-compose.yaml").write_text(json.dumps({"version": "0.5", "processes": processes}))
    argv = [program, "-U", "-u", str(folder / "pc.sock"), "up", "-f", str(folder / "process-compose.yaml")]
    return Terminal(argv, cwd=folder, environment=os.environ, columns=SIZE[0], rows=SIZE[1])


def _import_s() -> float:
    """A Python that only imports the library: the lower bound of any program that uses it."""
    argv = [sys.executable, "-P", "-c", "import textual.app, textual.widget, textual.screen"]

    def once() -> float:
        began = time.monotonic()
        subprocess.run(argv, check=True)
        return time.monotonic() - began

    return statistics.median(once() for _ in range(5))


def _named(values: Mapping[str, float]) -> dict[str, float]:
    return {{"tl": "toolong"}.get(name, name): value for name, value in values.items()}


# --- processes -------------------------------------------------------------------------------------------------------


def _listen_for(seconds: float, terminals: Iterator[Terminal] | Sequence[Terminal]) -> None:
    """Read output for so long, so that no writer blocks."""
    everybody = list(terminals)
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        for terminal in everybody:
            data = terminal.take(min(left, 0.05) / len(everybody))
            if len(everybody) == 1:
                terminal.put(data)


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _rss_mb(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / 1e6


_median = statistics.median


def _p95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(FIGURES), default=list(FIGURES), metavar="NAME")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that its folder and processes are removed
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        print(f"the machine is busy (load {load:.1f} on {cores} cores): times will be too long", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        bench = Bench(root=Path(name), peers=_install_peers(Path(name) / "peers"))
        for only in arguments.only:
            if not arguments.json:
                print(f"{only}: {FIGURES[only].__doc__}")
            for figure in FIGURES[only](bench):
                print(json.dumps(asdict(figure)) if arguments.json else f"  {figure.line()}", flush=True)


def _install_peers(home: Path) -> Path | None:
    """A virtual environment with the peers of PyPI; None, with a message, if it cannot be installed."""
    if shutil.which("process-compose") is None:
        print("process-compose is not in PATH: it takes no part", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install", "-qq", *PEERS]
    if subprocess.run(pip, check=False, stdout=sys.stderr).returncode:
        print(f"pip cannot install {' '.join(PEERS)}: they take no part", file=sys.stderr)
        return None
    return home / "bin"


if __name__ == "__main__":
    main()
