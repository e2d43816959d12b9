"""The line above the keys: restart progress, results of keys, notices, connection problems, or a hint."""

from __future__ import annotations

from textual.content import Content
from textual.style import Style

from grpo_engine.wire.supervisor import ServiceState
from grpo_tui.ui.glyphs import SERVICE_GLYPHS, SEVERITY_GLYPHS, SEVERITY_STYLES
from grpo_tui.ui.widgets.lines import Lines, Styled, line, spread
from grpo_tui.ui.widgets.main.services_table import PASSING_STATES, STATE_STYLES
from grpo_tui.view.format import clock_text, duration_text
from grpo_tui.view.phases import StartPhase, Transition
from grpo_tui.view.state import Connection, Outcome, ViewState, phases_of_restart

SHOWN_AFTER_READY_S = 30.0
"""How long the phases of a finished restart stay."""
SHOWN_OUTCOME_S = 30.0
SHOWN_ANSWER_S = 6.0
"""How long the answer to a key is shown before anything else."""
SHORTEST_SHOWN_S = 0.05
"""Shorter phases are left out: a restarted service is `waiting` for an instant."""
SHORTEST_SUMMED_UP_S = 0.5
"""Shorter start phases are left out of the summary: vLLM logs more phases than fit on a line."""
WAITED_FOR = PASSING_STATES | {ServiceState.WAITING}
"""States in the middle of a restart, including waiting for services that it needs."""
QUIET_WORDS = "↑↓ select a service · space tags it · ^p all commands · ? help"
WATCHING_WORDS = "↑↓ select a service to see its log · ^p all commands · ? help"
ELSEWHERE_WORDS = "1 back to the services · ^p all commands · ? help"
MACHINE_WORDS = "← → fold and unfold the machine · F all of them · d all about it · ? help"
TRAVEL_WORDS = "⇧← ⇧→ ten steps · click or drag on the timeline · ? help"
FIRST_WORDS = "New here? v restarts vLLM · ? explains all keys · q leaves, the run goes on"
FIRST_WATCHING_WORDS = "New here? 1 to 6: screens · ? explains all keys · q leaves, the run goes on"
"""Shown until a new user presses the first key; they fit into 80 columns."""
OPENS_MESSAGES = Style.from_meta({"@click": "app.messages"})


class ActivityLine(Lines):
    """One line."""

    DEFAULT_CSS = """
    ActivityLine { height: 1; padding: 0 1; }
    """

    def __init__(self, *, chooses_services: bool) -> None:
        """Create the line; `chooses_services` is whether the screen has the services table."""
        super().__init__()
        self._chooses_services = chooses_services

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """The first of: answer to a key, connection problem, error, restart progress, notice, hint."""
        outcome = state.outcome
        age_s = state.now - outcome.time if outcome else 0.0
        if outcome is not None and outcome.is_answer and age_s < SHOWN_ANSWER_S:
            return [_said(outcome, width)]
        if state.connection is not Connection.LIVE and state.connection_note:
            style = ".error" if state.connection is Connection.LOST else ".muted"
            sign = "✗" if state.connection is Connection.LOST else "■"
            return [line((f"{sign} {state.connection_note}", style)).truncate(width, ellipsis=True)]
        if outcome is not None and outcome.severity != "info" and age_s < SHOWN_OUTCOME_S:
            return [_said(outcome, width)]
        phases = _restart_in_view(state)
        if phases:
            return [line(*phases).truncate(width, ellipsis=True)]
        if outcome is not None and age_s < SHOWN_OUTCOME_S:
            return [_said(outcome, width)]
        return [line(self._hint(state)).truncate(width, ellipsis=True)]

    def _hint(self, state: ViewState) -> Styled:
        """A hint at useful keys."""
        if state.viewer.is_new:
            return FIRST_WORDS if state.may_act else FIRST_WATCHING_WORDS, ".accent"
        if state.travel.is_open:
            return TRAVEL_WORDS, ".faint"
        if not self._chooses_services:
            return ELSEWHERE_WORDS, ".faint"
        if state.viewer.machine is not None:
            return MACHINE_WORDS, ".faint"
        tagged = [service.name for service in state.chosen] if state.viewer.tagged else []
        if tagged:
            names = ", ".join(tagged)
            return f"{len(tagged)} tagged: r restarts, s starts or stops, K kills {names} · esc untags", ".accent"
        return WATCHING_WORDS if state.viewer.is_read_only else QUIET_WORDS, ".faint"


