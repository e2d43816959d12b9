"""The agent of one machine of a cluster: starts, watches and ends the services of a run there, by keepers.

    python -P -m grpo_tui.supervisor.placement.agent RUN_FOLDER FOLDER NODE RAYLET_PID

Started by the actor of the machine, and outlives it: when the broker is restarted, its next actor finds the agent by
its socket. Requests are lines of JSON on that socket (`wire.py`). It ends every service and exits when it is told to,
when the raylet of its machine has exited (the cluster has lost the machine, and restarts its services elsewhere), and
when its lease has ended: no broker has asked for `LEASE_S`. A note in the run folder then says that nothing is left
here, so that the broker need not wait for the end of the lease. Logs and files of keepers are in a folder of this
machine, which it removes.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
from pydantic import BaseModel

from grpo_engine.errors import GrpoError, PeerError
from grpo_engine.wire.codec import MAX_LINE_BYTES, to_line, write_atomically
from grpo_engine.wire.environment_variables import REPORTS_VARIABLE
from grpo_engine.wire.run_folder import MACHINE_ENDED, PLAN_FILE, service_log
from grpo_engine.wire.supervisor import PlacedUsage, RanksReport, ServiceReport, read_from_client
from grpo_tui.paths import host_folder
from grpo_tui.run_files.log_file import read_part
from grpo_tui.supervisor import preflight, teardown
from grpo_tui.supervisor.capped_log import LogCapper
from grpo_tui.supervisor.keeper.client import ExitReport, Keeper, adopt_keeper, start_keeper
from grpo_tui.supervisor.keeper.orphans import become_reaper, kill_adopted
from grpo_tui.supervisor.keeper.proc import ProcessId, identify
from grpo_tui.supervisor.lock import take_lock
from grpo_tui.supervisor.placement import wire
from grpo_tui.supervisor.placement.relay import Relay, run_token
from grpo_tui.supervisor.usage.cpu_memory import UsageReader
from grpo_tui.supervisor.usage.gpus import GpuReader
from grpo_tui.supervisor.usage.sampling import rank_usage, with_ranks

LEASE_S = 60.0
"""Without a broker for so long, it and whoever would restart it are gone, or this machine is cut off."""
CHECK_S = 0.5
LOOK_AT_LOG_S = 0.05
END_WITHIN_S = 10.0
FENCE_S = LEASE_S + END_WITHIN_S
"""After the last answer of a machine to a broker: nothing that writes to the run folder runs there any more."""
MAX_UNHEARD = 128
"""Answers of which it is not known whether the broker has them."""
MAX_PART_BYTES = 256 * 1024
"""Of a log, in one answer."""
LOG_LIMIT_BYTES = 64_000_000
REPORTS_SOCKET = "reports.sock"
SERVICE, RANKS = "report", "ranks"
"""Types of reports."""
PORT_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_PORT, FIRST_OF_CONNECTIONS = 20_000, 32_768
"""Of the ports that are chosen; Linux's default for the first that it gives to connections."""
log = logging.getLogger(__name__)


def agent_folder(run_folder: Path, machine: str) -> Path:
    """The folder of a machine's agent, on that machine; its name is short enough for a socket.

    Raises:
        GrpoError: it cannot be made.
    """
    digest = hashlib.blake2b(f"{run_folder.resolve()}\0{machine}".encode(), digest_size=8).hexdigest()
    return host_folder() / f"agent-{digest}"


def agent_socket(run_folder: Path, machine: str) -> Path:
    """Where the agent of a machine listens."""
    return agent_folder(run_folder, machine) / "agent.sock"


@dataclass(slots=True, kw_only=True)
class Attempt:
    """An attempt that this machine has had."""

    keeper: Keeper | None
    log_offset: int
    report: ExitReport | None = None
    said: dict[str, ServiceReport | RanksReport] = field(default_factory=dict)
    """The last that it reported of itself, by its type."""
    news: set[str] = field(default_factory=set)
    """Types of reports that the broker has not got."""

    @property
    def ranks(self) -> dict[int, int]:
        """Ranks by their process, where it has reported any."""
        said = self.said.get(RANKS)
        return {each.pid: each.rank for each in said.ranks} if isinstance(said, RanksReport) else {}


