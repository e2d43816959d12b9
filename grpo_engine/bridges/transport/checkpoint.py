"""Transport checkpoint: every few steps a whole checkpoint is written, and the server loads it.

The server reloads its weights over HTTP, or is restarted for each checkpoint if so configured. A server that is
restarted for any other reason loads the newest checkpoint as it starts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from pydantic import Field

from grpo_engine.bridges.protocol import BridgeContext, BridgeModel, Placement, connect
from grpo_engine.bridges.transport.checkpoint_folder import CheckpointFolder, choose_storage
from grpo_engine.bridges.transport.saving import save_model
from grpo_engine.config import Config
from grpo_engine.errors import BridgeError, PeerUnavailable
from grpo_engine.flags import Flag
from grpo_engine.wire.run_folder import HANDOVER_FOLDER

if TYPE_CHECKING:
    from grpo_engine.bridges.transport.server_control import ServerControl
    from grpo_engine.wire.inference import BridgeInfo


logger = logging.getLogger(__name__)


class CheckpointSettings(Config):
    """Settings of the modes that send whole checkpoints."""

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


class CheckpointBridge:
    """See `grpo_engine.bridges.protocol.Bridge`."""

    def __init__(self, settings: CheckpointSettings, context: BridgeContext, placement: Placement) -> None:
        self._settings = settings
        self._context = context
        self._placement = placement
        self._folder = (settings.handover or context.folder / HANDOVER_FOLDER).absolute()
        self._client = connect(context)
        self._written = 0
        """Version of the weights in this process."""
        self._served: int | None = None
        """Version that the server loaded last; None before the first weight update."""
        self._instance = ""
        """The server start that loaded it."""
        self._control: ServerControl | None = None
        self._checkpoints: CheckpointFolder | None = None

    def attach(self) -> BridgeModel:
        """Find the server, or start it, and load the model."""
        if self._settings.restart:
            from grpo_engine.bridges.transport.server_control import server_control

            self._control = server_control(self._context, self._folder, self._settings.server_config, os.environ)
            self._control.attach()
        info = self._client.info() if self._control is not None else self._find_server()
        self._compare_models(info)
        model = self._placement.load()
        self._checkpoints = self._take_folder(on_gpu=next(model.parameters()).is_cuda)
        return BridgeModel(
            model=model,
            is_shared=False,
            policy_version=info.policy_version,
            save=lambda folder: save_model(model, self._context.model_name, folder),
        )

    def publish(self, version: int, write: Callable[[], None]) -> None:
        """Write the new values; send a checkpoint if one is due."""
        write()
        self._written = version
        if self._served is None or version - self._served >= self._settings.every_steps:
            self._send()

    def poll_server(self) -> None:
        """Restart the server after an exit, if this trainer started it."""
        if self._control is not None:
            self._control.restart_if_exited()

    def ensure_current(self) -> None:
        """Send a checkpoint again if the server serves another version; usually one GET.

        A restarted server that serves the version has loaded it from the checkpoint folder. At version 0 that cannot be
        known, since the untrained model has it too.
        """
        self.poll_server()
        if self._served is None:
            return
        info = self._client.info()
        is_restarted = info.instance != self._instance
        if info.policy_version != self._served or (is_restarted and self._served == 0):
            logger.warning(
                "the inference server serves version %d instead of %d; sending it again",
                info.policy_version,
                self._served,
            )
            self._send()
        elif is_restarted:
            logger.info("the inference server was restarted, and serves version %d", self._served)
            self._instance = info.instance

    def close(self) -> None:
        """Remove the checkpoints, and terminate the server if this trainer started it."""
        self._client.close()
        try:
            if self._control is not None:
                self._control.close()
        finally:
            if self._checkpoints is not None:
                self._checkpoints.close()

    def _send(self) -> None:
        assert self._checkpoints is not None
        with self._checkpoints.writing(self._written) as folder:
            self._placement.write(folder, self._checkpoints.kept)
        if self._control is None or self._served is None:  # no restart for the first: the server has just started
            self._client.reload(self._checkpoints.current(), self._written)
        else:
            self._control.restart()
            self._require_restarted()
        self._served, self._instance = self._written, self._client.info().instance
        self._checkpoints.remove_older()

    def _compare_models(self, info: BridgeInfo) -> None:
        from grpo_engine.models.same_model import is_same_model

        if not is_same_model(self._context.model_name, info.model_name):
            logger.warning(
                "%s serves %s; it will load the weights of %s, but keep its own tokenizer and chat template: use the "
                "same "
                "model for both",
                self._client.url,
                info.model_name,
                self._context.model_name,
            )

    def _require_restarted(self) -> None:
        """Require that another server process answers and serves the new weights; otherwise training ends."""
        info = self._client.info()
        if info.instance == self._instance:
            raise BridgeError(
                f"{self._client.url}: answers with the same instance, so another server was restarted; correct "
                "--vllm-port"
            )
        if info.policy_version != self._written:
            raise BridgeError(
                f"{self._client.url}: serves version {info.policy_version} after its restart, not {self._written}; "
                f"start it with --handover {self._folder}, and check its log"
            )

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

    def _find_server(self) -> BridgeInfo:
        """The server's state; if no server is running, a warning and the final error say how to start one."""
        from grpo_engine.bridges.transport.server_control import is_listening

        advice = (
            f"start it (grpo-engine server --model {self._context.model_name} --port {urlsplit(self._client.url).port} "
            f"--handover {self._folder}), or let the trainer start one (--bridge-restart)"
        )
        if not is_listening(self._client.url):
            logger.warning("%s: no inference server yet: %s", self._client.url, advice)
        try:
            return self._client.info()
        except PeerUnavailable as error:
            raise PeerUnavailable(f"{error}; {advice}") from None
