"""The reference service: the frozen model that a trainer measures its divergence from, on devices of its own."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from grpo_engine.flags import to_flags
from grpo_engine.reference.config import ReferenceConfig
from grpo_engine.wire.log_lines import MODEL_MADE, WEIGHTS_LOADING
from grpo_engine.wire.reference import HEALTH_ROUTE
from grpo_tui.services.base import Launch, OfPolicy, Place, Probe, RestartPolicy, Service, access_text

READY_WITHIN_S = 300.0
STALLED_S = 180.0
PHASES = (
    (MODEL_MADE.pattern, "making {0}"),
    (WEIGHTS_LOADING.pattern, "loading weights"),
)
"""Lines of our service, in order."""


class Reference(Service, OfPolicy, ReferenceConfig):
    """Holds the reference model, and answers its log-probabilities to the trainer."""

    kind: Literal["reference"]
    prepare: bool = True
    restart: RestartPolicy = RestartPolicy.ON_FAILURE
    """The trainer asks again until it answers, so a crash does not end the run."""
    restart_unhealthy: bool = True
    replicas: int = Field(1, ge=1, le=256)
    """Services of this kind, each with the whole model on the next port and the next of its GPUs; unset: as many as it
    has `gpus` or `num_devices`. The second one is the service `NAME-2`."""

    @property
    def start_phases(self) -> tuple[tuple[str, str], ...]:
        """Log lines while the model is loaded."""
        return PHASES

    def launch(self, name: str, place: Place) -> Launch:
        """Ready, and live, while `/health` answers 200."""
        health = f"http://{self.host}:{self.port}{HEALTH_ROUTE}"
        return self._launch(
            name,
            self.kind,
            place,
            engine=("reference", *to_flags(self, ReferenceConfig)),
            access=access_text(allow_without_token=self.allow_without_token, routes="log-probabilities"),
            ports=(self.port, *self.ports),
            unfinished="",
            ready=self.ready or Probe(http=health, within_s=READY_WITHIN_S, stalled_s=STALLED_S),
            live=self.live or Probe(http=health, interval_s=5, timeout_s=10, within_s=60),
        )
