"""The log screen's figures: a log of 2 GB opened at its tail, and searched, beside tail and grep on the same file.

`benchmarks/screen.py` calls `measure`. The file is in the page cache for all of them: the disk is not what is measured.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from grpo_tui.view.logs.reader import LogFile, LogReader, MatchCount
from grpo_tui.view.logs.search import Level, LineTest, line_tests

LOG_BYTES = 2_000_000_000
NUM_LINES = 100
"""More than a screen has."""
ROUNDS = 5
OPEN_TARGET_S, SEARCH_TARGET_MB_S = 0.3, 500.0
NEEDLE = "Device-side assert"
"""It occurs once in the file, near its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure; `target` is None for a peer or without a target."""

    name: str
    value: float
    unit: str
    target: float | None = None


def measure(num_bytes: int = LOG_BYTES) -> list[Row]:
    """Write a log, open and search it; the fastest of some rounds each, since other load only adds time."""
    folder = Path(tempfile.mkdtemp(prefix="grpo-screen-logs-"))
    try:
        log = folder / "trainer.log"
        write_log(log, num_bytes)
        return [*opening(log), *searching(log)]
    finally:
        shutil.rmtree(folder)


def write_log(path: Path, num_bytes: int) -> None:
    """Lines as the trainer writes them, with the needle in the last but one."""
    lines = (
        f"{number // 3600 % 24:02}:{number // 60 % 60:02}:{number % 60:02} INFO grpo_engine.train.loop: step {number} "
        f"loss -0.02{number % 10} reward 0.87 grad_norm 0.41 tokens/s 11873 sync 0.004s ratio 1.00{number % 7}\n"
        for number in range(40_000)
    )
    block = "".join(lines).encode()
    with path.open("wb") as file:
        while file.tell() < num_bytes:
            file.write(block)
        file.write(f"RuntimeError: CUDA error: {NEEDLE} triggered\nlast line\n".encode())


def opening(log: Path) -> list[Row]:
    """The last lines, by a new reader."""
    return [
        Row(name="open at the tail", value=best_s(lambda: open_at_tail(log)), unit="s", target=OPEN_TARGET_S),
        *peer("tail", ["tail", "-n", str(NUM_LINES), str(log)], "s"),
    ]


def open_at_tail(log: Path) -> None:
    """As the screen does: file size, start of the last line, the lines above."""
    reader = LogReader([LogFile(name=log.stem, path=log)])
    ends = reader.extent().ends
    found = reader.before(reader.last_lines_begin(ends), NUM_LINES)
    if len(found.lines) != NUM_LINES:
        raise RuntimeError(f"{len(found.lines)} lines read from the end of {log}, not {NUM_LINES}")


def searching(log: Path) -> list[Row]:
    """Search the whole file for a text that occurs once."""
    size = log.stat().st_size
    rows: list[Row] = []
    for name, pattern, target in (
        ("search plain text", NEEDLE, SEARCH_TARGET_MB_S),
        ("search plain text, case-blind", NEEDLE.lower(), SEARCH_TARGET_MB_S),
        ("search a regular expression", r"assert\s+triggered", None),
    ):
        seconds = best_s(partial(count, log, line_tests(Level.ALL, pattern)))
        rows.append(Row(name=name, value=size / seconds / 1e6, unit="MB/s", target=target))
    return [*rows, *peer("grep -cF", ["grep", "-c", "-F", NEEDLE, str(log)], "MB/s", size)]


def count(log: Path, tests: tuple[LineTest, ...]) -> None:
    """Count the matches in all of it, in the pieces in which the screen does."""
    reader = LogReader([LogFile(name=log.stem, path=log)])
    extent = reader.extent()
    counter = MatchCount(reader, tests, extent)
    while not counter.go_on(extent.ends):
        pass
    if counter.num_matches != 1:
        raise RuntimeError(f"{counter.num_matches} matches found in {log}, not 1")


def peer(name: str, command: list[str], unit: str, size: int | None = None) -> list[Row]:
    """The same by an installed program, if present."""
    if shutil.which(command[0]) is None:
        return []
    seconds = best_s(lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True))
    return [Row(name=f"{name} (peer)", value=seconds if size is None else size / seconds / 1e6, unit=unit)]


def best_s(act: Callable[[], object]) -> float:
    """Seconds of the quickest round."""
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    for row in measure():
        print(f"{row.name:<34}{row.value:>10.3f} {row.unit}" + (f"   target {row.target}" if row.target else ""))
