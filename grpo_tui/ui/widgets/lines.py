"""A widget that is a list of lines drawn from the state, and repaints only the lines that changed.

Each part of the main screen is one. Styles are component classes, so that themes, light or dark, reach every line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Generic

from rich.cells import cell_len, chop_cells, set_cell_size
from textual import events
from textual.content import Content
from textual.geometry import Region
from textual.strip import Strip
from textual.style import Style
from textual.visual import Visual
from textual.widget import Widget
from typing_extensions import TypeVar

from grpo_tui.ui.widgets.selectable import Selectable

if TYPE_CHECKING:
    from grpo_tui.view.state import ViewState

State = TypeVar("State", default="ViewState")
"""What lines are drawn from: the state of a run, unless a widget says otherwise."""
Styled = tuple[str, str]
"""Text and the name of its style, `.ok` for instance."""
NUM_SHARES = 8
"""Styles `.share-0` … for the parts of a bar."""
STYLES = frozenset(
    {"ok", "busy", "warning", "error", "muted", "faint", "rule", "strong", "title", "accent", "selected", "others"}
    | {"spark", *(f"share-{number}" for number in range(NUM_SHARES))}
)


class Lines(Selectable, Generic[State]):
    """Base of the parts; a part says its lines for a state and a size."""

    COMPONENT_CLASSES = set(STYLES)
    DEFAULT_CSS = """
    Lines { height: auto; width: 1fr; text-wrap: nowrap; }
    Lines > .ok { color: $text-success; }
    Lines > .busy { color: $text-primary; }
    Lines > .warning { color: $text-warning; }
    Lines > .error { color: $text-error; text-style: bold; }
    Lines > .muted { color: $muted; }
    Lines > .faint { color: $faint; }
    Lines > .rule { color: $rule; }
    Lines > .strong { text-style: bold; }
    Lines > .title { color: $muted; text-style: bold; }
    Lines > .accent { color: $text-accent; }
    Lines > .selected { background: $selected; }
    Lines > .spark { color: $spark; }
    Lines > .others { color: $text-warning; }
    Lines > .share-0 { color: $share-0; }
    Lines > .share-1 { color: $share-1; }
    Lines > .share-2 { color: $share-2; }
    Lines > .share-3 { color: $share-3; }
    Lines > .share-4 { color: $share-4; }
    Lines > .share-5 { color: $share-5; }
    Lines > .share-6 { color: $share-6; }
    Lines > .share-7 { color: $share-7; }
    Lines:ansi > .faint { text-style: dim; }
    Lines:ansi > .rule { text-style: dim; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.auto_links = False  # a click works without; a row of underlined words would be the loudest on the screen
        self._state: State | None = None
        self._lines: list[Content] = []
        self._inputs: tuple[object, ...] | None = None

    def inputs(self, state: State) -> tuple[object, ...]:
        """What the lines are made of: while these are the same objects, the lines are not made again."""
        return (state,)

    def lines(self, state: State, width: int, height: int) -> list[Content]:
        """What to show; at most `height` lines of at most `width` cells."""
        raise NotImplementedError

    def draw(self, state: State) -> None:
        """Show another state; only lines that differ are painted."""
        self._state = state
        width, height = self.size
        if not width or not height:
            return
        inputs = self.inputs(state)
        if self._inputs is not None and are_same(inputs, self._inputs):
            return
        self._inputs = inputs
        told = self.lines(state, width, height)[:height]
        fitting = [each if each.cell_length <= width else each.truncate(width, ellipsis=True) for each in told]
        before, self._lines = self._lines, fitting
        for y in range(max(len(before), len(self._lines))):
            old = before[y] if y < len(before) else None
            new = self._lines[y] if y < len(self._lines) else None
            if old is new:
                continue
            start, end = (0, width) if old is None or new is None else differing_cells(old, new)
            if start < end:
                self.refresh(Region(start, y, end - start, 1))

    def on_resize(self, event: events.Resize) -> None:
        """Rebuild the lines for the new size."""
        self._lines, self._inputs = [], None
        if self._state is not None:
            self.draw(self._state)
        self.refresh()

    def get_visual_style(self, *component_classes: str, partial: bool = False) -> Style:
        """As Textual's, whose partial styles (8.2) lose a background that is opaque."""
        style = super().get_visual_style(*component_classes, partial=partial)
        if not partial or not component_classes:
            return style
        background = self.get_component_styles(*component_classes).background
        return replace(style, background=background) if background.a == 1 else style

    def render_line(self, y: int) -> Strip:
        """Paint one line."""
        width = self.size.width
        if y >= len(self._lines):
            return Strip.blank(width, self.visual_style.rich_style)
        strips = Visual.to_strips(self, self._lines[y], width, 1, self.visual_style, pad=True)
        style = self.visual_style.rich_style
        if not strips:
            return Strip.blank(width, style)
        return self.with_selection(strips[0].adjust_cell_length(width, style), y)

    @property
    def num_text_rows(self) -> int:
        """See `Selectable`."""
        return len(self._lines)

    def text_row(self, row: int) -> str:
        """See `Selectable`."""
        return self._lines[row].plain

    @property
    def plain_lines(self) -> list[str]:
        """The lines as text, for tests."""
        return [line.plain for line in self._lines]


class Wheel(Widget):
    """Base of such parts, after the one that has their styles: Textual takes those of the first alone."""

    ON_WHEEL: ClassVar[tuple[str, str]]
    """The actions of a notch up and of a notch down."""

    async def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """As the key upwards."""
        event.stop()
        await self.run_action(self.ON_WHEEL[0])

    async def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """As the key downwards."""
        event.stop()
        await self.run_action(self.ON_WHEEL[1])


def are_same(inputs: Sequence[object], before: Sequence[object]) -> bool:
    """Whether lines would be made of the very same objects again."""
    return all(now is then for now, then in zip(inputs, before, strict=True))


def differing_cells(old: Content, new: Content) -> tuple[int, int]:
    """From which cell up to which two lines differ; a clock that ticks is two cells, not a line of two hundred."""
    before, after = old.plain, new.plain
    if before == after and old.spans == new.spans:
        return 0, 0
    spans = set(old.spans) ^ set(new.spans)
    shorter = min(len(before), len(after))
    first = next((place for place in range(shorter) if before[place] != after[place]), shorter)
    first = min([first, *(span.start for span in spans)])
    if len(before) != len(after):
        return cell_len(after[:first]), max(old.cell_length, new.cell_length)
    last = next((place for place in range(shorter, first, -1) if before[place - 1] != after[place - 1]), first)
    last = max([last, *(span.end for span in spans)])
    end = max(cell_len(before[:last]), cell_len(after[:last]))
    is_shifted = cell_len(before[:last]) != cell_len(after[:last])
    return cell_len(after[:first]), max(old.cell_length, new.cell_length) if is_shifted else end


def fit(text: str, width: int, *, right: bool = False) -> str:
    """`text` in exactly `width` cells: cut with an ellipsis, or padded on the right (or left)."""
    length = cell_len(text)
    if length > width:
        return set_cell_size(text, width - 1) + "…" if width > 0 else ""
    padding = " " * (width - length)
    return padding + text if right else text + padding


def wrapped(text: str, width: int) -> list[str]:
    """Rows of at most `width` cells, broken at spaces; a longer word is cut where it must be."""
    rows: list[str] = []
    row = ""
    for word in text.split():
        if cell_len(word) > max(1, width):
            *cut, word = filter(None, chop_cells(word, max(1, width)))  # in time proportional to it
            rows += [row, *cut] if row else cut
            row = ""
        if row and cell_len(row) + 1 + cell_len(word) > width:
            rows.append(row)
            row = word
        else:
            row = f"{row} {word}" if row else word
    return [*rows, row] if row else rows


def line(*parts: str | Styled) -> Content:
    """One line of styled pieces."""
    return Content.assemble(*(part for part in parts if part and part != ("", "")), end="")


def spread(width: int, left: list[str | Styled], right: list[str | Styled]) -> Content:
    """Pieces at the left edge and pieces at the right edge; where both do not fit, the left is cut."""
    left_part, right_part = line(*left), line(*right)
    room = width - right_part.cell_length
    if room <= 0:
        return left_part.truncate(width, ellipsis=True)
    return left_part.truncate(room, ellipsis=True).pad_right(max(0, room - left_part.cell_length)) + right_part


def rule(width: int, title: str, note: str = "") -> Content:
    """A quiet title over a part: `─ log trainer ───────────── following ─`."""
    end = f" {note} ─" if note else ""
    start = f"─ {title} "
    dashes = "─" * max(0, width - cell_len(start) - cell_len(end))
    return line(
        ("─ ", ".rule"), (f"{title} ", ".title"), (dashes, ".rule"), (f" {note}" if note else "", ".muted"),
        (" ─" if note else "", ".rule"),
    ).truncate(width, ellipsis=True)  # fmt: skip
