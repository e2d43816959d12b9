"""The rollout API as a service."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from grpo_engine.flags import to_flags
from grpo_engine.rollouts.config import ApiConfig
from grpo_engine.wire.access_token import read_token
from grpo_engine.wire.environment_variables import TOKEN_VARIABLE
from grpo_engine.wire.run_folder import ROLLOUT_STORE
from grpo_tui.services.base import Launch, OfPolicy, Place, Probe, RestartPolicy, Service, access_text


class RolloutApi(Service, OfPolicy, ApiConfig):
    """Collects scored groups from environments and hands batches to the trainer."""

    kind: Literal["rollout_api"]
    prepare: bool = True
    restart: RestartPolicy = RestartPolicy.ON_FAILURE
    """What it received is on disk and its clients retry, so a crash does not end the run."""
    restart_unhealthy: bool = True
    """When its store was deleted it accepts nothing, and a restart makes a new one."""

    def launch(self, name: str, place: Place) -> Launch:
        """Store in the run folder; ready when `/info` answers."""
        config = self.model_copy(
            update={"store": self.store or place.of_policy(self.policy) / ROLLOUT_STORE, "token": None}
        )
        url = f"http://{self.host}:{self.port}"
        return self._launch(
            name,
            self.kind,
            place,
            engine=("api", *to_flags(config, ApiConfig)),
            env={TOKEN_VARIABLE: self.token} if self.token else {},  # every user can read a command line
            access=access_text(allow_without_token=self.allow_without_token, routes="groups, batches, reset"),
            written_folders=() if self.store is None else (place.profile_folder / self.cwd / self.store.parent,),
            ports=(self.port, *self.ports),
            unfinished="",
            ready=self.ready or Probe(http=f"{url}/info", within_s=60),
            live=self.live or Probe(http=f"{url}/health", interval_s=5, timeout_s=10, within_s=20),
        )

    def own_token(self, profile_folder: Path) -> str | None:
        """Its `token`, or what is in its `token_file`."""
        if self.token_file is None:
            return self.token
        return read_token(profile_folder / self.cwd / self.token_file, where="token_file")
