"""A profile: one way of running the stack, as people write it in TOML.

The model and the bridge are set once; `loading` passes them to every service that needs them. `profile_type` builds the
type for the kinds of service that a profile has, so that no other kind is imported for it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from functools import cache, reduce
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, create_model

from grpo_engine.config import Config
from grpo_tui.services.base import Service
from grpo_tui.services.hook import Hook
from grpo_tui.services.kinds import KINDS, service_class


def _is_free(name: str) -> str:
    if name in ("supervisor", "hooks"):
        raise ValueError(f"{name!r} is the name of one of the supervisor's logs: choose another")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise ValueError(f"{name!r} is no service name: use letters, digits, _, . and - only")
    return name


ServiceName = Annotated[str, AfterValidator(_is_free)]


class ModelTable(Config):
    """The model of the whole stack."""

    name: str
    """Hub id, local folder, or a model that is generated locally (`local/…`)."""
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = "bfloat16"
    device: str = "auto"
    """`cuda`, `cpu`; auto: a GPU where there is one."""
    max_model_len: int = Field(4096, ge=8)
    """Longest sequence that is sampled or trained on, prompt included."""


class GpuTable(Config):
    """How services share GPUs."""

    mps: bool = True
    """Whether services on the same GPU compute at the same time, by a CUDA MPS daemon of the run, where one can be had;
    else the driver lets one of them compute at a time."""


class ClusterTable(Config):
    """The machines on which services run that set `num_devices`."""

    kind: Literal["local", "ray"] = "local"
    """`local`: this machine; `ray`: the machines of a Ray cluster."""
    address: str | None = Field(None, pattern=r"^[^:\s]+:\d+$")
    """`host:port` of the head of an existing Ray cluster; unset: the run starts a private one on this machine."""
    machines: int = Field(2, ge=1, le=16)
    """Of a private cluster: how many machines this one stands for, to try a profile without others."""
    devices_per_machine: int = Field(1, ge=1, le=64)
    """Of a private cluster: devices of each of them, which Ray takes to be there."""


class Profile(Config):
    """One way of running the stack; read as the `profile_type` of its table, which has the kinds and bridges."""

    description: str = ""
    """One line for `grpo-tui profiles`."""
    model: ModelTable | None = None
    bridge: Config | None = None
    """How new weights reach inference."""
    services: dict[ServiceName, Service] = Field(min_length=1)
    """The services, by name."""
    hooks: tuple[Hook, ...] = ()
    """Commands that are run on events of a service or of the run."""
    gpu: GpuTable = GpuTable()
    cluster: ClusterTable = ClusterTable()
    share_gpus: bool = False
    """Whether a run starts on GPUs that live runs use, where the memory that all of them plan fits."""


def profile_type(table: Mapping[str, Any]) -> type[Profile]:
    """`Profile` for a table: with the kinds of service in it, or with all kinds where one is unknown."""
    services = table.get("services")
    tables = services.values() if isinstance(services, dict) else ()
    found = {str(service.get("kind")) if isinstance(service, dict) else "" for service in tables}
    kinds = tuple(kind for kind in KINDS if kind in found) if found and found <= KINDS.keys() else tuple(KINDS)
    return _profile_of(kinds, has_bridge="bridge" in table)


@cache
def _profile_of(kinds: tuple[str, ...], *, has_bridge: bool) -> type[Profile]:
    service: Any = reduce(operator.or_, map(service_class, kinds))
    if len(kinds) > 1:
        service = Annotated[service, Field(discriminator="kind")]
    closed: dict[str, Any] = {"services": (dict[ServiceName, service], Field(min_length=1))}
    if has_bridge:
        from grpo_engine.bridges import AnyBridge

        closed["bridge"] = (AnyBridge | None, None)
    return create_model("Profile", __base__=Profile, **closed)
