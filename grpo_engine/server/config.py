"""Settings of the inference server. Torch-free: the terminal side builds command lines from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from grpo_engine.config import Config, LogLevel, PathText, did_you_mean, setting_names
from grpo_engine.flags import Flag, OtherFlags
from grpo_engine.models.config import MOST_RANKS, DtypeName
from grpo_engine.wire.inference import LogprobsMode


def table_of(value: Any) -> Any:
    """A table, or the JSON of one, as a command line holds it."""
    return json.loads(value) if isinstance(value, str) else value


class ServerConfig(Config):
    """The inference server: a model, an engine, an address, and how weights are shared."""

    model_name: Annotated[str, Flag(("--model-name", "--model"))]
    """Model: a folder, a hub name, or the name of a locally made model."""
    engine: Literal["torch", "vllm"] = "vllm"
    """What computes: vLLM, or plain torch (any device, no compiled kernels)."""
    host: str = "127.0.0.1"
    """Address to listen on; the weight and adapter routes answer only this machine, whatever the address, and need the
    token that $GRPO_API_TOKEN or $GRPO_API_TOKEN_FILE holds, if one is set, as it is under a supervisor."""
    allow_without_token: bool = False
    """Require no token, also under a supervisor: for stock trainers. Every user of this machine can then change the
    served weights."""
    sampling_needs_token: bool = False
    """Require the token for `/generate`, `/v1` and every other route except `/health` and `/metrics`, so that only the
    run uses the GPU. Stock clients send it as their API key."""
    port: int = Field(9001, ge=0, le=65535)
    """Port to listen on; 0 chooses a free one."""
    dtype: DtypeName = "bfloat16"
    """Precision of the weights: bfloat16, float16, float32, or auto (as the checkpoint says)."""
    device: str = "auto"
    """Where the model runs: auto, cpu, cuda, cuda:0, …; auto uses the GPU if there is one."""
    max_model_len: int = Field(4096, ge=2)
    """Longest prompt and completion together, in tokens."""
    gpu_memory_utilization: float = Field(0.45, gt=0, le=1)
    """Share of the GPU that vLLM uses for weights and cache; the rest is left for the trainer."""
    logprobs_mode: LogprobsMode = "raw"
    """Log-probabilities before temperature and truncation (raw), or after them, as sampled (processed)."""
    shared_weights: bool = False
    """Export the weights, so that a trainer writes directly into the served memory."""
    receives_weights: bool = False
    """Let a trainer send its weights into the served memory, by NCCL or Gloo (bridge mode broadcast)."""
    enable_sleep_mode: bool = False
    """Let a trainer on the same GPU put the server to sleep while it computes a step, and hand its weights over when it
    wakes the server (bridge mode turns)."""
    bridge_file: Path | None = None
    """Where the export is described; default: $VLLM_BRIDGE_CONFIG_PATH, else $LOGDIR/vllm_bridge_config.json."""
    handover: Path | None = None
    """Folder in which a trainer leaves the newest checkpoint as `current`; if there is one of this model, the server
    starts with it and its version instead of the model's own weights. With receives_weights, the trainer leaves its
    process id there, and the server answers requests once that trainer has sent its weights; with enable_sleep_mode,
    the server also loads only while that trainer computes no step."""
    awaits_handover: bool = False
    """Load no weights until the parameter service of this machine says, by `in-step` in the handover folder, that
    `current` is the newest version, or that there is none."""
    enable_lora: bool = False
    """Accept LoRA adapters."""
    max_lora_rank: int = Field(64, ge=1)
    """Largest rank of an adapter."""
    served_model_name: str | None = None
    """Name of the model in the OpenAI routes; default: the model's own."""
    enforce_eager: bool = False
    """vLLM without CUDA graphs: starts sooner, generates slower."""
    cuda_graph_sizes: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(None, min_length=1)
    """Batch sizes for which vLLM captures CUDA graphs, e.g. 1 2 4 8 16 32 64: fewer start sooner, and batches above the
    largest one run without; default: vLLM's own, some 35 to 51 sizes."""
    kv_cache_memory_bytes: int | None = Field(None, ge=1)
    """Memory of vLLM's KV cache; default: what `gpu_memory_utilization` leaves after vLLM measured the rest."""
    standby: bool | None = None
    """Run a fork server: a parent process that has imported everything and forks the server, so that SIGHUP restarts it
    within seconds; default: with vLLM, whose imports take half a minute."""
    tensor_parallel_size: int = Field(1, ge=1, le=MOST_RANKS)
    """GPUs that one model is spread over (vLLM)."""
    max_batch_size: Annotated[int, Flag(("--max-batch-size", "--max-num-seqs"))] = Field(256, ge=1)
    """Sequences that are decoded together."""
    max_batch_tokens: int = Field(131072, ge=1)
    """Most tokens, prompt and completion, in the cache of one batch (torch); one sequence always fits."""
    max_waiting: int = Field(4096, ge=1)
    """Requests that may wait; more are refused with 503."""
    finish_before_update: bool = False
    """Finish completions before weights change, so that each is of one version, instead of freezing them and continuing
    with the new weights (vLLM); a weight update then waits for the longest completion. Those of requests without the
    token of the run, where it has one, are frozen."""
    keep_kv_cache: bool = False
    """Continue completions after a weight update on the keys and values that they have (vLLM), as PipelineRL and
    Magistral do, instead of computing them again with the new weights, which takes a prefill of all that run. Tokens
    after the update are then sampled by the new weights with attention to keys of the old ones, and trainer and
    inference agree a little less on them."""
    stalled_after_s: float = Field(120.0, gt=0)
    """Seconds that the engine may have work and produce nothing before `/health` answers 503."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of torch; default: torch's choice."""
    seed: int | None = None
    """Seed of requests without one; default: different at every start."""
    log_level: LogLevel = "info"
    """Least severe log line that is written."""
    root_path: str | None = None
    """Path prefix under which a proxy serves this server."""
    ssl_keyfile: Path | None = None
    """Private key of the certificate, to serve HTTPS."""
    ssl_certfile: Path | None = None
    """Certificate, to serve HTTPS."""
    ssl_ca_certs: Path | None = None
    """CA certificates that client certificates are checked against."""
    ssl_cert_reqs: int = Field(0, ge=0, le=2)
    """Whether clients must send a certificate: 0 no, 1 optional, 2 yes."""
    vllm: Annotated[dict[str, Any], BeforeValidator(table_of), OtherFlags(), PathText(r"\.\.?/.*")] = Field(
        default_factory=dict
    )
    """Arguments of `vllm serve`: a table with underscores (`{ block_size = 32 }`); on the command line, every flag that
    is not listed here is passed to vLLM (`--block-size 32`)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sampling_needs_token and self.allow_without_token:
            raise ValueError("sampling_needs_token with allow_without_token: leave one of them out")
        if self.handover is not None and self.shared_weights:
            raise ValueError(
                "handover with shared_weights: shared weights are adopted from memory, not from checkpoints; leave "
                "one of them out"
            )
        if self.enable_sleep_mode and (self.shared_weights or self.enable_lora):
            other = "shared_weights" if self.shared_weights else "enable_lora"
            raise ValueError(
                f"enable_sleep_mode with {other}: a server that sleeps frees its weights and is handed whole ones when "
                "it wakes; leave one of them out"
            )
        if self.enable_sleep_mode and self.tensor_parallel_size > 1:
            raise ValueError(
                f"enable_sleep_mode with tensor_parallel_size {self.tensor_parallel_size}: whole weights are handed to "
                "one GPU: set it to 1"
            )
        if self.keep_kv_cache and self.enable_sleep_mode:
            raise ValueError(
                "keep_kv_cache with enable_sleep_mode: a server that sleeps frees its cache; leave one of them out"
            )
        if self.keep_kv_cache and self.engine != "vllm":
            raise ValueError(f"keep_kv_cache: --engine {self.engine} finishes completions before weights change")
        if self.vllm and self.engine != "vllm":
            name = next(iter(self.vllm))
            near = did_you_mean(name, setting_names(ServerConfig))
            raise ValueError(
                f"{name}: not a setting here{near}, and --engine {self.engine} has none of vLLM's arguments"
            )
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile: one without the other; give both to serve HTTPS")
        return self

    @property
    def changes_in_place(self) -> bool:
        """Whether a trainer writes into the memory that vLLM computes with."""
        return self.shared_weights or self.receives_weights or self.enable_sleep_mode

    @property
    def has_fork_server(self) -> bool:
        """Whether the server runs below a fork server."""
        return self.engine == "vllm" if self.standby is None else self.standby
