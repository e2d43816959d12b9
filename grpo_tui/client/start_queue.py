"""The queue of starts that wait for ports, GPUs and files of live runs: one for each user of a host, in order.

A start in it is a file in the folder of the host, numbered in order, which the waiting command has locked: the kernel
releases the lock when that ends, however it ends, and the next start removes the file. A start is held up by those
before it that wait for one of its own ports or GPUs, and by no others. All files are made and removed under the lock of
all starts.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_engine.errors import GrpoError, PeerError
from grpo_engine.wire.codec import from_line, to_line
from grpo_engine.wire.start_queue import QueuedStart
from grpo_tui.client.local import StartRefused
from grpo_tui.paths import QUEUED, host_folder
from grpo_tui.supervisor.keeper.client import living_keepers
from grpo_tui.supervisor.lock import has_daemon
from grpo_tui.supervisor.registered import registered_folders

if TYPE_CHECKING:
    from grpo_tui.profile.loaded import LoadedProfile

POLL_S = 0.5
"""Between two looks at what is waited for."""
FULL_LOOK_S = 10.0
"""Between two attempts where no run and no earlier start has ended: other programs free ports too."""


class NotInTime(GrpoError):
    """A start has waited as long as it was to; `reasons` are those for which it was refused last."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("not started in time: " + "\n".join(reasons))
        self.reasons = tuple(reasons)


class StartQueue:
    """The place of one start in the queue; it is left at the end of this context."""

    def __init__(self, say: Callable[[str], None], deadline: float | None = None) -> None:
        """Wait until `deadline`, a monotonic time; `say` takes a line for people whenever the reasons change."""
        self._say = say
        self._deadline = deadline
        self._file: Path | None = None
        self._lock = -1
        self._told: list[str] = []
        self._looked_at = 0.0

    def __enter__(self) -> StartQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Give up the place, if there is one."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            os.close(self._lock)
            self._file = None

    def earlier(self) -> list[QueuedStart]:
        """The starts before this one, in order; all of them, where it has no place yet."""
        return [start for file, start in _waiting() if self._file is None or file.name < self._file.name]

    def join(self, start: QueuedStart) -> None:
        """Take the last place, or keep that which it has; under the lock of all starts."""
        if self._file is not None:
            return
        number = max((int(file.stem) for file in _files()), default=0) + 1
        file = host_folder() / f"{number:010d}{QUEUED}"
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, to_line(start))
        self._file, self._lock = file, lock

    def wait(self, refused: StartRefused) -> None:
        """Return when a run or an earlier start has ended, or after a while.

        Raises:
            NotInTime: the deadline has passed.
        """
        heads = [reason.partition(" (")[0] for reason in refused.reasons]  # what follows are figures, which change
        if heads != self._told:
            self._told = heads
            self._say(f"waits, {_place(len(self.earlier()))} in the queue: " + "\n".join(refused.reasons))
        before, began = self._seen(), time.monotonic()
        while self._seen() == before and time.monotonic() - began < FULL_LOOK_S:
            if self._deadline is not None and time.monotonic() >= self._deadline:
                raise NotInTime(refused.reasons)
            time.sleep(POLL_S)

    def _seen(self) -> tuple[set[Path], int]:
        live = {folder for folder in registered_folders() if has_daemon(folder) or any(living_keepers(folder))}
        return live, len(self.earlier())


def start_of(loaded: LoadedProfile, *, moves: bool, shares: bool, name: str | None = None) -> QueuedStart:
    """What a start of this process says of itself.

    Args:
        moves: whether it takes other ports in place of those that are used.
        shares: whether it uses GPUs beside others.
        name: that the run was given.
    """
    gpus = {gpu for service in loaded.profile.services.values() for gpu in service.gpus or ()}
    return QueuedStart(
        pid=os.getpid(),
        profile=loaded.name,
        name=name,
        since=time.time(),
        ports=[] if moves else loaded.stated_ports,
        gpus=sorted(gpus),
        shares_gpus=shares,
    )


def awaited(own: QueuedStart, earlier: Iterable[QueuedStart]) -> list[str]:
    """Which ports and GPUs of a start others wait for that came before it, a line for each of them. Pure."""
    found = []
    for start in earlier:
        ports = [f"port {port}" for port in own.ports if port in start.ports]
        is_shared = own.shares_gpus and start.shares_gpus
        gpus = [] if is_shared else [f"GPU {gpu}" for gpu in own.gpus if gpu in start.gpus]
        if ports or gpus:
            found.append(f"{who(start)} came first and waits for {', '.join([*ports, *gpus])}")
    return found


def who(start: QueuedStart) -> str:
    """A start of the queue for people."""
    return f"the start of {start.name or start.profile} (pid {start.pid})"


def waiting_starts() -> list[QueuedStart]:
    """The starts of this user on this host that wait, in order."""
    return [start for _, start in _waiting()]


def remove_left() -> None:
    """Remove the files of starts that were killed; under the lock of all starts."""
    for file in _files():
        if not _is_held(file):
            file.unlink(missing_ok=True)


def refuse_before(own: QueuedStart, earlier: Sequence[QueuedStart], *, hint: str) -> None:
    """Refuse a start that would take what earlier ones wait for.

    Raises:
        StartRefused: names them.
    """
    if reasons := awaited(own, earlier):
        raise StartRefused("\n".join([*reasons, hint]), reasons=reasons)


def _files() -> list[Path]:
    return sorted(host_folder().glob(f"*{QUEUED}"))


def _waiting() -> list[tuple[Path, QueuedStart]]:
    found = []
    for file in _files():
        with suppress(OSError, PeerError):  # it has left meanwhile
            if _is_held(file):
                found.append((file, from_line(QueuedStart, file.read_bytes(), peer=str(file))))
    return found


def _is_held(file: Path) -> bool:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _place(num_before: int) -> str:
    return "first" if num_before == 0 else f"behind {num_before}"
