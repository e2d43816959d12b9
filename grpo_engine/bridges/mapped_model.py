"""A model on a server's memory that can let go of it and be put onto another's, with every value in between.

Letting go matters where memory is short: what one process still maps is not given back when its owner ends, so on a GPU
that trainer and server share, the next server would find no room for its weights.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_engine.bridges.cuda_tensors import map_cuda_tensors
from grpo_engine.bridges.shared_tensors import map_tensors
from grpo_engine.errors import BridgeError
from grpo_engine.models.loading import load_config, load_model_on_shared
from grpo_engine.models.same_model import is_same_model
from grpo_engine.wire.bridge_file import BridgeFile

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MappedModel:
    """The model, and which of its values are where."""

    def __init__(self, model_name: str, file: BridgeFile) -> None:
        """Build the model on what the file describes.

        Raises:
            BridgeError: the memory cannot be mapped, or the server names another model.
            ModelError: it is of another shape.
        """
        if not is_same_model(model_name, file.model):
            raise BridgeError(
                f"the inference server shares the weights of {file.model}, but {model_name} is to be trained: give "
                "both the same model"
            )
        fresh = _map(file)
        self._kinds = _kinds(fresh)
        self.model: PreTrainedModel = load_model_on_shared(load_config(model_name), fresh, file.aliases)
        self.is_mapped = True
        own = dict(self.model.named_parameters(remove_duplicate=False))
        own |= dict(self.model.named_buffers(remove_duplicate=False))
        self.tensors: dict[str, Tensor] = {name: own[name] for name in file.tensors}
        """Those that are, or were, in a server's memory, by the names of the file, whatever wraps the model later."""
        self._kept: dict[str, Tensor] = {}
        """Values in host memory that the mapped memory does not have yet."""

    def map_again(self, file: BridgeFile) -> None:
        """Put the model onto another server's memory; its values follow with the next `write`.

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
        """Bring every value into the model's memory, and wait until it is there.

        Args:
            write: gives every parameter that is trained its value.
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

    def let_go(self, *, is_kept: Callable[[Tensor], bool]) -> None:
        """Unmap; what is kept is in host memory then, and the next `write` brings it.

        Args:
            is_kept: whether a parameter's values are needed; those of others come from a writer, or with the memory
                that is mapped next.
        """
        is_on_gpu = any(tensor.is_cuda for tensor in self.tensors.values())
        for name, tensor in self.tensors.items():
            if is_kept(tensor):
                if name not in self._kept:
                    self._kept[name] = tensor.data.to("cpu", copy=True)
                tensor.data = self._kept[name]
            else:
                self._kept.pop(name, None)
                tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype)  # costs nothing until it is written
        self.is_mapped = False
        gc.collect()  # whatever else refers to the memory, an exception's frames for instance
        if is_on_gpu:
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()  # what a step leaves with torch's allocator is not free to others either


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype, torch.device]]:
    return {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors.items()}


def _map(file: BridgeFile) -> dict[str, Tensor]:
    if all(entry.handle.kind == "cuda_ipc" for entry in file.tensors.values()):
        return map_cuda_tensors(file.tensors)
    return map_tensors(file.tensors)
