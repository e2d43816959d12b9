"""`grpo-tui --profile …`: open the screen on a run that is started or joined.

Starts the daemon first and loads Textual and everything else meanwhile, so this module opens with next to nothing.
"""

from __future__ import annotations

import sys

from grpo_engine.errors import ConfigError
from grpo_tui.client.new_daemon import NewDaemon


def start_and_show(profile: str, overrides: list[str]) -> int:
    """Start the profile or join its run, and open the screen; the screen's exit code."""
    require_terminal()
    with NewDaemon() as daemon:
        from grpo_tui.client.launch import open_run
        from grpo_tui.ui.app import open_screen

        opened = open_run(profile, overrides, daemon=daemon)
    if opened.note is not None:
        print(opened.note, file=sys.stderr)
    return open_screen(opened.folder)


def require_terminal() -> None:
    """Refuse to open a screen where nobody would see it.

    Raises:
        ConfigError: stdin or stdout is no terminal.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("the screen needs a terminal; without one: `grpo-tui up`, `grpo-tui status`")
