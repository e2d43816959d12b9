"""Reads all runs and sweeps of this host for the board, from their files; blocks while it reads.

Runs are those of the folder of runs here, and all that are registered, in whatever folder. A run is read again when one
of its files changed, so that a look at fifty runs that have ended costs a few stats each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import BaseModel, ValidationError

from grpo_engine.errors import GrpoError
from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.run_folder import METRICS_FILE, PLAN_FILE, RESOLVED_FILE, STATE_FILE, SWEEP_FILE, SWEEPS
from grpo_engine.wire.supervisor import ENDED_RUN_STATES, RunStatus, ServiceState
from grpo_engine.wire.terminal_text import printable
from grpo_tui.client.local import look_at, marked_folders, stored_status, unreadable_file
from grpo_tui.paths import LOGS
from grpo_tui.run_files.metrics import spread_lines
from grpo_tui.run_files.whole_file import read_whole
from grpo_tui.supervisor.lock import has_daemon
from grpo_tui.supervisor.registered import registered_folders
from grpo_tui.supervisor.state_file import read_state
from grpo_tui.sweeps.files import ASKED_FILE, RESULTS_FILE, holder_of, read_mark
from grpo_tui.sweeps.grid import shown_setting
from grpo_tui.view.board.state import BoardRun, BoardSweep
from grpo_tui.view.diagnosis import diagnose
from grpo_tui.view.metrics.names import measured_as
from grpo_tui.view.metrics.summary import REWARD, WINDOW, Score
from grpo_tui.view.progress import progress_of
from grpo_tui.view.run_settings import read_settings
from grpo_tui.view.service_rules import reason

MAX_RUNS = 500
"""The newest."""
NUM_PLACES, BYTES_A_PLACE = 12, 3 * 1024
"""Of the metrics before the newest: a few lines each, for the sparkline."""
TAIL_BYTES = 32 * 1024
"""Of the newest: enough lines for the reward, the time left and the diagnosis."""
LOOK_AGAIN_S = 20.0
"""After so long the processes of a run without a supervisor are looked for again, and those of unregistered runs."""
_WATCHED = (STATE_FILE, METRICS_FILE, PLAN_FILE, SWEEP_FILE, RESOLVED_FILE)
_Stamp = tuple[tuple[int, int] | None, ...]


class _Point(BaseModel):
    """A row of `results.json`; what the board needs of it."""

    settings: Mapping[str, Any] = {}
    seed: int | None = None
    run: str | None = None


class _Combination(BaseModel):
    settings: Mapping[str, Any] = {}
    reward: float | None = None
    reward_error: float | None = None
    score: float | None = None
    score_error: float | None = None


class _Table(BaseModel):
    """`results.json` of a sweep."""

    points: list[_Point] = []
    settings: list[_Combination] = []
    """The best one first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A run as it was read, and what its files were then."""

    run: BoardRun
    stamp: _Stamp
    is_over: bool
    """Whether its state file says that it has ended: no process has to be looked for."""
    looked_at: float


class BoardReader:
    """Remembers what it has read."""

    def __init__(self, logs: Path = LOGS) -> None:
        """Read nothing yet.

        Args:
            logs: the folder of runs whose ended runs and sweeps are shown.
        """
        self._logs = Path(os.path.realpath(logs))
        self._known: dict[Path, _Known] = {}
        self._tables: dict[Path, tuple[_Stamp, _Table | None]] = {}
        self._marked: set[Path] = set()
        self._marked_at = -LOOK_AGAIN_S

    def has_runs(self) -> bool:
        """Whether there is any run or sweep; looks at names of files alone."""
        return bool(self._folders()) or any((self._logs / SWEEPS).glob(f"*/{ASKED_FILE}"))

    def read(self) -> tuple[tuple[BoardRun, ...], tuple[BoardSweep, ...]]:
        """All runs, the newest first, and all sweeps."""
        now = time.monotonic()
        if now - self._marked_at >= LOOK_AGAIN_S:
            self._marked, self._marked_at = marked_folders(), now
        self._known = {folder: self._look(folder, now) for folder in self._folders()}
        runs = [known.run for known in self._known.values()]
        folders = {run.sweep for run in runs if run.sweep is not None}
        folders |= {path.parent for path in (self._logs / SWEEPS).glob(f"*/{ASKED_FILE}")}
        sweeps = {folder: self._sweep(folder) for folder in sorted(folders)}
        return tuple(self._with_label(run) for run in runs), tuple(sweeps.values())

    def _folders(self) -> list[Path]:
        here = {path.parent for path in self._logs.glob(f"*/{PLAN_FILE}")}
        with suppress(GrpoError):
            here |= registered_folders()
        times: dict[Path, float] = {}
        for folder in here | self._marked:
            with suppress(OSError):  # it was removed
                times[folder.resolve()] = (folder / PLAN_FILE).stat().st_mtime
        return sorted(times, key=lambda folder: times[folder], reverse=True)[:MAX_RUNS]

    def _look(self, folder: Path, now: float) -> _Known:
        known, stamp = self._known.get(folder), _stamp(folder, _WATCHED)
        if known is not None and known.stamp == stamp:
            is_due = now - known.looked_at >= LOOK_AGAIN_S
            if known.is_over or (not known.run.is_live and not is_due and not has_daemon(folder)):
                return known
            if known.run.is_live and not is_due and has_daemon(folder):
                return known
        return _read_run(folder, stamp, now)

    def _table(self, folder: Path) -> _Table | None:
        stamp = _stamp(folder, (RESULTS_FILE,))
        before = self._tables.get(folder)
        if before is None or before[0] != stamp:
            try:
                table = _Table.model_validate_json(read_whole(folder / RESULTS_FILE))
            except (OSError, ValidationError):
                table = None
            self._tables[folder] = before = stamp, table
        return before[1]

    def _sweep(self, folder: Path) -> BoardSweep:
        table = self._table(folder)
        best = table.settings[0] if table is not None and table.settings else None
        score = None
        if best is not None and best.score is not None:
            score = Score(step=0, value=best.score, error=best.score_error)
        elif best is not None and best.reward is not None:
            score = Score(step=0, value=best.reward, error=best.reward_error)
        began_at = 0.0
        with suppress(OSError):
            began_at = (folder / ASKED_FILE).stat().st_mtime
        return BoardSweep(
            folder=folder,
            num_points=None if table is None else len(table.points),
            is_running=holder_of(folder) is not None,
            best=score,
            best_label=_label(best.settings, None) if best is not None else "",
            began_at=began_at,
        )

    def _with_label(self, run: BoardRun) -> BoardRun:
        if run.sweep is None or (table := self._table(run.sweep)) is None:
            return run
        point = next((point for point in table.points if point.run == run.name), None)
        return run if point is None else replace(run, label=_label(point.settings, point.seed))


def _read_run(folder: Path, stamp: _Stamp, now: float) -> _Known:
    plan = stamp[_WATCHED.index(PLAN_FILE)]
    run = BoardRun(folder=folder, began_at=plan[0] / 1e9 if plan is not None else 0.0)
    fault = unreadable_file(folder)
    if fault is not None:
        run = replace(run, note=printable(f"{fault.path.name}: {fault.why}"))
        return _Known(run=run, stamp=stamp, is_over=False, looked_at=now)
    mark = read_mark(folder)
    if mark is not None:
        run = replace(run, sweep=folder.parent / SWEEPS / mark.sweep)
    looked = look_at(folder)
    try:
        status = (read_state(folder) if looked.has_daemon else None) or stored_status(looked)
    except GrpoError as error:
        run = replace(run, is_live=looked.is_live, note=printable(str(error)))
        return _Known(run=run, stamp=stamp, is_over=False, looked_at=now)
    settings = read_settings(folder)
    lines: list[MetricsLine] = []
    with suppress(OSError):
        lines = spread_lines(folder, num_places=NUM_PLACES, bytes_a_place=BYTES_A_PLACE, tail_bytes=TAIL_BYTES)
    name = measured_as(REWARD, {name for line in lines for name in line.metrics})
    rewards = [(line.step, line.metrics[name]) for line in lines if name in line.metrics] if name is not None else []
    last = [reward for _, reward in rewards[-WINDOW:]]
    live_now = time.time() if looked.is_live else None
    warnings = [*status.warnings, *diagnose(lines, status, settings, now=live_now)]
    run = replace(
        run,
        state=status.state,
        profile=printable(status.profile),
        is_live=looked.is_live,
        started_at=status.started_at,
        ended_at=status.ended_at,
        progress=progress_of(lines, settings.training_steps, is_live=looked.is_live),
        reward=fmean(last) if last else None,
        rewards=tuple(rewards),
        warnings=tuple(warning for warning in warnings if warning.severity != "info"),
        gpus=tuple(sorted({gpu for service in status.services for gpu in service.gpus})),
        services=printable(", ".join(f"{service.name} {service.state}" for service in status.services)),
        note=_note(status, mark.pruned if mark is not None else None),
    )
    is_lost = any(warning.id == "no-supervisor" for warning in status.warnings)
    is_over = not looked.is_live and status.state in ENDED_RUN_STATES and not is_lost
    return _Known(run=run, stamp=stamp, is_over=is_over, looked_at=now)


def _note(status: RunStatus, pruned: str | None) -> str:
    failed = (service for service in status.services if service.state is ServiceState.FAILED)
    reasons = (f"{service.name}: {reason(service) or 'failed'}" for service in failed)
    return printable(pruned or next(reasons, ""))


def _label(settings: Mapping[str, Any], seed: int | None) -> str:
    """`lr=0.0001 seed=2`: keys by their last part, where these differ."""
    names = {key: key.rpartition(".")[2] for key in settings}
    if len(set(names.values())) < len(names):
        names = {key: key.removeprefix("services.") for key in settings}
    shown = [f"{names[key]}={shown_setting(key, value)}" for key, value in settings.items()]
    return printable(" ".join([*shown, *([] if seed is None else [f"seed={seed}"])]))


def _stamp(folder: Path, names: Iterable[str]) -> _Stamp:
    return tuple(_stamp_of(f"{folder}/{name}") for name in names)


def _stamp_of(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
