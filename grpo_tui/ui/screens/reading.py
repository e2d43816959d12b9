"""A page to read over the main screen: the help, every warning in full, or a crash report.

It scrolls; any of several keys closes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from grpo_engine.wire.metrics import HEALTHY_BANDS
from grpo_tui.ui.glyphs import PROBE_SIGNS, SERVICE_GLYPHS, SEVERITY_GLYPHS
from grpo_tui.ui.keys import EVERYWHERE, ON_TRAVEL, Key
from grpo_tui.ui.widgets.metrics_panel import band_text
from grpo_tui.ui.widgets.travel_bar import MARKS_TOLD
from grpo_tui.ui.widgets.warnings_bar import wrapped
from grpo_tui.view.state import ViewState

KEY_WIDTH = 7
PAGE_COLUMNS, PAGE_SHARE = 100, 0.94
BAND_NAME_WIDTH = 25
MOUSE_TOLD = (
    "A click works on tabs, keys of the last line, services, warnings, metrics, the line of time, names of logs, rows "
    "and tokens, and answers questions; the wheel moves through what is under it, and zooms a plot."
)


class ReadingScreen(ModalScreen[None]):
    """A titled page."""

    BINDINGS = [
        Binding("escape,q,enter,w,c,question_mark,ctrl+c", "dismiss", "close", tooltip="go back to the main screen"),
        Binding("down,j", "scroll(1)", "on", tooltip="read on"),
        Binding("up,k", "scroll(-1)", "back", tooltip="read back"),
    ]
    DEFAULT_CSS = """
    ReadingScreen { align: center middle; }
    ReadingScreen > VerticalScroll {
        width: 100; max-width: 94%; height: auto; max-height: 94%;
        padding: 1 2; background: $surface; border: round $primary;
        border-title-color: $foreground; border-subtitle-color: $foreground 65%;
        scrollbar-size-vertical: 1;
    }
    ReadingScreen.-wide > VerticalScroll { width: 98%; max-width: 98%; padding: 0 1; }
    """

    def __init__(self, title: str, page: Content, *, is_wide: bool = False) -> None:
        """Show a page.

        Args:
            is_wide: for a page with tables and lines of logs, which are longer than one likes to read.
        """
        super().__init__(classes="-wide" if is_wide else None)
        self._page_title = title
        self._page = page

    def compose(self) -> ComposeResult:
        """The page in its frame."""
        frame = VerticalScroll(Static(self._page))
        frame.border_title = self._page_title
        frame.border_subtitle = "esc closes"
        yield frame

    def on_click(self, event: events.Click) -> None:
        """Close on a click beside the page."""
        if not self.query_one(VerticalScroll).region.contains(event.screen_x, event.screen_y):
            self.dismiss()

    def action_scroll(self, by: int) -> None:
        """Move by a line."""
        self.query_one(VerticalScroll).scroll_relative(y=by, animate=False)


def page_width(columns: int) -> int:
    """Of a terminal so wide, what a page has for its text: without frame, padding and scrollbar."""
    return min(PAGE_COLUMNS, int(PAGE_SHARE * columns)) - 7


def help_page(place: str, keys: Sequence[Key], width: int) -> Content:
    """Every key in a sentence, those of this screen first, then what the signs mean, then the healthy bands."""
    rows: list[Content] = []
    along_time = [key for key in ON_TRAVEL if key.label]
    for heading, told in (
        (f"keys of this screen ({place})", keys),
        ("keys everywhere", EVERYWHERE),
        ("keys of the line of time, while it is there (t)", along_time),
    ):
        rows += [_heading(heading)]
        rows += [row for key in told for row in _told(key, width)]
        rows += [Content("")]
    rows.pop()
    rows += [Content(""), _heading("services")]
    signs = [*((glyph, str(state)) for state, glyph in SERVICE_GLYPHS.items()), *PROBE_SIGNS.values()]
    for start in range(0, len(signs), 3):
        rows.append(Content("  " + "".join(f"{glyph} {word:<18}" for glyph, word in signs[start : start + 3])))
    rows += [Content(""), _heading("the line of time"), Content(f"  {MARKS_TOLD}")]
    rows += [
        Content(""),
        _heading("healthy bands: ✓ inside, ▲ above, ▼ below; the ground of a sparkline is its band from end to end"),
    ]
    rows += [Content(f"  {name:<{BAND_NAME_WIDTH}}{band_text(band)}") for name, band in HEALTHY_BANDS.items()]
    rows += [Content(""), _heading("the mouse"), *(Content(f"  {row}") for row in wrapped(MOUSE_TOLD, width - 2))]
    rows += [
        Content(""),
        _heading("files"),
        Content("  Logs, metrics.jsonl and state.json stand in the run's folder; tail -f works on them."),
    ]
    return Content("\n").join(rows)


def warnings_page(state: ViewState, width: int) -> Content:
    """Every warning with its cause and hint."""
    if not state.warnings:
        return Content("Nothing to worry about: every service and metric is as it should be.")
    rows: list[Content] = []
    for warning in state.warnings:
        rows += _hanging((f"{SEVERITY_GLYPHS[warning.severity]} ", "bold"), warning.text, width, "bold")
        rows += _hanging("  → ", warning.hint, width) if warning.hint else []
        rows.append(Content(""))
    return Content("\n").join(rows[:-1])


def _told(key: Key, width: int) -> list[Content]:
    return _hanging((f"  {key.shown:<{KEY_WIDTH}}", "bold"), key.help, width)


def _hanging(start: str | tuple[str, str], text: str, width: int, style: str = "") -> list[Content]:
    """A paragraph whose rows begin below its first word."""
    first = Content.assemble(start)
    rows = wrapped(text, width - first.cell_length)
    starts = [first, *(Content(" " * first.cell_length) for _ in rows[1:])]
    return [begin + Content.styled(row, style) for begin, row in zip(starts, rows, strict=False)]


def _heading(text: str) -> Content:
    return Content.styled(text, "bold underline")
