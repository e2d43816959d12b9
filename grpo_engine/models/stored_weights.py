"""Reads a model's checkpoint on this machine tensor by tensor, and compares served weights with it.

Imports transformers only if a whole model must be loaded, since vLLM's workers use it too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from grpo_engine.errors import ModelError
from grpo_engine.wire.codec import require_regular


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Tensors in memory compared with a checkpoint's."""

    num_compared: int
    first_difference: str | None
    """Start of a message: tensor, row and file; None if all are equal."""


def checkpoint_folder(model_name: str) -> Path | None:
    """The folder of a model's checkpoint on this machine; None if there is none.

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


def download_checkpoint(model_name: str) -> Path:
    """The folder of a model's checkpoint from the hub, with those of its files that transformers reads.

    Raises:
        ModelError: it cannot be downloaded.
    """
    from huggingface_hub import list_repo_files, snapshot_download

    from grpo_engine.models.sources import read_source

    def download(source: str) -> Path:
        has_safetensors = any(name.endswith(".safetensors") for name in list_repo_files(source))
        wanted = ["*.json", "*.safetensors" if has_safetensors else "*.bin"]
        return Path(snapshot_download(source, allow_patterns=wanted, ignore_patterns=["*/*", "consolidated*"]))

    return read_source(model_name, download)


def read_stored(model_name: str, names: Collection[str]) -> dict[str, Tensor]:
    """Parameters of a checkpoint by the names that transformers gives them, on the CPU, as they were saved.

    If its files use other names, or are no safetensors, the whole model is loaded.

    Raises:
        ModelError: it cannot be read, or its model has no such parameters.
    """
    folder, tensors = checkpoint_folder(model_name), dict[str, Tensor]()
    for path in sorted(folder.glob("*.safetensors")) if folder is not None else ():
        try:
            require_regular(path)
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in set(file.keys()) & set(names)}
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: cannot be read: {error}; is it complete?") from None
    if missing := set(names) - tensors.keys():
        from grpo_engine.models.loading import load_model

        parameters = dict(load_model(model_name, dtype="auto", device="cpu").named_parameters(remove_duplicate=False))
        if unknown := sorted(missing - parameters.keys()):
            raise ModelError(f"{model_name}: has no parameter {unknown[0]}; is it the model that is served?")
        tensors |= {name: parameters[name].detach() for name in missing}
    return tensors


def compare_with_stored(
    tensors: Mapping[str, Tensor], folder: Path, places: Mapping[str, tuple[slice, ...]] | None = None
) -> Comparison:
    """Compare the first, middle and last row of each tensor with the checkpoint's, if it has the tensor.

    Args:
        tensors: by their names in transformers, on any device; the checkpoint is rounded to their dtype.
        places: which part of the checkpoint's a tensor is, where it is a part.
    """
    num_compared = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(set(file.keys()) & tensors.keys()):
                stored, tensor = file.get_slice(name), tensors[name]
                rows, *columns = (places or {}).get(name, (slice(0, None),))
                for row in {0, len(tensor) // 2, len(tensor) - 1} if len(tensor) else ():
                    first = rows.start + row
                    wanted = stored[(slice(first, first + 1), *columns)].to(tensor.dtype)
                    own = tensor[row : row + 1].cpu()
                    if wanted.shape != own.shape or not torch.equal(own, wanted):
                        difference = f"{name}: row {first} is not that of {path}"
                        return Comparison(num_compared=num_compared, first_difference=difference)
                num_compared += 1
    return Comparison(num_compared=num_compared, first_difference=None)
