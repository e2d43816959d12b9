"""Who a process is: its id and its start time, because ids are used again.

Linux only (`/proc`). A zombie counts as gone: it holds neither memory nor locks, and writes nothing any more.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

_STATE_FIELD, _START_FIELD = 0, 19
"""Positions in /proc/<pid>/stat after the command's closing parenthesis (fields 3 and 22 of proc(5))."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process id with field 22 of /proc/<pid>/stat, the clock ticks from boot to its start."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The process that has `pid` now, or None when there is none."""
        fields = _stat_fields(pid)
        if fields is None or fields[_STATE_FIELD] in ("Z", "X"):
            return None
        return cls(pid, int(fields[_START_FIELD]))

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        """This process."""
        identity = cls.of(os.getpid())
        assert identity is not None
        return identity

    def is_alive(self) -> bool:
        """Whether the very same process still runs."""
        return ProcessIdentity.of(self.pid) == self


def _stat_fields(pid: int) -> list[str] | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command may hold spaces and parentheses; everything after the last ")" is plain.
    return text[text.rindex(")") + 2 :].split()
