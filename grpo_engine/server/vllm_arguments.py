"""What vLLM is started with: its engine arguments and the environment of its processes.

Leaves out starting it (`vllm_engine.py`). Written against vLLM 0.26 to 0.33; a version that lacks one of these
arguments is refused by name rather than started without it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import random
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from grpo_engine.bridges.process_identity import ProcessIdentity
from grpo_engine.errors import ConfigError
from grpo_engine.models.loading import load_config, resolve_model
from grpo_engine.models.stored_weights import checkpoint_folder
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.remembered import remembered_cache_bytes
from grpo_engine.server.vllm_environment import settle_environment
from grpo_engine.server.vllm_flags import vllm_arguments
from grpo_engine.server.vllm_processes import SERVER_VARIABLE, SHARE_VARIABLE
from grpo_engine.server.vllm_requirements import FAST_LOADER, can_load_through_gpu, visible_gpus

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

WORKER_CLASS = "grpo_engine.server.vllm_worker.GrpoWorker"
_HOW_TO_LOAD = {"load_format", "model_loader_extra_config", "quantization"}
"""Arguments of the user's that say how weights are read."""
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's kernels are compiled for these."""
_NUM_ADAPTERS = 2
"""The one that is served, and the one before it, on which requests may still run."""
_SAGEMAKER_LOGGER = "model_hosting_container_standards"
"""Thirty lines at every start about routes of SageMaker, which nobody uses here."""
_CPU_CACHE_BYTES = 1 << 30
"""On a CPU, vLLM would take `gpu_memory_utilization` of the whole machine's memory for its cache."""
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

logger = logging.getLogger(__name__)


def prepare_environment(config: ServerConfig, environment: MutableMapping[str, str]) -> None:
    """Set what vLLM and its processes read from the environment; called before vLLM is imported.

    Raises:
        ConfigError: settings that exclude each other.
    """
    me = ProcessIdentity.of_this_process()
    environment[SERVER_VARIABLE] = f"{me.pid}:{me.start_ticks}"
    environment[SHARE_VARIABLE] = "1" if config.shared_weights else "0"
    settle_environment(config, environment)
    logging.getLogger(_SAGEMAKER_LOGGER).addFilter(_is_never_said)  # its level and `disabled` are set anew by others
    _check_sharing(config, environment)
    _choose_gpu(config, environment)


def _is_never_said(_record: logging.LogRecord) -> bool:
    return False


def check_platform(config: ServerConfig) -> None:
    """Refuse a device that the installed vLLM is not built for.

    Raises:
        ConfigError: it is not.
    """
    from vllm.platforms import current_platform

    wanted = config.device.partition(":")[0]
    built_for = str(current_platform.device_type) or "nothing here"
    if wanted not in ("auto", built_for):
        raise ConfigError(
            f"--device {config.device}: this vLLM runs on {built_for}; "
            f"install the build for {wanted}, or leave --device out"
        )


def engine_arguments(config: ServerConfig) -> AsyncEngineArgs:
    """The arguments as vLLM takes them.

    Raises:
        ConfigError: this vLLM does not know one of them.
        ModelError: no such model.
    """
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    is_cpu = bool(current_platform.is_cpu())
    values, given = _values(config, is_cpu=is_cpu), vllm_arguments(config.vllm).engine
    if not is_cpu and not given.keys() & _HOW_TO_LOAD and _loads_fast(config):
        values["load_format"] = FAST_LOADER
    if "hf_overrides" in values and "hf_overrides" in given:
        given["hf_overrides"] = values["hf_overrides"] | given["hf_overrides"]
    values |= given
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    if missing := sorted(values.keys() - known):
        raise ConfigError(f"vLLM {vllm.__version__} has no engine argument {', '.join(missing)}; install 0.26 to 0.33")
    return AsyncEngineArgs(**values)


