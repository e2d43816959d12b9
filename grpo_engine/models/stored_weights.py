"""A model's checkpoint on this machine, read tensor by tensor: what inference holds in memory may be something else.

Imports transformers only where a whole model must be loaded, since vLLM's workers use it too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from grpo_engine.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Tensors in memory beside those of a checkpoint."""

    num_compared: int
    first_difference: str | None
    """The tensor, its row and the file, as a message begins with them; None where all are alike."""


def checkpoint_folder(model_name: str) -> Path | None:
    """Where the checkpoint of a model lies on this machine; None when it is nowhere.

    Raises:
        ModelError: no such folder or local model.
    """
    from grpo_engine.models.loading import resolve_model

    source = resolve_model(model_name)
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, local_files_only=True, allow_patterns=["*.safetensors", "*.json"]))
    except LocalEntryNotFoundError:
        return None


def read_stored(model_name: str, names: Collection[str]) -> dict[str, Tensor]:
    """Parameters of a checkpoint by the names that transformers gives them, on the CPU, as they were saved.

    Where its files have other names for them, or are no safetensors, the whole model is loaded.

    Raises:
        ModelError: it cannot be read, or its model has no such parameters.
    """
    folder, tensors = checkpoint_folder(model_name), dict[str, Tensor]()
    for path in sorted(folder.glob("*.safetensors")) if folder is not None else ():
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in set(file.keys()) & set(names)}
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: cannot be read: {error}; is it written whole?") from None
    if missing := set(names) - tensors.keys():
        from grpo_engine.models.loading import load_model

        parameters = dict(load_model(model_name, dtype="auto", device="cpu").named_parameters(remove_duplicate=False))
        if unknown := sorted(missing - parameters.keys()):
            raise ModelError(f"{model_name}: has no parameter {unknown[0]}; is it the model that is served?")
        tensors |= {name: parameters[name].detach() for name in missing}
    return tensors


def compare_with_stored(tensors: Mapping[str, Tensor], folder: Path) -> Comparison:
    """Compare the first, middle and last row of each tensor with those of a checkpoint, as far as it has them.

    Args:
        tensors: by the names that transformers gives them, of any device; the checkpoint is rounded to their type.
    """
    num_compared = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(set(file.keys()) & tensors.keys()):
                stored, tensor = file.get_slice(name), tensors[name]
                for row in {0, tensor.shape[0] // 2, tensor.shape[0] - 1}:
                    wanted, own = stored[row : row + 1].to(tensor.dtype), tensor[row : row + 1].cpu()
                    if wanted.shape != own.shape or not torch.equal(own, wanted):
                        difference = f"{name}: row {row} is not that of {path}"
                        return Comparison(num_compared=num_compared, first_difference=difference)
                num_compared += 1
    return Comparison(num_compared=num_compared, first_difference=None)
