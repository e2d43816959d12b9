"""vLLM's parameters under their names in transformers, so that a trainer does not depend on vLLM.

vLLM fuses projections (`qkv_proj` holds the rows of q, k and v), pads vocabularies, and wraps layers for adapters. Here
each parameter of the transformers model is found as a view of vLLM's memory. What cannot be matched by name, shape and
value is refused: a model that is shared in part would train without an error, and serve other weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from grpo_engine.bridges.memory.shared_tensors import export_tensors
from grpo_engine.errors import BridgeError, first_of
from grpo_engine.models.stored_weights import compare_with_stored
from grpo_engine.wire.bridge_file import PosixHandle

if TYPE_CHECKING:
    from torch import Tensor, nn

_LORA_WRAPPING = ".base_layer"


def views_under_hf_names(
    model: nn.Module, expected: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str]
) -> dict[str, Tensor]:
    """Views of a vLLM model's parameters, one for each name in `expected`.

    Args:
        aliases: tied parameters of the transformers model: the second name → the one in `expected`.

    Raises:
        BridgeError: the two models have different parameters; the message names the differences.
    """
    views: dict[str, Tensor] = {}
    foreign: list[tuple[str, Tensor]] = []
    for name, view in _all_views(model):
        if name in expected:
            views[name] = view
        else:
            foreign.append((name, view))
    faults = []
    if missing := [name for name in expected if name not in views]:
        faults.append(f"not found in vLLM: {first_of(missing)}")
    if misshapen := [
        f"{name} {tuple(view.shape)} instead of {expected[name]}"
        for name, view in views.items()
        if tuple(view.shape) != expected[name]
    ]:
        faults.append(f"of another shape: {first_of(misshapen)}")
    places = {_place(view): name for name, view in views.items()}
    if len(places) < len(views):
        faults.append("one tensor in vLLM, but several in transformers (tied embeddings?)")
    # The same memory under a second name is a tied parameter, or a wrapper that refers to another layer.
    if unknown := [
        name
        for name, view in foreign
        if (owner := places.get(_place(view))) is None or aliases.get(name, owner) != owner
    ]:
        faults.append(f"only in vLLM: {first_of(unknown)}")
    if faults:
        raise BridgeError(
            f"the weights of vLLM's {type(model).__name__} cannot be shared: {'; '.join(faults)}. "
            "Serve it without --shared-weights, and update it by checkpoints or adapters"
        )
    return {name: views[name] for name in expected}


def compare_with_checkpoint(views: Mapping[str, Tensor], folder: Path) -> int:
    """Compare the first, middle and last row of every view with the checkpoint that was loaded.

    Detects what names and shapes do not show: a version of vLLM that reorders, transposes or scales a weight.

    Returns:
        How many tensors were compared.

    Raises:
        BridgeError: one differs.
    """
    comparison = compare_with_stored(views, folder)
    if comparison.first_difference is not None:
        raise BridgeError(
            f"{comparison.first_difference}: this vLLM changes the weights of this architecture when it loads them, so "
            "they cannot be shared"
        )
    return comparison.num_compared


def fused_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Parameters as vLLM names and fuses them, each once, without the padding of vocabularies.

    Atropos's trainer expects these, and splits the fused ones by the model's configuration.
    """
    seen: set[int] = set()
    parameters: dict[str, Tensor] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        path = module_name.replace(_LORA_WRAPPING, "")
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                rows = getattr(module, "org_vocab_size", None)
                data = parameter.detach()
                parameters[".".join(filter(None, (path, leaf)))] = data if rows is None else data[:rows]
    return parameters


def move_into_segment(model: nn.Module, segment: str) -> int:
    """Move a model's parameters into a new POSIX segment.

    Returns:
        The address at which the segment begins in this process.

    Raises:
        BridgeError: shared memory is full, or layers keep packed copies of their weights.
    """
    parameters = dict(model.named_parameters())
    manifest, shared = export_tensors({name: p.data for name, p in parameters.items()}, segment)
    for name, parameter in parameters.items():
        parameter.data = shared[name]
    for module in model.modules():
        if hasattr(module, "cpu_linear"):  # may hold a packed copy
            module.__dict__["cpu_linear"] = torch.nn.functional.linear
    first = next(iter(manifest))
    handle = manifest[first].handle
    assert isinstance(handle, PosixHandle)
    return shared[first].data_ptr() - handle.offset_bytes


def _all_views(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, with fused ones split as in transformers; tied ones under each of their names."""
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        path = module_name.replace(_LORA_WRAPPING, "")
        owner, _, last = path.rpartition(".")
        for leaf, parameter in module.named_parameters(recurse=False):
            data = parameter.detach()
            parts = packed.get(last, [last])
            if len(parts) > 1:
                sizes = _row_counts(path, module, data, len(parts))
                for part, start, size in zip(parts, accumulate([0, *sizes[:-1]]), sizes, strict=True):
                    yield ".".join(filter(None, (owner, part, leaf))), data[start : start + size]
            else:
                rows = getattr(module, "org_vocab_size", None)
                yield ".".join(filter(None, (path, leaf))), data if rows is None else data[:rows]


def _row_counts(path: str, module: nn.Module, data: Tensor, num_parts: int) -> list[int]:
    sizes = [int(size) for size in getattr(module, "output_sizes", ())]
    if len(sizes) != num_parts or sum(sizes) != data.shape[0]:
        raise BridgeError(
            f"{path}: {data.shape[0]} rows of {num_parts} fused projections, but vLLM has the sizes {sizes}; "
            "its weights cannot be shared"
        )
    return sizes


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()
