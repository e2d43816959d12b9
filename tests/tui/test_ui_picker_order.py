"""What can run on this machine is offered first, with a reason beside the rest; `?` and `/` work in the list."""

from __future__ import annotations

import pytest
from textual.widgets import Input, OptionList

from grpo_tui.ui import choices
from grpo_tui.ui.choices import profile_choices
from grpo_tui.ui.screens.picker import PickerApp
from grpo_tui.ui.screens.reading import ReadingScreen


@pytest.fixture(autouse=True)
def _vllm_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "is_installed", lambda module: True)


def test_profiles_that_need_vllm_say_so_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(choices, "is_installed", lambda module: False)
    found = {choice.name: choice for choice in profile_choices()}
    lacking = found["hermes8b-shared"]
    assert (lacking.lack, lacking.lack_note) == ("needs vLLM", "it is not installed: pip install 'grpo-tui[vllm]'")
    assert found["tiny-cpu"].lack is None


@pytest.mark.parametrize("has_driver", [True, False])
def test_profiles_that_lack_a_gpu_come_last_and_say_so(monkeypatch: pytest.MonkeyPatch, has_driver: bool) -> None:
    monkeypatch.setattr(choices, "has_gpu_driver", lambda: has_driver)
    found = profile_choices()
    lacks = [choice.lack is not None for choice in found]
    assert lacks == sorted(lacks)
    assert {choice.name: choice.lack for choice in found}["tiny-cpu"] is None
    assert any(lacks) is not has_driver


@pytest.mark.slow
async def test_question_mark_and_slash_do_what_they_do_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "has_gpu_driver", lambda: False)
    app = PickerApp(profile_choices, lambda _: "")
    async with app.run_test(size=(120, 36)) as pilot:
        rows = [str(option.prompt) for option in app.query_one(OptionList).options]
        assert "needs a GPU · " in rows[-1]
        await pilot.press("question_mark")
        await pilot.pause()
        assert isinstance(app.screen, ReadingScreen)
        await pilot.press("question_mark")
        await pilot.pause()
        assert not isinstance(app.screen, ReadingScreen)
        await pilot.press("slash", "t", "i")
        assert app.query_one(Input).value == "ti"
