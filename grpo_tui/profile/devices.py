"""`num_devices`: the GPUs of services that say how many they take. Pure, but for the inherited environment.

Contiguous slices of the visible GPUs, in the order trainer, inference, reference, others. A service that names its
`gpus` keeps them. On a cluster the broker chooses the devices when the run starts, so nothing is chosen here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from grpo_engine.config import Fault, RawTable
from grpo_tui.services.base import VISIBLE_DEVICES

ORDER = ("trainer", "inference", "reference")
SHARES = ("gpu_memory_share", "gpu_memory_gb", "gpu_share", "gpu_memory_utilization")
"""A service with one of these asks to share its GPUs."""


def with_devices(
    table: RawTable, *, shares_weights: bool, environment: Mapping[str, str] = os.environ
) -> tuple[RawTable, list[Fault]]:
    """A table in which services with `num_devices` name their GPUs, and what is wrong with it.

    Args:
        shares_weights: whether trainer and inference share memory, and so the same GPUs.
    """
    services = table.get("services")
    if not isinstance(services, dict):
        return table, []
    asking = {name: count for name, each in services.items() if (count := _asked(each)) and each.get("gpus") is None}
    if not asking or is_on_cluster(table):
        return table, []
    given = {
        name: [*each["gpus"]]
        for name, each in services.items()
        if isinstance(each, dict) and isinstance(each.get("gpus"), list)
    }
    visible = _visible(environment)
    faults: list[Fault] = []
    chosen: dict[str, list[int]] = {}
    first, of_trainer = 0, None
    for name in sorted(asking, key=lambda name: _place(services[name])):
        kind, count = services[name].get("kind"), asking[name]
        if shares_weights and kind == "inference" and of_trainer is not None:
            chosen[name] = of_trainer[:count]
            continue
        if visible is not None and first + count > len(visible):
            text = f"{count}, but {len(visible) - first} of the visible GPUs ({_words(visible)}) are left: lower it"
            faults.append(Fault(f"services.{name}.num_devices", text))
            continue
        chosen[name] = visible[first : first + count] if visible is not None else [*range(first, first + count)]
        first += count
        of_trainer = chosen[name] if kind == "trainer" else of_trainer
    for name, gpus in chosen.items():
        for other, named in given.items():
            both = sorted({*gpus} & {each for each in named if isinstance(each, int)})
            if both and not (_may_share(services[name]) and _may_share(services[other])):
                text = (
                    f"takes GPUs {_words(gpus)}, and services.{other}.gpus names {_words(both)} too: name other GPUs "
                    f"there, or let both share them ({SHARES[0]})"
                )
                faults.append(Fault(f"services.{name}.num_devices", text))
    if faults:
        return table, faults
    return {
        **table,
        "services": {
            name: {**each, "gpus": chosen[name]} if name in chosen else each for name, each in services.items()
        },
    }, []


def is_on_cluster(table: RawTable) -> bool:
    """Whether a profile asks for a cluster."""
    cluster = table.get("cluster")
    return isinstance(cluster, dict) and cluster.get("kind", "local") != "local"


def _asked(service: Any) -> int | None:
    count = service.get("num_devices") if isinstance(service, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None


def _place(service: RawTable) -> int:
    kind = service.get("kind")
    return ORDER.index(kind) if kind in ORDER else len(ORDER)


def _may_share(service: RawTable) -> bool:
    return any(key in service for key in SHARES)


def _visible(environment: Mapping[str, str]) -> list[int] | None:
    """The GPUs that the environment leaves visible; None where it leaves all, or names them by UUID."""
    listed = environment.get(VISIBLE_DEVICES)
    if listed is None or not all(word.strip().isdecimal() for word in listed.split(",") if word):
        return None
    return [int(word) for word in listed.split(",") if word.strip()]


def _words(gpus: list[int]) -> str:
    return ", ".join(map(str, gpus)) or "none"
