"""Settings of the trainer: the stock trainer's flags with their names and defaults, and our own.

Torch-free, so that profiles can be checked without loading it. Where a default differs from the stock trainer's, its
docstring says why.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, field_validator, model_validator

from grpo_engine.algo.loss_config import (
    PRESETS_WITH_BANDS,
    Correction,
    CorrectionLevel,
    KlEstimator,
    LossConfig,
    Preset,
)
from grpo_engine.bridges import (
    BY_MODE,
    IN_PROCESS,
    ON_SHARED_MEMORY,
    OVER_RANKS,
    TO_MANY_SERVERS,
    AnyBridge,
    CheckpointReload,
)
from grpo_engine.bridges.broadcast import Broadcast
from grpo_engine.bridges.transport.checkpoint import CheckpointSettings
from grpo_engine.compilers import has_compiler
from grpo_engine.config import Config, LogLevel, checked_url
from grpo_engine.flags import Flag
from grpo_engine.installed import is_on_cpu
from grpo_engine.models.config import OptimizerName
from grpo_engine.wire.rollouts import MAX_SEQUENCES, Whole

LEAST_SEQ_LEN = 8
"""Shorter sequences have no room for a prompt and an answer."""
OF_MIXED_PRECISION: dict[str, Literal["bf16", "fp16", "fp32"]] = {
    "bf16": "bf16",
    "true": "bf16",
    "fp16": "fp16",
    "fp32": "fp32",
}
"""Values of mixed_precision, as texts in lower case."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""The dtype that each means."""


_BATCH_SIZES = ("batch_size", "gradient_accumulation_steps")
"""Settings whose product is the number of sequences in a step."""


def _usual_optimizer(settings: dict[str, Any]) -> OptimizerName:
    """The stock trainer's, but where no GPU is used: few machines without one have its package."""
    return "adamw" if is_on_cpu(settings.get("device", "auto")) else "adamw_8bit"


def _compiles_layers(settings: dict[str, Any]) -> bool:
    return not is_on_cpu(settings.get("device", "auto")) and has_compiler()


def _usual_staleness(settings: dict[str, Any]) -> int | None:
    """Unbounded, but where a server sleeps during each step: what is begun before it is of two versions."""
    kind = BY_MODE.get(str(_mode(settings)))
    return 0 if kind is not None and kind.takes_turns and not kind.samples_in_process else None


USUAL_DROPOUT = 0.05
"""The stock trainer's."""


def _usual_dropout(settings: dict[str, Any]) -> float:
    """The stock trainer's, but where the adapter is part of weights that inference reads or is given every step."""
    mode = _mode(settings)
    return 0.0 if mode in ON_SHARED_MEMORY or mode in IN_PROCESS else USUAL_DROPOUT


def _mode(settings: dict[str, Any]) -> str | None:
    """Of the bridge, which is a table where the settings are those of a run's file."""
    bridge = settings.get("bridge")
    return bridge.get("mode") if isinstance(bridge, dict) else getattr(bridge, "mode", None)


SEVERAL_MACHINES_PORT = 29500
"""Of machine 0, where it is not set: that of torchrun."""


