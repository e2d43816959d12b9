"""Checks of a trainer of several ranks on this machine: its GPUs, what connects them, its port, its NCCL variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

from grpo_engine.diagnosis.finding import Finding
from grpo_tui.profile.model import Profile
from grpo_tui.profile.plan import Plan
from grpo_tui.services.base import Launch
from grpo_tui.services.inference import Inference
from grpo_tui.services.trainer import Trainer

Links = Mapping[tuple[int, int], str]
"""What connects two GPUs, by their numbers, the lower one first; `NVLink` where it is that."""
NVLINK = "NVLink"
NCCL = "NCCL_"
HARMLESS = ("NCCL_DEBUG",)
"""Beginnings of variables that may differ: what is logged."""


def examine_ranks(
    profile: Profile,
    plan: Plan,
    gpus: Sequence[int],
    links: Links,
    port_holders: Callable[[Sequence[int]], Sequence[str]],
) -> Iterator[Finding]:
    """Findings about each trainer of several ranks, and about the group that a trainer shares with its servers.

    Args:
        gpus: of this machine; empty where there is none, which is a finding of another check.
        port_holders: processes that listen on these ports, one sentence each.
    """
    for launch in plan.launches:
        trainer = profile.services.get(launch.name)
        if not isinstance(trainer, Trainer):
            continue
        if trainer.num_ranks > 1:
            if gpus and trainer.device != "cpu":
                yield from _gpus(launch, trainer, gpus, links)
                yield from _shared_gpus(launch, trainer, profile, plan)
            yield from _port(launch, trainer, plan, port_holders)
        yield from _variables(launch, profile, plan)


def _gpus(launch: Launch, trainer: Trainer, gpus: Sequence[int], links: Links) -> Iterator[Finding]:
    taken = launch.gpus or tuple(sorted(gpus)[: launch.num_ranks])
    if launch.num_ranks > len(gpus):
        yield Finding(
            id="ranks",
            severity="error",
            text=f"{launch.name}: {launch.num_ranks} ranks need a GPU each, and this machine has {len(gpus)}",
            hint=f"--set services.{launch.name}.gpus=[…]",
        )
        return
    others = {pair: links[pair] for pair in combinations(sorted(taken), 2) if links.get(pair, NVLINK) != NVLINK}
    ranks = ", ".join(f"rank {rank} on GPU {gpu}" for rank, gpu in enumerate(taken))
    if not others:
        is_known = links and len(taken) > 1
        yield Finding(
            id="ranks", severity="ok", text=f"{launch.name}: {ranks}" + (", connected by NVLink" if is_known else "")
        )
        return
    (first, second), how = next(iter(others.items()))
    more = "" if len(others) == 1 else f", and {len(others) - 1} more pairs like it"
    yield Finding(
        id="ranks",
        severity="warning",
        text=f"{launch.name}: {ranks}; GPUs {first} and {second} are connected by {how}, not by NVLink{more}",
        hint="every layer is summed over it, twice a pass: choose GPUs that NVLink connects (`nvidia-smi topo -m`)"
        if trainer.splits_model
        else "every layer is gathered over it: choose GPUs that NVLink connects (`nvidia-smi topo -m`), or "
        "--sharding-strategy shard_grad_op, which gathers half as often",
    )


def _shared_gpus(launch: Launch, trainer: Trainer, profile: Profile, plan: Plan) -> Iterator[Finding]:
    """Other services on the GPU of a rank."""
    for other in plan.launches:
        service = profile.services.get(other.name)
        shares_weights = trainer.splits_model and isinstance(service, Inference) and service.shared_weights
        if other.name == launch.name or shares_weights:
            continue
        shared = sorted(set(launch.gpus) & set(other.gpus))
        if shared:
            where = f"GPU {', '.join(map(str, shared))} is that of a rank of {launch.name} and of {other.name}"
        elif isinstance(service, Inference) and service.device != "cpu" and service.gpus is None:
            where = f"{other.name} names no GPU, and takes the first, as rank 0 of {launch.name} may"
        else:
            continue
        yield Finding(
            id="ranks",
            severity="warning",
            text=f"{where}: all ranks wait for the one that shares its GPU",
            hint=f"--set services.{other.name}.gpus=[…] with a GPU of its own",
        )


def _port(
    launch: Launch, trainer: Trainer, plan: Plan, port_holders: Callable[[Sequence[int]], Sequence[str]]
) -> Iterator[Finding]:
    """The port where ranks of several machines meet; those of one machine meet by a file."""
    if trainer.nodes == 1 or launch.num_devices:  # in a cluster a free one is chosen at each start
        return
    port, key = trainer.master_port, f"services.{launch.name}.master_port"
    same = [other.name for other in plan.launches if port in other.ports]
    holders = list(port_holders([port])) if trainer.node_rank == 0 and not same else []
    if same:
        holders = [f"port {port} is also that of {' and '.join(same)}"]
    for words in holders:
        yield Finding(id="ranks", severity="error", text=f"{key}: {words}", hint=f"--set {key}=… with a free port")


def _variables(launch: Launch, profile: Profile, plan: Plan) -> Iterator[Finding]:
    """NCCL's variables of a trainer and of the servers that receive weights in one group with it."""
    for other in plan.launches:
        service = profile.services.get(other.name)
        if not isinstance(service, Inference) or not service.receives_weights:
            continue
        names = sorted({name for name in {**launch.env, **other.env} if name.startswith(NCCL)})
        for name in names:
            ours, theirs = launch.env.get(name), other.env.get(name)
            if ours == theirs or name.startswith(HARMLESS):
                continue
            yield Finding(
                id="ranks",
                severity="warning",
                text=f"{name} is {_value(ours)} for {launch.name} and {_value(theirs)} for {other.name}: both are in "
                "one NCCL group, which may hang",
                hint="set it in env of both, or in neither",
            )


def _value(value: str | None) -> str:
    return "not set" if value is None else repr(value)
