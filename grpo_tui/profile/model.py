"""A profile: one way of running, as people write it in TOML.

The model and the bridge are stated once; `loading` hands them to every service that needs them.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from grpo_engine.bridges import AnyBridge
from grpo_engine.config import Config
from grpo_tui.services.hook import Hook
from grpo_tui.services.kinds import AnyService


def _is_free(name: str) -> str:
    if name == "supervisor":
        raise ValueError("'supervisor' is the name of the supervisor's own log: choose another")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise ValueError(f"{name!r} names files and words of a command line: letters, digits, _, . and - only")
    return name


ServiceName = Annotated[str, AfterValidator(_is_free)]


class ModelTable(Config):
    """The model that the whole stack is about."""

    name: str
    """Hub id, local folder, or one of the models that are made locally (`local/…`)."""
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = "bfloat16"
    device: str = "auto"
    """`cuda`, `cpu`; auto: a GPU where there is one."""
    max_model_len: int = Field(4096, ge=2)
    """Longest sequence that is sampled or trained, prompt included."""


class Profile(Config):
    """One way of running."""

    description: str = ""
    """One line for `grpo-tui profiles`."""
    model: ModelTable | None = None
    bridge: AnyBridge | None = None
    services: dict[ServiceName, AnyService] = Field(min_length=1)
    """What is supervised, by name."""
    hooks: tuple[Hook, ...] = ()
    """Commands that are run when something becomes of a service or of the run."""
