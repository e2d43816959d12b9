"""How weights reach inference; one file a mode, and the union here is the registration. Torch-free to import."""

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

ON_SHARED_MEMORY = frozenset(
    str(kind.model_fields["mode"].default) for kind in get_args(get_args(AnyBridge)[0]) if kind.shares_memory
)
"""Modes in which the trainer maps the weights that the server has."""

__all__ = [
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
