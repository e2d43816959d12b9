"""Runs from the files in their folders, without a supervisor: the list, which are live, and their status.

Reads only. The state that a dead supervisor left in `state.json` is checked against the keepers, and marked as such.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from grpo_engine.diagnosis.text import count_text
from grpo_engine.errors import GrpoError, PeerError
from grpo_engine.wire.codec import may_be_hollow
from grpo_engine.wire.run_folder import KEEPERS, PLAN_FILE, STATE_FILE, SUPERVISOR_LOG
from grpo_engine.wire.supervisor import (
    ENDED_RUN_STATES,
    RunState,
    RunStatus,
    ServiceState,
    ServiceStatus,
    Warning,
    how_to_go_on,
)
from grpo_engine.wire.terminal_text import printable
from grpo_tui.paths import LOGS, name_of_run
from grpo_tui.run_files.metrics import latest_metrics as latest_metrics
from grpo_tui.run_files.opening import open_file
from grpo_tui.run_files.whole_file import require_readable
from grpo_tui.supervisor.keeper.client import KeeperState, keeper_states, living_keepers
from grpo_tui.supervisor.lock import has_daemon

if TYPE_CHECKING:
    from grpo_tui.supervisor.keeper.proc import ProcessId
    from grpo_tui.supervisor.state_file import StateDocument

READ_SUFFIXES = {".json", ".jsonl", ".log", ".txt"}
"""Of the files that commands and the screen read; services may put others, such as sockets, into the run folder."""
READ_WHOLE_SUFFIX = ".json"
"""Of those that are read at once; the others are read in parts."""
MAX_FILES = 16_384
"""In a run folder, or of its keepers: to look at each of a million takes a minute."""
MOST_NAMED = 8
"""Of the runs that a word may mean."""
NO_RUN_HERE = "no run was started here; `grpo-tui --profile NAME` starts one, `grpo-tui` alone lists those of this host"
RESTORED_WITHIN_S, RESTORED_POLL_S = 10.0, 0.1
"""A supervisor looks every 2 s whether its run folder is there."""
MOVING = {ServiceState.STARTING, ServiceState.READY, ServiceState.UNHEALTHY, ServiceState.STOPPING}


class NoSuchRun(GrpoError):
    """No run has this name, or several do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A file or folder that prevents a run from being read, and why."""

    run: str
    """Name of the folder of the run."""
    path: Path
    why: str

    def __str__(self) -> str:
        return printable(f"{self.path}: the run is left out: {self.why}", keep="")


class StartRefused(GrpoError):
    """A live run is in the way of a start; `choices` are what would settle it: joining it, or a run beside it.

    `reasons` are the lines of the text that say what is in the way, without what to do.
    """

    def __init__(
        self, text: str, *, choices: tuple[Literal["join", "new"], ...] = (), reasons: Sequence[str] = ()
    ) -> None:
        super().__init__(text)
        self.choices = choices
        self.reasons = tuple(reasons) or (text,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run's folder, and whether any of its processes is alive."""

    folder: Path
    has_daemon: bool
    has_services: bool
    """Whether any process of its services is alive, with or without a supervisor."""

    @property
    def id(self) -> str:
        """The name of the run."""
        return self.folder.name

    @property
    def is_live(self) -> bool:
        """Whether any process of it is alive."""
        return self.has_daemon or self.has_services


def runs(logs: Path = LOGS) -> list[Run]:
    """All runs below a folder, the newest first."""
    return runs_and_left_out(logs)[0]


def runs_and_left_out(logs: Path = LOGS) -> tuple[list[Run], list[Unreadable]]:
    """All runs below a folder, the newest first, and for each run that cannot be read the file that prevents it."""
    files = {folder: unreadable_file(folder) for folder in _run_folders(logs)}
    readable = sorted((folder for folder, file in files.items() if file is None), key=_started_at, reverse=True)
    marked = cache(marked_runs)  # one look for all of them: others may put any number of folders beside ours
    return [look_at(folder, marked) for folder in readable], [file for file in files.values() if file is not None]


