"""`grpo-tui` without a profile: what is offered, narrowed down, shown and taken."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import OptionList, Static

from grpo_engine.errors import ConfigError
from grpo_engine.wire.supervisor import RunState
from grpo_tui import paths
from grpo_tui.exit_codes import ExitCode
from grpo_tui.ui.choices import (
    Choice,
    ProfileChoice,
    RunChoice,
    editor_command,
    matching,
    own_copy,
    profile_choices,
)
from grpo_tui.ui.screens.picker import PickerApp
from grpo_tui.ui.screens.reading import ReadingScreen

LIVE = RunChoice(
    folder=Path("logs/tiny-1"), is_live=True, state=RunState.RUNNING, words=("profile tiny", "for 5 min", "api ready")
)
ENDED = RunChoice(folder=Path("logs/big-1"), is_live=False, state=RunState.FAILED, words=("profile big", "lasted 3 h"))
TINY = ProfileChoice(name="tiny", path=Path("tiny.toml"), description="in a minute", words=("Hardware: two cores.",))
BIG = ProfileChoice(name="big", path=Path("big.toml"), description="on one GPU", words=("Hardware: one GPU.",))
BROKEN = ProfileChoice(name="broken", path=Path("b.toml"), description="cannot be read", words=("line 3",), error="3")
CHOICES: list[Choice] = [LIVE, ENDED, TINY, BIG, BROKEN]


def told_plan(name: str) -> str:
    if name == "big":
        raise ConfigError("big.toml: model.name: missing")
    return f"1. api of {name}"


@asynccontextmanager
async def offered(choices: list[Choice] = CHOICES) -> AsyncIterator[tuple[PickerApp, Pilot[Choice]]]:
    app = PickerApp(lambda: choices, told_plan)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        yield app, pilot


async def until(pilot: Pilot[Choice], is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await pilot.pause(0.01)


def write_text(path: Path, text: str) -> None:
    path.write_text(text)


def text_of(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def rows(app: PickerApp) -> list[str]:
    return [str(option.prompt) for option in app.query_one(OptionList).options]


@pytest.mark.slow
async def test_live_runs_come_first_then_ended_ones_then_profiles_each_under_a_heading() -> None:
    async with offered() as (app, _):
        assert [row.split()[0] for row in rows(app)] == ["running:", "●", "ended", "✗", "profiles:", "tiny", "big", "✗"]
        assert "profile tiny" in str(app.query_one("#about", Static).content)


@pytest.mark.slow
async def test_enter_joins_the_run_that_is_marked() -> None:
    async with offered() as (app, pilot):
        await pilot.press("enter")
        await until(pilot, lambda: app._exit)
        assert app.return_value is LIVE


@pytest.mark.slow
async def test_typing_narrows_the_list_down_and_enter_starts_the_profile() -> None:
    async with offered() as (app, pilot):
        await pilot.press(*"gpu")
        await until(pilot, lambda: len(rows(app)) == 2)
        assert "Hardware: one GPU." in str(app.query_one("#about", Static).content)
        await pilot.press("enter")
        await until(pilot, lambda: app._exit)
        assert app.return_value is BIG


@pytest.mark.slow
async def test_what_a_profile_would_start_is_shown_and_so_is_what_is_wrong_with_it() -> None:
    async with offered([TINY, BIG]) as (app, pilot):
        for words in ("1. api of tiny", "big.toml: model.name: missing"):
            await pilot.press("ctrl+e")
            await until(pilot, lambda: isinstance(app.screen, ReadingScreen))
            assert words in app.export_screenshot().replace("&#160;", " ")
            await pilot.press("escape")
            await until(pilot, lambda: not isinstance(app.screen, ReadingScreen))
            await pilot.press("down")
        assert not app._exit


@pytest.mark.slow
async def test_a_profile_that_cannot_be_read_is_not_started_and_escape_leaves_with_nothing() -> None:
    async with offered([BROKEN]) as (app, pilot):
        await pilot.press("enter")
        await pilot.pause()
        assert not app._exit
        await pilot.press("x", "escape")
        await until(pilot, lambda: len(rows(app)) == 2)
        assert not app._exit
        await pilot.press("escape")
        await until(pilot, lambda: app._exit)
        assert app.return_value is None


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProfileChoice:
    """A profile that came with the package; this folder has none."""
    (tmp_path / "package").mkdir()
    (tmp_path / "here").mkdir()
    path = tmp_path / "package" / "tiny.toml"
    path.write_text("# Hardware: two cores.\n")
    monkeypatch.chdir(tmp_path / "here")
    return ProfileChoice(name="tiny", path=path, description="in a minute", words=())


def test_a_profile_that_is_edited_is_a_file_of_ones_own_and_one_that_stays_as_it_was_is_not(
    installed: ProfileChoice,
) -> None:
    with own_copy(installed) as own:
        assert own.read_bytes() == installed.path.read_bytes()
    assert not Path("profiles").exists()
    with own_copy(installed) as own:
        own.write_text("# Hardware: four cores.\n")
    assert own == Path("profiles/tiny.toml")
    with own_copy(installed) as own:
        assert own.read_text() == "# Hardware: four cores.\n"
        own.write_bytes(installed.path.read_bytes())
    assert own.exists()  # it was there before: nobody's to remove
    assert installed.path.read_text() == "# Hardware: two cores.\n"


async def told_by_editing(choice: ProfileChoice, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the screen says when the one profile that it offers is edited."""
    app = PickerApp(lambda: [choice], told_plan)
    monkeypatch.setattr(app, "suspend", nullcontext)  # a test has no terminal to lend
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("ctrl+o")
        await until(pilot, lambda: bool(app._notifications))
        return next(iter(app._notifications)).message


