"""The logs of a run as one text: lines of one log, or of several merged by time, read on or back a few at a time.

A place in it is a `Cut`: an offset in each log. From a cut lines are read on or back, only those that pass some tests,
until enough are found or `BUDGET_BYTES` were searched; the answer says how far that went, and the caller continues from
there. So a search through gigabytes shows its progress, and ends when the caller stops.

A line without a time belongs to the line before it. Where times in a log go back, its lines keep their order.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from grpo_tui.run_files.log_file import place
from grpo_tui.run_files.opening import open_file
from grpo_tui.view.logs.clock import Days, TimedLog, read_days
from grpo_tui.view.logs.search import LineTest, Span, accepted
from grpo_tui.view.logs.tail import as_text
from grpo_tui.view.logs.window import Block, blocks_after, blocks_before, line_start

BUDGET_BYTES = 48 * 1024 * 1024
"""Searched in one call: less than a tenth of a second for plain text."""
MOST_REMEMBERED = 1_000_000
"""Offsets of matches in one log, 8 bytes each."""

Cut = tuple[int, ...]
"""Where one is in each log, as absolute offsets at which lines begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    """A log and whose it is."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line as it is shown."""

    source: int
    """Its place among the logs that are read."""
    offset: int
    end: int
    """Absolute, behind its newline."""
    text: str
    """With its colours, without cursor movement; cut where it is too long for a screen."""
    time: float | None = None
    """Its own, or where logs are merged that of the line above; seconds since the epoch."""
    is_open: bool = False
    """Whether its end is not written yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Lines that were read, in the order of the text, and how far the reading went."""

    lines: tuple[LogLine, ...]
    cut: Cut
    is_all: bool
    """Whether the logs have no more such lines in that direction."""
    num_bytes: int = 0
    """How much was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """What the logs hold now."""

    starts: Cut
    ends: Cut
    identities: tuple[tuple[int, int] | None, ...]
    """Which files they are; None where there is none yet."""
    is_final: bool = False
    """Whether nothing is written behind the ends any more: those of a moment of the past."""

    @property
    def num_bytes(self) -> int:
        """Of all logs together."""
        return sum(self.ends) - sum(self.starts)


class LogReader:
    """Reads the logs that it was given; they may be missing, grow, be capped, replaced or vanish."""

    def __init__(self, files: Sequence[LogFile]) -> None:
        self.files = tuple(files)
        self._is_merged = len(self.files) > 1
        self._days: dict[int, Days] = {}

    def extent(self) -> Extent:
        """How far the logs reach."""
        starts: list[int] = []
        ends: list[int] = []
        identities: list[tuple[int, int] | None] = []
        for file in self.files:
            try:
                with open_file(file.path) as opened:
                    status, now = os.fstat(opened.fileno()), place(opened.fileno())
                starts.append(now.dropped)
                ends.append(now.end)
                identities.append((status.st_dev, status.st_ino))
            except OSError:
                starts.append(0)
                ends.append(0)
                identities.append(None)
        return Extent(starts=tuple(starts), ends=tuple(ends), identities=tuple(identities))

    def whole_lines_end(self, name: str, offset: int) -> int:
        """Where the last whole line of a log ends before an offset; 0 where it cannot be read."""
        path = next(file.path for file in self.files if file.name == name)
        try:
            with open_file(path) as opened:
                return line_start(opened.fileno(), offset)
        except OSError:
            return 0

    def before(self, cut: Cut, num_lines: int, tests: tuple[LineTest, ...] = ()) -> Found:
        """The last lines above a cut."""
        with ExitStack() as stack:
            streams = [
                _Back(source, log, cut[source], tests, is_merged=self._is_merged) for source, log in self._opened(stack)
            ]
            return _merged(streams, cut, num_lines)

    def after(
        self, cut: Cut, num_lines: int, ends: Cut, tests: tuple[LineTest, ...] = (), *, is_final: bool = False
    ) -> Found:
        """The first lines below a cut, up to `ends`.

        Args:
            is_final: whether a last line without its end stays as it is.
        """
        with ExitStack() as stack:
            streams = [
                _On(source, log, cut[source], ends[source], tests, is_merged=self._is_merged, is_final=is_final)
                for source, log in self._opened(stack)
            ]
            return _merged(streams, cut, num_lines)

    def last_lines_begin(self, ends: Cut) -> Cut:
        """Where the last line of each log begins if it has no end yet, else where the log ends."""
        with ExitStack() as stack:
            begin = {source: line_start(log.descriptor, ends[source]) for source, log in self._opened(stack)}
        return tuple(begin.get(source, end) for source, end in enumerate(ends))

    def at_time(self, time: float, ends: Cut) -> Cut:
        """Where the lines begin that were written at `time` or later."""
        with ExitStack() as stack:
            begin = {source: log.offset_at(time, ends[source]) for source, log in self._opened(stack)}
        return tuple(begin.get(source, end) for source, end in enumerate(ends))

    def at_line(self, line: LogLine, ends: Cut) -> Cut:
        """The cut above a line: in the other logs where lines of its time begin."""
        cut = self.at_time(line.time, ends) if self._is_merged and line.time is not None else ends
        return tuple(line.offset if source == line.source else place for source, place in enumerate(cut))

    def _opened(self, stack: ExitStack) -> list[tuple[int, TimedLog]]:
        logs = []
        for source, file in enumerate(self.files):
            try:
                descriptor = stack.enter_context(open_file(file.path)).fileno()
                days = self._days.get(source)
                if days is None or not days.still_hold(descriptor):
                    days = self._days[source] = read_days(descriptor)
            except OSError:
                continue
            logs.append((source, TimedLog(descriptor, days)))
        return logs


class _Stream:
    """The wanted lines of one log in one direction, one at a time."""

    direction: int

    def __init__(
        self,
        source: int,
        log: TimedLog,
        blocks: Iterator[Block],
        start: int,
        tests: tuple[LineTest, ...],
        *,
        is_merged: bool,
    ) -> None:
        self.source = source
        self.head: LogLine | None = None
        """The next line."""
        self.is_all = False
        """Whether there is none behind it."""
        self.num_bytes = 0
        self._log = log
        self._blocks = blocks
        self._block: Block | None = None
        self._spans: Iterator[Span] = iter(())
        self._reached = start
        self._tests = tests
        self._is_merged = is_merged
        self._known: tuple[int, float] | None = None

    def advance(self, budget_bytes: int) -> None:
        """Fetch the next line into `head`; None at the end, or where that would take more reading."""
        self.head = None
        while True:
            span = next(self._spans, None)
            if span is not None and self._block is not None:
                self.head = self._line(self._block, *span)
                return
            if self._block is not None:
                self._reached = self._behind(self._block)
            if self.num_bytes >= budget_bytes:
                return
            self._block = next(self._blocks, None)
            if self._block is None:
                self.is_all = True
                return
            self.num_bytes += len(self._block.data)
            self._spans = self._in_direction(accepted(self._block.data, self._tests))

    @property
    def resume_at(self) -> int:
        """Where to go on reading later, so that the line in `head` comes first."""
        return self._reached if self.head is None else self._near_edge(self.head)

    def _behind(self, block: Block) -> int:
        raise NotImplementedError

    def _near_edge(self, line: LogLine) -> int:
        raise NotImplementedError

    def _in_direction(self, spans: Iterator[Span]) -> Iterator[Span]:
        raise NotImplementedError

    def _is_open(self, block: Block) -> bool:
        return False

    def _line(self, block: Block, start: int, end: int) -> LogLine:
        offset = block.offset + start
        time = self._log.time_of(block, start, end)
        if time is None and self._is_merged:
            is_known = self._known is not None and self._known[0] == offset
            time = self._known[1] if is_known and self._known else self._log.time_above(block, start)
        has_end = end < len(block.data)
        behind = block.offset + end + has_end
        if time is not None:
            self._known = (behind, time)
        return LogLine(
            source=self.source, offset=offset, end=behind, text=as_text(block.data[start:end]), time=time,
            is_open=not has_end and self._is_open(block),
        )  # fmt: skip


class _On(_Stream):
    """Towards the end."""

    direction = 1

    def __init__(
        self,
        source: int,
        log: TimedLog,
        start: int,
        end: int,
        tests: tuple[LineTest, ...],
        *,
        is_merged: bool,
        is_final: bool,
    ) -> None:
        super().__init__(source, log, blocks_after(log.descriptor, start, end), start, tests, is_merged=is_merged)
        self._end = end
        self._is_final = is_final

    def _behind(self, block: Block) -> int:
        """A line that is still being written is read again when it is longer."""
        return block.offset + block.data.rfind(b"\n") + 1 if self._is_open(block) else block.end

    def _is_open(self, block: Block) -> bool:
        return not self._is_final and block.end >= self._end and not block.data.endswith(b"\n")

    def _near_edge(self, line: LogLine) -> int:
        return line.offset

    def _in_direction(self, spans: Iterator[Span]) -> Iterator[Span]:
        return spans


class _Back(_Stream):
    """Towards the start."""

    direction = -1

    def __init__(self, source: int, log: TimedLog, end: int, tests: tuple[LineTest, ...], *, is_merged: bool) -> None:
        super().__init__(source, log, blocks_before(log.descriptor, end), end, tests, is_merged=is_merged)

    def _behind(self, block: Block) -> int:
        return block.offset

    def _near_edge(self, line: LogLine) -> int:
        return line.end

    def _in_direction(self, spans: Iterator[Span]) -> Iterator[Span]:
        return reversed(list(spans))


def _merged(streams: Sequence[_Stream], cut: Cut, num_lines: int) -> Found:
    """The next lines of all streams by time; of those with the same time the first log's come first."""
    budget_bytes = BUDGET_BYTES // max(1, len(streams))
    lines: list[LogLine] = []
    for stream in streams:
        stream.advance(budget_bytes)
    while len(lines) < num_lines:
        heads = [(stream, stream.head) for stream in streams if stream.head is not None]
        if not heads or any(stream.head is None and not stream.is_all for stream in streams):
            break  # a stream that was not read far enough may have the next line
        stream, line = min(
            heads, key=lambda each: (each[0].direction * (each[1].time or 0.0), each[0].direction * each[0].source)
        )
        lines.append(line)
        stream.advance(budget_bytes)
    reached = list(cut)
    for stream in streams:
        reached[stream.source] = stream.resume_at
    is_all = all(stream.head is None and stream.is_all for stream in streams)
    if streams and streams[0].direction < 0:
        lines.reverse()
    return Found(
        lines=tuple(lines), cut=tuple(reached), is_all=is_all, num_bytes=sum(stream.num_bytes for stream in streams)
    )


