"""Bases of screens: text that is selected with the mouse, and a screen that closes once."""

from __future__ import annotations

from textual import events
from textual.await_complete import AwaitComplete
from textual.errors import NoWidget
from textual.geometry import Offset
from textual.screen import Screen, ScreenResultType
from textual.widget import Widget

from grpo_tui.ui.widgets.selectable import Selectable
from grpo_tui.view.format import count_text


class ClosesOnce(Screen[ScreenResultType]):
    """What was clicked or typed before it was gone does not close it again: Textual (8.2) would close the one below.

    The last of several bases: Textual takes styles from the first.
    """

    def dismiss(self, result: ScreenResultType | None = None) -> AwaitComplete:
        """Close it, unless it is closed."""
        return super().dismiss(result) if self in self.app.screen_stack else AwaitComplete()


class TextScreen(ClosesOnce[None]):
    """Base of screens on which text is selected with the mouse, and copied."""

    AUTO_FOCUS = None

    def show_message(self, text: str) -> None:
        """Answer a key."""
        raise NotImplementedError

    def action_copy(self) -> None:
        """Copy the selected text, or say how to select."""
        if not self.copy_selection():
            self.show_message("nothing is selected: drag over text, then y or ctrl+c copies it; y on a page copies all")

    def copy_selection(self) -> bool:
        """Copy the selected text to the terminal's clipboard; returns whether there is any."""
        text = self.get_selected_text()
        if not text:
            return False
        self.app.copy_to_clipboard(text)
        self.show_message(f"copied {count_text(len(text), 'character')}; a click or esc ends the selection")
        return True

    def get_widget_and_offset_at(self, x: int, y: int) -> tuple[Widget | None, Offset | None]:
        """The widget at a cell of the screen, and the place in its text."""
        try:
            widget, region = self.get_widget_at(x, y)
        except NoWidget:
            return None, None
        if not isinstance(widget, Selectable):
            return super().get_widget_and_offset_at(x, y)
        return widget, widget.text_offset(x - region.x - widget.gutter.left, y - region.y - widget.gutter.top)

    def _forward_event(self, event: events.Event) -> None:
        """The click with which a selection ends is not one on what is under the pointer."""
        if not (isinstance(event, events.Click) and self.selections):
            super()._forward_event(event)

    def _select_all_in_widget(self, widget: Widget) -> None:
        """Two clicks are two clicks: a list opens what they are on."""
