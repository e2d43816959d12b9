"""One meaning a letter on all screens, and keys that act on the run only where one sees on what."""

from __future__ import annotations

from pathlib import Path

import pytest
from screen_fakes import NOW
from shown_screen import shown

from grpo_engine.wire.supervisor import Notice
from grpo_tui.ui.board.keys import ON_BOARD, ON_CURVES
from grpo_tui.ui.keys import EVERYWHERE, PLACES
from grpo_tui.ui.screens import SCREENS
from grpo_tui.ui.screens.confirm import ConfirmScreen
from grpo_tui.ui.screens.reading import ReadingScreen
from grpo_tui.ui.widgets.frame.activity_line import ActivityLine

SIZES = pytest.mark.parametrize("size", [(80, 24), (120, 36), (200, 50)])


def test_a_letter_means_the_same_on_every_screen_that_has_it() -> None:
    meanings: dict[str, set[str]] = {}
    of_runs = (key for screen in SCREENS.values() for key in screen.KEYS)
    for key in (*EVERYWHERE, *of_runs, *ON_BOARD, *ON_CURVES):
        for letter in key.key.split(","):
            if len(letter) == 1:
                meanings.setdefault(letter, set()).add(key.label)
    assert {letter: words for letter, words in meanings.items() if len(words) > 1} == {}


def test_letters_that_act_on_the_run_are_used_for_nothing_else() -> None:
    acting = {key.key for screen in SCREENS.values() for key in screen.KEYS if key.changes_run and len(key.key) == 1}
    assert acting == {"r", "s", "K"}
    for place, screen in SCREENS.items():
        used = {letter for key in screen.KEYS for letter in key.key.split(",")}
        assert place == PLACES[0] or not acting & used


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["y", "n"])
async def test_v_asks_first_where_the_main_screen_is_not_shown(tmp_path: Path, answer: str) -> None:
    async with shown(tmp_path) as screen:
        await screen.press("3")
        await screen.until(lambda: screen.app.shown is not None and screen.app.shown.PLACE == "alignment")
        await screen.press("v")
        await screen.until(lambda: isinstance(screen.app.screen, ConfirmScreen))
        assert "Restart vllm?" in screen.picture
        assert screen.connection.commands == []
        await screen.press(answer)
        await screen.until(lambda: not isinstance(screen.app.screen, ConfirmScreen))
        assert screen.connection.commands == ([("restart", "vllm")] if answer == "y" else [])


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
async def test_w_and_m_open_warnings_and_messages_on_every_screen(tmp_path: Path, place: str) -> None:
    async with shown(tmp_path, num_steps=300) as screen:
        await screen.press(str(PLACES.index(place) + 1))
        await screen.until(lambda: screen.app.shown is not None and place == screen.app.shown.PLACE)
        for key, words in (("w", "No warnings"), ("M", "No messages yet")):
            await screen.press(key)
            await screen.until_screen(ReadingScreen)
            await screen.until(lambda words=words: words in screen.picture)  # type: ignore[misc]
            await screen.press("escape")
            await screen.until(lambda: screen.app.screen is screen.app.shown)


@pytest.mark.slow
@SIZES
async def test_a_message_that_does_not_fit_names_the_key_that_opens_it_and_past_ones_stay_there(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    words = "stage one of many: " + "waiting for the inference server to release its memory, " * 6 + "the end"
    async with shown(tmp_path, size) as screen:
        screen.connection.send(
            Notice(number=2, time=NOW - 9, severity="info", service="vllm", text="an early notice"),
            Notice(number=3, time=NOW, severity="warning", service="trainer", text=words),
        )
        await screen.until(lambda: "stage one" in screen.text(ActivityLine))
        assert screen.text(ActivityLine).rstrip().endswith("M: all of it")
        await screen.press("M")
        await screen.until_screen(ReadingScreen)
        assert "an early notice" in screen.picture
        assert "the end" in screen.picture
