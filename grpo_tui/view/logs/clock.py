"""The times of one log's lines: what a line says itself, the day where it says only the hour, and the line for a time.

Logs of days often say a clock alone. Where its day cannot be told from a date near the start, it is counted on from
there over some lines spread through the log: right as long as less than a day lies between two of them.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from dataclasses import dataclass

from grpo_tui.run_files.log_file import place
from grpo_tui.view.logs.search import accepted
from grpo_tui.view.logs.timestamps import DAY_S, LOOKED_AT_BYTES, time_of
from grpo_tui.view.logs.window import Block, blocks_after, blocks_before, line_start, readable_part

NUM_SAMPLES = 64
SAMPLE_BYTES = 8 * 1024
FORGIVEN_S = 1800.0
"""A line may be so much older than one above it and is still of the same day."""
LOOK_BACK_BYTES = 1024 * 1024
"""So far above a line without a time one with a time is looked for."""
NEAR_BYTES = 64 * 1024
"""The place for a time is halved down to this, and then found line by line."""


@dataclass(frozen=True, slots=True)
class Days:
    """Times of some lines of a log, by their offsets: what the day of the lines behind each is told from."""

    identity: tuple[int, int]
    end: int
    """Of the log when they were read."""
    offsets: tuple[int, ...]
    times: tuple[float, ...]
    otherwise: float
    """Where the log says no time at all: when it was changed last."""

    def reference(self, offset: int) -> float:
        """The middle of the day in which the line at `offset` must have been written."""
        if not self.offsets:
            return self.otherwise
        return self.times[max(0, bisect_right(self.offsets, offset) - 1)] + DAY_S / 2 - FORGIVEN_S

    def still_hold(self, descriptor: int) -> bool:
        """Whether the log is the same, and has not grown much since."""
        status = os.fstat(descriptor)
        is_same = (status.st_dev, status.st_ino) == self.identity
        return is_same and self.end <= place(descriptor).end <= 1.25 * self.end + SAMPLE_BYTES


def read_days(descriptor: int) -> Days:
    """Look at some lines from the start to the end."""
    status, now = os.fstat(descriptor), place(descriptor)
    changed = status.st_mtime
    num_bytes = now.end - now.dropped
    spacing = max(SAMPLE_BYTES, num_bytes // NUM_SAMPLES)
    offsets: list[int] = []
    times: list[float] = []
    for near in range(now.dropped, now.end, spacing):
        data = readable_part(descriptor, near, min(SAMPLE_BYTES, now.end - near)).data
        whole = 0 if near == now.dropped else data.find(b"\n") + 1
        reference = times[-1] + DAY_S / 2 - FORGIVEN_S if times else changed
        for start, end in accepted(data[whole:], ()):
            line = data[whole + start : min(whole + end, whole + start + LOOKED_AT_BYTES)]
            if (time := time_of(line, reference)) is not None:
                offsets.append(near + whole + start)
                times.append(time)
                break
    identity = (status.st_dev, status.st_ino)
    return Days(identity=identity, end=now.end, offsets=tuple(offsets), times=tuple(times), otherwise=changed)


class TimedLog:
    """One open log and the times of its lines."""

    def __init__(self, descriptor: int, days: Days) -> None:
        self.descriptor = descriptor
        self._days = days

    def time_of(self, block: Block, start: int, end: int) -> float | None:
        """What a line of a block says itself."""
        line = block.data[start : min(end, start + LOOKED_AT_BYTES)]
        return time_of(line, self._days.reference(block.offset + start)) if line else None

    def time_above(self, block: Block, start: int) -> float:
        """The time of the last line with one above `start` in a block; about when it was written where none is near."""
        offset = block.offset + start
        found = self._last_time(Block(block.data[:start], block.offset))
        if found is not None:
            return found
        for older in blocks_before(self.descriptor, block.offset):
            found = self._last_time(older)
            if found is not None:
                return found
            if offset - older.offset >= LOOK_BACK_BYTES:
                break
        return self._days.reference(offset) - DAY_S / 2 + FORGIVEN_S

    def offset_at(self, time: float, end: int) -> int:
        """Where the first line begins that was written at `time` or later; `end` if there is none before."""
        low, high = place(self.descriptor).dropped, end
        while high - low > NEAR_BYTES:
            middle = line_start(self.descriptor, (low + high) // 2)
            if middle <= low:
                break
            told = self._first_time(middle, high)
            if told is not None and told[0] < time:
                low = told[1]
            else:
                high = middle
        found = self._first_time(low, end, at_least=time)
        return end if found is None else found[1]

    def _last_time(self, block: Block) -> float | None:
        end = len(block.data)
        while end > 0:
            begin = block.data.rfind(b"\n", 0, end - 1) + 1
            if (time := self.time_of(block, begin, end)) is not None:
                return time
            end = begin
        return None

    def _first_time(self, start: int, end: int, at_least: float = float("-inf")) -> tuple[float, int] | None:
        """The time of the first line with such a time, and where it begins."""
        for block in blocks_after(self.descriptor, start, end):
            for begin, stop in accepted(block.data, ()):
                time = self.time_of(block, begin, stop)
                if time is not None and time >= at_least:
                    return time, block.offset + begin
        return None
