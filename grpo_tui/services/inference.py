"""The inference server as a service."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from grpo_engine.flags import to_flags
from grpo_engine.server.config import ServerConfig
from grpo_engine.wire.environment_variables import RESTARTS_VARIABLE, SPEEDS_VARIABLE
from grpo_engine.wire.fork_server import RESTART_SIGNAL
from grpo_engine.wire.log_lines import (
    FORK_SERVER_HAS_IMPORTED,
    FORK_SERVER_IMPORTS,
    FORK_SERVER_RESTARTS,
    MODEL_MADE,
    WAITING_FOR_STEP,
    WAITING_FOR_WEIGHTS,
    WEIGHTS_EXPORTED,
    WEIGHTS_LOADING,
)
from grpo_engine.wire.run_folder import BRIDGE_FILE, HANDOVER_FOLDER, restarts_file, speeds_file
from grpo_tui.services.base import Launch, OfPolicy, Place, Probe, RestartInPlace, RestartPolicy, Service, access_text

READY_WITHIN_S = 300.0
STALLED_S = 180.0
"""A start-up without log output or I/O for this long hangs: the longest pause measured in a healthy one is half a
minute of compilation on two cores."""

VLLM_PHASES = (
    (FORK_SERVER_IMPORTS.pattern + r"|Started server process", "importing vLLM"),
    (f"{FORK_SERVER_HAS_IMPORTED.pattern}|{FORK_SERVER_RESTARTS.pattern}", "starting the server"),
    (r"Resolved architecture: (\w+)", "configuring the engine for {0}"),
    (r"Initializing a V1 LLM engine", "starting the engine core"),
    (r"Starting to load model", "fetching the model"),
    (r"Time spent downloading weights", "loading weights"),
    (r"Loading .*checkpoint shards: .*?(\d+)/(\d+)", "loading weights, {0} of {1} shards"),
    (r"Loading weights took|Model loading took", "weights are loaded"),
    (r"Directly load (?:AOT compilation|the compiled graph)", "loading compiled code"),
    (r"torch\.compile (?:took|and initial)|saved AOT compiled function", "profiling memory"),
    (
        r"Starting torch\.compile|for vLLM's torch\.compile|Dynamo bytecode transform|Cache the graph of|"
        r"Compiling a graph|Warming up model for the compilation",
        "compiling",
    ),
    (r"Initial profiling/warmup run|Profiling CUDA graph memory|Estimated CUDA graph memory", "profiling memory"),
    (r"Available KV cache memory|KV cache size: ", "making the KV cache"),
    (r"DeepGEMM warmup: .*?(\d+)/(\d+)", "warming up kernels, {0} of {1}"),
    (r"\[AutoTuner\]: Tuning .*?(\d+)/(\d+)", "tuning kernels, {0} of {1}"),
    (r"Autotuning process starts", "tuning kernels"),
    (r"Warming up (?!done)", "warming up kernels"),
    (r"Capturing CUDA graphs.*?: .*?(\d+)/(\d+)", "capturing CUDA graphs, {0} of {1}"),
    (r"Graph capturing finished", "CUDA graphs are captured"),
    (r"init engine \(profile", "trying a first request"),
)
"""Lines of vLLM 0.20 to 0.33 and of our server, in order."""
TORCH_PHASES = (
    (r"Started server process", "importing torch"),
    (WEIGHTS_LOADING.pattern, "loading weights"),
    (WEIGHTS_EXPORTED.pattern, "weights are shared, {0} tensors"),
)
"""Lines of our server."""


class Inference(Service, OfPolicy, ServerConfig):
    """Samples completions: vLLM, or torch on a CPU or GPU."""

    kind: Literal["inference"]
    prepare: bool = True
    restart: RestartPolicy = RestartPolicy.ON_FAILURE
    """The trainer has the weights and publishes them to the next server, so a crash does not end the run."""
    replicas: int = Field(1, ge=1, le=256)
    """Servers of this kind, each on the next port and the next `tensor_parallel_size` of its GPUs; the second one is
    the service `NAME-2`."""

    @property
    def start_phases(self) -> tuple[tuple[str, str], ...]:
        """Log lines of the engine while it starts."""
        waiting = (WAITING_FOR_STEP.pattern, "waiting for the end of the trainer's step")
        awaiting = (WAITING_FOR_WEIGHTS.pattern, "waiting for the parameter service of its machine")
        making = (MODEL_MADE.pattern, "making {0}")
        return (waiting, awaiting, making, *(VLLM_PHASES if self.engine == "vllm" else TORCH_PHASES))

    @property
    def demanded_share(self) -> float | None:
        """Share of each GPU that must be free: vLLM refuses to start with less than `gpu_memory_utilization`."""
        is_stated = self.gpu_memory_share is not None or self.gpu_memory_gb is not None
        if is_stated or self.engine != "vllm" or self.device == "cpu":
            return self.gpu_memory_share
        return self.gpu_memory_utilization

    def launch(self, name: str, place: Place) -> Launch:
        """Put the bridge file into the run folder; ready, and live, while `/health` answers 200."""
        config = self
        if self.shared_weights and self.bridge_file is None:
            config = self.model_copy(update={"bridge_file": place.of_policy(self.policy) / BRIDGE_FILE})
        elif not (self.shared_weights or self.enable_lora) and self.handover is None:
            config = self.model_copy(update={"handover": place.of_policy(self.policy) / HANDOVER_FOLDER})
        in_place, environment = None, {}
        if config.engine == "vllm":
            environment[SPEEDS_VARIABLE] = str(speeds_file(place.run_folder, name))
        if config.has_fork_server:
            file = restarts_file(place.run_folder, name)
            in_place = RestartInPlace(signal=RESTART_SIGNAL.name, file=file)
            environment[RESTARTS_VARIABLE] = str(file)
        of_machine: dict[str, Any] = {}
        if config.awaits_handover and config.handover is not None:
            of_machine = {"machine_folder": config.handover, "machine_arguments": ("--handover", "{folder}")}
        health = f"http://{self.host}:{self.port}/health"
        return self._launch(
            name,
            self.kind,
            place,
            engine=("server", *to_flags(config, ServerConfig)),
            env=environment,
            restart_in_place=in_place,
            **of_machine,
            access=access_text(
                allow_without_token=self.allow_without_token,
                routes="all but /health and /metrics" if self.sampling_needs_token else "/bridge, /lora",
            ),
            ports=(self.port, *self.ports),
            unfinished="",
            gpu_memory_share=self.demanded_share,
            ready=self.ready or Probe(http=health, within_s=READY_WITHIN_S, stalled_s=STALLED_S),
            live=self.live or Probe(http=health, interval_s=5, timeout_s=10, within_s=60),
        )
