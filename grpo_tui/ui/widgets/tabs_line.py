"""The screens of the run and their keys; a click goes there."""

from __future__ import annotations

from textual.content import Content
from textual.style import Style

from grpo_tui.ui.keys import PLACES
from grpo_tui.ui.widgets.lines import Lines
from grpo_tui.view.state import ViewState


class TabsLine(Lines):
    """One line below the header."""

    DEFAULT_CSS = """
    TabsLine { height: 1; padding: 0 1; }
    TabsLine > .here { color: $text-accent; text-style: bold underline; }
    """
    COMPONENT_CLASSES = {"here"}

    def __init__(self, place: str) -> None:
        super().__init__()
        self._place = place

    def inputs(self, state: ViewState) -> tuple[object, ...]:
        """The same for ever."""
        return (self._place,)

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """`1 run  2 gpus  3 alignment …`, this one marked."""
        row = Content("")
        for number, place in enumerate(PLACES, start=1):
            is_here = place == self._place
            tab = Content.assemble((f"{number} ", ".muted"), (place, ".here" if is_here else ".muted"))
            gap = Content("   " if number > 1 else "")
            row = row + gap + tab.stylize(Style.from_meta({"@click": f"app.show('{place}')"}))
        return [row.truncate(width, ellipsis=True)]
