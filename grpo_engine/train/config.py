"""Settings of the trainer: the stock trainer's flags with their names and defaults, and our own.

Torch-free, so that profiles can be checked without loading it. Where a default differs from the stock trainer's, its
docstring says why.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AliasChoices, Field, field_validator, model_validator

from grpo_engine.algo.loss_config import (
    PRESETS_WITH_BANDS,
    Correction,
    CorrectionLevel,
    KlEstimator,
    LossConfig,
    Preset,
)
from grpo_engine.bridges import AnyBridge, CheckpointReload
from grpo_engine.config import Config
from grpo_engine.flags import Flag
from grpo_engine.wire.rollouts import MAX_SEQUENCES


class TrainConfig(Config):
    """Everything that decides a training run, given the model and the groups it is trained on."""

    model_name: Annotated[str, Flag(("--model-name", "--model"))]
    """Hub id, local folder, or one of the models that are made locally (`local/…`)."""
    bridge: AnyBridge = CheckpointReload()
    """How new weights reach inference."""
    training_steps: int = Field(10, ge=1)
    """Optimizer steps."""
    batch_size: int = Field(2, ge=1)
    """Sequences in a micro-batch."""
    gradient_accumulation_steps: int = Field(32, ge=1)
    """Micro-batches in an optimizer step: a batch has `batch_size` times as many sequences."""
    seq_len: int = Field(2048, ge=2, lt=2**31)
    """Longest sequence, prompt included."""
    micro_batch_tokens: int | None = Field(None, ge=2)
    """Tokens in a micro-batch, instead of batch_size sequences: short sequences then share one."""
    seed: int = Field(0, ge=-(2**63), lt=2**63)
    """Seed of all random numbers of training."""

    # Optimizer
    lr: float = Field(1e-5, gt=0, allow_inf_nan=False, validation_alias=AliasChoices("lr", "learning_rate"))
    """Learning rate after warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after warm-up."""
    optimizer: Literal["adamw", "adamw_8bit", "adafactor"] = "adamw_8bit"
    """adamw_8bit needs bitsandbytes, on a CPU 0.50 or newer."""
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
    clip_eps: float = Field(0.2, gt=0)
    """Ratios are clipped to 1 ± clip_eps; for presets with their own band, set clip_low and clip_high."""
    clip_low: float | None = Field(None, ge=0)
    """Width of the band below 1; unset: the preset's, or clip_eps."""
    clip_high: float | None = Field(None, ge=0)
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
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """The stock trainer has 0.05, which makes trainer and inference disagree on every token even with equal weights."""
    lora_target_modules: tuple[str, ...] = Field(("q_proj", "v_proj"), min_length=1)
    """Modules that get an adapter."""
    lora_layer_indices: str | None = None
    """Put adapters only on these layers, as in `20-31`."""

    # Memory and speed
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = "bfloat16"
    """Type of weights and computation; auto: the type the model was saved in."""
    gradient_checkpointing: bool = False
    """Keep only inputs of layers and recompute the rest in the backward pass: less memory, a third more time."""
    keep_attention: bool = False
    """With gradient_checkpointing, do not recompute attention: long rows are a tenth faster, for 2 bytes × the width of
    all heads per token and layer."""
    compile_layers: bool = False
    """Compile each layer, on a GPU: a third faster, after up to a minute of compilation."""
    probe: bool = True
    """On a GPU, run the longest micro-batch once before training, so that an out-of-memory error comes first."""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of torch; unset: torch's own choice."""

    # Where things are
    atropos_url: str = "http://localhost:8000"
    """URL of the rollout API."""
    vllm_port: int = Field(9001, ge=1, le=65535)
    """Port of the inference server on this machine."""
    device: str = "auto"
    """`cuda`, `cuda:1`, `cpu`; auto: a GPU where there is one."""
    dry_run: bool = False
    """Print what would be trained and how much memory it takes, and exit: with 0 where it fits on the GPU, else 1."""

    # Evaluation
    eval_every: int = Field(0, ge=0)
    """Evaluate on held-out prompts every so many steps, before the first and after the last; 0: never."""
    eval_prompts: int = Field(64, ge=1)
    """Held-out prompts of each environment."""
    eval_samples: int = Field(4, ge=1)
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
    resume: bool = True
    """Resume from the newest checkpoint in save_path, if there is one."""
    journal: bool = True
    """Keep the batches since the newest checkpoint beside it, so that a resumed run repeats its steps exactly."""
    run_folder: Path | None = None
    """Folder for metrics.jsonl and rollouts.jsonl; unset: a new one below log_dir."""
    log_dir: Path = Path("logs")
    """Where run folders are made."""
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
    """Also log to trackio (needs the `trackers` extra); `trackio show` opens its pages."""
    trackio_project: str = Field("grpo", min_length=1)
    """The project that trackio shows the run under."""
    benchmark: bool = False
    """Print times on the console line of every step."""
    debug_loading: bool = False
    """Log how the model is loaded."""

    # Time limits
    api_timeout_s: float = Field(30.0, gt=0)
    """Seconds to wait for the rollout API at the start."""
    batch_timeout_s: float = Field(3600.0, gt=0)
    """Seconds to wait for a batch before training fails."""
    max_staleness: int | None = Field(None, ge=0)
    """Groups sampled more than so many policy versions ago are dropped; unset: none."""
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

    # Flags of the stock trainer for several trainers; ours is one process
    trainer_rank: int = 0
    """0, of the one trainer."""
    world_size: int = 1
    """1, the one trainer."""
    init_method: str = "env://"
    """Has no effect with one process."""
    num_inference_nodes: int = 0
    """0: inference is on this machine."""

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
        return self.kl_coef > 0 or self.reference_model is not None

    @property
    def chooses_own_rate(self) -> bool:
        """Whether the optimizer takes no learning rate."""
        return self.optimizer == "adafactor" and self.adafactor_relative_step

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, device: str) -> str:
        if re.fullmatch(r"auto|cpu|cuda(:\d+)?", device) is None:
            raise ValueError(f"{device!r} is not a device: use auto, cpu, cuda, or cuda:0")
        return device

    @field_validator("atropos_url")
    @classmethod
    def _is_a_url(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is not a URL: use http://host:port, as in http://localhost:8000")
        return url

    @model_validator(mode="after")
    def _hangs_together(self) -> TrainConfig:
        if self.world_size != 1 or self.trainer_rank != 0 or self.num_inference_nodes != 0:
            raise ValueError(
                "one trainer process on one machine is supported: "
                "leave world_size 1, trainer_rank 0, num_inference_nodes 0"
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
        if self.lora_dropout > 0 and self.bridge.mode == "lora_merged":
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
