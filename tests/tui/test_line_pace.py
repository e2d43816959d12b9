"""How much is sent to a terminal that is slow to answer: by hand, with the clock as an argument, and in the app."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from screen_fakes import write_metrics
from shown_screen import shown
from textual import events
from textual.app import App

from grpo_tui.ui import themes
from grpo_tui.ui.terminal.changed_cells import ChangedCells
from grpo_tui.ui.terminal.line_pace import ASKED_AFTER, GIVE_UP_S, MAX_AHEAD, NUM_MARKS, QUEUE_S, LinePace

QUESTION = re.compile(r"\x1b\[(\d+);(\d+)H\x1b\[6n")


def answer(pace: LinePace, question: str, now: float) -> None:
    place = QUESTION.fullmatch(question)
    assert place is not None, question
    pace.answered(int(place[1]), int(place[2]), now)


def test_a_terminal_that_never_answers_gets_everything_at_once() -> None:
    pace = LinePace()
    for second in range(100):
        assert not pace.is_full(float(second))
        pace.painted(MAX_AHEAD, float(second))
    assert not pace.expects_answer(100.0)


def test_little_text_is_sent_without_a_question() -> None:
    pace = LinePace()
    assert pace.painted(ASKED_AFTER - 1, 0.0) == ""
    assert QUESTION.fullmatch(pace.painted(1, 0.1))


def test_the_line_is_full_when_an_answer_takes_longer_than_the_quickest_and_no_more_when_it_came() -> None:
    pace = LinePace()
    answer(pace, pace.painted(ASKED_AFTER, 0.0), 0.2)  # the line takes 0.2 s there and back
    late = pace.painted(ASKED_AFTER, 1.0)
    assert not pace.is_full(1.2 + QUEUE_S - 0.01)
    assert pace.is_full(1.2 + QUEUE_S + 0.01)
    answer(pace, late, 1.5)
    assert not pace.is_full(1.5)


def test_the_line_is_full_when_much_is_on_its_way_though_no_answer_is_late_yet() -> None:
    pace = LinePace()
    answer(pace, pace.painted(ASKED_AFTER, 0.0), 0.2)
    pace.painted(MAX_AHEAD, 1.0)
    assert not pace.is_full(1.0)
    pace.painted(1, 1.0)
    assert pace.is_full(1.0)


def test_an_answer_answers_what_was_asked_before_it_too() -> None:
    pace = LinePace()
    lost, second = pace.painted(ASKED_AFTER, 0.0), pace.painted(ASKED_AFTER, 0.0)
    assert lost != second
    answer(pace, second, 0.2)
    assert not pace.expects_answer(0.2)


def test_an_answer_that_is_lost_holds_the_picture_up_for_a_moment_alone() -> None:
    pace = LinePace()
    answer(pace, pace.painted(ASKED_AFTER, 0.0), 0.2)
    pace.painted(ASKED_AFTER, 1.0)
    assert pace.is_full(1.0 + GIVE_UP_S)
    assert not pace.is_full(1.0 + GIVE_UP_S + 0.1)


def test_no_two_questions_on_their_way_look_the_same() -> None:
    pace = LinePace()
    asked = [pace.painted(ASKED_AFTER, 0.0) for _ in range(NUM_MARKS + 5)]
    questions = [each for each in asked if each]
    assert len(questions) == NUM_MARKS == len(set(questions))


def test_where_a_person_put_the_cursor_is_no_answer() -> None:
    pace = LinePace()
    pace.painted(ASKED_AFTER, 0.0)
    pace.answered(1, 1, 0.1)
    assert pace.expects_answer(0.1)


@pytest.mark.slow
async def test_while_the_line_is_full_nothing_is_sent_and_then_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []

    def write(app: App[Any], screen: object, renderable: object) -> None:
        if isinstance(renderable, ChangedCells):
            sent.append(renderable.render_segments(app.console))

    is_full = False
    monkeypatch.setattr(App, "_display", write)
    monkeypatch.setattr(LinePace, "is_full", lambda pace, now: is_full)
    write_metrics(tmp_path, 40)
    async with shown(tmp_path, (120, 36)) as screen:
        await screen.until(lambda: bool(QUESTION.search("".join(sent))))
        is_full = True
        del sent[:]
        await screen.pilot.press("2", "3", "5", "4")
        await screen.until(lambda: screen.app.state.rollouts.read is not None)
        assert sent == []
        is_full = False
        screen.app.post_message(events.CursorPosition(0, 0))
        terminal = screen.app._cells
        await screen.until(lambda: any("No rollouts recorded" in "".join(row.texts) for row in terminal._rows))


@pytest.mark.slow
async def test_the_screen_leaves_when_the_terminal_has_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owes = True
    monkeypatch.setattr(themes, "LAST_ANSWER_S", 600.0)
    monkeypatch.setattr(LinePace, "expects_answer", lambda pace, now: owes)
    async with shown(tmp_path) as screen:
        await screen.pilot.press("q")
        await screen.pilot.pause()
        assert not screen.app._exit
        owes = False
        screen.app.post_message(events.CursorPosition(0, 0))
        await screen.pilot.pause()
        assert screen.app._exit
