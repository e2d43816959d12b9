"""Watches the positions of the ranks of this machine from their launcher, and names the rank that the others wait for.

The launcher takes no part in the training, so it sees also a rank 0 that hangs. Torch-free.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType

from grpo_engine.processes import is_stopped
from grpo_engine.ranks.positions import Position, PositionFile
from grpo_engine.ranks.starting import RankProcess
from grpo_engine.wire.supervisor import REPORT_VALID_S, RanksReport, RankStall, RankStatus

CHECK_EVERY_S = 1.0
SEND_EVERY_S = REPORT_VALID_S / 3
"""While nothing changes."""
SHORT_S = 3.0
"""A place that lasts no longer is part of ordinary work, and not reported."""
STACKS_SIGNAL = signal.SIGUSR1
"""On it a rank writes the stacks of its threads to stderr."""
STACKS_APART_S = 0.2
"""Between two ranks, which have one log: written at once, their lines would be mixed."""
Report = Callable[[RanksReport], None]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A rank makes no progress while others wait for it."""

    ranks: tuple[int, ...]
    """Those that are behind all others; empty where all wait in the same operation."""
    since_s: float
    """On the monotonic clock."""
    text: str
    """For people, without the time."""


def find_stall(
    positions: Mapping[int, Position], *, now_s: float, limit_s: float, stopped: Collection[int] = ()
) -> Stall | None:
    """The ranks that have passed the fewest points, if none of them moved for `limit_s` and others wait as long.

    Where no rank waits in an operation, as while rank 0 is at work alone, only a stopped process counts.

    Args:
        positions: of the ranks of this machine.
        stopped: ranks whose process is stopped by a signal.
    """
    waiting = {rank for rank, each in positions.items() if each.is_waiting and now_s - each.since_s >= limit_s}
    least = min((each.progress for each in positions.values()), default=None)
    behind = [rank for rank, each in sorted(positions.items()) if each.progress == least]
    if not waiting:
        behind = [rank for rank in sorted(stopped) if rank in positions]
    since_s = max((positions[rank].since_s for rank in behind), default=now_s)
    if now_s - since_s < limit_s:
        return None
    if waiting and len(behind) == len(positions):
        behind = [rank for rank in behind if rank in stopped]
    waiting -= set(behind)
    waits = f"{_names(waiting)} wait{'s' if len(waiting) == 1 else ''}" if waiting else ""
    if not behind:
        text = f"{waits} in {_place(positions, waiting)}, for a GPU, for the network, or for ranks of other machines"
        return Stall(ranks=(), since_s=since_s, text=text)
    halted = [rank for rank in behind if rank in stopped]
    is_halted = f" (stopped by a signal; SIGCONT to process {positions[halted[0]].pid} continues it)" if halted else ""
    are = "is" if len(behind) == 1 else "are"
    text = f"{_names(behind)}{is_halted} {are} in {_place(positions, behind)}"
    if waiting:
        text += f"; {waits} for it in {_place(positions, waiting)}"
    return Stall(ranks=tuple(behind), since_s=since_s, text=text)


def _names(ranks: Collection[int]) -> str:
    numbers = [str(rank) for rank in sorted(ranks)]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _place(positions: Mapping[int, Position], ranks: Collection[int]) -> str:
    return positions[min(ranks)].place


class RankWatch:
    """Looks at the positions in a thread of its own while it is entered."""

    def __init__(
        self,
        file: PositionFile,
        ranks: Mapping[int, RankProcess],
        *,
        limit_s: float,
        report: Report | None = None,
    ) -> None:
        """
        Args:
            ranks: the processes by rank, in the order of the slots.
            limit_s: after so long without progress a rank is named.
            report: takes what is to be told to a supervisor.
        """
        self._file = file
        self._ranks = dict(ranks)
        self._limit_s = limit_s
        self._report = report
        self._began_s = time.monotonic()
        self._told: tuple[int, ...] | None = None
        self._sent: RanksReport | None = None
        self._sent_at = 0.0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    def __enter__(self) -> RankWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join()

    def stall(self) -> Stall | None:
        """The stall of this moment."""
        now_s, positions = time.monotonic(), self._positions()
        stopped = [rank for rank, process in self._ranks.items() if is_stopped(process.pid)]
        return find_stall(positions, now_s=now_s, limit_s=self._limit_s, stopped=stopped)

    def finish(self, end: str) -> None:
        """Report why the ranks have ended, at once."""
        self._ends.set()
        self._thread.join()
        if self._report is not None:
            with suppress(OSError, ValueError):
                self._report(RanksReport(end=end))

    def _positions(self) -> dict[int, Position]:
        found = self._file.read()
        not_yet = Position(pid=0, since_s=self._began_s, place="its start")
        return {
            rank: replace(found.get(slot, not_yet), pid=process.pid)
            for slot, (rank, process) in enumerate(self._ranks.items())
        }

    def _run(self) -> None:
        while not self._ends.wait(CHECK_EVERY_S):
            stall = self.stall()
            ranks = None if stall is None else stall.ranks
            if stall is not None and ranks != self._told:
                self._tell(stall)
            self._told = ranks
            if self._report is not None:
                self._send(self._report, stall)

    def _tell(self, stall: Stall) -> None:
        """Log it once, and have the ranks log their stacks."""
        log.warning("no progress for %.0f s: %s", time.monotonic() - stall.since_s, stall.text)
        found = self._file.read()
        for slot, process in enumerate(self._ranks.values()):
            if slot in found:  # before it has a position the signal would end it
                process.send_signal(STACKS_SIGNAL)
                self._ends.wait(STACKS_APART_S)

    def _send(self, report: Report, stall: Stall | None) -> None:
        now_s = time.monotonic()
        message = RanksReport(
            ranks=[_status(rank, each, now_s) for rank, each in self._positions().items()],
            stall=stall and RankStall(ranks=list(stall.ranks), since=_unix_time(stall.since_s), text=stall.text),
        )
        if message == self._sent and now_s - self._sent_at < SEND_EVERY_S:
            return
        with suppress(OSError, ValueError):
            report(message)
            self._sent, self._sent_at = message, now_s


def _status(rank: int, position: Position, now_s: float) -> RankStatus:
    if now_s - position.since_s < SHORT_S:
        return RankStatus(rank=rank, pid=position.pid)
    return RankStatus(
        rank=rank,
        pid=position.pid,
        place=position.place,
        since=_unix_time(position.since_s),
        is_waiting=position.is_waiting,
    )


def _unix_time(monotonic_s: float) -> float:
    """Rounded, so that it stays the same while the clocks are adjusted a little."""
    return float(round(time.time() - time.monotonic() + monotonic_s))


def write_stacks_on_signal() -> None:
    """Have this process, a rank, write the stacks of its threads to stderr when the launcher asks."""
    import faulthandler

    faulthandler.register(STACKS_SIGNAL)
