"""Starts the ranks of a trainer on this machine, and ends them together. Torch-free to import.

On one machine ranks find each other by a file in a folder of the user's own; on several by a port, which the launcher
opens and rank 0 inherits, so that no other process can take it in between. One rank that fails ends all: none can go on
without it, and the trainer is started again as a whole.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from grpo_engine.errors import ConfigError
from grpo_engine.forking import why_unforkable
from grpo_engine.ranks.leaving import LEAVE_SIGNAL
from grpo_engine.ranks.place import (
    LISTENING_FD,
    LOCAL_RANK,
    MASTER_ADDR,
    MASTER_PORT,
    RANK,
    STORE_FILE,
    WORLD_SIZE,
)
from grpo_engine.ranks.positions import POSITIONS_FILE, PositionFile
from grpo_engine.ranks.starting import ForkedRank, RankProcess, start_program
from grpo_engine.ranks.watching import STACKS_SIGNAL, RankWatch, Report, Stall
from grpo_engine.wire.environment_variables import MACHINE_ADDRESS_VARIABLE

LOOPBACK = "lo"
"""Linux's name of the interface of 127.0.0.1."""
USAGE_ERROR = 2
"""Exit code of `grpo-engine` for settings that a restart does not change."""
POLL_S = 0.05
SAME_TIME_S = 1.0
"""A rank whose peer has exited fails within this time."""
GRACE_S = 5.0
"""Between the first rank's failure and SIGKILL for the others: some wait in a collective operation of Gloo, where no
signal is handled."""
STACKS_WITHIN_S = 0.2
"""For a rank that is killed to write where it hangs."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksEnd:
    """How the ranks have ended."""

    code: int
    """0, or the exit code of the first rank that failed."""
    is_killed: bool = False
    """Whether a rank was killed by SIGKILL."""
    was_stopped: bool = False
    """Whether SIGTERM or SIGINT was received."""
    is_asked_again: bool = False
    """Whether the signal for a restart was received."""


def launch_ranks(
    argv: Sequence[str],
    *,
    num_local: int,
    run: Callable[[], int] | None = None,
    num_nodes: int = 1,
    node_rank: int = 0,
    master_addr: str = "127.0.0.1",
    master_port: int = 0,
    environment: Mapping[str, str] | None = None,
    stall_s: float = math.inf,
    report: Report | None = None,
    restart_signal: signal.Signals | None = None,
) -> RanksEnd:
    """Run a process per rank until all have exited.

    SIGTERM and SIGINT are passed to rank 0, which finishes its step and ends the others; on other machines they end the
    ranks there. The ranks end with this process, also if it is killed.

    Args:
        argv: the program of a rank.
        num_local: ranks on this machine.
        run: what that program does, called in a fork of this process, which has imported all that it needs; None, or
            where a fork might hang: the program is started.
        num_nodes, node_rank: machines, and which of them this is.
        master_addr, master_port: of the launcher on machine 0, where there are several machines.
        stall_s: after so long without progress a rank is named.
        report: takes where the ranks are, for a supervisor.
        restart_signal: another one on which rank 0 gets SIGTERM.
    """
    ranks: list[RankProcess] = []
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if ranks and node_rank == 0:
            ranks[0].send_signal(signal.SIGTERM if number == restart_signal else number)

    def ended(code: int, *, is_killed: bool = False) -> RanksEnd:
        stops = set(received) - {restart_signal}
        is_asked_again = restart_signal in received
        return RanksEnd(code=code, is_killed=is_killed, was_stopped=bool(stops), is_asked_again=is_asked_again)

    numbers = [signal.SIGTERM, signal.SIGINT, *([] if restart_signal is None else [restart_signal])]
    before = {number: signal.signal(number, pass_on) for number in numbers}
    shared = {**(os.environ if environment is None else environment), WORLD_SIZE: str(num_local * num_nodes)}
    share_cores(shared, num_local)
    if run is not None and (obstacle := why_unforkable()) is not None:
        log.warning("%s; the ranks are started as programs instead, which import everything again", obstacle)
        run = None
    with ExitStack() as opened:
        for number, handler in before.items():
            opened.callback(signal.signal, number, handler)
        of_rank_0: dict[str, str] = {}
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="grpo-ranks-"))  # mode 0700
        positions = PositionFile.make(Path(folder, "positions"), num_ranks=num_local)
        shared[POSITIONS_FILE] = f"{folder}/positions"
        interface = interface_of(shared.get(MACHINE_ADDRESS_VARIABLE))
        if num_nodes == 1:
            # Gloo and NCCL accept connections without a token. In a cluster, rank 0 and servers on other machines
            # are a group of NCCL too, which has one interface for all groups of a process.
            of_nccl = interface or LOOPBACK
            shared |= {STORE_FILE: f"{folder}/store", "GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": of_nccl}
        else:
            shared |= {MASTER_ADDR: master_addr, MASTER_PORT: str(master_port)}
            if interface is not None:
                # Else Gloo takes the one of the host's name, and NCCL its first.
                shared = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface, **shared}
            if node_rank == 0:
                port = opened.enter_context(_listening(master_addr, master_port))
                of_rank_0 = {LISTENING_FD: str(port.fileno())}
        for local_rank in range(num_local):
            rank = node_rank * num_local + local_rank
            own = {RANK: str(rank), LOCAL_RANK: str(local_rank), **({} if rank else of_rank_0)}
            listener = [*map(int, of_rank_0.values())]
            if run is None:
                ranks.append(start_program(argv, {**shared, **own}, listener if rank == 0 else ()))
            else:
                ranks.append(ForkedRank(run, {**shared, **own}, closed=() if rank == 0 else listener))
            if received and len(ranks) == 1 and node_rank == 0:
                pass_on(received.pop(0), None)
        first_rank = node_rank * num_local
        watch = opened.enter_context(
            RankWatch(positions, dict(enumerate(ranks, first_rank)), limit_s=stall_s, report=report)
        )
        failed = first_failure(ranks, is_ended=lambda: bool(received) and node_rank > 0)
        if failed is not None:
            end = _end_words(first_rank + failed, ranks[failed], watch.stall())
            log.error("%s; the other ranks are ended", end)
            _end(ranks)
            watch.finish(end)
            code = ranks[failed].wait()
            return ended(code if code > 0 else 128 - code, is_killed=code == -signal.SIGKILL)
        if any(rank.poll() is None for rank in ranks):
            _end(ranks)
            return ended(128 + signal.SIGTERM)
        return ended(0)


def share_cores(environment: MutableMapping[str, str], num_ranks: int) -> None:
    """Give each rank its part of the cores, also for what is imported before a fork.

    Each rank would start a thread per core, and all of them would wait for each other.
    """
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))


def interface_of(address: str | None) -> str | None:
    """The network interface of this machine that has an address; None where none has it."""
    if address is None:
        return None
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, found in interfaces if any(each.address == address for each in found)), None)


def _listening(address: str, port: int) -> socket.socket:
    """A socket that listens on the port, on all addresses for ranks on other machines.

    Raises:
        ConfigError: the port is in use, or the address is not of this machine.
    """
    try:
        return socket.create_server((address, port), backlog=4096)
    except OSError as error:
        raise ConfigError(
            f"{address}:{port}: the ranks cannot meet there: {error.strerror or error}; choose a free --master-port, "
            "and this machine's address as --master-addr on node 0"
        ) from error


def first_failure(ranks: Sequence[RankProcess], is_ended: Callable[[], bool]) -> int | None:
    """Wait until a rank has failed, and return its number; None once all have exited with 0, or `is_ended`.

    If rank 0 reports a wrong setting at about the same time, it is the one that failed; and a rank that was killed by
    SIGKILL is, since others fail when it has ended.
    """
    while not is_ended():
        codes = [rank.poll() for rank in ranks]
        if all(code == 0 for code in codes):
            return None
        if -signal.SIGKILL in codes:
            return codes.index(-signal.SIGKILL)
        failed = next((number for number, code in enumerate(codes) if code), None)
        if failed is not None:
            with suppress(subprocess.TimeoutExpired):
                if ranks[0].wait(SAME_TIME_S) == USAGE_ERROR:
                    return 0
            return next((number for number, rank in enumerate(ranks) if rank.poll() == -signal.SIGKILL), failed)
        time.sleep(POLL_S)
    return None


def _end_words(rank: int, process: RankProcess, stall: Stall | None) -> str:
    """Which rank ended, how, and whether one was waited for."""
    code = process.wait()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    words = f"rank {rank} (process {process.pid}) {how}"
    if stall is not None:
        words += f" after no progress for {time.monotonic() - stall.since_s:.0f} s: {stall.text}"
    return words


def _end(ranks: Sequence[RankProcess]) -> None:
    deadline = time.monotonic() + GRACE_S
    for rank in ranks:
        rank.send_signal(LEAVE_SIGNAL)
        rank.terminate()
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("process %d has not exited after %g s: its stacks, then SIGKILL", rank.pid, GRACE_S)
            rank.send_signal(STACKS_SIGNAL)
            time.sleep(STACKS_WITHIN_S)
            rank.kill()
            rank.wait()
