"""Which settings may change when a run is resumed, and which of them change what a step does. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_engine.train.config import TrainConfig

FREE_SETTINGS = frozenset(
    {
        *("model_name", "bridge", "training_steps", "lr_schedule"),  # looked at below
        *(
            "atropos_url",
            "vllm_port",
            "server_urls",
            "reference_urls",
            "parameter_urls",
            "reference_timeout_s",
            "probe",
            "dry_run",
            "card_gb",
        ),
        *("save_path", "checkpoint_interval", "keep_checkpoints", "checkpoint_async_mode"),
        *("eval_every", "eval_prompts", "eval_samples", "eval_timeout_s", "resume", "journal", "run_folder", "log_dir"),
        *("rollouts_every", "rollouts_groups", "rollouts_max_mb", "use_wandb", "wandb_project", "wandb_group"),
        *("use_tensorboard", "use_trackio", "trackio_project", "benchmark"),
        *("debug_loading", "log_level", "api_timeout_s", "batch_timeout_s", "max_staleness", "max_bad_steps"),
        *("gpu_memory_utilization", "max_model_len", "vllm_gpu"),
        *("processes", "nodes", "node_rank", "master_addr", "master_port", "rank_timeout_s"),
        *("sharding_strategy", "identical_data", "cpu_offload"),
        *("environment", "inference"),  # of a trainer that samples: the groups are given
        *("mixed_precision", "use_shared_memory", "single_copy"),  # dtype and bridge have what they mean
        *("trainer_rank", "world_size", "init_method", "num_inference_nodes"),
    }
)
"""Settings that do not affect the update of a step, given its groups; all others do."""
_OF_ADAPTERS = frozenset({"lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_layer_indices"})
FIXED_SETTINGS = (
    *("optimizer", "trains", "train_layer_indices"),
    *("lora_r", "lora_alpha", "lora_target_modules", "lora_layer_indices"),
)
"""Settings that the saved state depends on."""


def decisive_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that affect the update of a step, given its groups, as JSON values."""
    settings = config.model_dump(mode="json", exclude=set(FREE_SETTINGS))
    trains_adapter = config.bridge.trains_adapter
    if not trains_adapter:
        settings = {name: value for name, value in settings.items() if name not in _OF_ADAPTERS}
    if config.lr_schedule != "constant":  # else the length of the run has no effect on a step
        settings |= {"lr_schedule": config.lr_schedule, "training_steps": config.training_steps}
    if config.sampled_task is not None:  # it has no effect on a step, but what the run learns depends on it
        settings["task"] = config.sampled_task
    return {**settings, "model_name": config.model_name, "trains": "an adapter" if trains_adapter else "the model"}


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """The `decisive_settings` that differ, each as `lr 1e-05 → 2e-06`."""
    return {
        name: f"{name} {before.get(name)!r} → {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and not (name == "task" and name not in before)  # it was not recorded
    }


def refused_changes(changes: Mapping[str, str]) -> list[str]:
    """Those of the changes with which no state of the run can be loaded."""
    return [changes[name] for name in ("model_name", *FIXED_SETTINGS) if name in changes]
