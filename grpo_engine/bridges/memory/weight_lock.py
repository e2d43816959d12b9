"""The weight lock: a page of shared memory with the version of the weights and whether a write is in progress.

A seqlock with one writer (the trainer, or the server while it reloads a checkpoint) and any number of readers. The
sequence is odd during a write; a reader that finds the same even number before and after its work has read one version
only. The writer stores its process identity, so that a reader can tell a write in progress from one whose process has
exited.

Torch-free. Requires aligned 8-byte stores that are neither torn nor reordered, as on x86-64; on weaker memory models
the pause around every publish orders them.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpo_engine.errors import BridgeError, HalfWritten
from grpo_engine.processes import ProcessIdentity

SHARED_MEMORY = Path("/dev/shm")
PAGE_BYTES = 4096
_MAGIC = int.from_bytes(b"GRPOFENC", "little")
_LAYOUT = 1
_MAGIC_AT, _LAYOUT_AT, _SEQUENCE_AT, _VERSION_AT, _PID_AT = range(5)
_TICKS_AT, _COUNT_AT, _TIME_AT, _ALL_AT, _EXPECTED_AT = range(5, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class LockState:
    """The page's content at one moment."""

    sequence: int
    policy_version: int
    """Of the last finished update."""
    update_count: int
    """Finished updates since the page was created."""
    updated_at: float
    """Unix time in seconds of the last one; 0 before the first."""

    @property
    def is_writing(self) -> bool:
        """Whether an update is in progress, or was abandoned."""
        return self.sequence % 2 == 1


