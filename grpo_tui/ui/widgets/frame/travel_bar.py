"""The timeline: the whole run as one line with its events, and the moment that the screen shows.

It is open while the screen shows the past (`t`), and has the focus then.
"""

from __future__ import annotations

from bisect import bisect_right

from textual import events
from textual.binding import Binding
from textual.content import Content
from textual.widgets import Input

from grpo_tui.ui.keys import ON_TRAVEL, bindings
from grpo_tui.ui.messages import MovedInTime
from grpo_tui.ui.widgets.lines import Lines, Styled, Wheel, line, spread
from grpo_tui.view.format import clock_text, duration_text
from grpo_tui.view.state import ViewState
from grpo_tui.view.timeline.state import (
    SAME_MOMENT_S,
    Mark,
    MarkKind,
    Travel,
    Typed,
    WentTo,
    clock_at,
    date_at,
)

MARK_SIGNS: dict[MarkKind, tuple[str, str]] = {
    MarkKind.STATE: ("·", ".muted"),
    MarkKind.CHECKPOINT: ("▪", ".muted"),
    MarkKind.EVALUATION: ("◇", ".accent"),
    MarkKind.READY: ("●", ".ok"),
    MarkKind.RESTART: ("↻", ".busy"),
    MarkKind.SUPERVISOR: ("■", ".busy"),
    MarkKind.WARNING: ("▲", ".warning"),
    MarkKind.FAILURE: ("✗", ".error"),
}
"""The most severe is drawn if several are in one cell."""
MARKS_LEGEND = "  ".join(f"{sign} {kind}" for kind, (sign, _) in MARK_SIGNS.items())
MARK_RANK = {kind: place for place, kind in enumerate(MarkKind)}
CURSOR, TRACK, PASSED = "█", "─", "━"
ROOMY_ROWS = 30
"""Height of the terminal from which events get a line of their own."""
DAY_S = 86400
AT_THE_END_S = 0.05


class TravelBar(Lines, Wheel):
    """Two or three lines."""

    ALLOW_SELECT = False  # dragging moves the moment
    ON_WHEEL = ("screen.travel_move(-1)", "screen.travel_move(1)")

    DEFAULT_CSS = """
    TravelBar { display: none; height: 2; padding: 0 1; background: $panel; }
    TravelBar.-open { display: block; }
    TravelBar.-roomy { height: 3; }
    """
    BINDINGS = bindings(ON_TRAVEL)

    def inputs(self, state: ViewState) -> tuple[object, ...]:
        """The moment, and the known extent and events of the run."""
        travel = state.travel
        return (travel.is_open, travel.moment, travel.past, travel.marks, travel.begins, travel.ends, travel.note)

    def draw(self, state: ViewState) -> None:
        """Show the timeline while it is open, focused unless another widget has the focus."""
        is_open = state.travel.is_open
        self.can_focus = is_open
        self.set_class(is_open, "-open")
        self.set_class(self.screen.size.height >= ROOMY_ROWS, "-roomy")
        if is_open and self.screen.is_current and self.screen.focused is None:
            self.focus(scroll_visible=False)
        elif not is_open and self.has_focus:
            self.screen.set_focus(None)
        super().draw(state)
        self.screen.query_one(TravelInput).draw(state)

    def take_keys(self) -> None:
        """Take the focus at once: the next key may be queued already."""
        self.can_focus = True
        self.screen.set_focus(self, scroll_visible=False)

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """Time, age and step; the line; the previous and the next event."""
        travel = state.travel
        if travel.begins is None or travel.ends is None:
            return [line((" reading the run's timeline …", ".muted"))]
        last, after = _around(travel)
        what = [*_event_text("", last)] if height < 3 else []
        first = spread(width, _moment(state), what or _extent(travel))
        rows = [first, _track(travel, width)]
        if height >= 3:
            note: list[str | Styled] = [(travel.note, ".warning")] if travel.note else _event_text("", last)
            rows.append(spread(width, note, _event_text("then ", after)))
        elif travel.note:
            rows[0] = line((travel.note, ".warning")).truncate(width, ellipsis=True)
        return rows

    async def on_key(self, event: events.Key) -> None:
        """Pass on keys that were typed before the input line had the focus."""
        typing = self.screen.query_one(TravelInput)
        if typing.has_class("-open"):
            event.stop()
            await typing.take(event)
        elif event.key == "colon":
            event.stop()
            await self.run_action("screen.travel_type")

    # --- mouse ------------------------------------------------------------------------------------------------------

    def on_mouse_down(self, event: events.MouseDown) -> None:
        """Start to drag the moment."""
        self.capture_mouse()
        self._go_to(event.x)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Drag the moment."""
        if self.app.mouse_captured is self:
            self._go_to(event.x)

    def on_mouse_up(self) -> None:
        """Stop dragging."""
        self.release_mouse()

    def _go_to(self, x: int) -> None:
        if self._state is None or self._state.travel.begins is None or self._state.travel.ends is None:
            return
        travel, last = self._state.travel, max(1, self.size.width - 1)
        assert travel.begins is not None and travel.ends is not None  # noqa: PT018
        share = min(max(0, x - self.styles.padding.left), last) / last
        self.post_message(MovedInTime(WentTo(moment=travel.begins + share * (travel.ends - travel.begins))))


class TravelInput(Input):
    """Input line for a time or a step; shown while it is typed."""

    DEFAULT_CSS = """
    TravelInput { display: none; height: 1; border: none; padding: 0 1; background: $panel; }
    TravelInput:focus { border: none; }
    TravelInput.-open { display: block; }
    """
    BINDINGS = [Binding("escape", "give_up", "back", show=False)]

    def __init__(self) -> None:
        super().__init__(
            placeholder="a time (14:03 or 14:03:05), a step (120), or how long ago (-5m); enter goes there",
            compact=True,
        )
        self.can_focus = False
        self._is_wanted = False

    def draw(self, state: ViewState) -> None:
        """Show the line while a time or a step is typed."""
        was_wanted, self._is_wanted = self._is_wanted, state.travel.is_open and state.travel.is_typing
        if self._is_wanted and not self.has_class("-open") and self.screen.is_current:
            self.open()
        elif was_wanted and not self._is_wanted:
            self.close()

    def open(self) -> None:
        """Take the focus at once: the next key may be queued already."""
        self.can_focus = True
        self.add_class("-open")
        self.value = ""
        self.screen.set_focus(self, scroll_visible=False)

    async def take(self, key: events.Key) -> None:
        """Handle a key that came before the focus did."""
        if key.key == "enter":
            await self.action_submit()
        elif key.key == "escape":
            self.action_give_up()
        elif key.key == "backspace":
            self.action_delete_left()
        elif key.is_printable and key.character is not None:
            self.insert_text_at_cursor(key.character)

    def close(self) -> None:
        """Return the focus to the timeline."""
        if not self.has_class("-open"):
            return
        self.can_focus = False
        self.remove_class("-open")
        self.screen.query_one(TravelBar).take_keys()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Go there."""
        event.stop()
        self.close()
        self.post_message(MovedInTime(Typed(text=event.value)))

    def action_give_up(self) -> None:
        """Go nowhere."""
        self.close()
        self.post_message(MovedInTime(Typed(text="")))


