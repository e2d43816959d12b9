"""Attention for training: the fastest kernel for plain rows, and masked attention for rows packed with shared prompts.

Plain rows need no mask, since padding is at their end and attention is causal. Packed rows (`data.packing`) use flex
attention on a GPU, which skips masked blocks, and a dense mask on a CPU, where rows are short.
B rows, A heads, L positions, D head size.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from grpo_engine.data.packing import PackedRows
from grpo_engine.models.compiled import compiled

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

NAME = "grpo_engine"
"""Its name in transformers, which has no mask function for it, so that the model creates no mask."""

BLOCK_SIZE = 128
"""Positions per block of flex attention's masks; widths are multiples of it."""
_HOPPER = 9
_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Fastest first on Hopper: forward and backward of 16,384 positions, 16 heads of 128, take
6.6 ms with cuDNN's kernels and 12.4 ms with FlashAttention 2, which torch would choose (H200, torch 2.11). On other
GPUs FlashAttention is as fast or faster, so torch's own order is kept."""


def use_training_attention(model: PreTrainedModel) -> None:
    """Make `model` use `attend`; only for models for which `takes_any_mask` is true."""
    AttentionInterface.register(NAME, attend)
    model.config._attn_implementation = NAME


def uses_training_attention(model: PreTrainedModel) -> bool:
    """Whether `use_training_attention` was called on it."""
    return bool(model.config._attn_implementation == NAME)


def may_look(packed: PackedRows) -> Tensor | BlockMask:
    """The `attention_mask` of packed rows, for a model that uses `attend`.

    Returns:
        (R, 1, L, L) bool on a CPU; a block mask on a GPU, for one row.
    """
    segments, parents = packed.segments, packed.parents
    if segments.device.type == "cpu":
        same = segments[:, :, None] == segments[:, None, :]
        prompt = parents[:, :, None] == segments[:, None, :]
        is_past = torch.ones(same.shape[1:], dtype=torch.bool).tril()
        return ((same | prompt) & is_past)[:, None]
    [segment], [parent] = segments, parents

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_shown: Tensor = (segment[query] == segment[key]) | (parent[query] == segment[key])
        return (query >= key) & is_shown

    length = segments.shape[1]
    mask: BlockMask = _compiled_block_mask()(sees, None, None, length, length, device=segments.device)
    return mask


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with the signature that transformers calls.

    Args:
        query: (B, A, L, D); within `rows_aside` (1, A, B · L, D).
        key: with fewer heads, as `value`.
        attention_mask: from `may_look`; None: that of `rows_aside`, else causal.

    Returns:
        (B, L, A, D), or (1, B · L, A, D), and no weights.
    """
    attention_mask = _aside.mask if attention_mask is None else attention_mask
    num_rows = _aside.num_rows
    if num_rows is not None:
        query, key, value = (
            # Not `each[0]`, whose gradient is written into another tensor of zeros: 2 % of a step (Qwen3-0.6B, H200).
            torch.unflatten(each.squeeze(0), 1, (num_rows, -1)).transpose(0, 1)
            for each in (query, key, value)
        )
    if isinstance(attention_mask, BlockMask):
        output: Tensor = _compiled_flex()(query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=True)
        output = output.transpose(1, 2).contiguous()
    else:
        with _kernel_order(query.device), _kept.mode or nullcontext():
            output, _ = sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
            )
    return output if num_rows is None else reshaped(output, (1, -1, *output.shape[2:])), None


def reshaped(values: Tensor, shape: Sequence[int]) -> Tensor:
    """The same memory where possible, but no view to autograd; not to be written to."""
    result: Tensor = torch.ops.aten._unsafe_view(values.contiguous(), shape)
    return result


class _Aside(threading.local):
    """What `attend` is told of its rows; per thread, since layers are recomputed in another one."""

    num_rows: int | None = None
    mask: Tensor | BlockMask | None = None


_aside = _Aside()


@contextmanager
def rows_aside(num_rows: int, mask: Tensor | BlockMask | None) -> Iterator[None]:
    """Tell `attend`, past the compiled code in between, how many rows its one row is, and their mask."""
    before = _aside.num_rows, _aside.mask
    _aside.num_rows, _aside.mask = num_rows, mask
    try:
        yield
    finally:
        _aside.num_rows, _aside.mask = before


def keeping_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """A `context_fn` for `torch.utils.checkpoint` that keeps attention's outputs instead of recomputing them.

    torch's own selective checkpointing is a dispatch mode around the whole layer, which disables compiled code.
    """
    outputs: list[Any] = []
    return _within(_Recording(outputs)), _within(_Replaying(outputs))


class _Kept(threading.local):
    """The dispatch mode in which attention runs; per thread, since backward runs in another one."""

    mode: TorchDispatchMode | None = None


_kept = _Kept()


@contextmanager
def _within(mode: TorchDispatchMode) -> Iterator[None]:
    before, _kept.mode = _kept.mode, mode
    try:
        yield
    finally:
        _kept.mode = before


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the outputs of attention kernels."""

    def __init__(self, outputs: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outputs = outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if _is_attention(func):
            self._outputs.append(tree_map_only(Tensor, Tensor.detach, output))
        return output


class _Replaying(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns the recorded outputs, in the same order, instead of running the kernels."""

    def __init__(self, outputs: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outputs = outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._outputs.pop(0) if _is_attention(func) else func(*args, **(kwargs or {}))


def _is_attention(func: Any) -> bool:
    return str(func.name()).startswith("aten::_scaled_dot_product")


def _kernel_order(device: torch.device) -> AbstractContextManager[None]:
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _HOPPER:
        return sdpa_kernel(_KERNELS, set_priority=True)
    return nullcontext()


@cache
def _compiled_flex() -> Any:
    """Compiled once: uncompiled flex attention allocates all scores of a row."""
    log.info("compiling attention for packed rows: some 20 s, once on a machine")
    return compiled(flex_attention)


@cache
def _compiled_block_mask() -> Any:
    """Compiled once: uncompiled, a block mask takes a byte per pair of positions while it is created."""
    return compiled(create_block_mask)
