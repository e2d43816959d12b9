"""Cost and latency of the board with fifty runs, two of them live, in a pseudo-terminal, beside targets.

    python benchmarks/board.py [--json]

48 runs are copies of a recorded one, nine of them points of a sweep; two are live, with a step each second. pyte says
when a change stands on the terminal; the time that counts is when the bytes that made it came. Two minutes; the machine
should have nothing else to do, and no other run of this user.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "system"))

from _screen_runs import GRPO_TUI, RECORDED, environment
from board_runs import RATES, SEEDS, make_runs, make_sweep
from screen import BETWEEN_KEYS_S, IDLE_S, Figure, _cpu_s, _import_s, _listen_for, _median, _p95, came_at, opened
from terminal import DOWN, UP, Terminal

NUM_RUNS, NUM_LIVE = 50, 2
OPENINGS = 9
PRESSES = 120
RETURNS = 8
STEPS = """
import json, os, time
print("up", flush=True)
path = os.path.join(os.environ["GRPO_TUI_RUN_FOLDER"], "metrics.jsonl")
for step in range(1, 10**6):
    metrics = {f"of/{name}": step / 7 for name in range(40)} | {"reward/mean": step % 50 / 50}
    with open(path, "a") as file:
        file.write(json.dumps({"time": time.time(), "step": step, "policy_version": step, "metrics": metrics}) + "\\n")
    time.sleep(1.0)
"""


@contextmanager
def fifty_runs(root: Path) -> Iterator[Mapping[str, str]]:
    """The folder of all runs below `root`; yields the environment of programs that look at it."""
    variables = {**environment(root), "TMPDIR": str(root)}
    with tarfile.open(RECORDED) as tar:
        tar.extractall(root / "recorded", filter="data")
    (recorded,) = (root / "recorded").iterdir()
    make_sweep(recorded, root / "logs")
    list(make_runs(recorded, root / "logs", NUM_RUNS - NUM_LIVE - SEEDS * len(RATES)))
    argv = [sys.executable, "-I", "-S", "-c", STEPS]
    (root / "p.toml").write_text(f'[services.trainer]\nkind = "command"\nargv = {json.dumps(argv)}\n')

    def command(*words: str) -> None:
        subprocess.run([*GRPO_TUI, *words], cwd=root, env=variables, check=True, capture_output=True)

    try:
        for how in ((), ("--new",)):
            command("up", "--profile", "p.toml", "--detach", "--wait", "ready", *how)
        yield variables
    finally:
        command("down", "--all")


def is_whole(terminal: Terminal) -> bool:
    """Whether every part of the board is on the terminal."""
    return " live, " in terminal.rows[0] and "▌" in terminal.text and "q detach" in terminal.rows[-1]


def figures(root: Path) -> Iterator[Figure]:
    """Measure."""
    with fifty_runs(root) as variables:
        took, cpu = list[float](), list[float]()
        for turn in range(OPENINGS + 1):
            with opened(GRPO_TUI, root, variables) as terminal:
                at = came_at(terminal, lambda: is_whole(terminal))
                if turn:  # the first one compiles
                    took.append(at - terminal.started_at)
                    cpu.append(_cpu_s(terminal.process.pid))
        peers = {"python + import textual": _import_s()}
        yield Figure(name="opened: every run read and drawn", unit="s", value=_median(took), target=1.0, peers=peers)
        yield Figure(name=f"  the slowest of {OPENINGS}", unit="s", value=max(took))
        yield Figure(name="  CPU until then", unit="s", value=_median(cpu))
        with opened(GRPO_TUI, root, variables) as terminal:
            came_at(terminal, lambda: is_whole(terminal))
            _listen_for(5.0, [terminal])
            before, num_bytes = _cpu_s(terminal.process.pid), len(terminal.written)
            _listen_for(IDLE_S, [terminal])
            percent = 100 * (_cpu_s(terminal.process.pid) - before) / IDLE_S
            rate = (len(terminal.written) - num_bytes) / IDLE_S / 1000
            yield Figure(name=f"idle for {IDLE_S:g} s: CPU, percent of a core", unit="%", value=percent, target=2.0)
            yield Figure(name="  written to the terminal a second", unit="kB", value=rate)
            before = _cpu_s(terminal.process.pid)
            keys = [1000 * each for each in pressed(terminal)]
            cpu_ms = 1000 * (_cpu_s(terminal.process.pid) - before) / PRESSES
            yield Figure(name="key to screen, p50", unit="ms", value=_median(keys))
            yield Figure(name="key to screen, p95", unit="ms", value=_p95(keys), target=50.0)
            yield Figure(name="  CPU a key, with all else meanwhile", unit="ms", value=cpu_ms)
            there, back = returned(terminal)
            yield Figure(name="enter to the screen of a run, whole", unit="s", value=_median(there))
            yield Figure(name="q to the board, whole", unit="s", value=_median(back))


def pressed(terminal: Terminal) -> list[float]:
    """Seconds from keys that select, mark, sort and unfold to their change."""

    def row() -> str:
        return next((text for text in terminal.rows if text.startswith(" ▌")), "")

    took = list[float]()
    pauses = itertools.cycle(BETWEEN_KEYS_S)
    for key in itertools.islice(itertools.cycle([*[DOWN] * 5, *[UP] * 5, *["O"] * 5]), PRESSES):
        _listen_for(next(pauses), [terminal])
        before, header = row(), terminal.rows[0]
        pressed_at = time.monotonic()
        terminal.press(key)
        is_move = key in (DOWN, UP)
        came = came_at(terminal, lambda: row() != before if is_move else terminal.rows[0] != header)  # noqa: B023
        took.append(came - pressed_at)
    return took


def returned(terminal: Terminal) -> tuple[list[float], list[float]]:
    """Seconds from the board to a run that has ended, and back."""
    there, back = list[float](), list[float]()
    for key in ("/", "tiny-cpu-1123-0000", "\r"):  # the copies alone
        terminal.press(key)
        _listen_for(0.5, [terminal])
    for _ in range(RETURNS):
        _listen_for(0.5, [terminal])
        began = time.monotonic()
        terminal.press("\r")
        there.append(came_at(terminal, lambda: "q board" in terminal.rows[-1]) - began)
        _listen_for(0.5, [terminal])
        began = time.monotonic()
        terminal.press("q")
        back.append(came_at(terminal, lambda: is_whole(terminal)) - began)
    return there, back


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        print(f"the machine is busy (load {load:.1f} on {cores} cores): times will be too long", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        for figure in figures(Path(name)):
            print(json.dumps(asdict(figure)) if arguments.json else figure.line(), flush=True)


if __name__ == "__main__":
    main()
