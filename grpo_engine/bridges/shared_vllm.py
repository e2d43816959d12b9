"""`shared_vllm`: one copy of the weights. The trainer's parameters are the memory that the server reads.

A publish pauses the server, closes the fence, writes, opens it and resumes: some milliseconds and no copy. On a CPU the
memory is POSIX shared memory, on a GPU it is the server's own, through CUDA IPC. When the server ends, the trainer lets
go of that memory, so that it is free for the next one, and brings the weights there once it is up.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from grpo_engine.bridges.bridge_files import bridge_file_path, is_server_alive, read_bridge_file
from grpo_engine.bridges.fence import Fence
from grpo_engine.bridges.protocol import Bridge, BridgeContext, BridgeModel, connect
from grpo_engine.bridges.saving import save_model
from grpo_engine.bridges.stock_bridge_file import is_stock_file
from grpo_engine.config import Config
from grpo_engine.errors import BridgeError, HalfWritten, PeerUnavailable
from grpo_engine.flags import Flag
from grpo_engine.wire.bridge_file import BridgeFile

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_engine.bridges.mapped_model import MappedModel

_LOOK_EVERY_S = 0.25
"""Between two looks for a new server, while there is nothing else to do."""
_SAY_EVERY_S = 15.0

logger = logging.getLogger(__name__)


class OnSharedMemory(Config):
    """What every bridge is told whose model stands on the server's memory."""

    shares_memory: ClassVar[bool] = True
    """Whether trainer and server map the same weights."""
    mode: str
    """How new weights reach inference."""
    config_path: Annotated[Path | None, Flag(("--vllm-config-path",))] = None
    """The server's bridge file; default: $VLLM_BRIDGE_CONFIG_PATH, else $LOGDIR/vllm_bridge_config.json."""
    pause_timeout_s: Annotated[float, Flag(("--bridge-pause-timeout-s",))] = Field(300.0, gt=0)
    """Longest time that one hand-over may keep the server paused."""


class SharedVllm(OnSharedMemory):
    """Single copy: trainer and server map the same weights."""

    after_server_restart: ClassVar[str] = "the trainer attaches to the new server and writes its weights into it"
    """What the trainer does then, for the people who restart one."""
    trains_adapter: ClassVar[bool] = False
    """Whether an adapter on a frozen model learns, and not the model."""
    mode: Annotated[Literal["shared_vllm"], Flag(("--weight-bridge-mode",))] = "shared_vllm"
    """How new weights reach inference."""

    def build(self, context: BridgeContext) -> Bridge:
        """The bridge itself; another one for a server of Atropos, which has no fence and cannot pause."""
        if is_stock_file(path := bridge_file_path(self.config_path, os.environ)):
            from grpo_engine.bridges.stock_shared import StockSharedBridge

            return StockSharedBridge(path, context)
        return SharedVllmBridge(self, context)


