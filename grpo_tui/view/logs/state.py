"""What the log screen knows: which logs, which of their lines, and the lines near the cursor. Pure.

The lines in memory are all wanted lines between two cuts, `low` and `high`; `wanted` says where more of them are
needed. A read says from which cut it began, so that a late answer is recognised and dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from grpo_tui.view.logs.folding import beginning, fold
from grpo_tui.view.logs.reader import Cut, Extent, LogLine
from grpo_tui.view.logs.search import InvalidPattern, Level, LineTest, line_test, line_tests
from grpo_tui.view.logs.tail import without_colours

MOST_LINES = 3000
"""In memory; a screen shows a hundred at most."""
FLOOD_BYTES = 1 << 20
"""Who follows and is further behind than this goes on at the end."""
SHIFT_COLUMNS = 20
LEVELS = tuple(Level)


Aim = Cut | float | LogLine | None
"""A place in the logs: a cut, a time, a line, or the end."""


class Prompt(StrEnum):
    """What is being typed, by the key that opens its line."""

    SEARCH = "/"
    FILTER = "&"
    TIME = ":"


class Side(StrEnum):
    """Where lines are missing."""

    BEFORE = "before"
    AFTER = "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """How many lines hold what is searched."""

    num_matches: int = 0
    number: int | None = None
    """Which of them the cursor came to last, from 1."""
    num_bytes: int = 0
    is_done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsView:
    """What the log screen knows."""

    services: tuple[str, ...] = ()
    """Whose logs there are."""
    chosen: str | None = None
    """The one that is shown; None: all of them, merged by time."""
    level: Level = Level.ALL
    pattern: str = ""
    """Only lines that hold this are shown."""
    searched: str = ""
    """Looked for by `n` and `N`, and marked."""
    prompt: Prompt | None = None
    fault: str = ""
    """What is wrong with what is being typed."""
    count: Count | None = None
    busy: str = ""
    """What is being looked for, while that takes its time."""
    is_following: bool = True
    is_wrapped: bool = False
    shift: int = 0
    """Columns that long lines are moved to the left."""
    rows: int = 0
    columns: int = 0
    """Room for lines."""

    generation: int = 0
    """Grows when other lines are wanted, or those of another place."""
    aim: Aim = None
    """Where a new generation begins."""
    aimed_line: LogLine | None = None
    """The cursor is to be on it, when it comes."""
    is_fresh: bool = True
    """Whether the lines are still those of the generation before."""
    extent: Extent | None = None
    origin: Cut | None = None
    """Where this generation began."""
    low: Cut | None = None
    high: Cut | None = None
    has_all_before: bool = False
    has_all_after: bool = False
    lines: tuple[LogLine, ...] = ()
    top: int = 0
    """The first line in sight."""
    cursor: int = 0
    mark: int | None = None
    """Where a selection began, which reaches to the cursor."""

    @property
    def shown_services(self) -> tuple[str, ...]:
        """Whose lines are shown; a line's `source` counts in these."""
        return self.services if self.chosen is None else (self.chosen,)

    @property
    def tests(self) -> tuple[LineTest, ...]:
        """What lines have to pass."""
        return line_tests(self.level, self.pattern)

    @property
    def line(self) -> LogLine | None:
        """The one that the cursor is on."""
        return self.lines[self.cursor] if self.cursor < len(self.lines) else None

    @property
    def selection(self) -> range:
        """Places of the selected lines: those from the mark to the cursor, or the cursor's."""
        if not self.lines:
            return range(0)
        other = self.cursor if self.mark is None else min(self.mark, len(self.lines) - 1)
        return range(min(other, self.cursor), max(other, self.cursor) + 1)


