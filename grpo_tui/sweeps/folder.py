"""The folder of a sweep, and the runs of its points as their own folders show them: no other state is kept.

A run is found by the mark in its folder, so that a sweep that was killed between any two instructions goes on. The lock
of the folder is held by the command that starts runs; the kernel releases it when that ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from grpo_engine.config import RawTable, did_you_mean, parsed_table, read_table, validated
from grpo_engine.errors import ConfigError, GrpoError, PeerError
from grpo_engine.wire.codec import MAX_FILE_MARKS, num_marks, write_atomically, write_json_atomically
from grpo_engine.wire.run_folder import PLAN_FILE, SWEEP_FILE, SWEEPS
from grpo_engine.wire.supervisor import ENDED_RUN_STATES, RunState, ServiceState
from grpo_engine.wire.sweeps import SweepMark
from grpo_tui.client.local import NoSuchRun, StartRefused, look_at, stored_status
from grpo_tui.paths import LOGS, checked_name, is_name, require_own
from grpo_tui.profile.loading import find
from grpo_tui.run_files.whole_file import MAX_BYTES, read_whole
from grpo_tui.sweeps.asked import Asked, placements, points, profile_at
from grpo_tui.sweeps.chooser import require_optuna
from grpo_tui.sweeps.files import ASKED_FILE, SWEEP_LOCK_FILE, holder_of, read_mark
from grpo_tui.sweeps.grid import Point

PROFILE_FILE = "profile.toml"
"""The profile as it was when the sweep began: it may be edited meanwhile."""
NOT_STARTED_FILE = "not-started.json"
"""Points whose run could not be started, with the reason."""
PRUNED_FILE = "pruned.json"
"""Points that were given up before they had a run, with the reason."""
CHOSEN_FILE = "chosen.json"
"""The combinations of settings that Optuna has chosen so far."""
MAX_ASKED_BYTES = 4 << 20
"""Of `sweep.toml`: each value of a setting is compared with all others."""
MAX_DIGITS = 9
"""Of the number of a point."""
SWEEP_LOG = "sweep.log"
"""What a sweep that was detached prints."""


class PointState(StrEnum):
    """The state of a point."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    PRUNED = "pruned"
    """Ended early by the sweep, since its reward was among the lower ones."""
    STOPPED = "stopped"
    """Ended by a person."""
    INTERRUPTED = "interrupted"
    """Its processes were killed, or the machine was switched off."""
    FAILED = "failed"