def unreadable_file(folder: Path) -> Unreadable | None:
    """What of a run folder cannot be read, or would hang its reader or fill the memory; None in a proper one."""
    try:
        folder.name.encode()
        paths = _files_in(folder)
        with suppress(FileNotFoundError, NotADirectoryError):
            paths += _files_in(folder / KEEPERS)
    except UnicodeEncodeError:
        why = f"its name is not UTF-8: {os.fsencode(folder.name)!r}: rename it"
        return Unreadable(run=folder.name, path=folder, why=why)
    except OSError as error:  # another user's
        return Unreadable(run=folder.name, path=Path(error.filename or folder), why=error.strerror or str(error))
    for path in paths:
        if path.suffix in READ_SUFFIXES:
            try:
                _require_readable(path)
            except FileNotFoundError:  # a link to nothing, a file that was removed meanwhile
                continue
            except OSError as error:
                return Unreadable(run=folder.name, path=path, why=error.strerror or str(error))
    return None


def _files_in(folder: Path) -> list[Path]:
    """All files in a folder.

    Raises:
        OSError: it cannot be read, or has more files than that of any run.
    """
    with os.scandir(folder) as entries:
        found = [Path(entry.path) for entry in islice(entries, MAX_FILES + 1)]
    if len(found) > MAX_FILES:
        raise OSError(errno.EFBIG, f"more than {MAX_FILES:,} files in this folder, as in no run", str(folder))
    return found


def _require_readable(path: Path) -> None:
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        return
    if path.suffix == READ_WHOLE_SUFFIX or not stat.S_ISREG(status.st_mode):
        require_readable(status)
    if path.suffix == READ_WHOLE_SUFFIX and not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if may_be_hollow(status):
        open_file(path).close()


def _run_folders(logs: Path) -> list[Path]:
    return [path.parent for path in logs.glob(f"*/{PLAN_FILE}")] if logs.is_dir() else []


def marked_runs() -> set[tuple[str, str | None]]:
    """Name and folder of each run of this user that has a process with its marker, but this one and those above it."""
    from grpo_tui.supervisor.keeper import proc

    spared = proc.ourselves()
    marks = filter(None, (proc.marker(process.pid) for process in proc.living() if process.pid not in spared))
    return {(mark.run, mark.run_folder) for mark in marks}


def look_at(folder: Path, marked: Callable[[], set[tuple[str, str | None]]] = marked_runs) -> Run:
    """Find out which processes of a run are alive; `marked` is called where neither supervisor nor keeper is."""
    supervised = has_daemon(folder)
    has_services = supervised or any(living_keepers(folder)) or (not is_over(folder) and has_orphans(folder, marked()))
    return Run(folder=folder.resolve(), has_daemon=supervised, has_services=has_services)


def has_orphans(folder: Path, marked: set[tuple[str, str | None]]) -> bool:
    """Whether processes are alive of a run that lost its supervisor and its keepers, by marker and ledger."""
    if (folder.name, str(folder.resolve())) in marked:
        return True
    return any(process.is_alive() for process in recorded_processes(folder))


def recorded_processes(folder: Path) -> set[ProcessId]:
    """The processes of a run, alive or not, as its last supervisor recorded them.

    None of a run that is not registered: in a folder from elsewhere they may be any processes.
    """
    from grpo_tui.supervisor.keeper.proc import ProcessId
    from grpo_tui.supervisor.registered import is_registered
    from grpo_tui.supervisor.state_file import boot_id, read_state

    try:
        document = read_state(folder) if is_registered(folder) else None
    except (GrpoError, OSError):
        return set()
    if document is None or document.ledger is None or document.ledger.boot_id != boot_id():
        return set()
    return {ProcessId(*each) for service in document.ledger.services.values() for each in service.processes}


