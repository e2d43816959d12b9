"""`lora_merged`: an adapter is trained, and folded into the weights that the server reads, in the server's own memory.

Inference runs the base model's kernels at the base model's speed, and the trainer's forward pass reads the very weights
that sampled. Each hand-over adds the adapter to a copy of the base weights that the trainer keeps, read from the
checkpoint: 2 bytes for each weight under an adapter, 1.3 GB for q and v of an 8B model. So rounding never adds up, and
a trainer that was killed leaves nothing that the next one would take for the base.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from grpo_engine.bridges.fence import Fence
from grpo_engine.bridges.protocol import Bridge, BridgeContext, BridgeModel
from grpo_engine.bridges.saving import save_model
from grpo_engine.bridges.shared_vllm import OnSharedMemory, SharedVllmBridge
from grpo_engine.errors import BridgeError
from grpo_engine.flags import Flag
from grpo_engine.wire.bridge_file import BridgeFile

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor

    from grpo_engine.models.merged_lora import MergedLora

logger = logging.getLogger(__name__)


class LoraMerged(OnSharedMemory):
    """An adapter on a frozen model, folded into the weights that trainer and server map."""

    after_server_restart: ClassVar[str] = (
        "the trainer attaches to the new server and folds its adapter into the weights"
    )
    """What the trainer does then, for the people who restart one."""
    trains_adapter: ClassVar[bool] = True
    """Whether an adapter on a frozen model learns, and not the model."""
    mode: Annotated[Literal["lora_merged"], Flag(("--weight-bridge-mode",))] = "lora_merged"
    """How new weights reach inference."""

    def build(self, context: BridgeContext) -> Bridge:
        """The bridge itself."""
        return LoraMergedBridge(self, context)


class LoraMergedBridge(SharedVllmBridge):
    """See `grpo_engine.bridges.protocol.Bridge`; the server's memory is handled as `shared_vllm` does."""

    _model: PeftModel
    _merged: MergedLora
    _frozen: dict[str, Tensor]
    """Those on the server's memory that no adapter is for."""

    def publish(self, version: int, write: Callable[[], None]) -> None:
        """Take the adapter's new values, and fold them into the weights under a pause and the fence."""

        def write_and_merge() -> None:
            write()
            self._merged.merge()

        if self._fence is None:
            write()  # the adapter is the trainer's own, and can be saved whether or not a server is there
        super().publish(version, write_and_merge)

    def _wrap(self) -> None:
        """Put an adapter on the mapped model, over base weights that are read from the checkpoint."""
        from grpo_engine.models.lora import add_lora
        from grpo_engine.models.merged_lora import MergedLora, adapted_weights
        from grpo_engine.models.stored_weights import read_stored

        self._model = add_lora(self._weights.model, self._context.lora)
        adapted = adapted_weights(self._model)
        self._merged = MergedLora(self._model, read_stored(self._context.model_name, adapted))
        self._frozen = {name: tensor for name, tensor in self._weights.tensors.items() if name not in adapted}

    def _look_at_memory(self, file: BridgeFile, fence: Fence) -> None:
        """See that the weights without adapters are the checkpoint's, since none of these is ever written."""
        difference, state = self._find_difference(), fence.read()
        if difference is not None and (state.update_count > 0 or state.policy_version > 0):
            logger.warning("%s: an earlier trainer has changed it; the server loads %s again", difference, file.model)
            self._load_again(file, state.policy_version + 1)
            difference = self._find_difference()
        if difference is not None:
            raise BridgeError(
                f"{difference}: the server serves other weights than those of {self._context.model_name}: start both "
                "with the same model, and the server without quantization"
            )

    def _find_difference(self) -> str | None:
        from grpo_engine.models.stored_weights import checkpoint_folder, compare_with_stored

        folder = checkpoint_folder(self._context.model_name)
        return None if folder is None else compare_with_stored(self._frozen, folder).first_difference

    def _trained(self, version: int) -> BridgeModel:
        """The adapter, which is the trainer's alone."""
        return BridgeModel(
            model=self._model, is_shared=False, policy_version=version, save=self._save, unmerged=self._merged.apart
        )

    def _is_kept(self, tensor: Tensor) -> bool:
        """Nothing of the memory: the next server loads the same base, and the adapter is not in it."""
        return False

    def _save(self, folder: Path) -> None:
        save_model(self._model, self._context.model_name, folder)
