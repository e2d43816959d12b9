"""Replicas of an inference server or a reference: one table of a profile, and a service of its own for each. Pure.

The first keeps the name of the service; the next are `vllm-2`, `vllm-3`, … on the ports and GPUs that follow. What
names the service elsewhere in the profile (`needs`, `restart_with`, hooks) means all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_engine.config import Fault, RawTable
from grpo_tui.profile.devices import is_on_cluster, with_devices
from grpo_tui.services.kinds import service_class

KINDS = ("inference", "reference")
"""Of services that can have replicas."""
MOST = 256
"""Replicas of one service."""
MOST_SERVICES = 4096
"""Of a profile, replicas included; a state of more is not read either."""
_OF_NAMES = frozenset({"needs", "restart_with", "services", "inference_service"})
"""Settings of services and hooks that name services."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A profile whose replicas are services."""

    table: RawTable
    first: Mapping[str, str] = field(default_factory=dict)
    """The service, as it is written, of each replica after the first."""
    faults: tuple[Fault, ...] = ()
    """Why a service was left as it is written."""


def with_replicas(table: RawTable) -> Spread:
    """A profile in which each replica is a service, and services with `num_devices` name their GPUs."""
    table, of_devices = with_devices(table, shares_weights=_shares_weights(table))
    spread = _spread(table)
    return replace(spread, faults=(*of_devices, *spread.faults))


def num_services(table: RawTable) -> int:
    """Services of a profile, each replica for one."""
    services = table.get("services")
    return sum(map(_count, services.values())) if isinstance(services, dict) else 0


def _shares_weights(table: RawTable) -> bool:
    """Whether the mode of a profile needs trainer and server on the same GPUs; bridges are imported only where this
    matters."""
    bridge, services = table.get("bridge"), table.get("services")
    tables = services.values() if isinstance(services, dict) else ()
    if not isinstance(bridge, dict) or not any(isinstance(each, dict) and "num_devices" in each for each in tables):
        return False
    from grpo_engine.bridges import BY_MODE

    mode = BY_MODE.get(str(bridge.get("mode")))
    return mode is not None and mode.is_of_one_device


def _spread(table: RawTable) -> Spread:
    services, model = table.get("services"), table.get("model")
    if not isinstance(services, dict):
        return Spread(table=table)
    faults: list[Fault] = []
    names: dict[str, list[str]] = {}
    spread: RawTable = {}
    for name, service in services.items():
        count = _count(service)
        if count == 1:
            spread[name] = service
            continue
        names[name] = [_name(name, number) for number in range(1, count + 1)]
        device = service.get("device", model.get("device", "auto") if isinstance(model, dict) else "auto")
        found = _faults(name, service, services, str(device), on_cluster=is_on_cluster(table))
        faults += found
        replicas = [service] if found else [_replica(service, index) for index in range(count)]
        spread |= dict(zip(names[name], replicas, strict=False))
        names[name] = names[name][: len(replicas)]
    if not names:
        return Spread(table=table)
    spread = {
        name: _naming_all(service, names) if isinstance(service, dict) else service for name, service in spread.items()
    }
    hooks = table.get("hooks")
    if isinstance(hooks, list):
        hooks = [_naming_all(hook, names) if isinstance(hook, dict) else hook for hook in hooks]
    return Spread(
        table={**table, "services": spread, **({} if hooks is None else {"hooks": hooks})},
        first={other: first for first, all_ in names.items() for other in all_[1:]},
        faults=tuple(faults),
    )


def _count(service: Any) -> int:
    """How many servers a table asks for; 1 where its number is no valid one, which is refused elsewhere."""
    if not isinstance(service, dict) or service.get("kind") not in KINDS:
        return 1
    count = service.get("replicas")
    if count is None and service["kind"] == "reference":  # each has one device
        gpus = service.get("gpus")
        count = len(gpus) if isinstance(gpus, list) else service.get("num_devices")
    return count if isinstance(count, int) and not isinstance(count, bool) and 1 < count <= MOST else 1


def _replica(service: RawTable, index: int) -> RawTable:
    """The table of one replica."""
    port = service.get("port", service_class(service["kind"]).model_fields["port"].default)
    own: RawTable = {"port": port + index if isinstance(port, int) and port else port}  # 0: each any free one
    if isinstance(devices := service.get("num_devices"), int):
        own["num_devices"] = max(devices // _count(service), 1)  # `gpus` wins
    if gpus := service.get("gpus"):
        size = _gpus_each(service)
        own["gpus"] = gpus[index * size : (index + 1) * size]
    return {key: value for key, value in {**service, **own}.items() if key != "replicas"}


def _gpus_each(service: RawTable) -> int:
    size = service.get("tensor_parallel_size", 1)
    return size if isinstance(size, int) and size > 0 else 1


def _faults(name: str, service: RawTable, services: RawTable, device: str, *, on_cluster: bool) -> list[Fault]:
    at, count, each, gpus = f"services.{name}", _count(service), _gpus_each(service), service.get("gpus")
    faults = [
        Fault(f"{at}.replicas", f"replica {number} is {other!r}, the name of another service: rename that one")
        for number in range(2, count + 1)
        if (other := _name(name, number)) in services
    ]
    if isinstance(gpus, list) and gpus and (len(gpus) != count * each or len({*map(repr, gpus)}) < len(gpus)):
        wanted = f"{count} replicas × tensor_parallel_size {each} take {count * each} different GPUs"
        faults.append(Fault(f"{at}.gpus", f"{gpus}, but {wanted}: name as many, or change replicas"))
    is_on_gpu = device.startswith("cuda") or (device == "auto" and service.get("engine", "vllm") == "vllm")
    devices = service.get("num_devices")
    if "replicas" in service and isinstance(devices, int) and devices % count:
        faults.append(Fault(f"{at}.num_devices", f"{devices}, which {count} replicas cannot share: set a multiple"))
    if gpus is None and is_on_gpu and not (on_cluster and devices):
        example = list(range(count * each))
        faults.append(
            Fault(f"{at}.gpus", f"not set, so all {count} replicas would take GPU 0: name each, as {example}")
        )
    return faults


def _name(service: str, number: int) -> str:
    return service if number == 1 else f"{service}-{number}"


def _naming_all(table: RawTable, names: Mapping[str, list[str]]) -> RawTable:
    """A service or hook that names all replicas where it names their service."""
    return {key: _all_of(value, names) if key in _OF_NAMES else value for key, value in table.items()}


def _all_of(value: Any, names: Mapping[str, list[str]]) -> Any:
    match value:
        case str():
            return names.get(value, value)
        case list() if all(isinstance(each, str) for each in value):
            return [other for name in dict.fromkeys(value) for other in names.get(name, [name])]
        case dict():
            return {other: condition for name, condition in value.items() for other in names.get(name, [name])}
        case _:
            return value
