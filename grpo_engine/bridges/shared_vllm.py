"""`shared_vllm`: one copy of the weights. The trainer's parameters are the memory that the server reads.

A publish pauses the server, closes the fence, writes, opens it and resumes: some milliseconds and no copy. On a CPU the
memory is POSIX shared memory, on a GPU it is the server's own, through CUDA IPC.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from grpo_engine.bridges.bridge_files import bridge_file_path, is_server_alive, read_bridge_file
from grpo_engine.bridges.fence import Fence
from grpo_engine.bridges.protocol import Bridge, BridgeContext, BridgeModel, connect
from grpo_engine.bridges.saving import save_model
from grpo_engine.bridges.shared_tensors import map_tensors
from grpo_engine.config import Config
from grpo_engine.errors import BridgeError, HalfWritten
from grpo_engine.flags import Flag
from grpo_engine.wire.bridge_file import BridgeFile

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class SharedVllm(Config):
    """Single copy: trainer and server map the same weights."""

    mode: Annotated[Literal["shared_vllm"], Flag(("--weight-bridge-mode",))] = "shared_vllm"
    """How new weights reach inference."""
    config_path: Annotated[Path | None, Flag(("--vllm-config-path",))] = None
    """The server's bridge file; default: $VLLM_BRIDGE_CONFIG_PATH, else $LOGDIR/vllm_bridge_config.json."""
    pause_timeout_s: Annotated[float, Flag(("--bridge-pause-timeout-s",))] = Field(300.0, gt=0)
    """Longest time that one hand-over may keep the server paused."""

    def build(self, context: BridgeContext) -> Bridge:
        """The bridge itself."""
        return SharedVllmBridge(self, context)


class SharedVllmBridge:
    """See `grpo_engine.bridges.protocol.Bridge`."""

    def __init__(self, config: SharedVllm, context: BridgeContext) -> None:
        self._context = context
        self._pause_timeout_s = config.pause_timeout_s
        self._path = bridge_file_path(config.config_path, os.environ)
        self._client = connect(context)
        self._version: int | None = None
        """What was published last by this trainer."""
        self._file: BridgeFile
        self._fence: Fence
        self._model: PreTrainedModel

    def attach(self) -> BridgeModel:
        """Build the model on the server's memory.

        Raises:
            BridgeError: the server shares nothing, or its bridge file is another one's.
            ModelError: the shared weights are of another model.
        """
        from grpo_engine.models.loading import load_config, load_model_on_shared

        self._file, self._fence = self._find_export()
        self._mend_half_written()
        tensors = _map(self._file)
        self._model = load_model_on_shared(load_config(self._context.model_name), tensors, self._file.aliases)
        state = self._fence.read()
        logger.info("attached to %d shared tensors of %s, version %d", len(tensors), self._path, state.policy_version)
        return BridgeModel(
            model=self._model,
            is_shared=True,
            policy_version=state.policy_version,
            save=lambda folder: save_model(self._model, self._context.model_name, folder),
        )

    def publish(self, version: int, write: Callable[[], None]) -> None:
        """Write under a pause and the fence."""
        self._pause()
        try:
            with self._fence.writing(version):
                write()
                self._finish_writes()
        finally:
            # Says no version: the fence has it, and a server that came up in between must not take it as its own.
            answer = self._client.resume()
        self._version = version
        if answer.instance != self._file.instance:
            self._attach_again()

    def ensure_current(self) -> None:
        """Follow a server that was restarted to its new memory, and bring the current weights there."""
        if self._client.info().instance != self._file.instance:
            self._attach_again()

    def close(self) -> None:
        """Unmap the fence; the weights go with the model."""
        self._client.close()
        if hasattr(self, "_fence"):
            self._fence.close()

    def _pause(self) -> None:
        """Pause the server whose memory is mapped, wherever it has gone."""
        while self._client.pause(self._pause_timeout_s).instance != self._file.instance:
            self._client.resume()
            self._attach_again()

    def _find_export(self) -> tuple[BridgeFile, Fence]:
        info = self._client.info()
        if not info.shared_weights:
            raise BridgeError(
                f"{self._client.url}: does not share its weights; start it with --shared-weights "
                "(or VLLM_ENABLE_SHARED_WEIGHTS=1)"
            )
        file = read_bridge_file(self._path)
        if not is_server_alive(file):
            raise BridgeError(f"{self._path}: its server (pid {file.pid}) is gone; restart the inference server")
        if file.instance != info.instance:
            raise BridgeError(
                f"{self._path}: belongs to another inference server than {self._client.url} "
                f"(instance {file.instance}, not {info.instance}); point --vllm-config-path at its bridge file"
            )
        return file, Fence.attach(file.fence_segment)

    def _mend_half_written(self) -> None:
        """Have the server load the model again where an earlier trainer died while writing."""
        try:
            self._fence.check()
        except HalfWritten as error:
            from grpo_engine.models.loading import resolve_model

            logger.warning("%s; the server loads %s again", error, self._file.model)
            self._client.reload(Path(resolve_model(self._file.model)), 0)

    def _attach_again(self) -> None:
        """After a restart: the same memory, which the new server adopted, or another, which gets the weights."""
        before = self._file
        file, fence = self._find_export()
        if (file.fence_segment, file.tensors) == (before.fence_segment, before.tensors):
            logger.info("the inference server was restarted and kept the shared weights")
            self._file = file
            fence.close()
            return
        logger.warning("the inference server was restarted with other memory; its weights are written again")
        self._fence.close()
        self._file, self._fence = file, fence
        fresh = _map(file)
        parameters = dict(self._model.named_parameters())
        if fresh.keys() != parameters.keys() or any(fresh[name].shape != p.shape for name, p in parameters.items()):
            raise BridgeError(f"{self._path}: the restarted server serves another model; restart the trainer too")
        trained = {name: parameter.data for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            parameter.data = fresh[name]
        if self._version is None:
            return

        def write() -> None:
            for name, parameter in parameters.items():
                parameter.data.copy_(trained[name])

        self.publish(self._version, write)

    def _finish_writes(self) -> None:
        if self._model.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._model.device)


def _map(file: BridgeFile) -> dict[str, Tensor]:
    if all(entry.handle.kind == "cuda_ipc" for entry in file.tensors.values()):
        from grpo_engine.bridges.cuda_tensors import map_cuda_tensors

        return map_cuda_tensors(file.tensors)
    return map_tensors(file.tensors)
