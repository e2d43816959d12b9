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
from grpo_engine.server.receiving import Part
from grpo_engine.wire.bridge_file import PosixHandle

if TYPE_CHECKING:
    from torch import Tensor, nn

_LORA_WRAPPING = ".base_layer"
_OWN_SCALES = frozenset({"_q_scale", "_k_scale", "_v_scale", "_prob_scale"})
"""Buffers of attention that are 1 in unquantized models, whatever was loaded."""
_TRANSPOSED = {"GPT2LMHeadModel": frozenset({"c_attn", "c_proj", "c_fc"})}
"""By vLLM's model class: layers whose matrices transformers has the other way round (`Conv1D`)."""


def views_under_hf_names(
    model: nn.Module, expected: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str]
) -> dict[str, Tensor]:
    """Views of a vLLM model's parameters, one for each name in `expected`; arguments and errors as for the parts."""
    parts = parts_under_hf_names(model, expected, aliases)
    return {name: part.memory for name, part in parts.items()}


def parts_under_hf_names(
    model: nn.Module,
    expected: Mapping[str, tuple[int, ...]],
    aliases: Mapping[str, str],
    *,
    rank: int = 0,
    num_ranks: int = 1,
) -> dict[str, Part]:
    """Where a vLLM process of a tensor-parallel server keeps its part of each parameter in `expected`.

    Args:
        expected: names in transformers → shapes of the whole parameters.
        aliases: tied parameters of the transformers model: the second name → the one in `expected`.
        rank, num_ranks: of this process among those that hold parts of the model.

    Raises:
        BridgeError: the two models have different parameters; the message names the differences.
    """
    parts: dict[str, Part] = {}
    foreign: list[tuple[str, Tensor]] = []
    misshapen = []
    for name, view, first_row in _all_views(model, num_ranks):
        if name not in expected:
            foreign.append((name, view))
            continue
        try:
            parts[name] = Part(view, _place_in_whole(tuple(view.shape), expected[name], first_row, rank, num_ranks))
        except ValueError:
            parts[name] = Part(view)
            misshapen.append(f"{name} {tuple(view.shape)} instead of {expected[name]}")
    faults = []
    if missing := [name for name in expected if name not in parts]:
        faults.append(f"not found in vLLM: {first_of(missing)}")
    if misshapen:
        faults.append(f"of another shape: {first_of(misshapen)}")
    owners = {_address(part.memory): name for name, part in parts.items()}
    if len(owners) < len(parts):
        faults.append("one tensor in vLLM, but several in transformers (tied embeddings?)")
    # The same memory under a second name is a tied parameter, or a wrapper that refers to another layer.
    if unknown := [
        name
        for name, view in foreign
        if (owner := owners.get(_address(view))) is None or aliases.get(name, owner) != owner
    ]:
        faults.append(f"only in vLLM: {first_of(unknown)}")
    if faults:
        raise BridgeError(
            f"the weights of vLLM's {type(model).__name__} cannot be shared: {'; '.join(faults)}. "
            "Serve it without --shared-weights, and update it by checkpoints or adapters"
        )
    return {name: parts[name] for name in expected}


def compare_with_checkpoint(parts: Mapping[str, Part], folder: Path, *, has_all: bool = False) -> int:
    """Compare the first, middle and last row of every part with the checkpoint that was loaded.

    Detects what names and shapes do not show: a version of vLLM that reorders, transposes or scales a weight, or
    divides it among its processes in another way.

    Args:
        has_all: the checkpoint must have every tensor: vLLM keeps what it has where a reload finds none.

    Returns:
        How many tensors were compared.

    Raises:
        BridgeError: one differs, or is missing.
    """
    comparison = compare_with_stored(
        {name: part.memory for name, part in parts.items()},
        folder,
        {name: part.place for name, part in parts.items() if part.place is not None},
    )
    if comparison.first_difference is not None:
        raise BridgeError(
            f"{comparison.first_difference}: this vLLM changes the weights of this architecture when it loads them, so "
            "they cannot be shared"
        )
    if has_all and comparison.num_compared < len(parts):
        raise BridgeError(
            f"{folder}: has only {comparison.num_compared} of the model's {len(parts)} tensors; is it complete?"
        )
    return comparison.num_compared


