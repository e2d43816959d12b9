"""`none`: no shared memory. Every few steps a checkpoint is saved, and the server reads it in place.

Works with any server that can read the trainer's disk, at the price of a whole checkpoint a hand-over; in between the
server samples from an older version, which every answer says.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from grpo_engine.bridges.protocol import Bridge, BridgeContext, BridgeModel, connect
from grpo_engine.bridges.saving import save_model, saying_why_unwritten, trainable_device
from grpo_engine.config import Config
from grpo_engine.flags import Flag

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class CheckpointReload(Config):
    """Checkpoints that the server reads in place every few steps."""

    after_server_restart: ClassVar[str] = "the trainer has the new server read its current weights before its next step"
    """What the trainer does then, for the people who restart one."""
    trains_adapter: ClassVar[bool] = False
    """Whether an adapter on a frozen model learns, and not the model."""
    shares_memory: ClassVar[bool] = False
    """Whether trainer and server map the same weights."""
    mode: Annotated[Literal["none"], Flag(("--weight-bridge-mode",))] = "none"
    """How new weights reach inference."""
    every_steps: Annotated[int, Flag(("--vllm-restart-interval",))] = Field(3, ge=1)
    """Optimizer steps between two hand-overs."""

    def build(self, context: BridgeContext) -> Bridge:
        """The bridge itself."""
        return CheckpointReloadBridge(self, context)


class CheckpointReloadBridge:
    """See `grpo_engine.bridges.protocol.Bridge`."""

    def __init__(self, config: CheckpointReload, context: BridgeContext) -> None:
        self._context = context
        self._every_steps = config.every_steps
        self._client = connect(context)
        self._instance = ""
        self._written = 0
        """Version of the weights in this process."""
        self._served: int | None = None
        """Version that was handed over last."""
        self._model: PreTrainedModel

    def attach(self) -> BridgeModel:
        """Load the model of its own."""
        from grpo_engine.models.loading import load_model

        info = self._client.info()
        self._instance = info.instance
        self._model = load_model(
            self._context.model_name, dtype=self._context.dtype, device=trainable_device(self._context.device)
        )
        return BridgeModel(
            model=self._model,
            is_shared=False,
            policy_version=info.policy_version,
            save=lambda folder: save_model(self._model, self._context.model_name, folder),
        )

    def publish(self, version: int, write: Callable[[], None]) -> None:
        """Take the new values; hand them over if that is due."""
        write()
        self._written = version
        if self._served is None or version - self._served >= self._every_steps:
            self._hand_over()

    def keep_up(self) -> None:
        """Nothing of the server is mapped here."""

    def ensure_current(self) -> None:
        """Hand over again to a server that was restarted or serves something else."""
        info = self._client.info()
        if self._served is not None and (info.instance != self._instance or info.policy_version != self._served):
            logger.warning(
                "the inference server serves version %d instead of %d; handing over again",
                info.policy_version,
                self._served,
            )
            self._hand_over()

    def close(self) -> None:
        """Remove what the server has read."""
        self._client.close()
        shutil.rmtree(self._context.folder / "handover", ignore_errors=True)

    def _hand_over(self) -> None:
        folder = self._context.folder / "handover" / f"version-{self._written:06d}"
        shutil.rmtree(folder.parent, ignore_errors=True)
        with saying_why_unwritten(folder):
            save_model(self._model, self._context.model_name, folder)
        self._client.reload(folder, self._written)
        self._served, self._instance = self._written, self._client.info().instance
        shutil.rmtree(folder)
