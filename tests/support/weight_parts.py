"""Parts of a model in shared memory, divided and fused as vLLM's tensor parallel processes have them, without vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from grpo_engine.bridges.memory.shared_tensors import export_tensors, map_tensors, segments_of_file, unlink_segments
from grpo_engine.bridges.memory.weight_lock import WeightLock
from grpo_engine.processes import ProcessIdentity
from grpo_engine.wire.bridge_file import BridgeFile, PosixHandle, WeightPart

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
BY_COLUMNS = ("o_proj", "down_proj")
PADDED_TO = 64
"""Words; a vocabulary is padded to a multiple, which is divided."""


@contextmanager
def exported_parts(folder: Path, num_parts: int, stem: str) -> Iterator[BridgeFile]:
    """The parts of a saved model, beside a weight lock; removed at the end."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    aliases = {
        name: first
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if (first := names[id(parameter)]) != name
    }
    me = ProcessIdentity.of_this_process()
    lock = WeightLock.create(f"grpo-{stem}-fence")
    head_dim = model.config.head_dim
    parts = [
        _export(dict(model.named_parameters()), head_dim, rank, num_parts, f"grpo-{stem}-weights-{rank}")
        for rank in range(num_parts)
    ]
    file = BridgeFile(
        model=str(folder),
        pid=me.pid,
        pid_start_ticks=me.start_ticks,
        instance=stem,
        fence_segment=f"grpo-{stem}-fence",
        tensors={},
        parts=parts,
        aliases=aliases,
    )
    try:
        yield file
    finally:
        lock.close()
        unlink_segments(segments_of_file(file))


def whole_weights(file: BridgeFile) -> dict[str, Tensor]:
    """What the parts are together; those that several processes have must be equal."""
    dtypes = {name: tensor.dtype for name, tensor in map_tensors(file.parts[0]).items()}
    whole = {name: torch.full(part.whole, torch.nan, dtype=dtypes[name]) for name, part in file.parts[0].items()}
    for parts in file.parts:
        for name, tensor in map_tensors(parts).items():
            region = tuple(slice(a, a + n) for a, n in zip(parts[name].start, tensor.shape, strict=True))
            before = whole[name][region]
            assert torch.equal(before[~before.isnan()], tensor[~before.isnan()]), name
            whole[name][region] = tensor
    return whole


def _export(
    parameters: dict[str, Tensor], head_dim: int, rank: int, num_parts: int, segment: str
) -> dict[str, WeightPart]:
    own: dict[str, tuple[Tensor, list[int]]] = {
        name: _part(name, tensor.detach(), head_dim, rank, num_parts) for name, tensor in parameters.items()
    }
    fused: dict[str, list[str]] = {}
    for name in own:
        module, leaf = name.rsplit(".", 2)[-2:] if name.count(".") else ("", name)
        stem = name.removesuffix(f"{module}.{leaf}")
        key = next((f"{stem}{whole}.{leaf}" for whole, parts in FUSED.items() if module in parts), name)
        fused.setdefault(key, []).append(name)
    memory = {}
    for key, names in fused.items():
        tensor = torch.cat([own[name][0] for name in names])
        if "embed_tokens" in key or "lm_head" in key:  # rows of padding, which must not be trained
            rows = -(-len(parameters[key]) // PADDED_TO) * PADDED_TO // num_parts
            tensor = torch.cat(
                [tensor, torch.full((rows - len(tensor), tensor.shape[1]), torch.nan, dtype=tensor.dtype)]
            )
        memory[key] = tensor
    manifest, _ = export_tensors(memory, segment)
    result = {}
    for key, names in fused.items():
        handle, offset = manifest[key].handle, 0
        assert isinstance(handle, PosixHandle)
        for name in names:
            tensor, start = own[name]
            result[name] = WeightPart(
                handle=PosixHandle(segment=segment, offset_bytes=handle.offset_bytes + offset),
                shape=tuple(tensor.shape),
                stride=manifest[key].stride,
                dtype=str(tensor.dtype),
                start=tuple(start),
                whole=tuple(parameters[name].shape),
            )
            offset += tensor.nbytes
    return result


def _part(name: str, whole: Tensor, head_dim: int, rank: int, num_parts: int) -> tuple[Tensor, list[int]]:
    """This process's part, and where it begins."""
    module, leaf = name.rsplit(".", 2)[-2:] if name.count(".") > 0 else ("", name)
    start, dimension = [0] * whole.ndim, 0
    if module in ("embed_tokens", "lm_head"):
        size = -(-len(whole) // PADDED_TO) * PADDED_TO // num_parts
        first = min(rank * size, len(whole))
        size = min(size, len(whole) - first)
    elif module in ("k_proj", "v_proj"):
        heads = len(whole) // head_dim
        size = max(heads // num_parts, 1) * head_dim
        first = rank * heads // num_parts * head_dim
    elif module in BY_COLUMNS and leaf == "weight":
        dimension, size = 1, whole.shape[1] // num_parts
        first = rank * size
    elif module in (*FUSED["qkv_proj"], *FUSED["gate_up_proj"]):
        size = len(whole) // num_parts
        first = rank * size
    else:
        return whole.clone(), start
    start[dimension] = first
    return whole.narrow(dimension, first, size).clone(), start
