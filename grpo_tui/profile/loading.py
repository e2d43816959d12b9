"""From a name or file to a checked `Profile`: find, read, override, pass on shared settings, validate.

Every fault is one line `file: dotted.key: what is wrong (what to do)`. Checks only what needs neither a process nor the
network; `doctor` examines the machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from grpo_engine.config import (
    MOST_FAULTS,
    Fault,
    RawTable,
    apply_overrides,
    did_you_mean,
    faults_of,
    read_table,
    setting_names,
    with_absolute_paths,
)
from grpo_engine.errors import ConfigError
from grpo_engine.wire.secrets import is_secret_name, masked_text, masked_value
from grpo_tui.paths import PROFILES, available_profiles
from grpo_tui.profile.loaded import LoadedProfile
from grpo_tui.profile.model import Profile, profile_type
from grpo_tui.profile.moved_ports import asks_for_ports, moved, with_chosen
from grpo_tui.profile.profile_checks import checks_for, is_of_commands
from grpo_tui.profile.replicas import MOST_SERVICES, num_services, with_replicas
from grpo_tui.profile.shared_settings import pass_on, passed_on, table_at
from grpo_tui.services.kinds import KINDS, service_class

MOST_MEANT = 3
"""Keys that a message names for one that may be of several services."""


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
    folder, here = path.parent.absolute(), Path.cwd()
    of_file = _with_paths_from(folder, table)
    from_here = partial(_with_paths_from, here, before=None if here == folder else of_file)
    overridden = apply_overrides(of_file, overrides, spell_out=from_here, model=profile_type(of_file))
    written = _without_open_settings(from_here(overridden))
    _refuse_misspelt_services(of_file, written)
    _refuse_settings_outside_services(of_file, overrides)
    if (num := num_services(written)) > MOST_SERVICES:
        raise ConfigError(f"{path}: services: {num} of them with their replicas, at most {MOST_SERVICES} are started")
    if moved_ports:
        written = with_replicas(written).table  # each has a port of its own to be moved
        written = moved(written, moved_ports, where=str(path), passed_on=passed_on(written))
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
        passed_on=passed_on(written),
        moved_ports=moved_ports or {},
        chosen_ports=_with_ports(with_replicas(written).table, chosen_ports)[1],
        replica_of=with_replicas(written).first,
    )


def _without_open_settings(table: RawTable) -> RawTable:
    """A table in which a trainer with `vllm_port = 0` leaves its port to the inference services."""
    services = table_at(table, "services")
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
    table, sources = pass_on(given)
    sources |= {f"services.{name}": f"services.{first}" for name, first in spread.first.items()}
    model = profile_type(table)
    try:
        profile = model.model_validate(table)
    except ValidationError as error:
        return None, [*spread.faults, *_by_source(faults_of(error, model, is_secret=is_secret_name), sources)]
    lines = islice((line for check in checks_for(profile) for line in check(profile)), MOST_FAULTS)
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
    where = ", ".join(f"--set {masked_value('', override)}" for override in responsible) or str(path)
    return ": ".join(part for part in (where, "" if same else fault.key, masked_text(fault.text)) if part)


def require_needs(loaded: LoadedProfile) -> None:
    """Refuse to start a profile that lacks something on this machine; see `start_checks`.

    Raises:
        ConfigError: a line for each thing that is lacking.
    """
    if loaded.profile.cluster.kind == "ray" or not is_of_commands(loaded.profile):
        from grpo_tui.profile.start_checks import lacking_needs

        lines = [written_at(fault, loaded.path, loaded.overrides) for fault in lacking_needs(loaded)]
        if lines:
            raise ConfigError("\n".join(dict.fromkeys(lines)))


def _refuse_misspelt_services(written: RawTable, table: RawTable) -> None:
    """Reject an override of a service that the file does not have: a new service would have a kind.

    Raises:
        ConfigError: names the nearest service.
    """
    there = table_at(written, "services")
    for name, service in table_at(table, "services").items():
        if there and name not in there and not (isinstance(service, dict) and "kind" in service):
            hint = did_you_mean(name, there)
            raise ConfigError(f"--set services.{name}: not a service here{hint}; there are {', '.join(there)}")


def _is_inside(key: str, table: str) -> bool:
    return f"{key}.".startswith(f"{table}.")


def _refuse_settings_outside_services(of_file: RawTable, overrides: Sequence[str]) -> None:
    """Reject an override of a setting of a service by its name alone, as `trainer.lr` or `lr`.

    Raises:
        ConfigError: names the whole key.
    """
    services = {name: each for name, each in table_at(of_file, "services").items() if isinstance(each, dict)}
    for override in overrides:
        key = override.partition("=")[0].replace(" ", "")
        first = key.split(".")[0]
        if first in setting_names(Profile):
            continue
        names = [name for name, each in services.items() if str(each.get("kind")) in KINDS]
        having = [name for name in names if first in setting_names(service_class(services[name]["kind"]))]
        meant = [f"services.{key}"] if first in services else [f"services.{name}.{key}" for name in having]
        if meant:
            told = " or ".join(map(repr, meant[:MOST_MEANT]))
            raise ConfigError(f"--set {masked_value('', override)}: unknown setting (did you mean {told}?)")


def _with_paths_from(folder: Path, table: RawTable, *, before: RawTable | None = None) -> RawTable:
    """Make relative paths absolute: those of a file before overrides are applied, those of overrides afterwards."""
    return with_absolute_paths(profile_type(table), _with_model_folders(folder, table), folder, before=before)


def _with_model_folders(folder: Path, table: RawTable) -> RawTable:
    """Make every model that is given as a folder below this one absolute; `./…` always is one.

    For the file, `folder` is that of the file; for the command line, and for what is not beside the file, the current.
    """
    model = table_at(table, "model")
    services = {
        key: {**service, **_folders(folder, service, ("model_name", "reference_model"))}
        if isinstance(service, dict)
        else service
        for key, service in table_at(table, "services").items()
    }
    return {
        **table,
        **({"model": {**model, **_folders(folder, model, ("name",))}} if model else {}),
        **({"services": services} if services else {}),
    }


def _folders(folder: Path, table: RawTable, keys: Iterable[str]) -> RawTable:
    """Those of the settings that name a folder, absolute."""
    names = {key: table[key] for key in keys if isinstance(table.get(key), str)}
    return {key: os.path.realpath(folder / name) for key, name in names.items() if _is_folder(folder, name)}


def _is_folder(folder: Path, name: str) -> bool:
    is_made_here = name.startswith("local/")  # a folder of that name is given as ./local/…
    is_there = os.path.isfile(folder / name / "config.json")  # not Path.is_file: a name of 300 bytes is none
    return name.startswith(("./", "../")) or (not is_made_here and is_there)


def find(name_or_file: str) -> Path:
    """The file of a profile name or path.

    Raises:
        ConfigError: there is none, and the message names the nearest profile; or it is one in `./profiles` that other
            users may have written.
    """
    path = Path(name_or_file)
    if path.suffix == ".toml" or len(path.parts) > 1:
        if path.is_file():
            return path
        raise ConfigError(f"{path}: no such file")
    profiles = available_profiles()
    nearest = PROFILES / f"{name_or_file}.toml"
    if nearest.exists() and not (name_or_file in profiles and profiles[name_or_file].samefile(nearest)):
        raise ConfigError(
            f"profile {name_or_file!r}: {nearest} or its folder belongs to another user, or all users may write to it, "
            f"and it names programs to run: after you have read it, start it by its path, {nearest}"
        )
    if name_or_file in profiles:
        return profiles[name_or_file]
    names = ", ".join(profiles) or "none"
    raise ConfigError(f"profile {name_or_file!r}: not found{did_you_mean(name_or_file, profiles)}; there are: {names}")
