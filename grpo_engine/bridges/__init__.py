"""How weights reach inference; one file a mode, and the union here is the registration. Torch-free to import."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from grpo_engine.bridges.lora_only import LoraOnly
from grpo_engine.bridges.none import CheckpointReload
from grpo_engine.bridges.protocol import Bridge, BridgeContext, BridgeModel
from grpo_engine.bridges.shared_vllm import SharedVllm

AnyBridge = Annotated[SharedVllm | LoraOnly | CheckpointReload, Field(discriminator="mode")]
"""Every bridge, chosen by `mode`."""

__all__ = ["AnyBridge", "Bridge", "BridgeContext", "BridgeModel", "CheckpointReload", "LoraOnly", "SharedVllm"]
