"""The list of profiles to start, and what its keys do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from textual import events
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, Static
from typer.testing import CliRunner

from grpo_engine.errors import ConfigError
from grpo_tui import paths
from grpo_tui.cli import build_app
from grpo_tui.exit_codes import ExitCode
from grpo_tui.ui.choices import (
    ProfileChoice,
    editor_command,
    matching,
    own_copy,
    profile_choices,
)
from grpo_tui.ui.screens.picker import PickerApp
from grpo_tui.ui.screens.reading import ReadingScreen
from grpo_tui.ui.terminal.paste_parser import MAX_PASTED

TINY = ProfileChoice(name="tiny", path=Path("tiny.toml"), description="in a minute", words=("Hardware: two cores.",))
BIG = ProfileChoice(name="big", path=Path("big.toml"), description="on one GPU", words=("Hardware: one GPU.",))
BROKEN = ProfileChoice(name="broken", path=Path("b.toml"), description="cannot be read", words=("line 3",), error="3")
CHOICES: list[ProfileChoice] = [TINY, BIG, BROKEN]


def plan_of(name: str) -> str:
    if name == "big":
        raise ConfigError("big.toml: model.name: missing")
    return f"1. api of {name}"


@asynccontextmanager
async def picker(
    choices: Callable[[], list[ProfileChoice]] = lambda: CHOICES,
) -> AsyncIterator[tuple[PickerApp, Pilot[ProfileChoice]]]:
    app = PickerApp(choices, plan_of)
    with mock.patch.object(app, "suspend", nullcontext):  # a test has no terminal to lend to an editor
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.pause()
            yield app, pilot


async def until(pilot: Pilot[ProfileChoice], is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await pilot.pause(0.01)


def first_words(app: PickerApp) -> list[str]:
    """Of each row of the list: names of profiles, or a sign."""
    return [str(option.prompt).split()[0] for option in app.query_one(OptionList).options]


def description(app: PickerApp) -> str:
    """The text below the list, about the marked choice."""
    return str(app.query_one("#about", Static).content)


@pytest.mark.slow
async def test_typing_filters_the_list_ctrl_e_shows_the_plan_or_its_error_and_enter_starts_the_profile() -> None:
    async with picker() as (app, pilot):
        for typed, name, words in (("two", "tiny", "1. api of tiny"), ("gpu", "big", "big.toml: model.name: missing")):
            await pilot.press(*["backspace"] * 3, *typed)
            await until(pilot, lambda name=name: first_words(app) == [name])  # type: ignore[misc]
            await pilot.press("ctrl+e")
            await until(pilot, lambda: isinstance(app.screen, ReadingScreen))
            assert words in app.export_screenshot().replace("&#160;", " ")
            await pilot.press("escape")
            await until(pilot, lambda: not isinstance(app.screen, ReadingScreen))
        assert not app._exit
        assert "Hardware: one GPU." in description(app)
        await pilot.press("enter")
        await until(pilot, lambda: app._exit)
        assert app.return_value is BIG


async def test_the_description_is_wrapped_for_the_new_size_and_says_what_this_machine_lacks() -> None:
    big = replace(BIG, words=("word " * 40,), lack="needs a GPU", lack_note="no GPU driver is loaded here")
    async with picker(lambda: [big]) as (app, pilot):
        for width in (40, 80):
            await pilot.resize_terminal(width, 24)
            await until(pilot, lambda width=width: max(map(len, description(app).splitlines())) > width - 8)  # type: ignore[misc]
            assert max(map(len, description(app).splitlines())) <= width - 2
        assert description(app).startswith("needs a GPU: no GPU driver is loaded here\nword word")


@pytest.mark.slow
async def test_a_profile_that_cannot_be_read_is_not_started_and_escape_leaves_without_a_choice() -> None:
    async with picker(lambda: [BROKEN]) as (app, pilot):
        await pilot.press("enter")
        await pilot.pause()
        assert not app._exit
        await pilot.press("x", "escape")
        await until(pilot, lambda: len(first_words(app)) == 1)
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


def test_an_edited_profile_is_a_copy_in_this_folder_and_an_unchanged_copy_is_removed(
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
    assert own.exists()  # it was there before
    assert installed.path.read_text() == "# Hardware: two cores.\n"


def test_a_profile_to_edit_is_not_written_through_a_link_that_another_user_put_in_its_place(
    installed: ProfileChoice, tmp_path: Path
) -> None:
    Path("profiles").mkdir()
    Path("profiles/tiny.toml").symlink_to(tmp_path / "new")
    with pytest.raises(FileExistsError), own_copy(installed):
        pass
    assert not (tmp_path / "new").exists()


def test_the_editor_is_the_one_of_the_environment_or_one_that_is_installed(tmp_path: Path) -> None:
    assert editor_command({"EDITOR": "code --wait", "PATH": ""}) == ["code", "--wait"]
    assert editor_command({"VISUAL": "emacs", "EDITOR": "vi"}) == ["emacs"]
    assert editor_command({"PATH": str(tmp_path)}) == ["vi"]
    (tmp_path / "nano").touch(mode=0o755)
    assert editor_command({"PATH": str(tmp_path)}) == ["nano"]


@pytest.mark.slow
async def test_an_edited_profile_is_read_again_and_an_editor_or_folder_that_fails_is_reported(
    installed: ProfileChoice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "here" / "profiles"
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nsed -i s/two/four/ "$1"\n')
    editor.chmod(0o755)
    monkeypatch.setattr(paths, "INSTALLED_PROFILES", installed.path.parent)

    def choices() -> list[ProfileChoice]:
        return [BIG, *(each for each in profile_choices() if each.name == "tiny")]

    async with picker(choices) as (app, pilot):
        await pilot.press("down")
        monkeypatch.setenv("VISUAL", "no-such-editor")
        await pilot.press("ctrl+o")
        await until(pilot, lambda: len(app._notifications) == 1)
        folder.write_text("a file")
        await pilot.press("ctrl+o")
        await until(pilot, lambda: len(app._notifications) == 2)
        assert [each.message for each in app._notifications] == [
            "no-such-editor: No such file or directory; set EDITOR to another editor",
            "profiles: File exists; the profile was not opened",
        ]
        folder.unlink()  # not a folder: the failed editor left no copy
        monkeypatch.setenv("VISUAL", str(editor))
        await pilot.press("ctrl+o")
        await until(pilot, lambda: "four cores" in description(app))
    assert (folder / "tiny.toml").read_text() == "# Hardware: four cores.\n"
    assert installed.path.read_text() == "# Hardware: two cores.\n"


def test_every_typed_word_must_match_in_any_order_and_case() -> None:
    assert matching(CHOICES, "GPU hardware") == [BIG]
    assert matching(CHOICES, "") == CHOICES
    assert matching(CHOICES, "nothing like it") == []


def test_a_profile_whose_name_was_typed_is_the_first_and_those_with_it_in_their_names_are_next() -> None:
    named = [replace(TINY, name=name) for name in ("tiny-cpu", "not-tiny", "tiny-two")]
    other = replace(BIG, words=("As tiny, and tiny-cpu.",))
    listed = [other, replace(TINY, name="tiny-cpu-two"), *named]
    assert [choice.name for choice in matching(listed, "Tiny-CPU")] == ["tiny-cpu", "tiny-cpu-two", "big"]
    assert matching(listed, "tiny")[-1] is other
    assert matching(listed, "")[0] is other


def test_without_a_terminal_the_usage_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(build_app(), [])
    assert result.exit_code == ExitCode.USAGE
    assert "--profile" in result.stdout


async def test_a_line_of_a_megabyte_that_is_pasted_is_cut_before_an_input_has_it() -> None:
    async with picker() as (app, pilot):
        app.post_message(events.Paste("tw" + "o" * 1_000_000))
        await until(pilot, lambda: bool(app.query_one(Input).value))
        assert app.query_one(Input).value == "tw" + "o" * (MAX_PASTED - 2)
