"""`grpo-tui start | stop | restart | down | upgrade`: commands to the supervisor of a run, started if missing."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Literal

import typer

from grpo_engine.errors import PeerUnavailable
from grpo_engine.wire.run_folder import SUPERVISOR_LOG
from grpo_engine.wire.supervisor import ENDED_RUN_STATES, Bye, Notice, Reply, RunState, how_it_ended
from grpo_tui.cli.arguments import RunAndService, RunArgument, TakePortsOption, run_to_act_on, split
from grpo_tui.cli.printing import write_line
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
    sweep_killed,
    until_gone,
)
from grpo_tui.exit_codes import ExitCode

MAX_LOST_DAEMONS = 3
"""Supervisors that may exit unexpectedly while they take a run down, before `down` fails."""
WHOLE_RUN = {
    "start": "`grpo-tui resume RUN` goes on with a whole run",
    "stop": "`grpo-tui down` ends the whole run",
    "restart": "`grpo-tui down RUN`, then `grpo-tui resume RUN`, restart the whole run",
}
"""What to type where no service is named."""
WaitOption = Annotated[bool, typer.Option("--wait", help="Return when it is done: ready, or ended.")]
TimeoutOption = Annotated[float | None, typer.Option("--timeout", min=0.0, help="Seconds to wait at most.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("start")(start_command)
    app.command("stop")(stop_command)
    app.command("restart")(restart_command)
    app.command("down")(down_command)
    app.command("upgrade")(upgrade_command)


def start_command(
    words: RunAndService = None,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    take_ports: TakePortsOption = False,
) -> None:
    """Start a service that is stopped, finished or failed."""
    _act("start", words, wait, timeout, take_ports)


def stop_command(words: RunAndService = None, wait: WaitOption = False, timeout: TimeoutOption = None) -> None:
    """Stop a service. Its stop signal, its grace period, then SIGKILL to every process that is left."""
    _act("stop", words, wait, timeout)


def restart_command(
    words: RunAndService = None,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    take_ports: TakePortsOption = False,
) -> None:
    """Restart a service. Services with `restart_with` follow it; it does not count as a failure."""
    _act("restart", words, wait, timeout, take_ports)


def down_command(
    run: RunArgument = None,
    all_: Annotated[bool, typer.Option("--all", help="Every live run of this folder.")] = False,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0.0, help="Seconds that services get before SIGKILL.")
    ] = None,
    take_ports: TakePortsOption = False,
) -> None:
    """End a run and all of its processes. Prints what it ended and how long each part took."""
    if run is not None and asyncio.run(end_orphans(run, write_line)):
        return
    live = [each for each in runs() if each.is_live] if all_ else []
    targets = live or [run_to_act_on(run)]
    if not all_ and not targets[0].is_live and asyncio.run(sweep_killed(targets[0], write_line)):
        return
    for target in targets:
        asyncio.run(_down(target if all_ else _live(target), timeout, take_ports))


def upgrade_command(
    run: RunArgument = None, all_: Annotated[bool, typer.Option("--all", help="Every live run of this folder.")] = False
) -> None:
    """Replace the supervisor of a run by one of the installed version. No service is stopped."""
    for target in [each for each in runs() if each.is_live] if all_ else [_live(run_to_act_on(run))]:
        started = time.monotonic()
        old, new = asyncio.run(replace_daemon(target.folder))
        before = "none" if old is None else f"{old.program or 'an older version'} (pid {old.pid})"
        took = f"{time.monotonic() - started:.2f} s"
        write_line(f"{target.id}: supervised by {new.program} (pid {new.pid}) instead of {before}, in {took}")


def _act(
    do: Literal["start", "stop", "restart"],
    words: list[str] | None,
    wait: bool,
    timeout: float | None,
    take_ports: bool = False,
) -> None:
    if not words:
        raise typer.BadParameter(f"{do} takes [RUN] SERVICE; {WHOLE_RUN[do]}")
    prefix, service = split(words)
    run = run_to_act_on(prefix)
    started = time.monotonic()
    reply = asyncio.run(daemon_of(run.folder).command(do, service, wait=wait, timeout_s=timeout, take_ports=take_ports))
    if not reply.ok:
        write_line(reply.error, to_stderr=True)
        raise typer.Exit(reply.exit_code)
    state = _state_of(reply, service)
    took = f" in {time.monotonic() - started:.1f} s" if wait else ""
    write_line(f"{service}: {do} {'done' if wait else 'requested'}{took}; it is {state}", to_stderr=True)


def _state_of(reply: Reply, service: str) -> str:
    services = reply.status.services if reply.status else []
    return next((str(each.state) for each in services if each.name == service), "unknown")


def _live(run: Run) -> Run:
    if not run.is_live:
        raise NoSuchRun(how_it_ended(run.folder, stored_status(run).state))
    return run


async def _down(run: Run, timeout_s: float | None, take_ports: bool) -> None:
    """Send `down` and print notices until the run is over; a supervisor that exits meanwhile is replaced."""
    started = time.monotonic()
    for _ in range(MAX_LOST_DAEMONS):
        await _send_down(run, started, timeout_s, take_ports)
        await until_gone(run.folder)
        run = await asyncio.to_thread(look_at, run.folder)
        if not run.is_live:
            break
        write_line("the supervisor exited during the teardown; a new one continues it", to_stderr=True)
    state = stored_status(run).state
    took = f"{time.monotonic() - started:.2f} s"
    if run.is_live:
        write_line(
            f"{run.id}: still live after {took}; see {run.folder / SUPERVISOR_LOG}, then run the command again",
            to_stderr=True,
        )
        raise typer.Exit(ExitCode.FAILED)
    await sweep_killed(run, write_line)  # where the last supervisor was killed between its services and their memory
    write_line(f"{run.id}: {state} in {took}; no process is left")
    if state not in ENDED_RUN_STATES:
        raise typer.Exit(ExitCode.FAILED)


async def _send_down(run: Run, started: float, timeout_s: float | None, take_ports: bool) -> None:
    try:
        daemon = await asyncio.to_thread(daemon_of, run.folder)
    except NoSuchRun:
        return  # it has ended meanwhile
    is_listening = asyncio.Event()
    listening = asyncio.create_task(_print_notices(daemon, started, is_listening))
    try:
        await is_listening.wait()
        reply = await daemon.command("down", wait=True, timeout_s=timeout_s, take_ports=take_ports)
        if not reply.ok:
            write_line(reply.error, to_stderr=True)
            raise typer.Exit(reply.exit_code)
        await listening
    except PeerUnavailable:
        await listening


async def _print_notices(daemon: Daemon, started: float, is_listening: asyncio.Event) -> RunState | None:
    try:
        async for message in daemon.events():
            is_listening.set()
            if isinstance(message, Notice):
                write_line(f"{time.monotonic() - started:6.2f} s  {message.text}")
            elif isinstance(message, Bye):
                return message.state
    except PeerUnavailable:
        pass  # it exited before we connected; the run's files have the rest
    finally:
        is_listening.set()
    return None
