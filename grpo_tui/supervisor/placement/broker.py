"""The broker of a run on a cluster: starts services on machines, and passes logs, signals and exits between both sides.

`remote_process.py` of each service that takes devices connects to its socket, as the supervisor's side; the agents of
the machines (`agent.py`) are asked through the `Cluster`. It chooses machines, watches them, and reports to the
supervisor what runs where. It keeps nothing that is not on both sides: after a restart services go on.
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
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from grpo_engine.errors import GrpoError
from grpo_engine.wire.codec import MAX_LINE_BYTES, Message, Time, to_line, write_atomically, write_json_atomically
from grpo_engine.wire.handover import PlacedPorts
from grpo_engine.wire.run_folder import BROKER_FILE, HANDOVER_IN_STEP, HANDOVER_PORTS, MACHINE_ENDED, PLACES_FILE
from grpo_engine.wire.supervisor import MachinesReport
from grpo_tui.remote_process import EXIT_LOST
from grpo_tui.services.base import Launch
from grpo_tui.supervisor.placement import wire
from grpo_tui.supervisor.placement.agent import FENCE_S
from grpo_tui.supervisor.placement.assignment import NoRoom, Room, assign
from grpo_tui.supervisor.placement.attempts import FollowRequest, Part, PassOn, PlacedAttempt, send
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
ROOM_ROUND_S = 0.5
FENCE_ROUND_S = 0.25
READERS = ("inference", "reference")
"""Kinds of services that write nothing to the run folder: two of one may run for a while."""
UNCLAIMED_S = 30.0
"""A service that runs on a machine, and that nobody has followed for so long, is ended."""
log = logging.getLogger(__name__)
AnswerT = TypeVar("AnswerT", bound=BaseModel)


class Place(Message):
    """Where a part of a service runs."""

    node: str
    devices: list[int]
    """Their numbers on it."""


class Fence(Message):
    """A machine that does not answer, on which services of the run may still be running."""

    machine: str
    services: list[str]
    until: Time
    """By then its agent has ended them."""


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
        self._held: dict[str, Held] = {}
        """By node."""
        self._joining: dict[str, Seen] = {}
        self._spares: dict[str, Seen] = {}
        """The same, of machines that devices are being reserved on, and of those without anything of the run."""
        self._losses: dict[str, Loss] = {}
        """The last one of each machine, by its name."""
        self._fences: dict[str, Fence] = {}
        """By node."""
        self._listed_at: float | None = None
        self._reported_at_s = -LOOK_S
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
            if launch.num_devices and (not self._held or name not in known)
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
        self._held.clear()
        self._places.clear()
        if [node for node in list(self._fences) if self._is_fenced(node)]:
            self._save()  # for the broker of a run that is resumed
        else:
            (self._run_folder / PLACES_FILE).unlink(missing_ok=True)

    async def _close(self, held: Held) -> None:
        if held.state != "lost":
            try:
                await self.ask(held, wire.End(), wire.Done)
            except GrpoError as error:
                log.warning("what runs on %s ends within %g s: %s", held.node.name, FENCE_S, error)
                self._fence(held)
        with suppress(GrpoError):
            await self._cluster.release(held.node.id)

    # --- places ----------------------------------------------------------------------------------------------------

    async def _place(self, launches: list[Launch]) -> None:
        """Choose machines for these services and reserve their devices there."""
        nodes = {node.name: node for node in await self._cluster.nodes()}
        names = {launch.name for launch in launches}  # what they had on machines that are not lost is free again
        unused = {
            node.id: [] if (held := self._held.get(node.id)) is None else self._unused(held, but_for=names)
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
            held = self._held.get(node.id)
            devices = await self._reserve(node, wanted) if wanted > 0 or held is None else ()
            if held is None:
                held = self._held[node.id] = Held(node=node, devices=devices)
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
        return [Place(node=node, devices=[]) for node in nodes if self._is_held(node)]

    def _is_held(self, node: str) -> bool:
        held = self._held.get(node)
        return held is not None and held.state != "lost"

    def _follow_to_machines(self) -> None:
        """Add parts of services that are placed beside others, and tell each part what is placed on its machine."""
        for launch in self._launches.values():
            if not launch.beside:
                continue
            wanted, places = self._wanted_beside(launch), self._places.setdefault(launch.name, [])
            attempt, first = self._attempts.get(launch.name), self._places.get(launch.beside[0], [])[:1]
            if attempt is not None and first and first[0].node != places[0].node and self._is_held(first[0].node):
                attempt.move()
            elif attempt is not None:
                for place in wanted:
                    if place.node not in {each.node for each in places}:
                        log.info("%s runs on %s too", launch.name, self._held[place.node].node.name)
                        attempt.add(Part(number=len(places), held=self._held[place.node], devices=()))
                        places.append(place)
                self._save()
            if launch.machine_folder is not None:
                for place in wanted:
                    self._tell_ports(self._held[place.node], launch.machine_folder)

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
            gates[address] = (await self.ask(held, asked, wire.Routed)).gate
        doors = {port: (address, gates[address]) for address in gates for port in inside[address]}
        faults = await self._relay.set_doors({port: at for port, at in doors.items() if at[0] != here})
        for address, held in agents.items():
            others = {port: at for port, at in doors.items() if at[0] != address}
            asked = wire.Route(address=address, inside=sorted(inside[address]), doors=others)
            faults += (await self.ask(held, asked, wire.Routed)).faults
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
            name: tuple(place.node for place in places if not self._launches[name].beside or self._is_held(place.node))
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
            if not places or not self._is_held(places[0].node):
                raise MachineLost(f"the machine of {launch.name} is lost")
            return [
                Part(number=number, held=self._held[place.node], devices=())
                for number, place in enumerate(places)
                if self._is_held(place.node)
            ]

    def _living_parts(self, name: str) -> list[Part]:
        """The parts of a service; none where a machine of them is lost, since each needs the others."""
        places = self._places.get(name, [])
        held = [self._held.get(place.node) for place in places]
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
        self._fences = dict(places.fences)
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
        self._places = {name: where for name, where in places.services.items() if name in self._launches}
        return places.services.keys() & self._launches.keys()

    def _save(self) -> None:
        places = Places(
            devices={node: list(held.devices) for node, held in self._held.items() if held.state != "lost"},
            services=self._places,
            fences=self._fences,
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
                self.lose(held)
                await self._cluster.release(held.node.id)

    async def _look(self, held: Held) -> None:
        """Ask a machine what runs there, and keep the answer; without one of the cluster's own process it is silent."""
        try:
            usage, _ = await asyncio.gather(
                self._ask_usage(held),
                self._cluster.check(held.node.id, timeout_s=LOOK_LIMIT_S),
            )
        except MachineLost:
            self.lose(held)
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

    async def _ask_usage(self, held: Held) -> wire.Usage:
        usage = await self.ask(held, wire.Look(heard=held.last_answer), wire.Usage, timeout_s=LOOK_LIMIT_S)
        held.last_answer, held.leased_at_s = usage.number, time.monotonic()
        return usage

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

    def lose(self, held: Held) -> None:
        """Take note that the cluster has given a machine up."""
        if held.state != "lost":
            held.state, held.since, held.usage = "lost", time.time(), None
            ran = self._services_on(held)
            self._losses[held.node.name] = Loss(at=held.since, services=ran)
            self._fence(held)
            log.error("%s is lost, and with it %s", held.node.name, ", ".join(ran) or "no service")
            self._save()
            self._send_report()

    # --- fences ----------------------------------------------------------------------------------------------------

    def _fence(self, held: Held) -> None:
        """Keep what ran on a machine that does not answer from being started elsewhere while it may run there."""
        writers = [
            name
            for name in self._services_on(held)
            if self._launches[name].kind not in READERS and not self._launches[name].beside  # it has a folder a machine
        ]
        if writers:
            until = time.time() + held.leased_at_s + FENCE_S - time.monotonic()
            self._fences[held.node.id] = Fence(machine=held.node.name, services=writers, until=until)

    def _is_fenced(self, node: str) -> bool:
        """Whether services may still run there; ends with the time, or when the agent has left its note."""
        note = self._run_folder / f"{node}{MACHINE_ENDED}"
        if node not in self._fences or (not note.exists() and time.time() < self._fences[node].until):
            return node in self._fences
        note.unlink(missing_ok=True)
        del self._fences[node]
        self._save()
        return False

    async def _wait_for_fences(self, name: str, reader: asyncio.StreamReader) -> int | None:
        """Return when no earlier attempt of a service can run on a machine that does not answer.

        Returns:
            The signal that stopped it meanwhile, if one did.

        Raises:
            ConnectionError: its process on the supervisor's side is gone.
        """
        for node, fence in list(self._fences.items()):
            if name not in fence.services or not self._is_fenced(node):
                continue
            by = time.strftime("%H:%M:%S", time.localtime(fence.until))
            log.warning(
                "%s may still run on %s: it is started when its agent has ended it, by %s", name, fence.machine, by
            )
            while self._is_fenced(node):
                try:
                    line = await asyncio.wait_for(reader.readline(), FENCE_ROUND_S)
                except TimeoutError:
                    continue
                if not line:
                    raise ConnectionError(f"the process of {name} on this side is gone")
                return int(json.loads(line)["signal"])
        return None

    async def _end_unclaimed(self, held: Held, usage: wire.Usage) -> None:
        """End services whose process on the supervisor's side was killed while no broker ran."""
        now_s = time.monotonic()
        for name, attempt in usage.attempts.items():
            seen_s = self._followed.setdefault((name, attempt), now_s)
            if now_s - seen_s > UNCLAIMED_S:
                log.warning("%s: nobody follows attempt %d on %s: it is ended", name, attempt, held.node.name)
                with suppress(GrpoError):
                    await self.ask(held, wire.Signal(service=name, attempt=attempt, how="kill"), wire.Done)

    def _send_report(self) -> None:
        self._reported_at_s = time.monotonic()
        machines = Machines(
            held=tuple(self._held.values()),
            joining=tuple(self._joining.values()),
            spares=tuple(self._spares.values()),
            losses=self._losses,
            nodes_of=self._nodes_of,
            launches=self._launches,
            listed_at=self._listed_at,
            decides_within_s=self._decides_within_s,
            restarts_machines=self._restarts_machines,
            fenced={name: fence.until for fence in self._fences.values() for name in fence.services},
        )
        self._report(MachinesReport(machines=machine_statuses(machines)))

    async def ask(
        self, held: Held, request: BaseModel, kind: type[AnswerT], *, timeout_s: float = ANSWER_LIMIT_S
    ) -> AnswerT:
        """Ask the agent of a machine.

        Raises:
            MachineLost: the cluster has given the machine up.
            NoAnswer: not in time.
        """
        line = await self._cluster.ask(held.node.id, to_line(request), timeout_s=timeout_s)
        try:
            return kind.model_validate_json(line)
        except ValidationError:
            raise NoAnswer(f"{held.node.name} answers {line[:80]!r}") from None

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
            if (stopped_by := await self._wait_for_fences(name, reader)) is not None:
                return send(writer, exit=-stopped_by)
            parts = await self._parts_of(name)
        except GrpoError as error:
            return send(writer, words=str(error), exit=EXIT_LOST)
        attempt = PlacedAttempt(
            self, launch, request, parts, writer, claim=claim, pass_on=self._pass_on, ports=self._ports
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
        attempt = PlacedAttempt(self, launch, request, parts, writer, claim=claim, pass_on=self._pass_on)
        self._attempts[launch.name] = attempt
        self._follow_to_machines()
        try:
            await attempt.run(reader)
        finally:
            if self._attempts.get(launch.name) is attempt:
                del self._attempts[launch.name]