def lost_runs(logs: Path = LOGS) -> set[str]:
    """Live runs of this folder whose own folder was deleted, from the markers of their processes."""
    folders, parent = marked_folders(), Path(os.path.realpath(logs))
    return {each.name for each in folders if each.parent == parent and not (each / PLAN_FILE).exists()}


def marked_folders() -> set[Path]:
    """The folders of all runs on this machine that have a process whose marker can be read."""
    from grpo_tui.supervisor.keeper import proc

    marks = filter(None, (proc.marker(process.pid) for process in proc.living()))
    return {Path(mark.run_folder) for mark in marks if mark.run_folder is not None}


def run_folders_anywhere() -> set[Path]:
    """The folders of all runs of this user on this host, in whatever folder of runs: registered, or marked."""
    from grpo_tui.supervisor.registered import registered_folders

    return registered_folders() | marked_folders()


def is_over(folder: Path) -> bool:
    """Whether a run has ended, according to its state file."""
    from grpo_tui.supervisor.state_file import read_state

    try:
        document = read_state(folder)
    except PeerError:
        return False
    return document is not None and document.state in ENDED_RUN_STATES


def find_run(prefix: str | None, logs: Path = LOGS, *, also_ended: bool) -> Run:
    """The run with this id, its unique prefix or last parts (`9a55`); without one, the newest live run.

    One whose folder was deleted a moment ago is waited for until its supervisor has made the folder again.

    Args:
        also_ended: whether the newest ended run is returned when there is no prefix and no live run.

    Raises:
        NoSuchRun: no run, or more than one, matches.
    """
    try:
        return _find_run(prefix, logs, also_ended=also_ended)
    except NoSuchRun:
        lost = lost_runs(logs)
    for name in lost if prefix is None else _meant(prefix, sorted(lost)):
        if not _until_restored(Path(os.path.realpath(logs), name)):
            raise NoSuchRun(text_of_lost(name))
    # Also where none is lost: its folder may have been made again since the first look.
    return _find_run(prefix, logs, also_ended=also_ended)


def text_of_lost(name: str) -> str:
    """What is wrong with a live run whose folder was deleted, and what to do."""
    return f"run {name} is live and its folder was deleted: end it with `grpo-tui down {name}` first"


def _until_restored(folder: Path) -> bool:
    """Wait until a run's supervisor has made the deleted folder again; returns whether it has."""
    from grpo_tui.supervisor.keeper.owners import is_supervised

    deadline = time.monotonic() + RESTORED_WITHIN_S
    while not (is_there := (folder / PLAN_FILE).exists()) and time.monotonic() < deadline and is_supervised(folder):
        time.sleep(RESTORED_POLL_S)
    return is_there


def _meant(prefix: str, ids: Sequence[str]) -> list[str]:
    """Of these ids of runs those that a word means: it is one, or its name; else it is the beginning, else the end."""
    exact = [each for each in ids if each == prefix] or [each for each in ids if name_of_run(each) == prefix]
    found = exact or [each for each in ids if each.startswith(prefix)]
    return found or [each for each in ids if prefix and each.endswith(f"-{prefix}")]


def _find_run(prefix: str | None, logs: Path, *, also_ended: bool) -> Run:
    known, left_out = runs_and_left_out(logs)
    if prefix is not None:
        meant = _meant(prefix, [run.id for run in known])
        found = [run for run in known if run.id in meant]
        if len(found) == 1:
            return found[0]
        if unreadable := [each for each in left_out if not found and each.run.startswith(prefix)]:
            raise NoSuchRun(f"run {prefix!r}: {unreadable[0]}")
        names = ", ".join(f"{run.id} ({_state_word(run)})" for run in (found or known)[:MOST_NAMED])
        if len(found or known) > MOST_NAMED:
            names += f" and {count_text(len(found or known) - MOST_NAMED, 'older one')}"
        what = "several runs match" if found else "no such run"
        raise NoSuchRun(
            f"run {prefix!r}: {what}; runs, the newest first: {names or f'none in {os.path.realpath(logs)}'}"
        )
    live = [run for run in known if run.is_live]
    if live or (also_ended and known):
        return (live or known)[0]
    hint = NO_RUN_HERE
    if known:
        hint = f"the newest, {known[0].id}, has ended; {how_to_go_on(known[0].folder)}"
    elif left_out:
        hint = str(left_out[0])
    raise NoSuchRun(f"no live run in {os.path.realpath(logs)}: {hint}")


