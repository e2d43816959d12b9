"""The trainer as a service."""

from __future__ import annotations

from typing import Literal

from grpo_engine.bridges.shared_vllm import SharedVllm
from grpo_engine.flags import to_flags
from grpo_engine.train.config import TrainConfig
from grpo_tui.paths import BRIDGE_FILE
from grpo_tui.services.base import Launch, Place, Probe, Service


class Trainer(Service, TrainConfig):
    """Trains on batches from the rollout API and hands new weights to inference; its end is the end of the run."""

    kind: Literal["trainer"]
    ends_run: bool | None = True
    stop_grace_s: float = 30.0
    """Long enough to save a checkpoint on SIGTERM."""

    def launch(self, name: str, place: Place) -> Launch:
        """Write metrics, rollouts and checkpoints into the run folder; be ready when training begins."""
        update: dict[str, object] = {}
        if self.run_folder is None:
            update["run_folder"] = place.run_folder
        if isinstance(self.bridge, SharedVllm) and self.bridge.config_path is None:
            update["bridge"] = self.bridge.model_copy(update={"config_path": place.run_folder / BRIDGE_FILE})
        config = self.model_copy(update=update)
        return self._launch(
            name,
            self.kind,
            place,
            argv=(place.python, "-m", "grpo_engine", "train", *to_flags(config, TrainConfig)),
            ready=self.ready or Probe(log="trainer ready", within_s=900),
        )
