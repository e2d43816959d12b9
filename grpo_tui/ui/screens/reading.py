"""A scrolling page over a screen; `grpo_tui.ui.pages` has what stands on them."""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from grpo_tui.view.format import count_text


class ReadingScreen(ModalScreen[None]):
    """A titled page."""

    BINDINGS = [
        Binding("escape,q,enter,w,c,d,M,question_mark", "dismiss", "close", tooltip="go back to the main screen"),
        Binding("y", "copy", "copy", tooltip="copy the selection, or the whole page"),
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
        frame.border_subtitle = "y copies · esc closes"
        yield frame

    def on_click(self, event: events.Click) -> None:
        """Close on a click beside the page."""
        if not self.query_one(VerticalScroll).region.contains(event.screen_x, event.screen_y):
            self.dismiss()

    def action_copy(self) -> None:
        """Copy the selected text, or the whole page, to the terminal's clipboard."""
        text = self.get_selected_text() or self._page.plain
        self.app.copy_to_clipboard(text)
        frame = self.query_one(VerticalScroll)
        frame.border_subtitle = f"copied {count_text(len(text), 'character')} · esc closes"

    def action_scroll(self, by: int) -> None:
        """Move by a line."""
        self.query_one(VerticalScroll).scroll_relative(y=by, animate=False)
