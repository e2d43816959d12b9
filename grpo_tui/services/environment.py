"""The environment as a service."""

from __future__ import annotations

from typing import Literal

from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.flags import to_flags
from grpo_engine.wire.environment_variables import TOKEN_VARIABLE
from grpo_engine.wire.log_lines import ENVIRONMENT_READY
from grpo_tui.services.base import Launch, Place, Probe, RestartPolicy, Service


class Environment(Service, EnvironmentConfig):
    """Turns the items of a task into scored groups."""

    kind: Literal["environment"]
    restart: RestartPolicy = RestartPolicy.ON_FAILURE
    """An environment has no state that a restart could lose, so a crash does not end the run."""

    def launch(self, name: str, place: Place) -> Launch:
        """Ready when the task is loaded and both servers have answered; what it learns of items is kept over
        restarts."""
        learns = self.curriculum is not None or self.easy_threshold is not None or self.hard_threshold is not None
        file = self.state_file or (place.run_folder / f"{name}.items.json" if learns else None)
        config = self.model_copy(update={"state_file": file, "api_token": None})
        return self._launch(
            name,
            self.kind,
            place,
            argv=(place.python, "-m", "grpo_engine", "env", *to_flags(config, EnvironmentConfig)),
            env={TOKEN_VARIABLE: self.api_token} if self.api_token else {},  # every user can read a command line
            ready=self.ready or Probe(log=ENVIRONMENT_READY.pattern, within_s=300),
        )
