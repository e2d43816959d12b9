"""`grpo-tui up`: start a run without a screen, and wait as requested.

Starts the supervisor first and imports the rest meanwhile, so this module imports little at the top.
"""

from __future__ import annotations

import shlex
import time
from typing import Annotated

import typer

from grpo_tui.cli.arguments import TakePortsOption
from grpo_tui.cli.printing import write_line
from grpo_tui.client.new_daemon import NewDaemon
from grpo_tui.exit_codes import ExitCode


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("up")(up_command)


def up_command(
    profile: Annotated[str, typer.Option("--profile", "-p", help="Name in ./profiles or installed, or a TOML file.")],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override, repeatable.")] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return and leave the run up in every case.")] = False,
    wait: Annotated[str | None, typer.Option("--wait", metavar="ready|finished", help="Return when it is.")] = None,
    timeout: Annotated[float | None, typer.Option("--timeout", min=0.0, help="Seconds to wait at most.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")] = False,
    take_ports: TakePortsOption = False,
) -> None:
    """Start a profile without a screen, or join its run.

    Without --wait it waits until the run is over, and Ctrl-C ends the run. With --wait ready it returns when every
    service has been ready, and the run continues; with --wait finished when the run is over. A service that fails
    permanently meanwhile, or the time-out, takes the run down: exit code 1 (4 if another process holds a port) or 3.
    With --detach it returns at once, or after --wait, and leaves the run up in every case. A run that was joined is
    never taken down. Closing the terminal ends the waiting, not the run.
    """
    if wait not in (None, "ready", "finished"):
        raise typer.BadParameter(f"--wait {wait}: ready or finished")
    began = time.monotonic()
    with NewDaemon() as daemon:
        import asyncio

        from grpo_tui.cli.waiting import Goal, ProgressPrinter, Watch, stay
        from grpo_tui.client.launch import open_run

        opened = open_run(profile, set_ or [], daemon=daemon, take_ports=take_ports)
    say = ProgressPrinter(began=began, as_json=as_json)
    say.opened(opened)
    if detach and wait is None:
        if not as_json:
            write_line(opened.folder.name)
        return
    goal: Goal | None = "ready" if wait == "ready" else "finished" if wait == "finished" else None
    owns = opened.is_new and not detach
    watch = Watch(goal=goal, stops_on_failure=goal is not None)
    code = asyncio.run(stay(opened.folder, watch, say, None if timeout is None else began + timeout, owns=owns))
    if any(service.exit_code == ExitCode.USAGE for service in watch.failed.values()):
        overrides = [word for each in set_ or [] for word in ("--set", each)]
        words = shlex.join(["grpo-tui", "doctor", "--profile", profile, *overrides])
        say.note(f"to check this machine for the profile: `{words}`")
    say.ended(watch, code)
    if not as_json and detach and code == ExitCode.OK:
        write_line(opened.folder.name)
    raise typer.Exit(code)
