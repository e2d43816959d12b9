"""A scrolling page over a screen: help, warnings in full, or a crash report."""

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
from grpo_tui.ui.widgets.frame.travel_bar import MARKS_LEGEND
from grpo_tui.ui.widgets.main.metrics_panel import band_text
from grpo_tui.ui.widgets.main.warnings_bar import wrapped
from grpo_tui.view.state import ViewState

KEY_WIDTH = 7
PAGE_COLUMNS, PAGE_SHARE = 100, 0.94
BAND_NAME_WIDTH = 25
MOUSE_TOLD = (
    "Click tabs, keys in the last line, services, warnings, metrics, the timeline, log names, rows, tokens and "
    "answers. The wheel scrolls what is under the pointer, and zooms a plot."
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
            is_wide: use the whole width, for tables and log lines.
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
    """Columns for the text of a page: without frame, padding and scrollbar."""
    return min(PAGE_COLUMNS, int(PAGE_SHARE * columns)) - 7


def help_page(place: str, keys: Sequence[Key], width: int) -> Content:
    """The help: keys of this screen, keys of every screen, signs, healthy bands, mouse, files."""
    rows: list[Content] = []
    along_time = [key for key in ON_TRAVEL if key.label]
    for heading, group in (
        (f"keys of this screen ({place})", keys),
        ("keys on every screen", EVERYWHERE),
        ("keys of the timeline (t opens it)", along_time),
    ):
        rows += [_heading(heading)]
        rows += [row for key in group for row in _key_rows(key, width)]
        rows += [Content("")]
    rows.pop()
    rows += [Content(""), _heading("services")]
    signs = [*((glyph, str(state)) for state, glyph in SERVICE_GLYPHS.items()), *PROBE_SIGNS.values()]
    for start in range(0, len(signs), 3):
        rows.append(Content("  " + "".join(f"{glyph} {word:<18}" for glyph, word in signs[start : start + 3])))
    rows += [Content(""), _heading("signs on the timeline"), Content(f"  {MARKS_LEGEND}")]
    rows += [
        Content(""),
        _heading("healthy bands: ✓ inside, ▲ above, ▼ below; a sparkline on a coloured background spans its band"),
    ]
    rows += [Content(f"  {name:<{BAND_NAME_WIDTH}}{band_text(band)}") for name, band in HEALTHY_BANDS.items()]
    rows += [Content("  nats: unit of log-probs, entropy and KL with the natural logarithm")]
    rows += [Content(""), _heading("mouse"), *(Content(f"  {row}") for row in wrapped(MOUSE_TOLD, width - 2))]
    rows += [
        Content(""),
        _heading("files"),
        Content("  Logs, metrics.jsonl and state.json are in the run's folder; tail -f works on them."),
    ]
    return Content("\n").join(rows)


def warnings_page(state: ViewState, width: int) -> Content:
    """Every warning with its cause and hint."""
    if not state.warnings:
        return Content("No warnings: every service is healthy, every metric in its band.")
    rows: list[Content] = []
    for warning in state.warnings:
        rows += _hanging((f"{SEVERITY_GLYPHS[warning.severity]} ", "bold"), warning.text, width, "bold")
        rows += _hanging("  → ", warning.hint, width) if warning.hint else []
        rows.append(Content(""))
    return Content("\n").join(rows[:-1])


def _key_rows(key: Key, width: int) -> list[Content]:
    return _hanging((f"  {key.shown:<{KEY_WIDTH}}", "bold"), key.help, width)


def _hanging(start: str | tuple[str, str], text: str, width: int, style: str = "") -> list[Content]:
    """A paragraph with hanging indent."""
    first = Content.assemble(start)
    rows = wrapped(text, width - first.cell_length)
    starts = [first, *(Content(" " * first.cell_length) for _ in rows[1:])]
    return [begin + Content.styled(row, style) for begin, row in zip(starts, rows, strict=False)]


def _heading(text: str) -> Content:
    return Content.styled(text, "bold underline")
