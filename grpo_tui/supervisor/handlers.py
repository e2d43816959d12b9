"""The commands of clients, one function each, and the connection that carries them."""

from __future__ import annotations

import asyncio
import logging
import os

from grpo_engine import __version__
from grpo_engine.errors import GrpoError, PeerError
from grpo_engine.wire.supervisor import (
    ENDED_RUN_STATES,
    PROTOCOL_VERSION,
    Command,
    Hello,
    MachinesReport,
    RanksReport,
    Reply,
    RunState,
    ServiceReport,
    Snapshot,
    Subscribe,
    read_from_client,
)
from grpo_engine.wire.supervisor import ServiceState as S
from grpo_tui.exit_codes import ExitCode
from grpo_tui.supervisor.core import Supervisor
from grpo_tui.supervisor.machine import KillAsked, RestartAsked, StartAsked, StopAsked
from grpo_tui.supervisor.report.broadcast import Client

log = logging.getLogger(__name__)


class CommandRefused(GrpoError):
    """A command that cannot be carried out in the current state."""

    def __init__(self, text: str, exit_code: ExitCode) -> None:
        super().__init__(text)
        self.exit_code = exit_code


async def converse(
    supervisor: Supervisor, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str
) -> None:
    """Serve one client until it disconnects, is dropped for reading too slowly, or the run is over."""
    client = Client(name)
    supervisor.broadcast.clients.add(client)
    client.send(Hello(run=supervisor.run_name, pid=os.getpid(), program=__version__))
    try:
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(_write(client, writer))
            dropping = tasks.create_task(client.dropped.wait())
            reading = tasks.create_task(_read(supervisor, client, reader, tasks))
            await asyncio.wait({writing, dropping, reading}, return_when=asyncio.FIRST_COMPLETED)
            raise _Disconnect
    except* (_Disconnect, ConnectionError):
        pass
    finally:
        supervisor.broadcast.clients.discard(client)
        writer.transport.abort() if client.is_dropped else writer.close()


class _Disconnect(Exception):
    """Ends the tasks of a connection."""


async def _write(client: Client, writer: asyncio.StreamWriter) -> None:
    while (line := await client.lines.get()) is not None:
        writer.write(line)
        await writer.drain()


async def _read(supervisor: Supervisor, client: Client, reader: asyncio.StreamReader, tasks: asyncio.TaskGroup) -> None:
    while True:
        try:
            line = await reader.readline()
            if not line:
                return
            message = read_from_client(line)
        except (PeerError, ValueError) as error:
            log.warning("%s sent an invalid line and is disconnected: %s", client.name, error)
            client.send(Reply(id=0, ok=False, error=str(error), exit_code=ExitCode.USAGE))
            await asyncio.sleep(0)
            return
        match message:
            case Hello(version=version):
                if version != PROTOCOL_VERSION:
                    log.warning("%s uses protocol %d, the supervisor %d", client.name, version, PROTOCOL_VERSION)
            case Subscribe():
                client.send(Snapshot(number=supervisor.broadcast.number, status=supervisor.status()))
                supervisor.broadcast.watch(client)
            case ServiceReport() | RanksReport() | MachinesReport():
                supervisor.take_report(message)
            case Command():
                tasks.create_task(_answer(supervisor, client, message), name=f"{message.do} for {client.name}")


async def _answer(supervisor: Supervisor, client: Client, command: Command) -> None:
    """Carry one command out, and reply once."""
    try:
        async with asyncio.timeout(None if command.do == "down" else command.timeout_s):
            await _carry_out(supervisor, command)
    except CommandRefused as refusal:
        reply = Reply(id=command.id, ok=False, error=str(refusal), exit_code=refusal.exit_code)
    except TimeoutError:
        error = f"{command.do} of {command.service or supervisor.run_name}: not done in {command.timeout_s:g} s"
        reply = Reply(id=command.id, ok=False, error=error, exit_code=ExitCode.NOT_IN_TIME)
    else:
        reply = Reply(id=command.id, ok=True)
    client.send(reply.model_copy(update={"status": supervisor.status()}))