class LogChange:
    """Base of all that changes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicesKnown(LogChange):
    """Whose logs there are."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen(LogChange):
    """One log, or all of them."""

    service: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceMoved(LogChange):
    """The next log, or the one before; all of them are one of the choices."""

    by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized(LogChange):
    """There is other room for lines."""

    columns: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened(LogChange):
    """A generation begins at a cut."""

    generation: int
    cut: Cut
    extent: Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class LinesRead(LogChange):
    """Lines at one side of those in memory."""

    generation: int
    side: Side
    start: Cut
    """Where the reading began."""
    lines: tuple[LogLine, ...]
    cut: Cut
    """How far it went."""
    is_all: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown(LogChange):
    """The logs were looked at again."""

    generation: int
    extent: Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class Reopened(LogChange):
    """Begin elsewhere."""

    aim: Aim = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorMoved(LogChange):
    """By lines."""

    by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorSet(LogChange):
    """To a place among the lines in memory."""

    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrolled(LogChange):
    """The lines moved under the cursor, which stays in sight."""

    by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed(LogChange):
    """The end is followed, or not; None: the other."""

    is_following: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelMoved(LogChange):
    """The next level, and after the last the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtered(LogChange):
    """Only lines with this are wanted."""

    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched(LogChange):
    """This is looked for and marked."""

    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted(LogChange):
    """So many were found."""

    pattern: str
    count: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompted(LogChange):
    """A line to type in opened, or closed."""

    prompt: Prompt | None
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy(LogChange):
    """Something is being looked for."""

    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapChanged(LogChange):
    """Long lines are folded, or not any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shifted(LogChange):
    """Sideways, by steps."""

    by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkChanged(LogChange):
    """A selection begins at the cursor, or is given up."""


def after(logs: LogsView, change: LogChange) -> LogsView:
    """What it is after a change."""
    match change:
        case ServicesKnown():
            if change.names == logs.services:
                return logs
            chosen = logs.chosen if logs.chosen in change.names else None
            # What was read counts in the services of before.
            return _reopened(replace(logs, services=change.names, chosen=chosen, lines=(), count=None))
        case Chosen():
            if change.service == logs.chosen:
                return logs
            return _reopened(replace(logs, chosen=change.service, lines=(), count=None))
        case ChoiceMoved():
            choices = (None, *logs.services)
            choice = choices[(choices.index(logs.chosen) + change.by) % len(choices)]
            return after(logs, Chosen(service=choice))
        case Resized():
            return _in_sight(replace(logs, columns=change.columns, rows=change.rows))
        case Opened():
            if change.generation != logs.generation:
                return logs
            return replace(
                logs, extent=change.extent, origin=change.cut, low=change.cut, high=change.cut,
                has_all_before=False, has_all_after=False,
            )  # fmt: skip
        case LinesRead():
            return _with_lines(logs, change)
        case Grown():
            return _grown(logs, change)
        case Reopened():
            return _reopened(logs, aim=change.aim)
        case CursorMoved():
            return _moved(logs, logs.cursor + change.by)
        case CursorSet():
            return _moved(logs, change.place)
        case Scrolled():
            return _scrolled(logs, change.by)
        case Followed():
            is_following = not logs.is_following if change.is_following is None else change.is_following
            if is_following and not logs.has_all_after:
                return _reopened(logs)
            return _in_sight(replace(logs, is_following=is_following, mark=None))
        case LevelMoved():
            level = LEVELS[(LEVELS.index(logs.level) + 1) % len(LEVELS)]
            return _narrowed(replace(logs, level=level, count=None))
        case Filtered():
            return _filtered(logs, change.pattern)
        case Searched():
            return _searching(logs, change.pattern)
        case Counted():
            return replace(logs, count=change.count) if change.pattern == logs.searched else logs
        case Prompted():
            return replace(logs, prompt=change.prompt, fault=change.fault)
        case Busy():
            return replace(logs, busy=change.words)
        case WrapChanged():
            return _in_sight(replace(logs, is_wrapped=not logs.is_wrapped, shift=0))
        case Shifted():
            return replace(logs, shift=max(0, logs.shift + change.by * SHIFT_COLUMNS))
        case MarkChanged():
            return replace(logs, mark=logs.cursor if logs.mark is None else None, is_following=False)
        case _:
            raise TypeError(f"not a change of the log screen: {change}")


def wanted(logs: LogsView) -> Side | None:
    """Where lines are missing that are in sight or about to be."""
    if logs.low is None or not logs.rows:
        return None
    below = 0 if logs.is_fresh else len(logs.lines) - logs.top - logs.rows
    if not logs.has_all_after and (logs.is_following or below < logs.rows):
        return Side.AFTER
    return Side.BEFORE if not logs.has_all_before and (logs.is_fresh or logs.top < logs.rows) else None


