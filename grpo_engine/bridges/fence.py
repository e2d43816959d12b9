"""The fence: one page of shared memory that says which version the weights have, and whether they are whole.

A sequence lock with one writer (the trainer, or the server that reloads a checkpoint) and any number of readers. The
sequence is odd while weights are written; a reader that finds the same even number before and after its work has seen
one version only. The writer leaves its process identity, so that a reader can tell "busy" from "died half-way".

Torch-free. Assumes aligned 8-byte stores that are not torn and not reordered, as x86-64 gives them; on weaker machines
the pause around every publish (see the bridges) orders them.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpo_engine.bridges.process_identity import ProcessIdentity
from grpo_engine.errors import BridgeError, HalfWritten

SHARED_MEMORY = Path("/dev/shm")
PAGE_BYTES = 4096
_MAGIC = int.from_bytes(b"GRPOFENC", "little")
_LAYOUT = 1
_NUM_WORDS = 8
_MAGIC_AT, _LAYOUT_AT, _SEQUENCE_AT, _VERSION_AT, _PID_AT, _TICKS_AT, _COUNT_AT, _TIME_AT = range(_NUM_WORDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceState:
    """What the page says at one moment."""

    sequence: int
    policy_version: int
    """Of the last update that was finished."""
    update_count: int
    """Updates that were finished since the page was made."""
    updated_at: float
    """Unix seconds of the last one; 0 before the first."""

    @property
    def is_writing(self) -> bool:
        """Whether an update has begun and not ended."""
        return self.sequence % 2 == 1


class Fence:
    """The page, mapped into this process."""

    def __init__(self, page: mmap.mmap, segment: str | None) -> None:
        self._page = page
        self._words = memoryview(page).cast("q")
        self.segment = segment
        """Name below /dev/shm; None for a page that no other process sees."""

    @classmethod
    def create(cls, segment: str, *, policy_version: int = 0) -> Fence:
        """Make the page below /dev/shm.

        Raises:
            BridgeError: a segment of that name exists, or there is no room.
        """
        fence = cls(create_segment(segment, PAGE_BYTES), segment)
        fence._format(policy_version)
        return fence

    @classmethod
    def private(cls, *, policy_version: int = 0) -> Fence:
        """Make a page of this process alone, for weights that nobody else maps."""
        fence = cls(mmap.mmap(-1, PAGE_BYTES), None)
        fence._format(policy_version)
        return fence

    @classmethod
    def attach(cls, segment: str) -> Fence:
        """Map a page that another process made.

        Raises:
            BridgeError: it is gone, or no fence page of this layout.
        """
        path, page = SHARED_MEMORY / segment, attach_segment(segment)
        if len(page) != PAGE_BYTES:
            raise BridgeError(f"{path}: not a fence page: {len(page)} bytes, not {PAGE_BYTES}")
        fence = cls(page, segment)
        magic, layout = fence._words[_MAGIC_AT], fence._words[_LAYOUT_AT]
        if (magic, layout) != (_MAGIC, _LAYOUT):
            fence.close()
            raise BridgeError(f"{path}: not a fence page of layout {_LAYOUT}; restart the inference server")
        return fence

    def read(self) -> FenceState:
        """What the page says now, whether or not an update is under way."""
        while True:
            sequence = self._words[_SEQUENCE_AT]
            state = FenceState(
                sequence=sequence,
                policy_version=self._words[_VERSION_AT],
                update_count=self._words[_COUNT_AT],
                updated_at=self._words[_TIME_AT] / 1e9,
            )
            if self._words[_SEQUENCE_AT] == sequence:
                return state

    def check(self) -> FenceState:
        """What the page says now, if the weights are whole or somebody is at work on them.

        Raises:
            HalfWritten: an update began, and its writer is gone or gave up.
        """
        state = self.read()
        writer = self.writer()
        if state.is_writing and (writer is None or not writer.is_alive()):
            if self._words[_SEQUENCE_AT] != state.sequence:
                return self.check()
            raise HalfWritten(
                f"the weights after version {state.policy_version} are half-written: "
                f"{f'process {writer.pid} died' if writer else 'the writer failed'} in the middle of an update; "
                "publish a whole version again, or reload a checkpoint"
            )
        return state

    def writer(self) -> ProcessIdentity | None:
        """Who wrote last or is writing; None before the first update, after one that was given up, and once whoever
        wrote has signed off."""
        pid = self._words[_PID_AT]
        return ProcessIdentity(pid, self._words[_TICKS_AT]) if pid else None

    def other_trainer(self, server_pid: int) -> ProcessIdentity | None:
        """The living process that wrote last, where it is neither this one nor the server."""
        writer = self.writer()
        if writer is None or writer.pid in (server_pid, os.getpid()) or not writer.is_alive():
            return None
        return writer

    def sign_off(self) -> None:
        """Leave the page to another trainer: this process writes no more."""
        if self.writer() == ProcessIdentity.of_this_process() and not self.read().is_writing:
            self._words[_PID_AT] = 0

    @contextmanager
    def writing(self, policy_version: int) -> Iterator[None]:
        """Hold the fence closed while the weights become `policy_version`.

        When the body raises, the weights are left marked as half-written; the next whole update mends them.

        Raises:
            BridgeError: another living process is in the middle of an update.
        """
        me = ProcessIdentity.of_this_process()
        sequence, other = self._words[_SEQUENCE_AT], self.writer()
        if sequence % 2 and other is not None and other.is_alive():
            raise BridgeError(
                f"version {policy_version} cannot be written: process {other.pid} is in the middle of an update; "
                "only one trainer may write: end the other one"
            )
        self._words[_PID_AT], self._words[_TICKS_AT] = me.pid, me.start_ticks
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
    """Make memory below /dev/shm that no other user can map.

    Raises:
        BridgeError: the name is taken, or there is not enough room.
    """
    path = SHARED_MEMORY / segment
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise BridgeError(f"{path}: exists already: another server holds this name") from None
    try:
        # Reserves the memory now: a file that is only declared long ends the process by SIGBUS when it is full.
        os.posix_fallocate(descriptor, 0, size_bytes)
        return mmap.mmap(descriptor, size_bytes)
    except OSError as error:
        path.unlink()
        raise BridgeError(
            f"{path}: {size_bytes:,} bytes of shared memory cannot be had: {error.strerror}; "
            "make room below /dev/shm or mount it larger"
        ) from None
    finally:
        os.close(descriptor)


def attach_segment(segment: str) -> mmap.mmap:
    """Map memory that another process made below /dev/shm.

    Raises:
        BridgeError: it is gone.
    """
    path = SHARED_MEMORY / segment
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise BridgeError(f"{path}: cannot be mapped: {error.strerror}; is the inference server up?") from None
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