async def _carry_out(supervisor: Supervisor, command: Command) -> None:
    """Carry a command out; without `wait` return once it is applied, so that the reply has the status after it."""
    match command.do:
        case "status":
            return
        case "down":
            await _down(supervisor, command)
        case "start":
            await _start(supervisor, _name(supervisor, command), command)
            await supervisor.until_applied()
        case "restart":
            await _restart(supervisor, _name(supervisor, command), command)
            await supervisor.until_applied()
        case "stop" | "kill":
            await _stop(supervisor, _name(supervisor, command), command)
            await supervisor.until_applied()


async def _down(supervisor: Supervisor, command: Command) -> None:
    """End the run; processes that are left after `timeout_s` are killed."""
    supervisor.end(RunState.STOPPED, budget_s=command.timeout_s, take_ports=command.take_ports)
    if command.wait:
        await supervisor.wait_until(lambda s: s.state in ENDED_RUN_STATES)


def _check_needs(supervisor: Supervisor, name: str) -> None:
    """Refuse to start a service that needs a failed one: it would wait without end, and the run would end as failed."""
    for needed in supervisor.needs_of(name):
        if supervisor.service(needed).state is S.FAILED:
            raise CommandRefused(f"{name} needs {needed}, which has failed: start {needed} first", ExitCode.REFUSED)


async def _start(supervisor: Supervisor, name: str, command: Command) -> None:
    await supervisor.until_taken_over(name)
    _check_needs(supervisor, name)
    if command.take_ports:
        supervisor.take_ports(name)
    num_starts = supervisor.service(name).num_starts
    is_up = supervisor.service(name).has_process
    supervisor.post(name, StartAsked())
    if command.wait:
        await _ready(supervisor, name, num_starts if is_up else num_starts + 1)


async def _restart(supervisor: Supervisor, name: str, command: Command) -> None:
    _check_needs(supervisor, name)
    if command.take_ports:
        supervisor.take_ports(name)
    service = supervisor.service(name)
    supervisor.post(name, RestartAsked())
    if command.wait:
        await _ready(supervisor, name, service.num_starts if service.is_held else service.num_starts + 1)


async def _stop(supervisor: Supervisor, name: str, command: Command) -> None:
    supervisor.post(name, StopAsked() if command.do == "stop" else KillAsked())
    if command.wait:
        await supervisor.wait_until(lambda s: s.service(name).state in {S.STOPPED, S.FINISHED, S.FAILED})
        if supervisor.service(name).has_process:
            raise CommandRefused(f"{name}: {supervisor.service(name).reason}", ExitCode.FAILED)


async def _ready(supervisor: Supervisor, name: str, num_starts: int) -> None:
    """Wait until this start or a later one is ready, or has ended."""
    ends = {S.READY, S.FINISHED, S.FAILED, S.STOPPED}
    await supervisor.wait_until(
        lambda s: s.is_ending or (s.service(name).num_starts >= num_starts and s.service(name).state in ends)
    )
    service = supervisor.service(name)
    if service.state not in {S.READY, S.FINISHED}:
        reason = next(each.why for each in supervisor.status().services if each.name == name)
        exit_code = ExitCode.REFUSED if service.is_refused else ExitCode.FAILED
        raise CommandRefused(f"{name} is {service.state}: {reason or 'the run is ending'}", exit_code)


def _name(supervisor: Supervisor, command: Command) -> str:
    """The service that a command names; raises if there is none, or the run is ending."""
    if command.service not in supervisor.service_names:
        names = ", ".join(supervisor.service_names)
        raise CommandRefused(
            f"{command.service!r} is not a service of {supervisor.run_name}; it has {names}", ExitCode.USAGE
        )
    if supervisor.state in ENDED_RUN_STATES:  # its process exits in a moment
        raise CommandRefused(supervisor.how_it_ended(), ExitCode.NO_SUCH_RUN)
    if supervisor.is_ending:
        raise CommandRefused(
            f"run {supervisor.run_name} is ending: services can no longer be started or stopped", ExitCode.REFUSED
        )
    return command.service