class WeightLock:
    """The page, mapped into this process."""

    def __init__(self, page: mmap.mmap, segment: str | None) -> None:
        self._page = page
        self._words = memoryview(page).cast("q")
        self.segment = segment
        """Name below /dev/shm; None for a private page."""

    @classmethod
    def create(cls, segment: str, *, policy_version: int = 0) -> WeightLock:
        """Create the page below /dev/shm.

        Raises:
            BridgeError: a segment of that name exists, or there is no room.
        """
        lock = cls(create_segment(segment, PAGE_BYTES), segment)
        lock._format(policy_version)
        return lock

    @classmethod
    def private(cls, *, policy_version: int = 0) -> WeightLock:
        """Create a page that is private to this process, for weights that are not shared."""
        lock = cls(mmap.mmap(-1, PAGE_BYTES), None)
        lock._format(policy_version)
        return lock

    @classmethod
    def attach(cls, segment: str) -> WeightLock:
        """Map a page that another process created.

        Raises:
            BridgeError: it does not exist, or is no weight lock of this layout.
        """
        path, page = SHARED_MEMORY / segment, attach_segment(segment)
        if len(page) != PAGE_BYTES:
            raise BridgeError(f"{path}: not a weight lock: {len(page)} bytes, not {PAGE_BYTES}")
        lock = cls(page, segment)
        magic, layout = lock._words[_MAGIC_AT], lock._words[_LAYOUT_AT]
        if (magic, layout) != (_MAGIC, _LAYOUT):
            lock.close()
            raise BridgeError(f"{path}: not a weight lock of layout {_LAYOUT}; restart the inference server")
        return lock

    def read(self) -> LockState:
        """The current state, whether or not an update is in progress."""
        while True:
            sequence = self._words[_SEQUENCE_AT]
            state = LockState(
                sequence=sequence,
                policy_version=self._words[_VERSION_AT],
                update_count=self._words[_COUNT_AT],
                updated_at=self._words[_TIME_AT] / 1e9,
            )
            if self._words[_SEQUENCE_AT] == sequence:
                return state

    def check(self) -> LockState:
        """The current state, if the weights are complete or being written by a running process.

        Raises:
            HalfWritten: an update was started, and its writer has exited or failed.
        """
        state = self.read()
        writer = self.writer()
        if state.is_writing and (writer is None or not writer.is_alive()):
            if self._words[_SEQUENCE_AT] != state.sequence:
                return self.check()
            raise HalfWritten(
                f"the weights after version {state.policy_version} are half-written: "
                f"{f'process {writer.pid} exited' if writer else 'the writer failed'} during an update; "
                "publish a complete version again, or reload a checkpoint"
            )
        return state

    def writer(self) -> ProcessIdentity | None:
        """The process that wrote last or is writing; None before the first update, after a failed one, and after
        `clear_writer`."""
        pid = self._words[_PID_AT]
        return ProcessIdentity(pid, self._words[_TICKS_AT]) if pid else None

    def has_all(self) -> bool:
        """Whether the writer can write every tensor again, into memory that holds none of them."""
        return self._words[_ALL_AT] == 1

    def other_trainer(self, server_pid: int) -> ProcessIdentity | None:
        """The running process that wrote last, unless it is this one or the server."""
        writer = self.writer()
        if writer is None or writer.pid in (server_pid, os.getpid()) or not writer.is_alive():
            return None
        return writer

    def clear_writer(self) -> None:
        """Allow another trainer to write: this process has finished."""
        if self.writer() == ProcessIdentity.of_this_process() and (self.is_expected() or not self.read().is_writing):
            self._words[_PID_AT] = 0

    def expect(self, writer: ProcessIdentity | None) -> None:
        """Mark memory that holds no weights yet as half-written, until `writer` has written all of them.

        Args:
            writer: None: it has exited since, or is not awaited any longer.
        """
        self._words[_PID_AT], self._words[_TICKS_AT] = (writer.pid, writer.start_ticks) if writer else (0, 0)
        self._words[_ALL_AT] = self._words[_EXPECTED_AT] = self._words[_SEQUENCE_AT] = 1

    def is_expected(self) -> bool:
        """Whether `expect` was called, and no write has begun since."""
        return self._words[_EXPECTED_AT] == 1

    @contextmanager
    def writing(self, policy_version: int, *, has_all: bool = False) -> Iterator[None]:
        """Hold the lock while the weights become `policy_version`.

        If the body raises, the weights stay marked as half-written until the next complete update.

        Args:
            has_all: see the method of that name.

        Raises:
            BridgeError: another running process is writing.
        """
        me = ProcessIdentity.of_this_process()
        sequence, other = self._words[_SEQUENCE_AT], self.writer()
        is_by_another = not (other == me and self.is_expected())
        if sequence % 2 and other is not None and other.is_alive() and is_by_another:
            raise BridgeError(
                f"version {policy_version} cannot be written: process {other.pid} is writing another one; only one "
                "trainer may write: stop the other one"
            )
        self._words[_PID_AT], self._words[_TICKS_AT] = me.pid, me.start_ticks
        self._words[_ALL_AT], self._words[_EXPECTED_AT] = has_all, 0
        self._words[_SEQUENCE_AT] = sequence + 1 + sequence % 2
        try:
            yield
            self._words[_VERSION_AT] = policy_version
        except BaseException:
            self._words[_PID_AT] = 0
            raise
        self._words[_COUNT_AT] += 1
        self._words[_TIME_AT] = time.time_ns()
        self._words[_SEQUENCE_AT] += 1

    def close(self) -> None:
        """Unmap the page; the segment stays."""
        self._words.release()
        self._page.close()

    def _format(self, policy_version: int) -> None:
        self._words[_LAYOUT_AT], self._words[_VERSION_AT] = _LAYOUT, policy_version
        self._words[_MAGIC_AT] = _MAGIC


def create_segment(segment: str, size_bytes: int) -> mmap.mmap:
    """Create shared memory below /dev/shm that no other user can map.

    Raises:
        BridgeError: the name is taken, or there is not enough free memory.
    """
    path = SHARED_MEMORY / segment
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise BridgeError(f"{path}: already exists: another server uses this name") from None
    try:
        # Reserves the memory now: a sparse file would end the process by SIGBUS once /dev/shm is full.
        os.posix_fallocate(descriptor, 0, size_bytes)
        return mmap.mmap(descriptor, size_bytes)
    except OSError as error:
        path.unlink()
        raise BridgeError(
            f"{path}: {size_bytes:,} bytes of shared memory cannot be allocated: {error.strerror}; "
            "free space in /dev/shm or mount it larger"
        ) from None
    finally:
        os.close(descriptor)


def attach_segment(segment: str) -> mmap.mmap:
    """Map shared memory that another process created below /dev/shm.

    Raises:
        BridgeError: it does not exist, or another user (not root) has made it.
    """
    path = SHARED_MEMORY / segment
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise BridgeError(f"{path}: cannot be mapped: {error.strerror}; is the inference server running?") from None
    try:
        if os.fstat(descriptor).st_uid not in (os.geteuid(), 0):  # the name was free, and another user took it
            raise BridgeError(f"{path}: owned by another user, so weights there cannot be trusted")
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