def _values(config: ServerConfig, *, is_cpu: bool) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model": resolve_model(config.model_name),
        "dtype": config.dtype,
        "max_model_len": _fitting_length(config),
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": config.enforce_eager,
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_num_seqs": config.max_batch_size,
        # vLLM's own default seed is 0: the same samples after every start.
        "seed": random.SystemRandom().getrandbits(31) if config.seed is None else config.seed,
        "logprobs_mode": f"{config.logprobs_mode}_logprobs",
        "max_logprobs": -1,
        # The checkpoint's own defaults would change top_p or penalties behind the trainer's back.
        "generation_config": "vllm",
        "served_model_name": [config.served_model_name or config.model_name],
        "disable_log_stats": False,  # /metrics counts by them
        "worker_extension_cls": WORKER_CLASS,
    }
    if config.enable_lora:
        values |= {
            "enable_lora": True,
            "max_lora_rank": _served_rank(config.max_lora_rank),
            "max_loras": _NUM_ADAPTERS,
            "max_cpu_loras": 8 * _NUM_ADAPTERS,  # long requests may outlast several; read again, they would cost time
        }
    if config.kv_cache_memory_bytes is not None:
        values["kv_cache_memory_bytes"] = config.kv_cache_memory_bytes
    elif is_cpu:  # VLLM_CPU_KVCACHE_SPACE still wins over it
        values["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES
    elif (remembered := remembered_cache_bytes()) is not None:
        # Measured again while a trainer lets go of memory, it might come out wrong, or end the start.
        values["kv_cache_memory_bytes"] = remembered
    if config.cuda_graph_sizes is not None:
        values["cudagraph_capture_sizes"] = list(config.cuda_graph_sizes)
    if is_cpu and config.shared_weights and not config.enforce_eager:
        # With compilation, inductor may freeze weights into the compiled code on this platform.
        logger.info("Shared weights on a CPU: serving without compilation")
        values["enforce_eager"] = True
    if not is_cpu and config.logprobs_mode == "processed" and config.dtype != "float32":
        # vLLM 0.26 divides by the temperature in the logits' own type: in bfloat16 that is off by 2**-9 of a logit.
        values["hf_overrides"] = {"head_dtype": "float32"}
    return values


def _loads_fast(config: ServerConfig) -> bool:
    """Whether fastsafetensors, which vLLM comes with, reads the weights: 16 GB in 0.6 s from the page cache, not 3."""
    folder = checkpoint_folder(config.model_name)
    is_there = importlib.util.find_spec(FAST_LOADER) is not None
    return is_there and folder is not None and can_load_through_gpu(config, folder, visible_gpus(os.environ) or [])


def _fitting_length(config: ServerConfig) -> int:
    """The longest sequence: what was asked for, or what the model's positions allow."""
    text_config = load_config(config.model_name).get_text_config()
    limit = getattr(text_config, "max_position_embeddings", None)
    rotary = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    is_scaled = "factor" in rotary  # vLLM knows how far that reaches, and refuses what is longer
    if not isinstance(limit, int) or is_scaled or config.max_model_len <= limit:
        return config.max_model_len
    logger.warning(
        "--max-model-len %d: %s ends at %d tokens; using that", config.max_model_len, config.model_name, limit
    )
    return limit


def _served_rank(rank: int) -> int:
    fitting = next((size for size in _LORA_RANKS if size >= rank), None)
    if fitting is None:
        raise ConfigError(f"--max-lora-rank {rank}: vLLM serves adapters up to rank {_LORA_RANKS[-1]}")
    return fitting


def _check_sharing(config: ServerConfig, environment: Mapping[str, str]) -> None:
    if not config.shared_weights:
        return
    if config.tensor_parallel_size != 1:
        raise ConfigError(
            f"--tensor-parallel-size {config.tensor_parallel_size} with --shared-weights: every rank would hold a part "
            "of each tensor, and the trainer needs whole ones; serve on one GPU, or hand over checkpoints or adapters"
        )
    for name in _ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in environment.get(name, "").lower():
            raise ConfigError(
                f"{name}={environment[name]} with --shared-weights: expandable segments cannot be exported to the "
                "trainer; unset it for the server"
            )


def _choose_gpu(config: ServerConfig, environment: MutableMapping[str, str]) -> None:
    """vLLM takes the first visible GPU; `cuda:N` makes the N-th visible one the only one."""
    kind, _, index = config.device.partition(":")
    if kind != "cuda" or not index:
        return
    if config.tensor_parallel_size != 1:
        raise ConfigError(
            f"--device {config.device} with --tensor-parallel-size {config.tensor_parallel_size}: "
            "choose the GPUs with CUDA_VISIBLE_DEVICES"
        )
    visible = [entry for entry in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry]
    if not index.isdigit() or (visible and int(index) >= len(visible)):
        raise ConfigError(f"--device {config.device}: CUDA_VISIBLE_DEVICES={','.join(visible)} has no such GPU")
    environment["CUDA_VISIBLE_DEVICES"] = visible[int(index)] if visible else index