def _state_word(run: Run) -> str:
    try:
        return stored_status(run).state
    except PeerError:
        return "state unknown"


def _started_at(folder: Path) -> float:
    try:
        return (folder / PLAN_FILE).stat().st_mtime
    except FileNotFoundError:  # deleted meanwhile
        return 0.0


# --- the status document without a daemon --------------------------------------------------------------------------


def stored_status(run: Run) -> RunStatus:
    """The status of a run from its files.

    Raises:
        PeerError: `state.json` is missing or damaged.
    """
    from grpo_tui.supervisor.state_file import read_state  # here: not needed where a supervisor answers

    document = read_state(run.folder)
    if document is None:
        raise PeerError(f"{run.folder / STATE_FILE}: missing: the run has not started yet, or its folder was emptied")
    status = RunStatus(**{name: getattr(document, name) for name in RunStatus.model_fields})
    return status if status.state in ENDED_RUN_STATES else _unsupervised(run, document, status)


def _unsupervised(run: Run, document: StateDocument, status: RunStatus) -> RunStatus:
    """The status of a run whose supervisor died, with the services as their keepers report them."""
    keepers = {(state.service, state.attempt): state for state in keeper_states(run.folder)}
    services = [_seen(service, keepers.get((service.name, service.attempt))) for service in status.services]
    num_living = sum(service.state in MOVING for service in services)
    if num_living:
        services_run = "1 service keeps" if num_living == 1 else f"{num_living} services keep"
        text = f"the supervisor of this run has exited; {services_run} running without it"
        hint = f"`grpo-tui upgrade {run.id}` (or attach, start, stop, down) starts a supervisor that takes them over"
    elif run.has_services:
        text = "the supervisor of this run and its keepers have exited; processes of its services are still alive"
        hint = f"`grpo-tui down {run.id}` ends them; `grpo-tui attach {run.id}` ends them and starts the services again"
    else:
        text = "the supervisor of this run and all its services have exited"
        hint = f"see {run.folder / SUPERVISOR_LOG}; {how_to_go_on(run.folder)}"
    warning = Warning(id="no-supervisor", severity="error", text=text, hint=hint)
    return status.model_copy(
        update={
            "state": status.state if num_living else RunState.DEGRADED if run.has_services else RunState.FAILED,
            "supervisor": None,
            "services": services,
            "warnings": [warning, *status.warnings],
        }
    )


def _seen(service: ServiceStatus, keeper: KeeperState | None) -> ServiceStatus:
    """A service that ran when its supervisor died, as its keeper reports it now."""
    if service.state not in MOVING:
        return service
    if keeper is not None and keeper.state != "gone" and keeper.keeper.identity().is_alive():
        return service.model_copy(update={"pid": keeper.main.pid if keeper.main else None})
    code = keeper.exit_code if keeper is not None else None
    seen = {
        "state": ServiceState.FINISHED if code == 0 else ServiceState.FAILED,
        "pid": None,
        "pgid": None,
        "exit_code": code,
        "cpu_percent": None,
        "rss_bytes": None,
        "gpu_memory_bytes": None,
        "why": f"ended while no supervisor was running, exit code {'unknown' if code is None else code}",
    }
    return service.model_copy(update=seen)


def age_words(started_at: float | None, ended_at: float | None) -> str:
    """The duration of a run so far: `42 s`, `5 min`, `3.2 h`."""
    if started_at is None:
        return "-"
    return duration_words(max(0.0, (ended_at or time.time()) - started_at))


def duration_words(seconds: float) -> str:
    """`42 s`, `5 min`, `3.2 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
