"""From a name or file to a checked `Profile`: find, read, override, pass on shared settings, validate.

Every fault is one line `file: dotted.key: what is wrong (what to do)`. Checks only what needs neither a process nor the
network; `doctor` examines the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_engine.config import (
    Fault,
    RawTable,
    apply_overrides,
    did_you_mean,
    faults_of,
    keys_of,
    read_table,
    with_absolute_paths,
)
from grpo_engine.errors import ConfigError
from grpo_tui.paths import available_profiles
from grpo_tui.profile.cluster import check_cluster, has_ray
from grpo_tui.profile.model import Profile, profile_type
from grpo_tui.profile.moved_ports import asks_for_ports, moved, with_chosen
from grpo_tui.profile.replicas import with_replicas
from grpo_tui.services.base import NeedCondition, RestartPolicy, Service
from grpo_tui.services.command import Command
from grpo_tui.services.kinds import service_class


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedProfile:
    """A checked profile and its file."""

    name: str
    path: Path
    profile: Profile
    written: RawTable
    """As people wrote it, overrides included, before shared settings are passed on: a run is resumed from it."""
    overrides: tuple[str, ...] = ()
    """What `--set` gave."""
    passed_on: frozenset[str] = frozenset()
    """Dotted keys of the settings that services have from the profile or from another service."""
    moved_ports: Mapping[int, int] = field(default_factory=dict)
    """Ports as written, with those that were put in their place."""
    chosen_ports: Mapping[str, int] = field(default_factory=dict)
    """The port of each service that has 0 for one: as it was chosen, or before a start the one that it tries first."""
    replica_of: Mapping[str, str] = field(default_factory=dict)
    """The service, as it is written, of each replica after the first."""

    @property
    def file(self) -> Path:
        """Its absolute path: what tells it from a profile of the same name in another folder."""
        return self.path.parent.resolve() / self.path.name

    @property
    def first_replicas(self) -> dict[str, Service]:
        """Its services, without the further replicas, which differ in ports and GPUs alone."""
        return {name: service for name, service in self.profile.services.items() if name not in self.replica_of}

    @property
    def ports(self) -> list[int]:
        """Every port that its services declare."""
        services = self.profile.services.values()
        own = [port for service in services if (port := getattr(service, "port", None)) is not None]
        return [*own, *(port for service in services for port in service.ports)]

    @property
    def stated_ports(self) -> list[int]:
        """Those of them that the profile states as numbers."""
        return [port for port in self.ports if port not in self.chosen_ports.values()]


def load(
    name_or_file: str,
    overrides: Sequence[str] = (),
    *,
    moved_ports: Mapping[int, int] | None = None,
    chosen_ports: Mapping[str, int] | None = None,
) -> LoadedProfile:
    """Load a profile by name or file, with `--set` overrides on top.

    Args:
        moved_ports: other ports to put in the place of those that the profile states.
        chosen_ports: the ports of services for which the profile states 0.

    Raises:
        ConfigError: not found, not readable, or invalid; one line per fault.
    """
    path = find(name_or_file)
    return load_table(read_table(path), path, overrides, moved_ports=moved_ports, chosen_ports=chosen_ports)


def load_table(
    table: RawTable,
    path: Path,
    overrides: Sequence[str] = (),
    *,
    moved_ports: Mapping[int, int] | None = None,
    chosen_ports: Mapping[str, int] | None = None,
) -> LoadedProfile:
    """Load a profile that was read from `path`, as `load` does.

    Raises:
        ConfigError: invalid; one line per fault.
    """
    of_file = _with_paths_from(path.parent.absolute(), table)
    from_here = partial(_with_paths_from, Path.cwd())
    written = _without_open_settings(from_here(apply_overrides(of_file, overrides, spell_out=from_here)))
    _refuse_misspelt_services(of_file, written)
    if moved_ports:
        written = with_replicas(written).table  # each has a port of its own to be moved
        written = moved(written, moved_ports, where=str(path), passed_on=_passed_on(written))
    chosen_ports = chosen_ports or {}
    profile, faults = _checked(written, chosen_ports)
    if profile is None or faults:
        in_file = _checked(of_file)[1] if overrides else faults
        lines = [written_at(fault, path, () if fault in in_file else overrides, or_all=True) for fault in faults]
        raise ConfigError("\n".join(lines))
    return LoadedProfile(
        name=path.stem,
        path=path,
        written=written,
        overrides=tuple(overrides),
        profile=profile,
        passed_on=_passed_on(written),
        moved_ports=moved_ports or {},
        chosen_ports=_with_ports(with_replicas(written).table, chosen_ports)[1],
        replica_of=with_replicas(written).first,
    )


def _without_open_settings(table: RawTable) -> RawTable:
    """A table in which a trainer with `vllm_port = 0` leaves its port to the inference services."""
    services = _table(table, "services")
    if not any(each.get("kind") == "inference" for each in services.values() if isinstance(each, dict)):
        return table
    return {
        **table,
        "services": {
            name: {key: value for key, value in each.items() if (key, value) != ("vllm_port", 0)}
            if isinstance(each, dict)
            else each
            for name, each in services.items()
        },
    }


def _with_ports(table: RawTable, chosen: Mapping[str, int]) -> tuple[RawTable, Mapping[str, int], Sequence[Fault]]:
    """A table of single services with a port in place of each 0, those ports by service, and what is wrong."""
    if not isinstance(table.get("services"), dict):
        return table, {}, ()
    if not asks_for_ports(table):
        return table, {}, ()
    found = with_chosen(table, chosen)
    return found.table, found.by_service, found.faults


def _checked(table: RawTable, chosen_ports: Mapping[str, int] | None = None) -> tuple[Profile | None, list[Fault]]:
    """A profile and what is wrong with it, by the keys as they were written; None where it cannot be read as one."""
    spread = with_replicas(_with_model_folders(Path.cwd(), _without_open_settings(table)))
    given, _, of_ports = _with_ports(spread.table, chosen_ports or {})
    spread = replace(spread, faults=(*spread.faults, *of_ports))
    table, sources = _pass_on(given)
    sources |= {f"services.{name}": f"services.{first}" for name, first in spread.first.items()}
    model = profile_type(table)
    try:
        profile = model.model_validate(table)
    except ValidationError as error:
        return None, [*spread.faults, *_by_source(faults_of(error, model), sources)]
    lines = (line for check in _checks_for(profile) for line in check(profile))
    return profile, [*spread.faults, *_at_first_replicas((Fault(*line.split(": ", 1)) for line in lines), spread.first)]


def _at_first_replicas(faults: Iterable[Fault], first: Mapping[str, str]) -> list[Fault]:
    """Faults of replicas by the key of the service that was written, with the name of the replica."""
    found = []
    for fault in faults:
        name = next((name for name in first if _is_inside(fault.key, f"services.{name}")), None)
        if name is not None:
            rest = fault.key.removeprefix(f"services.{name}")
            fault = Fault(f"services.{first[name]}{rest}", f"replica {name}: {fault.text}")
        found.append(fault)
    return found


def _by_source(faults: Iterable[Fault], sources: Mapping[str, str]) -> list[Fault]:
    """Faults of settings that were passed on, once each and by the key that they were written under."""
    by_source: dict[object, Fault] = {}
    for fault in faults:
        passed = next((key for key in sources if _is_inside(fault.key, key)), None)
        if passed is not None:
            fault = fault._replace(key=sources[passed] + fault.key.removeprefix(passed))
        is_known = passed is not None and any(each.key == fault.key for each in by_source.values())
        if not is_known:
            by_source[fault] = fault
    return list(by_source.values())


def written_at(fault: Fault, path: Path, overrides: Sequence[str], *, or_all: bool = False) -> str:
    """A fault as a line that begins where it was written: with the `--set` of its key, or else with the file.

    Args:
        or_all: whether a fault of a key that no override sets comes from all of them together, not from the file.
    """
    keys = {override: override.partition("=")[0].replace(" ", "") for override in overrides}
    same = [override for override, key in keys.items() if key == fault.key]
    near = [override for override, key in keys.items() if _is_inside(fault.key, key) or _is_inside(key, fault.key)]
    responsible = same[-1:] or near or (overrides if or_all else ())
    where = ", ".join(f"--set {override}" for override in responsible) or str(path)
    return ": ".join(part for part in (where, "" if same else fault.key, fault.text) if part)


def require_needs(loaded: LoadedProfile) -> None:
    """Refuse to start a profile that lacks something on this machine; see `start_checks`.

    Raises:
        ConfigError: a line for each thing that is lacking.
    """
    if loaded.profile.cluster.kind == "ray" and not has_ray():
        fault = Fault("cluster.kind", "needs Ray, which is not installed: pip install 'grpo-tui[ray]'")
        raise ConfigError(written_at(fault, loaded.path, loaded.overrides))
    if not _is_of_commands(loaded.profile):
        from grpo_tui.profile.start_checks import lacking_needs

        lines = [written_at(fault, loaded.path, loaded.overrides) for fault in lacking_needs(loaded)]
        if lines:
            raise ConfigError("\n".join(dict.fromkeys(lines)))


def _is_of_commands(profile: Profile) -> bool:
    """Whether a profile has nothing of the training stack."""
    return profile.model is None and all(isinstance(service, Command) for service in profile.services.values())


def _refuse_misspelt_services(written: RawTable, table: RawTable) -> None:
    """Reject an override of a service that the file does not have: a new service would have a kind.

    Raises:
        ConfigError: names the nearest service.
    """
    there = _table(written, "services")
    for name, service in _table(table, "services").items():
        if there and name not in there and not (isinstance(service, dict) and "kind" in service):
            hint = did_you_mean(name, there)
            raise ConfigError(f"--set services.{name}: not a service here{hint}; there are {', '.join(there)}")


def _is_inside(key: str, table: str) -> bool:
    return f"{key}.".startswith(f"{table}.")


def _with_paths_from(folder: Path, table: RawTable) -> RawTable:
    """Make relative paths absolute: those of a file before overrides are applied, those of overrides afterwards."""
    return with_absolute_paths(profile_type(table), _with_model_folders(folder, table), folder)


def _with_model_folders(folder: Path, table: RawTable) -> RawTable:
    """Make every model that is given as a folder below this one absolute; `./…` always is one.

    For the file, `folder` is that of the file; for the command line, and for what is not beside the file, the current.
    """
    model = _table(table, "model")
    services = {
        key: {**service, **_folders(folder, service, ("model_name", "reference_model"))}
        if isinstance(service, dict)
        else service
        for key, service in _table(table, "services").items()
    }
    return {
        **table,
        **({"model": {**model, **_folders(folder, model, ("name",))}} if model else {}),
        **({"services": services} if services else {}),
    }


def _folders(folder: Path, table: RawTable, keys: Iterable[str]) -> RawTable:
    """Those of the settings that name a folder, absolute."""
    names = {key: table[key] for key in keys if isinstance(table.get(key), str)}
    return {key: str((folder / name).resolve()) for key, name in names.items() if _is_folder(folder, name)}


def _is_folder(folder: Path, name: str) -> bool:
    is_made_here = name.startswith("local/")  # a folder of that name is given as ./local/…
    return name.startswith(("./", "../")) or (not is_made_here and (folder / name / "config.json").is_file())


def find(name_or_file: str) -> Path:
    """The file of a profile name or path.

    Raises:
        ConfigError: there is none; names the nearest profile.
    """
    path = Path(name_or_file)
    if path.suffix == ".toml" or len(path.parts) > 1:
        if path.is_file():
            return path
        raise ConfigError(f"{path}: no such file")
    profiles = available_profiles()
    if name_or_file in profiles:
        return profiles[name_or_file]
    names = ", ".join(profiles) or "none"
    raise ConfigError(f"profile {name_or_file!r}: not found{did_you_mean(name_or_file, profiles)}; there are: {names}")


# --- shared settings ---------------------------------------------------------------------------------------------


def _pass_on(table: RawTable) -> tuple[RawTable, dict[str, str]]:
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
    bridge = _table(table, "bridge")
    mode = str(bridge.get("mode", ""))
    api, trainer = (_only(table, kind, policy) for kind in ("rollout_api", "trainer"))
    trained_mode = str(_table(trainer or {}, "bridge").get("mode", mode))
    servers = _servers_of_the_policy(table, trainer, policy)
    server_urls = [_url(server, "inference") for server in servers.values()]
    reference_urls = [_url(each, "reference") for each in _of_kind(table, "reference", policy).values()]
    parameter_urls = [_url(each, "parameters") for each in _of_kind(table, "parameters", policy).values()]
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
            "inference": _server_settings(mode if policy is None else trained_mode),
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
        table = _table(table, key)
    return table.get(last) or None if isinstance(table.get(last), dict) else table.get(last)


def _passed_on(table: RawTable) -> frozenset[str]:
    """The dotted keys of all settings that services of a table get from elsewhere in it."""
    table = with_replicas(table).table
    stated = _table(table, "services")
    return frozenset(
        f"services.{name}.{key}"
        for name, service in _table(_pass_on(table)[0], "services").items()
        for key in service
        if key not in stated[name]
    )


def _table(table: RawTable, key: str) -> RawTable:
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
        for name, each in _table(table, "services").items()
        if isinstance(each, dict) and each.get("kind") == kind and _policy_of(each) == policy
    }


def _only(table: RawTable, kind: str, policy: str | None) -> RawTable | None:
    """The only service of a kind and a policy; None when there is none or more than one."""
    found = [*_of_kind(table, kind, policy).values()]
    return found[0] if len(found) == 1 else None


def _servers_of_the_policy(table: RawTable, trainer: RawTable | None, policy: str | None) -> dict[str, RawTable]:
    """The inference services by name: the only one, or of several those of the model that is trained."""
    servers = _of_kind(table, "inference", policy)
    model = _table(table, "model").get("name")
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


# --- checks: each yields `dotted.key: what (hint)` ---------------------------------------------------------------


def _needs_name_services(profile: Profile) -> Iterator[str]:
    for name, service in profile.services.items():
        for needed in service.needs:
            if needed not in profile.services:
                hint = did_you_mean(needed, profile.services)
                yield f"services.{name}.needs: {needed!r} is not a service here{hint}"


def _hooks_name_services(profile: Profile) -> Iterator[str]:
    for index, hook in enumerate(profile.hooks):
        for name in hook.services:
            if name not in profile.services:
                yield f"hooks.{index}.services: {name!r} is not a service here{did_you_mean(name, profile.services)}"


def _restart_with_is_needed(profile: Profile) -> Iterator[str]:
    """A service that is restarted after another waits for it as at the first start, so it must be among its needs."""
    for name, service in profile.services.items():
        for leader in service.restart_with:
            if leader not in profile.services:
                hint = did_you_mean(leader, profile.services)
                yield f"services.{name}.restart_with: {leader!r} is not a service here{hint}"
            elif leader not in service.needs:
                yield (
                    f"services.{name}.restart_with: {leader!r} is not among its needs, so both would start at once "
                    f'(add needs = {{ {leader} = "ready" }})'
                )


def _opponents_are_policies(profile: Profile) -> Iterator[str]:
    """An environment that names an opponent has inference servers of it."""
    policies = {policy for each in profile.services.values() if (policy := getattr(each, "policy", None)) is not None}
    for name, service in profile.services.items():
        opponent = getattr(service, "opponent", None)
        if opponent is None:
            continue
        if opponent not in policies:
            there = f"; there are {', '.join(sorted(policies))}" if policies else ": no service has policy set"
            yield f"services.{name}.opponent: {opponent!r} is no policy here{did_you_mean(opponent, policies)}{there}"
        elif opponent == getattr(service, "policy", None):
            yield f"services.{name}.opponent: {opponent!r} is the policy of this environment: name the other one"
        elif not getattr(service, "opponent_urls", ()):
            yield (
                f"services.{name}.opponent: {opponent!r} has no service of kind inference, which would play: add one "
                f"with policy = {opponent!r}"
            )


def _needs_have_no_cycle(profile: Profile) -> Iterator[str]:
    graph = {name: [n for n in service.needs if n in profile.services] for name, service in profile.services.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        path = " → ".join(reversed(error.args[1]))
        yield f"services.{error.args[1][-1]}.needs: a cycle, so none of these can start first: {path}"


def _finished_needs_can_finish(profile: Profile) -> Iterator[str]:
    for name, service in profile.services.items():
        for needed, condition in service.needs.items():
            other = profile.services.get(needed)
            if condition is NeedCondition.FINISHED and other and other.restart is RestartPolicy.ALWAYS:
                yield f"services.{name}.needs.{needed}: never finishes, its restart is 'always'"


def _ports_are_used_once(profile: Profile) -> Iterator[str]:
    users: dict[int, list[str]] = {}
    for name, service in profile.services.items():
        port = getattr(service, "port", None)
        own = () if port is None else (port,)
        for port, count in Counter((*own, *service.ports)).items():
            users.setdefault(port, []).extend([name] * (count if port not in own else 1))
    for port, names in users.items():
        if len(names) > 1:
            first, second = names[:2]
            key = "ports" if first == second else "port"
            yield f"services.{second}.{key}: {port} is already the port of services.{first}"


def _one_console_of_metrics(profile: Profile) -> Iterator[str]:
    first, *others = [name for name, service in profile.services.items() if service.console] or [""]
    for name in others:
        yield (
            f"services.{name}.console: metrics.jsonl has one writer, which is services.{first}.console; remove one of "
            f"the two"
        )


def _console_metrics_have_a_step(profile: Profile) -> Iterator[str]:
    for name, service in profile.services.items():
        if service.console and "step" not in service.console:
            yield (
                f"services.{name}.console: no pattern for 'step' among {', '.join(service.console)}: without it, "
                f"values belong to no step; add a pattern for the line that opens one, as in step = '^Step (\\d+)'"
            )


def _checks_for(profile: Profile) -> tuple[Check, ...]:
    """The checks here, and those of the training stack where a profile has any of it."""
    if _is_of_commands(profile):
        return CHECKS
    from grpo_tui.profile.stack_checks import STACK_CHECKS

    return (*CHECKS, *STACK_CHECKS)


Check = Callable[[Profile], Iterator[str]]
CHECKS: tuple[Check, ...] = (
    _needs_name_services,
    _hooks_name_services,
    _restart_with_is_needed,
    _opponents_are_policies,
    _needs_have_no_cycle,
    _finished_needs_can_finish,
    _ports_are_used_once,
    _one_console_of_metrics,
    _console_metrics_have_a_step,
    check_cluster,
)


def resolved(loaded: LoadedProfile) -> dict[str, Any]:
    """The whole profile after overlays, for `resolved.json`."""
    return {"profile": loaded.name, "file": str(loaded.path), **loaded.profile.model_dump(mode="json")}
