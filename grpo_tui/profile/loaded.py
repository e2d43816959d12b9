"""A checked profile, with the file and the overrides that it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_engine.config import RawTable
from grpo_tui.profile.model import Profile
from grpo_tui.services.base import Service


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


def resolved(loaded: LoadedProfile) -> dict[str, Any]:
    """The whole profile after overlays, for `resolved.json`."""
    return {"profile": loaded.name, "file": str(loaded.path), **loaded.profile.model_dump(mode="json")}
