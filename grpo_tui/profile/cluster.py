"""A cluster in a plan: the services that a run on several machines has besides those of its profile.

`ray` is the private cluster of the run, unless it joins an existing one; `machines` is the broker, which places every
service that takes devices (`num_devices`). Those wait for it; all others run on the machine of the supervisor.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from grpo_engine.python_command import module_command
from grpo_tui.profile.model import Profile
from grpo_tui.services.base import ClusterPlan, Launch, NeedCondition, Place, Probe, RestartPolicy

NODES, BROKER = "ray", "machines"
MODULE = "grpo_tui.supervisor.placement.ray_cluster"
READY_NODES, READY_BROKER = "cluster is ready at", "services are placed on the cluster"
"""Lines of the two processes."""
TOKEN_FILE = "ray.token"
"""Of a private cluster, in the run folder, readable by its owner only."""
CERTIFICATE_FILE, KEY_FILE = "ray.crt", "ray.key"
"""Likewise."""
READY_WITHIN_S = 300.0
STOP_GRACE_S = 30.0
"""For the broker: the agents of all machines end what is left there."""
LOG_BYTES = 4 << 20
"""Of each log of Ray's, and of the one before: its agents log a request that is no HTTP with 9 kB, whoever sent it."""


def with_cluster(launches: Sequence[Launch], profile: Profile, place: Place) -> tuple[list[Launch], ClusterPlan | None]:
    """The launches of a plan with those of its cluster; without a cluster, as they are."""
    table = profile.cluster
    if table.kind == "local":
        return list(launches), None
    plan = ClusterPlan(address=table.address, machines=table.machines, devices_per_machine=table.devices_per_machine)
    is_private = table.address is None
    own = [_launch(NODES, "nodes", READY_NODES, place, {}, is_private=True)] if is_private else []
    needs = {NODES: NeedCondition.READY} if is_private else {}
    broker = _launch(BROKER, "broker", READY_BROKER, place, needs, is_private=is_private)
    placed = [_placed(launch, profile) if _is_placed(launch.name, profile) else launch for launch in launches]
    return [*own, broker, *placed], plan


def _is_placed(name: str, profile: Profile) -> bool:
    return bool(profile.services[name].num_devices or _beside(name, profile))


def _beside(name: str, profile: Profile) -> tuple[str, ...]:
    """The services on whose machines a service has a part, in the order of their kinds."""
    service = profile.services[name]
    return tuple(
        other
        for kind in service.beside_kinds
        for other, each in profile.services.items()
        if getattr(each, "kind", "") == kind and getattr(each, "policy", None) == getattr(service, "policy", None)
    )


