"""Mode `broadcast`: the trainer's own model on its own devices, sent into the memory of one or many servers.

For servers on other GPUs than the trainer's. A weight update takes as long as the weights take on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from grpo_engine.bridges.placement.own import OwnModel
from grpo_engine.bridges.placement.sharded import ShardedModel
from grpo_engine.bridges.protocol import Bridge, BridgeContext, Mode
from grpo_engine.bridges.transport.broadcast import BroadcastBridge
from grpo_engine.flags import Flag


class Broadcast(Mode):
    """Weights sent by NCCL or Gloo into servers on other devices."""

    after_server_restart: ClassVar[str] = "the trainer sends its weights to the new server, which answers from then on"
    if_not_served: ClassVar[tuple[str, str]] = (
        "the server computes with a copy of the weights that it received (repacked or compiled-in weights)",
        "restart the server with --receives-weights and without quantization",
    )
    trains_over_ranks: ClassVar[bool] = True
    updates_many_servers: ClassVar[bool] = True
    placed_because: ClassVar[str | None] = "connects the machines of trainer and servers, which placed services know"
    server_settings: ClassVar[Mapping[str, bool]] = {"receives_weights": True}
    mode: Annotated[Literal["broadcast"], Flag(("--weight-bridge-mode",))] = "broadcast"
    """How new weights reach inference."""
    handover: Annotated[Path | None, Flag(("--handover",))] = None
    """Folder in which servers that start find the trainer; the same --handover as theirs. Default: in the run."""
    timeout_s: Annotated[float, Flag(("--broadcast-timeout-s",))] = Field(60.0, gt=0)
    """Longest time for servers to meet the trainer, and for one transfer; then those that did not take part are left
    out."""
    check_every: Annotated[int, Flag(("--broadcast-check-every",))] = Field(50, ge=1)
    """Servers prove by a checksum that they serve what was trained: at the first update, and then every so many."""

    def updating_at_once(self) -> Self:
        """See `Mode`."""
        return self.model_copy(update={"check_every": 1, "handover": None})

    def build(self, context: BridgeContext) -> Bridge:
        """Pair placement and transport."""
        placement = self.rank_placement(context) if context.has_ranks else OwnModel(context)
        return BroadcastBridge(
            context,
            placement,
            handover=self.handover,
            timeout_s=self.timeout_s,
            check_every=self.check_every,
        )

    def rank_placement(self, context: BridgeContext) -> ShardedModel:
        """The model over several ranks, on one of them."""
        return ShardedModel(context)
