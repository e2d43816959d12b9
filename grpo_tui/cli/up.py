"""`grpo-tui up`: start a run without a screen, and wait as requested.

Starts the supervisor first and imports the rest meanwhile, so this module imports little at the top.
"""

from __future__ import annotations

import shlex
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from grpo_tui.cli.arguments import JoinOption, NewOption, SetOption, TakePortsOption, second_of
from grpo_tui.cli.printing import write_line
from grpo_tui.client.interrupts import HeldInterrupts, held_interrupts
from grpo_tui.client.new_daemon import NewDaemon
from grpo_tui.exit_codes import ExitCode
from grpo_tui.paths import checked_name

if TYPE_CHECKING:
    from grpo_tui.client.launch import OpenedRun

DetachOption = Annotated[bool, typer.Option("--detach", "-d", help="Return and leave the run up in every case.")]
WaitOption = Annotated[str | None, typer.Option("--wait", metavar="ready|finished", help="Return when it is.")]
TimeoutOption = Annotated[float | None, typer.Option("--timeout", min=0.0, help="Seconds to wait at most.")]
NameOption = Annotated[
    str | None, typer.Option("--name", help="What the run's id begins with; default: the profile's name.")
]
TagOption = Annotated[list[str] | None, typer.Option("--tag", help="A word for `ps --tag`, repeatable.")]
QueueOption = Annotated[
    bool,
    typer.Option("--queue", help="Wait for ports, GPUs and files that others have, behind those who waited before."),
]
ShareGpusOption = Annotated[
    bool,
    typer.Option("--share-gpus", help="Start also where other live runs use its GPUs, if all that is planned fits."),
]
JsonLinesOption = Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")]


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("up")(up_command)


def up_command(
    profile: Annotated[str, typer.Option("--profile", "-p", help="Name in ./profiles or installed, or a TOML file.")],
    set_: SetOption = None,
    detach: DetachOption = False,
    wait: WaitOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonLinesOption = False,
    take_ports: TakePortsOption = False,
    new: NewOption = False,
    join: JoinOption = False,
    queue: QueueOption = False,
    share_gpus: ShareGpusOption = False,
    name: NameOption = None,
    tag: TagOption = None,
) -> None:
    """Start a profile without a screen, or join its run.

    It joins a live run of the same file and settings. Where the live one has other settings, it names them and exits
    with 4: --join joins it all the same, --new starts a second run, with free ports where the profile's are in use.

    With --queue it starts a run of its own as soon as no other has its ports, GPUs or files, in the order of the
    commands that wait on this host, and says what it waits for; Ctrl-C leaves the queue.

    Without --wait it waits until the run is over, and Ctrl-C ends the run. With --wait ready it returns when every
    service has been ready, and the run continues; with --wait finished when the run is over. A service that fails
    permanently meanwhile, or the time-out, takes the run down: exit code 1 (4 if another process holds a port) or 3.
    With --detach it returns at once, or after --wait, and leaves the run up in every case. A run that was joined is
    never taken down. Closing the terminal ends the waiting, not the run.
    """
    check_wait(wait)
    second = second_of(new=new, join=join)
    if queue and join:
        raise typer.BadParameter("--queue starts a run of its own: leave out --join")
    for option, words in (("--name", [name] if name is not None else []), ("--tag", tag or [])):
        for word in words:
            checked_name(word, option=option)
    began = time.monotonic()
    with ExitStack() as context:
        interrupts = context.enter_context(held_interrupts())
        daemon = context.enter_context(NewDaemon(interrupts))
        from grpo_tui.cli.overrides import own_overrides
        from grpo_tui.client.launch import Labels, open_run

        set_ = own_overrides(profile, set_ or [])
        place = None
        if queue:
            from grpo_tui.cli.waiting import ProgressPrinter
            from grpo_tui.client.start_queue import StartQueue

            say = ProgressPrinter(began=began, as_json=as_json).queued
            place = context.enter_context(StartQueue(say, None if timeout is None else began + timeout))
        opened = open_run(
            profile,
            set_,
            daemon=daemon,
            take_ports=take_ports,
            second=second,
            shares_gpus=share_gpus or None,
            labels=Labels(name=name, tags=tuple(dict.fromkeys(tag or []))),
            queue=place,
        )
    overrides = [word for each in set_ for word in ("--set", each)]
    doctor = shlex.join(["grpo-tui", "doctor", "--profile", profile, *overrides])
    wait_for(
        opened,
        began=began,
        detach=detach,
        wait=wait,
        timeout=timeout,
        as_json=as_json,
        doctor=doctor,
        can_be_second=True,
        interrupts=interrupts,
    )


def check_wait(wait: str | None) -> None:
    """Refuse another word after `--wait`."""
    if wait not in (None, "ready", "finished"):
        raise typer.BadParameter(f"--wait {wait}: ready or finished")


def wait_for(
    opened: OpenedRun,
    *,
    began: float,
    detach: bool,
    wait: str | None,
    timeout: float | None,
    as_json: bool,
    doctor: str | None = None,
    can_be_second: bool = False,
    interrupts: HeldInterrupts,
) -> None:
    """Print progress of a run that was opened, wait as requested, and exit.

    Args:
        began: monotonic time at which the command began.
        doctor: the command that checks this machine for the settings of the run.
        can_be_second: whether `--new` starts the run on other ports.
        interrupts: those since the start of the run.
    """
    import asyncio

    from grpo_tui.cli.waiting import Goal, ProgressPrinter, Watch, stay

    say = ProgressPrinter(began=began, as_json=as_json)
    say.opened(opened)
    if detach and wait is None:
        if not as_json:
            write_line(opened.folder.name)
        interrupts.release()
        return
    goal: Goal | None = "ready" if wait == "ready" else "finished" if wait == "finished" else None
    owns = opened.is_new and not detach
    watch = Watch(goal=goal, stops_on_failure=goal is not None)
    deadline = None if timeout is None else began + timeout
    code = asyncio.run(stay(opened.folder, watch, say, deadline, owns=owns, interrupts=interrupts))
    if doctor is not None and any(service.exit_code == ExitCode.USAGE for service in watch.failed.values()):
        say.note(f"to check this machine for the profile: `{doctor}`")
    refusals = [refusal for service in watch.failed.values() for refusal in service.refusals]
    if can_be_second and any(refusal.resource == "port" for refusal in refusals):
        say.note("to start it on free ports: the same command with --new")
    say.ended(watch, code)
    if not as_json and detach and code == ExitCode.OK:
        write_line(opened.folder.name)
    raise typer.Exit(code)
