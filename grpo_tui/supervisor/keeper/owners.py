"""To which run a process belongs that holds a port or GPU memory: this run, another run, a run that ended, or none.

Decided by the marker in the environment and by the lock that a supervisor holds, never by the name of a process or by
the clock. Reads only; `teardown.py` and `preflight.py` act on it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from grpo_engine.wire.run_folder import LOCK_FILE
from grpo_engine.wire.supervisor import ResourceHolder
from grpo_tui.supervisor.keeper import proc
from grpo_tui.supervisor.keeper.client import living_keepers
from grpo_tui.supervisor.keeper.proc import Stat
from grpo_tui.supervisor.lock import has_daemon

COMMAND_HEAD, COMMAND_TAIL = 100, 60
"""Characters of a long command line that a message shows: the program, and the last arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process, and the run that it belongs to."""

    process: Stat | None
    """None when it cannot be read: another user's, or in another namespace."""
    uid: int | None
    """None when it is unknown."""
    command: str
    mark: proc.Marker | None
    """The run that it was started for; None for a foreign process."""
    is_supervised: bool
    """Whether the supervisor of that run is alive."""
    is_kept: bool = False
    """Whether it is below a living keeper of that run: with or without a supervisor, the run continues."""

    @property
    def is_other_users(self) -> bool:
        """Whether it runs as another user, whose processes are never touched."""
        return self.process is None or self.uid != os.getuid()

    @property
    def is_foreign(self) -> bool:
        """Whether no run started it, or its marker names no run folder, so that its run cannot be found."""
        return self.mark is None or self.mark.run_folder is None

    def belongs_to(self, run: str | None, service: str | None) -> bool:
        """Whether this run (and service, if given) may end it without `--take-ports`: its own, or a stale process."""
        if self.mark is None:
            return False
        if self.mark.run == run:
            return service is None or self.mark.service == service
        return not (self.is_foreign or self.is_supervised or self.is_kept)

    @property
    def may_be_ended(self) -> bool:
        """Whether it can be ended at all: it is alive, of our user, and neither this process nor an ancestor of it."""
        if self.process is None or self.process.is_dead or self.is_other_users:
            return False
        return self.process.pid not in proc.ourselves()

    def is_left_over(self, run: str | None, service: str | None) -> bool:
        """Whether a start of this service ends it: a process of an earlier attempt, or a stale one."""
        return self.may_be_ended and self.belongs_to(run, service)

    def is_ours(self, run: str | None = None) -> bool:
        """Whether a run of this project started it; `run` is the one that asks."""
        return self.mark is not None and (self.mark.run == run or not self.is_foreign)

    def holder(self, run: str | None = None, *, pid: int | None = None) -> ResourceHolder:
        """The process as a `Refusal` names it; `pid` is for a process that cannot be read."""
        return ResourceHolder(
            pid=pid if self.process is None else self.process.pid,
            user=None if self.uid is None else proc.user_name(self.uid),
            command=_on_one_line(self.command),
            is_ours=self.is_ours(run),
        )

    def who(self, run: str | None = None) -> str:
        """The message that names the process, and what to do where that is clear; `run` is the one that asks."""
        if self.process is None:
            return f"a process of user {_user(self.uid)} (no permission to inspect it)"
        pid, command = f"pid {self.process.pid}", _on_one_line(self.command)
        if self.mark is not None and self.mark.run == run:
            return f"{pid}, service {self.mark.service} of this run: {command}"
        if self.mark is None or self.is_foreign:
            return f"{pid} (user {_user(self.uid)}): {command}"
        if not self.is_supervised and not self.is_kept:
            return f"{pid}, left by run {self.mark.run} of this project: {command}"
        if not self.is_supervised:
            ways = f"`grpo-tui attach {self.mark.run}` takes it over, `grpo-tui down {self.mark.run}` ends it"
            return (
                f"{pid}, service {self.mark.service} of run {self.mark.run}, which is still running ({ways}): {command}"
            )
        owner = f"service {self.mark.service} of run {self.mark.run}"
        return f"{pid}, {owner}, which is still supervised (`grpo-tui down {self.mark.run}` ends it): {command}"


def owner_of(pid: int | None, uid: int | None = None) -> Owner:
    """The owner of a process; `uid` is its user where the process itself cannot be read."""
    stat = None if pid is None else proc.read_stat(pid)
    if stat is None:
        return Owner(process=None, uid=uid, command="", mark=None, is_supervised=False)
    known_uid = proc.uid_of(stat.pid)
    mark = mark_of(stat.pid)
    folder = None if mark is None or mark.run_folder is None else Path(mark.run_folder)
    return Owner(
        process=stat,
        uid=uid if known_uid is None else known_uid,
        command=proc.command_line(stat.pid),
        mark=mark,
        is_supervised=folder is not None and is_supervised(folder),
        is_kept=folder is not None and is_kept(stat.pid, folder),
    )


def mark_of(pid: int) -> proc.Marker | None:
    """The marker of a process, or of its nearest ancestor that has one: a process may clean its environment."""
    if (mark := proc.marker(pid)) is not None or proc.uid_of(pid) != os.getuid():
        return mark
    return next((mark for parent in proc.ancestors(pid) if (mark := proc.marker(parent)) is not None), None)


def is_kept(pid: int, run_folder: Path) -> bool:
    """Whether a process is below a living keeper of the run."""
    keepers = {state.keeper.pid for state in living_keepers(run_folder)}
    return not keepers.isdisjoint(proc.ancestors(pid))


def is_supervised(run_folder: Path) -> bool:
    """Whether a run's supervisor is alive: it holds the run's lock, which the kernel releases when it exits.

    A lock that we may not open is another user's: that run counts as supervised. When the folder of a living supervisor
    was deleted, the lock is found among the files that the supervisor has open.
    """
    lock = run_folder / LOCK_FILE
    try:
        lock.stat()
    except (FileNotFoundError, NotADirectoryError):
        return _is_open_somewhere(lock)
    except OSError:
        return True
    return not os.access(lock, os.R_OK | os.W_OK) or has_daemon(run_folder)


def _is_open_somewhere(path: Path) -> bool:
    """Whether a process of this user has this file open, which does not exist or was deleted."""
    names = {str(path), f"{path} (deleted)"}
    return any(not names.isdisjoint(_open_files(process.pid)) for process in proc.living())


def _open_files(pid: int) -> Iterator[str]:
    """The files that a process has open, as far as permissions allow."""
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            with suppress(FileNotFoundError):  # closed since
                yield os.readlink(f"{folder}/{name}")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return


def _user(uid: int | None) -> str:
    return "unknown" if uid is None else proc.user_name(uid)


def _on_one_line(command: str) -> str:
    line = " ".join(command.split())
    while line.endswith(" ''"):  # padding left by a program that set a shorter process title
        line = line.removesuffix(" ''")
    if len(line) <= COMMAND_HEAD + COMMAND_TAIL:
        return line
    return f"{line[:COMMAND_HEAD]}…{line[-COMMAND_TAIL:]}"
