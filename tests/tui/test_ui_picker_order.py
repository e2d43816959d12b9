"""What can run on this machine is offered first, with a reason beside the rest; `?` and `/` work in the list."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.widgets import Input, OptionList

from grpo_tui.ui import choices
from grpo_tui.ui.choices import profile_choices
from grpo_tui.ui.screens.picker import PickerApp
from grpo_tui.ui.screens.reading import ReadingScreen


@pytest.mark.parametrize("has_driver", [True, False])
def test_profiles_that_lack_a_gpu_come_last_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_driver: bool
) -> None:
    driver = tmp_path / "version"
    if has_driver:
        driver.touch()
    monkeypatch.setattr(choices, "NVIDIA_DRIVER", driver)
    found = profile_choices()
    lacks = [choice.lack is not None for choice in found]
    assert lacks == sorted(lacks)
    assert {choice.name: choice.lack for choice in found}["tiny-cpu"] is None
    assert any(lacks) is not has_driver


@pytest.mark.slow
async def test_question_mark_and_slash_do_what_they_do_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "NVIDIA_DRIVER", Path("/no/driver"))
    app = PickerApp(profile_choices, lambda _: "")
    async with app.run_test(size=(120, 36)) as pilot:
        rows = [str(option.prompt) for option in app.query_one(OptionList).options]
        assert "needs an NVIDIA GPU" in rows[-1]
        await pilot.press("question_mark")
        await pilot.pause()
        assert isinstance(app.screen, ReadingScreen)
        await pilot.press("question_mark")
        await pilot.pause()
        assert not isinstance(app.screen, ReadingScreen)
        await pilot.press("slash", "t", "i")
        assert app.query_one(Input).value == "ti"
