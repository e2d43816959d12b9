"""The inference server as a service."""

from __future__ import annotations

import re
from typing import Literal

from grpo_engine.flags import to_flags
from grpo_engine.server.config import ServerConfig
from grpo_engine.wire.standby import NOTHING_LEFT_LINE, RESTART_SIGNAL
from grpo_tui.paths import BRIDGE_FILE, HANDOVER_FOLDER
from grpo_tui.services.base import Launch, Place, Probe, RestartInPlace, RestartPolicy, Service

READY_WITHIN_S = 300.0
STALLED_S = 180.0
"""A start-up that neither logs nor reads nor writes for so long hangs: the longest silence of a healthy one that was
seen is half a minute of compilation on two cores."""

VLLM_PHASES = (
    (r"Standby: importing|Uvicorn running on", "importing vLLM"),
    (r"Standby: everything is imported|Standby: nothing is left", "starting the server"),
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
"""Lines of vLLM 0.20 to 0.33, and of our own server, in their order."""
TORCH_PHASES = (
    (r"Uvicorn running on", "importing torch"),
    (r"Loading weights: .*?(\d+)/(\d+)", "loading weights, {0} of {1} tensors"),
    (r"Loading checkpoint shards: .*?(\d+)/(\d+)", "loading weights, {0} of {1} shards"),
    (r"Exported (\d+) params", "weights are shared, {0} tensors"),
)
"""Lines of transformers, and of our own server."""
_BY_ITS_STANDBY = RestartInPlace(signal=RESTART_SIGNAL.name, log=re.escape(NOTHING_LEFT_LINE))


class Inference(Service, ServerConfig):
    """Samples completions: vLLM, or torch on a CPU or GPU."""

    kind: Literal["inference"]
    restart: RestartPolicy = RestartPolicy.ON_FAILURE
    """The trainer keeps the weights and brings them to the next server, so a crash is not the end of a run."""

    @property
    def start_phases(self) -> tuple[tuple[str, str], ...]:
        """What the engine says while it starts."""
        making = (r"making (\S+) in .* \(once", "making {0}")
        return (making, *(VLLM_PHASES if self.engine == "vllm" else TORCH_PHASES))

    @property
    def demanded_share(self) -> float | None:
        """Share of each GPU that must be free: vLLM does not start on one with less than it is to take."""
        if self.gpu_memory_share is not None or self.engine != "vllm" or self.device == "cpu":
            return self.gpu_memory_share
        return self.gpu_memory_utilization

    def launch(self, name: str, place: Place) -> Launch:
        """Put the bridge file into the run folder; be ready when `/health` answers 200, and stay asked after that."""
        config = self
        if self.shared_weights and self.bridge_file is None:
            config = self.model_copy(update={"bridge_file": place.run_folder / BRIDGE_FILE})
        elif not (self.shared_weights or self.enable_lora) and self.handover is None:
            config = self.model_copy(update={"handover": place.run_folder / HANDOVER_FOLDER})
        health = f"http://{self.host}:{self.port}/health"
        return self._launch(
            name,
            self.kind,
            place,
            argv=(place.python, "-m", "grpo_engine", "server", *to_flags(config, ServerConfig)),
            restart_in_place=_BY_ITS_STANDBY if config.has_standby else None,
            ports=(self.port, *self.ports),
            gpu_memory_share=self.demanded_share,
            ready=self.ready or Probe(http=health, within_s=READY_WITHIN_S, stalled_s=STALLED_S),
            live=self.live or Probe(http=health, interval_s=5, timeout_s=10, within_s=60),
        )
