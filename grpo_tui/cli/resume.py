"""`grpo-tui resume | branch`: go on with a run that is over, or begin a new one at one of its checkpoints.

Starts the supervisor first and imports the rest meanwhile, so this module imports little at the top.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from grpo_tui.cli.arguments import SetOption, TakePortsOption
from grpo_tui.cli.up import (
    DetachOption,
    JsonLinesOption,
    ShareGpusOption,
    TimeoutOption,
    WaitOption,
    check_wait,
    wait_for,
)
from grpo_tui.client.interrupts import held_interrupts
from grpo_tui.client.new_daemon import NewDaemon

RunToContinue = Annotated[str, typer.Argument(metavar="RUN", help="Run id, its beginning or its last part.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("resume")(resume_command)
    app.command("branch")(branch_command)


def resume_command(
    run: RunToContinue,
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="+N|N", help="So many more steps, or the steps of the whole run.")
    ] = None,
    back_to: Annotated[
        str | None,
        typer.Option("--from", metavar="step_N", help="Go back to this checkpoint; what came after it is set aside."),
    ] = None,
    set_: SetOption = None,
    detach: DetachOption = False,
    wait: WaitOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonLinesOption = False,
    take_ports: TakePortsOption = False,
    share_gpus: ShareGpusOption = False,
) -> None:
    """Go on with a run that has ended, in its folder.

    Starts the services again with the settings of the run, those of --set on top, and trains from the newest checkpoint
    and the journal, whether the run was stopped, failed, was killed or has finished. Settings that the saved state
    depends on (model, optimizer, adapter shape) cannot change. Waiting, exit codes and Ctrl-C are as for `up`.
    """
    check_wait(wait)
    began = time.monotonic()
    with held_interrupts() as interrupts, NewDaemon(interrupts) as daemon:
        from grpo_tui.client.resume import resume_run

        opened = resume_run(
            run,
            set_ or [],
            daemon=daemon,
            steps=steps,
            back_to=back_to,
            take_ports=take_ports,
            shares_gpus=share_gpus,
        )
    wait_for(opened, began=began, detach=detach, wait=wait, timeout=timeout, as_json=as_json, interrupts=interrupts)


def branch_command(
    run: RunToContinue,
    back_to: Annotated[str, typer.Option("--from", metavar="step_N", help="The checkpoint to go on from.")],
    steps: Annotated[
        str | None,
        typer.Option("--steps", metavar="+N|N", help="So many steps after the checkpoint, or the last step."),
    ] = None,
    set_: SetOption = None,
    detach: DetachOption = False,
    wait: WaitOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonLinesOption = False,
    take_ports: TakePortsOption = False,
) -> None:
    """Start a new run from a checkpoint of another.

    It has the settings of that run, those of --set on top (another learning rate, for example), and a folder of its
    own; the other run is left as it is and may be live: ports in use are replaced by free ones. The metrics screen
    draws both together.
    """
    check_wait(wait)
    began = time.monotonic()
    with held_interrupts() as interrupts, NewDaemon(interrupts) as daemon:
        from grpo_tui.client.resume import branch_run

        opened = branch_run(run, set_ or [], daemon=daemon, back_to=back_to, steps=steps, take_ports=take_ports)
    wait_for(opened, began=began, detach=detach, wait=wait, timeout=timeout, as_json=as_json, interrupts=interrupts)
