"""vLLM's engine arguments and the environment of its processes.

vLLM is started in `engine.py`. Written for vLLM 0.26 to 0.33; a version without one of these arguments is refused, with
the argument's name.
"""

from __future__ import annotations

import dataclasses
import logging
import mmap
import random
import struct
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from grpo_engine.errors import ConfigError
from grpo_engine.models.config import why_not_splittable
from grpo_engine.models.devices import asked_for_pieces
from grpo_engine.models.loading import load_config, resolve_model
from grpo_engine.processes import ProcessIdentity
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.vllm.environment import settle_environment
from grpo_engine.server.vllm.flags import vllm_arguments
from grpo_engine.wire.environment_variables import VLLM_SERVER_VARIABLE, VLLM_SHARE_VARIABLE

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

WORKER_CLASS = "grpo_engine.server.vllm.worker.GrpoWorker"
SCHEDULER = "grpo_engine.server.vllm.scheduling.forgetting_scheduler"
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM's kernels are compiled for."""
_NUM_ADAPTERS = 2
"""The served adapter, and the previous one, which running requests may still use."""
_SAGEMAKER_LOGGER = "model_hosting_container_standards"
"""Logs thirty lines at every start about routes of SageMaker, which are not used here."""
_CPU_CACHE_BYTES = 1 << 30
"""On a CPU, vLLM would use `gpu_memory_utilization` of the whole machine's memory for its cache."""
_CACHE_BYTES = struct.Struct("q")
_shared_page = mmap.mmap(-1, mmap.PAGESIZE)
"""Shared by all servers that are forked from one fork server, which imports this module before it forks."""

logger = logging.getLogger(__name__)


def prepare_environment(config: ServerConfig, environment: MutableMapping[str, str]) -> None:
    """Set the environment of vLLM and its processes; called before vLLM is imported.

    Raises:
        ConfigError: settings contradict each other.
    """
    me = ProcessIdentity.of_this_process()
    environment[VLLM_SERVER_VARIABLE] = f"{me.pid}:{me.start_ticks}"
    environment[VLLM_SHARE_VARIABLE] = "1" if config.changes_in_place else "0"
    settle_environment(config, environment)
    logging.getLogger(_SAGEMAKER_LOGGER).addFilter(_reject)  # other code resets its level and `disabled`
    _check_sharing(config, environment)
    _choose_gpu(config, environment)


def _reject(_record: logging.LogRecord) -> bool:
    return False


def store_cache_bytes(num_bytes: int) -> None:
    """Keep the size of the KV cache on each GPU, as vLLM measured it, for the next server of the same fork server."""
    _CACHE_BYTES.pack_into(_shared_page, 0, num_bytes)


def stored_cache_bytes() -> int | None:
    """The size that an earlier server of the same fork server, hence with the same settings, has stored."""
    return _CACHE_BYTES.unpack_from(_shared_page)[0] or None


def check_platform(config: ServerConfig) -> None:
    """Refuse a device that the installed vLLM is not built for.

    Raises:
        ConfigError: the device is not supported.
    """
    from vllm.platforms import current_platform

    wanted = config.device.partition(":")[0]
    built_for = str(current_platform.device_type) or "no device"
    if wanted not in ("auto", built_for):
        raise ConfigError(
            f"--device {config.device}: this vLLM runs on {built_for}; "
            f"install the build for {wanted}, or leave --device out"
        )


