"""Placement `mapped`: the model's parameters are a server's memory, and can be moved to another server's.

Memory that a process still maps is not freed when its owner exits: on a GPU that trainer and server share, the next
server could not allocate its weights. So the trainer unmaps it, and keeps the values it needs in host memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_engine.bridges.memory.cuda_tensors import map_cuda_tensors
from grpo_engine.bridges.memory.shared_tensors import map_tensors
from grpo_engine.bridges.transport.saving import own_tensors, save_model
from grpo_engine.errors import BridgeError
from grpo_engine.models.loading import load_config, load_model_on_shared
from grpo_engine.models.places import places_on_rank
from grpo_engine.models.same_model import is_same_model
from grpo_engine.models.split import require_splittable, split_layers
from grpo_engine.wire.bridge_file import BridgeFile, SharedTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_engine.ranks.group import RankGroup


class MappedModel:
    """A model on mapped memory."""

    def __init__(self, model_name: str, file: BridgeFile, ranks: RankGroup | None = None) -> None:
        """Build the model on the tensors that the bridge file describes.

        Args:
            ranks: of a trainer that maps the parts of a tensor parallel server, each rank one.

        Raises:
            BridgeError: the memory cannot be mapped, or the server has another model.
            ModelError: the shapes do not fit.
        """
        self._model_name = model_name
        if not is_same_model(model_name, file.model):
            raise BridgeError(
                f"the inference server shares the weights of {file.model}, but the trainer was given {model_name}: "
                "give "
                "both the same model"
            )
        config, self._rank = load_config(model_name), None if ranks is None else ranks.rank
        if ranks is not None:
            require_splittable(config, ranks.size)
        fresh = self._map(file)
        self._kinds = _kinds(fresh)
        places = None if self._rank is None else places_on_rank(file.parts, self._rank)
        self.model: PreTrainedModel = load_model_on_shared(config, fresh, file.aliases, places=places)
        self.is_mapped = True
        own = dict(self.model.named_parameters(remove_duplicate=False))
        own |= dict(self.model.named_buffers(remove_duplicate=False))
        self.tensors: dict[str, Tensor] = {name: own[name] for name in fresh}
        """Tensors in the server's memory, by their names in the bridge file; independent of wrappers of the model."""
        self._kept: dict[str, Tensor] = {}
        """Values in host memory that must be written to the mapped memory."""
        if ranks is not None:
            split_layers(self.model, ranks)

    def tensors_to_save(self) -> Mapping[str, Tensor]:
        """The model's own."""
        return own_tensors(self.model)

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the model with its tokenizer, for a checkpoint of the trainer."""
        save_model(self.model, self._model_name, folder, tensors)

    def remap(self, file: BridgeFile) -> None:
        """Move the model to another server's memory; the next `write` copies the values there.

        Raises:
            BridgeError: the memory cannot be mapped, or is of another model.
        """
        fresh = self._map(file)
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

    def _map(self, file: BridgeFile) -> Mapping[str, Tensor]:
        """The tensors of a bridge file, or those of this rank's part, by their names."""
        tensors: Mapping[str, SharedTensor] = file.tensors if self._rank is None else file.parts[self._rank]
        if all(entry.handle.kind == "cuda_ipc" for entry in tensors.values()):
            return map_cuda_tensors(tensors)
        return map_tensors(tensors)


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype, torch.device]]:
    return {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors.items()}
