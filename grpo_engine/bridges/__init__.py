"""How weights reach inference: one file per mode, registered in the union here. Torch-free to import."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field

from grpo_engine.bridges.broadcast import Broadcast
from grpo_engine.bridges.colocate import Colocate
from grpo_engine.bridges.lora_merged import LoraMerged
from grpo_engine.bridges.lora_only import LoraOnly
from grpo_engine.bridges.lora_restart import LoraRestart
from grpo_engine.bridges.none import CheckpointReload
from grpo_engine.bridges.parameter_service import ParameterService
from grpo_engine.bridges.protocol import Bridge, BridgeContext, BridgeModel
from grpo_engine.bridges.shared_vllm import SharedVllm
from grpo_engine.bridges.turns import Turns

_Any = (
    SharedVllm
    | LoraMerged
    | LoraOnly
    | LoraRestart
    | CheckpointReload
    | Broadcast
    | ParameterService
    | Colocate
    | Turns
)
AnyBridge = Annotated[_Any, Field(discriminator="mode")]
"""Every bridge, chosen by `mode`."""

KINDS: tuple[type[_Any], ...] = get_args(_Any)
"""The settings class of every mode."""

BY_MODE = {str(kind.model_fields["mode"].default): kind for kind in KINDS}
"""The same by name."""

ON_SHARED_MEMORY = frozenset(mode for mode, kind in BY_MODE.items() if kind.shares_memory)
"""Modes in which the trainer maps the server's weights."""

OVER_RANKS = tuple(mode for mode, kind in BY_MODE.items() if kind.trains_over_ranks)
"""Modes in which a trainer may have several ranks."""

IN_PROCESS = tuple(mode for mode, kind in BY_MODE.items() if kind.samples_in_process)
"""Modes in which the trainer samples too."""

TO_MANY_SERVERS = tuple(mode for mode, kind in BY_MODE.items() if kind.updates_many_servers)
"""Modes in which several servers can be sent the weights."""

__all__ = [
    "BY_MODE",
    "IN_PROCESS",
    "KINDS",
    "ON_SHARED_MEMORY",
    "OVER_RANKS",
    "TO_MANY_SERVERS",
    "AnyBridge",
    "Bridge",
    "BridgeContext",
    "BridgeModel",
    "Broadcast",
    "CheckpointReload",
    "Colocate",
    "LoraMerged",
    "LoraOnly",
    "LoraRestart",
    "ParameterService",
    "SharedVllm",
    "Turns",
]
