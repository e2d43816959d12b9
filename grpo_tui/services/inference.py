"""The inference server as a service."""

from __future__ import annotations

from typing import Literal

from grpo_engine.flags import to_flags
from grpo_engine.server.config import ServerConfig
from grpo_tui.paths import BRIDGE_FILE
from grpo_tui.services.base import Launch, Place, Probe, Service


class Inference(Service, ServerConfig):
    """Samples completions: vLLM, or torch on a CPU or GPU."""

    kind: Literal["inference"]

    def launch(self, name: str, place: Place) -> Launch:
        """Put the bridge file into the run folder; be ready when `/health` answers 200, and stay asked after that."""
        config = self
        if self.shared_weights and self.bridge_file is None:
            config = self.model_copy(update={"bridge_file": place.run_folder / BRIDGE_FILE})
        health = f"http://{self.host}:{self.port}/health"
        return self._launch(
            name,
            self.kind,
            place,
            argv=(place.python, "-m", "grpo_engine", "server", *to_flags(config, ServerConfig)),
            ports=(self.port, *self.ports),
            ready=self.ready or Probe(http=health, within_s=900),
            live=self.live or Probe(http=health, interval_s=5, timeout_s=10, within_s=60),
        )
