"""`grpo-tui attach`: open the screen on a run that is there."""

from __future__ import annotations

import typer

from grpo_tui.cli.arguments import RunArgument, run_to_read
from grpo_tui.cli.screen import require_terminal
from grpo_tui.client.api import ensure_daemon


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("attach")(attach_command)


def attach_command(run: RunArgument = None) -> None:
    """Open the screen on a run; `q` leaves it running. One that has ended is shown as it ended."""
    folder = run_to_read(run).folder
    require_terminal()
    from grpo_tui.ui.app import open_screen

    ensure_daemon(folder)  # one that died while its services live is replaced; a run that is over needs none
    raise typer.Exit(open_screen(folder))
