"""Every screen as a picture, text and colours, over recorded runs: at two sizes, and in a light and an ANSI theme.

A picture that is wanted otherwise is accepted by one command, and then looked at in a browser before it is committed:

    GRPO_PICTURES=accept pytest tests/tui/test_screen_pictures.py
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest
from picture_scenes import ALL_SCENES, picture, standing, words
from test_recorded_runs import unpacked

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


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("name", ALL_SCENES)
async def test_a_screen_looks_as_it_was_accepted(tmp_path: Path, name: str, look: str) -> None:
    size, theme = LOOKS[look]
    file = PICTURES / f"{name}-{look}.svg"
    wanted = file.read_text() if file.exists() and not ACCEPTS else None
    scene = ALL_SCENES[name]
    folder = unpacked(scene.archive, tmp_path / "logs")
    async with standing(scene, folder, size, theme) as (app, pilot):
        drawn = await picture(app, pilot, wanted)
    if ACCEPTS:
        PICTURES.mkdir(exist_ok=True)
        file.write_text(drawn)
        return
    assert wanted is not None, f"{file.name} is not there: GRPO_PICTURES=accept draws it"
    if drawn != wanted:
        (tmp_path / file.name).write_text(drawn)
        changes = "\n".join(difflib.unified_diff(words(wanted), words(drawn), "accepted", "drawn", lineterm="", n=0))
        pytest.fail(f"{tmp_path / file.name} is not {file}:\n{changes or 'the same words in other colours'}")


def test_there_is_no_picture_that_nothing_draws() -> None:
    known = {f"{name}-{look}.svg" for name in ALL_SCENES for look in LOOKS}
    assert {path.name for path in PICTURES.glob("*.svg")} <= known
