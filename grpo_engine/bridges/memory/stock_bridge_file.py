"""Conversion of Atropos's bridge file: ours for its trainer, its server's for our trainer. Pure.

vLLM fuses projections (`qkv_proj` holds the rows of q, k and v, biases too) and pads vocabularies to multiples of 64.
The file states neither, so the sizes come from the model's configuration; a mismatch is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_engine.bridges.memory.bridge_files import read_bytes
from grpo_engine.errors import BridgeError
from grpo_engine.wire.bridge_file import (
    BridgeFile,
    CudaHandle,
    SharedTensor,
    StockBridgeFile,
    StockHandle,
    StockMapping,
)
from grpo_engine.wire.codec import first_fault

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Row counts of tensors that vLLM fuses or pads."""

    query: int
    key_value: int
    intermediate: int
    vocabulary: int
    is_tied: bool

    @classmethod
    def of(cls, config: Any) -> Sizes:
        """From a transformers configuration."""
        config = config.get_text_config()
        heads = int(config.num_attention_heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        return cls(
            query=heads * head_dim,
            key_value=int(getattr(config, "num_key_value_heads", None) or heads) * head_dim,
            intermediate=int(getattr(config, "intermediate_size", None) or 0),
            vocabulary=int(config.vocab_size),
            is_tied=bool(config.tie_word_embeddings),
        )

    @property
    def fused(self) -> dict[str, dict[str, int]]:
        """Fused module → its parts and their row counts, in order."""
        keys_values = {"k_proj": self.key_value, "v_proj": self.key_value}
        return {
            "qkv_proj": {"q_proj": self.query, **keys_values},
            "gate_up_proj": {"gate_proj": self.intermediate, "up_proj": self.intermediate},
        }


def is_stock_file(path: Path) -> bool:
    """Whether the bridge file exists and has Atropos's form only."""
    try:
        keys = json.loads(read_bytes(path)).keys()
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
    return "param_mappings" in keys and "fence_segment" not in keys


def read_stock_file(path: Path) -> StockBridgeFile:
    """Read a bridge file of Atropos's form.

    Raises:
        BridgeError: it is malformed, or exports no weights that one trainer can map.
    """
    try:
        file = StockBridgeFile.model_validate_json(read_bytes(path))
    except OSError as error:
        raise BridgeError(f"{path}: cannot be read: {error.strerror}; start the inference server first") from None
    except ValidationError as error:
        raise BridgeError(f"{path}: not a bridge file of Atropos: {first_fault(error)}") from None
    if file.tp_degree != 1:
        raise BridgeError(
            f"{path}: tp_degree {file.tp_degree}: the file describes one rank's shard of every weight only; "
            "serve on one GPU"
        )
    if not file.ipc_handles:
        raise BridgeError(
            f"{path}: describes no weights (ipc_handles is empty): start its server with VLLM_ENABLE_SHARED_WEIGHTS=1, "
            "and check its log for why it exported none"
        )
    return file


def as_bridge_file(file: StockBridgeFile, sizes: Sizes, gpu_uuid: Callable[[int], str]) -> BridgeFile:
    """The same memory under the names of transformers.

    Its `fence_segment` is empty and its `pid` is 0: that server has neither a weight lock nor a process identity.

    Args:
        gpu_uuid: the identity of a GPU by its index.

    Raises:
        BridgeError: a tensor's rows are not what the configuration says.
    """
    return BridgeFile(
        model=file.model,
        pid=0,
        pid_start_ticks=0,
        instance="stock",
        fence_segment="",
        tensors={
            part: _shared(handle, gpu_uuid(handle.device_index), start, rows)
            for name, handle in file.ipc_handles.items()
            for part, start, rows in _parts(name, handle, sizes)
        },
        aliases={_HEAD: _EMBEDDING} if sizes.is_tied and _HEAD not in file.ipc_handles else {},
    )


def stock_form(model: str, fused: Mapping[str, SharedTensor]) -> StockBridgeFile:
    """An export in the form that Atropos's trainer reads.

    Args:
        fused: CUDA tensors by vLLM's own names; empty if the weights are in host memory, which it cannot map.
    """
    handles = {name: _stock_handle(entry) for name, entry in fused.items()}
    return StockBridgeFile(
        model=model,
        num_params=len(handles),
        param_names=sorted(handles),
        shared_weights_enabled=True,
        single_copy_enabled=bool(handles),
        param_mappings={
            name: StockMapping(
                vllm_name=name, shape=handle.shape, dtype=handle.dtype, device=f"cuda:{handle.device_index}"
            )
            for name, handle in handles.items()
        },
        ipc_handles=handles,
    )


def _parts(name: str, handle: StockHandle, sizes: Sizes) -> Iterator[tuple[str, int, int]]:
    """The parameters of transformers that a tensor of vLLM holds: name, first row, number of rows."""
    module, _, leaf = name.rpartition(".")
    owner, _, last = module.rpartition(".")
    parts = sizes.fused.get(last)
    if parts is not None:
        if handle.shape[0] != sum(parts.values()):
            expected = " + ".join(map(str, parts.values()))
            raise BridgeError(
                f"{name}: {handle.shape[0]} rows, but the model's configuration says {expected}: the server serves "
                "another model"
            )
        start = 0
        for part, rows in parts.items():
            yield f"{owner}.{part}.{leaf}", start, rows
            start += rows
    elif name in (_EMBEDDING, _HEAD):
        if handle.shape[0] < sizes.vocabulary:
            raise BridgeError(f"{name}: {handle.shape[0]} rows for a vocabulary of {sizes.vocabulary}")
        yield name, 0, sizes.vocabulary
    else:
        yield name, 0, handle.shape[0]


def _shared(handle: StockHandle, gpu_uuid: str, start: int, rows: int) -> SharedTensor:
    values = handle.model_dump(exclude={"shape", "stride", "dtype"})
    values["tensor_storage_offset"] += start * handle.stride[0]
    return SharedTensor(
        handle=CudaHandle(gpu_uuid=gpu_uuid, **values),
        shape=(rows, *handle.shape[1:]),
        stride=handle.stride,
        dtype=handle.dtype,
    )


def _stock_handle(entry: SharedTensor) -> StockHandle:
    assert isinstance(entry.handle, CudaHandle)
    return StockHandle(
        **entry.handle.model_dump(exclude={"kind", "gpu_uuid"}),
        shape=entry.shape,
        stride=entry.stride,
        dtype=entry.dtype,
    )