def engine_arguments(config: ServerConfig) -> AsyncEngineArgs:
    """The settings as vLLM's engine arguments; raises as `engine_settings`."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(**engine_settings(config))


def engine_settings(config: ServerConfig) -> dict[str, Any]:
    """The same by the names of vLLM's arguments.

    Raises:
        ConfigError: this vLLM does not know one of them.
        ModelError: no such model.
    """
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    is_cpu = bool(current_platform.is_cpu())
    values, given = _values(config, is_cpu=is_cpu), vllm_arguments(config.vllm).engine
    if "hf_overrides" in values and "hf_overrides" in given:
        given["hf_overrides"] = values["hf_overrides"] | given["hf_overrides"]
    values |= given
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    if missing := sorted(values.keys() - known):
        raise ConfigError(f"vLLM {vllm.__version__} has no engine argument {', '.join(missing)}; install 0.26 to 0.33")
    return values


def _values(config: ServerConfig, *, is_cpu: bool) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model": resolve_model(config.model_name),
        "dtype": config.dtype,
        "max_model_len": _fitting_length(config),
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": config.enforce_eager,
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_num_seqs": config.max_batch_size,
        "scheduling_policy": "priority",  # that of requests without the token is lower: see `Generations.outputs_of`
        # vLLM's default seed is 0, which gives the same samples after every start.
        "seed": random.SystemRandom().getrandbits(31) if config.seed is None else config.seed,
        "logprobs_mode": f"{config.logprobs_mode}_logprobs",
        # A checkpoint's sampling defaults would silently change top_p or penalties.
        "generation_config": "vllm",
        "served_model_name": [config.served_model_name or config.model_name],
        "disable_log_stats": False,  # /metrics needs them
        "worker_extension_cls": WORKER_CLASS,
    }
    if config.keep_kv_cache:
        values["scheduler_cls"] = SCHEDULER
    if config.enable_lora:
        values |= {
            "enable_lora": True,
            "max_lora_rank": _served_rank(config.max_lora_rank),
            "max_loras": _NUM_ADAPTERS,
            "max_cpu_loras": 8 * _NUM_ADAPTERS,  # long requests may use several; loading them again would cost time
        }
    if config.kv_cache_memory_bytes is not None:
        values["kv_cache_memory_bytes"] = config.kv_cache_memory_bytes
    elif is_cpu:  # VLLM_CPU_KVCACHE_SPACE still overrides it
        values["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES
    elif (stored := stored_cache_bytes()) is not None:
        # A new measurement while a trainer frees memory might be wrong, or fail the start.
        values["kv_cache_memory_bytes"] = stored
    if config.cuda_graph_sizes is not None:
        values["cudagraph_capture_sizes"] = list(config.cuda_graph_sizes)
    if config.enable_sleep_mode and not is_cpu:
        values["enable_sleep_mode"] = True
    if is_cpu and config.changes_in_place and not config.enforce_eager:
        # With compilation, inductor may embed weights as constants in the compiled code on this platform.
        logger.info("Weights that change in place, on a CPU: compilation is off")
        values["enforce_eager"] = True
    if not is_cpu and config.logprobs_mode == "processed" and config.dtype != "float32":
        # vLLM 0.26 divides by the temperature in the logits' own type: in bfloat16 that is off by 2**-9 of a logit.
        values["hf_overrides"] = {"head_dtype": "float32"}
    return values


def _fitting_length(config: ServerConfig) -> int:
    """The longest sequence: `max_model_len`, or the model's number of positions if that is smaller."""
    text_config = load_config(config.model_name).get_text_config()
    limit = getattr(text_config, "max_position_embeddings", None)
    rotary = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    is_scaled = "factor" in rotary  # vLLM computes the scaled limit, and refuses a longer one
    if not isinstance(limit, int) or is_scaled or config.max_model_len <= limit:
        return config.max_model_len
    logger.warning(
        "--max-model-len %d: %s has only %d positions; using that", config.max_model_len, config.model_name, limit
    )
    return limit


def _served_rank(rank: int) -> int:
    fitting = next((size for size in _LORA_RANKS if size >= rank), None)
    if fitting is None:
        raise ConfigError(f"--max-lora-rank {rank}: vLLM serves adapters up to rank {_LORA_RANKS[-1]}")
    return fitting


def _check_sharing(config: ServerConfig, environment: Mapping[str, str]) -> None:
    if (config.shared_weights or config.enable_sleep_mode) and (told := asked_for_pieces(environment)):
        flag, why = (
            ("--enable-sleep-mode", "cannot be freed by vLLM's sleep mode")
            if config.enable_sleep_mode
            else ("--shared-weights", "cannot be exported to the trainer")
        )
        raise ConfigError(f"{told} with {flag}: expandable segments {why}; unset it for the server")
    if not config.shared_weights:
        return
    if config.tensor_parallel_size != 1:
        model = load_config(config.model_name).to_dict()
        if (problem := why_not_splittable(model, config.tensor_parallel_size)) is not None:
            raise ConfigError(f"--tensor-parallel-size {config.tensor_parallel_size} with --shared-weights: {problem}")


def _choose_gpu(config: ServerConfig, environment: MutableMapping[str, str]) -> None:
    """Make the N-th visible GPU of `cuda:N` the only visible one, because vLLM uses the first."""
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
