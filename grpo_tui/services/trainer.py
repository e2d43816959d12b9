"""The trainer as a service."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from grpo_engine.bridges import Broadcast, ParameterService, Turns
from grpo_engine.bridges.transport.checkpoint import CheckpointSettings
from grpo_engine.bridges.transport.in_place import InPlaceSettings
from grpo_engine.colocate.config import TrainerConfig
from grpo_engine.flags import to_flags
from grpo_engine.wire.environment_variables import INFERENCE_VARIABLE, RESTARTS_VARIABLE
from grpo_engine.wire.fork_server import RESTART_SIGNAL
from grpo_engine.wire.log_lines import (
    MODEL_MADE,
    PARAMETERS_TRAINED,
    REHEARSAL_BEGINS,
    REHEARSED,
    RESUMED,
    STOPPED,
    TRAINER_READY,
    WAITING_FOR_PEER,
    WEIGHTS_ATTACHED,
    WEIGHTS_LOADING,
)
from grpo_engine.wire.run_folder import BRIDGE_FILE, HANDOVER_FOLDER, item_state_file, restarts_file
from grpo_tui.services.base import Launch, OfPolicy, Place, Probe, RestartInPlace, Service
from grpo_tui.services.inference import VLLM_PHASES

READY_WITHIN_S = 600.0
"""Longer than it waits for an inference server that is being restarted."""
STALLED_S = 180.0
PHASES = (
    (MODEL_MADE.pattern, "making {0}"),
    (WEIGHTS_LOADING.pattern, "loading weights"),
    (WEIGHTS_ATTACHED.pattern, "attached to {0} shared tensors"),
    (PARAMETERS_TRAINED.pattern, "handing {0} parameters to inference"),
    (REHEARSAL_BEGINS.pattern, "rehearsing a step, kernels are compiled the first time"),
    (REHEARSED.pattern, "a step fits, handing parameters to inference"),
    (RESUMED.pattern, "resumed from {0}"),
    (WAITING_FOR_PEER.pattern, "waiting for a peer, {0} s at most"),
)
"""Lines of our trainer, in order."""
PART_ARGUMENTS = (
    *("--processes", "{num_devices}", "--nodes", "{num_machines}", "--node-rank", "{number}"),
    *("--master-addr", "{address}", "--master-port", "{port}"),
)
"""Of the launcher of ranks on one of several machines; the last ones count."""


def _one_or_several(value: Any) -> Any:
    """A name is short for a list of it, and an earlier version wrote None for none."""
    return () if value is None else (value,) if isinstance(value, str) else value


class Trainer(Service, OfPolicy, TrainerConfig):
    """Trains on batches from the rollout API and publishes new weights; the run ends with it."""

    kind: Literal["trainer"]
    prepare: bool = True
    ends_run: bool | None = True
    stop_grace_s: float = 30.0
    """Long enough to save a checkpoint on SIGTERM."""
    inference_service: Annotated[tuple[str, ...], BeforeValidator(_one_or_several)] = ()
    """The service, or services, that a bridge with `restart = true` restarts; unset: those of kind inference."""

    @model_validator(mode="before")
    @classmethod
    def _one_rank_a_gpu(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("processes") is not None:
            return values
        gpus = values.get("gpus")
        if isinstance(gpus, list | tuple) and len(gpus) > 1:
            return {**values, "processes": len(gpus)}
        devices, nodes = values.get("num_devices"), values.get("nodes", 1)
        if isinstance(devices, int) and isinstance(nodes, int) and devices > 1 and nodes > 0:
            if devices % nodes:
                raise ValueError(
                    f"num_devices = {devices} and nodes = {nodes}: each machine takes as many devices, so set "
                    f"num_devices to a multiple of {nodes}"
                )
            return {**values, "processes": devices // nodes}
        return values

    @model_validator(mode="after")
    def _ranks_and_gpus_are_as_many(self) -> Trainer:
        if self.gpus and len(self.gpus) != (self.processes or 1):
            raise ValueError(
                f"gpus = {list(self.gpus)} and processes = {self.processes}: each rank takes one GPU, so leave "
                "processes out"
            )
        return self

    @property
    def starts_server(self) -> bool:
        """Never: the supervisor does."""
        return False

    @property
    def has_launcher(self) -> bool:
        """Whether its main process has all ranks, and can start them again without imports."""
        return self.num_ranks > 1 and self.nodes == 1 and not self.num_devices

    @property
    def num_machines(self) -> int | None:
        """As many as `nodes`."""
        return self.nodes if self.num_devices and self.nodes > 1 else None

    @property
    def chosen_by_cluster(self) -> tuple[str, ...]:
        """What the launchers of ranks are told of each other."""
        fields = type(self).model_fields
        return tuple(key for key in ("node_rank", "master_addr") if getattr(self, key) != fields[key].default)

    @property
    def one_machine_because(self) -> str | None:
        """Why its ranks cannot be on several machines of a cluster; None where they can."""
        if self.num_devices != self.num_ranks:
            return f"processes = {self.processes} and num_devices = {self.num_devices} are not one rank a device"
        if not self.bridge.trains_over_ranks or self.bridge.shares_memory:
            return f"bridge mode {self.bridge.mode!r} has trainer and server on one machine"
        return None

    @property
    def start_phases(self) -> tuple[tuple[str, str], ...]:
        """Log lines until training begins; an engine in the trainer starts first."""
        return (*VLLM_PHASES, *PHASES) if self.own_engine == "vllm" else PHASES

    def launch(self, name: str, place: Place) -> Launch:
        """Write metrics, rollouts and checkpoints into the run folder; be ready when training begins."""
        folder = place.of_policy(self.policy)
        update: dict[str, object] = {}
        if self.run_folder is None:
            update["run_folder"] = folder
        if isinstance(self.bridge, InPlaceSettings) and self.bridge.config_path is None:
            update["bridge"] = self.bridge.model_copy(update={"config_path": folder / BRIDGE_FILE})
        if (
            isinstance(self.bridge, CheckpointSettings | Broadcast | ParameterService | Turns)
            and self.bridge.handover is None
        ):
            update["bridge"] = self.bridge.model_copy(update={"handover": folder / HANDOVER_FOLDER})
        if self.environment is not None and self.environment.state_file is None:
            file = item_state_file(place.run_folder, name)
            update["environment"] = self.environment.model_copy(update={"state_file": file})
        config = self.model_copy(update=update)
        in_place, environment = None, {INFERENCE_VARIABLE: ",".join(self.inference_service)}
        if self.has_launcher:
            restarts = restarts_file(place.run_folder, name)
            in_place = RestartInPlace(signal=RESTART_SIGNAL.name, file=restarts)
            environment[RESTARTS_VARIABLE] = str(restarts)
        return self._launch(
            name,
            self.kind,
            place,
            engine=("train", *to_flags(config, TrainerConfig)),
            env={variable: value for variable, value in environment.items() if value},
            restart_in_place=in_place,
            written_folders=() if self.save_path is None else (place.profile_folder / self.cwd / self.save_path,),
            num_ranks=self.num_ranks if self.num_devices else self.processes or 1,
            num_machines=self.num_machines,
            part_arguments=PART_ARGUMENTS if self.num_devices and self.one_machine_because is None else (),
            unfinished=STOPPED.pattern,
            ready=self.ready or Probe(log=TRAINER_READY.pattern, within_s=READY_WITHIN_S, stalled_s=STALLED_S),
        )
