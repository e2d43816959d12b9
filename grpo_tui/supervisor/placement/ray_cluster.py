"""The only module that imports Ray: a private cluster on this machine, and a broker on a private or an existing one.

    python -P -m grpo_tui.supervisor.placement.ray_cluster nodes RUN_FOLDER
    python -P -m grpo_tui.supervisor.placement.ray_cluster broker RUN_FOLDER

`nodes` is the cluster of a run: a head, and a raylet for each further machine that this one stands for. It exits when
the head does, and starts another raylet for one that exits or is given up. `broker` connects to the cluster, reserves
devices by placement groups, and puts one actor on each machine, which carries requests to the agent there. Ray carries
requests, logs and exit codes; no tokens and no weights.

Ray 2.60 needs care: without a token its ports are open to everyone, its default folder and object store are not ours
alone, it kills processes of others when memory is short, and calls without a time-out may wait for ever.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import NodeID
from ray._private.node import Node as RayNode
from ray._private.parameter import RayParams
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_engine.errors import GrpoError
from grpo_engine.python_command import module_command
from grpo_engine.serving.reporting import send_to_supervisor
from grpo_engine.wire.codec import write_atomically
from grpo_engine.wire.environment_variables import SERVICE_VARIABLE
from grpo_engine.wire.supervisor import MachinesReport, RanksReport, ServiceReport
from grpo_tui.paths import broker_socket
from grpo_tui.profile.cluster import CERTIFICATE_FILE, KEY_FILE, NODES, READY_BROKER, READY_NODES, TOKEN_FILE
from grpo_tui.profile.plan_file import Plan
from grpo_tui.services.base import ClusterPlan
from grpo_tui.supervisor.placement.agent import agent_folder, agent_socket
from grpo_tui.supervisor.placement.broker import Broker
from grpo_tui.supervisor.placement.certificate import new_certificate
from grpo_tui.supervisor.placement.cluster import MachineLost, NoAnswer, Node

ADDRESS_FILE = "ray.address"
LOOPBACK = "127.0.0.1"
MACHINE_PREFIX = "machine-"
OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Ray's least is 75 MiB; nothing of ours is stored in it."""
SESSION = "s"
"""Ray's own name for it is 40 bytes long, of the 107 that the path of a socket may have."""
CONNECT_LIMIT_S = 60.0
RESERVE_LIMIT_S = 60.0
ASK_MARGIN_S = 1.0
LOOK_S = 1.0
"""Between two looks whether a machine is still there whose devices are waited for."""
AGENT_WITHIN_S, LISTENS_WITHIN_S = 30.0, 5.0
WATCH_S = 0.5
HEAD_ANSWERS_WITHIN_S = 5.0
EXIT_WITHIN_S = 2.0
"""From the exit of the head to that of this process, where no machine is being started."""
HEALTH_PERIOD_MS, HEALTH_TIMEOUT_MS, HEALTH_FAILURES = 1000, 2000, 10
"""Checks that must fail one after the other before Ray gives a machine up; a raylet that exits is noticed earlier.
Ray's own limit for a check is ten seconds."""
LOST_WITHIN_S = (HEALTH_PERIOD_MS + HEALTH_TIMEOUT_MS) * HEALTH_FAILURES / 1000
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""What a gRPC client sends first: the preface of RFC 9113 and an empty SETTINGS frame."""
RECONNECT_S = 10
"""A machine that has not reached the head for so long leaves the cluster, and its agent ends its services."""
log = logging.getLogger(__name__)


# --- a private cluster ------------------------------------------------------------------------------------------------


def serve_nodes(run_folder: Path, plan: ClusterPlan) -> int:
    """Run the private cluster of a run until a signal comes or its head exits."""
    key, certificate = new_certificate(LOOPBACK)
    secret = {TOKEN_FILE: secrets.token_hex(32).encode(), KEY_FILE: key, CERTIFICATE_FILE: certificate}
    for name, content in secret.items():
        write_atomically(run_folder / name, content, mode=0o600)
    folder = Path(tempfile.gettempdir()) / "r"  # in the temporary folder of the run; short, as paths of sockets must be
    shutil.rmtree(folder, ignore_errors=True)  # of a head that was killed
    folder.mkdir(mode=0o700)
    try:
        return _keep_nodes(run_folder, plan, str(folder))
    finally:
        (run_folder / ADDRESS_FILE).unlink(missing_ok=True)
        for name in secret:
            (run_folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _keep_nodes(run_folder: Path, plan: ClusterPlan, folder: str) -> int:
    system = {
        "health_check_period_ms": HEALTH_PERIOD_MS,
        "health_check_timeout_ms": HEALTH_TIMEOUT_MS,
        "health_check_failure_threshold": HEALTH_FAILURES,
        "gcs_rpc_server_reconnect_timeout_s": RECONNECT_S,
    }
    head = _start_node(plan, 1, folder, gcs_server_port=0, session_name=SESSION, _system_config=system)
    further = {number: _start_node(plan, number, folder, head=head) for number in range(2, plan.machines + 1)}
    (run_folder / ADDRESS_FILE).write_text(head.gcs_address)
    log.info("%s %s: %d machines", READY_NODES, head.gcs_address, plan.machines)
    try:
        threading.Thread(target=_exit_with, args=(head,), name="head", daemon=True).start()
        _watch(head, further, plan, folder)
    finally:  # TERM alone they take half a minute
        for node in (head, *further.values()):
            node.kill_all_processes(check_alive=False, allow_graceful=False, wait=False)
    log.error("the head of the cluster has exited")
    return 1


def _exit_with(head: RayNode) -> None:
    """Exit where the main thread does not: Ray waits in it for half a minute for a machine that starts without a head.

    The keeper ends what is left, as after a kill.
    """
    while not _has_ended(head):
        time.sleep(WATCH_S)
    time.sleep(EXIT_WITHIN_S)
    log.error("the head of the cluster has exited while a machine was started")
    logging.shutdown()
    os._exit(1)


def _watch(head: RayNode, further: dict[int, RayNode], plan: ClusterPlan, folder: str) -> None:
    """Start machines again that exit or were given up; returns when the head has exited."""
    while not _has_ended(head):
        alive = _alive(head, further.values())
        for number, node in further.items():
            # Stopped for longer than its health checks, it would go on with services that run elsewhere by now.
            is_given_up = alive is not None and node.node_id not in alive
            if _has_ended(node) or is_given_up:
                how = "was given up" if is_given_up else "has exited"
                log.warning("%s%d %s: it is started again", MACHINE_PREFIX, number, how)
                node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
                further[number] = _start_node(plan, number, folder, head=head)
        time.sleep(WATCH_S)


def _start_node(plan: ClusterPlan, number: int, folder: str, head: RayNode | None = None, **own: Any) -> RayNode:
    """Start the processes of one machine, which listen on loopback."""
    if head is not None:
        own["gcs_address"] = head.gcs_address
    params = RayParams(
        num_cpus=1,
        num_gpus=plan.devices_per_machine,
        resources={f"{MACHINE_PREFIX}{number}": 1},
        object_store_memory=OBJECT_STORE_BYTES,
        node_ip_address=LOOPBACK,
        min_worker_port=0,
        max_worker_port=0,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
        dashboard_agent_listen_port=None,
        temp_dir=folder,
        **own,
    )
    node = RayNode(params, head=head is None, shutdown_at_exit=False, spawn_reaper=False)
    _exit_on_sigterm()
    return node


def _exit_on_sigterm() -> None:
    """In place of Ray's own handler, which waits for half a minute for a head that was ended with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def _alive(head: RayNode, nodes: Iterable[RayNode]) -> set[str] | None:
    """The ids of the machines that the head counts as alive; None while it does not answer."""
    ids = [node.node_id for node in nodes]
    try:
        client = head.get_gcs_client()
        answers = client.check_alive([NodeID.from_hex(each) for each in ids], timeout=HEAD_ANSWERS_WITHIN_S)
    except RayError:
        return None
    return {each for each, is_alive in zip(ids, answers, strict=True) if is_alive}


