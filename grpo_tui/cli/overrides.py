"""Overrides as other trainers write them: without `--set`, and by the names that they give to settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_engine.errors import ConfigError
from grpo_engine.other_names import BARE_OVERRIDE, DOTTED, own_override
from grpo_tui.cli.printing import write_line

_KINDS = {"train": "trainer", "server": "inference", "env": "environment"}
"""Commands of grpo-engine, and the kind of service that has their settings."""


def with_set(words: Sequence[str]) -> list[str]:
    """Arguments in which `--set` is before every override that is without one; a word after an option is its value.

    >>> with_set(["--profile", "P", "optimizer.lr=2e-5"])
    ['--profile', 'P', '--set', 'optimizer.lr=2e-5']
    """
    result: list[str] = []
    for word in words:
        is_value = bool(result) and result[-1].startswith("-") and "=" not in result[-1]
        result += ["--set", word] if BARE_OVERRIDE.match(word) and not is_value else [word]
    return result


def own_overrides(profile: str | None, overrides: Sequence[str]) -> list[str]:
    """The overrides by the dotted keys of a profile, each that was by another name told on stderr.

    Raises:
        ConfigError: the profile cannot be read, or has no service with such a setting.
    """
    names = {override: override.partition("=")[0].strip() for override in overrides}
    if profile is None or not any(name in DOTTED and name != "model.name" for name in names.values()):
        return list(overrides)
    from grpo_engine.config import read_table
    from grpo_tui.profile.loading import find

    services = read_table(find(profile)).get("services", {})
    if not isinstance(services, dict):  # a fault of the file, which is named when it is loaded
        return list(overrides)
    result: list[str] = []
    for override, name in names.items():
        if name not in DOTTED or name == "model.name":
            result.append(override)
            continue
        kind, key = DOTTED[name].profile
        if kind:
            own = _of_devices(override, key, _of_kind(services, kind))
        else:
            own = [
                f"services.{service}.{own_override(override, command)[0]}"
                for command in DOTTED[name].commands or ["train"]  # none: it says what to do instead
                for service in _of_kind(services, _KINDS[command])
            ]
        if not own:
            what = f"no service of kind {kind}: add one, or" if kind else "no service with this setting:"
            raise ConfigError(f"{override}: profile {profile} has {what} leave it out")
        write_line(f"{override}: {' '.join(own)} here", to_stderr=True)
        result += own
    return result


def _of_kind(services: Mapping[str, Any], kind: str) -> dict[str, Mapping[str, Any]]:
    return {name: each for name, each in services.items() if isinstance(each, dict) and each.get("kind") == kind}


def _of_devices(override: str, key: str, services: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The devices of a service: `num_devices`, or `gpus`; of an inference service, a server spans those of a replica.

    Raises:
        ConfigError: the profile names GPUs, which a number would not change.
    """
    value = override.partition("=")[2].strip()
    own: list[str] = []
    for name, table in services.items():
        if key == "num_devices" and "gpus" in table:
            raise ConfigError(f"{override}: services.{name}.gpus is {table['gpus']} in this profile: set that instead")
        own.append(f"services.{name}.{key}={value}")
        if table["kind"] == "inference":
            num_devices = len(value.strip("[]").split(",")) if key == "gpus" else int(value) if value.isdigit() else 0
            each = num_devices // int(table.get("replicas", 1))
            own += [f"services.{name}.tensor_parallel_size={each}"] if each else []
    return own
