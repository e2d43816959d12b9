"""Transport in place for Atropos's own example server, which is recognised by the form of its bridge file.

That server has no weight lock, no versions and no process identity: whether it runs is asked over HTTP, and a restart
shows in the handles of its file. If it cannot pause, weights change under running generations; a warning says so once.
Not handled: it keeps cached prefixes of older weights, so start it without prefix caching.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_engine.bridges.memory.stock_bridge_file import Sizes, as_bridge_file, read_stock_file
from grpo_engine.bridges.protocol import BridgeContext, BridgeModel, connect
from grpo_engine.errors import BridgeError, PeerError
from grpo_engine.wire.bridge_file import BridgeFile, StockBridgeFile
from grpo_engine.wire.codec import Message

if TYPE_CHECKING:
    from grpo_engine.bridges.placement.mapped import MappedModel

_PAUSED, _RESUMED = "paused", "resumed"

logger = logging.getLogger(__name__)


class _Status(Message):
    """Answer of its `/bridge/pause` and `/bridge/resume`."""

    status: str


class _StateInfo(Message):
    """Answer of its `/bridge/state_dict_info`; 503 until its engine has started."""

    model: str


class StockInPlaceBridge:
    """See `grpo_engine.bridges.protocol.Bridge`."""

    def __init__(self, path: Path, context: BridgeContext) -> None:
        self._path = path
        self._context = context
        self._client = connect(context)
        self._can_pause = True
        self._write: Callable[[], None] | None = None
        """Writes what was published last."""
        self._file: StockBridgeFile
        self._weights: MappedModel

    def attach(self) -> BridgeModel:
        """Build the model on the server's memory.

        Raises:
            BridgeError: the file is another server's or outdated, or its weights do not fit the model.
        """
        from grpo_engine.bridges.placement.mapped import MappedModel

        self._file = self._current_file()
        self._weights = MappedModel(self._context.model_name, self._converted(self._file))
        logger.warning(
            "attached to %d tensors of Atropos's server (%s): it reports no versions, so staleness is unknown",
            len(self._file.ipc_handles),
            self._path,
        )
        return BridgeModel(
            model=self._weights.model,
            is_shared=True,
            policy_version=0,
            save=self._weights.save,
        )

    def publish(self, version: int, write: Callable[[], None]) -> None:
        """Write, under a pause where the server has one."""
        self._write = write
        with self._paused():
            self._weights.write(write)

    def poll_server(self) -> None:
        """Nothing: whether that server runs is known over HTTP only, which is too slow here."""

    def prepare_step(self) -> None:
        """Wait for the server; after a restart, attach again and write the current weights."""
        file = self._current_file()
        if file.ipc_handles == self._file.ipc_handles:
            return
        self._weights.release(is_kept=lambda tensor: self._write is None or not tensor.requires_grad)
        self._weights.remap(self._converted(file))
        self._file = file
        if self._write is not None:
            self.publish(0, self._write)
        logger.info("attached to the restarted inference server (%s)", self._path)

    def close(self) -> None:
        """Close the connection; the weights are unmapped with the model."""
        self._client.close()

    def _current_file(self) -> StockBridgeFile:
        info = self._client.ask("GET", "/bridge/state_dict_info", None, _StateInfo)
        file = read_stock_file(self._path)  # after the answer: a server that starts overwrites it piece by piece
        if info.model != file.model:
            raise BridgeError(
                f"{self._path}: describes the weights of {file.model}, but {self._client.url} serves {info.model}; "
                "point --vllm-config-path at that server's file"
            )
        return file

    def _converted(self, file: StockBridgeFile) -> BridgeFile:
        from grpo_engine.bridges.memory.cuda_tensors import gpu_uuid
        from grpo_engine.models.loading import load_config

        return as_bridge_file(file, Sizes.of(load_config(self._context.model_name)), gpu_uuid)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        if not self._request("/bridge/pause", _PAUSED):
            yield
            return
        try:
            yield
        finally:
            self._request("/bridge/resume", _RESUMED)

    def _request(self, route: str, expected: str) -> bool:
        if not self._can_pause:
            return False
        try:
            self._can_pause = self._client.ask("POST", route, None, _Status).status == expected
        except (BridgeError, PeerError) as error:
            logger.debug("%s", error)
            self._can_pause = False
        if not self._can_pause:
            logger.warning(
                "%s cannot pause: weights change under its running generations, whose tokens then come from several "
                "versions; grpo-engine server can",
                self._client.url,
            )
        return self._can_pause
