"""Placement `mapped`: the model's parameters are a server's memory, and can be moved to another server's.

Memory that a process still maps is not freed when its owner exits: on a GPU that trainer and server share, the next
server could not allocate its weights. So the trainer unmaps it, and keeps the values it needs in host memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_engine.bridges.memory.cuda_tensors import map_cuda_tensors
from grpo_engine.bridges.memory.shared_tensors import map_tensors
from grpo_engine.errors import BridgeError
from grpo_engine.models.loading import load_config, load_model_on_shared
from grpo_engine.models.same_model import is_same_model
from grpo_engine.wire.bridge_file import BridgeFile

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MappedModel:
    """A model on mapped memory."""

    def __init__(self, model_name: str, file: BridgeFile) -> None:
        """Build the model on the tensors that the bridge file describes.

        Raises:
            BridgeError: the memory cannot be mapped, or the server has another model.
            ModelError: the shapes do not fit.
        """
        if not is_same_model(model_name, file.model):
            raise BridgeError(
                f"the inference server shares the weights of {file.model}, but the trainer was given {model_name}: "
                "give "
                "both the same model"
            )
        fresh = _map(file)
        self._kinds = _kinds(fresh)
        self.model: PreTrainedModel = load_model_on_shared(load_config(model_name), fresh, file.aliases)
        self.is_mapped = True
        own = dict(self.model.named_parameters(remove_duplicate=False))
        own |= dict(self.model.named_buffers(remove_duplicate=False))
        self.tensors: dict[str, Tensor] = {name: own[name] for name in file.tensors}
        """Tensors in the server's memory, by their names in the bridge file; independent of wrappers of the model."""
        self._kept: dict[str, Tensor] = {}
        """Values in host memory that must be written to the mapped memory."""

    def remap(self, file: BridgeFile) -> None:
        """Move the model to another server's memory; the next `write` copies the values there.

        Raises:
            BridgeError: the memory cannot be mapped, or is of another model.
        """
        fresh = _map(file)
        if _kinds(fresh) != self._kinds:
            raise BridgeError(
                f"the restarted inference server shares other weights ({file.model}), or the same in another dtype or "
                "on another GPU; restart the trainer too"
            )
        for name, tensor in self.tensors.items():
            tensor.data = fresh[name]
        self.is_mapped = True

    def write(self, write: Callable[[], None]) -> None:
        """Write all values into the model's memory, and synchronize with the GPU.

        Args:
            write: writes every trained parameter.
        """
        if not self.is_mapped:
            write()
            return
        for name, values in self._kept.items():
            self.tensors[name].data.copy_(values)
        write()
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        self._kept.clear()

    def release(self, *, is_kept: Callable[[Tensor], bool]) -> None:
        """Unmap the memory, keeping some tensors in host memory until the next `write`.

        Args:
            is_kept: whether a tensor's values must be kept; the others come from `write` or with the next memory.
        """
        is_on_gpu = any(tensor.is_cuda for tensor in self.tensors.values())
        for name, tensor in self.tensors.items():
            if is_kept(tensor):
                if name not in self._kept:
                    self._kept[name] = tensor.data.to("cpu", copy=True)
                tensor.data = self._kept[name]
            else:
                self._kept.pop(name, None)
                tensor.data = torch.empty(
                    tensor.shape, dtype=tensor.dtype
                )  # no pages are allocated until it is written
        self.is_mapped = False
        gc.collect()  # other references to the memory, such as an exception's frames
        if is_on_gpu:
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()  # memory cached by torch's allocator is not free for other processes


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype, torch.device]]:
    return {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors.items()}


def _map(file: BridgeFile) -> dict[str, Tensor]:
    if all(entry.handle.kind == "cuda_ipc" for entry in file.tensors.values()):
        return map_cuda_tensors(file.tensors)
    return map_tensors(file.tensors)
