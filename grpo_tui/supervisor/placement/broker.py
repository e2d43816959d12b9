"""The broker of a run on a cluster: starts services on machines, and passes logs, signals and exits between both sides.

`remote_process.py` of each service that takes devices connects to its socket, as the supervisor's side; the agents of
the machines (`agent.py`) are asked through the `Cluster`. It chooses machines, has them watched (`watching.py`), and
reports to the supervisor what runs where. It keeps nothing that is not on both sides: after a restart services go on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from grpo_engine.errors import GrpoError
from grpo_engine.wire.codec import MAX_LINE_BYTES, Message, write_atomically, write_json_atomically
from grpo_engine.wire.handover import PlacedPorts
from grpo_engine.wire.run_folder import BROKER_FILE, HANDOVER_IN_STEP, HANDOVER_PORTS, PLACES_FILE
from grpo_engine.wire.supervisor import MachinesReport
from grpo_tui.remote_process import EXIT_LOST
from grpo_tui.services.base import Launch
from grpo_tui.supervisor.placement import wire
from grpo_tui.supervisor.placement.agent import FENCE_S
from grpo_tui.supervisor.placement.assignment import NoRoom, Room, assign
from grpo_tui.supervisor.placement.attempts import FollowRequest, Part, PassOn, PlacedAttempt, send
from grpo_tui.supervisor.placement.cluster import Cluster, MachineLost, Node
from grpo_tui.supervisor.placement.fences import Fence, Fences
from grpo_tui.supervisor.placement.machine_report import (
    ROOM_WITHIN_S,
    Held,
    Loss,
    Machines,
    machine_statuses,
)
from grpo_tui.supervisor.placement.relay import LOOPBACK, Relay, run_token
from grpo_tui.supervisor.placement.watching import MachineWatch

ROOM_ROUND_S = 0.5
READERS = ("inference", "reference")
"""Kinds of services that write nothing to the run folder: two of one may run for a while."""
UNCLAIMED_S = 30.0
"""A service that runs on a machine, and that nobody has followed for so long, is ended."""
log = logging.getLogger(__name__)


class Place(Message):
    """Where a part of a service runs."""

    node: str
    devices: list[int]
    """Their numbers on it."""


class Places(Message):
    """`machines.json`: where services run, for the next broker."""

    devices: dict[str, list[int]] = {}
    """Reserved, by node."""
    services: dict[str, list[Place]] = {}
    fences: dict[str, Fence] = {}
    """By node."""


class Broker:
    """Services of a run on the machines of a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        launches: Iterable[Launch],
        *,
        run_folder: Path,
        report: Callable[[MachinesReport], object],
        pass_on: PassOn,
        door_host: str = LOOPBACK,
        decides_within_s: float | None = None,
        restarts_machines: bool = False,
    ) -> None:
        """
        Args:
            pass_on: takes what services report of themselves.
            decides_within_s: how long the cluster waits for a machine before it gives it up, where that is known.
            restarts_machines: whether a machine that was lost is started again.
        """
        self._cluster = cluster
        launches = list(launches)
        self._launches = {launch.name: launch for launch in launches if launch.is_placed}
        self._ports = {port for launch in launches for port in launch.ports}
        self._ports_here = {port for launch in launches if not launch.is_placed for port in launch.ports}
        self._relay: Relay | None = None
        """Where the run uses machines of several addresses."""
        self._run_folder = run_folder
        self._report = report
        self._pass_on = pass_on
        self._door_host = door_host
        self._decides_within_s = decides_within_s
        self._restarts_machines = restarts_machines
        self._machines = MachineWatch(cluster, lost=self._lose, answered=self._end_unclaimed, report=self._send_report)
        self._fences = Fences(run_folder, self._save)
        self._losses: dict[str, Loss] = {}
        """The last one of each machine, by its name."""
        self._places: dict[str, list[Place]] = {}
        """Of each service."""
        self._attempts: dict[str, PlacedAttempt] = {}
        """Those that are followed of services that are placed beside others."""
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
        waiting = [
            launch
            for name, launch in self._launches.items()
            if launch.num_devices and (not self._machines.held or name not in known)
        ]
        if waiting:
            await self._place(waiting)
        for launch in self._launches.values():
            if launch.beside and launch.name not in known:
                self._places[launch.name] = self._wanted_beside(launch)
        self._follow_to_machines()
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
            await self._machines.watch()
        finally:
            server.close()
            if self._relay is not None:
                await self._relay.close()
            for task in set(self._following):
                task.cancel()

    async def close(self) -> None:
        """End everything on all machines, and give them back."""
        await asyncio.gather(*(self._close(held) for held in self._machines.held.values()))
        self._machines.held.clear()
        self._places.clear()
        if [node for node in list(self._fences.by_node) if self._fences.stands(node)]:
            self._save()  # for the broker of a run that is resumed
        else:
            (self._run_folder / PLACES_FILE).unlink(missing_ok=True)

    async def _close(self, held: Held) -> None:
        if held.state != "lost":
            try:
                await self._machines.ask(held, wire.End(), wire.Done)
            except GrpoError as error:
                log.warning("what runs on %s ends within %g s: %s", held.node.name, FENCE_S, error)
                self._fences.put(held, self._writers_on(held))
        with suppress(GrpoError):
            await self._cluster.release(held.node.id)

    # --- places ----------------------------------------------------------------------------------------------------

    async def _place(self, launches: list[Launch]) -> None:
        """Choose machines for these services and reserve their devices there."""
        nodes = {node.name: node for node in await self._cluster.nodes()}
        names = {launch.name for launch in launches}  # what they had on machines that are not lost is free again
        unused = {
            node.id: [] if (held := self._machines.held.get(node.id)) is None else self._unused(held, but_for=names)
            for node in nodes.values()
        }
        rooms = [
            Room(name=name, num_free=node.num_free + len(unused[node.id]), num_devices=node.num_devices)
            for name, node in nodes.items()
        ]
        machines = assign(launches, rooms)
        shares = {launch.name: launch.num_devices // len(machines[launch.name]) for launch in launches}
        chosen: dict[str, list[Place]] = {launch.name: [] for launch in launches}
        for name in dict.fromkeys(name for names in machines.values() for name in names):
            node = nodes[name]
            mine = [launch for launch in launches if name in machines[launch.name]]
            wanted = sum(shares[launch.name] for launch in mine) - len(unused[node.id])
            held = self._machines.held.get(node.id)
            devices = await self._machines.reserve(node, wanted) if wanted > 0 or held is None else ()
            if held is None:
                held = self._machines.held[node.id] = Held(node=node, devices=devices)
                self._forget_versions(node)
            else:
                held.devices += devices
            free = self._unused(held, but_for=names)
            for launch in mine:
                taken, free = free[: shares[launch.name]], free[shares[launch.name] :]
                chosen[launch.name].append(Place(node=node.id, devices=taken))
                log.info("%s runs on %s, devices %s", launch.name, name, taken)
        self._places |= chosen
        self._save()
        self._follow_to_machines()

    def _wanted_beside(self, launch: Launch) -> list[Place]:
        """Where a service belongs that is placed beside others: on each machine of theirs that is not lost."""
        first = self._places.get(launch.beside[0], [])[:1]
        others = [place for name in launch.beside[1:] for place in self._places.get(name, [])]
        nodes = dict.fromkeys(place.node for place in (*first, *others))
        return [Place(node=node, devices=[]) for node in nodes if self._machines.has(node)]

    def _follow_to_machines(self) -> None:
        """Add parts of services that are placed beside others, and tell each part what is placed on its machine."""
        for launch in self._launches.values():
            if not launch.beside:
                continue
            wanted, places = self._wanted_beside(launch), self._places.setdefault(launch.name, [])
            attempt, first = self._attempts.get(launch.name), self._places.get(launch.beside[0], [])[:1]
            if attempt is not None and first and first[0].node != places[0].node and self._machines.has(first[0].node):
                attempt.move()
            elif attempt is not None:
                for place in wanted:
                    if place.node not in {each.node for each in places}:
                        log.info("%s runs on %s too", launch.name, self._machines.held[place.node].node.name)
                        attempt.add(Part(number=len(places), held=self._machines.held[place.node], devices=()))
                        places.append(place)
                self._save()
            if launch.machine_folder is not None:
                for place in wanted:
                    self._tell_ports(self._machines.held[place.node], launch.machine_folder)

    def _forget_versions(self, node: Node) -> None:
        """Have servers that start on a machine, which is new or was lost, wait for its parameter service."""
        for launch in self._launches.values():
            if launch.beside and launch.machine_folder is not None:
                (launch.machine_folder / node.name / HANDOVER_IN_STEP).unlink(missing_ok=True)

    def _tell_ports(self, held: Held, folder: Path) -> None:
        """Write which ports services have that are placed on a machine."""
        mine = (self._launches[name] for name in self._services_on(held))
        ports = sorted({port for launch in mine for port in launch.ports if not launch.beside})
        (folder / held.node.name).mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json_atomically(folder / held.node.name / HANDOVER_PORTS, PlacedPorts(ports=ports), mode=0o600)

    async def _route(self) -> None:
        """Make the ports of all services reachable at loopback of every machine, where these have several addresses."""
        here = self._cluster.address()
        inside: dict[str, set[int]] = {here: set(self._ports_here)}
        agents: dict[str, Held] = {}
        for held in self._machines.held.values():
            if held.state != "lost":
                mine = self._services_on(held)
                inside.setdefault(held.node.address, set()).update(
                    port for name in mine if self._listens_on(name, held) for port in self._launches[name].ports
                )
                if held.node.address != here:
                    agents[held.node.address] = held  # one for each address: its doors are for all processes there
        if not agents and self._relay is None:
            return
        self._relay = self._relay or Relay(run_token(self._run_folder), door_host=self._door_host)
        gates = {here: await self._relay.open_gate(here, inside[here])}
        for address, held in agents.items():
            asked = wire.Route(address=address, inside=sorted(inside[address]))
            gates[address] = (await self._machines.ask(held, asked, wire.Routed)).gate
        doors = {port: (address, gates[address]) for address in gates for port in inside[address]}
        faults = await self._relay.set_doors({port: at for port, at in doors.items() if at[0] != here})
        for address, held in agents.items():
            others = {port: at for port, at in doors.items() if at[0] != address}
            asked = wire.Route(address=address, inside=sorted(inside[address]), doors=others)
            faults += (await self._machines.ask(held, asked, wire.Routed)).faults
        for fault in faults:
            log.error("a service on another machine is not reachable: %s", fault)

    def _unused(self, held: Held, *, but_for: Collection[str]) -> list[int]:
        """Reserved devices that no service has but for these."""
        others = [places for name, places in self._places.items() if name not in but_for]
        taken = {
            device for places in others for place in places if place.node == held.node.id for device in place.devices
        }
        return [device for device in held.devices if device not in taken]

    def _services_on(self, held: Held) -> tuple[str, ...]:
        return tuple(name for name, nodes in self._nodes_of.items() if held.node.id in nodes)

    def _listens_on(self, name: str, held: Held) -> bool:
        """Whether a service has its ports on a machine of it; one that is beside others, on the first."""
        return not self._launches[name].beside or self._places[name][0].node == held.node.id

    @property
    def _nodes_of(self) -> dict[str, tuple[str, ...]]:
        return {
            name: tuple(
                place.node for place in places if not self._launches[name].beside or self._machines.has(place.node)
            )
            for name, places in self._places.items()
        }

    async def _parts_of(self, name: str) -> list[Part]:
        """A service on its machines, or on others where one of them is lost; waits for those with room.

        Raises:
            NoRoom: there are none in time.
        """
        deadline = time.monotonic() + ROOM_WITHIN_S
        while True:
            async with self._placing:
                if parts := self._living_parts(name):
                    return parts
                try:
                    await self._place([self._launches[name]])
                    await self._route()
                    return self._living_parts(name)
                except GrpoError as error:
                    fault = error
            if time.monotonic() > deadline:
                raise NoRoom(f"{name}: {fault}")
            await asyncio.sleep(ROOM_ROUND_S)

    async def _parts_beside(self, launch: Launch, request: FollowRequest) -> list[Part]:
        """Of a service that is placed beside others; an attempt that is taken up keeps the numbers of its parts.

        Raises:
            GrpoError: the first of the others has no machine in time, or that of the first part was lost meanwhile.
        """
        await self._parts_of(launch.beside[0])
        async with self._placing:
            if not request.num_copied:
                before, wanted = self._places.get(launch.name, []), self._wanted_beside(launch)
                self._places[launch.name] = wanted
                self._save()
                if before[:1] != wanted[:1]:
                    await self._route()
            places = self._places[launch.name]
            if not places or not self._machines.has(places[0].node):
                raise MachineLost(f"the machine of {launch.name} is lost")
            return [
                Part(number=number, held=self._machines.held[place.node], devices=())
                for number, place in enumerate(places)
                if self._machines.has(place.node)
            ]

    def _living_parts(self, name: str) -> list[Part]:
        """The parts of a service; none where a machine of them is lost, since each needs the others."""
        places = self._places.get(name, [])
        held = [self._machines.held.get(place.node) for place in places]
        if any(each is None or each.state == "lost" for each in held):
            return []
        return [
            Part(number=number, held=each, devices=tuple(place.devices))
            for number, (place, each) in enumerate(zip(places, held, strict=True))
            if each is not None
        ]

    async def _restore(self) -> set[str]:
        """Take up the machines of an earlier broker that are alive; returns the services that it had placed."""
        try:
            places = Places.model_validate_json((self._run_folder / PLACES_FILE).read_bytes())
        except (OSError, ValidationError):
            return set()
        self._fences.by_node = dict(places.fences)
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
            self._machines.held[node_id] = Held(node=nodes[node_id], devices=reserved)
        self._places = {name: where for name, where in places.services.items() if name in self._launches}
        return places.services.keys() & self._launches.keys()

    def _save(self) -> None:
        places = Places(
            devices={node: list(held.devices) for node, held in self._machines.held.items() if held.state != "lost"},
            services=self._places,
            fences=self._fences.by_node,
        )
        write_json_atomically(self._run_folder / PLACES_FILE, places, mode=0o600)

    # --- machines --------------------------------------------------------------------------------------------------

    def _lose(self, held: Held) -> None:
        """Remember what ran on a machine that the cluster has given up, and start none of it twice."""
        assert held.state == "lost"
        ran = self._services_on(held)
        self._losses[held.node.name] = Loss(at=held.since, services=ran)
        self._fences.put(held, self._writers_on(held))
        log.error("%s is lost, and with it %s", held.node.name, ", ".join(ran) or "no service")
        self._save()

    def _writers_on(self, held: Held) -> list[str]:
        """Services that write to the run folder; those beside others have a folder a machine."""
        return [
            name
            for name in self._services_on(held)
            if self._launches[name].kind not in READERS and not self._launches[name].beside
        ]

    async def _end_unclaimed(self, held: Held, usage: wire.Usage) -> None:
        """End services whose process on the supervisor's side was killed while no broker ran."""
        now_s = time.monotonic()
        for name, attempt in usage.attempts.items():
            seen_s = self._followed.setdefault((name, attempt), now_s)
            if now_s - seen_s > UNCLAIMED_S:
                log.warning("%s: nobody follows attempt %d on %s: it is ended", name, attempt, held.node.name)
                with suppress(GrpoError):
                    await self._machines.ask(held, wire.Signal(service=name, attempt=attempt, how="kill"), wire.Done)

    def _send_report(self) -> None:
        machines = Machines(
            held=tuple(self._machines.held.values()),
            joining=tuple(self._machines.joining.values()),
            spares=tuple(self._machines.spares.values()),
            losses=self._losses,
            nodes_of=self._nodes_of,
            launches=self._launches,
            listed_at=self._machines.listed_at,
            decides_within_s=self._decides_within_s,
            restarts_machines=self._restarts_machines,
            fenced=self._fences.until,
        )
        self._report(MachinesReport(machines=machine_statuses(machines)))

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

        def claim(attempt: int) -> None:
            self._followed[name, attempt] = time.monotonic()

        claim(number)
        if name not in self._launches:
            return send(writer, words=f"{name} takes no devices of the cluster", exit=EXIT_LOST)
        launch = self._launches[name]
        if launch.beside:
            return await self._attend_beside(launch, request, writer, reader, claim)
        try:
            await self._parts_of(name)
            if (stopped_by := await self._fences.wait_for(name, reader)) is not None:
                return send(writer, exit=-stopped_by)
            parts = await self._parts_of(name)
        except GrpoError as error:
            return send(writer, words=str(error), exit=EXIT_LOST)
        attempt = PlacedAttempt(
            self._machines, launch, request, parts, writer, claim=claim, pass_on=self._pass_on, ports=self._ports
        )
        await attempt.run(reader)

    async def _attend_beside(
        self,
        launch: Launch,
        request: FollowRequest,
        writer: asyncio.StreamWriter,
        reader: asyncio.StreamReader,
        claim: Callable[[int], None],
    ) -> None:
        """The same for a service that is placed beside others, whose parts are added and lost."""
        try:
            parts = await self._parts_beside(launch, request)
        except GrpoError as error:
            return send(writer, words=str(error), exit=EXIT_LOST)
        attempt = PlacedAttempt(self._machines, launch, request, parts, writer, claim=claim, pass_on=self._pass_on)
        self._attempts[launch.name] = attempt
        self._follow_to_machines()
        try:
            await attempt.run(reader)
        finally:
            if self._attempts.get(launch.name) is attempt:
                del self._attempts[launch.name]
