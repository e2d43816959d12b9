"""The first lines: run, state, connection, step and age; below them the names of the screens."""

from __future__ import annotations

from rich.cells import cell_len
from textual.content import Content
from textual.style import Style

from grpo_engine.wire.supervisor import RunState
from grpo_tui.ui.glyphs import RUN_GLYPHS, RUN_STYLES
from grpo_tui.ui.keys import PLACES
from grpo_tui.ui.widgets.lines import Lines, Styled, fit, line, spread
from grpo_tui.view.format import clock_text
from grpo_tui.view.state import Connection, ViewState
from grpo_tui.view.timeline.state import clock_at

CONNECTION_WORDS: dict[Connection, Styled] = {
    Connection.CONNECTING: ("  connecting …", ".busy"),
    Connection.LIVE: ("", ""),
    Connection.LOST: ("  ✗ no supervisor", ".error"),
    Connection.ENDED: ("", ""),
}

MIN_NAME = 3
"""Columns of the name of the run below which the age is left out."""


class HeaderLine(Lines):
    """One line over everything."""

    DEFAULT_CSS = """
    HeaderLine { height: 1; background: $panel; padding: 0 1; }
    HeaderLine > .past { color: $text-accent; text-style: bold; }
    """
    COMPONENT_CLASSES = {"past"}

    @property
    def _is_too_small(self) -> bool:
        return self.screen.has_class("-too-narrow") or self.screen.has_class("-too-low")

    def inputs(self, state: ViewState) -> tuple[object, ...]:
        """The size of the screen counts too."""
        return (state, self._is_too_small and self.screen.size)

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """`run  profile  ● running`, and on the right `step 12/150  3m left  up 12m05s`; names are cut first."""
        if self._is_too_small:
            columns, rows = self.screen.size
            return [line((f"needs 40x10: {columns}x{rows} is too small", ".warning")).truncate(width)]
        stands: list[str | Styled] = [CONNECTION_WORDS[state.connection]]
        if state.travel.is_open:
            stands.append((f"  {_moment_words(state)}", ".past"))
        if state.viewer.is_read_only:
            stands.append(("  read-only", ".accent"))
        right: list[str | Styled] = []
        profile = ""
        if state.status is not None:
            profile = f"  {state.status.profile}"
            stands.insert(0, _run_words(state.status.state))
            lasted = "ran" if state.status.ended_at is not None else "up"
            right = [*_step(state), (f"  {lasted} {clock_text(_age_s(state))}", ".muted")]
            if line(*stands, *right).cell_length + MIN_NAME > width:
                right.pop()
        room = width - line(*stands, *right).cell_length - 1
        run = state.run if cell_len(state.run) <= room else fit(state.run, room)
        names: list[str | Styled] = [(run, ".strong")]
        if cell_len(run) + cell_len(profile) <= room:
            names.append((profile, ".muted"))
        return [spread(width, [*names, *stands], right)]


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
        """Constant."""
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


def _run_words(run: RunState) -> Styled:
    """`● running`."""
    return f"  {RUN_GLYPHS[run]} {run}", RUN_STYLES[run]


def _moment_words(state: ViewState) -> str:
    """`◀ PAST 14:03:05`."""
    if state.until is None:
        return "◀ PAST …"
    return f"◀ PAST {clock_at(state.until)}"


def _age_s(state: ViewState) -> float | None:
    """Seconds from the start of the run to now, or to its end."""
    if state.status is None or state.status.started_at is None:
        return None
    return (state.status.ended_at or state.now) - state.status.started_at


def _step(state: ViewState) -> list[str | Styled]:
    progress = state.progress
    if progress.step is None:
        return []
    step, slash, end = (progress.of_steps or "").partition("/")
    left = "" if progress.left is None else f"  {progress.left}"
    return [("  step ", ".muted"), (step, ".strong"), (slash + end + left, ".muted")]
