"""Mode `shared_vllm`: one copy of the weights; the trainer's parameters are the memory that the server reads.

Of a tensor parallel server each rank of the trainer maps the part of one of its processes.
"""

from __future__ import annotations

import os
from typing import Annotated, ClassVar, Literal

from grpo_engine.bridges.memory.bridge_files import bridge_file_path
from grpo_engine.bridges.memory.stock_bridge_file import is_stock_file
from grpo_engine.bridges.protocol import Bridge, BridgeContext, RankPlacement
from grpo_engine.bridges.transport.in_place import InPlaceBridge, InPlaceSettings
from grpo_engine.flags import Flag


class SharedVllm(InPlaceSettings):
    """Single copy: trainer and server map the same weights."""

    after_server_restart: ClassVar[str] = "the trainer attaches to the new server and writes its weights into it"
    if_not_served: ClassVar[tuple[str, str]] = (
        "inference does not read the memory that the trainer writes: it computes with a copy (repacked or compiled-in "
        "weights), or the bridge file is another server's",
        "restart the server with --shared-weights and without quantization, and point --vllm-config-path at its bridge "
        "file",
    )
    trains_over_ranks: ClassVar[bool] = True
    mode: Annotated[Literal["shared_vllm"], Flag(("--weight-bridge-mode",))] = "shared_vllm"
    """How new weights reach inference."""

    def build(self, context: BridgeContext) -> Bridge:
        """Pair placement and transport; Atropos's example server, which has no weight lock, needs a transport of its
        own."""
        if is_stock_file(path := bridge_file_path(self.config_path, os.environ)):
            from grpo_engine.bridges.transport.stock_in_place import StockInPlaceBridge

            return StockInPlaceBridge(path, context)
        return InPlaceBridge(self, context)

    def rank_placement(self, context: BridgeContext) -> RankPlacement:
        """The part of the model that one rank maps, of a tensor parallel server."""
        from grpo_engine.bridges.placement.mapped_parts import FollowingPart

        return FollowingPart(context)
