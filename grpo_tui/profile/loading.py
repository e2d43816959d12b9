"""From a name or file to a checked `Profile`: find, read, override, pass on shared settings, validate.

Every fault is one line `file: dotted.key: what is wrong (what to do)`. Checks only what needs neither a process nor the
network; `doctor` examines the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from grpo_engine.config import RawTable, apply_overrides, did_you_mean, read_table, validated
from grpo_engine.errors import ConfigError
from grpo_tui.paths import available_profiles
from grpo_tui.profile.model import Profile, profile_type
from grpo_tui.services.base import NeedCondition, RestartPolicy
from grpo_tui.services.command import Command
from grpo_tui.services.kinds import service_class


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedProfile:
    """A checked profile and its file."""

    name: str
    path: Path
    profile: Profile


def load(name_or_file: str, overrides: Sequence[str] = ()) -> LoadedProfile:
    """Load a profile by name or file, with `--set` overrides on top.

    Raises:
        ConfigError: not found, not readable, or invalid; one line per fault.
    """
    path = find(name_or_file)
    written = _with_model_from(path.parent, read_table(path))
    table = _with_model_from(Path.cwd(), apply_overrides(written, overrides))
    _refuse_misspelt_services(written, table)
    table = _pass_on(table)
    profile = validated(profile_type(table), table, where=str(path))
    faults = [f"{path}: {fault}" for check in _checks_for(profile) for fault in check(profile)]
    if faults:
        raise ConfigError("\n".join(faults))
    return LoadedProfile(name=path.stem, path=path, profile=profile)


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


def _with_model_from(folder: Path, table: RawTable) -> RawTable:
    """Make a model given as `./…` or `../…` absolute: relative to the file, on the command line to the current
    folder."""
    model = _table(table, "model")
    name = model.get("name")
    if not isinstance(name, str) or not name.startswith(("./", "../")):
        return table
    return {**table, "model": {**model, "name": str((folder / name).resolve())}}


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


def _pass_on(table: RawTable) -> RawTable:
    """Pass settings that the profile has once to the services that need them, unless a service sets its own."""
    services = table.get("services")
    if not isinstance(services, dict):
        return table
    model, bridge = _table(table, "model"), _table(table, "bridge")
    mode = str(bridge.get("mode", ""))
    shared: RawTable = {key: model[key] for key in ("dtype", "device") if key in model}
    if "name" in model:
        shared["model_name"] = model["name"]
    api = _only(services, "rollout_api")
    inference = _only(services, "inference")
    share, is_on_one_gpu = "gpu_memory_utilization", _share_a_gpu(bridge, inference, _only(services, "trainer"))
    environment: RawTable = {
        **({"model_name": model["name"]} if "name" in model else {}),
        **({"rollout_server_url": _url(api, "rollout_api")} if api is not None else {}),
        **({"inference_url": _url(inference, "inference")} if inference is not None else {}),
    }
    shared_by_kind: dict[str, RawTable] = {
        "inference": {
            **shared,
            **({"max_model_len": model["max_model_len"]} if "max_model_len" in model else {}),
            **({"shared_weights": True} if _shares_memory(mode) else {}),
            **({"enable_lora": True} if mode == "lora_only" else {}),
        },
        "environment": environment,
        "atropos_environment": environment,
        "trainer": {
            **shared,
            **({"bridge": bridge} if bridge else {}),
            **({"seq_len": model["max_model_len"]} if "max_model_len" in model else {}),
            **({"atropos_url": _url(api, "rollout_api")} if api is not None else {}),
            **({"inference_service": _name_of(inference, services)} if inference is not None else {}),
            **({"vllm_port": inference["port"]} if inference is not None and "port" in inference else {}),
            # On the same GPU, the trainer's memory plan subtracts what inference uses.
            **({share: inference[share]} if inference is not None and is_on_one_gpu and share in inference else {}),
        },
    }
    return {
        **table,
        "services": {
            name: {**shared_by_kind.get(str(service.get("kind")), {}), **service}
            if isinstance(service, dict)
            else service
            for name, service in services.items()
        },
    }


def _table(table: RawTable, key: str) -> RawTable:
    value = table.get(key)
    return value if isinstance(value, dict) else {}


def _only(services: RawTable, kind: str) -> RawTable | None:
    """The only service of a kind; None when there is none or more than one."""
    found = [service for service in services.values() if isinstance(service, dict) and service.get("kind") == kind]
    return found[0] if len(found) == 1 else None


def _shares_memory(mode: str) -> bool:
    """Whether trainer and server map the same weights; bridges are imported only for a profile that has one."""
    if not mode:
        return False
    from grpo_engine.bridges import ON_SHARED_MEMORY

    return mode in ON_SHARED_MEMORY


def _name_of(service: RawTable, services: RawTable) -> str:
    return next(name for name, table in services.items() if table is service)


def _share_a_gpu(bridge: RawTable, inference: RawTable | None, trainer: RawTable | None) -> bool:
    """Whether inference and trainer use the same GPU: always if they share weights, else if both name it."""
    gpus = [service.get("gpus") for service in (inference, trainer) if service is not None]
    return _shares_memory(str(bridge.get("mode", ""))) or (len(gpus) == 2 and bool(gpus[0]) and gpus[0] == gpus[1])


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
    if profile.model is None and all(isinstance(service, Command) for service in profile.services.values()):
        return CHECKS
    from grpo_tui.profile.stack_checks import STACK_CHECKS

    return (*CHECKS, *STACK_CHECKS)


Check = Callable[[Profile], Iterator[str]]
CHECKS: tuple[Check, ...] = (
    _needs_name_services,
    _hooks_name_services,
    _restart_with_is_needed,
    _needs_have_no_cycle,
    _finished_needs_can_finish,
    _ports_are_used_once,
    _one_console_of_metrics,
    _console_metrics_have_a_step,
)


def resolved(loaded: LoadedProfile) -> dict[str, Any]:
    """The whole profile after overlays, for `resolved.json`."""
    return {"profile": loaded.name, "file": str(loaded.path), **loaded.profile.model_dump(mode="json")}
