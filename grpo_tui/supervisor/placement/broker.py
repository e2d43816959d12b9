"""The broker of a run on a cluster: starts services on machines, and passes logs, signals and exits between both sides.

`remote_process.py` of each service that takes devices connects to its socket, as the supervisor's side; the agents of
the machines (`agent.py`) are asked through the `Cluster`. It chooses machines, watches them, and reports to the
supervisor what runs where. It keeps nothing that is not on both sides: after a restart services go on.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from grpo_engine.errors import GrpoError
from grpo_engine.wire.codec import MAX_LINE_BYTES, Message, to_line, write_atomically, write_json_atomically
from grpo_engine.wire.environment_variables import MACHINE_ADDRESS_VARIABLE
from grpo_engine.wire.run_folder import BROKER_FILE, PLACES_FILE
from grpo_engine.wire.supervisor import MachinesReport
from grpo_tui.remote_process import EXIT_LOST
from grpo_tui.services.base import DEVICE_ORDER, VISIBLE_DEVICES, Launch
from grpo_tui.supervisor.placement import wire
from grpo_tui.supervisor.placement.assignment import NoRoom, Room, assign
from grpo_tui.supervisor.placement.cluster import Cluster, MachineLost, NoAnswer, Node
from grpo_tui.supervisor.placement.machine_report import (
    ROOM_WITHIN_S,
    Held,
    Loss,
    Machines,
    Seen,
    machine_statuses,
)
from grpo_tui.supervisor.placement.relay import LOOPBACK, Relay, run_token

LOOK_S = 1.0
"""Between an answer of a machine and the next question, between two lists of all machines, and between two reports."""
WATCH_S = 0.25
"""Between two looks at which machines have answered; none waits for another one's answer."""
SILENT_AFTER_S = 3.5
"""A machine that has not answered for so long is named; the cluster decides whether it is lost."""
LOOK_LIMIT_S = 4.0
LIST_LIMIT_S = 30.0
LATE_S = 1.0
"""A round that comes so much too late says that this process stood still, and not the machines."""
ANSWER_LIMIT_S = 20.0
START_LIMIT_S = 60.0
"""For an agent to start, and to check ports and GPU memory."""
ROOM_ROUND_S = 0.5
FOLLOW_S = 0.5
UNCLAIMED_S = 30.0
"""A service that runs on a machine, and that nobody has followed for so long, is ended."""
LOCAL_VARIABLES = ("TMPDIR", "XDG_RUNTIME_DIR", "TORCHINDUCTOR_CACHE_DIR", VISIBLE_DEVICES)
"""Of the supervisor's machine; on another one they would name what is not there."""
log = logging.getLogger(__name__)
AnswerT = TypeVar("AnswerT", bound=BaseModel)


class FollowRequest(Message):
    """The first line of a `remote_process.py`."""

    service: str
    attempt: int
    num_copied: int
    environment: dict[str, str]


class Places(Message):
    """`machines.json`: where services run, for the next broker."""

    devices: dict[str, list[int]] = {}
    """Reserved, by node."""
    services: dict[str, str] = {}
    """The node of each service."""
    taken: dict[str, list[int]] = {}
    """The devices of each service on its node."""


