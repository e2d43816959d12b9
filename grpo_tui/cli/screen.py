"""`grpo-tui --profile …` and `grpo-tui attach`: open the screen on a run. The only module here that loads Textual."""

from __future__ import annotations

import sys

import typer

from grpo_engine.errors import ConfigError
from grpo_tui.cli.arguments import RunArgument, run_to_read
from grpo_tui.client.api import ensure_daemon, open_run


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("attach")(attach_command)


def attach_command(run: RunArgument = None) -> None:
    """Open the screen on a run; `q` leaves it running. One that has ended is shown as it ended."""
    folder = run_to_read(run).folder
    _require_terminal()
    from grpo_tui.ui.app import open_screen

    ensure_daemon(folder)  # one that died while its services live is replaced; a run that is over needs none
    raise typer.Exit(open_screen(folder))


def _require_terminal() -> None:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("the screen needs a terminal; without one: `grpo-tui up`, `grpo-tui status`")


def start_and_show(profile: str, overrides: list[str]) -> int:
    """Start the profile or join its run, and open the screen; the screen's exit code."""
    _require_terminal()
    from grpo_tui.ui.app import open_screen

    opened = open_run(profile, overrides)
    if opened.note is not None:
        print(opened.note, file=sys.stderr)
    return open_screen(opened.folder)
