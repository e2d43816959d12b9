"""Every screen as a picture, text and colours, over recorded runs at two sizes; one screen in the other themes too.

After a wanted change, accept the new pictures by one command, and look at them in a browser before they are committed:

    GRPO_PICTURES=accept pytest tests/tui/test_screen_pictures.py
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest
from picture_scenes import ALL_SCENES, BOARD_SCENES, RECORDED, board_standing, picture, standing, words
from recorded_runs import unpacked

from grpo_tui.ui.themes import ANSI, DARK, LIGHT

pytestmark = pytest.mark.slow
PICTURES = Path(__file__).parent / "pictures"
ACCEPTS = os.environ.get("GRPO_PICTURES") == "accept"
LOOKS = {
    "80x24": ((80, 24), DARK),
    "200x50": ((200, 50), DARK),
    "80x24-light": ((80, 24), LIGHT),
    "80x24-ansi": ((80, 24), ANSI),
}
DRAWN = [(name, look) for name in ALL_SCENES for look in ("80x24", "200x50")]
DRAWN += [("run", "80x24-light"), ("run", "80x24-ansi")]
"""Themes change only colours, and every widget takes its colours from theme variables: one scene shows them."""
OF_BOARD = [(name, look) for name in BOARD_SCENES for look in ("80x24", "200x50")]
FURTHER = pytest.mark.extended("the same screens at 80x24")


@pytest.mark.parametrize(
    ("name", "look"),
    [pytest.param(name, look, marks=FURTHER if look == "200x50" else ()) for name, look in DRAWN],
)
async def test_a_screen_looks_as_it_was_accepted(tmp_path: Path, name: str, look: str) -> None:
    size, theme = LOOKS[look]
    file = PICTURES / f"{name}-{look}.svg"
    wanted = file.read_text() if file.exists() and not ACCEPTS else None
    scene = ALL_SCENES[name]
    folder = unpacked(scene.archive, tmp_path / "logs")
    async with standing(scene, folder, size, theme) as (app, pilot):
        drawn = await picture(app, pilot, wanted)
    compare(drawn, wanted, file, tmp_path)


@pytest.mark.extended("what the board draws is in test_board.py")
@pytest.mark.parametrize(("name", "look"), OF_BOARD)
async def test_the_board_looks_as_it_was_accepted(tmp_path: Path, name: str, look: str) -> None:
    size, theme = LOOKS[look]
    file = PICTURES / f"{name}-{look}.svg"
    wanted = file.read_text() if file.exists() and not ACCEPTS else None
    unpacked(RECORDED / "tiny-cpu.tar.gz", tmp_path / "logs" / "recorded")
    async with board_standing(name, tmp_path / "logs", size, theme) as (app, pilot):
        drawn = await picture(app, pilot, wanted)
    compare(drawn, wanted, file, tmp_path)


def compare(drawn: str, wanted: str | None, file: Path, tmp_path: Path) -> None:
    """Fail with the words that differ, or accept the picture."""
    if ACCEPTS:
        PICTURES.mkdir(exist_ok=True)
        file.write_text(drawn)
        return
    assert wanted is not None, f"{file.name} is missing: GRPO_PICTURES=accept draws it"
    if drawn != wanted:
        (tmp_path / file.name).write_text(drawn)
        changes = "\n".join(difflib.unified_diff(words(wanted), words(drawn), "accepted", "drawn", lineterm="", n=0))
        pytest.fail(f"{tmp_path / file.name} is not {file}:\n{changes or 'the same words in other colours'}")


def test_every_accepted_picture_is_drawn_by_a_scene() -> None:
    assert {path.name for path in PICTURES.glob("*.svg")} == {
        f"{name}-{look}.svg" for name, look in [*DRAWN, *OF_BOARD]
    }