def _has_ended(node: RayNode) -> bool:
    return any(kind in ("raylet", "gcs_server") for kind, _ in node.dead_processes())


# --- one actor a machine ----------------------------------------------------------------------------------------------


class MachineActor:
    """Carries requests to the agent of its machine, which it starts if there is none."""

    def __init__(self, run_folder: str, machine: str, environment: dict[str, str], python_path: list[str]) -> None:
        self._run_folder, self._machine = Path(run_folder), machine
        self._environment, self._python_path = environment, python_path
        self._raylet = os.getppid()
        self._node = ray.get_runtime_context().get_node_id()
        self._socket = agent_socket(self._run_folder, machine)
        self._starting: asyncio.Lock | None = None

    async def devices(self) -> list[int]:
        """The devices that Ray has reserved for this actor."""
        return [int(each) for each in ray.get_gpu_ids()]

    async def ask(self, request: bytes) -> bytes:
        """The agent's answer to a request."""
        if self._starting is None:
            self._starting = asyncio.Lock()
        deadline = time.monotonic() + AGENT_WITHIN_S
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._socket, limit=16 * 1024 * 1024)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                async with self._starting:
                    await self._start_agent()
                continue
            try:
                writer.write(request)
                await writer.drain()
                line = await reader.readline()
            finally:
                writer.close()
            if line:
                return line

    async def _start_agent(self) -> None:
        """Start an agent in a session of its own; returns once it listens, or another one does, or none in time."""
        folder = agent_folder(self._run_folder, self._machine)
        folder.mkdir(mode=0o700, exist_ok=True)
        module = "grpo_tui.supervisor.placement.agent"
        argv = module_command(module, str(self._run_folder), str(folder), self._node, str(self._raylet))
        environment = {**self._environment, "PYTHONPATH": os.pathsep.join(self._python_path)}
        with (folder / "agent.log").open("ab") as out:
            process = subprocess.Popen(  # noqa: ASYNC220 - it outlives this process
                argv, cwd="/", env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        deadline = time.monotonic() + LISTENS_WITHIN_S
        while process.poll() is None or time.monotonic() < deadline:  # it goes on in a process that is no child of this
            with suppress(OSError):
                (await asyncio.open_unix_connection(self._socket))[1].close()
                return
            await asyncio.sleep(0.05)


REMOTE_ACTOR: Any = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=64)(MachineActor)


