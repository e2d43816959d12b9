"""Nested state on disk, without pickle: tensors as safetensors, everything around them as JSON.

    <name>.json                  the nesting, with a name in the place of every tensor
    <name>-00001.safetensors …   the tensors

For what optimizers and the like give as `state_dict()`: dictionaries (whose keys may be numbers), lists, tuples,
tensors, and plain values. Knows nothing of training.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_engine.models.tensor_files import WRITERS, can_write, write_tensors
from grpo_engine.wire.codec import read_whole, require_regular

SHARD_BYTES = 4 * 2**30
"""Of one file of tensors; so much host memory writing takes at most, where tensors of a GPU are not contiguous."""

_TENSOR, _TUPLE, _DICT, _FLOAT, _DTYPE = "tensor", "tuple", "dict", "float", "dtype"
"""Keys of the one-entry objects that JSON has no notation of its own for."""


def write_state(folder: Path, name: str, state: Any, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write `state` into files of `folder` that begin with `name`.

    A tensor that occurs several times is written once, and is one tensor again after `read_state`.

    Raises:
        TypeError: it holds something else than the module says; names where.
        OSError, SafetensorError: the disk refuses.
    """
    tensors: dict[str, Tensor] = {}
    outline = _Outliner(tensors).outline(state, "")
    files = []
    with ThreadPoolExecutor(WRITERS) as pool:
        writings = []
        for number, names in enumerate(_shards(tensors, shard_bytes), start=1):
            files.append(f"{name}-{number:05d}.safetensors")
            content = {key: tensors[key] for key in names}
            if all(map(can_write, content.values())):
                writings.append(pool.submit(write_tensors, content, folder / files[-1]))
            else:
                save_file(_storable(content), folder / files[-1])
    for writing in writings:
        writing.result()
    text = json.dumps({"files": files, "state": outline}, allow_nan=False)
    (folder / f"{name}.json").write_text(text, encoding="utf-8")


def read_state(folder: Path, name: str) -> Any:
    """What `write_state` was given; tensors are on the CPU.

    Raises:
        OSError, ValueError, KeyError, TypeError, SafetensorError: a file is missing or damaged.
    """
    content = json.loads(read_whole(folder / f"{name}.json"))
    tensors: dict[str, Tensor] = {}
    for file in content["files"]:
        if Path(file).name != file:
            raise ValueError(f"{file!r} is not a file of this folder")
        require_regular(folder / file)
        tensors |= load_file(folder / file)
    return _rebuilt(content["state"], tensors)


class _Outliner:
    """Takes the tensors out of a nesting, and gives each a name that says where it was."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._known: dict[tuple[object, ...], str] = {}

    def outline(self, value: Any, path: str) -> Any:
        match value:
            case None | bool() | int() | str():
                return value
            case float():
                return value if math.isfinite(value) else {_FLOAT: repr(value)}
            case Tensor():
                return {_TENSOR: self._name(value, path)}
            case torch.dtype():
                return {_DTYPE: str(value).removeprefix("torch.")}
            case list():
                return [self.outline(item, f"{path}/{index}") for index, item in enumerate(value)]
            case tuple():
                return {_TUPLE: [self.outline(item, f"{path}/{index}") for index, item in enumerate(value)]}
            case dict():
                items = [
                    [self.outline(key, f"{path}/key"), self.outline(item, f"{path}/{key}")]
                    for key, item in value.items()
                ]
                return {_DICT: items}
            case _:
                raise TypeError(f"{path or 'state'}: a {type(value).__name__} cannot be saved")

    def _name(self, tensor: Tensor, path: str) -> str:
        memory = (tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride())
        if tensor.numel() > 0 and memory in self._known:
            return self._known[memory]
        name = path.removeprefix("/") or "tensor"
        while name in self._tensors or name == "__metadata__":  # keys may hold slashes; safetensors reserves the other
            name += "'"
        self._tensors[name] = tensor
        self._known[memory] = name
        return name


def _shards(tensors: dict[str, Tensor], shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    num_bytes = 0
    for name, tensor in tensors.items():
        if names and num_bytes + tensor.nbytes > shard_bytes:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += tensor.nbytes
    if names:
        yield names


def _storable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, contiguous, and each with memory of its own, as safetensors asks; copied only where it is not so."""
    storable: dict[str, Tensor] = {}
    memories: set[int] = set()
    for name, tensor in tensors.items():
        on_cpu = tensor.detach().cpu().contiguous()
        memory = on_cpu.untyped_storage()
        if memory.nbytes() != on_cpu.nbytes or memory.data_ptr() in memories:
            on_cpu = on_cpu.clone()
        memories.add(on_cpu.untyped_storage().data_ptr())
        storable[name] = on_cpu
    return storable


def _rebuilt(outline: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(outline, list):
        return [_rebuilt(item, tensors) for item in outline]
    if not isinstance(outline, dict):
        return outline
    [(kind, content)] = outline.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "tuple":
            return tuple(_rebuilt(item, tensors) for item in content)
        case "dict":
            return {_rebuilt(key, tensors): _rebuilt(item, tensors) for key, item in content}
        case "float":
            return float(content)
        case "dtype" if isinstance(dtype := getattr(torch, content), torch.dtype):
            return dtype
        case _:
            raise ValueError(f"unknown kind of value: {kind!r}: {content!r:.300}")