def test_the_editor_is_the_one_that_is_named_or_one_that_is_there(tmp_path: Path) -> None:
    assert editor_command({"EDITOR": "code --wait", "PATH": ""}) == ["code", "--wait"]
    assert editor_command({"VISUAL": "emacs", "EDITOR": "vi"}) == ["emacs"]
    assert editor_command({"PATH": str(tmp_path)}) == ["vi"]
    (tmp_path / "nano").touch(mode=0o755)
    assert editor_command({"PATH": str(tmp_path)}) == ["nano"]


@pytest.mark.slow
async def test_an_edited_profile_is_read_again_and_stays_marked(
    installed: ProfileChoice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nsed -i s/two/four/ "$1"\n')
    editor.chmod(0o755)
    monkeypatch.setenv("VISUAL", str(editor))
    monkeypatch.setattr(paths, "INSTALLED_PROFILES", installed.path.parent)
    app = PickerApp(lambda: [BIG, *(each for each in profile_choices() if each.name == "tiny")], told_plan)
    monkeypatch.setattr(app, "suspend", nullcontext)  # a test has no terminal to lend
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("down", "ctrl+o")
        await until(pilot, lambda: "four cores" in str(app.query_one("#about", Static).content))
    assert text_of(Path("profiles/tiny.toml")) == "# Hardware: four cores.\n"
    assert text_of(installed.path) == "# Hardware: two cores.\n"


@pytest.mark.slow
async def test_an_editor_that_is_not_there_is_told_and_the_list_goes_on(
    installed: ProfileChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VISUAL", "no-such-editor")
    said = await told_by_editing(installed, monkeypatch)
    assert said == "no-such-editor: No such file or directory; set EDITOR to another editor"
    assert text_of(Path("profiles/tiny.toml")) is None


@pytest.mark.slow
async def test_a_folder_that_takes_no_profile_is_told(
    installed: ProfileChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(Path("profiles"), "a file")
    said = await told_by_editing(installed, monkeypatch)
    assert said == "profiles: File exists; the profile was not opened"


def test_every_word_that_was_typed_must_be_there_in_any_order_and_case() -> None:
    assert matching(CHOICES, "GPU hardware") == [BIG]
    assert matching(CHOICES, "") == CHOICES
    assert matching(CHOICES, "nothing like it") == []


def test_every_profile_of_ours_says_its_hardware_memory_and_when_to_choose_it() -> None:
    for profile in profile_choices():
        told = "\n".join(profile.words)
        assert profile.error is None
        for word in ("Hardware", "Memory", "Choose it"):
            assert word in told, profile.name


@pytest.mark.slow
def test_without_a_terminal_nothing_is_offered_and_the_usage_is_told(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "grpo_tui"], cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == ExitCode.USAGE
    assert "--profile" in done.stdout
