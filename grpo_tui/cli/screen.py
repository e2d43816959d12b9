"""`grpo-tui --profile …`: open the screen on a new or joined run; without a profile, offer runs and profiles.

Starts the supervisor first and imports Textual and the rest meanwhile, so this module imports little at the top.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from grpo_engine.errors import ConfigError
from grpo_tui.cli.printing import write_line
from grpo_tui.client.new_daemon import NewDaemon
from grpo_tui.exit_codes import TO_BOARD, ExitCode

if TYPE_CHECKING:
    from grpo_tui.client.launch import Second
    from grpo_tui.client.local import StartRefused


def start_and_show(
    profile: str,
    overrides: list[str],
    *,
    second: Second | None = None,
    theme: str | None = None,
    is_read_only: bool = False,
    has_board: bool = False,
) -> int:
    """Start the profile or join its run, and open the screen; returns the screen's exit code, as `show`.

    Where the live run has other settings, and `second` does not say what to do, the terminal is asked.

    Raises:
        ConfigError: there is no terminal, no such theme, or the profile is wrong.
        StartRefused: neither joining nor a second run was chosen.
        NoSuchRun: the screen is to be read-only, and there is no live run of the profile.
    """
    require_terminal()
    require_theme(theme)
    _disable_gc()
    if is_read_only:
        return show(_live_run_of(profile, overrides), theme=theme, is_read_only=True)
    with NewDaemon() as daemon:
        from grpo_tui.client.launch import open_run
        from grpo_tui.client.local import StartRefused
        from grpo_tui.ui.app import open_screen

        try:
            opened = open_run(profile, overrides, daemon=daemon, second=second)
        except StartRefused as refused:
            opened = open_run(profile, overrides, daemon=daemon, second=_ask_for_second(refused))
    if opened.note is not None:
        write_line(opened.note, to_stderr=True)
    return open_screen(opened.folder, theme=theme, has_board=has_board)


def show(run_folder: Path, *, theme: str | None = None, is_read_only: bool = False, has_board: bool = False) -> int:
    """Open the screen on an existing run; returns its exit code, or `TO_BOARD`.

    Args:
        has_board: whether it is opened from the board.

    Raises:
        ConfigError: there is no terminal, or no such theme.
    """
    require_terminal()
    require_theme(theme)
    _disable_gc()
    from grpo_tui.client.launch import ensure_daemon
    from grpo_tui.paths import ForeignFolder
    from grpo_tui.ui.app import open_screen

    if not is_read_only:
        try:
            ensure_daemon(run_folder)  # one that exited while its services run is replaced
        except ForeignFolder as error:
            write_line(error, to_stderr=True)
            is_read_only = True
    return open_screen(run_folder, theme=theme, is_read_only=is_read_only, has_board=has_board)


def show_board(overrides: list[str], *, theme: str | None = None, is_read_only: bool = False) -> int:
    """Show the board of all runs, and what is chosen there, until the user leaves; returns the exit code.

    Where there is no run yet, profiles are offered at once.

    Raises:
        ConfigError: no such theme, or the profile that was chosen is wrong.
    """
    require_theme(theme)
    _disable_gc()
    from grpo_tui.ui.board.app import BoardApp
    from grpo_tui.ui.board.reading import BoardReader
    from grpo_tui.ui.glyphs import wants_ascii
    from grpo_tui.view.board.state import Board

    reader, board = BoardReader(), Board(is_read_only=is_read_only)
    has_board = is_read_only or reader.has_runs()
    while True:
        profile = None
        if has_board:
            app = BoardApp(reader, board, theme=_theme_now(theme), is_ascii=wants_ascii(os.environ))
            choice, board = app.run_on_terminal(), app.board
            if choice is None:
                return app.return_code or ExitCode.OK
            if choice.run_folder is not None:
                code = show(choice.run_folder, theme=theme, is_read_only=is_read_only, has_board=True)
                if code != TO_BOARD:
                    return code
                continue
        profile, code = _pick_profile(overrides, theme)
        if profile is None and (code or not has_board):
            return code
        if profile is not None:
            shown = start_and_show(profile, overrides, theme=theme, has_board=has_board)
            if shown != TO_BOARD:
                return shown


def _pick_profile(overrides: list[str], theme: str | None) -> tuple[str | None, int]:
    """Offer profiles; returns the chosen one, and the exit code if none was."""
    from grpo_tui.ui.choices import plan_of, profile_choices
    from grpo_tui.ui.glyphs import wants_ascii
    from grpo_tui.ui.screens.picker import PickerApp

    picker = PickerApp(
        profile_choices,
        lambda name: plan_of(name, overrides),
        theme=_theme_now(theme),
        is_ascii=wants_ascii(os.environ),
    )
    choice = picker.run_on_terminal()
    return (None if choice is None else choice.name), picker.return_code or ExitCode.OK


def _theme_now(asked: str | None) -> str:
    from grpo_tui.ui.preferences import preferences_file, read_preferences
    from grpo_tui.ui.themes import theme_to_open

    return theme_to_open(asked, read_preferences(preferences_file()).theme, os.environ)


def has_terminal() -> bool:
    """Whether a screen can be shown: on a terminal, or in a browser through `textual serve`."""
    return "TEXTUAL_DRIVER" in os.environ or (sys.stdin.isatty() and sys.stdout.isatty())


def require_terminal() -> None:
    """Refuse to open a screen without a terminal.

    Raises:
        ConfigError: stdin or stdout is not a terminal.
    """
    if not has_terminal():
        raise ConfigError("the screen needs a terminal; without one: `grpo-tui up --profile NAME`, `grpo-tui status`")


def require_theme(name: str | None) -> None:
    """Refuse an unknown theme.

    Raises:
        ConfigError: there is no theme of that name.
    """
    if name is None:
        return
    from grpo_tui.ui.themes import known_themes

    if name not in known_themes():
        raise ConfigError(f"--theme {name}: unknown theme; known themes: {', '.join(known_themes())}")


def _ask_for_second(refused: StartRefused) -> Second:
    """Ask the terminal whether to join the live run or to start another.

    Raises:
        StartRefused: neither, or neither would help, or there is no terminal to ask: the screen is in a browser.
    """
    if not refused.choices or not sys.stdin.isatty():
        raise refused
    write_line(refused, to_stderr=True)
    while True:
        answer = str(typer.prompt(" or ".join([*refused.choices, "quit"]), default="quit", err=True)).strip().lower()
        if answer == "quit":
            raise typer.Exit(ExitCode.REFUSED)
        for choice in refused.choices:
            if answer == choice:
                return choice


def _disable_gc() -> None:
    """Collect no garbage until the screen is drawn: imports leave no garbage, and collecting takes a seventh of the
    time to the first frame."""
    gc.disable()


def _live_run_of(profile: str, overrides: list[str]) -> Path:
    from grpo_tui.client.local import NoSuchRun
    from grpo_tui.client.second_run import live_runs_of
    from grpo_tui.paths import LOGS
    from grpo_tui.profile.loading import load

    loaded = load(profile, overrides)
    for live in live_runs_of(loaded, LOGS):
        return live.run.folder
    raise NoSuchRun(f"no live run of {loaded.path} here, and --read-only starts none: start it without --read-only")
