"""Mode `turns`: trainer and inference server on one GPU, which use its memory in turn.

The server sleeps while a step is computed, and is handed the new weights when it wakes. Services are as in other modes:
stock environments work, since their requests wait. One trainer process and one server.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from grpo_engine.bridges.placement.own import OwnModel
from grpo_engine.bridges.protocol import Bridge, BridgeContext, Mode
from grpo_engine.bridges.transport.turns import TurnsBridge
from grpo_engine.flags import Flag

_MB = 1_000_000


class Turns(Mode):
    """Weights handed to a server on the same device, which sleeps during a step."""

    after_server_restart: ClassVar[str] = (
        "the new server loads once the trainer has computed its step, and is then handed the trainer's weights"
    )
    if_not_served: ClassVar[tuple[str, str]] = (
        "the server computes with a copy of the weights that it was handed (repacked or compiled-in weights)",
        "restart the server with --enable-sleep-mode and without quantization",
    )
    takes_turns: ClassVar[bool] = True
    is_of_one_device: ClassVar[bool] = True
    server_settings: ClassVar[Mapping[str, bool]] = {"enable_sleep_mode": True}
    mode: Annotated[Literal["turns"], Flag(("--weight-bridge-mode",))] = "turns"
    """How new weights reach inference."""
    handover: Annotated[Path | None, Flag(("--handover",))] = None
    """Folder in which a server that starts finds the trainer, and the end of its step; the same --handover as the
    server's. Default: in the run."""
    staging_mb: Annotated[int, Flag(("--staging-mb",))] = Field(512, ge=1)
    """Memory of the device through which weights are handed over, in 10⁶ bytes."""
    check_every: Annotated[int, Flag(("--turns-check-every",))] = Field(50, ge=1)
    """The server proves by a checksum that it serves what was trained: at the first update, and then every so many."""

    @property
    def device_bytes(self) -> int:
        """See `Mode`."""
        return self.staging_mb * _MB

    def updating_at_once(self) -> Self:
        """See `Mode`."""
        return self.model_copy(update={"check_every": 1, "handover": None})

    def build(self, context: BridgeContext) -> Bridge:
        """Pair placement and transport."""
        return TurnsBridge(
            context,
            OwnModel(context),
            handover=self.handover,
            staging_bytes=self.staging_mb * _MB,
            check_every=self.check_every,
        )
