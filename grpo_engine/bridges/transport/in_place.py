"""Transport in place: the trainer writes into the memory from which the server reads its weights.

A publish pauses the server, takes the weight lock, writes, releases the lock and resumes the server: a few milliseconds
and no copy. On a CPU the memory is POSIX shared memory, on a GPU the server's own through CUDA IPC. When the server
exits, the trainer unmaps that memory, so that its successor can allocate it, and writes the weights into the
successor's.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from grpo_engine.bridges.memory.bridge_files import bridge_file_path, is_server_alive, read_bridge_file
from grpo_engine.bridges.memory.weight_lock import WeightLock
from grpo_engine.bridges.protocol import BridgeContext, BridgeModel, Mode, Update, connect
from grpo_engine.errors import BridgeError, HalfWritten, PeerUnavailable
from grpo_engine.flags import Flag
from grpo_engine.wire.bridge_file import BridgeFile
from grpo_engine.wire.log_lines import WEIGHTS_ATTACHED

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_engine.bridges.placement.mapped import MappedModel

_POLL_S = 0.25
_WARN_EVERY_S = 15.0

logger = logging.getLogger(__name__)


class InPlaceSettings(Mode):
    """Settings of the modes whose model is mapped from the server's memory."""

    shares_memory: ClassVar[bool] = True
    is_of_one_device: ClassVar[bool] = True
    server_settings: ClassVar[Mapping[str, bool]] = {"shared_weights": True}
    config_path: Annotated[Path | None, Flag(("--vllm-config-path",))] = None
    """The server's bridge file; default: $VLLM_BRIDGE_CONFIG_PATH, else $LOGDIR/vllm_bridge_config.json."""
    pause_timeout_s: Annotated[float, Flag(("--bridge-pause-timeout-s",))] = Field(300.0, gt=0)
    """Longest time that one weight update may keep the server paused."""


