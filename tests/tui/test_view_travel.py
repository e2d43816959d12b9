"""Going back in the time of a run, without a terminal: moments, jumps, and the state at a moment."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from screen_fakes import STARTED, changed, metrics_line, run_status, service

from grpo_engine.wire.codec import to_line
from grpo_engine.wire.supervisor import (
    Event,
    Notice,
    RunChanged,
    RunState,
    RunStatus,
    ServiceState,
    Snapshot,
    SupervisorInfo,
    UsageSampled,
)
from grpo_tui.supervisor.report.timeline import shorten
from grpo_tui.view.state import LogRead, MetricsRead, Ticked, ViewState, reduce
from grpo_tui.view.timeline.file import CHECKPOINT_LINES, TimelineFile, log_until
from grpo_tui.view.timeline.past import displayed
from grpo_tui.view.timeline.state import (
    Closed,
    Jumped,
    Known,
    Learned,
    MarkKind,
    Moved,
    Opened,
    PastRead,
    Travel,
    Typed,
    WentTo,
    after,
    read_target,
)

STEPS = tuple(metrics_line(step) for step in range(1, 101))
KNOWN = Known(now=STARTED + 600, started_at=STARTED, steps=STEPS)


def usage(at: float, rss_bytes: int, **log_bytes: int) -> UsageSampled:
    """A sample `at` seconds into the run."""
    return UsageSampled(
        number=1, time=STARTED + at, cpu_percent={"vllm": at}, rss_bytes={"vllm": rss_bytes}, gpu_memory_bytes={},
        gpus=[], log_bytes=log_bytes,
    )  # fmt: skip


def vllm(at: float, state: ServiceState, **changes: object) -> Event:
    return changed(1, STARTED + at, service("vllm", state=state, **changes))


def write(
    folder: Path, events: Sequence[Snapshot | Event], end: bytes = b"", broken_at: int | None = None
) -> TimelineFile:
    """A timeline of these events, with a broken line before one of them, read whole."""
    lines = [to_line(event) for event in events]
    if broken_at is not None:
        lines.insert(broken_at, b'{"type":"service","num\n')
    (folder / "events.jsonl").write_bytes(b"".join(lines) + end)
    timeline = TimelineFile(folder)
    while timeline.read():
        pass
    return timeline


def status_at(timeline: TimelineFile, at: float) -> RunStatus:
    status = timeline.past(STARTED + at, None).status
    assert status is not None
    return status


def begins() -> Snapshot:
    return Snapshot(number=0, time=STARTED, status=run_status(services=[service("vllm", state=ServiceState.WAITING)]))


CRASH = [
    begins(),
    vllm(10, ServiceState.STARTING, phase="loading weights"),
    vllm(30, ServiceState.READY),
    usage(40, 1000, vllm=12),
    vllm(100, ServiceState.FAILED, why="out of memory"),
    usage(100.1, 0, vllm=23),
    Notice(number=1, time=STARTED + 101, severity="error", service="vllm", text="failed"),
    vllm(200, ServiceState.STARTING, attempt=2),
    RunChanged(number=1, time=STARTED + 300, state=RunState.STOPPED),
]


def supervised_by(pid: int, at: float, *, started: float) -> Snapshot:
    status = run_status(supervisor=SupervisorInfo(pid=pid, started_at=STARTED + at), started_at=STARTED + started)
    return Snapshot(number=0, time=STARTED + at, status=status)


def test_a_resumed_run_and_a_new_supervisor_are_told_apart(tmp_path: Path) -> None:
    events = [supervised_by(1, 0, started=0), supervised_by(2, 100, started=0), supervised_by(3, 200, started=200)]
    assert [(mark.time - STARTED, mark.words) for mark in write(tmp_path, events).marks()] == [
        (100, "a new supervisor took the run over"),
        (200, "the run was resumed"),
    ]


# --- where to -------------------------------------------------------------------------------------------------------


def test_time_is_entered_at_its_end_and_held_within_the_run() -> None:
    opened = after(Travel(), Opened(), KNOWN)
    assert (opened.is_open, opened.moment) == (True, KNOWN.now)
    assert after(opened, Moved(by=1), KNOWN).moment == KNOWN.now
    assert after(opened, Moved(by=-1), KNOWN).moment == KNOWN.now - 2
    assert after(opened, WentTo(moment=0), KNOWN).moment == STARTED
    assert not after(opened, Closed(), KNOWN).is_open


def test_steps_and_events_are_jumped_to_one_after_the_other() -> None:
    at = after(Travel(), Opened(), KNOWN)
    back = after(at, Jumped(to="step", direction=-1), KNOWN)
    assert back.moment == STEPS[-1].time
    assert after(back, Jumped(to="step", direction=-1), KNOWN).moment == STEPS[-2].time
    assert after(back, Jumped(to="step", direction=1), KNOWN).moment == KNOWN.now
    start = after(back, Jumped(to="end", direction=-1), KNOWN)
    assert start.moment == STARTED
    assert after(start, Jumped(to="event", direction=1), KNOWN).moment == KNOWN.now  # nothing has happened yet


def test_evaluations_are_events_though_only_the_metrics_have_them() -> None:
    evaluated = STEPS[49].model_copy(update={"metrics": {"eval/avg@4": 0.5}})
    known = Known(now=KNOWN.now, started_at=STARTED, steps=(*STEPS[:49], evaluated, *STEPS[50:]))
    at = after(Travel(), Opened(), known)
    assert after(at, Jumped(to="event", direction=-1), known).moment == evaluated.time


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("50", STEPS[49].time),
        ("step 1", STEPS[0].time),
        ("-5m", KNOWN.now - 300),
        ("-1m30s", KNOWN.now - 90),
        ("-  1m  30 ", KNOWN.now - 90),
        (time.strftime("%H:%M:%S", time.localtime(STARTED + 77)), STARTED + 77),
    ],
)
def test_a_time_a_step_or_how_long_ago_can_be_typed(text: str, moment: float) -> None:
    assert read_target(text, KNOWN.now, KNOWN) == pytest.approx(moment, abs=1)


def test_a_time_of_day_is_looked_for_on_the_days_of_the_run() -> None:
    day_later = Known(now=STARTED + 86400 * 1.5, started_at=STARTED, steps=())
    typed = time.strftime("%H:%M:%S", time.localtime(STARTED + 77))
    assert read_target(typed, STARTED + 86400 * 1.2, day_later) == pytest.approx(STARTED + 77 + 86400, abs=1)
    assert read_target(typed, STARTED + 100, day_later) == pytest.approx(STARTED + 77, abs=1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("soon", "is not a time"),
        ("999", "step 999 is not done yet; the newest is 100"),
        ("-" + 4000 * " " + "soon", "is not a time"),
        ("-" + 400 * "9" + "d", "is not a time"),
    ],
)
def test_an_unknown_time_or_step_is_explained_and_moves_nothing(text: str, words: str) -> None:
    at = after(Travel(), Opened(), KNOWN)
    there = after(at, Typed(text=text), KNOWN)
    assert words in there.note
    assert there.moment == at.moment


# --- the state at a moment ------------------------------------------------------------------------------------------


def test_states_figures_and_the_log_are_those_of_the_moment(tmp_path: Path) -> None:
    timeline = write(tmp_path, CRASH, b'{"type":"notice","num')
    (tmp_path / "vllm.log").write_text("hello world\ntraceback!\nsecond try\n")
    past = timeline.past(STARTED + 50, "vllm")
    (then,) = status_at(timeline, 50).services
    assert (then.state, then.rss_bytes, past.log.lines) == (ServiceState.READY, 1000, ("hello world",))
    assert "cannot be read" in log_until(tmp_path / "a.log", "a", 10).lines[0]
    assert "was not recorded" in log_until(tmp_path / "a.log", "a", None).lines[0]
    assert [each.state for each in past.transitions["vllm"]][1:] == [ServiceState.STARTING, ServiceState.READY]
    assert past.start_phases["vllm"][-1].words == "loading weights"
    assert status_at(timeline, 100).services[0].why == "out of memory"
    crash = timeline.past(STARTED + 100, "vllm")
    assert crash.log.lines == ("hello world", "traceback!")  # its last lines, though the sample came after it
    end = status_at(timeline, 1000)
    assert (end.state, end.ended_at) == (RunState.STOPPED, STARTED + 300)


def test_what_happened_is_marked_with_its_gravity(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_40").mkdir(parents=True)
    kinds = [mark.kind for mark in write(tmp_path, CRASH).marks()]
    assert kinds == [
        MarkKind.STATE, MarkKind.READY, MarkKind.FAILURE, MarkKind.FAILURE, MarkKind.RESTART, MarkKind.STATE,
        MarkKind.CHECKPOINT,
    ]  # fmt: skip


def test_any_moment_of_a_long_timeline_is_as_if_it_were_played_to_there(tmp_path: Path) -> None:
    """Checkpoints and half lines change nothing in the state of a moment."""
    chance = random.Random(1)
    states = [ServiceState.READY, ServiceState.UNHEALTHY]
    events: list[Snapshot | Event] = [begins()]
    for n in range(1, 4 * CHECKPOINT_LINES):
        events.append(usage(n, n) if chance.random() < 0.6 else vllm(n, states[n % 2], restarts=n))
    timeline = write(tmp_path, events, broken_at=700)
    for at in chance.sample(range(1, len(events)), 60):
        until = events[: at + 1]
        changes = [event.service.restarts for event in until if event.type == "service"]
        samples = [event.rss_bytes["vllm"] for event in until if event.type == "usage"]
        (vllm_then,) = status_at(timeline, at + 0.5).services
        assert vllm_then.restarts == (changes[-1] if changes else 0)
        assert not samples or vllm_then.rss_bytes == samples[-1]


def test_a_timeline_that_grows_or_is_made_shorter_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    timeline = TimelineFile(tmp_path)
    assert not timeline.read()
    timeline = write(tmp_path, [begins(), *(usage(n, n) for n in range(1, 200))])
    with path.open("ab") as file:
        file.write(to_line(vllm(300, ServiceState.READY)))
    timeline.read()
    assert timeline.ends == STARTED + 300
    shorten(path, path.stat().st_size // 2, 1000)
    assert timeline.past(STARTED + 300, None).status is None  # until it is read again
    timeline.read()
    assert status_at(timeline, 300).services[0].state is ServiceState.READY
    path.unlink()
    timeline.read()
    assert (timeline.ends, timeline.past(STARTED, None).status) == (None, None)


def test_a_rewritten_timeline_with_more_lines_is_read_from_its_start(tmp_path: Path) -> None:
    timeline = write(tmp_path, [begins(), vllm(1, ServiceState.BACKOFF, why="x" * 2000)])
    write(tmp_path, [begins(), *(usage(n, n) for n in range(5, 50))])
    timeline.read()
    assert (timeline.num_lines, timeline.ends) == (46, STARTED + 49)


# --- what is drawn --------------------------------------------------------------------------------------------------


def looking_at(folder: Path, at: float) -> ViewState:
    """A live run, looked at some seconds after its start."""
    timeline = write(folder, CRASH[:-1])
    state = ViewState(run_folder=folder, now=STARTED + 600)
    ready = run_status(services=[service("vllm", attempt=2, restarts=1)])
    state = reduce(state, Snapshot(number=9, status=ready))
    state = reduce(state, MetricsRead(lines=STEPS))
    state = reduce(state, LogRead(service="vllm", lines=("the newest line",)))
    state = reduce(state, Opened())
    state = reduce(state, Learned(begins=timeline.begins, ends=timeline.ends, marks=timeline.marks()))
    state = reduce(state, WentTo(moment=STARTED + at))
    return reduce(state, PastRead(past=timeline.past(STARTED + at, "vllm")))


def test_the_screen_is_drawn_as_it_was_and_the_present_comes_back_untouched(tmp_path: Path) -> None:
    state = looking_at(tmp_path, 150)
    seen = displayed(state)
    assert (seen.now, seen.until, state.until) == (STARTED + 150, STARTED + 150, STARTED + 150)
    assert seen.services[0].state is ServiceState.FAILED
    assert seen.history.last is not None
    assert seen.history.last.step == 62
    assert any("vllm" in warning.text for warning in seen.warnings)
    assert seen.outcome is not None
    assert seen.outcome.text == "vllm: failed"
    assert seen.log.lines != ("the newest line",)
    assert (seen.travel.begins, seen.travel.ends) == (STARTED, STARTED + 600)
    back = reduce(state, Closed())
    assert displayed(back) is back
    assert back.until is None
    assert (back.services[0].state, back.log.lines) == (ServiceState.READY, ("the newest line",))


def test_the_past_does_not_change_while_the_run_continues(tmp_path: Path) -> None:
    state = looking_at(tmp_path, 50)
    before = displayed(state)
    later = displayed(reduce(state, Ticked(now=STARTED + 700)))
    assert (later.now, later.status, later.log) == (before.now, before.status, before.log)
    assert later.history is before.history
    assert later.travel.ends == STARTED + 700
