"""Runs a sweep: starts the run of a point when fewer than `jobs` are live, until every point has ended.

Nothing is kept in memory that the run folders do not show, so that the command may be killed at any moment: the runs go
on, each under its own supervisor, and `sweep resume` goes on with the rest.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import fmean

from grpo_engine.config import read_table
from grpo_engine.errors import GrpoError, PeerUnavailable
from grpo_engine.wire.run_folder import SETTINGS_FILE
from grpo_tui.client.api import daemon_of, ensure_daemon, until_gone
from grpo_tui.client.launch import OpenedRun, open_loaded
from grpo_tui.client.local import NoSuchRun, StartRefused, look_at
from grpo_tui.client.new_daemon import NewDaemon
from grpo_tui.client.resume import resume_run
from grpo_tui.client.start_queue import NotInTime, StartQueue
from grpo_tui.profile.plan_file import Plan
from grpo_tui.run_files.metrics import all_steps, newest_lines
from grpo_tui.supervisor.lock import has_daemon
from grpo_tui.sweeps.asked import on_gpus, placements, profile_at
from grpo_tui.sweeps.chooser import Chooser, Outcome
from grpo_tui.sweeps.files import write_mark
from grpo_tui.sweeps.folder import (
    ENDED_STATES,
    NOT_STARTED_FILE,
    PRUNED_FILE,
    PointRun,
    PointState,
    Sweep,
    look_again,
    remove_unfinished,
    runs_of,
    with_chosen,
    write_reasons,
)
from grpo_tui.sweeps.halving import Climbed, Halving, climbed, verdicts
from grpo_tui.sweeps.results import PointResult, objective
from grpo_tui.sweeps.table import result_of, write_table
from grpo_tui.view.format import duration_text
from grpo_tui.view.metrics.summary import Score, score_text

POLL_S = 0.2
LOOK_S = 1.0
"""Between two looks at the metrics of all live runs."""
RETRY_S = 10.0
"""Before another try where a start was refused, or the disk is full."""
MAX_LOST_DAEMONS = 3
"""Supervisors that may exit unexpectedly while they take a run down."""
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT})
TO_DO = frozenset({PointState.WAITING, PointState.STOPPED, PointState.INTERRUPTED})
"""States of points that a sweep starts or goes on with."""
Say = Callable[[str], None]


class Sweeper:
    """One command that works on a sweep whose lock it holds.

    Raises:
        OSError: a file of the sweep cannot be written.
    """

    def __init__(self, sweep: Sweep, say: Say, *, retries_failed: bool = False) -> None:
        remove_unfinished(sweep)
        self._chooser: Chooser | None = None
        if sweep.asked.optuna is not None:
            self._chooser = Chooser(sweep.folder, sweep.asked.values(), sweep.asked.sampler)
            if len(chosen := self._chooser.chosen()) != len({point.combination for point in sweep.points}):
                sweep = with_chosen(sweep, chosen)  # it was killed before it recorded the last
        self._sweep = sweep
        self._say = say
        self._fault = ""
        self._retry_at = 0.0
        self._queue = StartQueue(lambda _: None, deadline=0.0)
        """Where a point that cannot be started has its place; the sweep itself does not stand still in it."""
        if retries_failed:
            write_reasons(sweep, NOT_STARTED_FILE, {})
        states = TO_DO | ({PointState.FAILED} if retries_failed else set())
        self._runs = {run.point.number: run for run in runs_of(sweep)}
        self._to_do = [run for run in self._runs.values() if run.state in states]
        self._results: dict[int, PointResult] = {}
        self._climbed: dict[int, Climbed] = {}
        self._ending: set[int] = set()
        """Points whose run was told to end, since their settings are hopeless."""
        self._look_at = 0.0

    def run(self) -> list[PointResult]:
        """Return once every point has ended."""
        with self._queue:
            return self._run()

    def _run(self) -> list[PointResult]:
        self._write()
        while self._to_do or self._live() or self._num_chosen < (self._sweep.asked.optuna or 0):
            for run in self._live():
                self._attend(run)
            if self._sweep.asked.halving is not None and time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + LOOK_S
                self._end_hopeless(self._sweep.asked.halving)
            while len(self._live()) < self._sweep.asked.jobs and time.monotonic() >= self._retry_at:
                if not self._to_do:
                    self._choose()
                if not self._to_do:
                    break
                self._start(self._to_do[0])
            if not self._to_do:
                self._queue.leave()
            if self._live() or self._to_do or self._fault:
                time.sleep(POLL_S)
        if self._chooser is not None:
            with suppress(OSError):  # told by the next command that goes on
                self._tell_outcomes(self._chooser)
        self._write()
        return [self._result(run) for run in self._runs.values()]

    def _live(self) -> list[PointRun]:
        return [run for run in self._runs.values() if run.state is PointState.RUNNING]

    def _attend(self, run: PointRun) -> None:
        """Notice the end of a run, and give it a supervisor if it lost its own."""
        assert run.folder is not None
        if has_daemon(run.folder):
            return
        try:
            if look_at(run.folder).is_live and ensure_daemon(run.folder):
                self._say(f"{self._title(run)}: its supervisor exited; a new one has taken {run.folder.name} over")
                return
        except GrpoError as error:
            self._tell(str(error))
            return
        self._settle(look_again(run))

    def _settle(self, run: PointRun) -> None:
        self._runs[run.point.number] = run
        if run.state is PointState.INTERRUPTED:  # killed with its supervisor: it goes on from its last checkpoint
            self._to_do.insert(0, run)
        self._retry_at = 0.0  # what it had may be what another one waits for
        self._results.pop(run.point.number, None)
        self._climbed.pop(run.point.number, None)  # it may have reached a rung since the last look
        result = self._result(run)
        score = None if result.score is None else Score(step=0, value=result.score, error=result.score_error)
        figures = [
            *([] if result.reward is None else [f"reward {result.reward:.3f}"]),
            *([] if score is None else [f"{result.evaluation} {score_text(score)}"]),
            *([] if result.hours is None else [duration_text(result.hours * 3600)]),
            *([] if run.reason is None else [run.reason.partition("\n")[0]]),
        ]
        self._say(f"{self._title(run)}: {run.state}  {'  '.join(figures)}")
        self._write()

    # --- successive halving ---------------------------------------------------------------------------------------

    def _end_hopeless(self, halving: Halving) -> None:
        """End the runs of hopeless settings, and give up those that were not started."""
        for run in self._runs.values():
            self._climb(run, halving)
        climbing = [(run.point.combination, self._climbed.get(run.point.number, {})) for run in self._runs.values()]
        hopeless = verdicts(climbing, halving.eta)
        for run in [*self._live(), *self._to_do]:
            why = hopeless.get(run.point.combination)
            if why is None or run.point.number in self._ending:
                continue
            if run.folder is not None:
                try:
                    write_mark(self._sweep.mark(run.point, pruned=why), run.folder)
                except OSError as error:
                    self._tell(f"{self._title(run)} is not ended early: {error.strerror or error} in {run.folder}")
                    continue
            if run.state is PointState.RUNNING:
                self._end(run)
                continue
            self._to_do.remove(run)
            self._settle(
                look_again(run) if run.folder else PointRun(point=run.point, state=PointState.PRUNED, reason=why)
            )
            self._write_reasons(PRUNED_FILE, PointState.PRUNED)

    def _climb(self, run: PointRun, halving: Halving) -> None:
        """Read how a run stands at its rungs, where it may have reached another."""
        number, known = run.point.number, self._climbed.get(run.point.number)
        if run.folder is None or (known is not None and run.state is not PointState.RUNNING):
            return
        with suppress(OSError):
            newest = newest_lines(run.folder)
            rungs = halving.rungs(newest[-1].step if newest else 0)
            if known is None or not known.keys() >= set(rungs):
                self._climbed[number] = climbed(all_steps(run.folder), halving)

    def _end(self, run: PointRun) -> None:
        """Tell the supervisor of a run to end it; if that fails, it is told again."""
        assert run.folder is not None
        with suppress(PeerUnavailable, NoSuchRun):
            asyncio.run(daemon_of(run.folder).command("down"))
            self._ending.add(run.point.number)

    # --- choosing -------------------------------------------------------------------------------------------------

    @property
    def _num_chosen(self) -> int:
        return len({point.combination for point in self._sweep.points})

    def _choose(self) -> None:
        """Let Optuna choose another combination, unless it has chosen all."""
        if self._chooser is None or self._num_chosen >= (self._sweep.asked.optuna or 0):
            return
        try:
            self._tell_outcomes(self._chooser)
            if len(self._chooser.chosen()) == self._num_chosen:  # else the last one could not be recorded
                self._chooser.ask()
            self._sweep = with_chosen(self._sweep, self._chooser.chosen())
        except OSError as error:
            self._tell(f"no further point can be chosen: {error.strerror or error} in {self._sweep.folder}")
            return
        new = [point for point in self._sweep.points if point.number not in self._runs]
        runs = [PointRun(point=point, state=PointState.WAITING) for point in new]
        self._runs |= {run.point.number: run for run in runs}
        self._to_do += runs

    def _tell_outcomes(self, chooser: Chooser) -> None:
        """Tell Optuna what the combinations came to whose runs have ended."""
        groups: dict[int, list[PointRun]] = {}
        for run in self._runs.values():
            groups.setdefault(run.point.combination, []).append(run)
        for number, group in groups.items():
            if any(run.state not in ENDED_STATES for run in group):
                continue
            results = [self._result(run) for run in group if run.state is PointState.FINISHED]
            values = [value for each in results if (value := objective(each)) is not None]
            is_pruned = any(run.state is PointState.PRUNED for run in group)
            outcome: Outcome = "complete" if values and not is_pruned else "pruned" if is_pruned else "failed"
            chooser.tell(number, outcome, fmean(values) if values else None)

    # --- starting -------------------------------------------------------------------------------------------------

    def _start(self, run: PointRun) -> None:
        """Start the run of a point, or go on with it; if that is refused for now, it is tried again later."""
        try:
            opened = self._open(run)
        except (StartRefused, NotInTime) as error:
            about = [reason.partition(" (")[0] for reason in error.reasons]  # what follows are figures, which change
            self._tell(f"{self._title(run)} waits: " + "\n".join(error.reasons), about=f"{self._title(run)} {about}")
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            self._tell(f"no further run can be started: {error.strerror} in {self._sweep.logs}: make room there")
        except GrpoError as error:
            self._to_do.remove(run)
            self._not_started(run, str(error))
        else:
            self._to_do.remove(run)
            self._fault, self._retry_at = "", 0.0
            verb = "goes on as" if opened.is_resumed else "is"
            self._runs[run.point.number] = PointRun(
                point=run.point, state=PointState.RUNNING, folder=opened.folder, reason=None
            )
            self._say(f"{self._title(run)} {verb} {opened.folder.name}")
            self._write()

    def _open(self, run: PointRun) -> OpenedRun:
        """Open the run of a point on GPUs that no other run has.

        Raises:
            StartRefused, NotInTime: there are none; with what is in the way on the last ones that were tried. A new run
                then has its place in the queue.
        """
        sweep = self._sweep
        profile = profile_at(run.point, sweep.table, sweep.profile_path)()
        table = profile.written if run.folder is None else read_table(run.folder / SETTINGS_FILE)
        places = placements(sweep.asked, table, str(sweep.profile_path))
        taken = {gpu for each in self._live() if each.folder for gpu in _gpus_of(each.folder)}
        free = [place for place in places if not taken.intersection(place)] if places else [()]
        refused: StartRefused | NotInTime = StartRefused("other points have all GPUs of --gpus")
        with NewDaemon() as daemon:
            for place in free:
                more = on_gpus(table, place) if place else []
                try:
                    if run.folder is not None:
                        self._queue.leave()  # it would wait for its own place
                        return resume_run(run.folder.name, more, daemon=daemon, moves_ports=True, logs=sweep.logs)
                    opened = open_loaded(
                        profile_at(run.point, sweep.table, sweep.profile_path, more),
                        daemon=daemon,
                        second="new",
                        shares_gpus=profile.profile.share_gpus,
                        queue=self._queue,
                        fill=partial(write_mark, sweep.mark(run.point)),
                        logs=sweep.logs,
                    )
                    self._queue.leave()
                    return opened
                except (StartRefused, NotInTime) as error:
                    refused = error
        raise refused

    def _not_started(self, run: PointRun, reason: str) -> None:
        self._runs[run.point.number] = failed = PointRun(
            point=run.point, state=PointState.FAILED, folder=run.folder, reason=reason
        )
        self._results.pop(run.point.number, None)
        self._say(f"{self._title(run)} cannot be started: {reason}")
        self._write_reasons(NOT_STARTED_FILE, PointState.FAILED)
        assert failed.reason is not None

    def _write_reasons(self, file: str, state: PointState) -> None:
        reasons = {n: each.reason or "" for n, each in self._runs.items() if each.state is state and not each.folder}
        with suppress(OSError):
            write_reasons(self._sweep, file, reasons)

    def _tell(self, fault: str, *, about: str | None = None) -> None:
        """Say what is in the way, once for each `about`, and try again later."""
        if (about or fault) != self._fault:
            self._say(fault)
        self._fault, self._retry_at = about or fault, time.monotonic() + RETRY_S

    def _title(self, run: PointRun) -> str:
        return f"[{run.point.number}/{self._sweep.num_points}] {run.point.label}"

    def _result(self, run: PointRun) -> PointResult:
        if run.point.number not in self._results or run.state is PointState.RUNNING:
            self._results[run.point.number] = result_of(run)
        return self._results[run.point.number]

    def _write(self) -> None:
        try:
            write_table(self._sweep, [self._result(run) for run in self._runs.values()])
        except OSError as error:
            self._tell(f"the table in {self._sweep.folder} is not written: {error.strerror or error}")


def _gpus_of(run_folder: Path) -> set[int]:
    return {gpu for launch in Plan.of(run_folder).launches for gpu in launch.gpus}


def end_runs(folders: Iterable[Path]) -> None:
    """End live runs, all at once, and return when none has a process left."""

    async def end_all() -> None:
        await asyncio.gather(*map(_end, folders))

    asyncio.run(end_all())


async def _end(folder: Path) -> None:
    for _ in range(MAX_LOST_DAEMONS):
        with suppress(PeerUnavailable):
            try:
                daemon = await asyncio.to_thread(daemon_of, folder)
            except NoSuchRun:
                return
            await daemon.command("down", wait=True)
        await until_gone(folder)
        if not (await asyncio.to_thread(look_at, folder)).is_live:
            return
