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

    every_machine: bool = False
    """In a cluster: one service on the trainer's machine, to which the trainer pushes, and one on each machine that has
    inference servers, which fetches versions from there, on any free port; the servers load them from memory of their
    own machine. Together they are one service."""

    @property
    def beside_kinds(self) -> tuple[str, ...]:
        """The first part is on the trainer's machine."""
        return ("trainer", "inference") if self.every_machine else ()

    @property
    def chosen_by_cluster(self) -> tuple[str, ...]:
        """What differs from machine to machine."""
        own = ("machine", "source", "handover", "num_devices", "gpus") if self.every_machine else ()
        return tuple(key for key in own if getattr(self, key) is not None)

    def launch(self, name: str, place: Place) -> Launch:
        """Ready, and live, while `/health` answers 200."""
        folder = self.handover or place.of_policy(self.policy) / HANDOVER_FOLDER
        config = self.model_copy(update={"handover": folder})
        source = f"http://{self.host}:{self.port}"
        health = f"http://{self.host}:{self.port}{HEALTH_ROUTE}"
        return self._launch(
            name,
            self.kind,
            place,
            engine=("parameters", *to_flags(config, ParametersConfig)),
            access=access_text(allow_without_token=self.allow_without_token, routes="weights"),
            ports=(self.port, *self.ports),
            unfinished="",
            machine_folder=folder,
            machine_arguments=("--machine", "{machine}", "--handover", "{folder}"),
            later_arguments=("--source", source, "--port", "0"),
            ready=self.ready or Probe(http=health, within_s=60),
            live=self.live or Probe(http=health, interval_s=5, timeout_s=10, within_s=60),
        )