class Broker:
    """Services of a run on the machines of a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        launches: Iterable[Launch],
        *,
        run_folder: Path,
        report: Callable[[MachinesReport], object],
        door_host: str = LOOPBACK,
        decides_within_s: float | None = None,
        restarts_machines: bool = False,
    ) -> None:
        """
        Args:
            decides_within_s: how long the cluster waits for a machine before it gives it up, where that is known.
            restarts_machines: whether a machine that was lost is started again.
        """
        self._cluster = cluster
        launches = list(launches)
        self._launches = {launch.name: launch for launch in launches if launch.num_devices}
        self._ports_here = {port for launch in launches if not launch.num_devices for port in launch.ports}
        self._relay: Relay | None = None
        """Where the run uses machines of several addresses."""
        self._run_folder = run_folder
        self._report = report
        self._door_host = door_host
        self._decides_within_s = decides_within_s
        self._restarts_machines = restarts_machines
        self._held: dict[str, Held] = {}
        """By node."""
        self._joining: dict[str, Seen] = {}
        self._spares: dict[str, Seen] = {}
        """The same, of machines that devices are being reserved on, and of those without anything of the run."""
        self._losses: dict[str, Loss] = {}
        """The last one of each machine, by its name."""
        self._listed_at: float | None = None
        self._reported_at_s = -LOOK_S
        self._node_of: dict[str, str] = {}
        self._taken: dict[str, tuple[int, ...]] = {}
        self._followed: dict[tuple[str, int], float] = {}
        """When an attempt was last followed by a process of its supervisor."""
        self._placing = asyncio.Lock()
        self._following: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Reserve the devices of all services, or find those of an earlier broker again.

        A service whose machine was lost meanwhile gets another one when its process on the supervisor's side asks.
        Where all machines were lost, as in a new cluster, all services are placed together.

        Raises:
            GrpoError: the cluster has no room for a service.
        """
        known = await self._restore()
        waiting = [launch for name, launch in self._launches.items() if not self._held or name not in known]
        if waiting:
            await self._place(waiting)
        await self._route()

    async def serve(self, path: Path, ready: Callable[[], None]) -> None:
        """Listen and watch until cancelled."""
        with suppress(FileNotFoundError):
            os.unlink(path)
        server = await asyncio.start_unix_server(self._accept, path, limit=MAX_LINE_BYTES)
        os.chmod(path, 0o600)
        write_atomically(self._run_folder / BROKER_FILE, os.fsencode(path), mode=0o600)
        ready()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._list_machines())
                await self._watch_all(tasks)
        finally:
            server.close()
            if self._relay is not None:
                await self._relay.close()
            for task in set(self._following):
                task.cancel()

    async def close(self) -> None:
        """End everything on all machines, and give them back."""
        await asyncio.gather(*(self._close(held) for held in self._held.values()))
        (self._run_folder / PLACES_FILE).unlink(missing_ok=True)

    async def _close(self, held: Held) -> None:
        with suppress(GrpoError):
            if held.state != "lost":
                await self._ask(held, wire.End(), wire.Done)
        with suppress(GrpoError):
            await self._cluster.release(held.node.id)

    # --- places ----------------------------------------------------------------------------------------------------

    async def _place(self, launches: list[Launch]) -> None:
        """Choose machines for these services and reserve their devices there."""
        nodes = {node.name: node for node in await self._cluster.nodes()}
        rooms = [Room(name=name, num_free=node.num_free + self._num_unused(node)) for name, node in nodes.items()]
        machines = assign(launches, rooms)
        for name in dict.fromkeys(machines.values()):
            node = nodes[name]
            mine = [launch for launch in launches if machines[launch.name] == name]
            wanted = sum(launch.num_devices for launch in mine) - self._num_unused(node)
            held = self._held.get(node.id)
            devices = await self._reserve(node, wanted) if wanted > 0 or held is None else ()
            if held is None:
                held = self._held[node.id] = Held(node=node, devices=devices)
            else:
                held.devices += devices
            free = self._unused(held)
            for launch in mine:
                self._node_of[launch.name] = node.id
                self._taken[launch.name], free = tuple(free[: launch.num_devices]), free[launch.num_devices :]
                log.info("%s runs on %s, devices %s", launch.name, name, list(self._taken[launch.name]))
        self._save()

    async def _reserve(self, node: Node, num_devices: int) -> tuple[int, ...]:
        self._joining[node.id] = Seen(node=node, since=time.time())
        self._send_report()
        try:
            return await self._cluster.reserve(node, num_devices)
        finally:
            del self._joining[node.id]

    async def _route(self) -> None:
        """Make the ports of all services reachable at loopback of every machine, where these have several addresses."""
        here = self._cluster.address()
        inside: dict[str, set[int]] = {here: set(self._ports_here)}
        agents: dict[str, Held] = {}
        for held in self._held.values():
            if held.state != "lost":
                mine = [name for name, node in self._node_of.items() if node == held.node.id]
                inside.setdefault(held.node.address, set()).update(
                    port for name in mine for port in self._launches[name].ports
                )
                if held.node.address != here:
                    agents[held.node.address] = held  # one for each address: its doors are for all processes there
        if not agents and self._relay is None:
            return
        self._relay = self._relay or Relay(run_token(self._run_folder), door_host=self._door_host)
        gates = {here: await self._relay.open_gate(here, inside[here])}
        for address, held in agents.items():
            asked = wire.Route(address=address, inside=sorted(inside[address]))
            gates[address] = (await self._ask(held, asked, wire.Routed)).gate
        doors = {port: (address, gates[address]) for address in gates for port in inside[address]}
        faults = await self._relay.set_doors({port: at for port, at in doors.items() if at[0] != here})
        for address, held in agents.items():
            others = {port: at for port, at in doors.items() if at[0] != address}
            asked = wire.Route(address=address, inside=sorted(inside[address]), doors=others)
            faults += (await self._ask(held, asked, wire.Routed)).faults
        for fault in faults:
            log.error("a service on another machine is not reachable: %s", fault)

    def _num_unused(self, node: Node) -> int:
        held = self._held.get(node.id)
        return 0 if held is None else len(self._unused(held))

    def _unused(self, held: Held) -> list[int]:
        """Reserved devices that no service has."""
        taken = {each for name, node in self._node_of.items() if node == held.node.id for each in self._taken[name]}
        return [device for device in held.devices if device not in taken]

    async def _machine_of(self, name: str) -> Held:
        """The machine of a service, or another one where that is lost; waits for one with room.

        Raises:
            NoRoom: there is none in time.
        """
        deadline = time.monotonic() + ROOM_WITHIN_S
        while True:
            async with self._placing:
                held = self._held.get(self._node_of.get(name, ""))
                if held is not None and held.state != "lost":
                    return held
                try:
                    await self._place([self._launches[name]])
                    await self._route()
                    return self._held[self._node_of[name]]
                except GrpoError as error:
                    fault = error
            if time.monotonic() > deadline:
                raise NoRoom(f"{name}: {fault}")
            await asyncio.sleep(ROOM_ROUND_S)

    async def _restore(self) -> set[str]:
        """Take up the machines of an earlier broker that are alive; returns the services that it had placed."""
        try:
            places = Places.model_validate_json((self._run_folder / PLACES_FILE).read_bytes())
        except (OSError, ValidationError):
            return set()
        nodes = {node.id: node for node in await self._cluster.nodes()}
        for node_id, devices in places.devices.items():
            if node_id not in nodes:
                continue
            # The cluster has taken back what the earlier broker had reserved.
            try:
                reserved = await self._cluster.reserve(nodes[node_id], len(devices))
            except MachineLost as error:  # the cluster had not noticed yet when it was asked for its machines
                log.error("%s: what ran there is started again", error)
                continue
            self._held[node_id] = Held(node=nodes[node_id], devices=reserved)
            for name, node in places.services.items():
                if node == node_id and name in self._launches:
                    self._node_of[name], self._taken[name] = node_id, tuple(places.taken.get(name, ()))
        return places.services.keys() & self._launches.keys()

    def _save(self) -> None:
        places = Places(
            devices={node: list(held.devices) for node, held in self._held.items() if held.state != "lost"},
            services=self._node_of,
            taken={name: list(devices) for name, devices in self._taken.items()},
        )
        write_json_atomically(self._run_folder / PLACES_FILE, places, mode=0o600)

    # --- machines --------------------------------------------------------------------------------------------------

    async def _watch_all(self, tasks: asyncio.TaskGroup) -> None:
        """Watch each machine on its own, name those that do not answer, and report."""
        round_at_s = time.monotonic()
        while True:
            for held in list(self._held.values()):
                if not held.is_watched:
                    held.is_watched = True
                    tasks.create_task(self._watch(held), name=f"watch {held.node.name}")
            self._name_silent()
            if time.monotonic() - self._reported_at_s >= LOOK_S:
                self._send_report()
            await asyncio.sleep(WATCH_S)
            late_s, round_at_s = time.monotonic() - round_at_s - WATCH_S, time.monotonic()
            if late_s > LATE_S:
                for held in self._held.values():
                    held.heard_at_s += late_s

    async def _watch(self, held: Held) -> None:
        while held.state != "lost":
            await self._look(held)
            await asyncio.sleep(LOOK_S)

    async def _list_machines(self) -> None:
        """Ask the cluster which machines it has, again and again: it may know of a loss before a question fails."""
        while True:
            with suppress(GrpoError, TimeoutError):
                async with asyncio.timeout(LIST_LIMIT_S):
                    await self._take_list(await self._cluster.nodes())
            await asyncio.sleep(LOOK_S)

    async def _take_list(self, nodes: list[Node]) -> None:
        now, alive = time.time(), {node.id: node for node in nodes}
        self._listed_at = now
        spares = [node for node in nodes if node.id not in self._held and node.id not in self._joining]
        self._spares = {
            node.id: Seen(node=node, since=known.since if (known := self._spares.get(node.id)) else now)
            for node in spares
        }
        for held in list(self._held.values()):
            if held.node.id in alive:
                held.node = alive[held.node.id]
            elif held.state != "lost":
                self._lose(held)
                await self._cluster.release(held.node.id)

    async def _look(self, held: Held) -> None:
        """Ask a machine what runs there, and keep the answer; without one of the cluster's own process it is silent."""
        try:
            usage, _ = await asyncio.gather(
                self._ask(held, wire.Look(), wire.Usage, timeout_s=LOOK_LIMIT_S),
                self._cluster.check(held.node.id, timeout_s=LOOK_LIMIT_S),
            )
        except MachineLost:
            self._lose(held)
            return
        except GrpoError as error:
            log.debug("%s: %s", held.node.name, error)
            return
        if held.state == "lost":
            return
        held.usage, held.heard_at_s, held.answered_at = usage, time.monotonic(), time.time()
        if held.state == "silent":
            log.info("%s answers", held.node.name)
            held.state, held.since = "ready", time.time()
            self._send_report()
        await self._end_unclaimed(held, usage)

    def _name_silent(self) -> None:
        """Machines that have not answered for a while."""
        silent = [
            held
            for held in self._held.values()
            if held.state == "ready" and time.monotonic() - held.heard_at_s > SILENT_AFTER_S
        ]
        for held in silent:
            log.warning("%s has not answered for %g s", held.node.name, SILENT_AFTER_S)
            held.state, held.since = "silent", held.answered_at or held.since
        if silent:
            self._send_report()

    def _lose(self, held: Held) -> None:
        if held.state != "lost":
            held.state, held.since, held.usage = "lost", time.time(), None
            ran = tuple(name for name, node in self._node_of.items() if node == held.node.id)
            self._losses[held.node.name] = Loss(at=held.since, services=ran)
            log.error("%s is lost, and with it %s", held.node.name, ", ".join(ran) or "no service")
            self._save()
            self._send_report()

    async def _end_unclaimed(self, held: Held, usage: wire.Usage) -> None:
        """End services whose process on the supervisor's side was killed while no broker ran."""
        now_s = time.monotonic()
        for name, attempt in usage.attempts.items():
            seen_s = self._followed.setdefault((name, attempt), now_s)
            if now_s - seen_s > UNCLAIMED_S:
                log.warning("%s: nobody follows attempt %d on %s: it is ended", name, attempt, held.node.name)
                await self._signal(held, name, attempt, "kill")

    def _send_report(self) -> None:
        self._reported_at_s = time.monotonic()
        machines = Machines(
            held=tuple(self._held.values()),
            joining=tuple(self._joining.values()),
            spares=tuple(self._spares.values()),
            losses=self._losses,
            node_of=self._node_of,
            launches=self._launches,
            listed_at=self._listed_at,
            decides_within_s=self._decides_within_s,
            restarts_machines=self._restarts_machines,
        )
        self._report(MachinesReport(machines=machine_statuses(machines)))

    async def _ask(
        self, held: Held, request: BaseModel, kind: type[AnswerT], *, timeout_s: float = ANSWER_LIMIT_S
    ) -> AnswerT:
        line = await self._cluster.ask(held.node.id, to_line(request), timeout_s=timeout_s)
        try:
            return kind.model_validate_json(line)
        except ValidationError:
            raise NoAnswer(f"{held.node.name} answers {line[:80]!r}") from None

    async def _signal(
        self, held: Held, name: str, attempt: int, how: Literal["stop", "kill", "send"], number: int = 0
    ) -> None:
        with suppress(GrpoError):
            await self._ask(held, wire.Signal(service=name, attempt=attempt, how=how, number=number), wire.Done)

    # --- services --------------------------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Start or take up an attempt for a `remote_process.py`, and serve it until the attempt has ended."""
        task = asyncio.current_task()
        assert task is not None
        self._following.add(task)
        try:
            line = await reader.readline()
            if line:
                await self._attend(FollowRequest.model_validate(json.loads(line)["follow"]), reader, writer)
        except asyncio.CancelledError:
            pass
        except (ConnectionError, ValueError, KeyError) as error:
            log.warning("a connection was dropped: %r", error)
        finally:
            self._following.discard(task)
            writer.close()

    async def _attend(self, request: FollowRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name, number = request.service, request.attempt
        self._followed[name, number] = time.monotonic()
        if name not in self._launches:
            return _send(writer, words=f"{name} takes no devices of the cluster", exit=EXIT_LOST)
        try:
            held = await self._machine_of(name)
            known = await self._follow(held, request, request.num_copied, 0.0)
            if not known.is_known:
                if request.num_copied:
                    raise MachineLost(f"{held.node.name} does not know attempt {number}: it was lost meanwhile")
                await self._start(held, request)
        except GrpoError as error:
            return _send(writer, words=str(error), exit=EXIT_LOST)
        signals = asyncio.create_task(self._pass_signals(held, request, reader), name=f"signals of {name}")
        copying = asyncio.create_task(self._copy(held, request, writer), name=f"log of {name}")
        try:
            await asyncio.wait({signals, copying}, return_when=asyncio.FIRST_COMPLETED)
            if copying.done():
                return copying.result()
            await self._signal(held, name, number, "kill")  # its process on the supervisor's side is gone
        finally:
            signals.cancel()
            copying.cancel()
            await asyncio.gather(signals, copying, return_exceptions=True)

    async def _start(self, held: Held, request: FollowRequest) -> None:
        """Start the attempt on its machine, with the environment that its keeper gave the process on this side."""
        launch = self._launches[request.service]
        environment = {name: value for name, value in request.environment.items() if name not in LOCAL_VARIABLES}
        devices = self._taken[request.service]
        environment |= {VISIBLE_DEVICES: ",".join(map(str, devices)), DEVICE_ORDER: "PCI_BUS_ID"}
        environment[MACHINE_ADDRESS_VARIABLE] = held.node.address
        placed = replace(launch, env=environment, gpus=devices)
        answer = await self._ask(
            held,
            wire.Start(launch=wire.LAUNCH.dump_json(placed).decode(), attempt=request.attempt),
            wire.Started,
            timeout_s=START_LIMIT_S,
        )
        if answer.refused is not None:
            raise GrpoError(f"{held.node.name}: {answer.refused}")

    async def _follow(self, held: Held, request: FollowRequest, num_copied: int, wait_s: float) -> wire.Followed:
        self._followed[request.service, request.attempt] = time.monotonic()
        asked = wire.Follow(service=request.service, attempt=request.attempt, num_copied=num_copied, wait_s=wait_s)
        return await self._ask(held, asked, wire.Followed)

    async def _copy(self, held: Held, request: FollowRequest, writer: asyncio.StreamWriter) -> None:
        """Copy the log until the attempt has ended, or its machine is lost."""
        num_copied = request.num_copied
        while True:
            try:
                followed = await self._follow(held, request, num_copied, FOLLOW_S)
            except MachineLost as error:
                self._lose(held)
                return _send(writer, words=f"{error}: {request.service} ran there", exit=EXIT_LOST)
            except GrpoError:
                if held.state == "lost":
                    return _send(writer, words=f"{held.node.name} is lost", exit=EXIT_LOST)
                await asyncio.sleep(FOLLOW_S)
                continue
            if not followed.is_known:
                return _send(writer, words=f"{held.node.name} has lost {request.service}", exit=EXIT_LOST)
            if followed.data:
                num_copied += len(base64.b64decode(followed.data))
                _send(writer, data=followed.data)
                await writer.drain()
            if followed.has_exited:
                words = {} if followed.error is None else {"words": followed.error}
                code = EXIT_LOST if followed.exit_code is None else followed.exit_code
                return _send(writer, **words, exit=code)

    async def _pass_signals(self, held: Held, request: FollowRequest, reader: asyncio.StreamReader) -> None:
        """Pass signals on until the process on the supervisor's side is gone."""
        stop_signal = self._launches[request.service].stop_signal
        while line := await reader.readline():
            number = int(json.loads(line)["signal"])
            how: Literal["stop", "send"] = "stop" if number == stop_signal else "send"
            await self._signal(held, request.service, request.attempt, how, number)


def _send(writer: asyncio.StreamWriter, **message: Any) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
