"""Tensors in CUDA memory, mapped by a second process on the same GPU.

Ownership and order are in `weight_lock.py`: the exporting process must outlive every reader's first use, and a reader
must drop its tensors before the memory can be freed. Memory allocated under `expandable_segments:True` or by vLLM's
sleep mode cannot be exported.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING

from grpo_engine.bridges.memory.shared_tensors import LAYOUT_ERRORS, dtype_from_text, layout_fault
from grpo_engine.errors import BridgeError
from grpo_engine.wire.bridge_file import CudaHandle, SharedTensor

if TYPE_CHECKING:
    import torch


def export_cuda_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, SharedTensor]:
    """Describe tensors so that one other process can map them where they are.

    Raises:
        BridgeError: the driver refuses to export the memory.
    """
    import torch

    torch.cuda.synchronize()
    return {name: _described(name, tensor.detach()) for name, tensor in tensors.items()}


def map_cuda_tensors(manifest: Mapping[str, SharedTensor]) -> dict[str, torch.Tensor]:
    """Map the tensors of a manifest on the GPU that holds them.

    Raises:
        BridgeError: this process does not see that GPU, or the exporting process has exited.
    """
    import torch

    if not torch.cuda.is_available():
        raise BridgeError("the weights are in CUDA memory, but this process sees no GPU: check CUDA_VISIBLE_DEVICES")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    here = {gpu_uuid(index): index for index in range(torch.cuda.device_count())}
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in manifest.items():
        handle = entry.handle
        if not isinstance(handle, CudaHandle):
            raise BridgeError(f"{name}: in POSIX shared memory, not in CUDA memory")
        if handle.gpu_uuid not in here:
            raise BridgeError(
                f"the weights are on GPU {handle.gpu_uuid}, but this process sees {', '.join(here)}: "
                "single-copy sharing needs trainer and server on the same GPU"
            )
        tensors[name] = _mapped(name, entry, handle, here[handle.gpu_uuid])
    return tensors


def gpu_uuid(index: int) -> str:
    """The identity of a visible GPU, the same in every process."""
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)


def _described(name: str, tensor: torch.Tensor) -> SharedTensor:
    storage = tensor.untyped_storage()
    try:
        (device, handle, size, offset, ref_counter, ref_offset, event, event_sync) = storage._share_cuda_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise BridgeError(
            f"{name}: CUDA cannot export its memory: {error}; start the server without "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True and without sleep mode"
        ) from None
    return SharedTensor(
        handle=CudaHandle(
            kind="cuda_ipc",
            device_index=device,
            gpu_uuid=gpu_uuid(device),
            ipc_handle_b64=_text(handle),
            storage_size=size,
            storage_offset_orig=offset,
            ref_counter_handle_b64=_text(ref_counter),
            ref_counter_offset=ref_offset,
            event_handle_b64=_text(event),
            event_sync_required=event_sync,
            tensor_storage_offset=tensor.storage_offset(),
        ),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        dtype=str(tensor.dtype),
    )


def _mapped(name: str, entry: SharedTensor, handle: CudaHandle, device_index: int) -> torch.Tensor:
    import torch

    try:
        storage = torch.UntypedStorage._new_shared_cuda(
            device_index,
            base64.b64decode(handle.ipc_handle_b64),
            handle.storage_size,
            handle.storage_offset_orig,
            base64.b64decode(handle.ref_counter_handle_b64),
            handle.ref_counter_offset,
            base64.b64decode(handle.event_handle_b64),
            handle.event_sync_required,
        )
    except LAYOUT_ERRORS as error:
        raise BridgeError(f"{name}: CUDA cannot map it: {error}; is the inference server still running?") from None
    empty = torch.empty(0, dtype=dtype_from_text(entry.dtype), device=f"cuda:{device_index}")
    try:
        return empty.set_(storage, handle.tensor_storage_offset, entry.shape, entry.stride)
    except LAYOUT_ERRORS as error:
        raise BridgeError(f"{name}: {layout_fault(entry, error)}") from None


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")