def rows_taken(state: ViewState, screen_rows: int) -> int:
    """Rows that the timeline takes from the rest of a screen."""
    if not state.travel.is_open:
        return 0
    return (3 if screen_rows >= ROOMY_ROWS else 2) + state.travel.is_typing


def _moment(state: ViewState) -> list[str | Styled]:
    travel = state.travel
    assert travel.begins is not None and travel.ends is not None  # noqa: PT018
    before_s = travel.ends - travel.moment
    is_long = travel.ends - travel.begins >= DAY_S
    day = f"{date_at(travel.moment)} " if is_long else ""
    if before_s < AT_THE_END_S:
        ago = "the end" if state.travel.is_run_over else "now (paused)"
    else:
        ago = f"{clock_text(before_s)} {'before the end' if state.travel.is_run_over else 'ago'}"
    pieces: list[str | Styled] = [(f"{day}{clock_at(travel.moment)}", ".strong"), f"  {ago}"]
    if state.history.last is not None and travel.past is not None:
        pieces += [("  step ", ".muted"), f"{state.history.last.step:,}"]
    return pieces


def _extent(travel: Travel) -> list[str | Styled]:
    assert travel.begins is not None and travel.ends is not None  # noqa: PT018
    words = f"{duration_text(travel.moment - travel.begins)} of {duration_text(travel.ends - travel.begins)}"
    return [(f"  {words} ", ".muted")]


def _track(travel: Travel, width: int) -> Content:
    """The line from the start of the run to its end, or to now."""
    assert travel.begins is not None and travel.ends is not None  # noqa: PT018
    span = max(travel.ends - travel.begins, SAME_MOMENT_S)
    here = _cell(travel.moment, travel.begins, span, width)
    shown: dict[int, MarkKind] = {}
    for mark in travel.marks:
        cell = _cell(mark.time, travel.begins, span, width)
        if cell not in shown or MARK_RANK[mark.kind] > MARK_RANK[shown[cell]]:
            shown[cell] = mark.kind
    pieces: list[str | Styled] = []
    for cell in range(width):
        if cell == here:
            pieces.append((CURSOR, ".strong"))
        elif cell in shown:
            pieces.append(MARK_SIGNS[shown[cell]])
        else:
            pieces.append((PASSED, ".accent") if cell < here else (TRACK, ".rule"))
    return line(*pieces)


def _cell(time: float, begins: float, span: float, width: int) -> int:
    return min(max(0, round((time - begins) / span * (width - 1))), width - 1)


def _around(travel: Travel) -> tuple[Mark | None, Mark | None]:
    """The previous and the next event."""
    place = bisect_right(travel.marks, travel.moment + SAME_MOMENT_S, key=lambda mark: mark.time)
    last = travel.marks[place - 1] if place else None
    return last, travel.marks[place] if place < len(travel.marks) else None


def _event_text(before: str, mark: Mark | None) -> list[str | Styled]:
    if mark is None:
        return []
    sign, style = MARK_SIGNS[mark.kind]
    return [(f" {before}", ".muted"), (f"{sign} ", style), (f"{clock_at(mark.time)} ", ".muted"), mark.words]
