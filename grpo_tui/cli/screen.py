"""`grpo-tui --profile …`: open the screen on a new or joined run; without a profile, offer runs and profiles.

Starts the supervisor first and imports Textual and the rest meanwhile, so this module imports little at the top.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from grpo_engine.errors import ConfigError
from grpo_tui.cli.printing import write_line
from grpo_tui.client.new_daemon import NewDaemon
from grpo_tui.exit_codes import ExitCode


def start_and_show(profile: str, overrides: list[str], *, theme: str | None = None, is_read_only: bool = False) -> int:
    """Start the profile or join its run, and open the screen; returns the screen's exit code.

    Raises:
        ConfigError: there is no terminal, no such theme, or the profile is wrong.
        NoSuchRun: the screen is to be read-only, and there is no live run of the profile.
    """
    require_terminal()
    require_theme(theme)
    _disable_gc()
    if is_read_only:
        return show(_live_run_of(profile, overrides), theme=theme, is_read_only=True)
    with NewDaemon() as daemon:
        from grpo_tui.client.launch import open_run
        from grpo_tui.ui.app import open_screen

        opened = open_run(profile, overrides, daemon=daemon)
    if opened.note is not None:
        write_line(opened.note, to_stderr=True)
    return open_screen(opened.folder, theme=theme)


def show(run_folder: Path, *, theme: str | None = None, is_read_only: bool = False) -> int:
    """Open the screen on an existing run; returns the screen's exit code.

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
    return open_screen(run_folder, theme=theme, is_read_only=is_read_only)


def pick_and_show(overrides: list[str], *, theme: str | None = None, is_read_only: bool = False) -> int:
    """Offer runs and profiles, and open the screen on the chosen one; returns the screen's exit code.

    Raises:
        ConfigError: no such theme, or the profile that was chosen is wrong.
    """
    require_theme(theme)
    _disable_gc()
    from grpo_tui.ui.choices import ProfileChoice, plan_of, profile_choices, run_choices
    from grpo_tui.ui.glyphs import wants_ascii
    from grpo_tui.ui.preferences import preferences_file, read_preferences
    from grpo_tui.ui.screens.picker import PickerApp
    from grpo_tui.ui.themes import theme_to_open

    picker = PickerApp(
        lambda: [*run_choices(), *([] if is_read_only else profile_choices())],
        lambda name: plan_of(name, overrides),
        theme=theme_to_open(theme, read_preferences(preferences_file()).theme, os.environ),
        is_ascii=wants_ascii(os.environ),
        is_read_only=is_read_only,
    )
    choice = picker.run_on_terminal()
    if choice is None:
        return picker.return_code or ExitCode.OK
    if isinstance(choice, ProfileChoice):
        return start_and_show(choice.name, overrides, theme=theme)
    return show(choice.folder, theme=theme, is_read_only=is_read_only)


def has_terminal() -> bool:
    """Whether a screen can be shown: on a terminal, or in a browser through `textual serve`."""
    return "TEXTUAL_DRIVER" in os.environ or (sys.stdin.isatty() and sys.stdout.isatty())


def require_terminal() -> None:
    """Refuse to open a screen without a terminal.

    Raises:
        ConfigError: stdin or stdout is not a terminal.
    """
    if not has_terminal():
        raise ConfigError("the screen needs a terminal; without one: `grpo-tui up`, `grpo-tui status`")


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


def _disable_gc() -> None:
    """Collect no garbage until the screen is drawn: imports leave no garbage, and collecting takes a seventh of the
    time to the first frame."""
    gc.disable()


def _live_run_of(profile: str, overrides: list[str]) -> Path:
    from grpo_tui.client.local import NoSuchRun, runs, stored_status
    from grpo_tui.profile.loading import load

    name = load(profile, overrides).name
    for run in runs():
        if run.is_live and stored_status(run).profile == name:
            return run.folder
    raise NoSuchRun(f"no live run of {name} here, and --read-only starts none: start it without --read-only")
