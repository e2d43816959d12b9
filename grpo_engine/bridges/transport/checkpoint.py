"""Transport checkpoint: every few steps a whole checkpoint is written, and the server loads it.

The server reloads its weights over HTTP, or is restarted for each checkpoint if so configured. A server that is
restarted for any other reason loads the newest checkpoint as it starts.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from pydantic import Field

from grpo_engine.bridges.protocol import BridgeContext, BridgeModel, Mode, Placement, Update
from grpo_engine.bridges.transport.checkpoint_folder import CheckpointFolder, choose_storage, newest_checkpoint
from grpo_engine.bridges.transport.servers import Server, Servers, unshared_model
from grpo_engine.errors import BridgeError, ConfigError
from grpo_engine.flags import Flag
from grpo_engine.wire.run_folder import HANDOVER_FOLDER

if TYPE_CHECKING:
    from grpo_engine.bridges.transport.server_control import ServerControl
    from grpo_engine.wire.inference import BridgeInfo


logger = logging.getLogger(__name__)


class CheckpointSettings(Mode):
    """Settings of the modes that send whole checkpoints."""

    updates_many_servers: ClassVar[bool] = True

    every_steps: Annotated[int, Flag(("--vllm-restart-interval",))] = Field(3, ge=1)
    """Optimizer steps between two weight updates."""
    restart: Annotated[bool, Flag(("--bridge-restart",))] = False
    """Restart the inference server for each weight update instead of reloading in place: through the supervisor, or,
    without one, as a process that the trainer starts itself."""
    handover: Annotated[Path | None, Flag(("--handover",))] = None
    """Folder in which `current` is the newest checkpoint; a server that is given the same --handover reads it as it
    starts. Default: in the run."""
    handover_storage: Annotated[Path | None, Flag(("--handover-storage",))] = None
    """Where the checkpoints themselves are written, two at most. Default: beside a GPU /dev/shm, where they take three
    quarters at most of what is free there and in main memory; else the --handover folder."""
    server_config: Annotated[Path | None, Flag(("--server-config",))] = None
    """With --bridge-restart and no supervisor: TOML or JSON file with settings of the server that the trainer
    starts."""

    def updating_at_once(self) -> Self:
        """See `Mode`."""
        return self.model_copy(update={"every_steps": 1, "restart": False, "handover": None})

    @property
    def steps_between_updates(self) -> int:
        """See `Mode`."""
        return self.every_steps


class CheckpointBridge:
    """See `grpo_engine.bridges.protocol.Bridge`."""

    def __init__(self, settings: CheckpointSettings, context: BridgeContext, placement: Placement) -> None:
        self._settings = settings
        self._context = context
        self._placement = placement
        self._folder = (settings.handover or context.folder / HANDOVER_FOLDER).absolute()
        self._servers = Servers(context)
        if settings.restart and len(self._servers.all) > 1:
            raise ConfigError(
                f"--bridge-restart restarts one server, and there are {len(self._servers.all)}: leave it out, so that "
                "each loads the checkpoints in place"
            )
        self._written = 0
        """Version of the weights in this process."""
        self._served: int | None = None
        """Version of the newest checkpoint; None before the first weight update. Where steps are repeated from the
        journal it may be a later one than that of the weights."""
        self._control: ServerControl | None = None
        self._checkpoints: CheckpointFolder | None = None

    def attach(self) -> BridgeModel:
        """Find the servers, or start the one, and load the model."""
        if self._settings.restart:
            from grpo_engine.bridges.transport.server_control import server_control

            self._control = server_control(self._context, self._folder, self._settings.server_config, os.environ)
            self._control.attach()
        infos = list(self._servers.infos().values()) if self._control is not None else self._servers.find(self._advice)
        for server, info in zip(self._servers.all, infos, strict=True):
            self._compare_models(server.url, info)
        model = self._placement.load()
        self._checkpoints = self._take_folder(on_gpu=next(model.parameters()).is_cuda)
        return unshared_model(model, self._placement, infos, self._servers.repeat)

    def publish(self, version: int, write: Callable[[], None]) -> Update | None:
        """Write the new values; send a checkpoint if one is due, and servers do not have a later one."""
        write()
        self._written = version
        if self._served is None:
            self._served = self._left_by_another()
        is_early = self._served is not None and version - self._served < self._settings.every_steps
        return None if is_early or self._servers.may_stay(self._served, version) else self._send()

    def poll_server(self) -> None:
        """Restart the server after an exit, if this trainer started it; update one among several that is back."""
        if self._control is not None:
            self._control.restart_if_exited()
        if self._servers.look_for_lost():
            self.prepare_step()

    def prepare_step(self) -> None:
        """Have servers that serve another version load the newest checkpoint again; usually one GET to each.

        A restarted server that serves the version has loaded it from the checkpoint folder. At version 0 that cannot be
        known, since the untrained model has it too.
        """
        if self._control is not None:
            self._control.restart_if_exited()
        if self._served is None:
            return
        behind = []
        for server, info in self._servers.infos().items():
            is_restarted = info.instance != server.instance
            if info.policy_version != self._served or (is_restarted and self._served == 0):
                logger.warning(
                    "%s: serves version %d instead of %d; sending it again",
                    server.url,
                    info.policy_version,
                    self._served,
                )
                behind.append(server)
            elif is_restarted:
                logger.info("%s: was restarted, and serves version %d", server.url, self._served)
                server.instance = info.instance
        if behind:
            self._reload(behind, self._served)

    def close(self) -> None:
        """Remove the checkpoints, and terminate the server if this trainer started it."""
        self._servers.close()
        try:
            if self._control is not None:
                self._control.close()
        finally:
            if self._checkpoints is not None:
                self._checkpoints.close()

    def _send(self) -> Update:
        assert self._checkpoints is not None
        with self._checkpoints.writing(self._written) as folder:
            self._placement.write(folder, self._checkpoints.kept)
            num_bytes = sum(file.stat().st_size for file in folder.iterdir())
        num_servers, began = 1, time.perf_counter()
        if self._control is None or self._served is None:  # no restart for the first: the server has just started
            num_servers = self._reload(self._servers.asked, self._written)
        else:
            with self._servers.noting(self._written):
                self._control.restart()
                self._require_restarted()
        self._served = self._written
        pause_s = time.perf_counter() - began
        self._checkpoints.remove_older()
        return Update(pause_s=pause_s, num_bytes=num_bytes, num_servers=num_servers)

    def _reload(self, servers: Sequence[Server], version: int) -> int:
        """Have servers load the newest checkpoint; how many did."""
        assert self._checkpoints is not None
        path = self._checkpoints.current()

        def reload(server: Server) -> None:
            answer = server.client.reload(path, version, patience_s=self._servers.patience_s)
            server.served(answer.instance, version)

        with self._servers.noting(version):
            return len(self._servers.ask(servers, reload))

    def _left_by_another(self) -> int | None:
        """Version of a checkpoint that an earlier trainer of this run has left, where all servers serve it."""
        from grpo_engine.models.loading import resolve_model

        kept = self._servers.kept_version()
        left = None if kept is None else newest_checkpoint(self._folder, resolve_model(self._context.model_name))
        return kept if left is not None and left.policy_version == kept else None

    def _compare_models(self, url: str, info: BridgeInfo) -> None:
        from grpo_engine.models.same_model import is_same_model

        if not is_same_model(self._context.model_name, info.model_name):
            logger.warning(
                "%s serves %s; it will load the weights of %s, but keep its own tokenizer and chat template: use the "
                "same "
                "model for both",
                url,
                info.model_name,
                self._context.model_name,
            )

    def _require_restarted(self) -> None:
        """Require that another server process answers and serves the new weights; otherwise training ends."""
        (server,) = self._servers.all
        info = server.client.info()
        if info.instance == server.instance:
            raise BridgeError(
                f"{server.url}: answers with the same instance, so another server was restarted; correct --vllm-port"
            )
        if info.policy_version != self._written:
            raise BridgeError(
                f"{server.url}: serves version {info.policy_version} after its restart, not {self._written}; "
                f"start it with --handover {self._folder}, and check its log"
            )
        server.served(info.instance, self._written)

    def _take_folder(self, *, on_gpu: bool) -> CheckpointFolder:
        from grpo_engine.models.loading import resolve_model

        storage = choose_storage(
            self._folder,
            self._settings.handover_storage,
            num_bytes=self._placement.max_bytes(),
            on_gpu=on_gpu,
            environment=os.environ,
        )
        logger.info("checkpoints for inference are written to %s", storage)
        return CheckpointFolder(self._folder, storage, model=resolve_model(self._context.model_name))

    def _advice(self, port: int) -> str:
        return (
            f"start it (grpo-engine server --model {self._context.model_name} --port {port} --handover "
            f"{self._folder}), or let the trainer start one (--bridge-restart)"
        )