ENDED_STATES = frozenset({PointState.FINISHED, PointState.PRUNED, PointState.FAILED})
"""States of points that `sweep resume` leaves as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PointRun:
    """A point, and the run of it."""

    point: Point
    state: PointState
    folder: Path | None = None
    reason: str | None = None
    """Why it failed or was ended early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A sweep that was begun."""

    folder: Path
    asked: Asked
    profile_path: Path
    """Where the profile was; relative paths in it begin there."""
    table: RawTable = field(repr=False)
    """The profile."""
    points: list[Point] = field(repr=False)

    @property
    def name(self) -> str:
        """Its name."""
        return self.folder.name

    @property
    def num_points(self) -> int:
        """How many it has in the end."""
        return len(self.points) if self.asked.optuna is None else self.asked.optuna * (self.asked.seeds or 1)

    @property
    def logs(self) -> Path:
        """The folder of its runs."""
        return self.folder.parent.parent

    def mark(self, point: Point, *, pruned: str | None = None) -> SweepMark:
        """What the run folder of a point says."""
        return SweepMark(sweep=self.name, id=str(self.asked.id), point=point.number, pruned=pruned)


def begin(asked: Asked, name: str | None, logs: Path = LOGS) -> Sweep:
    """Make the folder of a sweep, once every one of its points was checked.

    Raises:
        ConfigError: the profile, the name or a setting of a point is wrong; nothing was made.
        StartRefused: there is a sweep of this name.
    """
    path = find(asked.profile).absolute()
    found = points(asked, read_table(path), path)
    if asked.optuna is not None:
        require_optuna()
    if asked.gpus is not None and "jobs" not in asked.model_fields_set:
        any_point = profile_at(found[0] if found else Point(number=1, settings={}), read_table(path), path)()
        asked = asked.model_copy(update={"jobs": len(placements(asked, any_point.written, str(path)))})
    name = name or f"{path.stem}-{time.strftime('%m%d-%H%M%S')}"
    checked_name(name, option="--name")
    folder = Path(os.path.realpath(logs)) / SWEEPS / name
    asked = asked.model_copy(update={"profile": str(path), "id": secrets.token_hex(8)})
    if len(content := asked.to_toml().encode()) > MAX_ASKED_BYTES:
        raise ConfigError(f"the settings of sweep {name} have more than {MAX_ASKED_BYTES:,} bytes: shorten the longest")
    for parent in (folder.parent.parent, folder.parent):  # the former is the folder of all runs
        parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    beside = folder.with_name(f".{name}.{os.getpid()}.tmp")
    try:
        beside.mkdir(mode=0o700)
        write_atomically(beside / PROFILE_FILE, path.read_bytes(), mode=0o600)
        write_atomically(beside / ASKED_FILE, content, mode=0o600)
        beside.rename(folder)  # whole or not at all; refused where a folder with files has the name
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        if folder.exists():
            raise StartRefused(
                f"sweep {name} exists: `grpo-tui sweep resume {name}` goes on with it, --name OTHER starts another"
            ) from None
        raise GrpoError(f"{folder} cannot be made: {error.strerror or error}") from None
    return Sweep(folder=folder, asked=asked, profile_path=path, table=read_table(folder / PROFILE_FILE), points=found)


def names(logs: Path = LOGS) -> list[str]:
    """All sweeps of a folder, the newest first."""
    files = sorted((logs / SWEEPS).glob(f"*/{ASKED_FILE}"), key=lambda file: file.lstat().st_mtime, reverse=True)
    return [file.parent.name for file in files if is_name(file.parent.name)]


def find_sweep(name: str | None, logs: Path = LOGS, *, to_run: bool = False) -> Sweep:
    """The sweep of this name or unique prefix; without one, the newest.

    Args:
        to_run: whether its runs are to be started or ended, not only read.

    Raises:
        NoSuchRun: there is none.
        ConfigError: its files are damaged.
        ForeignFolder: `to_run`, and another user owns its folder or may write to it.
    """
    folder, known = Path(os.path.realpath(logs / SWEEPS)), names(logs)
    matching = (
        known[:1] if name is None else [n for n in known if n == name] or [n for n in known if n.startswith(name)]
    )
    if len(matching) != 1:
        what = "no sweep" if name is None else f"sweep {name!r}: {'several match' if matching else 'no such sweep'}"
        hint = did_you_mean(name or "", known)
        raise NoSuchRun(f"{what}{hint} in {folder}; there are: {', '.join(known) or 'none'}")
    folder /= matching[0]
    if to_run:
        require_own(folder, reader="grpo-tui sweep status")
    asked = validated(Asked, _read(folder / ASKED_FILE, max_bytes=MAX_ASKED_BYTES), where=str(folder / ASKED_FILE))
    path, table = Path(asked.profile), _read(folder / PROFILE_FILE)
    found = points(asked, table, path, _read_chosen(folder, asked), is_begun=True)
    return Sweep(folder=folder, asked=asked, profile_path=path, table=table, points=found)


def _read_chosen(folder: Path, asked: Asked) -> list[dict[str, Any]]:
    path = folder / CHOSEN_FILE
    if not path.exists():
        return []
    chosen = _read(path).get("combinations")
    wanted = asked.values().keys()
    if not isinstance(chosen, list) or any(not isinstance(each, dict) or each.keys() != wanted for each in chosen):
        raise ConfigError(f"{path}: expected a list of combinations, each with {', '.join(wanted)}")
    return chosen


def _read(path: Path, *, max_bytes: int = MAX_BYTES) -> RawTable:
    """A file of a sweep: a regular one of bounded length, whoever made the folder.

    Raises:
        ConfigError: it cannot be read, or is malformed.
    """
    try:
        content = read_whole(path, max_bytes=max_bytes)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    if num_marks(content) > MAX_FILE_MARKS:
        raise ConfigError(f"{path}: cannot be read: more than {MAX_FILE_MARKS:,} brackets, braces and quotes")
    return parsed_table(content, path)


def with_chosen(sweep: Sweep, chosen: Sequence[Mapping[str, Any]]) -> Sweep:
    """The sweep with the points of all combinations that Optuna has chosen, which are recorded."""
    write_json_atomically(sweep.folder / CHOSEN_FILE, {"combinations": list(chosen)}, mode=0o600)
    return replace(sweep, points=points(sweep.asked, sweep.table, sweep.profile_path, chosen))


@contextmanager
def holding(sweep: Sweep) -> Iterator[None]:
    """Be the one command that starts runs of a sweep.

    Raises:
        StartRefused: another one is.
        GrpoError: the lock cannot be made, or is no file.
    """
    path = sweep.folder / SWEEP_LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        why = "is a link: remove it" if error.errno == errno.ELOOP else f"cannot be opened: {error.strerror}"
        raise GrpoError(f"{path} {why}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, mode = holder(sweep), os.fstat(descriptor).st_mode & 0o777
            if pid is None and mode & 0o077:  # unpacked so: a sweep makes it with 0600
                raise GrpoError(
                    f"{path} has mode {mode:04o}, and a process of another user may hold it: remove it"
                ) from None
            who = "by a process that is not visible here" if pid is None else f"(pid {pid})"
            raise StartRefused(
                f"sweep {sweep.name} is running {who}: `grpo-tui sweep status {sweep.name}` shows it, "
                f"`grpo-tui sweep stop {sweep.name}` ends it"
            ) from None
        os.fchmod(descriptor, 0o600)
        yield
    finally:
        os.close(descriptor)


def holder(sweep: Sweep) -> int | None:
    """Pid of the command that starts runs of a sweep; None where there is none."""
    return holder_of(sweep.folder)


# --- its runs ------------------------------------------------------------------------------------------------------


def runs_of(sweep: Sweep) -> list[PointRun]:
    """Every point with its run; of several runs of a point, the newest."""
    folders = _marked(sweep)
    without_run = {
        state: read_reasons(sweep, file)
        for state, file in ((PointState.PRUNED, PRUNED_FILE), (PointState.FAILED, NOT_STARTED_FILE))
    }

    def of(point: Point) -> PointRun:
        if (folder := folders.get(point.number)) is not None:
            return _run_in(point, folder)
        found = ((state, reasons[point.number]) for state, reasons in without_run.items() if point.number in reasons)
        state, reason = next(found, (PointState.WAITING, None))
        return PointRun(point=point, state=state, reason=reason)

    return [of(point) for point in sweep.points]


def live_folders(sweep: Sweep) -> list[Path]:
    """The folders of its live runs."""
    return [run.folder for run in runs_of(sweep) if run.state is PointState.RUNNING and run.folder is not None]


def look_again(before: PointRun) -> PointRun:
    """The state of a run now."""
    assert before.folder is not None
    return _run_in(before.point, before.folder)


def _marked(sweep: Sweep) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for file in sorted(sweep.logs.glob(f"*/{SWEEP_FILE}"), key=lambda file: file.parent.stat().st_ctime):
        mark = read_mark(file.parent)
        if mark is not None and mark.id == sweep.asked.id and (file.parent / PLAN_FILE).exists():
            found[mark.point] = file.parent
    return found


def remove_unfinished(sweep: Sweep) -> None:
    """Remove folders of runs that a killed sweep had begun to make; only for the holder of the sweep's lock."""
    for file in sweep.logs.glob(f"*/{SWEEP_FILE}"):
        mark = read_mark(file.parent)
        if mark is not None and mark.id == sweep.asked.id and not (file.parent / PLAN_FILE).exists():
            shutil.rmtree(file.parent, ignore_errors=True)


