"""vLLM inside a rank of the trainer: one engine on the rank's own device, which sleeps while the rank trains.

vLLM's executor for external launchers takes the process groups of the trainer, and rank and device from the
environment; each rank is an engine of its own (tensor_parallel_size 1), and samples other prompts. Written for vLLM
0.26 to 0.33. See https://docs.vllm.ai/en/latest/features/sleep_mode/.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore

from grpo_engine.bridges.engine import Layer
from grpo_engine.errors import BridgeError, ConfigError
from grpo_engine.models.devices import asked_for_pieces
from grpo_engine.ranks.listeners import close_ports_of_gloo
from grpo_engine.ranks.place import LOCAL_RANK, RANK, WORLD_SIZE
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import Generation
from grpo_engine.server.in_process import prompt_of
from grpo_engine.server.prompts import max_new_tokens
from grpo_engine.server.torch.weights import resolve_device
from grpo_engine.server.vllm.arguments import check_platform, engine_settings
from grpo_engine.server.vllm.checkpoint import Parameters, parameters_of
from grpo_engine.server.vllm.environment import settle_environment
from grpo_engine.server.vllm.requests import generation, sampling_params
from grpo_engine.server.vllm.running import TokenVersions
from grpo_engine.wire.inference import GenerateRequest

KEEP_WEIGHTS, DROP_WEIGHTS = 1, 2
"""vLLM's sleep levels."""
IN_ONE_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"


class VllmInProcess:
    """See `grpo_engine.server.in_process.SamplingEngine`."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._parameters: Parameters = parameters_of(config.model_name)
        self._vocabulary = 0
        self._sleeps = False
        """Whether it can: not on a CPU, where its memory stays as it is."""
        self._llm: Any = None
        self._is_frozen = False
        """Whether the objects of this process are left out of garbage collection."""

    def start(self) -> None:
        """Load vLLM; on all ranks at once, since they agree on the size of the cache.

        Raises:
            ConfigError: settings that vLLM refuses, or that exclude sleeping.
            BridgeError: its weights are not those of the model in transformers.
        """
        config = self._config
        device = resolve_device(config.device)
        self._sleeps = device.type == "cuda"
        _check_allocator(self._sleeps)
        close_ports_of_gloo()
        _join_own_group(device)
        settle_environment(config, os.environ)
        os.environ[IN_ONE_PROCESS] = "0"
        check_platform(config)
        if not self._sleeps:
            from grpo_engine.server.vllm.worker import keep_cpu_weights

            keep_cpu_weights()
        from vllm import LLM

        settings = engine_settings(config) | {
            "distributed_executor_backend": "external_launcher",
            "enable_sleep_mode": self._sleeps,
            "disable_log_stats": True,
            "seed": (config.seed or 0) + int(os.environ[RANK]),  # else all ranks sample the same
        }
        self._llm = LLM(**settings)
        logging.getLogger("vllm").setLevel(logging.WARNING)  # several lines a step otherwise
        self._vocabulary = int(self._llm.llm_engine.model_config.get_vocab_size())
        shapes = {name: list(shape) for name, shape in self._parameters.shapes.items()}
        [problem] = self._llm.collective_rpc("grpo_find_weights", args=(shapes, self._parameters.aliases))
        if problem:
            raise BridgeError(str(problem))

    def sleep(self, *, keeps_weights: bool) -> None:
        """Free cache and weights on the GPU."""
        if self._sleeps:
            self._llm.sleep(level=KEEP_WEIGHTS if keeps_weights else DROP_WEIGHTS)

    def wake_weights(self) -> None:
        """Allocate the weights at the same addresses again."""
        if self._sleeps:
            torch.cuda.empty_cache()  # torch keeps what the step has freed, and vLLM allocates beside torch
            self._llm.wake_up(tags=["weights"])

    def load(self, layer: Layer) -> None:
        """Copy values into vLLM's fused tensors."""
        self._llm.collective_rpc("grpo_write", args=(layer,))

    def wake_cache(self) -> None:
        """Allocate the cache again; what it had of older weights is forgotten."""
        if self._sleeps:
            torch.cuda.synchronize()  # weights were copied on the trainer's stream
            torch.cuda.empty_cache()  # gathered layers
            self._llm.wake_up(tags=["kv_cache"])
            self._freeze()
        self._llm.reset_prefix_cache()

    def _freeze(self) -> None:
        """Leave what there is when both are ready, vLLM and the trainer, out of garbage collection: vLLM collects each
        time it falls asleep, and would look at every module."""
        if not self._is_frozen:
            gc.collect()
            gc.freeze()
            self._is_frozen = True

    def close(self) -> None:
        """Shut vLLM down, which leaves the process group."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None

    def parameter_names(self) -> Collection[str]:
        """Of all weights."""
        return self._parameters.shapes

    def generate(self, requests: Sequence[GenerateRequest], policy_version: int) -> list[Generation]:
        """Complete all prompts; their seeds are left out, since vLLM would sample them one by one."""
        if not requests:
            return []
        limit = self._config.max_model_len
        prompts = [prompt_of(request) for request in requests]
        params = [
            sampling_params(
                request.model_copy(update={"seed": None}),
                max_new_tokens(prompt, request, max_model_len=limit, vocabulary=self._vocabulary),
            )
            for prompt, request in zip(prompts, requests, strict=True)
        ]
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        tokenizer = self._llm.llm_engine.output_processor.tokenizer
        return [
            generation(output, prompt, request, TokenVersions(policy_version), tokenizer)
            for output, prompt, request in zip(outputs, prompts, requests, strict=True)
        ]


def _check_allocator(sleeps: bool) -> None:
    """Refuse what vLLM's sleep mode cannot free.

    Raises:
        ConfigError: torch's allocator has expandable segments.
    """
    if sleeps and (told := asked_for_pieces(os.environ)):
        raise ConfigError(f"{told}: expandable segments exclude vLLM's sleep mode: unset it")


def _join_own_group(device: torch.device) -> None:
    """For a trainer of one process: a process group of itself alone, which opens no port; vLLM uses it."""
    os.environ.setdefault(RANK, "0")
    os.environ.setdefault(WORLD_SIZE, "1")
    os.environ.setdefault(LOCAL_RANK, str(device.index or 0))
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
