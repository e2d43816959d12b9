"""What a fork server imports before it forks: all modules that a server and vLLM's processes would import later.

The lists are the modules in `sys.modules` of a healthy server that its parent had not imported
(`benchmarks/restart.py --imports` prints what is missing). None may start a thread or touch CUDA. `vllm.worker` must
not be imported here: its import starts the watch thread of vLLM's processes.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

from grpo_engine.forking import keep_forkable
from grpo_engine.models.inductor import compute_keys
from grpo_engine.server.config import ServerConfig

_SERVER = (
    *("grpo_engine.server.main", "pydantic.v1", "multiprocessing.resource_tracker", "setproctitle"),
    *("uvicorn.lifespan.off", "uvicorn.loops.auto", "uvicorn.protocols.http.auto", "uvicorn.protocols.websockets.auto"),
)
_TORCH = ("grpo_engine.server.torch.engine",)
_VLLM_ROUTES = (
    *("openai.api_server", "launchers.app", "launchers.api_server.app_state", "launchers.api_server.routers"),
    *("openai.chat_completion.api_router", "openai.completion.api_router", "openai.responses.api_router"),
    *("openai.models.api_router", "anthropic.api_router", "serve", "serve.instrumentator.metrics"),
    *("serve.tokenize.api_router", "serve.elastic_ep.api_router", "serve.profile.api_router", "serve.lora.api_router"),
    *("serve.sagemaker.api_router", "generate.api_router", "generate.structured_decisions.api_router"),
    *("generate.generative_scoring.api_router", "scale_out.factories", "scale_out.render.api_router"),
    *("scale_out.derender.api_router", "scale_out.token_in_token_out.api_router"),
)
"""Below `vllm.entrypoints`, of one version or another."""
_INDUCTOR = (
    *("cuda_combined_scheduling", "cpp_wrapper_gpu", "cpp_wrapper_cpu_array_ref", "halide", "mps", "pallas"),
    *("memory_planning", "wrapper_fxir"),
)
"""Below `torch._inductor.codegen`."""
_VLLM = (
    *("grpo_engine.server.vllm.engine", "grpo_engine.server.vllm.stock", "grpo_engine.server.vllm.layout"),
    *("vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.engine.core_client", "vllm.v1.core.sched.scheduler"),
    *("vllm.v1.executor.multiproc_executor", "vllm.v1.executor.uniproc_executor"),
    *("vllm.compilation.backends", "vllm.model_executor.layers.quantization.online.base"),
    *(f"vllm.entrypoints.{name}" for name in _VLLM_ROUTES),
    *("torch._inductor.compile_fx", "torch.export._trace", "torch.distributed.tensor.experimental._func_map"),
    *(f"torch._inductor.codegen.{name}" for name in _INDUCTOR),
    *("sympy.tensor.tensor", "transformers.modeling_layers", "model_hosting_container_standards.sagemaker"),
)
_VLLM_IN_PROCESS = (
    *("grpo_engine.server.vllm.in_process", "vllm.entrypoints.llm", "vllm.v1.engine.llm_engine"),
    *("vllm.v1.engine.core", "vllm.v1.engine.core_client", "vllm.v1.core.sched.scheduler"),
    *("vllm.v1.executor.uniproc_executor", "vllm.compilation.backends"),
)
_VLLM_CUDA = (
    *("vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"),
    *("vllm.v1.attention.backends.flash_attn", "vllm.model_executor.layers.fused_moe"),
)
_VLLM_CPU = ("vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn")

_ReturnedT = TypeVar("_ReturnedT")

logger = logging.getLogger(__name__)


def preload(config: ServerConfig) -> None:
    """Import what a server with these settings needs.

    Raises:
        GrpoError: no server can start with these settings; raised before heavy imports where possible.
    """
    keep_forkable(os.environ)
    if config.engine == "torch":
        _import_all((*_SERVER, *_TORCH))
        _import_model_of_torch(config.model_name)
        return
    from grpo_engine.server.vllm.environment import settle_environment

    settle_environment(config, os.environ)
    from grpo_engine.server.vllm.arguments import prepare_environment

    prepare_environment(config, dict(os.environ))  # every server does this again; here it only checks the settings
    _import_all((*_SERVER, *_VLLM))
    from vllm.platforms import current_platform

    from grpo_engine.server.vllm.patches import fork_cpu_engine, keep_imports_frozen
    from grpo_engine.server.vllm.read_ahead import read_ahead

    is_cpu = bool(current_platform.is_cpu())
    _import_all(_VLLM_CPU if is_cpu else _VLLM_CUDA)
    _import_model_of_vllm(config.model_name)
    read_ahead(config.model_name)
    compute_keys(is_cpu=is_cpu)
    keep_imports_frozen()
    if is_cpu and os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind":
        fork_cpu_engine()


def preload_in_process(config: ServerConfig) -> None:
    """Import what an engine in a rank of the trainer needs, which is no server."""
    if config.engine == "torch":
        _import_all(("grpo_engine.server.torch.in_process",))
        _import_model_of_torch(config.model_name)
        return
    from grpo_engine.server.vllm.environment import settle_environment

    settle_environment(config, os.environ)
    _import_all(_VLLM_IN_PROCESS)
    from vllm.platforms import current_platform

    _import_all(_VLLM_CPU if current_platform.is_cpu() else _VLLM_CUDA)
    _import_model_of_vllm(config.model_name)


def _import_all(names: tuple[str, ...]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # a module of another version; a server that needs it reports the error
            logger.debug("%s cannot be imported ahead: %s: %s", name, type(error).__name__, error)


def _import_model_of_torch(model_name: str) -> None:
    from grpo_engine.models.loading import modeling_module

    module = modeling_module(model_name)
    if module is not None:
        _import_all((module,))


def _import_model_of_vllm(model_name: str) -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    from grpo_engine.models.loading import load_config

    known = [ModelRegistry.models.get(name) for name in load_config(model_name).architectures or ()]
    for model in known:
        if hasattr(model, "module_name"):
            _import_all((model.module_name,))
            _inspect_model_of_vllm(model)


def _inspect_model_of_vllm(model: Any) -> None:
    """Have vLLM look at the model's class in this process, and keep on disk what it finds (0.26 to 0.33).

    Before its first start it would look in a process of its own, because an import might touch the GPU, and import all
    of itself there: 12 s on an H200 machine.
    """
    from vllm.model_executor.models import registry

    in_subprocess = registry._run_in_subprocess
    registry._run_in_subprocess = _called
    try:
        model.inspect_model_cls()
    except Exception as error:  # a server asks again, and reports it
        logger.debug("%s cannot be inspected ahead: %s: %s", model, type(error).__name__, error)
    finally:
        registry._run_in_subprocess = in_subprocess


def _called(function: Callable[[], _ReturnedT]) -> _ReturnedT:
    return function()
