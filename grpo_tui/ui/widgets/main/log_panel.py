"""The log of the selected service: title and lines, following their end or paused."""

from __future__ import annotations

from rich.cells import cell_len
from rich.segment import Segment
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from grpo_tui.ui.messages import FollowingChanged
from grpo_tui.ui.widgets.lines import Lines, rule
from grpo_tui.ui.widgets.selectable import Selectable
from grpo_tui.view.logs.tail import LogView, without_colours
from grpo_tui.view.state import FollowChanged, ViewState
from grpo_tui.view.timeline.state import clock_at

SHIFT_COLUMNS = 20


class LogTitle(Lines):
    """Name of the log, and whether it follows the end."""

    DEFAULT_CSS = """
    LogTitle { height: 1; padding: 0 1; }
    """

    async def on_click(self) -> None:
        """Toggle following."""
        await self.run_action("app.follow")

    def inputs(self, state: ViewState) -> tuple[object, ...]:
        """Not the lines of the log."""
        return (state.selected, state.is_following, state.until)

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """`─ log vllm ──────────────── following ─`."""
        if state.selected is None:
            return [rule(width, "log")]
        note = "following" if state.is_following else "paused: f follows"
        if state.until is not None:
            note = f"until {clock_at(state.until)}"
        return [rule(width, f"log {state.selected}", note)]


class LogLines(ScrollView, Selectable, can_focus=False):
    """The lines in memory, painted only where they are in sight."""

    DEFAULT_CSS = """
    LogLines { height: 1fr; padding: 0 1; overflow-x: hidden; overflow-y: auto; scrollbar-size-vertical: 1; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.auto_links = False
        self._log = LogView()
        self._is_following = True
        self._longest = 0

    def draw(self, state: ViewState) -> None:
        """Draw the log; lines that are being read stay in place."""
        before, self._log = self._log, state.log
        was_following, self._is_following = self._is_following, state.is_following
        if before is not state.log:
            if self.text_selection is not None and not _are_rows_kept(before, self._log):
                self.screen.clear_selection()
            self._measure(before)
            self.virtual_size = Size(self._longest, self.num_text_rows)
            self.refresh()
        if self._is_following and (before is not state.log or not was_following):
            self._to_end()
        elif before.service == self._log.service and self._log.num_dropped > before.num_dropped:
            dropped = self._log.num_dropped - before.num_dropped
            self.scroll_to(y=max(0, self.scroll_offset.y - dropped), animate=False, immediate=True)

    def on_resize(self) -> None:
        """Stay at the end when the size changes."""
        if self._is_following:
            self._to_end()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Scrolling up stops following; reaching the end resumes it."""
        super().watch_scroll_y(old_value, new_value)
        is_at_end = new_value >= self.max_scroll_y
        if new_value < old_value and self._is_following and not is_at_end:
            self.post_message(FollowingChanged(FollowChanged(is_following=False)))
        elif new_value > old_value and not self._is_following and is_at_end:
            self.post_message(FollowingChanged(FollowChanged(is_following=True)))

    def _to_end(self) -> None:
        """Show the newest line; forced, because a log that was empty has no scrollbar yet."""
        self.scroll_end(animate=False, force=True, immediate=True, x_axis=False)
        self.vertical_scrollbar.position = self.scroll_y  # the library tells it only to a bar that is shown already

    def shift(self, by: int) -> None:
        """Scroll long lines sideways."""
        furthest = max(0, self._longest - self.scrollable_content_region.width)
        self.scroll_to(x=min(max(0, self.scroll_offset.x + by * SHIFT_COLUMNS), furthest), animate=False, force=True)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Paint one line of the log, in its own colours."""
        width = self.scrollable_content_region.width
        place = y + self.scroll_offset.y
        shown = self._line(place)
        if shown is None:
            shown = self._words_for_nothing() if place == 0 else ""
        text = Text.from_ansi(shown, no_wrap=True, end="") if "\x1b" in shown else Text(shown, no_wrap=True, end="")
        style = self.visual_style.rich_style  # kept by the library; `rich_style` is recomputed from all parents
        text.stylize_before(style)
        strip = Strip(text.render(self.app.console), cell_len(text.plain))
        left, right = self.scroll_offset.x, self.scroll_offset.x + width
        if strip.cell_length <= right:
            return self.with_selection(strip.crop_extend(left, right, style), place, left)
        cut_sign = Strip([Segment("…", style)], 1)
        return self.with_selection(Strip.join([strip.crop_extend(left, right - 1, style), cut_sign]), place, left)

    @property
    def num_text_rows(self) -> int:
        """See `Selectable`."""
        return len(self._log.lines) + bool(self._log.open_line)

    def text_row(self, row: int) -> str:
        """See `Selectable`."""
        return without_colours(self._line(row) or "")

    @property
    def plain_lines(self) -> list[str]:
        """The lines in sight as text, for tests."""
        return [self.render_line(y).text.rstrip() for y in range(self.size.height)]

    def _line(self, place: int) -> str | None:
        lines = self._log.lines
        if place < len(lines):
            return lines[place]
        return self._log.open_line if place == len(lines) and self._log.open_line else None

    def _words_for_nothing(self) -> str:
        if self._log.service is None or self._log.lines or self._log.open_line:
            return ""
        return f"{self._log.service} has not written to its log yet"

    def _measure(self, before: LogView) -> None:
        """Keep the width of the longest line; only lines that are new are measured."""
        is_same_file = before.service == self._log.service and self._log.num_dropped >= before.num_dropped
        known = before.num_dropped + len(before.lines) - self._log.num_dropped if is_same_file else 0
        fresh = self._log.lines[max(0, known) :] if is_same_file else self._log.lines
        longest = max((len(text if "\x1b" not in text else without_colours(text)) for text in fresh), default=0)
        self._longest = max(self._longest if is_same_file else 0, longest, len(self._log.open_line))


def _are_rows_kept(before: LogView, now: LogView) -> bool:
    """Whether every line stands in the same row as before."""
    return before.service == now.service and before.num_dropped == now.num_dropped


class LogPanel(Vertical):
    """Title and lines."""

    DEFAULT_CSS = """
    LogPanel { height: 1fr; width: 1fr; }
    """

    def compose(self) -> ComposeResult:
        """Stack them."""
        yield LogTitle()
        yield LogLines()

    def draw(self, state: ViewState) -> None:
        """Show another state."""
        self.query_one(LogTitle).draw(state)
        self.query_one(LogLines).draw(state)
