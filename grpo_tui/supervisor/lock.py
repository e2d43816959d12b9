"""One supervisor per run: a file lock, which the kernel releases when the process that holds it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from pathlib import Path

from grpo_engine.errors import GrpoError, PeerError
from grpo_engine.wire.codec import from_line, write_json_atomically
from grpo_engine.wire.run_folder import ADDRESS_FILE, LOCK_FILE
from grpo_engine.wire.supervisor import Address
from grpo_tui.run_files.whole_file import read_whole
from grpo_tui.supervisor.keeper.proc import identify

LOADED = "loaded\n"
"""What a supervisor prints once it waits for its run folder on stdin."""
TAKE_LIMIT_S = 0.5
TAKE_POLL_S = 0.01


def take_lock(run_folder: Path) -> int | None:
    """Take the run's lock until this process ends; None when another supervisor has it.

    `has_daemon` in another process takes the lock for a moment, so one failure does not prove that there is one.

    Raises:
        GrpoError: it is a link, a folder or a socket, as in a folder from elsewhere.
        OSError: the disk is full, or the folder cannot be written to.
    """
    path = run_folder / LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise GrpoError(f"{path}, the lock of the run, is not a regular file: remove it") from None
        raise
    os.fchmod(descriptor, 0o600)  # one that others can open counts for nothing in `has_daemon`
    deadline = time.monotonic() + TAKE_LIMIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                return None
            time.sleep(TAKE_POLL_S)
        else:
            return descriptor


def has_daemon(run_folder: Path) -> bool:
    """Whether a supervisor of this user holds the run's lock; a file that others could open proves nothing."""
    try:
        descriptor = os.open(run_folder / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # none yet, another user's, a link, or no file at all
        return False
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            return False
        if status.st_nlink != 1:  # maybe the lock of another run, which lives
            return False
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def listening_daemon(run_folder: Path) -> int | None:
    """Pid of the supervisor that holds the run's lock and listens; None while it starts, and where there is none."""
    address = read_address(run_folder)
    is_there = address is not None and identify(address.pid) is not None and has_daemon(run_folder)
    return address.pid if address is not None and is_there else None


def write_address(run_folder: Path, socket: Path) -> None:
    """Write the address of this supervisor."""
    write_json_atomically(run_folder / ADDRESS_FILE, Address(pid=os.getpid(), socket=str(socket)), mode=0o600)


def read_address(run_folder: Path) -> Address | None:
    """Where the run's supervisor listens, or listened; None where the file is missing or damaged."""
    path = run_folder / ADDRESS_FILE
    try:
        return from_line(Address, read_whole(path), peer=str(path))
    except (OSError, PeerError):
        return None
