"""Processes: identity by PID and start time, process trees, and the one way in which they are ended.

Linux only (`/proc`). Ending is always SIGTERM, a grace period, then SIGKILL in rounds until nothing is found, because a
process may fork while its siblings are killed. Nothing is matched by name and nothing is signalled by a bare PID that
may have been reused.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.02
_KILL_ROUND_S = 0.01
_KILL_WITHIN_S = 10.0
_TRACKER_GRACE_S = 0.5
"""For resource trackers to remove from shared memory what killed processes left there."""
MAX_DESCRIPTORS = 1 << 16
"""As the soft limit, if the hard one allows; the usual 1024 are soon spent on connections."""


class AnyProcess(Protocol):
    """A process of this machine or of another one."""

    @property
    def pid(self) -> int:
        """On its machine."""

    def is_alive(self) -> bool:
        """Whether it still runs, as far as this machine can tell."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process id with field 22 of /proc/<pid>/stat, the clock ticks from boot to its start."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The process that has `pid` now, or None. A zombie counts as gone: it holds neither memory nor locks."""
        stat = _read_stat(pid)
        return None if stat is None or stat.is_zombie else stat.identity

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        """This process."""
        identity = cls.of(os.getpid())
        assert identity is not None
        return identity

    def is_alive(self) -> bool:
        """Whether the very same process still runs."""
        return ProcessIdentity.of(self.pid) == self

    def send_signal(self, number: int) -> None:
        """Signal exactly this process, never a later one with its pid. Does nothing once it is gone or not ours."""
        with suppress(ProcessLookupError, PermissionError):
            descriptor = os.pidfd_open(self.pid)
            try:
                stat = _read_stat(self.pid)
                if stat is not None and stat.identity == self:
                    signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _Stat:
    """What /proc/<pid>/stat says of a process."""

    identity: ProcessIdentity
    is_zombie: bool
    is_stopped: bool
    parent: int
    group: int
    session: int


class ProcessTree:
    """Child processes of this one with their descendants and all members of their process groups and sessions.

    Every process that was found once is remembered, so that it stays in the tree when its parent exits.
    """

    def __init__(self, roots: Iterable[int]) -> None:
        """Take children that are running or not yet reaped."""
        self._roots = {stat.identity for pid in roots if (stat := _read_stat(pid)) is not None}
        self._seen: set[ProcessIdentity] = set()
        self.living()

    def living(self) -> list[ProcessIdentity]:
        """The processes of the tree that run now; zombies are not among them."""
        processes = _all_processes()
        now = {process.identity.pid: process.identity for process in processes}
        # A root that was reaped may have lost its pid to another process, whose group and session are not ours.
        leaders = {root.pid for root in self._roots if now.get(root.pid, root) == root}
        members = {
            process.identity.pid
            for process in processes
            if process.identity in self._seen or leaders & {process.identity.pid, process.group, process.session}
        }
        found = members | _below(members, processes)
        living = [each.identity for each in processes if each.identity.pid in found and not each.is_zombie]
        self._seen.update(living)
        return living


def running(pid: int) -> list[ProcessIdentity]:
    """The process that has `pid`; empty when it has ended, whether or not it was reaped."""
    identity = ProcessIdentity.of(pid)
    return [] if identity is None else [identity]


def descendants(pid: int) -> list[ProcessIdentity]:
    """Everything below a process, zombies included."""
    processes = _all_processes()
    below = _below({pid}, processes)
    return [process.identity for process in processes if process.identity.pid in below]


def children(pid: int) -> list[ProcessIdentity]:
    """Those of a process, without zombies."""
    return [each.identity for each in _all_processes() if each.parent == pid and not each.is_zombie]


def terminate(
    find: Callable[[], Collection[ProcessIdentity]], *, grace_s: float, sleep: Callable[[float], None] = time.sleep
) -> bool:
    """Send SIGTERM to what `find` returns, and wait until it returns nothing; whether it did within the grace period.

    Args:
        find: the processes that have not ended; called again and again.
        sleep: waits for that many seconds at most.
    """
    for process in find():
        process.send_signal(signal.SIGTERM)
    return wait_gone(find, within_s=grace_s, sleep=sleep)


def wait_gone(
    find: Callable[[], Collection[ProcessIdentity]], *, within_s: float, sleep: Callable[[float], None] = time.sleep
) -> bool:
    """Wait until `find` returns nothing; whether it did within the time."""
    until = time.monotonic() + within_s
    while find():
        if (left_s := until - time.monotonic()) <= 0:
            return False
        sleep(min(_POLL_S, left_s))
    return True


def kill(
    find: Callable[[], Collection[ProcessIdentity]], *, within_s: float, sleep: Callable[[float], None] = time.sleep
) -> Collection[ProcessIdentity]:
    """Send SIGKILL to what `find` returns until it returns nothing; the processes that survive it for `within_s`.

    Those are stuck in the kernel, usually in a driver.
    """
    until = time.monotonic() + within_s
    while left := find():
        if time.monotonic() > until:
            return left
        for process in left:
            process.send_signal(signal.SIGKILL)
        sleep(_KILL_ROUND_S)
    return ()


def kill_trackers_last(
    find: Callable[[], Collection[ProcessIdentity]], *, sleep: Callable[[float], None] = time.sleep
) -> str:
    """`kill` all but resource trackers, which first remove from shared memory what the others have left, then all.

    Returns which process survives SIGKILL, as words; empty where none does.
    """

    def but_trackers() -> list[ProcessIdentity]:
        return [process for process in find() if not is_resource_tracker(process)]

    left = kill(but_trackers, within_s=_KILL_WITHIN_S, sleep=sleep)
    if not left:
        wait_gone(find, within_s=_TRACKER_GRACE_S, sleep=sleep)
        left = kill(find, within_s=_KILL_WITHIN_S, sleep=sleep)
    pids = ", ".join(str(process.pid) for process in left)
    how = f"is still alive {_KILL_WITHIN_S:g} s after SIGKILL: stuck in the kernel, usually in a driver"
    return f"process {pids} {how}" if left else ""


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal (SIGSTOP, SIGTSTP) or a debugger."""
    stat = _read_stat(pid)
    return stat is not None and stat.is_stopped


def is_resource_tracker(process: ProcessIdentity) -> bool:
    """Whether a process is a resource tracker of multiprocessing.

    It exits after the processes that it serves, and first removes what they left in shared memory. In CPython 3.10 to
    3.13, only the command line identifies the tracker of another process.
    """
    try:
        return b"resource_tracker" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    except OSError:
        return False


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `number` to this process when `parent`, whose child it is, ends.

    Called by the child; a parent that ended before the call is noticed too.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Have orphaned descendants become children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def resident_bytes() -> int:
    """Main memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def raise_descriptor_limit() -> None:
    """Allow this process as many descriptors as it may allow itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _read_stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the command may hold spaces and parentheses
    return _Stat(
        identity=ProcessIdentity(pid, int(fields[19])),
        is_zombie=fields[0] in (b"Z", b"X"),
        is_stopped=fields[0] in (b"T", b"t"),
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
    )


def _all_processes() -> list[_Stat]:
    stats = (_read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [stat for stat in stats if stat is not None]


def _below(roots: set[int], processes: list[_Stat]) -> set[int]:
    """The pids below `roots`, without `roots`."""
    children: dict[int, list[int]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process.identity.pid)
    found: set[int] = set()
    unvisited = list(roots)
    while unvisited:
        for child in children.get(unvisited.pop(), ()):
            if child not in found and child not in roots:
                found.add(child)
                unvisited.append(child)
    return found


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