class SharedVllmBridge:
    """See `grpo_engine.bridges.protocol.Bridge`. What is trained on the memory is for the methods at the end to say."""

    def __init__(self, config: OnSharedMemory, context: BridgeContext) -> None:
        self._context = context
        self._pause_timeout_s = config.pause_timeout_s
        self._path = bridge_file_path(config.config_path, os.environ)
        # A server that is known to have ended will not answer, however patiently it is asked.
        self._client = connect(replace(context, is_stopping=lambda: context.is_stopping() or self._has_ended()))
        self._version: int | None = None
        """What was published last by this trainer; `_write` brings its values."""
        self._write: Callable[[], None]
        self._file: BridgeFile | None = None
        """Of the server whose memory is mapped, or was mapped last."""
        self._fence: Fence | None = None
        """Of that server; None while nothing is mapped."""
        self._said_at = -math.inf
        self._weights: MappedModel

    def attach(self) -> BridgeModel:
        """Build the model on the server's memory.

        Raises:
            BridgeError: the server shares nothing, its bridge file is another one's, or another trainer is at work.
            ModelError: the shared weights are of another model.
        """
        from grpo_engine.bridges.mapped_model import MappedModel

        file = self._find_export()
        fence = Fence.attach(file.fence_segment)
        self._check_alone(file, fence)
        self._mend_half_written(file, fence)
        self._weights = MappedModel(self._context.model_name, file)
        self._wrap()
        self._look_at_memory(file, fence)
        self._file, self._fence = file, fence
        version = fence.read().policy_version
        logger.info("attached to %d shared tensors of %s, version %d", len(file.tensors), self._path, version)
        served = str(self._weights.model.dtype).removeprefix("torch.")
        if self._context.dtype not in ("auto", served):
            logger.warning("dtype %s has no effect: the weights are the server's, in %s", self._context.dtype, served)
        return self._trained(version)

    def publish(self, version: int, write: Callable[[], None]) -> None:
        """Write under a pause and the fence; where the server has ended, the next one gets this version."""
        self._version, self._write = version, write
        if self._fence is None:
            self.keep_up()
            return
        with self._unless_the_server_ends():
            self._hand_over()

    def keep_up(self) -> None:
        """Let go of a server that has ended, and attach to the next one once it is there."""
        if self._has_ended():
            self._let_go()
        if self._fence is not None:
            return
        successor = self._find_successor()
        if successor is None:
            self._say_what_is_awaited()
            return
        with self._unless_the_server_ends():
            self._attach_again(successor)

    def ensure_current(self) -> None:
        """Wait until a living server serves the current version; without limit where the last one has ended."""
        while not self._is_current():
            if self._context.is_stopping():
                raise PeerUnavailable(f"{self._path}: of no living server; not awaited, since training is to stop")
            time.sleep(_LOOK_EVERY_S)

    def close(self) -> None:
        """Unmap the fence; the weights go with the model."""
        self._client.close()
        if self._fence is not None:
            self._fence.sign_off()
            self._fence.close()

    # --- which server ----------------------------------------------------------------------------------------------

    def _find_export(self) -> BridgeFile:
        """The bridge file of the server that answers."""
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
        return file

    def _find_successor(self) -> BridgeFile | None:
        """The bridge file of a server that lives, where there is one; asks nobody."""
        try:
            file = read_bridge_file(self._path)
        except BridgeError:
            if not self._path.exists():
                return None
            file = read_bridge_file(self._path)  # the next server's, which came while we looked; else it is damaged
        return file if is_server_alive(file) else None

    def _has_ended(self) -> bool:
        return self._file is not None and not is_server_alive(self._file)

    def _is_current(self) -> bool:
        self.keep_up()
        with self._unless_the_server_ends():
            if self._fence is not None and self._client.info().instance != self._instance():
                self._attach_again(self._find_export())
        return self._fence is not None

    def _instance(self) -> str:
        assert self._file is not None
        return self._file.instance

    @contextmanager
    def _unless_the_server_ends(self) -> Iterator[None]:
        """Where the server ends while it is asked something, its memory is let go of, and it is no error."""
        try:
            yield
        except (PeerUnavailable, BridgeError):
            if not self._has_ended():
                raise
            self._let_go()

    def _check_alone(self, file: BridgeFile, fence: Fence) -> None:
        """Two trainers would compute with each other's weights, and each write over what the other has learned."""
        if (other := fence.other_trainer(file.pid)) is not None:
            raise BridgeError(
                f"{self._path}: process {other.pid} trains the weights of this server already: end it, or start an "
                "inference server for each trainer"
            )

    def _mend_half_written(self, file: BridgeFile, fence: Fence) -> None:
        """Have the server load the model again where an earlier trainer died while writing."""
        try:
            fence.check()
        except HalfWritten as error:
            logger.warning("%s; the server loads %s again", error, file.model)
            self._load_again(file, 0)

    def _load_again(self, file: BridgeFile, version: int) -> None:
        """Have the server read its model's checkpoint into the memory, as `version`."""
        from grpo_engine.models.stored_weights import checkpoint_folder

        folder = checkpoint_folder(file.model)
        if folder is None:
            raise BridgeError(f"{file.model}: not on this machine, so it cannot be loaded again: restart the server")
        self._client.reload(folder, version)

    # --- weights ---------------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        """Write the current version, and see that the memory is still that of the server that answers."""
        assert self._fence is not None
        assert self._version is not None
        assert self._file is not None
        self._check_alone(self._file, self._fence)
        if self._client.pause(self._pause_timeout_s).instance != self._instance():
            self._client.resume()
            self._attach_again(self._find_export())
            return
        try:
            with self._fence.writing(self._version):
                self._weights.write(self._write)
        finally:
            # Says no version: the fence has it, and a server that came up in between must not take it as its own.
            answer = self._client.resume()
        if answer.instance != self._instance():
            self._attach_again(self._find_export())

    def _attach_again(self, file: BridgeFile) -> None:
        """Map another server's memory and hand the current version over."""
        self._let_go()
        self._file = file  # from here on it is this one that may end
        if self._client.info().instance != file.instance:
            file = self._file = self._find_export()
        fence = Fence.attach(file.fence_segment)
        self._weights.map_again(file)
        self._look_at_memory(file, fence)
        self._fence = fence
        if self._version is not None:
            self._hand_over()
            logger.info("attached to the new inference server (pid %d), version %d", file.pid, self._version)

    def _let_go(self) -> None:
        if self._fence is None:
            return
        self._fence.close()
        self._fence = None
        self._weights.let_go(is_kept=self._is_kept)
        self._said_at = -math.inf

    def _say_what_is_awaited(self) -> None:
        assert self._file is not None
        if time.monotonic() - self._said_at > _SAY_EVERY_S:
            self._said_at = time.monotonic()
            logger.warning(
                "the inference server (pid %d) has ended; the trainer has let go of its memory and keeps the weights; "
                "waiting for %s of a new one",
                self._file.pid,
                self._path,
            )

    # --- what is trained -------------------------------------------------------------------------------------------

    def _wrap(self) -> None:
        """Nothing is put around the mapped model."""

    def _look_at_memory(self, file: BridgeFile, fence: Fence) -> None:
        """Newly mapped memory may hold anything: training begins with it, or all of it is written before it is used."""

    def _trained(self, version: int) -> BridgeModel:
        """The model itself, whose parameters are what inference reads."""
        return BridgeModel(model=self._weights.model, is_shared=True, policy_version=version, save=self._save)

    def _is_kept(self, tensor: Tensor) -> bool:
        """Whether nobody else has a parameter's value; a writer has those of all that are trained."""
        return self._version is None or not tensor.requires_grad

    def _save(self, folder: Path) -> None:
        if self._fence is None and self._version is not None:
            self._weights.write(self._write)
        save_model(self._weights.model, self._context.model_name, folder)
