"""The state that screens draw: the present, or the run as it was at a moment. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from grpo_engine.diagnosis.evidence import RunSettings
from grpo_engine.wire.supervisor import Warning
from grpo_tui.view.diagnosis import diagnose, merged_warnings
from grpo_tui.view.logs.tail import LogView
from grpo_tui.view.metrics.history import MetricHistory, extremes_until
from grpo_tui.view.state import Connection, Outcome, ViewState, outcome_of
from grpo_tui.view.timeline import state as travel


def displayed(state: ViewState) -> ViewState:
    """The state to draw: the newest, or that of an earlier moment.

    Its `now` is that moment then, and its metrics, warnings, states, figures and log are those of that moment. In
    `travel` stand the ends of the whole run and all that happened in it, for the line of time.
    """
    past = state.travel.past
    if not state.travel.is_open or past is None:
        is_memory_of_others = state.connection is Connection.ENDED and state.host_memory is not None
        return replace(state, host_memory=None) if is_memory_of_others else state
    cut = _cut(_Same(past), _Same(state.history), _Same(state.travel.marks), state.settings)
    begin, end = travel.extent(state.travel, state.known_time)
    return replace(
        state,
        now=past.moment,
        connection=Connection.LIVE,  # what is said of the connection is about now
        connection_note="",
        status=past.status or state.status,
        transitions=past.transitions,
        start_phases=past.start_phases,
        history=cut.history,
        metric_warnings=cut.metric_warnings,
        warnings=(*state.folder_warnings, *(cut.warnings if past.status is not None else cut.metric_warnings)),
        messages=_messages(state, past),
        host_memory=None,
        log=past.log if past.log.service == state.selected else LogView(service=state.selected),
        travel=replace(state.travel, begins=begin, ends=end, marks=cut.marks, is_run_over=state.has_ended),
    )


def _messages(state: ViewState, past: travel.Past) -> tuple[Outcome, ...]:
    """What had been said by then, and what a key was just answered."""
    told = tuple(outcome_of(notice) for notice in past.notices)
    now = state.outcome
    if now is None or not now.is_answer:
        return told
    return (*told, replace(now, time=past.moment - (state.now - now.time)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """What has to be worked out for a moment, once."""

    history: MetricHistory
    metric_warnings: tuple[Warning, ...]
    warnings: tuple[Warning, ...]
    marks: tuple[travel.Mark, ...]


class _Same:
    """Compares by being the same object, so that large things are remembered without being compared."""

    __slots__ = ("thing",)

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)


@lru_cache(maxsize=4)
def _cut(past: _Same, history: _Same, marks: _Same, settings: RunSettings) -> _Cut:
    assert isinstance(past.thing, travel.Past)
    assert isinstance(history.thing, MetricHistory)
    moment = past.thing.moment
    until = history_until(history.thing, moment)
    found = tuple(diagnose(until.lines, None, settings))
    every = travel.all_marks(travel.Travel(marks=marks.thing), history.thing.lines)  # type: ignore[arg-type]
    return _Cut(
        history=until,
        metric_warnings=found,
        warnings=merged_warnings(past.thing.status, found, until.lines, moment),
        marks=every,
    )


def history_until(history: MetricHistory, moment: float) -> MetricHistory:
    """The steps that were done by then."""
    lines = tuple(line for line in history.lines if line.time <= moment)
    return replace(history, lines=lines, extremes=extremes_until(history.extremes, time=moment))
