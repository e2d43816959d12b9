"""Mode `lora_merged`: an adapter is trained, and merged in place into the weights that the server reads.

Inference runs at the base model's speed, and the trainer's forward pass reads the weights that sampled. Each weight
update adds the adapter to a copy of the base weights that the trainer keeps, read from the checkpoint: 2 bytes per
weight with an adapter, 1.3 GB for q and v of an 8B model. So rounding errors do not accumulate, and merged weights left
by a killed trainer are never taken for the base.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from grpo_engine.bridges.memory.weight_lock import WeightLock
from grpo_engine.bridges.protocol import Bridge, BridgeContext, BridgeModel, Update
from grpo_engine.bridges.transport.in_place import InPlaceBridge, InPlaceSettings
from grpo_engine.bridges.transport.saving import save_model
from grpo_engine.errors import BridgeError
from grpo_engine.flags import Flag
from grpo_engine.wire.bridge_file import BridgeFile

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor

    from grpo_engine.models.merged_lora import MergedLora

logger = logging.getLogger(__name__)


class LoraMerged(InPlaceSettings):
    """An adapter on a frozen model, merged into the weights that trainer and server map."""

    after_server_restart: ClassVar[str] = (
        "the trainer attaches to the new server and merges its adapter into the weights"
    )
    if_not_served: ClassVar[tuple[str, str]] = (
        "inference does not read the memory that adapters are folded into: it computes with a copy, or the bridge file "
        "is another server's",
        "restart the server with --shared-weights and without quantization or --enable-lora, and point "
        "--vllm-config-path at its bridge file",
    )
    computes_merged: ClassVar[bool] = True
    mode: Annotated[Literal["lora_merged"], Flag(("--weight-bridge-mode",))] = "lora_merged"
    """How new weights reach inference."""

    @property
    def trains_adapter(self) -> bool:
        """Always."""
        return True

    def build(self, context: BridgeContext) -> Bridge:
        """Pair placement and transport."""
        return MergedAdapterBridge(self, context)


class MergedAdapterBridge(InPlaceBridge):
    """See `grpo_engine.bridges.protocol.Bridge`."""

    has_all: ClassVar[bool] = False
    _model: PeftModel
    _merged: MergedLora
    _frozen: dict[str, Tensor]
    """Mapped tensors without adapters, which are never written."""

    def publish(self, version: int, write: Callable[[], None]) -> Update | None:
        """Write the adapter's new values, and merge them into the weights under a pause and the weight lock."""

        def write_and_merge() -> None:
            write()
            self._merged.merge()

        if self._lock is None:
            write()  # the adapter is in the trainer's memory: it can be saved without a server
        return super().publish(version, write_and_merge)

    def _add_adapter(self) -> None:
        """Put an adapter on the mapped model, over base weights that are read from the checkpoint."""
        from grpo_engine.models.lora import add_lora
        from grpo_engine.models.merged_lora import MergedLora, adapted_weights
        from grpo_engine.models.stored_weights import read_stored

        self._model = add_lora(self._weights.model, self._context.lora)
        adapted = adapted_weights(self._model)
        self._merged = MergedLora(self._model, read_stored(self._context.model_name, adapted))
        self._frozen = {name: tensor for name, tensor in self._weights.tensors.items() if name not in adapted}

    def _check_memory(self, file: BridgeFile, lock: WeightLock) -> None:
        """Check that weights without adapters are the checkpoint's, since none of these is ever written."""
        difference, state = self._find_difference(), lock.read()
        if difference is not None and (state.update_count > 0 or state.policy_version > 0):
            logger.warning("%s: changed by an earlier trainer; the server reloads %s", difference, file.model)
            self._reload_model(file, state.policy_version + 1)
            difference = self._find_difference()
        if difference is not None:
            raise BridgeError(
                f"{difference}: the served weights are not those of {self._context.model_name}: start both with the "
                "same model, and the server without quantization"
            )

    def _find_difference(self) -> str | None:
        from grpo_engine.models.stored_weights import checkpoint_folder, compare_with_stored

        folder = checkpoint_folder(self._context.model_name)
        return None if folder is None else compare_with_stored(self._frozen, folder).first_difference

    def _trained(self, version: int) -> BridgeModel:
        """What is trained: the adapter, which is in the trainer's memory."""
        return BridgeModel(
            model=self._model, is_shared=False, policy_version=version, save=self._save, unmerged=self._merged.apart
        )

    def _is_kept(self, tensor: Tensor) -> bool:
        """No tensor is copied: the next server loads the same base, and the adapter is not in its memory."""
        return False

    def _save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        save_model(self._model, self._context.model_name, folder, tensors)
