"""Whose a process is that holds something we want: this run's, an orphan of ours, a supervised run's, or a stranger's.

Judges by the marker in the environment and by the lock that a daemon holds, never by the name of a process or by the
clock. Reads only; `teardown.py` and `preflight.py` act on it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from grpo_tui.supervisor import proc
from grpo_tui.supervisor.lock import LOCK_FILE, has_daemon
from grpo_tui.supervisor.proc import Stat
from grpo_tui.supervisor.processes import living_keepers

COMMAND_HEAD, COMMAND_TAIL = 100, 60
"""Characters of a long command line that a message shows: the program, and what tells one run of it from another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process, and whose it is."""

    process: Stat | None
    """None when it cannot be looked into: another user's, or in another namespace."""
    uid: int | None
    """None when nobody says."""
    command: str
    mark: proc.Marker | None
    """The run of ours that it was started for."""
    is_supervised: bool
    """Whether the supervisor of that run still lives."""
    is_kept: bool = False
    """Whether a keeper of that run stands above it: with or without a supervisor, the run goes on."""

    @property
    def is_other_users(self) -> bool:
        """Whether it runs as another user, whose processes are never touched."""
        return self.process is None or self.uid != os.getuid()

    @property
    def is_strangers(self) -> bool:
        """Whether it is none of ours, or says of no folder in which its run could be looked for: started by hand."""
        return self.mark is None or self.mark.run_folder is None

    def belongs_to(self, run: str | None, service: str | None) -> bool:
        """Whether this run (and this service, if one is named) may end it without asking: its own, or an orphan."""
        if self.mark is None:
            return False
        if self.mark.run == run:
            return service is None or self.mark.service == service
        return not (self.is_strangers or self.is_supervised or self.is_kept)

    @property
    def may_be_ended(self) -> bool:
        """Whether ending it is possible and allowed at all: it lives, is of our user, and is not the one who asks."""
        if self.process is None or self.process.is_dead or self.is_other_users:
            return False
        return self.process.pid not in proc.ourselves()

    def is_left_over(self, run: str | None, service: str | None) -> bool:
        """Whether a start of this service ends it without asking: its own earlier attempt, or an orphan."""
        return self.may_be_ended and self.belongs_to(run, service)

    def who(self, run: str | None = None) -> str:
        """The process for a person, and what to do where it is clear; `run` is the one that asks."""
        if self.process is None:
            return f"a process of user {_user(self.uid)} that we may not look into"
        pid, command = f"pid {self.process.pid}", _on_one_line(self.command)
        if self.mark is not None and self.mark.run == run:
            return f"{pid}, service {self.mark.service} of this run: {command}"
        if self.mark is None or self.is_strangers:
            return f"{pid} (user {_user(self.uid)}): {command}"
        if not self.is_supervised and not self.is_kept:
            return f"{pid}, left by run {self.mark.run} of this project: {command}"
        if not self.is_supervised:
            ways = f"`grpo-tui attach {self.mark.run}` takes it over, `grpo-tui down {self.mark.run}` ends it"
            return f"{pid}, service {self.mark.service} of run {self.mark.run}, which goes on ({ways}): {command}"
        owner = f"service {self.mark.service} of run {self.mark.run}"
        return f"{pid}, {owner}, which is still supervised (`grpo-tui down {self.mark.run}` ends it): {command}"


def owner_of(pid: int | None, uid: int | None = None) -> Owner:
    """Whose a process is; `uid` is what is known of its user where it cannot be looked into itself."""
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
    """The marker of a process, or of the nearest marked parent of one that cleaned its environment."""
    if (mark := proc.marker(pid)) is not None or proc.uid_of(pid) != os.getuid():
        return mark
    return next((mark for parent in proc.ancestors(pid) if (mark := proc.marker(parent)) is not None), None)


def is_kept(pid: int, run_folder: Path) -> bool:
    """Whether a living keeper of the run stands above a process."""
    keepers = {state.keeper.pid for state in living_keepers(run_folder)}
    return not keepers.isdisjoint(proc.ancestors(pid))


def is_supervised(run_folder: Path) -> bool:
    """Whether a run's daemon lives: it holds the run's lock, which the kernel lets go of with its holder.

    A lock that we may not try is another user's, and so is the run, whatever became of its daemon. When the folder was
    removed under a living daemon, the lock is found among the files that the daemon has open.
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
    """Whether a process of ours has this file open, though it is not there (any more)."""
    names = {str(path), f"{path} (deleted)"}
    return any(not names.isdisjoint(_open_files(process.pid)) for process in proc.living())


def _open_files(pid: int) -> Iterator[str]:
    """The files that a process has open, as far as we may look."""
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
    while line.endswith(" ''"):  # the rest of the room that a program which named itself anew had for its arguments
        line = line.removesuffix(" ''")
    if len(line) <= COMMAND_HEAD + COMMAND_TAIL:
        return line
    return f"{line[:COMMAND_HEAD]}…{line[-COMMAND_TAIL:]}"
