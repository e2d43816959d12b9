"""Where metrics go besides the run folder: Weights & Biases, TensorBoard and trackio, each only when it is asked for.

Names and step numbers are those of metrics.jsonl. A tracker that does not start is an error; one that fails later is
logged once and gets no more metrics, since metrics.jsonl has them all.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from grpo_engine.errors import ConfigError
from grpo_engine.trackers import (
    FaultTolerant,
    RunTracker,
    Tracker,
    failure,
    masked_command_line,
    public_settings,
    set_up_wandb,
)
from grpo_engine.train.config import TrainConfig

TENSORBOARD_FOLDER = "tensorboard"
WANDB_RUN_ID_FILE = "wandb-run-id"

log = logging.getLogger(__name__)


def build_trackers(config: TrainConfig, folder: Path) -> list[Tracker]:
    """The enabled trackers, started; their later failures are logged, not raised.

    Args:
        folder: the run folder; its name is the run's.

    Raises:
        ConfigError: one is not installed or does not start.
    """
    starts: dict[str, Callable[[TrainConfig, Path], Tracker]] = {
        "use_wandb": start_wandb,
        "use_tensorboard": TensorBoardTracker,
        "use_trackio": start_trackio,
    }
    trackers: list[Tracker] = []
    for setting, start in starts.items():
        if not getattr(config, setting):
            continue
        name = setting.removeprefix("use_")
        try:
            with masked_command_line():
                tracker = start(config, folder)
        except ImportError as error:
            extra = "trackio" if setting == "use_trackio" else "trackers"
            raise ConfigError(
                f"{setting}: {error.name or name} is not installed: pip install 'grpo-tui[{extra}]'"
            ) from None
        except Exception as error:  # services raise their own classes for logins, networks and project names
            raise ConfigError(
                f"{setting}: {name} did not start ({failure(error)}); "
                f"fix that, or leave {setting} out: metrics.jsonl has the same values"
            ) from error
        trackers.append(FaultTolerant(name, tracker, instead="metrics.jsonl has them all"))
    return trackers


def start_wandb(config: TrainConfig, folder: Path) -> Tracker:
    """Weights & Biases; a trainer that is started again in the same run folder continues the same run."""
    import wandb

    id_file = folder / WANDB_RUN_ID_FILE
    if not id_file.exists():
        id_file.parent.mkdir(parents=True, exist_ok=True)
        id_file.write_text(secrets.token_hex(8))
    set_up_wandb(wandb, folder)
    run = wandb.init(
        project=config.wandb_project,
        group=config.wandb_group or folder.name,
        name=folder.name,
        id=id_file.read_text().strip(),
        resume="allow",
        dir=folder,
        config=public_settings(config),
    )
    return RunTracker(run)


def start_trackio(config: TrainConfig, folder: Path) -> Tracker:
    """trackio, on this machine unless its own variables (`TRACKIO_SPACE_ID` …) are set."""
    import trackio

    settings = public_settings(config)
    return RunTracker(trackio.init(project=config.trackio_project, name=folder.name, resume="allow", config=settings))


class TensorBoardTracker:
    """Event files in the run folder, for `tensorboard --logdir logs`."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._folder = folder / TENSORBOARD_FOLDER
        self._make_writer = SummaryWriter
        self._writer: SummaryWriter | None = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one step."""
        if self._writer is None:  # after a resume, this step and later ones are replaced
            self._writer = self._make_writer(str(self._folder), purge_step=step, flush_secs=10)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush the event file."""
        if self._writer is not None:
            self._writer.close()
