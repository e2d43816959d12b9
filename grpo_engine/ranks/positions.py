"""Where each rank of this machine is in its work, in a file that the ranks and their launcher map. Torch-free.

A rank writes its slot at every point of its work, which takes microseconds and waits for nothing: the slot of a rank
that hangs, or is stopped, still says where. Ranks pass the same points in the same order, so the one that has passed
the fewest is the one that the others wait for. The work between two announcements of rank 0, as fetching a batch, has
no points.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

POSITIONS_FILE = "GRPO_RANKS_POSITIONS_FILE"
"""Set by our launcher: the file of the positions, with a slot for each rank of this machine."""
SLOT_BYTES = 512
_CHECKED = struct.Struct("<II")
"""Checksum and number of the bytes that follow: a reader may see half of a write."""
_FIELDS = struct.Struct("<IIIdB")
_MAX_PLACE_BYTES = SLOT_BYTES - _CHECKED.size - _FIELDS.size
_READ_AGAIN = 20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where one rank is."""

    pid: int
    work: int = 0
    """Announcements that it has taken."""
    point: int = 0
    """Points that it has passed in this work, or before the first."""
    since_s: float
    """When it arrived there, on the monotonic clock, which all processes of a machine share."""
    is_waiting: bool = False
    """Whether it waits there for other ranks, or for its GPU."""
    is_idle: bool = False
    """Whether it is between two announcements."""
    place: str = ""
    """For people: `the loss of micro-batch 1 of 2 of step 3`."""

    @property
    def progress(self) -> tuple[int, bool, int]:
        """Grows with every point, and compares with other ranks."""
        return (self.work, self.is_idle, 0 if self.is_idle else self.point)


class PositionFile:
    """The slots of the ranks of one machine."""

    def __init__(self, path: Path) -> None:
        """Map a file that `make` has made."""
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    @classmethod
    def make(cls, path: Path, *, num_ranks: int) -> PositionFile:
        """Make the file, with slots for so many ranks."""
        path.write_bytes(bytes(num_ranks * SLOT_BYTES))
        return cls(path)

    def write(self, local_rank: int, position: Position) -> None:
        """Replace the position of a rank; for that rank alone."""
        flags = position.is_waiting | position.is_idle << 1
        fields = _FIELDS.pack(position.pid, position.work, position.point, position.since_s, flags)
        content = fields + position.place.encode()[:_MAX_PLACE_BYTES]
        slot = _CHECKED.pack(zlib.crc32(content), len(content)) + content
        start = local_rank * SLOT_BYTES
        self._memory[start : start + len(slot)] = slot

    def read(self) -> dict[int, Position]:
        """The positions by local rank; ranks that have not written one yet are left out."""
        found = ((local_rank, self._read(local_rank)) for local_rank in range(len(self._memory) // SLOT_BYTES))
        return {local_rank: position for local_rank, position in found if position is not None}

    def _read(self, local_rank: int) -> Position | None:
        start = local_rank * SLOT_BYTES
        for _ in range(_READ_AGAIN):
            slot = self._memory[start : start + SLOT_BYTES]
            checksum, num_bytes = _CHECKED.unpack_from(slot)
            content = slot[_CHECKED.size : _CHECKED.size + num_bytes]
            if len(content) >= _FIELDS.size and zlib.crc32(content) == checksum:
                pid, work, point, since_s, flags = _FIELDS.unpack_from(content)
                return Position(
                    pid=pid,
                    work=work,
                    point=point,
                    since_s=since_s,
                    is_waiting=bool(flags & 1),
                    is_idle=bool(flags & 2),
                    place=content[_FIELDS.size :].decode(errors="ignore"),
                )
        return None


class OwnPosition:
    """The position of this rank; in the launcher's file, or without one only for this rank's own messages."""

    def __init__(self, file: PositionFile | None = None, local_rank: int = 0) -> None:
        self._file = file
        self._local_rank = local_rank
        self._work = self._point = 0
        self._what = "the start"
        self._phase = self._part = ""
        self._is_backward = False
        self._move()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], local_rank: int) -> OwnPosition:
        """A position in the file of the launcher that started this process, if one did."""
        path = environment.get(POSITIONS_FILE)
        return cls(PositionFile(Path(path)) if path else None, local_rank)

    @property
    def place(self) -> str:
        """For people: `layer 17 in the backward pass of micro-batch 1 of 2, step 3`."""
        where = " in ".join(word for word in (self._part, self._phase) if word)
        return ", ".join(word for word in (where, self._what) if word)

    def begin(self, what: str) -> None:
        """Work that rank 0 has announced, as `step 3`."""
        self._work, self._point = self._work + 1, 0
        self._what, self._phase, self._part = what, "", ""
        self._move()

    def end(self, then: str) -> None:
        """What rank 0 announced is done; what is done until the next announcement is no part of the comparison."""
        self._what, self._phase, self._part = then, "", ""
        self._move(is_idle=True)

    def at(self, phase: str, *, is_backward: bool = False) -> None:
        """A phase of the work, as `the loss of micro-batch 1 of 2`."""
        self._phase, self._part, self._is_backward = phase, "", is_backward
        self._move()

    @contextmanager
    def waiting(self, operation: str, *, then: str = "", then_backward: str = "") -> Iterator[None]:
        """Within, this rank waits for others, or for its GPU.

        Args:
            operation: as `the all-gather of layer 17`.
            then: the part of the phase that begins afterwards, if one does; `then_backward` in a backward pass.
        """
        before, self._part = self._part, operation
        self._move(is_waiting=True)
        yield  # on an error it stays there, for the message
        self._part = (then_backward if self._is_backward else then) or before
        self._move()

    def _move(self, *, is_waiting: bool = False, is_idle: bool = False) -> None:
        self._point += 1
        if log.isEnabledFor(logging.DEBUG):
            log.debug("rank %d %s %s", self._local_rank, "waits in" if is_waiting else "is at", self.place)
        if self._file is not None:
            position = Position(
                pid=os.getpid(),
                work=self._work,
                point=self._point,
                since_s=time.monotonic(),
                is_waiting=is_waiting,
                is_idle=is_idle,
                place=self.place,
            )
            self._file.write(self._local_rank, position)
