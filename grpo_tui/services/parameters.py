"""The parameter service as a service: the newest weights in host memory, for the inference servers of a machine."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from grpo_engine.flags import to_flags
from grpo_engine.parameters.config import ParametersConfig
from grpo_engine.wire.parameters import HEALTH_ROUTE
from grpo_engine.wire.run_folder import HANDOVER_FOLDER
from grpo_tui.services.base import Launch, OfPolicy, Place, Probe, RestartPolicy, Service, access_text


class Parameters(Service, OfPolicy, ParametersConfig):
    """Holds the newest weights, and gives them to inference servers one after another."""

    kind: Literal["parameters"]
    prepare: bool = True
    restart: RestartPolicy = RestartPolicy.ON_FAILURE
    """What it holds is in files, which the next one takes up."""
    restart_unhealthy: bool = True
    handover: Path | None = None  # type: ignore[assignment]
    """Folder in which `current` is the newest version; unset: that of the run, where its servers look as they start."""

    def launch(self, name: str, place: Place) -> Launch:
        """Ready, and live, while `/health` answers 200."""
        config = self.model_copy(update={"handover": self.handover or place.run_folder / HANDOVER_FOLDER})
        health = f"http://{self.host}:{self.port}{HEALTH_ROUTE}"
        return self._launch(
            name,
            self.kind,
            place,
            argv=place.engine_command("parameters", *to_flags(config, ParametersConfig)),
            access=access_text(allow_without_token=self.allow_without_token, routes="weights"),
            ports=(self.port, *self.ports),
            ready=self.ready or Probe(http=health, within_s=60),
            live=self.live or Probe(http=health, interval_s=5, timeout_s=10, within_s=60),
        )
