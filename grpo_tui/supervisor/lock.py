"""One daemon a run: a lock on a file that the kernel lets go of when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from grpo_engine.errors import PeerError
from grpo_engine.wire.codec import from_line, write_json_atomically
from grpo_engine.wire.supervisor import ADDRESS_FILE, Address
from grpo_tui.supervisor.proc import identify

LOCK_FILE = "daemon.lock"
LOADED = "loaded\n"
"""What a daemon says on stdout once it only waits to be told its run."""


TAKE_LIMIT_S = 0.5
TAKE_POLL_S = 0.01


def take_lock(run_folder: Path) -> int | None:
    """Take the run's lock for the life of this process; None when another daemon has it.

    Whoever asks `has_daemon` holds the lock for a moment, so one refusal is no proof of a daemon.
    """
    descriptor = os.open(run_folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
    """Whether a daemon holds the run's lock."""
    try:
        descriptor = os.open(run_folder / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # none yet, another user's, or no file at all
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def listening_daemon(run_folder: Path) -> int | None:
    """Pid of the daemon that holds the run's lock and listens; None while it only starts, and where there is none."""
    address = read_address(run_folder)
    is_there = address is not None and identify(address.pid) is not None and has_daemon(run_folder)
    return address.pid if address is not None and is_there else None


def write_address(run_folder: Path, socket: Path) -> None:
    """Say where this daemon listens."""
    write_json_atomically(run_folder / ADDRESS_FILE, Address(pid=os.getpid(), socket=str(socket)), mode=0o600)


def read_address(run_folder: Path) -> Address | None:
    """Where the run's daemon listens, or listened; None where nothing (legible) says it."""
    path = run_folder / ADDRESS_FILE
    try:
        return from_line(Address, path.read_bytes(), peer=str(path))
    except (OSError, PeerError):
        return None