class MatchCount:
    """Counts the lines that pass some tests, a piece a call, and knows which of them one is."""

    def __init__(self, reader: LogReader, tests: tuple[LineTest, ...], extent: Extent) -> None:
        self.num_matches = 0
        self.num_bytes = 0
        """How much was searched."""
        self._files = reader.files
        self._tests = tests
        self._is_final = extent.is_final
        self._reached = list(extent.starts)
        self._offsets = [array("Q") for _ in self._files]

    def go_on(self, ends: Cut) -> bool:
        """Search up to `BUDGET_BYTES` more; whether everything up to `ends` is searched."""
        left_bytes = BUDGET_BYTES
        for source, file in enumerate(self._files):
            if self._reached[source] >= ends[source]:
                continue
            try:
                with open_file(file.path) as opened:
                    left_bytes -= self._search(opened.fileno(), source, ends[source], left_bytes)
            except OSError:
                self._reached[source] = ends[source]
            if left_bytes <= 0:
                return False
        return True

    def number_at(self, cut: Cut) -> int | None:
        """How many of the lines lie above a cut of the same logs; None where they are too many to be remembered."""
        if len(cut) != len(self._offsets) or any(len(offsets) >= MOST_REMEMBERED for offsets in self._offsets):
            return None
        return sum(bisect_left(offsets, end) for offsets, end in zip(self._offsets, cut, strict=True))

    def _search(self, descriptor: int, source: int, end: int, most_bytes: int) -> int:
        offsets, searched = self._offsets[source], 0
        for block in blocks_after(descriptor, self._reached[source], end):
            is_open = not self._is_final and block.end >= end and not block.data.endswith(b"\n")
            data = block.data[: block.data.rfind(b"\n") + 1] if is_open else block.data
            for start, _ in accepted(data, self._tests):
                self.num_matches += 1
                if len(offsets) < MOST_REMEMBERED:
                    offsets.append(block.offset + start)
            self._reached[source] = block.offset + len(data)
            searched += len(block.data)
            if searched >= most_bytes:
                break
        self.num_bytes += searched
        return searched
