"""Warnings with cause and hint: in full if there is room, else one row per warning."""

from __future__ import annotations

from textual.content import Content
from textual.style import Style

from grpo_engine.wire.supervisor import Warning
from grpo_tui.ui.glyphs import SEVERITY_GLYPHS, SEVERITY_STYLES
from grpo_tui.ui.widgets.lines import Lines, Styled, line, spread, wrapped
from grpo_tui.view.state import ViewState

INDENT = 2
OPENS_ALL = Style.from_meta({"@click": "app.warnings"})


class WarningsBar(Lines):
    """Warnings, the most severe first."""

    DEFAULT_CSS = """
    WarningsBar { padding: 0 1; }
    """

    def inputs(self, state: ViewState) -> tuple[object, ...]:
        """Rebuilt when the warnings change."""
        return (state.warnings, state.status is None)

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """The warnings; a click opens all of them."""
        return [row.stylize(OPENS_ALL) for row in self._rows(state, width, height)]

    def _rows(self, state: ViewState, width: int, height: int) -> list[Content]:
        """Every warning in full if they fit, else some in full, one row for each other, and how many more."""
        if not height:
            return []
        if not state.warnings:
            return [line(("✓ no warnings", ".muted"))] if state.status else []
        in_full = [row for warning in state.warnings for row in full_text(warning, width)]
        if len(in_full) <= height:
            return in_full
        shown = state.warnings[:height]
        rows: list[Content] = []
        spare = height - len(shown)
        for warning in shown[:-1]:
            told = full_text(warning, width)
            if len(told) - 1 > spare:
                told = [_one_row(warning, width)]
            rows += told
            spare -= len(told) - 1
        num_more = len(state.warnings) - len(shown)
        more = f" +{num_more} more, w: all" if num_more else " w: what to do"
        return [*rows, *_begun(shown[-1], width, 1 + spare, more)]


def rows_wanted(state: ViewState, width: int) -> int:
    """Rows that show every warning in full."""
    return sum(len(full_text(warning, width)) for warning in state.warnings) or 1


def full_text(warning: Warning, width: int) -> list[Content]:
    """The warning and its hint, wrapped at words."""
    text = wrapped(warning.text, width - INDENT)
    rows = [line(*_text_row(warning, place, row)) for place, row in enumerate(text)]
    hint = wrapped(warning.hint, width - INDENT - 2) if warning.hint else []
    rows += [line(("  → " if place == 0 else "    ", ".muted"), (row, ".muted")) for place, row in enumerate(hint)]
    return rows


def _begun(warning: Warning, width: int, height: int, more: str) -> list[Content]:
    """Its text without the hint, in so many rows at most; the last row is cut, and ends with `more`."""
    text = wrapped(warning.text, width - INDENT) or [""]
    whole, rest = text[: height - 1], " ".join(text[height - 1 :])
    if not rest:
        rest = whole.pop()
    rows = [line(*_text_row(warning, place, row)) for place, row in enumerate(whole)]
    return [*rows, spread(width, _text_row(warning, len(whole), rest), [(more, ".muted")])]


def _one_row(warning: Warning, width: int) -> Content:
    return line(*_text_row(warning, 0, warning.text)).truncate(width, ellipsis=True)


def _text_row(warning: Warning, place: int, text: str) -> list[str | Styled]:
    """A row of its text; the first one begins with its sign."""
    style = SEVERITY_STYLES[warning.severity]
    return [(f"{SEVERITY_GLYPHS[warning.severity]} " if place == 0 else " " * INDENT, style), (text, style)]