# --- the cluster as the broker sees it --------------------------------------------------------------------------------


class RayCluster:
    """The machines of a Ray cluster."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder
        self._actors: dict[str, Any] = {}
        self._groups: dict[str, list[Any]] = {}
        """Placement groups on each node, its actor in the first."""
        self._nodes: dict[str, Node] = {}
        self._raylets: dict[str, tuple[str, int]] = {}
        """Where the raylet of each node listens."""

    def address(self) -> str:
        """As Ray knows this machine."""
        return str(ray.util.get_node_ip_address())

    async def nodes(self) -> list[Node]:
        """The machines that are alive, in the order of their names."""
        return await asyncio.to_thread(self._read_nodes)

    def _read_nodes(self) -> list[Node]:
        free = ray._private.state.available_resources_per_node()
        alive = [each for each in ray.nodes() if each["Alive"]]
        names = {each["NodeID"]: self._nodes[each["NodeID"]].name for each in alive if each["NodeID"] in self._nodes}
        found = []
        for each in alive:
            node_id = each["NodeID"]
            self._raylets[node_id] = each["NodeManagerAddress"], each["NodeManagerPort"]
            if node_id not in names:
                own = [name for name in each["Resources"] if name.startswith(MACHINE_PREFIX)]
                # The supervisor names machines, also the raylet in the place of a lost one, which Ray still
                # counts as alive. Hosts of one name, as in containers, are several machines.
                host = each["NodeManagerHostname"]
                names[node_id] = own[0] if own else f"{host}-{node_id[:6]}" if host in names.values() else host
            found.append(
                Node(
                    id=node_id,
                    name=names[node_id],
                    address=each["NodeManagerAddress"],
                    num_free=int(free.get(node_id, {}).get("GPU", 0)),
                    num_devices=int(each["Resources"].get("GPU", 0)),
                )
            )
        self._nodes |= {node.id: node for node in found}  # one that has left may still be asked
        return sorted(found, key=lambda node: (len(node.name), node.name))

    async def reserve(self, node: Node, num_devices: int) -> tuple[int, ...]:
        """A placement group on this very machine, and an actor in it, whose devices Ray numbers.

        Where the machine has an actor already, this one is ended again: the group keeps the devices.
        """
        # The smallest share of a CPU: a placement group has no empty bundle.
        bundle = {"GPU": float(num_devices)} if num_devices else {"CPU": 0.001}
        group = placement_group([bundle], bundle_label_selector=[{"ray.io/node-id": node.id}])
        try:
            deadline = time.monotonic() + RESERVE_LIMIT_S
            while not await asyncio.to_thread(group.wait, LOOK_S):
                await self._require_alive(node)
                if time.monotonic() > deadline:
                    limit = f"{RESERVE_LIMIT_S:g} s"
                    raise GrpoError(f"{node.name}: its {num_devices} devices were not free within {limit}")
            actor = REMOTE_ACTOR.options(
                num_gpus=num_devices, scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group)
            ).remote(str(self._run_folder), node.name, _environment_of_agents(), [path for path in sys.path if path])
            devices = await asyncio.wait_for(actor.devices.remote(), RESERVE_LIMIT_S)
        except (RayError, TimeoutError) as error:
            remove_placement_group(group)
            await self._require_alive(node)
            raise GrpoError(f"{node.name}: no actor can be started there: {error}") from None
        except GrpoError:
            remove_placement_group(group)
            raise
        self._groups.setdefault(node.id, []).append(group)
        if self._actors.setdefault(node.id, actor) is not actor:
            ray.kill(actor)
        return tuple(devices)

    async def ask(self, node_id: str, request: bytes, *, timeout_s: float) -> bytes:
        """Through the actor of the machine; another one is started for an actor that died on a living machine."""
        node = self._nodes[node_id]
        actor = self._actors.get(node_id)
        if actor is None:
            raise MachineLost(f"{node.name} is lost")
        try:
            answer: bytes = await asyncio.wait_for(actor.ask.remote(request), timeout_s + ASK_MARGIN_S)
            return answer
        except (GetTimeoutError, TimeoutError):
            await self._require_alive(node)
            raise NoAnswer(f"{node.name} has not answered for {timeout_s:g} s") from None
        except RayActorError as error:
            await self._require_alive(node)
            if self._actors.get(node_id) is actor:
                await self._replace_actor(node)
            raise NoAnswer(f"{node.name}: its actor has died: {error}") from None
        except RayError as error:
            raise NoAnswer(f"{node.name}: {error}") from None

    async def check(self, node_id: str, *, timeout_s: float) -> None:
        """Ask the raylet for the first frame of a connection: where it is stopped, its kernel still accepts that."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(*self._raylets[node_id])
                writer.write(HTTP2_HELLO)
                await reader.read(1)  # with TLS it closes the connection, which is an answer too
        except (OSError, TimeoutError) as error:
            name = self._nodes[node_id].name
            raise NoAnswer(f"{name}: its raylet does not answer within {timeout_s:g} s: {error}") from None
        finally:
            if writer is not None:
                writer.close()

    async def _require_alive(self, node: Node) -> None:
        """Raises MachineLost where the cluster has given the machine up."""
        if node.id not in {each.id for each in await self.nodes()}:
            await self.release(node.id)
            raise MachineLost(f"{node.name} is lost")

    async def _replace_actor(self, node: Node) -> None:
        """Start another actor in the place of one that was killed; the agent goes on."""
        group = self._groups[node.id][0]
        num_devices = int(group.bundle_specs[0].get("GPU", 0))
        self._actors[node.id] = REMOTE_ACTOR.options(
            num_gpus=num_devices, scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group)
        ).remote(str(self._run_folder), node.name, _environment_of_agents(), [path for path in sys.path if path])
        log.warning("%s: its actor has died, and another one is started", node.name)

    async def release(self, node_id: str) -> None:
        """Remove the actor and the placement group."""
        actor, groups = self._actors.pop(node_id, None), self._groups.pop(node_id, [])
        if actor is not None:
            with suppress(RayError):
                ray.kill(actor)
        for group in groups:
            with suppress(RayError):
                await asyncio.to_thread(remove_placement_group, group)


