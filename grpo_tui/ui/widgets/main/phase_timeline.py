"""Two lines on a trainer that samples and trains in turn: its newest steps as stretches of time, and what they took.

██████ 2.9s ██████▓▓ 0.6s ▓▓▒██████ 2.8s ██████▓▓ 0.6s ▓▓▒
█ sampling 2.8s 31.2 GB  ▓ training 0.6s 66.0 GB  ▒ syncing 0.2s 49.1 GB  now: sampling 12s
"""

from __future__ import annotations

from textual.content import Content

from grpo_tui.ui.glyphs import SHARE_FILLS
from grpo_tui.ui.widgets.lines import Styled, line
from grpo_tui.view.format import clock_text, duration_text
from grpo_tui.view.state import ViewState
from grpo_tui.view.turns import PHASES, Turns, cells_of, phase_now, turns_of

COLUMNS_A_STEP = 16
"""So many steps that each has about as much room."""
STYLES = (".share-0", ".share-1", ".share-5")
FILLS = SHARE_FILLS[: len(PHASES)]


def rows_wanted(state: ViewState) -> int:
    """Two where sampling and training take turns, else none."""
    return 2 if turns_of(state.history.lines, 1) is not None else 0


def ticks(state: ViewState) -> bool:
    """Whether a phase goes on whose seconds are counted."""
    return rows_wanted(state) > 0 and _going_on(state) is not None


def phase_lines(state: ViewState, width: int) -> list[Content]:
    """Both lines; none where sampling and training are at the same time."""
    turns = turns_of(state.history.lines, max(1, width // COLUMNS_A_STEP))
    if turns is None:
        return []
    stretches = [_stretch(*each) for each in cells_of(turns, width)]
    return [line(*stretches), line(*_legend(state, turns)).truncate(width, ellipsis=True)]


def _stretch(phase: int, seconds: float, num_cells: int) -> Styled:
    """A stretch in its colour, with its seconds where they fit."""
    words = f" {duration_text(seconds)} "
    fill = FILLS[phase]
    return (words.center(num_cells, fill) if len(words) + 2 <= num_cells else fill * num_cells), STYLES[phase]


def _legend(state: ViewState, turns: Turns) -> list[str | Styled]:
    pieces: list[str | Styled] = []
    for phase, (seconds, memory_gb) in enumerate(zip(turns.last, turns.memory_gb, strict=True)):
        memory = "" if memory_gb is None else f" {memory_gb:.1f} GB"
        pieces += [
            (f"{FILLS[phase]} ", STYLES[phase]),
            PHASES[phase],
            (f" {duration_text(seconds)}{memory}  ", ".muted"),
        ]
    going_on = _going_on(state)
    if going_on is not None:
        phase, since = going_on
        ago = "" if since is None else f" {clock_text(state.now - since)}"
        pieces += [("now: ", ".muted"), (f"{PHASES[phase]}{ago}", STYLES[phase])]
    return pieces


def _going_on(state: ViewState) -> tuple[int, float | None] | None:
    last, status = state.history.last, state.status
    return phase_now(status, last, state.now) if status is not None and last is not None else None
