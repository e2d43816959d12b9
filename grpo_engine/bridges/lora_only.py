"""`lora_only`: the base model never changes; every step a new adapter is written and swapped in over HTTP.

Adapters carry versioned names (`policy@000123`): a server that keys its prefix cache by name then never serves keys and
values of older weights.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from grpo_engine.bridges.protocol import Bridge, BridgeContext, BridgeModel, connect
from grpo_engine.bridges.saving import save_model, saying_why_unwritten, trainable_device
from grpo_engine.config import Config
from grpo_engine.flags import Flag

if TYPE_CHECKING:
    from peft import PeftModel

_KEPT_ADAPTERS = 2
"""The one that is served and the one before it, which a request may still be using."""

logger = logging.getLogger(__name__)


class LoraOnly(Config):
    """An adapter on a frozen model, swapped over HTTP."""

    after_server_restart: ClassVar[str] = (
        "the trainer loads its latest adapter into the new server before its next step"
    )
    """What the trainer does then, for the people who restart one."""
    trains_adapter: ClassVar[bool] = True
    """Whether an adapter on a frozen model learns, and not the model."""
    shares_memory: ClassVar[bool] = False
    """Whether trainer and server map the same weights."""
    mode: Annotated[Literal["lora_only"], Flag(("--weight-bridge-mode",))] = "lora_only"
    """How new weights reach inference."""
    adapter_folder: Annotated[Path | None, Flag(("--adapter-folder",))] = None
    """Where adapters are written for the server; a folder below /dev/shm saves a slow disk; default: in the run."""

    def build(self, context: BridgeContext) -> Bridge:
        """The bridge itself."""
        return LoraOnlyBridge(self, context)


class LoraOnlyBridge:
    """See `grpo_engine.bridges.protocol.Bridge`."""

    def __init__(self, config: LoraOnly, context: BridgeContext) -> None:
        self._context = context
        self._folder = (config.adapter_folder or context.folder / "adapters").absolute()
        self._client = connect(context)
        self._instance = ""
        self._version: int | None = None
        """What was handed over last."""
        self._kept: list[Path] = []
        self._model: PeftModel

    def attach(self) -> BridgeModel:
        """Load the base model and put an adapter on it that changes nothing yet."""
        from grpo_engine.models.loading import load_model
        from grpo_engine.models.lora import add_lora

        info = self._client.info()
        self._instance = info.instance
        base = load_model(
            self._context.model_name, dtype=self._context.dtype, device=trainable_device(self._context.device)
        )
        self._model = add_lora(base, self._context.lora)
        return BridgeModel(
            model=self._model,
            is_shared=False,
            policy_version=info.policy_version,
            save=lambda folder: save_model(self._model, self._context.model_name, folder),
        )

    def publish(self, version: int, write: Callable[[], None]) -> None:
        """Take the new values and swap the adapter."""
        write()
        self._version = version
        self._hand_over()

    def keep_up(self) -> None:
        """Nothing of the server is mapped here."""

    def ensure_current(self) -> None:
        """Hand the adapter over again to a server that was restarted or serves something else."""
        info = self._client.info()
        if self._version is not None and (info.instance != self._instance or info.policy_version != self._version):
            logger.warning(
                "the inference server serves version %d instead of %d; loading the adapter again",
                info.policy_version,
                self._version,
            )
            self._hand_over()

    def close(self) -> None:
        """Leave the last adapter, which is still served; remove the ones before it."""
        self._client.close()
        self._forget_all_but(1)

    def _hand_over(self) -> None:
        from grpo_engine.models.lora import save_adapter

        assert self._version is not None
        name = f"policy@{self._version:06d}"
        path = self._folder / name
        self._kept = [kept for kept in self._kept if kept != path]
        with saying_why_unwritten(path):
            save_adapter(self._model, path)
        self._kept.append(path)
        self._client.load_adapter(path, name, self._version)
        self._instance = self._client.info().instance
        self._forget_all_but(_KEPT_ADAPTERS)

    def _forget_all_but(self, count: int) -> None:
        for path in self._kept[:-count]:
            shutil.rmtree(path, ignore_errors=True)
        self._kept = self._kept[-count:]