def _environment_of_agents() -> dict[str, str]:
    """What agents inherit: marked as part of the cluster, so that they are not taken for processes of the broker."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    kept.pop("TMPDIR", None)
    return {**kept, SERVICE_VARIABLE: NODES}


# --- the broker -------------------------------------------------------------------------------------------------------


async def serve_broker(run_folder: Path, plan: Plan) -> None:
    """Connect, place the services, and serve until SIGTERM."""
    assert plan.cluster is not None
    address = plan.cluster.address or (run_folder / ADDRESS_FILE).read_text().strip()
    async with asyncio.timeout(CONNECT_LIMIT_S):
        await asyncio.to_thread(_connect, address)
    loop = asyncio.get_running_loop()
    reports = LatestReport(run_folder)
    is_private = plan.cluster.address is None
    broker = Broker(
        RayCluster(run_folder),
        plan.launches,
        run_folder=run_folder,
        report=reports.send,
        pass_on=partial(_pass_on, run_folder),
        decides_within_s=LOST_WITHIN_S if is_private else None,
        restarts_machines=is_private,
    )
    reporting = asyncio.create_task(reports.run(), name="reporting")
    serving = asyncio.create_task(_serve(broker, run_folder), name="serving")
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, serving.cancel)
    with suppress(asyncio.CancelledError):
        await serving
    reporting.cancel()
    async with asyncio.timeout(CONNECT_LIMIT_S):
        await broker.close()


async def _pass_on(run_folder: Path, report: ServiceReport | RanksReport) -> None:
    """Send a report of a service; returns when the supervisor has it, before it learns of an exit."""
    with suppress(OSError, ValueError):  # the supervisor is being replaced: it gets the next one
        await asyncio.to_thread(send_to_supervisor, run_folder, report)


class LatestReport:
    """Sends reports in their order; one that waits for another to be sent is replaced by a newer one."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder
        self._waiting: asyncio.Queue[MachinesReport] = asyncio.Queue(1)

    def send(self, report: MachinesReport) -> None:
        """Send it as soon as the one before is sent."""
        if self._waiting.full():
            self._waiting.get_nowait()
        self._waiting.put_nowait(report)

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            report = await self._waiting.get()
            with suppress(OSError, ValueError):  # the supervisor is being replaced: it gets the next one
                await asyncio.to_thread(send_to_supervisor, self._run_folder, report)


async def _serve(broker: Broker, run_folder: Path) -> None:
    await broker.open()
    await broker.serve(broker_socket(run_folder), lambda: log.info("%s", READY_BROKER))


def _connect(address: str) -> None:
    ray.init(address=address, namespace="grpo-tui", log_to_driver=False, logging_level=logging.WARNING)


def main() -> int:
    """Run one of the two processes."""
    what, run_folder = sys.argv[1], Path(sys.argv[2])
    plan = Plan.of(run_folder)
    assert plan.cluster is not None, "only a run on a cluster starts this process"
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(message)s")
    if what == "nodes":
        _exit_on_sigterm()
        try:
            code = serve_nodes(run_folder, plan.cluster)
        except SystemExit:
            code = 0
        logging.shutdown()
        os._exit(code)  # Ray's own exit waits for processes that the keeper ends at once
    try:
        asyncio.run(serve_broker(run_folder, plan))
    except GrpoError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
