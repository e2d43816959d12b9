"""Ports and GPUs of live runs are given to no other run, and are free again when it has ended, whoever is killed.

Starts are real: the lock of the host, the registration, the plan. In place of a supervisor a forked process does what
that does with the locks, and then holds its ports and GPUs by locks of the test; a timer of the kernel kills both.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from ports import free_ports
from workplace import IDLE, service, until

from grpo_engine.wire.start_queue import QueuedStart
from grpo_tui.client import launch, local, start_queue
from grpo_tui.client.local import StartRefused, look_at
from grpo_tui.client.new_daemon import NewDaemon, open_host_lock
from grpo_tui.client.start_queue import NotInTime, StartQueue, waiting_starts
from grpo_tui.paths import host_folder
from grpo_tui.profile.loading import load
from grpo_tui.profile.plan_file import Plan
from grpo_tui.supervisor.lock import has_daemon, take_lock
from grpo_tui.supervisor.registered import forget_ended, register, registered_folders

NUM_PORTS = 4
LONGEST_LIFE_S = 0.03
"""Of a process whose timer is set: about as long as a start takes."""
LEFT_S = 300.0
"""Of the others: longer than a test."""


class ForkedSupervisor(NewDaemon):
    """Takes the lock of its run, lets go of that of the host, and holds what is in the plan, as a run does."""

    def __init__(self, folder: Path, life_s: float | None) -> None:
        self._folder, self._life_s = folder, life_s
        self._is_given = False
        self.host_lock = open_host_lock()

    def supervise(self, folder: Path) -> bool:
        register(folder)
        self._is_given = True
        read, write = os.pipe()
        if os.fork() == 0:
            with suppress(BaseException):
                for inherited in {int(each) for each in os.listdir("/proc/self/fd")} - {0, 1, 2, write, self.host_lock}:
                    with suppress(OSError):  # as exec does
                        os.close(inherited)
                # By itself: its starter may be killed as soon as it has forked.
                (self._folder / f"holder.{os.getpid()}").touch()
                end_within(self._life_s)
                self._hold(folder)
                os.close(write)
                signal.pause()
            os._exit(0)
        os.close(write)
        os.read(read, 1)  # as the real one's answer: it has locked its run, or was killed
        os.close(read)
        return True

    def _hold(self, folder: Path) -> None:
        assert take_lock(folder) is not None
        os.close(self.host_lock)
        launches = Plan.of(folder).launches
        names = [f"port.{port}" for each in launches for port in each.ports]
        for name in [*names, *(f"gpu.{gpu}" for each in launches for gpu in each.gpus)]:
            held = os.open(self._folder / name, os.O_CREAT | os.O_RDWR, 0o600)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                (self._folder / f"granted-twice.{name}").touch()


def end_within(life_s: float | None) -> None:
    """Have the kernel kill this process at that time, without any of its code; else where the test has failed."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, LEFT_S if life_s is None else life_s)


def begin(
    folder: Path,
    port: int,
    gpu: int,
    *,
    number: int,
    lives: tuple[float | None, float | None] = (None, None),
    is_queued: bool = False,
) -> int:
    """Start a run in a process of its own; its exit code is 4 if it was refused."""
    profile = folder / f"p{number}.toml"
    profile.write_text(service("a", IDLE, "--port", port, ports=[port], gpus=[gpu]))
    if (pid := os.fork()) != 0:
        return pid
    code = 1
    with suppress(BaseException):
        end_within(lives[0])
        daemon = ForkedSupervisor(folder, lives[1])
        second = "new" if number % 3 == 0 else None
        try:
            with StartQueue(lambda _: None) as queue:
                launch.open_loaded(
                    partial(load, str(profile)),
                    daemon=daemon,
                    second=second,  # type: ignore[arg-type]
                    shares_gpus=False,
                    queue=queue if is_queued else None,
                    logs=folder / f"logs{number % 2}",
                )
            code = 0
        except StartRefused:
            code = 4
    os._exit(code)


@pytest.fixture(autouse=True)
def _host_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(local, "marked_folders", set)  # runs of other tests
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(start_queue, "POLL_S", 0.002)


