"""`grpo-tui attach`: open the screen on a run that is there."""

from __future__ import annotations

import typer

from grpo_tui.cli.arguments import ReadOnlyOption, RunArgument, ThemeOption, run_to_read
from grpo_tui.cli.screen import show


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("attach")(attach_command)


def attach_command(run: RunArgument = None, read_only: ReadOnlyOption = False, theme: ThemeOption = None) -> None:
    """Open the screen on a run; `q` leaves it running. One that has ended is shown as it ended."""
    raise typer.Exit(show(run_to_read(run).folder, theme=theme, is_read_only=read_only))