def num_rows(line: LogLine, logs: LogsView) -> int:
    """Rows that a line takes, at most all."""
    if not logs.is_wrapped or logs.columns <= 0:
        return 1
    most = max(1, logs.rows)
    shown = without_colours(beginning(line.text, (most + 1) * logs.columns))
    return min(most, len(fold(shown, logs.columns, most)))


def is_same(line: LogLine, other: LogLine) -> bool:
    """Whether two are the same line of a log, read at different times."""
    return (line.source, line.offset) == (other.source, other.offset)


def cut_at(logs: LogsView, place: int) -> Cut | None:
    """The cut above one of the lines in memory."""
    return None if logs.low is None else _behind(logs.low, logs.lines[:place])


def _behind(cut: Cut, lines: Iterable[LogLine]) -> Cut:
    """The cut below some lines that follow one."""
    reached = list(cut)
    for line in lines:
        reached[line.source] = max(reached[line.source], line.end)
    return tuple(reached)


def _reopened(logs: LogsView, aim: Aim = None) -> LogsView:
    """Start a new generation at a place; the old lines stay until its first lines are read."""
    return replace(
        logs, generation=logs.generation + 1, aim=aim, aimed_line=aim if isinstance(aim, LogLine) else None,
        is_fresh=True, is_following=aim is None, mark=None, low=None, high=None,
        has_all_before=False, has_all_after=False,
    )  # fmt: skip


def _narrowed(logs: LogsView) -> LogsView:
    """Other lines are wanted: stay with the line that the cursor is on, or at the end."""
    if logs.is_fresh:  # other lines are shown still
        return _reopened(logs, aim=logs.aim)
    return _reopened(logs, aim=None if logs.is_following else logs.line)


def _filtered(logs: LogsView, pattern: str) -> LogsView:
    try:
        line_tests(logs.level, pattern)
    except InvalidPattern as broken:
        return replace(logs, fault=str(broken))
    if pattern == logs.pattern:
        return replace(logs, fault="")
    return _narrowed(replace(logs, pattern=pattern, fault="", count=None))


def _searching(logs: LogsView, pattern: str) -> LogsView:
    try:
        line_test(pattern)
    except InvalidPattern as broken:
        return replace(logs, fault=str(broken))
    count = logs.count if pattern == logs.searched else None
    return replace(logs, searched=pattern, fault="", count=count)


def _with_lines(logs: LogsView, read: LinesRead) -> LogsView:
    edge = logs.high if read.side is Side.AFTER else logs.low
    if read.generation != logs.generation or edge != read.start or logs.low is None or logs.high is None:
        return logs
    if logs.is_fresh:
        is_empty = read.is_all and (logs.has_all_before if read.side is Side.AFTER else logs.has_all_after)
        if not read.lines and not is_empty:  # what stands there may stand until there is something else to show
            if read.side is Side.AFTER:
                return replace(logs, high=read.cut, has_all_after=read.is_all)
            return replace(logs, low=read.cut, has_all_before=read.is_all)
        logs = replace(logs, lines=(), top=0, cursor=0, is_fresh=False)
    added = _with_lines_below(logs, read) if read.side is Side.AFTER else _with_lines_above(logs, read)
    return _in_sight(_aimed(added))


def _with_lines_below(logs: LogsView, read: LinesRead) -> LogsView:
    assert logs.low is not None
    closed = tuple(line for line in logs.lines if not line.is_open) if _has_open(logs.lines) else logs.lines
    lines = (*closed, *read.lines)
    surplus = max(0, len(lines) - MOST_LINES)
    if not logs.is_following:
        surplus = min(surplus, max(0, min(logs.top, logs.cursor) - logs.rows))
    return replace(
        logs, lines=lines[surplus:], low=_behind(logs.low, lines[:surplus]), high=read.cut,
        has_all_after=read.is_all, has_all_before=logs.has_all_before and not surplus,
        top=max(0, logs.top - surplus), cursor=max(0, logs.cursor - surplus),
        mark=None if logs.mark is None else max(0, logs.mark - surplus),
    )  # fmt: skip


