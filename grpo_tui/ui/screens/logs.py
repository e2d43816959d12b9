"""The log screen: one log or all merged by time; follow, search, filter, copy, open in a pager.

A worker reads the lines that the state lacks and posts them; keys change the state at once. Searches run in pieces, so
that a newer search, or leaving the screen, cancels them.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

from textual import on
from textual.app import ComposeResult, SuspendNotSupported
from textual.widgets import Input

from grpo_engine.wire.run_folder import SUPERVISOR_LOG
from grpo_engine.wire.supervisor import ENDED_RUN_STATES
from grpo_tui.ui.keys import Key, bindings
from grpo_tui.ui.messages import StateChanged
from grpo_tui.ui.screens.base import RunScreen
from grpo_tui.ui.waiting import wait_at_most
from grpo_tui.ui.widgets.frame.activity_line import ActivityLine
from grpo_tui.ui.widgets.log_page import (
    PLACEHOLDERS,
    LogNarrowing,
    LogPage,
    LogPrompt,
    LogServices,
    LogsTitle,
    narrowing,
)
from grpo_tui.view.format import bytes_text
from grpo_tui.view.logs import state as log_view
from grpo_tui.view.logs.pager import line_at, pager_command, show
from grpo_tui.view.logs.reader import Cut, Extent, LogFile, LogLine, LogReader, MatchCount
from grpo_tui.view.logs.search import ERRORS_ALONE, LineTest, line_test
from grpo_tui.view.logs.state import LogChange, LogsView, Prompt, Side
from grpo_tui.view.logs.tail import without_colours
from grpo_tui.view.logs.timestamps import InvalidTime, typed_time
from grpo_tui.view.state import ViewState

SUPERVISOR = "supervisor"
"""The supervisor's own log in the run folder, listed after those of the services."""
POLL_BUSY_S, POLL_QUIET_S = 0.1, 0.5
"""Between two looks at logs that are being written, and at others."""
LINES_A_READ = 150

KEYS = (
    Key(key="slash", shown="/", action="screen.prompt('/')", label="search",
        help="search for text or a regular expression; a capital letter makes it case-sensitive"),
    Key(key="n", shown="n", action="screen.find_searched(1)", label="next", is_in_footer=False,
        help="next match below"),
    Key(key="N", shown="N", action="screen.find_searched(-1)", label="previous", is_in_footer=False,
        help="next match above"),
    Key(key="ampersand", shown="&", action="screen.prompt('&')", label="filter",
        help="show only lines that match a text or a regular expression"),
    Key(key="l", shown="l", action="screen.level", label="level",
        help="show errors, warnings and errors, or all lines"),
    Key(key="e", shown="e", action="screen.find_error(1)", label="error", is_in_footer=False,
        help="next error below"),
    Key(key="E", shown="E", action="screen.find_error(-1)", label="error", is_in_footer=False,
        help="next error above"),
    Key(key="tab", shown="tab", action="screen.step(1)", label="log",
        help="next log; the first is all logs merged by time"),
    Key(key="shift+tab", shown="⇧tab", action="screen.step(-1)", label="previous log", is_in_footer=False,
        help="previous log"),
    Key(key="0", shown="0", action="screen.choose(None)", label="all", is_in_footer=False,
        help="all logs merged by time"),
    Key(key="colon", shown=":", action="screen.prompt(':')", label="time",
        help="go to a time: 14:03:05, 14:03, or -10m"),
    Key(key="f", shown="f", action="screen.follow", label="follow",
        help="follow the end, or pause to read"),
    Key(key="W", shown="W", action="screen.wrap", label="wrap", is_in_footer=False,
        help="wrap long lines, or cut them at the edge"),
    Key(key="m", shown="m", action="screen.mark", label="mark", is_in_footer=False,
        help="start to select lines at the cursor, or cancel that"),
    Key(key="o", shown="o", action="screen.open_pager", label="open in full", is_in_footer=False,
        help="open the log at this line in $PAGER (less)"),
    Key(key="up,k", shown="↑ k", action="screen.move(-1)", label="up", is_in_footer=False,
        help="line above; stops following"),
    Key(key="down,j", shown="↓ j", action="screen.move(1)", label="down", is_in_footer=False,
        help="line below"),
    Key(key="pageup", shown="PgUp", action="screen.page(-1)", label="back", is_in_footer=False,
        help="one page up"),
    Key(key="pagedown", shown="PgDn", action="screen.page(1)", label="on", is_in_footer=False,
        help="one page down"),
    Key(key="g,home", shown="g Home", action="screen.to_start", label="start", is_in_footer=False,
        help="oldest line that is kept"),
    Key(key="G,end", shown="G End", action="screen.to_end", label="end of log", is_in_footer=False,
        help="newest line, and follow"),
    Key(key="left", shown="←", action="screen.shift(-1)", label="left", is_in_footer=False,
        help="scroll long lines to the left"),
    Key(key="right", shown="→", action="screen.shift(1)", label="right", is_in_footer=False,
        help="scroll long lines to the right"),
    Key(key="escape", shown="esc", action="screen.leave", label="leave", is_in_footer=False,
        help="cancel typing, then the selection, the search, the filter and the level"),
)  # fmt: skip


