"""Weights & Biases for an environment: mean reward, lengths and its own evaluations, by the trainer's step.

Project and group are those with which the trainer has registered, as in stock environments.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from grpo_engine.environments.clients import WandbInfo
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.errors import ConfigError
from grpo_engine.installed import is_installed
from grpo_engine.trackers import (
    FaultTolerant,
    RunTracker,
    Tracker,
    failure,
    masked_command_line,
    public_settings,
    set_up_wandb,
)

log = logging.getLogger(__name__)


class NoTracker:
    """Takes metrics and keeps none."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def check_tracker(config: EnvironmentConfig) -> None:
    """Check that wandb is installed if it is asked for, before an environment loads anything or is registered.

    Raises:
        ConfigError: it is not.
    """
    if config.use_wandb and not is_installed("wandb"):
        raise ConfigError("use_wandb: wandb is not installed: pip install 'grpo-tui[trackers]'")


def start_tracker(config: EnvironmentConfig, info: WandbInfo) -> Tracker:
    """A run in the trainer's project; none where the trainer has no project. Takes seconds.

    Raises:
        ConfigError: wandb is not installed or does not start.
    """
    if not info.project:
        log.warning("use_wandb: the trainer has no --wandb-project, so this environment logs nothing there")
        return NoTracker()
    try:
        import wandb

        with masked_command_line():
            set_up_wandb(wandb, None if config.state_file is None else config.state_file.parent)
            run = wandb.init(
                project=info.project,
                group=info.group or None,
                name=config.registered_name(),
                config=public_settings(config),
            )
    except ImportError as error:
        raise ConfigError(
            f"use_wandb: {error.name or 'wandb'} is not installed: pip install 'grpo-tui[trackers]'"
        ) from None
    except Exception as error:  # the service raises its own classes for logins, networks and project names
        raise ConfigError(f"use_wandb: wandb did not start ({failure(error)})") from error
    return FaultTolerant("wandb", RunTracker(run), instead="the log has mean rewards")
