"""How weights reach inference: one file per mode, registered in the union here. Torch-free to import."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field

from grpo_engine.bridges.lora_merged import LoraMerged
from grpo_engine.bridges.lora_only import LoraOnly
from grpo_engine.bridges.lora_restart import LoraRestart
from grpo_engine.bridges.none import CheckpointReload
from grpo_engine.bridges.protocol import Bridge, BridgeContext, BridgeModel
from grpo_engine.bridges.shared_vllm import SharedVllm

AnyBridge = Annotated[SharedVllm | LoraMerged | LoraOnly | LoraRestart | CheckpointReload, Field(discriminator="mode")]
"""Every bridge, chosen by `mode`."""

KINDS: tuple[type[SharedVllm | LoraMerged | LoraOnly | LoraRestart | CheckpointReload], ...] = get_args(
    get_args(AnyBridge)[0]
)
"""The settings class of every mode."""

ON_SHARED_MEMORY = frozenset(str(kind.model_fields["mode"].default) for kind in KINDS if kind.shares_memory)
"""Modes in which the trainer maps the server's weights."""

__all__ = [
    "KINDS",
    "ON_SHARED_MEMORY",
    "AnyBridge",
    "Bridge",
    "BridgeContext",
    "BridgeModel",
    "CheckpointReload",
    "LoraMerged",
    "LoraOnly",
    "LoraRestart",
    "SharedVllm",
]