def num_machines_for(num_devices: int, room: Sequence[int]) -> int:
    """The fewest machines that take equal shares of so many devices, of machines with so much room; 0 if none do.

    >>> num_machines_for(16, [8, 8, 4, 4, 4])
    2
    """
    shares = [(count, num_devices // count) for count in range(1, len(room) + 1) if num_devices % count == 0]
    return next((count for count, share in shares if sum(each >= share for each in room) >= count), 0)


def planned_machines(launch: Launch, cluster: ClusterPlan | None) -> int | None:
    """On how many machines a service is that takes devices; None where that depends on the machines of a cluster."""
    if launch.num_machines is not None or not launch.part_arguments or launch.num_devices == 1 or cluster is None:
        return launch.num_machines or 1
    if cluster.address is not None:
        return None
    return num_machines_for(launch.num_devices, [cluster.devices_per_machine] * cluster.machines)


def _placed(launch: Launch, profile: Profile) -> Launch:
    """A service that waits for its machine; its GPUs are numbered there."""
    count = profile.services[launch.name].num_devices or 0
    needs = {BROKER: NeedCondition.READY, **launch.needs}
    beside = _beside(launch.name, profile)
    return dataclasses.replace(launch, num_devices=count, beside=beside, needs=needs, prepares=False)


def _launch(
    name: str, what: str, ready: str, place: Place, needs: Mapping[str, NeedCondition], *, is_private: bool
) -> Launch:
    return Launch(
        name=name,
        kind="cluster",
        argv=module_command(MODULE, what, str(place.run_folder), python=place.python),
        env=_environment(place, is_private=is_private),
        cwd=Path("/"),  # Ray puts its driver's working directory first on the path of modules of all its workers
        needs=needs,
        ready=Probe(log=re.escape(ready), within_s=READY_WITHIN_S),
        live=None,
        restart=RestartPolicy.ON_FAILURE,
        restart_unhealthy=False,
        max_restarts=5,
        restart_window_s=600.0,
        backoff_s=0.5,
        stop_grace_s=STOP_GRACE_S,
        stop_signal=signal.SIGTERM,
        ports=(),
        gpus=(),
        ends_run=False,
        unfinished="",
        followers=(BROKER,) if what == "nodes" else (),
    )


def _environment(place: Place, *, is_private: bool) -> dict[str, str]:
    """Variables that Ray reads when it is imported."""
    own = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # it would kill services when the memory of the machine is short
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_kill_child_processes_on_worker_exit": "0",  # an agent outlives its actor
        "GRPC_VERBOSITY": "NONE",  # else Ray's logs get a line for each refused handshake, whoever sent it
    }
    if is_private:
        own |= {
            "RAY_ROTATION_MAX_BYTES": str(LOG_BYTES),
            "RAY_ROTATION_BACKUP_COUNT": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(place.run_folder / TOKEN_FILE),
            "RAY_USE_TLS": "1",  # both sides show the certificate: some requests end a process before it asks a token
            "RAY_TLS_SERVER_CERT": str(place.run_folder / CERTIFICATE_FILE),
            "RAY_TLS_SERVER_KEY": str(place.run_folder / KEY_FILE),
            "RAY_TLS_CA_CERT": str(place.run_folder / CERTIFICATE_FILE),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else a driver takes 127.0.0.1 for the address of this machine
        }
    return own


def check_cluster(profile: Profile) -> Iterator[str]:
    """What a profile with a cluster cannot have; `dotted.key: what (hint)`."""
    table = profile.cluster
    if table.kind == "local":
        if table.address is not None:
            yield 'cluster.address: has no effect with kind = "local": set kind = "ray", or leave it out'
        for name, service in profile.services.items():
            if service.beside_kinds:
                yield (
                    f"services.{name}.every_machine: has no effect without a cluster: set cluster.kind to ray, or "
                    "leave it out"
                )
        return
    for name in (NODES, BROKER):
        if name in profile.services:
            yield f"services.{name}: is the name of a service of the cluster: rename it"
    for name, service in profile.services.items():
        if service.num_devices and service.gpus is not None:
            yield f"services.{name}.gpus: GPUs are numbered on each machine of a cluster: keep num_devices alone"
    follow = [name for name, service in profile.services.items() if service.beside_kinds]
    placed = [name for name, service in profile.services.items() if service.num_devices and name not in follow]
    if not placed:
        yield 'cluster.kind: "ray" places services that set num_devices, and none does'
    for name in placed:
        yield from _check_machines(name, profile)
    for name in follow:
        yield from _check_follows(name, profile)
    if table.address is None:
        most = table.devices_per_machine
        wanted = sum(profile.services[name].num_devices or 0 for name in placed)
        if wanted > most * table.machines:
            yield (
                f"cluster.machines: {table.machines} with {most} devices each, but services take {wanted}: raise "
                "machines or devices_per_machine"
            )
    mode = getattr(profile.bridge, "mode", "")
    if table.address is not None and (why := getattr(profile.bridge, "one_machine_because", None)) and not follow:
        has_services = getattr(profile.bridge, "has_parameter_services", False)
        hint = "give a service of kind parameters every_machine = true" if has_services else 'use "none" or "lora_only"'
        yield f"bridge.mode: {mode!r} {why}, and a cluster may have them on several machines: {hint}"
    if table.address is not None and (why := getattr(profile.bridge, "placed_because", None)):
        for name, service in profile.services.items():
            if getattr(service, "kind", "") in ("trainer", "inference") and not service.num_devices:
                yield f"services.{name}.num_devices: bridge.mode {mode!r} {why}: set it, so that the service is placed"
    if getattr(profile.bridge, "is_of_one_device", False):
        yield (
            f"bridge.mode: {mode!r} shares memory between services on one GPU, and "
            'a cluster gives each its own: use "none" or "lora_only"'
        )


def _check_machines(name: str, profile: Profile) -> Iterator[str]:
    """Whether a service can be on as many machines as it takes."""
    service, table, at = profile.services[name], profile.cluster, f"services.{name}"
    count, most, why = service.num_devices or 0, table.devices_per_machine, service.one_machine_because
    is_private, asked = table.address is None, service.num_machines
    for key in service.chosen_by_cluster:
        yield f"{at}.{key}: {getattr(service, key)!r}, but the cluster chooses the machines: leave it out"
    if asked is not None:
        if why is not None:
            yield f"{at}.nodes: {asked}, but {why}: leave nodes out"
        if is_private and asked > table.machines:
            yield f"{at}.nodes: {asked}, but the cluster has cluster.machines = {table.machines}"
        if is_private and count > most * asked:
            yield (
                f"{at}.num_devices: {count}, but {asked} machines with cluster.devices_per_machine = {most} have "
                f"{most * asked}: lower it, or raise nodes"
            )
    elif is_private and count > most:
        if why is not None:
            yield f"{at}.num_devices: {count}, but a machine has cluster.devices_per_machine = {most}, and {why}"
        elif not num_machines_for(count, [most] * table.machines):
            fitting = [each for each in range(1, count) if num_machines_for(each, [most] * table.machines)]
            yield (
                f"{at}.num_devices: {count}, but no number of the {table.machines} machines with "
                f"cluster.devices_per_machine = {most} has equal shares of them: set {fitting[-1]}, or raise machines"
            )


def _check_follows(name: str, profile: Profile) -> Iterator[str]:
    """Whether a service can have a part on each machine of others."""
    service, at = profile.services[name], f"services.{name}"
    for key in service.chosen_by_cluster:
        yield f"{at}.{key}: {getattr(service, key)!r}, but with every_machine each machine has its own: leave it out"
    beside = _beside(name, profile)
    for kind in service.beside_kinds:
        if not any(getattr(profile.services[other], "kind", "") == kind for other in beside):
            yield f"{at}.every_machine: follows services of kind {kind} to their machines, and there is none: add one"
    for other in beside:
        if not profile.services[other].num_devices:
            yield f"services.{other}.num_devices: not set, and {at}.every_machine follows it to its machine: set it"
        if getattr(profile.services[other], "kind", "") == "inference" and _is_set(profile.services[other], "handover"):
            yield f"services.{other}.handover: with {at}.every_machine each machine has its own: leave it out"
    alike = [
        each
        for each, one in profile.services.items()
        if type(one) is type(service) and getattr(one, "policy", None) == getattr(service, "policy", None)
    ]
    if alike != [name]:
        both = next(each for each in alike if each != name)
        yield f"{at}.every_machine: gives each machine a service already: remove services.{both}"


def _is_set(service: object, key: str) -> bool:
    return getattr(service, key, None) is not None


def has_ray() -> bool:
    """Whether Ray is installed, with what makes the certificate of a private cluster."""
    return all(find_spec(module) is not None for module in ("ray", "cryptography"))