def has_stored_buffers(model: nn.Module) -> bool:
    """Whether a checkpoint may have values of the model besides its parameters."""
    return any(
        buffer.is_floating_point() and name not in module._non_persistent_buffers_set and name not in _OWN_SCALES
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    )


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


def _all_views(model: nn.Module, num_ranks: int) -> Iterator[tuple[str, Tensor, int | None]]:
    """Every parameter, with fused ones split as in transformers; tied ones under each of their names.

    The number is the first row of a vocabulary that this process has; None for other parameters.
    """
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    transposed = _TRANSPOSED.get(type(model).__name__, frozenset())
    for module_name, module in model.named_modules(remove_duplicate=False):
        path = module_name.replace(_LORA_WRAPPING, "")
        owner, _, last = path.rpartition(".")
        for leaf, parameter in module.named_parameters(recurse=False):
            data = parameter.detach()
            parts = packed.get(last, [last])
            if len(parts) > 1:
                sizes = _row_counts(path, module, data, len(parts), num_ranks)
                for part, start, size in zip(parts, accumulate([0, *sizes[:-1]]), sizes, strict=True):
                    yield ".".join(filter(None, (owner, part, leaf))), data[start : start + size], None
            else:
                first_row, num_rows = _vocabulary_rows(module)
                view = data[:num_rows]
                if data.ndim == 2 and num_ranks == 1 and last in transposed:
                    view = view.t()
                yield ".".join(filter(None, (path, leaf))), view, first_row


def _vocabulary_rows(module: nn.Module) -> tuple[int | None, int | None]:
    """The first row and the number of rows that this process has of a vocabulary, without padding; None elsewhere."""
    indices = getattr(module, "shard_indices", None)
    if indices is not None:
        return indices.org_vocab_start_index, indices.num_org_elements
    return None, getattr(module, "org_vocab_size", None)


def _row_counts(path: str, module: nn.Module, data: Tensor, num_parts: int, num_ranks: int) -> list[int]:
    """Rows of each fused projection in this process."""
    sizes = [int(size) // num_ranks for size in getattr(module, "output_sizes", ())]  # of k and v: repeated, then split
    if len(sizes) != num_parts or sum(sizes) != data.shape[0]:
        raise BridgeError(
            f"{path}: {data.shape[0]} rows of {num_parts} fused projections, but vLLM has the sizes {sizes}; "
            "its weights cannot be shared"
        )
    return sizes


def _place_in_whole(
    own: tuple[int, ...], whole: tuple[int, ...], first_row: int | None, rank: int, num_ranks: int
) -> tuple[slice, ...] | None:
    """Which part of a whole tensor a process has: rows or columns in the order of ranks; None: all of it.

    Where there are fewer parts than ranks, as of k and v with few heads, neighbours have the same one.

    Raises:
        ValueError: its shape is not that of a part.
    """
    if own == whole:
        return None
    if len(own) != len(whole) or num_ranks == 1:
        raise ValueError
    if first_row is not None and own[1:] == whole[1:]:
        return (slice(first_row, first_row + own[0]),)
    places = []
    for size, total in zip(own, whole, strict=True):
        num_parts, rest = divmod(total, size) if size else (0, 0)
        if num_parts == 0 or rest or num_ranks % num_parts:
            raise ValueError
        start = rank // (num_ranks // num_parts) * size
        places.append(slice(start, start + size))
    return tuple(places)


def _address(tensor: Tensor) -> tuple[int, int, int]:
    """Identifies a view also where it has no elements."""
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()) * tensor.itemsize, tensor.numel()
