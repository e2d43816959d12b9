"""Makes the launch plan: which services start, in which order, with which argv, ports and GPUs. Reads env files.

The plan and its file format are in `plan_file`, which imports no kind of service.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Collection
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from grpo_engine.wire.secrets import masked_argv, masked_settings
from grpo_tui.profile.cluster import planned_machines, with_cluster
from grpo_tui.profile.loaded import LoadedProfile, resolved
from grpo_tui.profile.model import Profile
from grpo_tui.profile.mps import MachineFacts, with_mps
from grpo_tui.profile.plan_file import Plan, shown_command, shown_env
from grpo_tui.services.base import Launch, Place
from grpo_tui.services.trainer import Trainer

__all__ = ["Plan", "describe", "make_plan", "plan_text"]


def make_plan(
    loaded: LoadedProfile,
    *,
    run_folder: Path,
    python: str,
    take_ports: bool = False,
    tags: tuple[str, ...] = (),
    machine: MachineFacts | None = None,
) -> Plan:
    """Make the plan of a profile; `run_folder` need not exist. Without `machine` it is for this one.

    Raises:
        ConfigError: a file of `env_files` is missing or cannot be read.
    """
    place = Place(
        profile_folder=loaded.path.parent.resolve(),
        run_folder=Path(os.path.abspath(run_folder)),
        python=python,
    )
    services = loaded.profile.services
    order = TopologicalSorter({name: list(service.needs) for name, service in services.items()}).static_order()
    position = {name: index for index, name in enumerate(services)}
    depth: dict[str, int] = {}
    for name in order:
        depth[name] = 1 + max((depth[needed] for needed in services[name].needs), default=-1)
    names = sorted(services, key=lambda name: (depth[name], position[name]))
    launches = [services[name].launch(name, place) for name in names]
    kinds = {launch.kind for launch in launches}
    launches = [
        dataclasses.replace(
            _with_followers(launch, loaded.profile, kinds), replica_of=loaded.replica_of.get(launch.name)
        )
        for launch in launches
    ]
    launches, cluster = with_cluster(launches, loaded.profile, place)
    launches, notes = with_mps(launches, loaded.profile, place, machine or MachineFacts.of_this())
    return Plan(
        profile_name=loaded.name,
        profile_folder=place.profile_folder,
        launches=tuple(launches),
        hooks=loaded.profile.hooks,
        take_ports=take_ports,
        profile_file=loaded.file,
        moved_ports=loaded.moved_ports,
        chosen_ports=loaded.chosen_ports,
        tags=tags,
        notes=notes,
        cluster=cluster,
    )


def _with_followers(launch: Launch, profile: Profile, kinds: Collection[str]) -> Launch:
    """A launch with the services to restart after it, and what the bridge does instead."""
    followers = tuple(name for name, service in profile.services.items() if launch.name in service.restart_with)
    # Only with our trainer: a bridge handles a restarted server itself, and says how.
    has_bridge = launch.kind == "inference" and "trainer" in kinds
    message = getattr(profile.bridge, "after_server_restart", None) if has_bridge else None
    return dataclasses.replace(launch, followers=followers, after_restart=message)


def describe(plan: Plan, loaded: LoadedProfile) -> dict[str, Any]:
    """The plan as `grpo-tui plan --json` prints it; secrets are masked."""
    return {
        "profile": plan.profile_name,
        "file": str(loaded.path),
        "model": masked_settings(loaded.profile.model.model_dump(mode="json")) if loaded.profile.model else None,
        "bridge": masked_settings(loaded.profile.bridge.model_dump(mode="json")) if loaded.profile.bridge else None,
        "services": [
            {
                "name": launch.name,
                "kind": launch.kind,
                "replica_of": launch.replica_of,
                "order": index,
                "needs": {name: str(condition) for name, condition in launch.needs.items()},
                "argv": masked_argv(launch.argv),
                "command": shlex.join(masked_argv(launch.argv)),
                "env": shown_env(launch),
                "cwd": str(launch.cwd),
                "ports": list(launch.ports),
                "gpus": list(launch.gpus),
                "num_devices": launch.num_devices,
                "beside": list(launch.beside),
                "num_machines": planned_machines(launch, plan.cluster) if launch.num_devices else None,
                "ranks": [{"rank": rank, "gpu": gpu} for rank, gpu in enumerate(launch.rank_gpus)],
                "access": launch.access,
                "ready": masked_settings(launch.ready.model_dump(mode="json", exclude_none=True))
                if launch.ready
                else None,
                "restart": str(launch.restart),
                "stop_grace_s": launch.stop_grace_s,
            }
            for index, launch in enumerate(plan.launches, start=1)
        ],
        "notes": list(plan.notes),
        "resolved": masked_settings(resolved(loaded)),
    }


def plan_text(plan: Plan, loaded: LoadedProfile) -> str:
    """Every service with its needs, ports, GPUs, environment, and a command that can be pasted; secrets are masked."""
    rows = [f"{plan.profile_name}  {loaded.profile.description}".rstrip()]
    for index, launch in enumerate(plan.launches, start=1):
        needs = ", ".join(f"{name} {condition}" for name, condition in launch.needs.items())
        ports = " ".join(str(port) for port in launch.ports)
        gpus = ",".join(str(gpu) for gpu in launch.gpus)
        facts = [
            f"after {needs}" if needs else "at once",
            f"port {ports}" if ports else "",
            f"GPU {gpus}" if gpus else "",
            _devices(launch, plan),
            _sequences(launch, loaded),
        ]
        rows.append(f"\n{index}. {launch.name} ({launch.kind}): {' · '.join(fact for fact in facts if fact)}")
        rows += [f"   {launch.access}"] if launch.access else []
        rows += [f"   {_ranks(launch, planned_machines(launch, plan.cluster))}"] if launch.rank_gpus else []
        rows += [f"   {variable}={shlex.quote(value)}" for variable, value in shown_env(launch).items()]
        rows += [f"   {variable}=$TMPDIR/{folder}" for variable, folder in launch.env_in_temporary.items()]
        rows.append(f"   {shown_command(launch)}")
    rows += [f"\n{note}" for note in plan.notes]
    return "\n".join(rows)


def _sequences(launch: Launch, loaded: LoadedProfile) -> str:
    """How much a trainer trains on at a time, which is the product of two settings."""
    service = loaded.profile.services.get(launch.name)
    return f"{service.sequences_per_batch:,} sequences a step" if isinstance(service, Trainer) else ""


def _devices(launch: Launch, plan: Plan) -> str:
    """What a service takes of a cluster."""
    if launch.beside:
        return f"a part on each machine of {', '.join(launch.beside)}"
    if not launch.num_devices:
        return ""
    count = planned_machines(launch, plan.cluster)
    devices = f"{launch.num_devices} device{'' if launch.num_devices == 1 else 's'}"
    if count == 1:
        return f"{devices} of a machine of the cluster"
    if count is None:
        return f"{devices} of the cluster, on one machine or on the fewest with equal shares of them"
    return f"{devices} on {count} machines of the cluster, {launch.num_devices // count} of each"


def _ranks(launch: Launch, num_machines: int | None) -> str:
    """The ranks with their GPUs, and how to see the memory of each: counting it needs torch, which a plan does not."""
    if not launch.num_devices:
        places = ["CPU" if gpu is None else f"GPU {gpu}" for gpu in launch.rank_gpus]
        where = ", ".join(f"rank {rank} on {place}" for rank, place in enumerate(places))
    elif num_machines is None or num_machines == 1:
        where = f"{_rank_names(0, launch.num_ranks)}, one on each device"
    else:
        each = launch.num_ranks // num_machines
        where = ", ".join(
            f"{_rank_names(each * number, each)} on machine {number + 1} of {num_machines}"
            for number in range(num_machines)
        )
    return f"{where}; memory of each: the command below with --dry-run"


def _rank_names(first: int, count: int) -> str:
    return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"
