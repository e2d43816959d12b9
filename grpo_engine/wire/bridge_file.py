"""The bridge file: how a trainer finds and maps the weights that an inference server holds.

Written by the inference server once it serves, atomically; removed when it exits. Read by the `shared_vllm` bridge. The
same format carries POSIX shared memory (CPU) and CUDA IPC handles (GPU); a `WeightLock` page is always POSIX shared
memory.

Stock Atropos has a file of the same name in another form, which its trainer reads and its example server writes. The
two forms share no key but the model's name, so one file holds both.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from grpo_engine.wire.codec import Message

FORMAT_VERSION = 1


SegmentName = Annotated[str, Field(pattern=r"^[^/]*$")]
"""A name below /dev/shm, never a path to another folder: the process that maps it writes into it."""


class PosixHandle(Message):
    """A tensor in a POSIX shared-memory segment."""

    kind: Literal["posix"] = "posix"
    segment: SegmentName
    offset_bytes: int = Field(ge=0)


class ExportedStorage(Message):
    """Another process's CUDA memory: the eight values of `torch.UntypedStorage._share_cuda_()`, and the offset of a
    tensor in it."""

    device_index: int
    ipc_handle_b64: str
    storage_size: int
    """In bytes."""
    storage_offset_orig: int
    ref_counter_handle_b64: str
    ref_counter_offset: int
    event_handle_b64: str
    event_sync_required: bool
    tensor_storage_offset: int
    """In elements."""


class CudaHandle(ExportedStorage):
    """A tensor in another process's CUDA memory."""

    kind: Literal["cuda_ipc"] = "cuda_ipc"
    gpu_uuid: str


class SharedTensor(Message):
    """One tensor; its key is the parameter name in the model."""

    handle: Annotated[PosixHandle | CudaHandle, Field(discriminator="kind")]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    """As torch prints it, e.g. `torch.bfloat16`."""


class WeightPart(SharedTensor):
    """What one process of a tensor parallel server has of a tensor; its key is the parameter name in the model."""

    start: tuple[int, ...]
    """Where it begins in the whole tensor."""
    whole: tuple[int, ...]
    """Shape of the whole tensor."""


class BridgeFile(Message):
    """Everything a trainer needs to attach."""

    format_version: int = FORMAT_VERSION
    model: str
    pid: int
    pid_start_ticks: int
    """Field 22 of /proc/<pid>/stat: the file is stale when its writer has exited, also if the pid was reused."""
    instance: str
    fingerprint: str = ""
    """Of model, configuration and dtype: a server that finds the file of an exited server takes over its memory."""
    fence_segment: SegmentName
    """POSIX segment of the fence page (see `grpo_engine.bridges.memory.weight_lock`)."""
    tensors: dict[str, SharedTensor]
    """Empty where each of several processes has a part."""
    parts: list[dict[str, WeightPart]] = []
    """Of a tensor parallel server: of each of its processes, by their ranks."""
    aliases: dict[str, str] = {}
    """Tied parameters: name → the name in `tensors`, e.g. `lm_head.weight` → `model.embed_tokens.weight`."""
    is_all_of_checkpoint: bool = False
    """Whether a server whose memory has these tensors needs nothing else from the checkpoint."""


class StockHandle(ExportedStorage):
    """A CUDA tensor as Atropos describes it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


class StockMapping(Message):
    """What Atropos states for a parameter besides its handle."""

    vllm_name: str
    shape: tuple[int, ...]
    dtype: str
    device: str


class StockBridgeFile(Message):
    """Atropos's form: parameters as in vLLM, with fused projections; without handles nothing is exported."""

    model: str
    tp_degree: int = 1
    dp_shard_degree: int = 1
    num_params: int = 0
    param_names: list[str] = []
    shared_weights_enabled: bool = False
    single_copy_enabled: bool = False
    param_mappings: dict[str, StockMapping] = {}
    ipc_handles: dict[str, StockHandle] = {}


class AnnouncedWeights(BridgeFile, StockBridgeFile):
    """What our server writes: both forms."""
