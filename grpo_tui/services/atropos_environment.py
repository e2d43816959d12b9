"""An environment of Atropos as a service."""

from __future__ import annotations

from typing import Literal

from grpo_engine.environments.atropos.config import AtroposEnvConfig
from grpo_engine.flags import to_flags
from grpo_tui.services.base import Launch, OfPolicy, Place, RestartPolicy, Service

REFUSED = r"Error fetching from server\. (Status: 4\d\d, .*)"
"""What a stock environment logs of a request that the rollout API refused: a traceback of 80 lines follows, without the
reason."""


class AtroposEnvironment(Service, OfPolicy, AtroposEnvConfig):
    """Runs an environment file of Atropos unchanged, with the Python that has atroposlib."""

    kind: Literal["atropos_environment"]
    restart: RestartPolicy = RestartPolicy.ON_FAILURE
    """It exits when the rollout API is unreachable for some seconds, and loses only what was being sampled."""

    def launch(self, name: str, place: Place) -> Launch:
        """Write its settings into the run folder; ready when it runs, since it registers only after the trainer has."""
        yaml_file = self.yaml_file or place.run_folder / f"{name}.yaml"
        config = self.model_copy(update={"yaml_file": yaml_file})
        return self._launch(
            name,
            self.kind,
            place,
            engine=("atropos-env", *to_flags(config, AtroposEnvConfig)),
            cause=REFUSED,
        )
