"""What `none` and `lora_restart` have in common: a model of the trainer's own, handed over as whole checkpoints.

Every few steps one is written and put in place, and then the server reads it: in place of what it serves, or, where
that is asked for, by starting anew. A server that is restarted by anybody else reads the newest one as it starts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol
from urllib.parse import urlsplit

from pydantic import Field

from grpo_engine.bridges.handover import Handover, choose_storage
from grpo_engine.bridges.protocol import BridgeContext, BridgeModel, connect
from grpo_engine.bridges.saving import save_model
from grpo_engine.bridges.served import Served
from grpo_engine.config import Config
from grpo_engine.errors import BridgeError, PeerUnavailable
from grpo_engine.flags import Flag

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from grpo_engine.bridges.server_control import ServerControl
    from grpo_engine.wire.inference import BridgeInfo

HANDOVER_FOLDER = "handover"

logger = logging.getLogger(__name__)


class CheckpointSettings(Config):
    """Settings of the bridges that hand over whole checkpoints."""

    every_steps: Annotated[int, Flag(("--vllm-restart-interval",))] = Field(3, ge=1)
    """Optimizer steps between two hand-overs."""
    restart: Annotated[bool, Flag(("--bridge-restart",))] = False
    """Have the inference server start anew for each hand-over, instead of reading it in place: through the supervisor,
    or, run by hand, as a process that the trainer starts itself."""
    handover: Annotated[Path | None, Flag(("--handover",))] = None
    """Folder in which `current` is the newest checkpoint; a server that is given the same --handover reads it as it
    starts. Default: in the run."""
    handover_storage: Annotated[Path | None, Flag(("--handover-storage",))] = None
    """Where the checkpoints themselves are written, two at most. Default: beside a GPU /dev/shm, where they take three
    quarters at most of what is free there and in main memory; else the hand-over folder."""
    server_config: Annotated[Path | None, Flag(("--server-config",))] = None
    """With --bridge-restart by hand: TOML or JSON file with settings of the server that the trainer starts."""


class OwnModel(Protocol):
    """How a mode loads its model, and writes it as the bare model that inference reads."""

    def load(self) -> PreTrainedModel | PeftModel:
        """The model to train; called once."""

    def most_bytes(self) -> int:
        """What two checkpoints of it take together."""

    def write(self, folder: Path, kept: Path) -> None:
        """Write a whole checkpoint with its tokenizer.

        Args:
            folder: an empty folder.
            kept: a folder beside it, for what all checkpoints have in common; as the last call has left it.
        """


class CheckpointBridge:
    """See `grpo_engine.bridges.protocol.Bridge`."""

    def __init__(self, settings: CheckpointSettings, context: BridgeContext, own: OwnModel) -> None:
        self._settings = settings
        self._context = context
        self._own = own
        self._folder = (settings.handover or context.folder / HANDOVER_FOLDER).absolute()
        self._client = connect(context)
        self._served = Served(self._client)
        self._written = 0
        """Version of the weights in this process."""
        self._control: ServerControl | None = None
        self._handover: Handover | None = None

    def attach(self) -> BridgeModel:
        """Find the server, or start it, and load the model."""
        if self._settings.restart:
            from grpo_engine.bridges.server_control import server_control

            self._control = server_control(self._context, self._folder, self._settings.server_config, os.environ)
            self._control.attach()
        info = self._client.info() if self._control is not None else self._find_server()
        self._compare_models(info)
        model = self._own.load()
        self._handover = self._take_folder(on_gpu=next(model.parameters()).is_cuda)
        return BridgeModel(
            model=model,
            is_shared=False,
            policy_version=info.policy_version,
            save=lambda folder: save_model(model, self._context.model_name, folder),
        )

    def publish(self, version: int, write: Callable[[], None]) -> None:
        """Take the new values; hand them over if that is due."""
        write()
        self._written = version
        if self._served.version is None or version - self._served.version >= self._settings.every_steps:
            self._hand_over()

    def keep_up(self) -> None:
        """Start a server of this trainer's own again if it has ended; another one is none of its business."""
        if self._control is not None:
            self._control.look_after()

    def ensure_current(self) -> None:
        """Hand over again to a server that was restarted without the hand-over folder, or serves something else."""
        self.keep_up()
        if self._served.is_lost():
            self._hand_over()

    def close(self) -> None:
        """Remove what the server has read, and end a server of this trainer's own."""
        self._client.close()
        try:
            if self._control is not None:
                self._control.close()
        finally:
            if self._handover is not None:
                self._handover.close()

    def _hand_over(self) -> None:
        assert self._handover is not None
        with self._handover.writing(self._written) as folder:
            self._own.write(folder, self._handover.kept)
        if self._control is None or self._served.version is None:  # a server that has just started need not do it again
            self._client.reload(self._handover.current(), self._written)
        else:
            self._control.restart()
            self._require_restarted()
        self._served.note(self._written)
        self._handover.forget_older()

    def _compare_models(self, info: BridgeInfo) -> None:
        from grpo_engine.models.same_model import is_same_model

        if not is_same_model(self._context.model_name, info.model_name):
            logger.warning(
                "%s serves %s; it gets the weights of %s, but keeps its own tokenizer and chat template: give both the "
                "same model",
                self._client.url,
                info.model_name,
                self._context.model_name,
            )

    def _require_restarted(self) -> None:
        """The gate: training goes on with a new server that serves the new weights, or not at all."""
        info = self._client.info()
        if info.instance == self._served.instance:
            raise BridgeError(
                f"{self._client.url}: answers as before, so it was not this server that was restarted; correct "
                "--vllm-port"
            )
        if info.policy_version != self._written:
            raise BridgeError(
                f"{self._client.url}: serves version {info.policy_version} after its restart, and not the "
                f"{self._written} that was handed over; start it with --handover {self._folder}, and look at its log"
            )

    def _take_folder(self, *, on_gpu: bool) -> Handover:
        from grpo_engine.models.loading import resolve_model

        storage = choose_storage(
            self._folder,
            self._settings.handover_storage,
            num_bytes=self._own.most_bytes(),
            on_gpu=on_gpu,
            environment=os.environ,
        )
        logger.info("checkpoints for inference are written in %s", storage)
        return Handover(self._folder, storage, model=resolve_model(self._context.model_name))

    def _find_server(self) -> BridgeInfo:
        """Where the server stands; whoever has started none is told how, at once and again at the end."""
        from grpo_engine.bridges.server_control import is_listening

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
