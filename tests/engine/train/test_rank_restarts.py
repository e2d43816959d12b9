"""The launcher of a supervised trainer starts its ranks again without imports, when it is asked to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_engine.ranks.launching import first_failure

LAUNCHER = """
import os, signal, subprocess, sys, time
from functools import partial
from pathlib import Path
from grpo_engine.ranks.launching import launch_ranks
from grpo_engine.ranks.restarting import RankRestarts
from grpo_engine.wire.fork_server import RESTART_SIGNAL

def rank():
    over = Path(os.environ["GRPO_RANKS_STORE_FILE"]).with_name("over")
    signal.signal(signal.SIGTERM, lambda *_: over.touch())
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    os.write(1, f"{os.environ['RANK']} {os.getpid()} {left.pid}\\n".encode())
    while not over.exists():
        time.sleep(0.01)
    return 0

restarts = RankRestarts(Path(sys.argv[1]))
raise SystemExit(restarts.run(partial(launch_ranks, ["false"], num_local=2, run=rank, restart_signal=RESTART_SIGNAL)))
"""
"""Each rank leaves a process behind, and writes its number, its pid and that of the process. They end together on
SIGTERM to one of them."""

IN_A_KERNEL = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from grpo_engine.ranks import leaving
from grpo_engine.ranks.launching import launch_ranks

def rank():
    is_there = Path(os.environ["GRPO_RANKS_STORE_FILE"]).with_name("is there")
    if os.environ["RANK"] == "1":
        while not is_there.exists():
            time.sleep(0.01)
        return 3
    signal.signal(signal.SIGTERM, lambda *_: None)
    leaving._abort_operations = lambda: os.write(1, b"aborted")
    leaving.EXITS_WITHIN_S = 0.01
    leaving.wait_for_gpu = lambda device: os.write(1, b" and idle")
    threading.Thread(target=signal.pause, daemon=True).start()  # as those of CUDA, it may receive the signal
    leaving.Leaving("cuda:0")
    is_there.touch()
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    lock(mutex)  # blocks until SIGKILL: no signal interrupts it, so that no Python handler runs

raise SystemExit(launch_ranks(["false"], num_local=2, run=rank).code)
"""
"""Rank 1 fails, and rank 0 is in an operation that waits for it."""

pytestmark = pytest.mark.slow


class Launcher:
    """A launcher with two ranks."""

    def __init__(self, folder: Path) -> None:
        self.restarts_file, self.output = folder / "restarts.json", folder / "output"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, str(self.restarts_file)],
                stdout=output,
                env={**os.environ, "TMPDIR": str(folder)},  # a launcher that is killed leaves its folder
            )

    def ranks(self, start: int) -> list[tuple[int, int]]:
        """Pids of the ranks, by number, and of what they leave; waits for their start, counted from 0."""
        until(lambda: len(self.output.read_text().splitlines()) >= 2 * (start + 1))
        lines = self.output.read_text().splitlines()[2 * start : 2 * (start + 1)]
        return [(rank, left) for _, rank, left in sorted(tuple(map(int, line.split())) for line in lines)]

    def restarts(self) -> dict[str, Any]:
        """What the supervisor reads; empty at first."""
        return json.loads(self.restarts_file.read_text()) if self.restarts_file.exists() else {}


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120  # for imports
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    running = Launcher(tmp_path)
    yield running
    tree = psutil.Process(running.process.pid).children(recursive=True) if running.process.poll() is None else []
    running.process.kill()
    running.process.wait()
    for each in tree:
        each.kill()


def test_the_ranks_start_again_in_the_same_launcher_after_one_was_killed(launcher: Launcher) -> None:
    first = launcher.ranks(0)
    os.kill(first[1][0], signal.SIGKILL)
    until(lambda: launcher.restarts().get("killed_by") == "SIGKILL")
    assert launcher.restarts() == {"pid": launcher.process.pid, "num_restarts": 0, "killed_by": "SIGKILL"}
    launcher.process.send_signal(signal.SIGHUP)
    second = launcher.ranks(1)
    assert launcher.restarts() == {"pid": launcher.process.pid, "num_restarts": 1, "killed_by": None}
    assert not any(psutil.pid_exists(pid) for rank in first for pid in rank)
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.process.wait(60) == 0
    assert not any(psutil.pid_exists(rank) for rank, _ in second)
    for _, left in second:  # the keeper of the service ends them
        os.kill(left, signal.SIGKILL)


def test_a_hangup_lets_rank_0_finish_its_step_and_starts_the_ranks_again(launcher: Launcher) -> None:
    launcher.ranks(0)
    launcher.process.send_signal(signal.SIGHUP)
    launcher.ranks(1)
    assert launcher.restarts()["num_restarts"] == 1
    assert launcher.process.poll() is None


def test_a_launcher_that_waits_to_be_asked_is_stopped_at_once(launcher: Launcher) -> None:
    os.kill(launcher.ranks(0)[0][0], signal.SIGKILL)
    until(lambda: launcher.restarts().get("killed_by") == "SIGKILL")
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.process.wait(60) == 128 + signal.SIGKILL


def test_a_rank_in_an_operation_of_nccl_is_asked_to_end_it_and_not_killed() -> None:
    """A process that is killed within a kernel under MPS is a fault of all that share the card."""
    ended = subprocess.run([sys.executable, "-c", IN_A_KERNEL], capture_output=True, timeout=200, check=False)
    assert (ended.returncode, ended.stdout) == (3, b"aborted and idle"), ended.stderr.decode()


def test_the_rank_that_was_killed_is_named_and_not_one_that_failed_since() -> None:
    """Rank 0 was, if it had exited before the launcher looked, and the ranks did not start again in place."""
    programs = ("exit 1", "kill -9 $$", "exit 0")
    ranks = [subprocess.Popen(["sh", "-c", program]) for program in programs]
    for rank in ranks:
        rank.wait()
    assert first_failure(ranks, is_ended=lambda: False) == 1