def _said(outcome: Outcome, width: int) -> Content:
    """The message; one that does not fit names the key that opens it, and a click opens it."""
    words = f"{SEVERITY_GLYPHS[outcome.severity]} {outcome.text}"
    told = line((words, SEVERITY_STYLES[outcome.severity]))
    if told.cell_length > width:
        told = spread(width, [(words, SEVERITY_STYLES[outcome.severity])], [(" M: all of it", ".muted")])
    return told.stylize(OPENS_MESSAGES)


def _restart_in_view(state: ViewState) -> list[str | Styled]:
    """`vllm  ◑ stopping 0.4s → ◐ starting 36.6s → ● ready`, of the service whose restart changed last.

    A service that waits for others is shown only if no other is in progress.
    """
    latest: tuple[bool, float, str] | None = None
    for service in state.services:
        phases = phases_of_restart(state, service.name)
        if not phases:
            continue
        is_under_way = phases[-1].state in WAITED_FOR
        if is_under_way or state.now - phases[-1].time < SHOWN_AFTER_READY_S:
            is_moving = phases[-1].state is not ServiceState.WAITING
            latest = max(latest or (False, 0.0, ""), (is_moving, phases[-1].time, service.name))
    return _phases(state, latest[2]) if latest else []


def _seen_phases(phases: tuple[Transition, ...]) -> list[Transition]:
    """The phases without very short ones."""
    ends = [*(phase.time for phase in phases[1:]), None]
    return [
        phase for phase, end in zip(phases, ends, strict=True) if end is None or end - phase.time >= SHORTEST_SHOWN_S
    ]


def _phases(state: ViewState, service: str) -> list[str | Styled]:
    phases = _seen_phases(phases_of_restart(state, service))
    begun = state.start_phases.get(service, ())
    pieces: list[str | Styled] = [(service, ".strong"), "  "]
    for place, phase in enumerate(phases):
        word = f"{SERVICE_GLYPHS[phase.state]} {phase.state}"
        is_last = place == len(phases) - 1
        if not is_last:
            word += f" {duration_text(phases[place + 1].time - phase.time)}"
        elif phase.state in WAITED_FOR:
            word += f" {clock_text(state.now - phase.time)}"
            word += f": {_now_at(begun[-1], state.now)} …" if begun and phase.state is ServiceState.STARTING else " …"
        pieces += [(" → ", ".muted") if place else "", (word, STATE_STYLES[phase.state])]
    if phases[-1].state is ServiceState.READY and len(phases) > 1:
        pieces.append((f"   in {duration_text(phases[-1].time - phases[0].time)}", ".muted"))
        pieces += [(f" · {words}", ".muted") for words in _durations(begun, phases[-1].time)]
    return pieces


def _now_at(phase: StartPhase, now: float) -> str:
    """`loading weights, 2 of 4 shards (12s)`."""
    return phase.words if phase.since is None else f"{phase.words} ({clock_text(now - phase.since)})"


def _durations(phases: tuple[StartPhase, ...], ready_at: float) -> list[str]:
    """`loading weights 1.7s` for each long phase of a start."""
    ends = [*(phase.since for phase in phases[1:]), ready_at]
    return [
        f"{phase.name} {duration_text(end - phase.since)}"
        for phase, end in zip(phases, ends, strict=False)
        if phase.since is not None and end is not None and end - phase.since >= SHORTEST_SUMMED_UP_S
    ]