def _with_lines_above(logs: LogsView, read: LinesRead) -> LogsView:
    assert logs.high is not None
    lines = (*read.lines, *logs.lines)
    num_new = len(read.lines)
    is_first = logs.low == logs.origin or not logs.lines
    keep = max(MOST_LINES, logs.top + num_new + 2 * logs.rows)
    dropped = lines[keep:]
    high = list(logs.high)
    for line in reversed(dropped):
        high[line.source] = min(high[line.source], line.offset)
    cursor = logs.cursor + num_new - (not logs.lines and num_new > 0)
    return replace(
        logs, lines=lines[:keep], low=read.cut, high=tuple(high), has_all_before=read.is_all,
        has_all_after=logs.has_all_after and not dropped, cursor=cursor,
        top=max(0, cursor - logs.rows // 3) if is_first else logs.top + num_new,
        mark=None if logs.mark is None else logs.mark + num_new,
    )  # fmt: skip


def _has_open(lines: tuple[LogLine, ...]) -> bool:
    return any(line.is_open for line in lines)


def _aimed(logs: LogsView) -> LogsView:
    """Put the cursor on the line that was asked for, once it is there."""
    if logs.aimed_line is None:
        return logs
    for place, line in enumerate(logs.lines):
        if is_same(line, logs.aimed_line):
            return replace(logs, cursor=place, top=max(0, place - logs.rows // 3), aimed_line=None)
    return logs


def _grown(logs: LogsView, change: Grown) -> LogsView:
    if change.generation != logs.generation or logs.extent is None or logs.high is None:
        return logs
    before, now = logs.extent, change.extent
    if now == before:
        return logs
    is_new = any(
        (old is not None and old != new) or end < high
        for old, new, end, high in zip(before.identities, now.identities, now.ends, logs.high, strict=True)
    )
    behind = sum(now.ends) - sum(logs.high)
    if is_new or (logs.is_following and behind > FLOOD_BYTES and not logs.tests):
        return _reopened(logs if not is_new else replace(logs, count=None))
    return replace(logs, extent=now, has_all_after=logs.has_all_after and now.ends == before.ends)


def _moved(logs: LogsView, place: int) -> LogsView:
    last = max(0, len(logs.lines) - 1)
    cursor = min(max(place, 0), last)
    is_at_end = cursor == last and logs.has_all_after
    is_following = is_at_end and (logs.is_following or place > logs.cursor) and logs.mark is None
    return _in_sight(replace(logs, cursor=cursor, is_following=is_following, aimed_line=None))


def _scrolled(logs: LogsView, by: int) -> LogsView:
    top = min(max(logs.top + by, 0), _last_top(logs))
    bottom = _last_in_sight(replace(logs, top=top))
    cursor = min(max(logs.cursor, top), bottom)
    is_following = by > 0 and logs.has_all_after and top == _last_top(logs) and logs.mark is None
    if is_following:
        cursor = max(0, len(logs.lines) - 1)
    return replace(logs, top=top, cursor=cursor, is_following=is_following, aimed_line=None)


def _in_sight(logs: LogsView) -> LogsView:
    """Move the lines so far that the cursor is in sight; the end where it is followed."""
    last = max(0, len(logs.lines) - 1)
    if logs.is_following:
        return replace(logs, cursor=last, top=_last_top(logs))
    logs = replace(logs, cursor=min(logs.cursor, last), top=min(logs.top, logs.cursor, _last_top(logs)))
    room, top = logs.rows, logs.cursor
    while top >= 0 and logs.lines and (room := room - num_rows(logs.lines[top], logs)) >= 0:
        top -= 1
    return replace(logs, top=max(logs.top, min(top + 1, logs.cursor)))


def _last_top(logs: LogsView) -> int:
    """The first line in sight when the last one is at the bottom."""
    room, top = logs.rows, len(logs.lines)
    while top > 0 and (room := room - num_rows(logs.lines[top - 1], logs)) >= 0:
        top -= 1
    return min(top, max(0, len(logs.lines) - 1))


def _last_in_sight(logs: LogsView) -> int:
    room, place = logs.rows, logs.top
    while place < len(logs.lines) and (room := room - num_rows(logs.lines[place], logs)) >= 0:
        place += 1
    return max(logs.top, place - 1)
