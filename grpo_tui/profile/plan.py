"""The launch plan: what would start, in which order, with which argv, ports and GPUs. Reads env files, starts nothing.

The plan itself and its file are in `plan_file`, which knows no kind of service.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Collection, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from grpo_tui.profile.loading import LoadedProfile, resolved
from grpo_tui.profile.model import Profile
from grpo_tui.profile.plan_file import Plan
from grpo_tui.services.base import Launch, Place

__all__ = ["Plan", "describe", "make_plan", "shown_env"]

SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
MASK = "***"


def make_plan(loaded: LoadedProfile, *, run_folder: Path, python: str, take_ports: bool = False) -> Plan:
    """Lay out what a profile starts; `run_folder` need not exist.

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
    return Plan(
        profile_name=loaded.name,
        profile_folder=place.profile_folder,
        launches=tuple(_with_followers(launch, loaded.profile, kinds) for launch in launches),
        hooks=loaded.profile.hooks,
        take_ports=take_ports,
    )


def _with_followers(launch: Launch, profile: Profile, kinds: Collection[str]) -> Launch:
    """A launch that knows who must be restarted after it, and what follows from the bridge instead."""
    followers = tuple(name for name, service in profile.services.items() if launch.name in service.restart_with)
    # Every bridge says so, and our trainer does it; which classes they are is loaded for a profile that has one alone.
    is_told = launch.kind == "inference" and "trainer" in kinds
    words = getattr(profile.bridge, "after_server_restart", None) if is_told else None
    return dataclasses.replace(launch, followers=followers, after_restart=words)


def describe(plan: Plan, loaded: LoadedProfile) -> dict[str, Any]:
    """The plan as `grpo-tui plan --json` prints it; secrets in environment variables are masked."""
    return {
        "profile": plan.profile_name,
        "file": str(loaded.path),
        "model": loaded.profile.model.model_dump(mode="json") if loaded.profile.model else None,
        "bridge": loaded.profile.bridge.model_dump(mode="json") if loaded.profile.bridge else None,
        "services": [
            {
                "name": launch.name,
                "kind": launch.kind,
                "order": index,
                "needs": {name: str(condition) for name, condition in launch.needs.items()},
                "argv": list(launch.argv),
                "command": shlex.join(launch.argv),
                "env": shown_env(launch),
                "cwd": str(launch.cwd),
                "ports": list(launch.ports),
                "gpus": list(launch.gpus),
                "ready": launch.ready.model_dump(mode="json", exclude_none=True) if launch.ready else None,
                "restart": str(launch.restart),
                "stop_grace_s": launch.stop_grace_s,
            }
            for index, launch in enumerate(plan.launches, start=1)
        ],
        "resolved": _mask_all(resolved(loaded)),
    }


def shown_env(launch: Launch) -> dict[str, str]:
    """The variables of a launch for a person: masked where the name says secret, or the value is from a file."""
    return {name: MASK if name in launch.env_from_files else _masked(name, value) for name, value in launch.env.items()}


def _masked(name: str, value: str) -> str:
    return MASK if any(word in name.upper() for word in SECRET_WORDS) else value


def _mask_all(document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: {name: _masked(name, value) for name, value in inner.items()}
        if key == "env" and isinstance(inner, dict)
        else _mask_all(inner)
        if isinstance(inner, dict)
        else inner
        for key, inner in document.items()
    }