class Agent:
    """The services of a run on one machine."""

    def __init__(self, run_folder: Path, folder: Path, raylet: ProcessId | None, *, node: str) -> None:
        """
        Args:
            node: the id of this machine in its cluster.
        """
        self._node = node
        self._run_folder = run_folder
        self._folder = folder
        self._raylet = raylet
        self._attempts: dict[tuple[str, int], Attempt] = {}
        self._ports: dict[tuple[str, int], int | None] = {}
        """Those that were chosen for attempts."""
        self._gpu_reader = GpuReader()
        self._usage_reader = UsageReader()
        psutil.cpu_percent()  # from here on the first figure counts
        self._lease_from_s = time.monotonic()
        self._num_answers = 0
        self._unheard: dict[int, float] = {}
        """When each answer was sent that the broker has not confirmed."""
        self._is_ending = False
        self._has_left = False
        """The cluster has lost this machine: the broker learns that, and not how its services are ended here."""
        self._limits: dict[Path, int] = {}
        self._relay: Relay | None = None
        """Where the run uses machines of several addresses."""
        self._watches: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until it is told to end, or nobody needs it any more."""
        server = await asyncio.start_unix_server(self._serve, self._folder / "agent.sock", limit=MAX_LINE_BYTES)
        reports = await asyncio.start_unix_server(self._take_report, self._reports_socket, limit=MAX_LINE_BYTES)
        capping = asyncio.create_task(LogCapper(self._limits).run(), name="log capper")
        try:
            while not self._is_ending and (reason := self._why_to_end()) is None:
                await asyncio.sleep(CHECK_S)
                await asyncio.to_thread(kill_adopted)
            if not self._is_ending:
                log.warning("%s: every service on this machine is ended", reason)
                self._has_left = True
                await self._end()
                if not self._watches:
                    note = self._run_folder / f"{self._node}{MACHINE_ENDED}"
                    with suppress(OSError):  # it is cut off from that too, or the folder was removed
                        await asyncio.to_thread(write_atomically, note, f"{reason}\n".encode(), mode=0o600)
        finally:
            capping.cancel()
            server.close()
            reports.close()

    @property
    def _reports_socket(self) -> Path:
        return self._folder / REPORTS_SOCKET

    def _why_to_end(self) -> str | None:
        if self._raylet is not None and not self._raylet.is_alive():
            return "the raylet of this machine has exited"
        if time.monotonic() - self._lease_from_s > LEASE_S:
            return f"the broker of the run has not asked for {LEASE_S:g} s"
        return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        try:
            if not (line := await reader.readline()):
                return  # an actor looked whether this process listens
            answer = await self.answer(line)
            if not self._has_left:
                writer.write(answer)
                await writer.drain()
        except (ConnectionError, ValueError) as error:
            log.warning("a request was dropped: %s", error)
        finally:
            writer.close()

    async def _take_report(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Keep what a service reports of itself until the broker asks for it."""
        try:
            if line := await reader.readline():
                self.take_report(read_from_client(line))
        except (ConnectionError, ValueError, PeerError) as error:
            log.warning("a report was dropped: %s", error)
        finally:
            writer.close()

    def take_report(self, report: object) -> None:
        """The same; only services that run here report to this machine."""
        if isinstance(report, ServiceReport | RanksReport):
            attempt = self._attempts.get((report.service, report.attempt))
            if attempt is not None:
                attempt.said[report.type] = report
                attempt.news.add(report.type)

    async def answer(self, line: bytes) -> bytes:
        """The line that answers a request.

        Raises:
            ValueError: it is no request.
        """
        return to_line(await self._answer(wire.REQUEST.validate_json(line)))

    async def _answer(self, request: wire.AnyRequest) -> BaseModel:
        match request:
            case wire.Start():
                return await self._start(request)
            case wire.Follow():
                return await self._follow(request)
            case wire.Signal():
                return self._signal(request)
            case wire.ChoosePort():
                of = request.service, request.attempt
                self._ports[of] = self._ports.get(of) or free_port(request.address, request.but)
                return wire.Chosen(port=self._ports[of])
            case wire.Look():
                self._renew(request.heard)
                return await self._look()
            case wire.Route():
                return await self._route(request)
            case wire.End():
                await self._end()
                return wire.Done()

    # --- attempts --------------------------------------------------------------------------------------------------

    async def _start(self, request: wire.Start) -> wire.Started:
        """Start an attempt, unless it was started before: an answer may have been lost."""
        launch = wire.LAUNCH.validate_json(request.launch)
        launch = replace(launch, env={**launch.env, REPORTS_VARIABLE: str(self._reports_socket)})
        if self._attempt(launch.name, request.attempt) is not None:
            return wire.Started()
        if self._is_ending:
            return wire.Started(refused="the run leaves this machine")
        run = self._run_folder.name
        try:
            refusals = await preflight.free_resources(
                launch, run=run, report=log.info, gpu_reader=self._gpu_reader, take_ports=request.take_ports
            )
            if refusals:
                return wire.Started(refused="; ".join(each.text for each in refusals))
            keeper = await start_keeper(
                launch, run=run, attempt=request.attempt, run_folder=self._run_folder, files=self._folder
            )
        except (GrpoError, OSError) as error:
            return wire.Started(refused=str(error))
        self._limits[service_log(self._folder, launch.name)] = LOG_LIMIT_BYTES
        self._remember(launch.name, request.attempt, keeper)
        return wire.Started()

    def _remember(self, service: str, number: int, keeper: Keeper) -> Attempt:
        attempt = self._attempts[service, number] = Attempt(keeper=keeper, log_offset=keeper.log_offset)
        task = asyncio.create_task(self._watch(attempt, keeper), name=f"attempt {number} of {service}")
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)
        return attempt

    async def _watch(self, attempt: Attempt, keeper: Keeper) -> None:
        report = await keeper.exited()
        await asyncio.to_thread(kill_adopted)
        attempt.report, attempt.keeper = report, None

    def _attempt(self, service: str, number: int) -> Attempt | None:
        """An attempt, also one that an earlier agent of this machine started."""
        if (known := self._attempts.get((service, number))) is not None:
            return known
        found = adopt_keeper(self._folder, service, number)
        if isinstance(found, Keeper):
            return self._remember(service, number, found)
        if found is None:
            return None
        attempt = Attempt(keeper=None, log_offset=found.log_offset or 0, report=found)
        self._attempts[service, number] = attempt
        return attempt

    async def _follow(self, request: wire.Follow) -> wire.Followed:
        attempt = self._attempt(request.service, request.attempt)
        if attempt is None:
            return wire.Followed(is_known=False)
        path, deadline = service_log(self._folder, request.service), time.monotonic() + request.wait_s
        while True:
            report = attempt.report
            data, offset = await asyncio.to_thread(_read, path, attempt.log_offset + request.num_copied)
            attempt.log_offset = offset - request.num_copied  # what was dropped before it was asked for is passed over
            if data or report is not None or time.monotonic() >= deadline:
                break
            await asyncio.sleep(LOOK_AT_LOG_S)
        has_exited = report is not None and len(data) < MAX_PART_BYTES
        told = {kind: said for kind, said in attempt.said.items() if kind in attempt.news or has_exited}
        attempt.news.clear()
        return wire.Followed(
            report=told.get(SERVICE),
            ranks=told.get(RANKS),
            data=base64.b64encode(data).decode(),
            has_exited=has_exited,
            exit_code=report.code if report is not None and has_exited else None,
            error=report.error if report is not None and has_exited else None,
        )

    def _signal(self, request: wire.Signal) -> wire.Done:
        attempt = self._attempt(request.service, request.attempt)
        keeper = None if attempt is None else attempt.keeper
        if keeper is not None:
            match request.how:
                case "stop":
                    keeper.stop()
                case "kill":
                    keeper.kill()
                case "send":
                    keeper.signal_service(signal.Signals(request.number))
        return wire.Done()

    # --- the machine -----------------------------------------------------------------------------------------------

    def _renew(self, heard: int | None) -> None:
        """Count the lease from an answer that the broker has: it counts from when it had it, which was later."""
        if heard is not None:
            self._lease_from_s = max(self._lease_from_s, self._unheard.get(heard, 0.0))
            self._unheard = {number: at for number, at in self._unheard.items() if number > heard}

    def _number_answer(self) -> int:
        self._num_answers += 1
        self._unheard[self._num_answers] = time.monotonic()
        if len(self._unheard) > MAX_UNHEARD:
            del self._unheard[next(iter(self._unheard))]
        return self._num_answers

    async def _look(self) -> wire.Usage:
        running = {
            service: (number, each.keeper)
            for (service, number), each in sorted(self._attempts.items())
            if each.keeper is not None
        }
        keepers = {service: keeper.identity.pid for service, (_, keeper) in running.items()}
        attempts = {service: number for service, (number, _) in running.items()}
        ranks = {service: self._attempts[service, number].ranks for service, (number, _) in running.items()}
        usage = await asyncio.to_thread(self._usage_reader.sample, keepers, parts=ranks)
        sample = await self._gpu_reader.sample({name: each.pids for name, each in usage.items()}, attempts)
        gpus = [with_ranks(gpu, usage, ranks) for gpu in sample.gpus]
        held = {name: [gpu.by_service[name] for gpu in sample.gpus if name in gpu.by_service] for name in usage}
        memory = psutil.virtual_memory()
        return wire.Usage(
            number=self._number_answer(),
            sees_run=_is_ours(self._run_folder / PLAN_FILE),
            attempts=attempts,
            services={
                name: PlacedUsage(
                    cpu_percent=each.cpu_percent,
                    rss_bytes=each.rss_bytes,
                    gpu_memory_bytes=sum(held[name]) if held[name] else None,
                    ranks=rank_usage(name, usage, ranks[name], gpus),
                )
                for name, each in usage.items()
            },
            gpus=gpus,
            cpu_percent=psutil.cpu_percent(),
            num_cpus=psutil.cpu_count(),
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
        )

    async def _route(self, request: wire.Route) -> wire.Routed:
        if self._relay is None:
            self._relay = Relay(run_token(self._run_folder))
        gate = await self._relay.open_gate(request.address, request.inside)
        faults = await self._relay.set_doors(request.doors)
        return wire.Routed(gate=gate, faults=faults)

    async def _end(self) -> None:
        """Kill what runs, and wait until no process is left."""
        self._is_ending = True
        for attempt in self._attempts.values():
            if attempt.keeper is not None:
                attempt.keeper.kill()
        if self._watches:
            await asyncio.wait(set(self._watches), timeout=END_WITHIN_S)
        await asyncio.to_thread(kill_adopted)
        if self._relay is not None:  # shared memory is this machine's alone too
            await self._relay.close()
            removed = await asyncio.to_thread(teardown.remove_shared_memory, self._run_folder.name, frozenset())
            if removed:
                log.info("removed from shared memory: %s", ", ".join(removed))


