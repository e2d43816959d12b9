"""The line above the keys: how far a restart is, what was just done or refused, or why the screen stands still."""

from __future__ import annotations

from textual.content import Content

from grpo_engine.wire.supervisor import ServiceState
from grpo_tui.ui.glyphs import SERVICE_GLYPHS, SEVERITY_GLYPHS
from grpo_tui.ui.widgets.lines import Lines, Styled, line
from grpo_tui.ui.widgets.services_table import PASSING_STATES, STATE_STYLES
from grpo_tui.ui.widgets.warnings_bar import SEVERITY_STYLES
from grpo_tui.view.format import clock_text, duration_text
from grpo_tui.view.state import Connection, Transition, ViewState, phases_of_restart

SHOWN_AFTER_READY_S = 30.0
"""How long the phases of a finished restart stay."""
SHOWN_OUTCOME_S = 30.0
SHORTEST_SHOWN_S = 0.05
"""A restarted service passes through `waiting` in no time."""
QUIET_WORDS = "↑↓ choose a service, its log is shown · ? explains everything"


class ActivityLine(Lines):
    """One line."""

    DEFAULT_CSS = """
    ActivityLine { height: 1; padding: 0 1; }
    """

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """The lost connection, else phases of a restart, else the last outcome, else a hint."""
        if state.connection is not Connection.LIVE and state.connection_note:
            style = ".error" if state.connection is Connection.LOST else ".muted"
            sign = "✗" if state.connection is Connection.LOST else "■"
            return [line((f"{sign} {state.connection_note}", style)).truncate(width, ellipsis=True)]
        outcome = state.outcome
        is_fresh = outcome is not None and state.now - outcome.time < SHOWN_OUTCOME_S
        if outcome is not None and is_fresh and outcome.severity != "info":
            words = (f"{SEVERITY_GLYPHS[outcome.severity]} {outcome.text}", SEVERITY_STYLES[outcome.severity])
            return [line(words).truncate(width, ellipsis=True)]
        phases = _restart_in_view(state)
        if phases:
            return [line(*phases).truncate(width, ellipsis=True)]
        if outcome is not None and is_fresh:
            return [line((f"· {outcome.text}", ".muted")).truncate(width, ellipsis=True)]
        return [line((QUIET_WORDS, ".faint")).truncate(width, ellipsis=True)]


def _restart_in_view(state: ViewState) -> list[str | Styled]:
    """`vllm  ◑ stopping 0.4s → ◐ starting 36.6s → ● ready`, of the service whose restart changed last."""
    latest: tuple[float, str] | None = None
    for service in state.services:
        phases = phases_of_restart(state, service.name)
        if not phases:
            continue
        is_under_way = phases[-1].state in PASSING_STATES
        if is_under_way or state.now - phases[-1].time < SHOWN_AFTER_READY_S:
            latest = max(latest or (0.0, ""), (phases[-1].time, service.name))
    return _phases(state, latest[1]) if latest else []


def _seen_phases(phases: tuple[Transition, ...]) -> list[Transition]:
    """Without the states that were passed through in no time."""
    ends = [*(phase.time for phase in phases[1:]), None]
    return [
        phase for phase, end in zip(phases, ends, strict=True) if end is None or end - phase.time >= SHORTEST_SHOWN_S
    ]


def _phases(state: ViewState, service: str) -> list[str | Styled]:
    phases = _seen_phases(phases_of_restart(state, service))
    pieces: list[str | Styled] = [(service, ".strong"), "  "]
    for place, phase in enumerate(phases):
        word = f"{SERVICE_GLYPHS[phase.state]} {phase.state}"
        is_last = place == len(phases) - 1
        if not is_last:
            word += f" {duration_text(phases[place + 1].time - phase.time)}"
        elif phase.state in PASSING_STATES:
            word += f" {clock_text(state.now - phase.time)} …"
        pieces += [(" → ", ".muted") if place else "", (word, STATE_STYLES[phase.state])]
    if phases[-1].state is ServiceState.READY and len(phases) > 1:
        pieces.append((f"   in {duration_text(phases[-1].time - phases[0].time)}", ".muted"))
    return pieces