class LogsScreen(RunScreen):
    """Everything that the services wrote."""

    PLACE = "logs"
    KEYS = KEYS
    BINDINGS = bindings(KEYS)

    def __init__(self, state: ViewState) -> None:
        super().__init__(state)
        self._drawn = asyncio.Event()
        self._reader = LogReader(())
        self._until: float | None = None
        self._limits: tuple[float, LogReader, Cut] | None = None
        self._counter: MatchCount | None = None
        self._counts: tuple[object, ...] = ()
        """The inputs of the last count."""

    def body(self) -> ComposeResult:
        """The lines have the free rows; what is typed stands below them."""
        yield LogServices()
        yield LogsTitle()
        yield LogPage()
        yield LogNarrowing()
        yield LogPrompt()

    def on_mount(self) -> None:
        """Read from now on, while the screen is in sight."""
        self.run_worker(self._read(), name="logs")

    def draw(self, state: ViewState) -> None:
        """Draw a state, and update the list of logs."""
        self._state = state
        names = tuple(service.name for service in state.services)
        if names and state.logs.services != (*names, SUPERVISOR):
            self._post(log_view.ServicesKnown(names=(*names, SUPERVISOR)))
        if state.until != self._until:
            self._until, self._limits = state.until, None
            self._post(log_view.Reopened())
        for prompt in self.query(LogPrompt):
            self._draw_prompt(prompt, state.logs)
            self.query_one(ActivityLine).display = state.logs.prompt is None
            self.query_one(LogNarrowing).display = bool(narrowing(state.logs))
        super().draw(state)
        self._update_count(state)
        self._number_match(state.logs)
        self._drawn.set()

    def _draw_prompt(self, prompt: LogPrompt, logs: LogsView) -> None:
        is_open = logs.prompt is not None
        if is_open == prompt.has_class("-open"):
            return
        prompt.set_class(is_open, "-open")
        prompt.can_focus = is_open
        if logs.prompt is not None:
            prompt.placeholder = PLACEHOLDERS[logs.prompt]
            prompt.value = {Prompt.SEARCH: logs.searched, Prompt.FILTER: logs.pattern, Prompt.TIME: ""}[logs.prompt]
        self.set_focus(prompt if is_open else None)

    # --- reading ---------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Read missing lines, and poll the logs for growth."""
        pause_s, look_at = POLL_BUSY_S, 0.0
        now = asyncio.get_running_loop().time
        while True:
            self._drawn.clear()
            if not self.is_current or not self._state.logs.services:
                await self._drawn.wait()
                continue
            logs, reader = self._state.logs, self._reader_for(self._state)
            change: LogChange | None
            if logs.low is None:
                change = await asyncio.to_thread(self._opened, reader, logs)
            elif (side := log_view.wanted(logs)) is not None:
                change = await asyncio.to_thread(_lines_read, reader, logs, side)
            elif now() < look_at:
                await wait_at_most(self._drawn, look_at - now())
                continue
            else:
                change = await asyncio.to_thread(self._grown, reader, logs)
                pause_s = POLL_BUSY_S if change is not None else min(POLL_QUIET_S, 1.5 * pause_s)
                look_at = now() + pause_s
            if change is not None:
                self._drawn.clear()
                self._post(change)
                await self._drawn.wait()

    def _reader_for(self, state: ViewState) -> LogReader:
        """The reader of the logs that are shown; the same while they are."""
        files = tuple(LogFile(name=name, path=_path(state, name)) for name in state.logs.shown_services)
        if files != self._reader.files:
            self._reader = LogReader(files)
        return self._reader

    def _extent(self, reader: LogReader) -> Extent:
        """How far the logs reach, or reached at the moment that is travelled to."""
        extent, until = reader.extent(), self._until
        if until is None:
            return extent
        limits = self._limits
        if limits is None or limits[:2] != (until, reader):
            limits = self._limits = until, reader, self._ends_at(until, reader, extent)
        ends = tuple(min(*pair) for pair in zip(limits[2], extent.ends, strict=True))
        return replace(extent, ends=ends, is_final=True)

    def _ends_at(self, moment: float, reader: LogReader, extent: Extent) -> Cut:
        """The ends of the logs at a moment: from usage samples, else from the timestamps of their lines."""
        past = self._state.travel.past
        past = past if past is not None and past.moment == moment else None
        if past is not None and past.status is not None and past.status.state in ENDED_RUN_STATES:
            return extent.ends  # including lines written while it ended
        told = past.log_ends if past is not None else {}
        by_lines = reader.at_time(moment, extent.ends)
        return tuple(
            reader.whole_lines_end(file.name, told[file.name]) if file.name in told else end
            for file, end in zip(reader.files, by_lines, strict=True)
        )

    def _opened(self, reader: LogReader, logs: LogsView) -> LogChange:
        extent = self._extent(reader)
        match logs.aim:
            case float() as time:
                cut = reader.at_time(time, extent.ends)
            case LogLine() as line:
                cut = reader.at_line(line, extent.ends)
            case tuple() as place if len(place) == len(extent.ends):
                cut = place
            case _ if extent.is_final:
                cut = extent.ends
            case _:
                cut = reader.last_lines_begin(extent.ends)
        bounds = zip(extent.starts, cut, extent.ends, strict=True)
        cut = tuple(min(max(start, place), end) for start, place, end in bounds)
        return log_view.Opened(generation=logs.generation, cut=cut, extent=extent)

    def _grown(self, reader: LogReader, logs: LogsView) -> LogChange | None:
        extent = self._extent(reader)
        return None if extent == logs.extent else log_view.Grown(generation=logs.generation, extent=extent)

    # --- searching -------------------------------------------------------------------------------------------------

    def action_find_searched(self, direction: int) -> None:
        """Go to the next match."""
        searched = self._state.logs.searched
        if not searched:
            self.show_message("nothing to search for yet: / starts a search")
            return
        self._find(line_test(searched), f"“{searched}”", direction)

    def action_find_error(self, direction: int) -> None:
        """Go to the next error."""
        self._find(ERRORS_ALONE, "error", direction)

    def _find(self, test: LineTest, words: str, direction: int, *, then_above: bool = False) -> None:
        finding = self._go_to_found(test, words, direction, then_above)
        self.run_worker(finding, name="find", group="find", exclusive=True)

    async def _go_to_found(self, test: LineTest, words: str, direction: int, then_above: bool) -> None:
        logs, reader = self._state.logs, self._reader_for(self._state)
        # Right after something was typed, a match in sight is as good as one further on.
        place = logs.top if then_above else logs.cursor + (direction > 0)
        cut = log_view.cut_at(logs, place)
        if logs.extent is None or cut is None:
            return
        tests, ends, searched_bytes = (*logs.tests, test), logs.extent.ends, 0
        while True:
            if direction > 0:
                found = await asyncio.to_thread(reader.after, cut, 1, ends, tests, is_final=logs.extent.is_final)
            else:
                found = await asyncio.to_thread(reader.before, cut, 1, tests)
            if found.lines or found.is_all or found.cut == cut:
                break
            cut, searched_bytes = found.cut, searched_bytes + found.num_bytes
            self._post(log_view.Busy(words=f"searching {words}: {bytes_text(searched_bytes)} read; esc stops"))
        self._post(log_view.Busy())
        if found.lines:
            self._go_to(found.lines[0])
        elif then_above:
            await self._go_to_found(test, words, -1, False)
        else:
            self.show_message(f"{words} not found {'below' if direction > 0 else 'above'}")

    def _go_to(self, line: LogLine) -> None:
        for place, each in enumerate(self._state.logs.lines):
            if log_view.is_same(each, line):
                self._post(log_view.CursorSet(place=place))
                return
        self._post(log_view.Reopened(aim=line))

    def _update_count(self, state: ViewState) -> None:
        """Restart the count if other lines are shown or searched; not while the logs are being opened."""
        logs = state.logs
        end = None if state.until is None else logs.extent  # that of a moment does not grow
        counts = (logs.searched, logs.shown_services, logs.level, logs.pattern, end)
        if counts != self._counts and self._counter is not None:
            self._counter, self._counts = None, ()
            self.workers.cancel_group(self, "count")
        if logs.extent is None or logs.low is None or logs.prompt is not None or counts == self._counts:
            return
        self._counts = counts
        if logs.searched:
            tests = (*logs.tests, line_test(logs.searched))
            self._counter = MatchCount(self._reader_for(state), tests, logs.extent)
            counting = self._count(self._counter, logs.searched, logs.extent.ends)
            self.run_worker(counting, name="count", group="count", exclusive=True)

    async def _count(self, counter: MatchCount, pattern: str, ends: Cut) -> None:
        """Count the matches in everything that is shown, a piece at a time."""
        is_done = False
        while not is_done:
            is_done = await asyncio.to_thread(counter.go_on, ends)
            count = log_view.Count(num_matches=counter.num_matches, num_bytes=counter.num_bytes, is_done=is_done)
            self._post(log_view.Counted(pattern=pattern, count=count))

    def _number_match(self, logs: LogsView) -> None:
        """Say which match the cursor is on, once all are counted."""
        cut = log_view.cut_at(logs, logs.cursor)
        if self._counter is None or logs.count is None or not logs.count.is_done or cut is None or logs.line is None:
            return
        is_match = line_test(logs.searched).accepts(without_colours(logs.line.text).encode())
        above = self._counter.number_at(cut) if is_match else None
        count = replace(logs.count, number=None if above is None else above + 1)
        if count != logs.count:
            self._post(log_view.Counted(pattern=logs.searched, count=count))

    # --- the line that is typed in ---------------------------------------------------------------------------------

    def action_prompt(self, what: str) -> None:
        """Ask for a text, a filter or a time."""
        self._post(log_view.Prompted(prompt=Prompt(what)))

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        logs = self._state.logs
        if not isinstance(event.input, LogPrompt):
            return
        if logs.prompt is Prompt.FILTER and (logs.fault or event.value != logs.pattern):
            self._post(log_view.Filtered(pattern=event.value))
        elif logs.prompt is Prompt.SEARCH and (logs.fault or event.value != logs.searched):
            self._post(log_view.Searched(pattern=event.value))

    @on(Input.Submitted)
    def _taken(self, event: Input.Submitted) -> None:
        logs = self._state.logs
        if not isinstance(event.input, LogPrompt) or logs.prompt is None:
            return
        if logs.prompt is Prompt.TIME:
            self._go_to_time(event.value)
            return
        if logs.fault:
            return  # it says what is wrong; there is nothing to look for yet
        self._post(log_view.Prompted(prompt=None))
        if logs.prompt is Prompt.SEARCH and logs.searched:
            self._find(line_test(logs.searched), f"“{logs.searched}”", 1, then_above=True)

    def _go_to_time(self, text: str) -> None:
        if not text.strip():
            self._post(log_view.Prompted(prompt=None))
            return
        try:
            time = typed_time(text, self._last_time())
        except InvalidTime as wrong:
            self._post(log_view.Prompted(prompt=Prompt.TIME, fault=str(wrong)))
            return
        self._post(log_view.Prompted(prompt=None))
        self._post(log_view.Reopened(aim=time))

    def _last_time(self) -> float:
        """What `-10m` counts from: the end of an ended run, else now."""
        status = self._state.status
        ended = status.ended_at if status is not None else None
        return ended if ended is not None and self._until is None else self._state.now

    def action_leave(self) -> None:
        """Cancel the innermost of: typing, a running search, the selection, the search text, the filter."""
        logs = self._state.logs
        if logs.prompt is not None:
            if logs.prompt is Prompt.SEARCH and logs.fault:
                self._post(log_view.Searched(pattern=""))
            self._post(log_view.Prompted(prompt=None))
        elif logs.busy:
            self.workers.cancel_group(self, "find")
            self._post(log_view.Busy())
        elif logs.mark is not None:
            self._post(log_view.MarkChanged())
        elif logs.searched:
            self._post(log_view.Searched(pattern=""))
        elif logs.pattern:
            self._post(log_view.Filtered(pattern=""))
        elif logs.tests:
            while_narrow = [log_view.LevelMoved()] * ((-log_view.LEVELS.index(logs.level)) % len(log_view.LEVELS))
            for change in while_narrow:
                self._post(change)

    # --- other keys ------------------------------------------------------------------------------------------------

    def action_choose(self, service: str | None) -> None:
        """Show one log, or all."""
        self._post(log_view.Chosen(service=service))

    def action_step(self, by: int) -> None:
        """The next log, or the one before."""
        self._post(log_view.ChoiceMoved(by=by))

    def action_level(self) -> None:
        """The next level."""
        self._post(log_view.LevelMoved())

    def action_follow(self) -> None:
        """Follow the end, or hold still."""
        self._post(log_view.Followed())

    def action_wrap(self) -> None:
        """Fold long lines, or not."""
        self._post(log_view.WrapChanged())

    def action_mark(self) -> None:
        """Begin a selection, or give it up."""
        self._post(log_view.MarkChanged())

    def action_move(self, by: int) -> None:
        """Move the cursor."""
        self._post(log_view.CursorMoved(by=by))

    def action_page(self, by: int) -> None:
        """Move by pages."""
        step = by * max(1, self._state.logs.rows - 1)
        self._post(log_view.Scrolled(by=step))
        self._post(log_view.CursorMoved(by=step))

    def action_to_start(self) -> None:
        """Go to the oldest line."""
        logs = self._state.logs
        if logs.extent is not None:
            self._post(log_view.Reopened(aim=logs.extent.starts))

    def action_to_end(self) -> None:
        """Go to the newest line, and follow."""
        self._post(log_view.Followed(is_following=True))

    def action_shift(self, by: int) -> None:
        """Move sideways."""
        self._post(log_view.Shifted(by=by))

    def action_copy(self) -> None:
        """Copy the text selected with the mouse, else the marked lines, as they are read and without colours."""
        if self.copy_selection():
            return
        logs = self._state.logs
        lines = [logs.lines[place] for place in logs.selection]
        if not lines:
            self.show_message("no line to copy")
            return
        names = logs.shown_services
        prefixed = [f"{names[line.source]}: " if len(names) > 1 else "" for line in lines]
        text = "\n".join(name + without_colours(line.text) for name, line in zip(prefixed, lines, strict=True))
        self.app.copy_to_clipboard(text)
        if logs.mark is not None:
            self._post(log_view.MarkChanged())
        self.show_message(f"copied {len(lines)} line{'s' * (len(lines) != 1)} ({len(text):,} characters)")

    def action_open_pager(self) -> None:
        """Suspend the screen, and run a pager at this line."""
        line = self._state.logs.line
        if line is None:
            self.show_message("no line to open")
            return
        file = self._reader_for(self._state).files[line.source]
        extent = LogReader((file,)).extent()
        pager = os.environ.get("PAGER", "")
        try:
            command = pager_command(pager, line_at(file.path, line.offset - extent.starts[0]))
            with self.app.suspend():
                show(command, file.path)
        except SuspendNotSupported:
            self.show_message("cannot open a pager: this terminal cannot be suspended")
        except OSError as error:
            self.show_message(
                f"{error.filename or file.path} cannot be opened: {error.strerror} (PAGER is {pager or 'less'})"
            )
        self.refresh()

    def _post(self, change: LogChange) -> None:
        self.post_message(StateChanged(change))


def _lines_read(reader: LogReader, logs: LogsView, side: Side) -> LogChange | None:
    start = logs.high if side is Side.AFTER else logs.low
    if start is None or logs.extent is None:
        return None
    num_lines = max(LINES_A_READ, 3 * logs.rows)
    if side is Side.AFTER:
        found = reader.after(start, num_lines, logs.extent.ends, logs.tests, is_final=logs.extent.is_final)
    else:
        found = reader.before(start, num_lines, logs.tests)
    return log_view.LinesRead(
        generation=logs.generation, side=side, start=start, lines=found.lines, cut=found.cut, is_all=found.is_all
    )


def _path(state: ViewState, name: str) -> Path:
    service = state.service(name)
    return state.run_folder / (SUPERVISOR_LOG if service is None else Path(service.log).name)
