"""Settings that a profile has once, passed on to the services that need them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_engine.config import RawTable, keys_of
from grpo_tui.profile.devices import is_on_cluster
from grpo_tui.profile.replicas import with_replicas
from grpo_tui.services.kinds import service_class


def pass_on(table: RawTable) -> tuple[RawTable, dict[str, str]]:
    """Pass settings that the profile has once to the services that need them, unless a service sets its own.

    Returns the table, and by the key of each setting that was passed on, the key that it was written under.
    """
    services = table.get("services")
    if not isinstance(services, dict):
        return table, {}
    shared = {policy: _shared_settings(table, policy) for policy in {_policy_of(each) for each in services.values()}}
    passed: RawTable = {}
    sources: dict[str, str] = {}
    for name, service in services.items():
        if not isinstance(service, dict):
            passed[name] = service
            continue
        kind = str(service.get("kind"))
        of_kind = shared[_policy_of(service)]
        same = {key: source for key, source in of_kind.same.get(kind, {}).items() if key not in service}
        values = {key: value for key, source in same.items() if (value := _at(table, source)) is not None}
        sources |= {f"services.{name}.{key}": same[key] for key in values}
        own = of_kind.made.get(kind, {})
        if kind == "environment" and isinstance(service.get("opponent"), str):
            own = {**own, **_opponent_settings(table, service["opponent"])}
        made = {key: value for key, value in own.items() if not _is_stated(key, service)}
        passed[name] = {**values, **made, **service}
    return {**table, "services": passed}, sources


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """Settings that services of one policy are given, by kind of service."""

    same: Mapping[str, Mapping[str, str]]
    """Settings, and the keys that their values are written under."""
    made: Mapping[str, RawTable]
    """Settings with their values, as addresses of other services."""


def _shared_settings(table: RawTable, policy: str | None) -> _Shared:
    bridge = table_at(table, "bridge")
    mode = str(bridge.get("mode", ""))
    api, trainer = (_only(table, kind, policy) for kind in ("rollout_api", "trainer"))
    trained_mode = str(table_at(trainer or {}, "bridge").get("mode", mode))
    servers = _servers_of_the_policy(table, trainer, policy)
    server_urls = [_url(server, "inference") for server in servers.values()]
    reference_urls = [_url(each, "reference") for each in _of_kind(table, "reference", policy).values()]
    parameters = _of_kind(table, "parameters", policy)
    parameter_urls = [_url(each, "parameters") for each in parameters.values()]
    is_on_machines = is_on_cluster(table) and any(each.get("every_machine") is True for each in parameters.values())
    name = next(iter(_of_kind(table, "trainer", policy)), "") if trainer is not None else ""
    of_reference = f"services.{name}.reference_model" if trainer and trainer.get("reference_model") else "model.name"
    share, sharing = "gpu_memory_utilization", [n for n, each in servers.items() if _share_a_gpu(bridge, each, trainer)]
    weights = {"model_name": "model.name", "dtype": "model.dtype", "device": "model.device"}
    urls = {
        **({"rollout_server_url": _url(api, "rollout_api")} if api is not None else {}),
        **({"inference_urls": server_urls} if servers else {}),
    }
    return _Shared(
        same={
            "inference": {**weights, "max_model_len": "model.max_model_len"},
            "reference": {**weights, "model_name": of_reference, "max_model_len": "model.max_model_len"},
            "environment": {"model_name": "model.name"},
            "atropos_environment": {"model_name": "model.name"},
            "trainer": {
                **weights,
                "bridge": "bridge",
                "seq_len": "model.max_model_len",
                **({"vllm_port": f"services.{next(iter(servers))}.port"} if len(servers) == 1 else {}),
                # On the same GPU, the trainer's memory plan subtracts what inference uses.
                **({share: f"services.{sharing[0]}.{share}"} if sharing else {}),
            },
        },
        made={
            "inference": {
                **_server_settings(mode if policy is None else trained_mode),
                **({"awaits_handover": True} if is_on_machines else {}),
            },
            "parameters": {"server_urls": server_urls} if servers else {},
            "environment": urls,
            "atropos_environment": urls,
            "trainer": {
                **({"atropos_url": _url(api, "rollout_api")} if api is not None else {}),
                **({"inference_service": list(servers)} if servers else {}),
                **({"reference_urls": reference_urls} if reference_urls else {}),
                **({"parameter_urls": parameter_urls} if parameter_urls else {}),
                **({"server_urls": server_urls} if len(servers) > 1 and _updates_many_servers(trained_mode) else {}),
            },
        },
    )


def _opponent_settings(table: RawTable, policy: str) -> RawTable:
    """Where another policy of the profile is asked, with the tokenizer of its model, and where it is trained."""
    api, trainer = (_only(table, kind, policy) for kind in ("rollout_api", "trainer"))
    servers = _servers_of_the_policy(table, trainer, policy)
    models = {each["model_name"] for each in servers.values() if isinstance(each.get("model_name"), str)}
    return {
        **({"opponent_urls": [_url(server, "inference") for server in servers.values()]} if servers else {}),
        **({"opponent_model_name": models.pop()} if len(models) == 1 else {}),
        **({"opponent_rollout_server_url": _url(api, "rollout_api")} if api is not None else {}),
    }


def _at(table: RawTable, dotted: str) -> Any:
    """The value of a dotted key; None where there is none, or an empty table."""
    *tables, last = dotted.split(".")
    for key in tables:
        table = table_at(table, key)
    return table.get(last) or None if isinstance(table.get(last), dict) else table.get(last)


def passed_on(table: RawTable) -> frozenset[str]:
    """The dotted keys of all settings that services of a table get from elsewhere in it."""
    table = with_replicas(table).table
    stated = table_at(table, "services")
    return frozenset(
        f"services.{name}.{key}"
        for name, service in table_at(pass_on(table)[0], "services").items()
        for key in service
        if key not in stated[name]
    )


def table_at(table: RawTable, key: str) -> RawTable:
    """The table under a key; an empty one where there is none."""
    value = table.get(key)
    return value if isinstance(value, dict) else {}


def _policy_of(service: object) -> str | None:
    """The policy that a service belongs to."""
    policy = service.get("policy") if isinstance(service, dict) else None
    return policy if isinstance(policy, str) else None


def _of_kind(table: RawTable, kind: str, policy: str | None) -> dict[str, RawTable]:
    """The services of a kind and a policy, by name."""
    return {
        name: each
        for name, each in table_at(table, "services").items()
        if isinstance(each, dict) and each.get("kind") == kind and _policy_of(each) == policy
    }


def _only(table: RawTable, kind: str, policy: str | None) -> RawTable | None:
    """The only service of a kind and a policy; None when there is none or more than one."""
    found = [*_of_kind(table, kind, policy).values()]
    return found[0] if len(found) == 1 else None


def _servers_of_the_policy(table: RawTable, trainer: RawTable | None, policy: str | None) -> dict[str, RawTable]:
    """The inference services by name: the only one, or of several those of the model that is trained."""
    servers = _of_kind(table, "inference", policy)
    model = table_at(table, "model").get("name")
    trained = model if trainer is None else trainer.get("model_name", model)
    same = {name: each for name, each in servers.items() if each.get("model_name", model) == trained}
    return servers if len(servers) == 1 else same


def _is_stated(key: str, service: RawTable) -> bool:
    """Whether a service states a setting itself, under any of its names; a port of a server, instead of all URLs."""
    if key == "server_urls":
        return "vllm_port" in service
    field = service_class(str(service["kind"])).model_fields.get(key)
    return field is not None and any(name in service for name in keys_of(key, field))


def _updates_many_servers(mode: str) -> bool:
    """Whether a trainer can send its weights to several servers."""
    from grpo_engine.bridges import BY_MODE

    return mode in BY_MODE and BY_MODE[mode].updates_many_servers


def _is_of_one_device(mode: str) -> bool:
    """Whether a mode needs trainer and server on one device."""
    if not mode:
        return False
    from grpo_engine.bridges import BY_MODE

    return mode in BY_MODE and BY_MODE[mode].is_of_one_device


def _server_settings(mode: str) -> RawTable:
    """What a mode needs of the server; bridges are imported only for a profile that has one."""
    if not mode:
        return {}
    from grpo_engine.bridges import BY_MODE

    return dict(BY_MODE[mode].server_settings) if mode in BY_MODE else {}


def _share_a_gpu(bridge: RawTable, inference: RawTable | None, trainer: RawTable | None) -> bool:
    """Whether inference and a rank of the trainer use one GPU: always if the mode needs it, else if both name it."""
    gpus = [service.get("gpus") for service in (inference, trainer) if service is not None]
    are_together = _is_of_one_device(str(bridge.get("mode", "")))
    first, *others = [{*map(str, each)} for each in gpus if isinstance(each, list)] or [set()]
    return are_together or any(first & other for other in others)


def _url(service: RawTable, kind: str) -> str:
    fields = service_class(kind).model_fields
    return f"http://{service.get('host', fields['host'].default)}:{service.get('port', fields['port'].default)}"
