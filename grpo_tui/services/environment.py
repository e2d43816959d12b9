"""The environment as a service."""

from __future__ import annotations

from typing import Literal

from grpo_engine.environments.config import EnvironmentConfig, SamplingConfig
from grpo_engine.flags import to_flags
from grpo_engine.wire.environment_variables import INFERENCE_KEY_VARIABLE, TOKEN_VARIABLE
from grpo_engine.wire.log_lines import ENVIRONMENT_READY, STOPPED
from grpo_engine.wire.run_folder import item_state_file
from grpo_tui.services.base import Launch, OfPolicy, Place, Probe, RestartPolicy, Service


class Environment(Service, OfPolicy, EnvironmentConfig):
    """Turns the items of a task into scored groups."""

    kind: Literal["environment"]
    prepare: bool = True
    opponent: str | None = None
    """The `policy` of this run that plays the other seats of a game: it is asked at its servers, and trained by its
    trainer where it has one."""
    restart: RestartPolicy = RestartPolicy.ON_FAILURE
    """A restart loses only the groups that were being sampled, so a crash does not end the run."""

    def launch(self, name: str, place: Place) -> Launch:
        """Ready when the task is loaded and both servers have answered; its place in the items, and what it learns of
        them, are kept over restarts."""
        file = self.state_file or item_state_file(place.run_folder, name)
        config = self.model_copy(update={"state_file": file, "api_token": None, "api_key": None})
        # In the environment, because every user can read a command line.
        secrets = {TOKEN_VARIABLE: self.api_token, INFERENCE_KEY_VARIABLE: self.api_key}
        return self._launch(
            name,
            self.kind,
            place,
            engine=("env", *to_flags(config, EnvironmentConfig)),
            env={name: value for name, value in secrets.items() if value},
            needs_one_replica=True,
            unfinished=STOPPED.pattern,
            ready=self.ready or Probe(log=ENVIRONMENT_READY.pattern, within_s=300),
        )


def sampled_by(name: str, service: Service) -> tuple[str, SamplingConfig] | None:
    """What a service samples, with the key of its settings: an environment, or a trainer that has one of its own."""
    if isinstance(service, Environment):
        return f"services.{name}", service
    own = getattr(service, "environment", None)
    return (f"services.{name}.environment", own) if isinstance(own, SamplingConfig) else None