def read_reasons(sweep: Sweep, file: str) -> dict[int, str]:
    """Points without a run, and why: those in `NOT_STARTED_FILE` or `PRUNED_FILE`.

    Raises:
        ConfigError: the file is damaged.
    """
    path = sweep.folder / file
    if not path.exists():
        return {}
    reasons = _read(path)
    if wrong := [number for number in reasons if not number.isdecimal() or len(number) > MAX_DIGITS]:
        raise ConfigError(f"{path}: {wrong[0]!r} is no number of a point")
    return {int(number): str(why) for number, why in reasons.items()}


def write_reasons(sweep: Sweep, file: str, reasons: Mapping[int, str]) -> None:
    """Record them."""
    write_json_atomically(sweep.folder / file, {str(number): why for number, why in reasons.items()}, mode=0o600)


def _run_in(point: Point, folder: Path) -> PointRun:
    state, reason = _state_of(folder)
    return PointRun(point=point, state=state, folder=folder, reason=reason)


def _state_of(folder: Path) -> tuple[PointState, str | None]:
    run = look_at(folder)
    if run.is_live:
        return PointState.RUNNING, None
    mark = read_mark(folder)
    if mark is not None and mark.pruned is not None:
        return PointState.PRUNED, mark.pruned
    try:
        status = stored_status(run)
    except PeerError:  # its supervisor was killed before it wrote anything
        return PointState.INTERRUPTED, None
    if "no-supervisor" in {warning.id for warning in status.warnings} or status.state not in ENDED_RUN_STATES:
        return PointState.INTERRUPTED, None
    match status.state:
        case RunState.FINISHED:
            return PointState.FINISHED, None
        case RunState.STOPPED:
            return PointState.STOPPED, None
    failed = (service for service in status.services if service.state is ServiceState.FAILED)
    reasons = (f"{service.name}: {service.why or 'no reason known'}" for service in failed)
    return PointState.FAILED, next(reasons, "no reason known")
