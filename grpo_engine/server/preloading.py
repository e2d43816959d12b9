"""What a standby imports before it forks: all that a server and vLLM's processes would import after it.

The lists are what was found in `sys.modules` of a healthy server and not in its parent's
(`benchmarks/restart.py --imports` tells what is still missing). Nothing here may start a thread or touch CUDA. Never
among them is `vllm_worker`: vLLM's processes begin their watch when they import it.
"""

from __future__ import annotations

import importlib
import logging
import os

from grpo_engine.server.config import ServerConfig

_SERVER = ("grpo_engine.server.main", "uvicorn.lifespan.off", "uvicorn.loops.auto", "uvicorn.protocols.http.auto")
_TORCH = ("grpo_engine.server.torch_engine",)
_VLLM = (
    "grpo_engine.server.vllm_engine",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.core_client",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "torch._inductor.compile_fx",
    "vllm.compilation.backends",
)
_VLLM_CUDA = (
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.model_executor.layers.fused_moe",
)
_VLLM_CPU = ("vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn")

logger = logging.getLogger(__name__)


def preload(config: ServerConfig) -> None:
    """Import what a server with these settings needs.

    Raises:
        GrpoError: it could not be started with them: told before anything heavy is imported, where that is possible.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's would start its threads when it is imported
    if config.engine == "torch":
        _import_all((*_SERVER, *_TORCH))
        _import_model_of_torch(config.model_name)
        return
    from grpo_engine.server.vllm_environment import settle_environment

    settle_environment(config, os.environ)
    from grpo_engine.server.vllm_arguments import prepare_environment

    prepare_environment(config, dict(os.environ))  # each server does this for itself; here it checks
    _import_all((*_SERVER, *_VLLM))
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _import_all(_VLLM_CPU)
        if os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind":
            from grpo_engine.server.vllm_forking import fork_cpu_engine

            fork_cpu_engine()
    else:
        _import_all(_VLLM_CUDA)
    _import_model_of_vllm(config.model_name)


def _import_all(names: tuple[str, ...]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # another version's: whoever needs it imports it, and says what is wrong
            logger.debug("%s is not imported ahead: %s: %s", name, type(error).__name__, error)


def _import_model_of_torch(model_name: str) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from grpo_engine.models.loading import load_config

    config = load_config(model_name)
    if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        _import_all((f"transformers.models.{config.model_type}.modeling_{config.model_type}",))


def _import_model_of_vllm(model_name: str) -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    from grpo_engine.models.loading import load_config

    known = [ModelRegistry.models.get(name) for name in load_config(model_name).architectures or ()]
    _import_all(tuple(model.module_name for model in known if hasattr(model, "module_name")))