def free_port(address: str, but: Collection[int], *, range_file: Path = PORT_RANGE_FILE) -> int | None:
    """A port on which nobody listens, below those that the kernel gives to connections: none takes it meanwhile."""
    try:
        end = int(range_file.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        end = FIRST_OF_CONNECTIONS
    ports = range(min(FIRST_PORT, end // 2), end)
    for port in random.sample(ports, len(ports)):
        if port not in but:
            with suppress(OSError), socket.socket() as tried:
                tried.bind((address, port))
                return port
    return None


def _read(path: Path, offset: int) -> tuple[bytes, int]:
    """Bytes of a log, and the offset of the first: a later one where those from `offset` on were dropped."""
    try:
        with path.open("rb") as file:
            part = read_part(file.fileno(), offset, MAX_PART_BYTES, with_header=False)
    except FileNotFoundError:
        return b"", offset
    return part.data, part.offset


def _is_ours(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:
        return False


def main() -> int:
    """Serve one machine; exits at once where an agent of it runs already, or its raylet has exited."""
    run_folder, folder, node, raylet = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], identify(int(sys.argv[4]))
    if raylet is None:  # an actor outlives it for a moment: the next raylet's actor would find this agent in its place
        return 0
    if os.fork():  # a worker of Ray that exits with its raylet kills its children
        return 0
    folder.mkdir(mode=0o700, exist_ok=True)
    os.umask(0o077)
    become_reaper()
    lock = take_lock(folder)
    if lock is None:
        return 0
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(message)s")
    for name in ("agent.sock", REPORTS_SOCKET):
        (folder / name).unlink(missing_ok=True)
    for number in (signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(Agent(run_folder, folder, raylet, node=node).run())
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