class InPlaceBridge:
    """See `grpo_engine.bridges.protocol.Bridge`; a subclass may train something else on the mapped memory."""

    has_all: ClassVar[bool] = True
    """Whether a publish writes every tensor of a server that has read none: those that `_write` does not are kept."""

    def __init__(self, config: InPlaceSettings, context: BridgeContext) -> None:
        self._context = context
        self._pause_timeout_s = config.pause_timeout_s
        self._path = bridge_file_path(config.config_path, os.environ)
        # A server that is known to have exited will not answer: no retries then.
        self._client = connect(replace(context, is_stopping=lambda: context.is_stopping() or self._has_server_exited()))
        self._version: int | None = None
        """Published last by this trainer; `_write` writes its values."""
        self._write: Callable[[], None]
        self._file: BridgeFile | None = None
        """Of the server whose memory is mapped, or was last."""
        self._lock: WeightLock | None = None
        """Of that server; None while nothing is mapped."""
        self._warned_at = -math.inf
        self._weights: MappedModel

    def attach(self) -> BridgeModel:
        """Build the model on the server's memory.

        Raises:
            BridgeError: the server shares no weights, the bridge file is another server's, or another trainer is
            attached. ModelError: the shared weights are of another model.
        """
        file = self._find_export()
        lock = WeightLock.attach(file.fence_segment)
        self._check_alone(file, lock)
        self._reload_half_written(file, lock)
        self._weights = self._mapped(file)
        self._add_adapter()
        self._check_memory(file, lock)
        self._file, self._lock = file, lock
        version = lock.read().policy_version
        logger.info(WEIGHTS_ATTACHED.text, len(self._weights.tensors), self._path, version)
        served = str(self._weights.model.dtype).removeprefix("torch.")
        if self._context.dtype not in ("auto", served):
            logger.warning("dtype %s has no effect: the weights are the server's, in %s", self._context.dtype, served)
        return self._trained(version)

    def publish(self, version: int, write: Callable[[], None]) -> Update | None:
        """Write under a pause and the weight lock; if the server has exited, its successor gets this version."""
        self._version, self._write = version, write
        if self._lock is None:
            self.poll_server()
            return None
        with self._releasing_on_server_exit():
            return Update(pause_s=self._write_weights(), num_bytes=0, num_servers=1)
        return None

    def poll_server(self) -> None:
        """Unmap the memory of a server that has exited, and attach to its successor once there is one."""
        if self._has_server_exited():
            self._release()
        if self._lock is not None:
            return
        successor = self._find_successor()
        if successor is None:
            self._warn_waiting()
            return
        with self._releasing_on_server_exit():
            self._attach_again(successor)

    def prepare_step(self) -> None:
        """Wait until a running server serves the current version; without time limit after the last one has exited."""
        while not self._is_current():
            if self._context.is_stopping():
                raise PeerUnavailable(
                    f"{self._path}: the inference server has exited; not waiting for its successor, since training is "
                    "stopping"
                )
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Unmap the weight lock; the weights are unmapped with the model."""
        self._client.close()
        if self._lock is not None:
            self._lock.clear_writer()
            self._lock.close()

    # --- which server ----------------------------------------------------------------------------------------------

    def _find_export(self) -> BridgeFile:
        """The bridge file of the server that answers at the URL."""
        info = self._client.info()
        if not info.shared_weights:
            raise BridgeError(
                f"{self._client.url}: does not share its weights; start it with --shared-weights "
                "(or VLLM_ENABLE_SHARED_WEIGHTS=1)"
            )
        file = read_bridge_file(self._path)
        if not is_server_alive(file):
            raise BridgeError(f"{self._path}: its server (pid {file.pid}) has exited; restart the inference server")
        if file.instance != info.instance:
            raise BridgeError(
                f"{self._path}: belongs to another inference server than {self._client.url} "
                f"(instance {file.instance}, not {info.instance}); point --vllm-config-path at its bridge file"
            )
        return file

    def _find_successor(self) -> BridgeFile | None:
        """The bridge file of a running server, if there is one; sends no request."""
        try:
            file = read_bridge_file(self._path)
        except BridgeError:
            if not self._path.exists():
                return None
            file = read_bridge_file(self._path)  # written just now by the successor; else it is damaged
        return file if is_server_alive(file) else None

    def _has_server_exited(self) -> bool:
        return self._file is not None and not is_server_alive(self._file)

    def _is_current(self) -> bool:
        self.poll_server()
        with self._releasing_on_server_exit():
            if self._lock is not None and self._client.info().instance != self._instance():
                self._attach_again(self._find_export())
        return self._lock is not None

    def _instance(self) -> str:
        assert self._file is not None
        return self._file.instance

    @contextmanager
    def _releasing_on_server_exit(self) -> Iterator[None]:
        """Within, an error that comes from the server's exit is dropped, and its memory is unmapped."""
        try:
            yield
        except (PeerUnavailable, BridgeError):
            if not self._has_server_exited():
                raise
            self._release()

    def _check_alone(self, file: BridgeFile, lock: WeightLock) -> None:
        """Refuse a second trainer: two would compute with each other's weights and overwrite each other's updates."""
        if (other := lock.other_trainer(file.pid)) is not None:
            raise BridgeError(
                f"{self._path}: process {other.pid} already trains the weights of this server: end it, or start an "
                "inference server for each trainer"
            )

    def _reload_half_written(self, file: BridgeFile, lock: WeightLock) -> None:
        """Have the server reload its model if an earlier trainer exited during a write; one that does is waited for."""
        lock.clear_writer()  # of an earlier training in this process, whose weights a server may still expect
        try:
            if lock.check().is_writing:
                logger.info("Waiting until the server has read %s", file.model)
            while lock.check().is_writing:  # since a trainer has exited that was to write
                if self._context.is_stopping():
                    raise PeerUnavailable(f"{self._path}: not waiting for the server's weights: training is stopping")
                time.sleep(_POLL_S)
        except HalfWritten as error:
            logger.warning("%s; the server reloads %s", error, file.model)
            self._reload_model(file, 0)

    def _reload_model(self, file: BridgeFile, version: int) -> None:
        """Have the server load its model's checkpoint into the memory, as `version`."""
        from grpo_engine.models.stored_weights import checkpoint_folder

        folder = checkpoint_folder(file.model)
        if folder is None:
            raise BridgeError(f"{file.model}: not on this machine, so the server cannot reload it: restart the server")
        self._client.reload(folder, version)

    # --- weights ---------------------------------------------------------------------------------------------------

    def _write_weights(self) -> float:
        """Write the current version; if another server answers by then, attach to that one. Seconds of the pause."""
        assert self._lock is not None
        assert self._version is not None
        assert self._file is not None
        self._check_alone(self._file, self._lock)
        began = time.perf_counter()
        if self._client.pause(self._pause_timeout_s).instance != self._instance():
            self._client.resume()
            self._attach_again(self._find_export())
            return time.perf_counter() - began
        try:
            with self._lock.writing(self._version, has_all=self.has_all):
                self._weights.write(self._write)
        finally:
            # Without a version: the lock has it, and a server that started meanwhile must not report it as its own.
            answer = self._client.resume()
        pause_s = time.perf_counter() - began
        if answer.instance != self._instance():
            self._attach_again(self._find_export())
        return pause_s

    def _attach_again(self, file: BridgeFile) -> None:
        """Map another server's memory and write the current version into it."""
        self._release()
        self._file = file  # from here on it is this server whose exit counts
        if self._client.info().instance != file.instance:
            file = self._file = self._find_export()
        lock = WeightLock.attach(file.fence_segment)
        self._weights.remap(file)
        self._check_memory(file, lock)
        self._lock = lock
        if self._version is not None:
            self._write_weights()
            logger.info("attached to the new inference server (pid %d), version %d", file.pid, self._version)

    def _release(self) -> None:
        if self._lock is None:
            return
        self._lock.close()
        self._lock = None
        self._weights.release(is_kept=self._is_kept)
        self._warned_at = -math.inf

    def _warn_waiting(self) -> None:
        assert self._file is not None
        if time.monotonic() - self._warned_at > _WARN_EVERY_S:
            self._warned_at = time.monotonic()
            logger.warning(
                "inference server (pid %d) has exited; its memory is unmapped and the trainer keeps the weights; "
                "waiting "
                "for %s of a new server",
                self._file.pid,
                self._path,
            )

    # --- what is trained -------------------------------------------------------------------------------------------

    def _mapped(self, file: BridgeFile) -> MappedModel:
        """The model on the server's memory, over as many ranks as the server has processes."""
        from grpo_engine.bridges.placement.mapped import MappedModel
        from grpo_engine.bridges.placement.mapped_parts import MappedPart

        name, ranks = self._context.model_name, self._context.ranks
        if ranks is not None and ranks.size > 1:
            return MappedPart(name, file, ranks)
        if file.parts:
            raise BridgeError(
                f"{self._path}: {len(file.parts)} processes of the inference server have a part of the weights each, "
                f"and this trainer is one process: start {len(file.parts)} ranks with mode shared_vllm, or the server "
                "with tensor_parallel_size 1"
            )
        return MappedModel(name, file)

    def _add_adapter(self) -> None:
        """Wrap the mapped model; here nothing is added."""

    def _check_memory(self, file: BridgeFile, lock: WeightLock) -> None:
        """Check newly mapped memory; here any content is right: training starts from it or overwrites all of it."""

    def _trained(self, version: int) -> BridgeModel:
        """What is trained; here the model whose parameters inference reads."""
        return BridgeModel(
            model=self._weights.model,
            is_shared=True,
            policy_version=version,
            save=self._weights.save,
            tensors=self._weights.tensors_to_save,
            prepare_save=self._write_unserved,
        )

    def _is_kept(self, tensor: Tensor) -> bool:
        """Whether unmapping must copy a tensor; trained parameters are written again by `_write`."""
        return self._version is None or not tensor.requires_grad

    def _write_unserved(self) -> None:
        """Give the model the current values where no server's memory has them."""
        if self._lock is None and self._version is not None:
            self._weights.write(self._write)
