"""A scrolling page over a screen; `grpo_tui.ui.pages` has what stands on them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from grpo_tui.ui.text_screen import ClosesOnce
from grpo_tui.view.format import count_text

CLOSING = "y copies all · esc closes"
MAX_LINES, MAX_CHARACTERS = 5000, 524_288
"""Of a page: all of it is laid out, which took more than 45 s and 2 GB for a crash report of 11 MB."""


class ReadingScreen(ModalScreen[None], ClosesOnce[None]):
    """A titled page."""

    BINDINGS = [
        Binding("escape,q,enter,w,c,d,M,question_mark", "dismiss", "close", tooltip="go back to the main screen"),
        Binding("y", "copy", "copy", tooltip="copy the selection, or the whole page"),
        *(
            Binding(
                str(number), f"copy_command({number})", "copy", show=False, tooltip="copy the command of this number"
            )
            for number in range(1, 10)
        ),
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

    def __init__(self, title: str, page: Content, *, is_wide: bool = False, commands: Sequence[str] = ()) -> None:
        """Show a page.

        Args:
            is_wide: use the whole width, for tables and log lines.
            commands: what the keys from 1 on copy.
        """
        super().__init__(classes="-wide" if is_wide else None)
        self._page_title = title
        self._page = beginning(page)
        self._commands = commands

    def compose(self) -> ComposeResult:
        """The page in its frame."""
        frame = VerticalScroll(Static(self._page))
        frame.border_title = self._page_title
        numbers = f"1-{len(self._commands)} copy commands" if len(self._commands) > 1 else "1 copies the command"
        frame.border_subtitle = f"{numbers} · {CLOSING}" if self._commands else CLOSING
        yield frame

    def on_click(self, event: events.Click) -> None:
        """Close on a click beside the page."""
        if not self.query_one(VerticalScroll).region.contains(event.screen_x, event.screen_y):
            self.dismiss()

    def action_copy(self) -> None:
        """Copy the selected text, or the whole page, to the terminal's clipboard."""
        text = self.get_selected_text() or self._page.plain
        self._put_on_clipboard(text, count_text(len(text), "character"))

    def action_copy_command(self, number: int) -> None:
        """Copy a command that stands on the page."""
        for command in self._commands[number - 1 : number]:
            self._put_on_clipboard(command, f"command {number}")

    def _put_on_clipboard(self, text: str, words: str) -> None:
        self.app.copy_to_clipboard(text)
        self.query_one(VerticalScroll).border_subtitle = f"copied {words} · esc closes"

    def action_scroll(self, by: int) -> None:
        """Move by a line."""
        self.query_one(VerticalScroll).scroll_relative(y=by, animate=False)


def beginning(page: Content) -> Content:
    """As much of a page as is laid out, and a line that says so where that is not all."""
    text = page.plain
    end = min(len(text), MAX_CHARACTERS)
    for number, newline in enumerate(re.finditer("\n", text[:end]), start=1):
        if number == MAX_LINES:
            end = newline.start()
    if end == len(text):
        return page
    return page[:end] + Content(f"\n… and {count_text(len(text) - end, 'further character')}")
