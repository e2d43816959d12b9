"""`grpo-tui start | stop | restart | down`: ask the daemon of a run, a new one if the run has lost its own."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Annotated, Literal

import typer

from grpo_engine.errors import PeerUnavailable
from grpo_engine.wire.supervisor import ENDED_RUN_STATES, Bye, Notice, Reply, RunState
from grpo_tui.cli.arguments import RunAndService, RunArgument, TakePortsOption, run_to_act_on, split
from grpo_tui.client.api import (
    Daemon,
    NoSuchRun,
    Run,
    daemon_of,
    end_orphans,
    look_at,
    replace_daemon,
    runs,
    stored_status,
    until_gone,
)
from grpo_tui.exit_codes import ExitCode

MAX_LOST_DAEMONS = 3
"""So often in a row a supervisor may be lost while it takes a run down, before that is told as a failure."""
WaitOption = Annotated[bool, typer.Option("--wait", help="Return when it is done: ready, or gone.")]
TimeoutOption = Annotated[float | None, typer.Option("--timeout", min=0.0, help="Seconds to wait at most.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("start")(start_command)
    app.command("stop")(stop_command)
    app.command("restart")(restart_command)
    app.command("down")(down_command)
    app.command("upgrade")(upgrade_command)


def start_command(
    words: RunAndService, wait: WaitOption = False, timeout: TimeoutOption = None, take_ports: TakePortsOption = False
) -> None:
    """Start a service that is stopped, finished or failed."""
    _act("start", words, wait, timeout, take_ports)


def stop_command(words: RunAndService, wait: WaitOption = False, timeout: TimeoutOption = None) -> None:
    """Stop a service. Its stop signal, its grace, then SIGKILL to all that is left of it."""
    _act("stop", words, wait, timeout)


def restart_command(
    words: RunAndService, wait: WaitOption = False, timeout: TimeoutOption = None, take_ports: TakePortsOption = False
) -> None:
    """Stop a service and start it again. Those that must follow it do; it counts as no failure."""
    _act("restart", words, wait, timeout, take_ports)


def down_command(
    run: RunArgument = None,
    all_: Annotated[bool, typer.Option("--all", help="Every live run of this folder.")] = False,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0.0, help="Seconds that services get before SIGKILL.")
    ] = None,
    take_ports: TakePortsOption = False,
) -> None:
    """End a run and leave nothing of it. Says what it ended and how long each part took."""
    if run is not None and asyncio.run(end_orphans(run, lambda line: print(line))):
        return
    targets = [each for each in runs() if each.is_live] if all_ else [_live(run_to_act_on(run))]
    if not targets:
        raise NoSuchRun("no run lives here")
    for target in targets:
        asyncio.run(_down(target, timeout, take_ports))


def upgrade_command(
    run: RunArgument = None, all_: Annotated[bool, typer.Option("--all", help="Every live run of this folder.")] = False
) -> None:
    """Give a run a supervisor of the version installed now. No service is stopped."""
    for target in [each for each in runs() if each.is_live] if all_ else [_live(run_to_act_on(run))]:
        started = time.monotonic()
        old, new = asyncio.run(replace_daemon(target.folder))
        before = "nobody" if old is None else f"{old.program or 'an older version'} (pid {old.pid})"
        took = f"{time.monotonic() - started:.2f} s"
        print(f"{target.id}: supervised by {new.program} (pid {new.pid}) instead of {before}, in {took}")


def _act(
    do: Literal["start", "stop", "restart"],
    words: list[str],
    wait: bool,
    timeout: float | None,
    take_ports: bool = False,
) -> None:
    prefix, service = split(words)
    run = run_to_act_on(prefix)
    started = time.monotonic()
    reply = asyncio.run(daemon_of(run.folder).command(do, service, wait=wait, timeout_s=timeout, take_ports=take_ports))
    if not reply.ok:
        print(reply.error, file=sys.stderr)
        raise typer.Exit(reply.exit_code)
    state = _state_of(reply, service)
    took = f" in {time.monotonic() - started:.1f} s" if wait else ""
    print(f"{service}: {do} {'done' if wait else 'asked'}{took}; it is {state}", file=sys.stderr)


def _state_of(reply: Reply, service: str) -> str:
    services = reply.status.services if reply.status else []
    return next((str(each.state) for each in services if each.name == service), "unknown")


def _live(run: Run) -> Run:
    if not run.is_live:
        raise NoSuchRun(f"run {run.id} has ended: {stored_status(run).state}")
    return run


async def _down(run: Run, timeout_s: float | None, take_ports: bool) -> None:
    """Ask for the end, and print what the daemon says until nothing is left; a daemon lost meanwhile is replaced."""
    started = time.monotonic()
    for _ in range(MAX_LOST_DAEMONS):
        await _ask_for_the_end(run, started, timeout_s, take_ports)
        await until_gone(run.folder)
        run = await asyncio.to_thread(look_at, run.folder)
        if not run.is_live:
            break
        print("the supervisor was lost while it took the run down; another goes on with it", file=sys.stderr)
    state = stored_status(run).state
    took = f"{time.monotonic() - started:.2f} s"
    if run.is_live:
        print(
            f"{run.id}: still lives after {took}; see {run.folder}/supervisor.log, then say it again", file=sys.stderr
        )
        raise typer.Exit(ExitCode.FAILED)
    print(f"{run.id}: {state} in {took}; nothing is left")
    if state not in ENDED_RUN_STATES:
        raise typer.Exit(ExitCode.FAILED)


async def _ask_for_the_end(run: Run, started: float, timeout_s: float | None, take_ports: bool) -> None:
    try:
        daemon = await asyncio.to_thread(daemon_of, run.folder)
    except NoSuchRun:
        return  # it has ended since
    hears = asyncio.Event()
    listening = asyncio.create_task(_print_notices(daemon, started, hears))
    try:
        await hears.wait()
        reply = await daemon.command("down", wait=True, timeout_s=timeout_s, take_ports=take_ports)
        if not reply.ok:
            print(reply.error, file=sys.stderr)
            raise typer.Exit(reply.exit_code)
        await listening
    except PeerUnavailable:
        await listening


async def _print_notices(daemon: Daemon, started: float, hears: asyncio.Event) -> RunState | None:
    try:
        async for message in daemon.events():
            hears.set()
            if isinstance(message, Notice):
                print(f"{time.monotonic() - started:6.2f} s  {message.text}")
            elif isinstance(message, Bye):
                return message.state
    except PeerUnavailable:
        pass  # it was gone before we listened; its files say the rest
    finally:
        hears.set()
    return None