class TrainConfig(Config):
    """Everything that decides a training run, given the model and the groups it is trained on."""

    model_name: Annotated[str, Flag(("--model-name", "--model"))]
    """Hub id, local folder, or one of the models that are made locally (`local/…`)."""
    bridge: AnyBridge = CheckpointReload()
    """How new weights reach inference."""
    use_shared_memory: bool = False
    """The trainer is on other GPUs than the server, and sends its weights there: `shared_vllm` then means
    `broadcast`."""
    single_copy: bool = False
    """The trainer is on the GPU of the server, and trains the memory that it reads: the only kind of `shared_vllm`."""
    training_steps: int = Field(10, ge=1)
    """Optimizer steps."""
    total_dialog_turns: int | None = Field(None, ge=1)
    """Completions to train on, in place of training_steps: as many steps as it takes. A conversation of several turns
    counts as one."""
    batch_size: int = Field(2, ge=1)
    """Sequences in a micro-batch."""
    gradient_accumulation_steps: int = Field(32, ge=1)
    """Micro-batches in an optimizer step: a batch has `batch_size` times as many sequences."""
    seq_len: int = Field(2048, ge=LEAST_SEQ_LEN, lt=2**31)
    """Longest sequence, prompt included."""
    micro_batch_tokens: int | None = Field(None, ge=2)
    """Tokens in a micro-batch, instead of batch_size sequences: short sequences then share one."""
    seed: int = Field(0, ge=-(2**63), lt=2**63)
    """Seed of all random numbers of training."""
    device: str = "auto"
    """`cuda`, `cuda:1`, `cpu`; auto: a GPU where there is one."""

    # Optimizer
    lr: float = Field(1e-5, gt=0, allow_inf_nan=False, validation_alias=AliasChoices("lr", "learning_rate"))
    """Learning rate after warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after warm-up."""
    optimizer: OptimizerName = Field(default_factory=_usual_optimizer)
    """adamw_8bit needs bitsandbytes, on a CPU 0.50 or newer; unset: adamw_8bit on a GPU, adamw on a CPU."""
    master_weights: Literal["float32", "stochastic_rounding"] = "float32"
    """How updates smaller than the precision of bf16 weights accumulate: in an fp32 copy (4 bytes per parameter), or by
    stochastic rounding, which needs no copy and is correct on average."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of accumulated gradients of bf16 weights, 4 or 2 bytes per parameter. With bfloat16, each micro-batch after
    the first is added in fp32 and stochastically rounded, so that small gradients are kept on average. With one
    micro-batch per step nothing is lost; each further one takes time and adds noise, so make them large. For models
    that do not fit otherwise."""
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Decoupled weight decay of matrices; norms and biases never decay."""
    adafactor_scale_parameter: bool = False
    """Scale Adafactor's updates by the size of the weights."""
    adafactor_relative_step: bool = False
    """Let Adafactor choose the learning rate."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm."""

    # Loss
    loss: Preset = "grpo"
    """Preset that the settings below refine."""
    clip_eps: float = Field(0.2, gt=0, le=1)
    """Ratios are clipped to 1 ± clip_eps; for presets with their own band, set clip_low and clip_high."""
    clip_low: float | None = Field(None, ge=0, le=1)
    """Width of the band below 1; unset: the preset's, or clip_eps."""
    clip_high: float | None = Field(None, ge=0, le=1)
    """Width of the band above 1; unset: the preset's, or clip_eps."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound of the ratio where the advantage is negative; unset: the preset's."""
    cispo_max: float | None = Field(None, gt=0)
    """Largest weight that the loss cispo gives a token; unset: the preset's."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the divergence from the reference model."""
    kl_estimator: KlEstimator = "k3"
    """How that divergence is estimated."""
    kl_unbiased: bool = False
    """Weigh the estimate by the ratio, so that its gradient is that of the divergence also off policy."""
    reference_model: str | None = None
    """The reference: hub id, folder or `local/…`; unset: the model that training starts from. Set without
    kl_coef, the divergence from it is only measured."""
    reference_urls: tuple[str, ...] = ()
    """URLs of reference services (`grpo-engine reference`), which hold the reference model on devices of their own.
    Empty: the trainer holds it. Set without kl_coef, the divergence is only measured."""
    num_iterations: int = Field(1, ge=1)
    """Updates on each batch, which stays one step; with more than one, the ratio is against the policy before the first
    of them, and a bridge with shared memory keeps a copy of the trained weights during the step."""
    correction: Correction = "none"
    """How the importance weight between trainer and sampler is used: not at all, truncated to its bounds, or 0 outside
    them."""
    correction_level: CorrectionLevel = "token"
    """Whether the weight is per token, or per sequence as the product or the geometric mean over its tokens."""
    correction_max: float = Field(2.0, gt=0)
    """Upper bound of that weight."""
    correction_min: float = Field(0.0, ge=0)
    """Lower bound of that weight."""
    advantage_scale: Literal["group", "batch", "none"] | None = None
    """What advantages are divided by: the group's standard deviation, the batch's, or nothing; unset: the preset's."""
    advantage_baseline: Literal["mean", "leave_one_out"] = "mean"
    """What is subtracted from a reward: its group's mean, or that of the others in it."""
    drop_equal_groups: bool = False
    """Leave out groups whose rewards are all equal, also in the normaliser; they have no gradient either way."""
    mask_truncated: bool = False
    """Train no token of a completion that ended at its length limit; its reward still counts in its group."""
    overlong_buffer: int = Field(0, ge=0)
    """Tokens before overlong_length over which the penalty grows to overlong_penalty; 0: no penalty."""
    overlong_length: int | None = Field(None, ge=1)
    """Completion length at which the penalty is full."""
    overlong_penalty: float = Field(1.0, ge=0, allow_inf_nan=False)
    """The full penalty."""

    # Which parameters
    train_layer_indices: str | None = None
    """Train only these layers, as in `20-31` or `0-3,28-31`."""
    lora_r: int = Field(16, ge=1)
    """Rank of the adapters that the lora_… bridges train."""
    lora_alpha: int = Field(32, ge=1)
    """Adapters are scaled by lora_alpha / lora_r."""
    lora_dropout: float = Field(default_factory=_usual_dropout, ge=0, lt=1)
    """Share of the adapters' inputs that are dropped; unset: 0.05, and 0 where adapters are merged into the served
    weights. Above 0, trainer and inference disagree on every token even with equal weights."""
    lora_target_modules: tuple[str, ...] = Field(("q_proj", "v_proj"), min_length=1)
    """Modules that get an adapter."""
    lora_layer_indices: str | None = None
    """Put adapters only on these layers, as in `20-31`."""

    # Memory and speed
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = "bfloat16"
    """Type of weights and computation; auto: the type the model was saved in. With float16 the loss is scaled, so that
    small gradients are kept."""
    mixed_precision: Literal["bf16", "fp16", "fp32"] | None = None
    """Another name of dtype: `bf16`, or true, is bfloat16, and `fp16` is float16, both with fp32 master weights; `fp32`
    is float32."""
    gradient_checkpointing: bool = False
    """Keep only inputs of layers and recompute the rest in the backward pass: less memory, a third more time."""
    keep_attention: bool = False
    """With gradient_checkpointing, do not recompute attention: long rows are a tenth faster, for 2 bytes × the width of
    all heads per token and layer."""
    compile_layers: bool = Field(default_factory=_compiles_layers)
    """Compile each layer: on a GPU a quarter faster, after up to a minute of compilation, once on a machine. Unset: on
    a GPU, where there is a C compiler."""
    probe: bool = True
    """On a GPU, run the longest micro-batch once before training, so that an out-of-memory error comes first."""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of torch; unset: torch's own choice, or 2 beside a GPU."""

    # Where things are
    atropos_url: str = "http://127.0.0.1:8000"
    """URL of the rollout API."""
    vllm_port: int = Field(9001, ge=1, le=65535)
    """Port of the inference server on this machine."""
    server_urls: tuple[str, ...] = ()
    """URLs of all inference servers, where there are several: each is sent the new weights. Empty: vllm_port."""
    parameter_urls: tuple[str, ...] = ()
    """URLs of parameter services (`grpo-engine parameters`), that of this machine first; for bridge mode
    parameter_service, which else holds the newest weights in the trainer."""
    dry_run: bool = False
    """Print what would be trained and how much memory it takes, and exit: with 0 where it fits on the GPU, else 1."""
    card_gb: float | None = Field(None, gt=0)
    """With dry_run: plan for a GPU of so many GB by its name (80, 141, 192), instead of the one that is here."""

    # Evaluation
    eval_every: int = Field(0, ge=0)
    """Evaluate on held-out prompts every so many steps, before the first and after the last; 0: never."""
    eval_prompts: int = Field(64, ge=1)
    """Held-out prompts of each environment."""
    eval_samples: int = Field(4, ge=1, le=2**20)
    """Completions of each: the k of avg@k and pass@k."""
    eval_timeout_s: float = Field(1800.0, gt=0)
    """Seconds to wait for an evaluation before it is skipped."""

    # Checkpoints and records
    save_path: Path | None = None
    """Folder for checkpoints; unset: `checkpoints` in the run folder, else trained_model_checkpoints."""
    checkpoint_interval: int = Field(3, ge=0)
    """Save every so many steps; 0: only at the end."""
    save_checkpoints: bool = True
    """Whether to save at all; runs that only measure need no checkpoints."""
    keep_checkpoints: int = Field(3, ge=1)
    """Checkpoints that are kept, the newest first."""
    checkpoint_async_mode: Literal["auto", "disabled", "async", "async_with_pinned_mem"] = "auto"
    """Whether training goes on while a checkpoint is written, from a copy of the state in main memory: as torchtitan's
    setting checkpoint.async_mode, where pinned memory takes longer the first time and less from then on. auto: where
    the copy fits into three quarters of the free main memory at the first checkpoint, pinned for a GPU."""
    resume: bool = True
    """Resume from the newest checkpoint in save_path, if there is one."""
    journal: bool = True
    """Keep the batches since the newest checkpoint beside it, so that a resumed run repeats its steps exactly."""
    run_folder: Path | None = None
    """Folder for metrics.jsonl and rollouts.jsonl; unset: a new one below log_dir."""
    log_dir: Path = Path("logs")
    """Where run folders are made."""
    output_layout: Literal["flat", "dated"] = "flat"
    """Without run_folder, whether its name is `train-<time>` in log_dir, with checkpoints in trained_model_checkpoints;
    or `<date>/<time>` in log_dir, by default in `outputs`, with its checkpoints in it."""
    rollouts_every: int = Field(1, ge=0)
    """Write sampled groups to rollouts.jsonl every so many steps; 0: never."""
    rollouts_groups: int = Field(2, ge=1)
    """Groups that are written each time, from the batch's environments in turn."""
    rollouts_max_mb: int = Field(256, ge=1)
    """Maximum size of rollouts.jsonl in megabytes; above it every second step is dropped."""
    use_wandb: bool = False
    """Also log to Weights & Biases (needs the `trackers` extra). `WANDB_MODE=offline` keeps it on this machine."""
    wandb_project: str | None = None
    """The project of the run there."""
    wandb_group: str | None = None
    """The group of the run there; unset: the name of the run folder."""
    use_tensorboard: bool = False
    """Also write event files into the run folder, for `tensorboard --logdir logs` (needs the `trackers` extra)."""
    use_trackio: bool = False
    """Also log to trackio (needs the `trackio` extra); `trackio show` opens its pages."""
    trackio_project: str = Field("grpo", min_length=1)
    """The project that trackio shows the run under."""
    benchmark: bool = False
    """Print times on the console line of every step."""
    log_level: LogLevel = "info"
    """Least severe level of the lines that are logged; debug: every point of a step too, with its rank."""
    redirect_output: Path | None = None
    """File that stdout and stderr are appended to, instead of the terminal; of all ranks of this machine."""
    debug_loading: bool = False
    """Log how the model is loaded: its source, seconds, and every parameter with shape, type, device and memory. Parts
    of one fused tensor of the server have the same memory."""

    # Time limits
    api_timeout_s: float = Field(30.0, gt=0)
    """Seconds to wait for the rollout API at the start."""
    batch_timeout_s: float = Field(3600.0, gt=0)
    """Seconds to wait for a batch before training fails."""
    reference_timeout_s: float = Field(300.0, gt=0)
    """Seconds to wait for reference services, none of which answers, before training fails."""
    max_staleness: Annotated[Whole | None, Field(ge=0)] = Field(default_factory=_usual_staleness)
    """Policy versions that groups may be old: environments start so many batches ahead, and what becomes older all the
    same is dropped. 0: sampling and training take turns. Unset: environments go by max_batches_offpolicy, and nothing
    is dropped; with bridge mode turns, 0."""
    max_bad_steps: int = Field(5, ge=1)
    """Consecutive steps with a non-finite loss or gradient after which training fails; each is skipped."""

    # Flags of the stock trainer for the vLLM that it starts; ours starts one only with --bridge-restart
    gpu_memory_utilization: Annotated[float, Flag(("--gpu-memory-utilization", "--vllm-gpu-memory-utilization"))] = (
        Field(0.45, gt=0, le=1)
    )
    """The inference server's share of the GPU, for the memory plan and for a server that the trainer starts; set it for
    any other server too."""
    max_model_len: int = Field(4096, ge=2)
    """For a server that the trainer starts; set it for any other server too."""
    vllm_gpu: int | None = None
    """GPU of a server that the trainer starts; for any other, set `gpus` of the inference service, or
    CUDA_VISIBLE_DEVICES of the server."""

    # Several ranks; torchrun and Slurm's srun start them by their variables, without these settings
    processes: Annotated[int | None, Flag(("--processes", "--gpus"))] = Field(None, ge=1)
    """Ranks of the trainer on this machine, one a GPU: the model is sharded over them, or with shared_vllm split as
    over the processes of the inference server. Unset: one, or as many as those processes where the server runs."""
    nodes: int = Field(1, ge=1)
    """Machines with so many ranks each; the trainer is started on each of them."""
    node_rank: int = Field(0, ge=0)
    """Number of this machine; rank 0 is on machine 0."""
    master_addr: str = "127.0.0.1"
    """Address of machine 0, which the others can reach."""
    master_port: int = Field(0, ge=0, lt=2**16)
    """Port there, by which ranks of several machines find each other; unset: 29500, as for torchrun."""
    sharding_strategy: Literal["full_shard", "shard_grad_op", "hybrid_shard"] = "full_shard"
    """What ranks share out: parameters, gradients and optimizer (full_shard); the same, but each layer is gathered once
    a step, for 2 bytes a parameter (shard_grad_op); or as full_shard within each machine, with copies on every machine
    (hybrid_shard)."""
    identical_data: bool = False
    """Every rank computes the whole batch, and gradients are averaged over ranks, as in scripts whose ranks all get the
    same data. More ranks then save memory, but no time: without it each rank computes its share."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer of several ranks in main memory."""
    rank_timeout_s: float = Field(600.0, gt=0)
    """Longest time that a rank waits for another in one operation before training fails."""
    rank_stall_s: float = Field(60.0, gt=0)
    """After so long without progress, a rank that others wait for is named, and all ranks log their stacks."""

    # Flags of the stock trainer for several trainers
    trainer_rank: int = 0
    """0, of the one trainer."""
    world_size: int = 1
    """1, the one trainer."""
    init_method: str = "env://"
    """`env://`, or `tcp://ADDRESS:PORT` of machine 0 with nodes above 1, as --master-addr and --master-port."""
    num_inference_nodes: int = 0
    """0: inference is on this machine."""

    @property
    def sampled_task(self) -> str | None:
        """What a trainer that samples itself samples; None where environments do."""
        return None

    @property
    def sequences_per_batch(self) -> int:
        """Sequences in one optimizer step."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def loss_config(self) -> LossConfig:
        """The preset with the settings applied.

        Raises:
            ValueError: settings contradict each other; not possible for a validated config.
        """
        preset = LossConfig.preset(self.loss)
        has_band = self.loss in PRESETS_WITH_BANDS
        low, high = (preset.clip_low, preset.clip_high) if has_band else (self.clip_eps, self.clip_eps)
        return replace(
            preset,
            clip_low=low if self.clip_low is None else self.clip_low,
            clip_high=high if self.clip_high is None else self.clip_high,
            dual_clip=preset.dual_clip if self.dual_clip is None else self.dual_clip,
            cispo_max=preset.cispo_max if self.cispo_max is None else self.cispo_max,
            constant_length=self.seq_len if preset.aggregation == "constant" else None,
            kl_coef=self.kl_coef,
            kl_estimator=self.kl_estimator,
            kl_unbiased=self.kl_unbiased,
            entropy_coef=self.entropy_coef,
            correction=self.correction,
            correction_level=self.correction_level,
            correction_max=self.correction_max,
            correction_min=self.correction_min,
        )

    @property
    def advantage_divisor(self) -> Literal["group", "batch", "none"]:
        """What advantages are divided by; Dr. GRPO is defined by dividing by nothing (arXiv 2503.20783)."""
        return self.advantage_scale or ("none" if self.loss == "dr_grpo" else "group")

    @property
    def has_reference(self) -> bool:
        """Whether a reference model is run: for the loss, or, without `kl_coef`, to measure the divergence."""
        return self.kl_coef > 0 or self.reference_model is not None or bool(self.reference_urls)

    @property
    def chooses_own_rate(self) -> bool:
        """Whether the optimizer takes no learning rate."""
        return self.optimizer == "adafactor" and self.adafactor_relative_step

    @property
    def num_ranks(self) -> int:
        """Ranks of the trainer on all machines."""
        return (self.processes or 1) * self.nodes

    @property
    def splits_model(self) -> bool:
        """Whether ranks have the parts of a tensor parallel server, and compute each batch together."""
        return self.num_ranks > 1 and self.bridge.shares_memory

    @property
    def starts_server(self) -> bool:
        """Whether the trainer starts the inference server itself."""
        return isinstance(self.bridge, CheckpointSettings) and self.bridge.restart

    @property
    def keeps_gathered(self) -> bool:
        """Whether layers of a sharded model are gathered once a step, and stay so until its last backward pass."""
        return self.sharding_strategy == "shard_grad_op"

    @property
    def num_replicas(self) -> int:
        """Copies of the sharded model: one a machine with hybrid_shard."""
        return self.nodes if self.sharding_strategy == "hybrid_shard" else 1

    @model_validator(mode="before")
    @classmethod
    def _maps_mixed_precision(cls, settings: Any) -> Any:
        given = settings.get("mixed_precision") if isinstance(settings, dict) else None
        if given is None:
            return settings
        name = OF_MIXED_PRECISION.get(str(given).lower())
        if name is None:
            raise ValueError(
                f"mixed_precision {given!r} is none of bf16, fp16 and fp32: choose one, or leave it out and set dtype"
            )
        dtype = DTYPES[name]
        if settings.get("dtype", dtype) != dtype:
            raise ValueError(
                f"mixed_precision {given!r} is dtype {dtype}, not {settings['dtype']}: leave one of them out"
            )
        return {**settings, "mixed_precision": name, "dtype": dtype}

    @model_validator(mode="before")
    @classmethod
    def _maps_kinds_of_shared_weights(cls, settings: Any) -> Any:
        """`use_shared_memory` and `single_copy` choose the kind of `shared_vllm` in the first stock trainers."""
        if not isinstance(settings, dict) or not isinstance(settings.get("bridge", {}), dict):
            return settings
        bridge = settings.get("bridge", {})
        is_sent, is_shared = (
            str(settings.get(name, False)).lower() == "true" for name in ("use_shared_memory", "single_copy")
        )
        if is_sent and is_shared:
            raise ValueError("use_shared_memory sends the weights to other GPUs, single_copy has one copy: choose one")
        if is_sent and bridge.get("mode", "broadcast") in ("shared_vllm", "broadcast"):
            sent = {key: value for key, value in bridge.items() if key in Broadcast.model_fields}
            return {**settings, "bridge": {**sent, "mode": "broadcast"}}
        if is_shared and bridge.get("mode", "shared_vllm") == "shared_vllm":
            return {**settings, "bridge": {**bridge, "mode": "shared_vllm"}}
        if is_sent or is_shared:
            name = "use_shared_memory" if is_sent else "single_copy"
            raise ValueError(f"{name} has no effect with bridge.mode {bridge['mode']}: leave one of them out")
        return settings

    @model_validator(mode="before")
    @classmethod
    def _counts_steps_by_completions(cls, settings: Any) -> Any:
        turns = settings.get("total_dialog_turns") if isinstance(settings, dict) else None
        fields = cls.model_fields
        sizes = [settings.get(name, fields[name].default) for name in _BATCH_SIZES] if turns is not None else []
        if turns is None or not all(str(each).isdecimal() and int(each) > 0 for each in (turns, *sizes)):
            return settings  # their own bounds say more
        steps = math.ceil(int(turns) / math.prod(map(int, sizes)))
        if int(settings.get("training_steps", steps)) != steps:
            raise ValueError(
                f"total_dialog_turns {turns} are {steps} steps of {math.prod(map(int, sizes))} completions, not "
                f"training_steps {settings['training_steps']}: leave one of them out, or set that to {steps}"
            )
        return {**settings, "training_steps": steps}

    @model_validator(mode="before")
    @classmethod
    def _takes_the_address_of_machine_0(cls, settings: Any) -> Any:
        if not isinstance(settings, dict):
            return settings
        default = {} if str(settings.get("nodes", 1)) == "1" else {"master_port": SEVERAL_MACHINES_PORT}
        method = settings.get("init_method")
        if method is None or method == "env://":
            return {**default, **settings}
        found = re.fullmatch(r"tcp://(?P<master_addr>[^:/]+):(?P<master_port>\d+)", str(method))
        if found is None or int(settings.get("nodes", 1)) == 1:
            raise ValueError(
                f"init_method {method!r} has no effect: ranks of one machine find each other by themselves, and those "
                "of several by tcp://ADDRESS:PORT with nodes above 1: leave it out, or set nodes"
            )
        return {**found.groupdict(), **settings}

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, device: str) -> str:
        if re.fullmatch(r"auto|cpu|cuda(:\d+)?", device) is None:
            raise ValueError(f"{device!r} is not a device: use auto, cpu, cuda, or cuda:0")
        return device

    @field_validator("atropos_url", "server_urls", "reference_urls", "parameter_urls")
    @classmethod
    def _is_a_url(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return checked_url(value) if isinstance(value, str) else tuple(map(checked_url, value))

    @model_validator(mode="after")
    def _hangs_together(self) -> TrainConfig:
        if self.world_size != 1 or self.trainer_rank != 0 or self.num_inference_nodes != 0:
            raise ValueError(
                "leave world_size 1, trainer_rank 0 and num_inference_nodes 0: processes (--gpus) says how many ranks "
                "are started, nodes and node_rank on which machines, and server_urls where servers are"
            )
        for name, value in {"vllm_gpu": self.vllm_gpu, "max_model_len": self.max_model_len}.items():
            if not self.starts_server and value != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} {value} has no effect, since this trainer starts no inference server: give it to the "
                    "server, or choose weight_bridge_mode none or lora_restart with --bridge-restart"
                )
        every = self.bridge.steps_between_updates
        if self.max_staleness is not None and self.max_staleness < every - 1:
            raise ValueError(
                f"max_staleness {self.max_staleness}, and inference gets new weights every {every} steps: all groups "
                f"would be too old before the next update: set max_staleness to at least {every - 1}, or "
                f"every_steps (sync_frequency with colocate) of the bridge to {self.max_staleness + 1}"
            )
        if self.num_ranks > 1 and not self.bridge.trains_over_ranks:
            raise ValueError(
                f"{self.num_ranks} ranks cannot train with weight_bridge_mode {self.bridge.mode}, which is of one "
                f"process: choose {' or '.join(OVER_RANKS)}, or leave processes and nodes out, and name one of gpus"
            )
        if len(set(self.server_urls)) < len(self.server_urls):
            raise ValueError(f"server_urls {', '.join(self.server_urls)}: one server is named twice: leave one out")
        if len(self.server_urls) > 1 and not self.bridge.updates_many_servers:
            raise ValueError(
                f"{len(self.server_urls)} server_urls, and weight_bridge_mode {self.bridge.mode} is of one server: "
                f"name one, or choose {' or '.join(TO_MANY_SERVERS)}"
            )
        if len(set(self.reference_urls)) < len(self.reference_urls):
            raise ValueError(f"reference_urls {', '.join(self.reference_urls)}: one is named twice: leave one out")
        if self.nodes > 1 and (self.master_port == 0 or self.node_rank >= self.nodes):
            raise ValueError(
                f"nodes = {self.nodes}, node_rank = {self.node_rank}, master_port = {self.master_port}: machines are "
                f"numbered 0 to {self.nodes - 1}, and need one free port of machine 0"
            )
        if self.splits_model:
            self._can_be_split()
        if self.sharding_strategy == "hybrid_shard" and self.nodes == 1:
            raise ValueError("sharding_strategy hybrid_shard is for several nodes: set nodes, or choose full_shard")
        if self.num_ranks > 1 and self.optimizer == "adafactor" and not self.bridge.trains_adapter:
            raise ValueError(
                "optimizer adafactor needs whole matrices, which several ranks of a sharded model do not have: choose "
                "adamw or adamw_8bit, or train an adapter"
            )
        if self.sequences_per_batch > MAX_SEQUENCES:
            raise ValueError(
                f"batch_size {self.batch_size} × gradient_accumulation_steps {self.gradient_accumulation_steps} are "
                f"{self.sequences_per_batch} sequences a step, and the rollout API makes batches of up to "
                f"{MAX_SEQUENCES}: lower one of them"
            )
        if self.lr_schedule != "constant" and self.warmup_steps >= self.training_steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} leaves none of the {self.training_steps} training_steps for "
                f"lr_schedule {self.lr_schedule!r}"
            )
        if self.card_gb is not None and not self.dry_run:
            raise ValueError("card_gb is the size of a GPU to plan for: add dry_run, or leave it out")
        if self.use_wandb and not self.wandb_project:
            raise ValueError("use_wandb needs wandb_project")
        if self.micro_batch_tokens is not None and self.micro_batch_tokens < self.seq_len:
            raise ValueError(
                f"micro_batch_tokens {self.micro_batch_tokens} is less than seq_len {self.seq_len}: a sequence of that "
                "length would fit in no micro-batch; raise the one or lower the other"
            )
        if self.train_layer_indices is not None and self.bridge.trains_adapter:
            raise ValueError(
                f"train_layer_indices chooses among the model's own layers, and {self.bridge.mode} trains adapters "
                "alone: choose theirs by lora_layer_indices"
            )
        if self.lora_dropout > 0 and self.bridge.computes_merged:
            raise ValueError(
                f"lora_dropout {self.lora_dropout:g} cannot be merged: it would drop the inputs of the adapter and not "
                "those of the weights it is folded into: set it to 0, or choose lora_only"
            )
        if self.overlong_buffer and self.overlong_length is None:
            raise ValueError(
                f"overlong_buffer {self.overlong_buffer} needs overlong_length, the completion length at which the "
                "penalty is full: set it to the max_tokens of the environment"
            )
        if self.overlong_length is not None and self.overlong_buffer > self.overlong_length:
            raise ValueError(
                f"overlong_buffer {self.overlong_buffer} is more than overlong_length {self.overlong_length}, so "
                "the penalty would start at a negative length: lower the buffer"
            )
        _ = self.loss_config  # refuses what contradicts itself
        return self

    def _can_be_split(self) -> None:
        """Refuse what ranks cannot do that train on the parts of a tensor parallel server."""
        mode = f"{self.num_ranks} ranks with weight_bridge_mode {self.bridge.mode}"
        if self.nodes > 1:
            raise ValueError(
                f"{mode} map the memory of one inference server, which is on one machine: leave nodes out, or choose "
                "broadcast"
            )
        if self.cpu_offload:
            raise ValueError(f"cpu_offload is not possible for {mode}: leave it out, or choose broadcast")
        if self.sharding_strategy != "full_shard":
            raise ValueError(
                f"sharding_strategy {self.sharding_strategy} has no effect on {mode}, which have the parts of the "
                "inference server: leave it out"
            )