@pytest.mark.parametrize(
    "num_kills", [12, pytest.param(200, marks=pytest.mark.extended("the same with 12 kills, beside it"))]
)
def test_no_port_or_gpu_is_granted_twice_and_none_is_lost_whoever_is_killed(tmp_path: Path, num_kills: int) -> None:
    dice = random.Random(num_kills)
    ports = free_ports(NUM_PORTS)
    kills = num_started = number = 0
    starters: list[int] = []
    while kills < num_kills or num_started <= num_kills // 8:
        while len(starters) < 3:
            number += 1
            is_queued = number % 4 == 0  # until its own end, or before
            life = dice.uniform(0, 2 * LONGEST_LIFE_S) if is_queued else _some_life(dice)
            port, gpu = dice.choice(ports), dice.randrange(NUM_PORTS)
            lives = (life, _some_life(dice))
            starters.append(begin(tmp_path, port, gpu, number=number, lives=lives, is_queued=is_queued))
        status = os.waitpid(starters.pop(0), 0)[1]
        kills += os.WIFSIGNALED(status)
        num_started += os.waitstatus_to_exitcode(status) == 0
        holders = sorted(tmp_path.glob("holder.*"))
        if len(holders) >= NUM_PORTS:
            kills += kill(dice.choice(holders))
        assert not list(tmp_path.glob("granted-twice.*"))
    for pid in starters:
        os.waitpid(pid, 0)

    lock = open_host_lock()
    fcntl.flock(lock, fcntl.LOCK_EX)  # which a process has that was just forked, until it holds its run
    os.close(lock)
    kill_all(tmp_path)
    folders = [path.parent for path in tmp_path.glob("logs*/*/plan.json")]
    until(lambda: not any(map(has_daemon, folders)))
    for place, port in enumerate(ports):
        assert ended(begin(tmp_path, port, place, number=number + 1 + 3 * place)) == 0
    live = {
        folder for folder in (path.parent for path in tmp_path.glob("logs*/*/plan.json")) if look_at(folder).is_live
    }
    assert registered_folders() == live
    assert len(live) == NUM_PORTS
    assert {path.suffix for path in host_folder().iterdir()} == {".run", ".lock"}
    kill_all(tmp_path)
    assert not list(tmp_path.glob("granted-twice.*"))


def test_a_start_that_is_killed_as_it_registers_its_run_leaves_no_file(tmp_path: Path) -> None:
    unfinished = host_folder() / f".0123456789abcdef.run.{os.getpid()}.tmp"
    unfinished.touch()
    forget_ended(lambda _: True)
    assert not unfinished.exists()


def test_starts_in_the_queue_get_a_port_in_their_order_and_one_that_is_killed_holds_up_no_other(tmp_path: Path) -> None:
    port, other = free_ports(2)
    assert ended(begin(tmp_path, port, 0, number=1)) == 0
    (first,) = tmp_path.glob("holder.*")
    queued = []
    for number in (2, 4, 5):
        queued.append(begin(tmp_path, port, number, number=number, is_queued=True))
        until(lambda: len(waiting_starts()) == len(queued))
    assert ended(begin(tmp_path, other, 6, number=7, is_queued=True)) == 0, "it waits for nothing that others wait for"
    assert [start.profile for start in waiting_starts()] == ["p2", "p4", "p5"]
    assert waiting_starts()[0].ports == [port]
    os.kill(queued[1], signal.SIGKILL)
    os.waitpid(queued[1], 0)
    assert [start.profile for start in waiting_starts()] == ["p2", "p5"]

    kill(first)
    assert ended(queued[0]) == 0
    assert [start.profile for start in waiting_starts()] == ["p5"]
    assert ended(begin(tmp_path, port, 7, number=8)) == 4
    assert ended(begin(tmp_path, other, 5, number=10)) == 4, "GPU 5 is that of the start that waits"
    kill_all(tmp_path)
    assert ended(queued[2]) == 0
    assert not list(host_folder().glob("*.queue"))
    kill_all(tmp_path)
    assert not list(tmp_path.glob("granted-twice.*"))


def test_a_start_leaves_the_queue_when_it_has_waited_as_long_as_it_was_to(tmp_path: Path) -> None:
    told: list[str] = []
    start = QueuedStart(pid=os.getpid(), profile="p", since=0.0, gpus=[0])
    with StartQueue(told.append, deadline=0.0) as queue:
        queue.join(start)
        assert waiting_starts() == [start]
        for figure in ("1.0", "2.0"):
            reason = f"GPU 0 is used by run a (vllm {figure} GB)"
            with pytest.raises(NotInTime, match="not started in time: GPU 0 is used by run a"):
                queue.wait(StartRefused(f"{reason}\n--new starts another", reasons=[reason]))
    assert told == ["waits, first in the queue: GPU 0 is used by run a (vllm 1.0 GB)"], "figures change all the time"
    assert waiting_starts() == []


def _some_life(dice: random.Random) -> float | None:
    return dice.uniform(0, LONGEST_LIFE_S) if dice.random() < 0.5 else None


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_all(folder: Path) -> None:
    for holder in folder.glob("holder.*"):
        kill(holder)


def kill(holder: Path) -> bool:
    """SIGKILL to a process in place of a supervisor; returns whether it was there."""
    holder.unlink()
    try:
        os.kill(int(holder.suffix[1:]), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
