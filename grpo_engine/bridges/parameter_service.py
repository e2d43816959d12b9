"""Mode `parameter_service`: the trainer's own model, pushed into host memory, from where servers load it in turn.

For many servers of which some are to sample at every moment, and for servers that come and go without the trainer. A
weight update takes a copy of the weights into memory, and then as long as a server takes to load them, times servers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from grpo_engine.bridges.placement.own import OwnModel
from grpo_engine.bridges.placement.sharded import ShardedModel
from grpo_engine.bridges.protocol import Bridge, BridgeContext, Mode
from grpo_engine.flags import Flag
from grpo_engine.wire.run_folder import HANDOVER_FOLDER


class ParameterService(Mode):
    """Weights in host memory, which servers load one after another."""

    after_server_restart: ClassVar[str] = "the new server loads the newest version from memory, without the trainer"
    if_not_served: ClassVar[tuple[str, str]] = (
        "the server acknowledged the reload and kept its old weights",
        "look at the server's log; restart it",
    )
    trains_over_ranks: ClassVar[bool] = True
    updates_many_servers: ClassVar[bool] = True
    has_parameter_services: ClassVar[bool] = True
    one_machine_because: ClassVar[str | None] = "writes into memory that trainer, service and servers share"
    mode: Annotated[Literal["parameter_service"], Flag(("--weight-bridge-mode",))] = "parameter_service"
    """How new weights reach inference."""
    push_every: Annotated[int, Flag(("--push-every",))] = Field(1, ge=1)
    """Optimizer steps between two versions that the trainer pushes."""
    pull_every: Annotated[int, Flag(("--pull-every",))] = Field(1, ge=1)
    """Optimizer steps that a server may be behind the newest version before it loads it."""
    overlap: Annotated[bool, Flag(("--overlap-updates",))] = False
    """Train on while servers load a version one after another; off: each step waits until they have."""
    handover: Annotated[Path | None, Flag(("--handover",))] = None
    """Folder in which `current` is the newest version; a server that is given the same --handover reads it as it
    starts. Default: in the run."""

    @property
    def steps_between_updates(self) -> int:
        """See `Mode`; with `overlap` a version is served a step later."""
        return self.push_every * math.ceil(self.pull_every / self.push_every) + self.overlap

    def updating_at_once(self) -> Self:
        """See `Mode`."""
        return self.model_copy(update={"push_every": 1, "pull_every": 1, "overlap": False, "handover": None})

    def build(self, context: BridgeContext) -> Bridge:
        """Pair placement and transport."""
        from grpo_engine.bridges.transport.parameter_service import ParameterServiceBridge

        return ParameterServiceBridge(
            context,
            self.rank_placement(context) if context.has_ranks else OwnModel(context),
            folder=(self.handover or context.folder / HANDOVER_FOLDER).absolute(),
            push_every=self.push_every,
            pull_every=self.pull_every,
            overlap=self.overlap,
        )

    def rank_placement(self, context: BridgeContext) -> ShardedModel:
        """The model over several ranks, on one of them."""
        return ShardedModel(context)
