"""Mode `lora_only`: the base model never changes; every step a new adapter is written and loaded by the server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from grpo_engine.bridges.placement.adapter import AdaptedModel
from grpo_engine.bridges.placement.sharded_adapter import ShardedAdaptedModel
from grpo_engine.bridges.protocol import Bridge, BridgeContext, Mode
from grpo_engine.bridges.transport.adapter import AdapterBridge
from grpo_engine.flags import Flag


class LoraOnly(Mode):
    """An adapter on a frozen model, loaded by the server over HTTP."""

    after_server_restart: ClassVar[str] = (
        "the trainer loads its latest adapter into the new server before its next step"
    )
    if_not_served: ClassVar[tuple[str, str]] = (
        "requests do not use the adapter that was loaded",
        "look at /lora/status; start the server with --enable-lora and a --max-lora-rank of at least --lora-r",
    )
    trains_over_ranks: ClassVar[bool] = True
    updates_many_servers: ClassVar[bool] = True
    server_settings: ClassVar[Mapping[str, bool]] = {"enable_lora": True}
    mode: Annotated[Literal["lora_only"], Flag(("--weight-bridge-mode",))] = "lora_only"
    """How new weights reach inference."""
    adapter_folder: Annotated[Path | None, Flag(("--adapter-folder",))] = None
    """Where adapters are written for the server, which must see that folder; default: shared memory (/dev/shm) where it
    has room, else the run folder."""

    @property
    def trains_adapter(self) -> bool:
        """Always."""
        return True

    def build(self, context: BridgeContext) -> Bridge:
        """Pair placement and transport."""
        placement = self.rank_placement(context) if context.has_ranks else AdaptedModel(context)
        return AdapterBridge(context, placement, folder=self.adapter_folder)

    def rank_placement(self, context: BridgeContext) -> ShardedAdaptedModel:
        """The model over several ranks, on one of them."""
        return ShardedAdaptedModel(context)
