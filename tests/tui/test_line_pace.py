"""How much is sent to a terminal that is slow to answer: with the clock as an argument, and in the app."""

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


def answered_pace() -> LinePace:
    """Of a terminal that answered its first question after 0.2 s."""
    pace = LinePace()
    answer(pace, pace.painted(ASKED_AFTER, 0.0), 0.2)
    return pace


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


def test_the_line_is_full_while_an_answer_takes_longer_than_the_quickest_did() -> None:
    pace = answered_pace()
    late = pace.painted(ASKED_AFTER, 1.0)
    assert not pace.is_full(1.2 + QUEUE_S - 0.01)
    assert pace.is_full(1.2 + QUEUE_S + 0.01)
    answer(pace, late, 1.5)
    assert not pace.is_full(1.5)


def test_the_line_is_full_when_much_was_sent_though_no_answer_is_late_yet() -> None:
    pace = answered_pace()
    pace.painted(MAX_AHEAD, 1.0)
    assert not pace.is_full(1.0)
    pace.painted(1, 1.0)
    assert pace.is_full(1.0)


def test_a_lost_answer_delays_the_screen_only_until_it_is_given_up() -> None:
    pace = answered_pace()
    pace.painted(ASKED_AFTER, 1.0)
    assert pace.is_full(1.0 + GIVE_UP_S)
    assert not pace.is_full(1.0 + GIVE_UP_S + 0.1)


def test_an_answer_also_answers_earlier_questions_and_a_cursor_report_of_another_place_does_not() -> None:
    pace = LinePace()
    lost, second = pace.painted(ASKED_AFTER, 0.0), pace.painted(ASKED_AFTER, 0.0)
    assert lost != second
    pace.answered(1, 1, 0.1)
    assert pace.expects_answer(0.1)
    answer(pace, second, 0.2)
    assert not pace.expects_answer(0.2)


def test_no_two_unanswered_questions_are_alike() -> None:
    pace = LinePace()
    asked = [pace.painted(ASKED_AFTER, 0.0) for _ in range(NUM_MARKS + 5)]
    questions = [each for each in asked if each]
    assert len(questions) == NUM_MARKS == len(set(questions))


@pytest.mark.slow
@pytest.mark.extended("the pace itself above, as a table")
async def test_while_the_line_is_full_nothing_is_sent_and_then_the_newest_state(
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
        await screen.press("2", "3", "5", "4")
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
        await screen.press("q")
        await screen.pilot.pause()
        assert not screen.app._exit
        owes = False
        screen.app.post_message(events.CursorPosition(0, 0))
        await screen.until(lambda: screen.app._exit)
