"""Where a trainer starts: untrained, or where the previous one was stopped or killed.

The newest checkpoint has the state after some step; the journal has the batches of the steps since then. Repeated under
the same settings, they give the same weights, so they keep their version numbers. Under changed settings they get
numbers that were never used: a version names one set of weights.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from grpo_engine.bridges import BridgeModel
from grpo_engine.errors import CheckpointError
from grpo_engine.train.checkpointing import checkpoints
from grpo_engine.train.checkpointing.journal import Journal, JournalHead
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.trainee import Trainee
from grpo_engine.wire.log_lines import RESUMED

FREE_SETTINGS = frozenset(
    {
        *("model_name", "bridge", "training_steps", "lr_schedule"),  # looked at below
        *("atropos_url", "vllm_port", "probe", "dry_run", "save_path", "checkpoint_interval", "keep_checkpoints"),
        *("eval_every", "eval_prompts", "eval_samples", "eval_timeout_s", "resume", "journal", "run_folder", "log_dir"),
        *("rollouts_every", "rollouts_groups", "rollouts_max_mb", "use_wandb", "wandb_project", "wandb_group"),
        *("use_tensorboard", "use_trackio", "trackio_project", "benchmark"),
        *("debug_loading", "api_timeout_s", "batch_timeout_s", "max_staleness", "max_bad_steps"),
        *("gpu_memory_utilization", "max_model_len", "vllm_gpu"),
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

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a trainer starts."""

    step: int
    """Optimizer steps in the weights."""
    policy_version: int
    """Of these weights."""
    lease: str
    """Lease of the last batch that was trained on or is in the journal."""
    journaled_through: int
    """Last step that the journal holds; `step` where it holds none."""
    recorded_through: int
    """Last step whose records stay valid: later ones have other groups or other settings."""


def find_start(
    trainee: Trainee, attached: BridgeModel, journal: Journal, save_path: Path, settings: Mapping[str, Any]
) -> Start:
    """Load the state from which the run resumes; the weights that inference reads are not touched.

    Args:
        settings: `decisive_settings` of this run.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model or other fixed settings.
    """
    checkpoints.tidy(save_path)
    folder = checkpoints.newest(save_path)
    if folder is not None:
        state = checkpoints.load(folder, model_name=trainee.config.model_name)
        _compare(folder, state.marker.settings, settings)
        try:
            marker = trainee.restore(state)
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:  # damaged files
            raise CheckpointError(
                f"{folder}: cannot be restored ({checkpoints.read_failure(error)}); "
                "remove it to resume from the previous checkpoint"
            ) from error
        step, version, lease = marker.step, marker.policy_version, marker.lease
        log.info(RESUMED.text, folder)
    else:
        step, version, lease = 0, 0, ""
        if attached.is_shared and attached.policy_version > 0:
            trainee.load_untrained()  # the shared memory has weights that an earlier trainer wrote
        checkpoints.seed_everything(trainee.config.seed)  # loading may have drawn random numbers
    journal.forget(through=step)

    heads = journal.heads(after=step)
    if heads:
        _compare(save_path / "journal", heads[0].settings, settings)
        version, lease = heads[0].policy_version, heads[-1].lease
    last = step + len(heads)
    if num_lost := journal.forget_later(last):
        log.warning("the journal has a gap after step %d; %d later steps are lost", last, num_lost)
    highest = max([version, *(head.policy_version + 1 for head in heads)])
    same = len(list(takewhile(lambda head: head.settings == settings, heads)))
    if same < len(heads):
        log.warning("steps %d to %d are repeated under the new settings", step + same + 1, last)
        first_new = max(highest, attached.policy_version) + 1
        journal.restate(_renumbered(heads[same:], first_new, settings))
        version = first_new if same == 0 else version
        highest = max(highest, first_new + len(heads) - same)
    if attached.policy_version > highest:  # inference has weights of another run
        version = attached.policy_version + 1
        journal.restate(_renumbered(journal.heads(after=step), version, settings))
    if heads:
        log.info("steps %d to %d are repeated from the journal", step + 1, last)
    return Start(
        step=step,
        policy_version=version,
        lease=lease,
        journaled_through=last,
        recorded_through=step + same,
    )


def decisive_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that affect the update of a step, given its groups, as JSON values."""
    settings = config.model_dump(mode="json", exclude=set(FREE_SETTINGS))
    trains_adapter = config.bridge.trains_adapter
    if not trains_adapter:
        settings = {name: value for name, value in settings.items() if name not in _OF_ADAPTERS}
    if config.lr_schedule != "constant":  # else the length of the run has no effect on a step
        settings |= {"lr_schedule": config.lr_schedule, "training_steps": config.training_steps}
    return {**settings, "model_name": config.model_name, "trains": "an adapter" if trains_adapter else "the model"}


def _compare(where: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Log the changed settings, and refuse those that cannot change.

    Raises:
        CheckpointError: the state is of another model, optimizer or set of parameters.
    """
    changes = {
        name: f"{name} {before.get(name)!r} → {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before and before.get(name) != now.get(name)
    }
    if refused := [changes[name] for name in ("model_name", *FIXED_SETTINGS) if name in changes]:
        raise CheckpointError(
            f"{where}: these settings cannot change in a resumed run: {', '.join(refused)}; set them back, "
            "choose another --save-path, or start from the beginning with --no-resume"
        )
    if changes:
        log.warning("%s: settings have changed: %s", where, ", ".join(changes.values()))


def _renumbered(heads: list[JournalHead], version: int, settings: Mapping[str, Any]) -> list[JournalHead]:
    return [
        head.model_copy(update={"policy_version": version + number, "settings": dict(settings)})
        for number, head in enumerate(heads)
    ]
