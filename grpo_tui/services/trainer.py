"""The trainer as a service."""

from __future__ import annotations

from typing import Literal

from grpo_engine.bridges.transport.checkpoint import CheckpointSettings
from grpo_engine.bridges.transport.in_place import InPlaceSettings
from grpo_engine.flags import to_flags
from grpo_engine.train.config import TrainConfig
from grpo_engine.wire.environment_variables import INFERENCE_VARIABLE
from grpo_engine.wire.log_lines import (
    MODEL_MADE,
    PARAMETERS_TRAINED,
    RESUMED,
    TRAINER_READY,
    WAITING_FOR_PEER,
    WEIGHTS_ATTACHED,
)
from grpo_engine.wire.run_folder import BRIDGE_FILE, HANDOVER_FOLDER
from grpo_tui.services.base import Launch, Place, Probe, Service

READY_WITHIN_S = 600.0
"""Longer than it waits for an inference server that is being restarted."""
STALLED_S = 180.0
PHASES = (
    (MODEL_MADE.pattern, "making {0}"),
    (r"Loading weights: .*?(\d+)/(\d+)", "loading weights, {0} of {1} tensors"),
    (r"Loading checkpoint shards: .*?(\d+)/(\d+)", "loading weights, {0} of {1} shards"),
    (WEIGHTS_ATTACHED.pattern, "attached to {0} shared tensors"),
    (PARAMETERS_TRAINED.pattern, "handing {0} parameters to inference"),
    (RESUMED.pattern, "resumed from {0}"),
    (WAITING_FOR_PEER.pattern, "waiting for a peer, {0} s at most"),
)
"""Lines of transformers and of our trainer, in order."""


class Trainer(Service, TrainConfig):
    """Trains on batches from the rollout API and publishes new weights; the run ends with it."""

    kind: Literal["trainer"]
    ends_run: bool | None = True
    stop_grace_s: float = 30.0
    """Long enough to save a checkpoint on SIGTERM."""
    inference_service: str | None = None
    """The service that a bridge with `restart = true` restarts; unset: the only one of kind inference."""

    @property
    def start_phases(self) -> tuple[tuple[str, str], ...]:
        """Log lines until training begins."""
        return PHASES

    def launch(self, name: str, place: Place) -> Launch:
        """Write metrics, rollouts and checkpoints into the run folder; be ready when training begins."""
        update: dict[str, object] = {}
        if self.run_folder is None:
            update["run_folder"] = place.run_folder
        if isinstance(self.bridge, InPlaceSettings) and self.bridge.config_path is None:
            update["bridge"] = self.bridge.model_copy(update={"config_path": place.run_folder / BRIDGE_FILE})
        if isinstance(self.bridge, CheckpointSettings) and self.bridge.handover is None:
            update["bridge"] = self.bridge.model_copy(update={"handover": place.run_folder / HANDOVER_FOLDER})
        config = self.model_copy(update=update)
        return self._launch(
            name,
            self.kind,
            place,
            argv=(place.python, "-m", "grpo_engine", "train", *to_flags(config, TrainConfig)),
            env={} if self.inference_service is None else {INFERENCE_VARIABLE: self.inference_service},
            ready=self.ready or Probe(log=TRAINER_READY.pattern, within_s=READY_WITHIN_S, stalled_s=STALLED_S),
        )
