"""Settings of the trainer that were given and have no effect. Torch-free, since profiles are checked on loading."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_engine.algo.loss_config import PRESETS_WITH_BANDS
from grpo_engine.bridges.transport.checkpoint import CheckpointSettings
from grpo_engine.train.config import TrainConfig


def settings_without_effect(config: TrainConfig) -> Iterator[str]:
    """One message for each setting that has no effect, with what to do instead."""
    yield from _idle_bands(config)
    yield from _idle_in_optimizer(config)
    yield from _idle_without_their_switch(config)
    if isinstance(config.bridge, CheckpointSettings) and config.bridge.server_config and not config.bridge.restart:
        yield "server_config has no effect without --bridge-restart: give it to the inference server as --config"
    if config.kl_estimator != "k3" and not config.has_reference:
        yield (
            f"kl_estimator {config.kl_estimator} has no effect without a reference, unless environments send "
            "ref_logprobs: set kl_coef, or reference_model to measure only"
        )
    if config.kl_unbiased and not config.kl_coef:
        yield "kl_unbiased has no effect without kl_coef, the weight of the divergence: set that too"
    if config.kl_estimator == "k1" and config.kl_coef and not config.kl_unbiased:
        yield (
            f"kl_coef {config.kl_coef:g} has no effect on average with kl_estimator k1, whose expected gradient is 0: "
            "choose k2 or k3, or set kl_unbiased"
        )
    if config.correction == "none":
        for name in _given(config, "correction_level", "correction_max", "correction_min"):
            yield f"{name} has no effect without a correction: set correction to truncate or mask"
    if not config.overlong_buffer:
        for name in _given(config, "overlong_length", "overlong_penalty"):
            yield f"{name} has no effect without overlong_buffer, the tokens over which the penalty grows: set it"
    elif not config.overlong_penalty:
        yield "overlong_buffer has no effect with overlong_penalty 0: raise the penalty, or leave the buffer out"
    elif config.overlong_length is not None and config.overlong_length - config.overlong_buffer >= config.seq_len - 1:
        yield (
            f"overlong_buffer has no effect: the penalty begins above {config.overlong_length} - "
            f"{config.overlong_buffer} tokens, and seq_len {config.seq_len} leaves no completion that long: "
            "lower overlong_length"
        )


def _idle_in_optimizer(config: TrainConfig) -> Iterator[str]:
    """Settings of another optimizer, and of a learning rate that is not used."""
    if config.optimizer != "adafactor":
        for name in _given(config, "adafactor_scale_parameter", "adafactor_relative_step"):
            yield f"{name} has no effect with optimizer {config.optimizer}: choose adafactor, or leave it out"
    if config.chooses_own_rate:
        for name in _given(config, "lr", "warmup_steps", "lr_schedule"):
            yield f"{name} has no effect with adafactor_relative_step, which chooses the rate: leave one of them out"
    if not config.gradient_checkpointing:
        for name in _given(config, "keep_attention"):
            yield f"{name} has no effect without gradient_checkpointing, which it belongs to: set that too"


def _idle_without_their_switch(config: TrainConfig) -> Iterator[str]:
    """Settings of a feature that is off."""
    if not config.bridge.trains_adapter:
        for name in _given(config, "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_layer_indices"):
            yield f"{name} has no effect with weight_bridge_mode {config.bridge.mode}: choose a lora_… one for adapters"
    if not config.use_wandb:
        for name in _given(config, "wandb_project", "wandb_group"):
            yield f"{name} has no effect without use_wandb: set that too"
    if not config.use_trackio:
        for name in _given(config, "trackio_project"):
            yield f"{name} has no effect without use_trackio: set that too"
    if not config.eval_every:
        for name in _given(config, "eval_prompts", "eval_samples", "eval_timeout_s"):
            yield f"{name} has no effect without eval_every, the steps between two evaluations: set that too"


def _idle_bands(config: TrainConfig) -> Iterator[str]:
    """Bounds of the ratio that are never reached."""
    if config.loss == "cispo":
        for name in _given(config, "clip_eps", "clip_low", "clip_high"):
            yield f"{name} has no effect with loss cispo, which has no band: set cispo_max"
        return
    if config.cispo_max is not None:
        yield f"cispo_max has no effect with loss {config.loss}: set clip_high, or choose cispo"
    if config.loss in PRESETS_WITH_BANDS:
        for name in _given(config, "clip_eps"):
            yield f"{name} has no effect with loss {config.loss}, whose band is its own: set clip_low and clip_high"
    elif config.clip_low is not None and config.clip_high is not None:
        for name in _given(config, "clip_eps"):
            yield f"{name} has no effect beside clip_low and clip_high: leave it out"
    if config.correction != "none" and config.num_iterations == 1:
        for name in _given(config, "clip_eps", "clip_low", "clip_high", "dual_clip"):
            yield (
                f"{name} has no effect with a correction and one iteration: the ratio is then against the trainer's "
                "own policy before the only update, and always 1; raise num_iterations, or leave the correction out"
            )


def _given(config: TrainConfig, *names: str) -> list[str]:
    """Those of the settings that differ from their defaults."""
    fields = type(config).model_fields
    defaults = {n: fields[n].get_default(call_default_factory=True, validated_data=vars(config)) for n in names}
    return [name for name in names if getattr(config, name) != defaults[name]]
