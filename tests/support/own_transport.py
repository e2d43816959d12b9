"""Mode `folder`: each version is a checkpoint in the run folder, which every server loads.

The example of docs/many-gpus.md: a file as it would be in `grpo_engine/bridges/`. It is not in the union there; the
contract test builds it by itself.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, Literal

from grpo_engine.bridges.placement.own import OwnModel
from grpo_engine.bridges.placement.sharded import ShardedModel
from grpo_engine.bridges.protocol import Bridge, BridgeContext, BridgeModel, Mode, Placement, Update
from grpo_engine.bridges.transport.servers import Server, Servers, unshared_model
from grpo_engine.flags import Flag


class Folder(Mode):
    """Whole checkpoints in a folder that servers can read."""

    after_server_restart: ClassVar[str] = "the trainer has the new server load the version before its next step"
    if_not_served: ClassVar[tuple[str, str]] = (
        "the server kept its old weights",
        "look at the server's log; restart it",
    )
    trains_over_ranks: ClassVar[bool] = True
    updates_many_servers: ClassVar[bool] = True
    mode: Annotated[Literal["folder"], Flag(("--weight-bridge-mode",))] = "folder"
    """How new weights reach inference."""

    def build(self, context: BridgeContext) -> Bridge:
        """Pair placement and transport."""
        return FolderBridge(context, self.rank_placement(context) if context.has_ranks else OwnModel(context))

    def rank_placement(self, context: BridgeContext) -> ShardedModel:
        """The model over several ranks, on one of them."""
        return ShardedModel(context)


class FolderBridge:
    """See `grpo_engine.bridges.protocol.Bridge`."""

    def __init__(self, context: BridgeContext, placement: Placement) -> None:
        self._placement = placement
        self._servers = Servers(context)
        self._folder = context.folder / "versions"
        self._version: int | None = None

    def attach(self) -> BridgeModel:
        """Wait for the servers, and load the model."""
        infos = self._servers.find(lambda port: f"start it (grpo-engine server --port {port})")
        return unshared_model(self._placement.load(), self._placement, infos)

    def publish(self, version: int, write: Callable[[], None]) -> Update:
        """Write the new values, and have all servers load them."""
        write()
        self._version, began = version, time.perf_counter()
        shutil.rmtree(self._folder, ignore_errors=True)
        (self._folder / "current").mkdir(parents=True)
        self._placement.write(self._folder / "current", self._folder)
        num_bytes = sum(file.stat().st_size for file in (self._folder / "current").iterdir())
        num_servers = self._load(self._servers.asked)
        return Update(pause_s=time.perf_counter() - began, num_bytes=num_bytes, num_servers=num_servers)

    def poll_server(self) -> None:
        """Bring a server up to date that is back."""
        if self._servers.look_for_lost():
            self.prepare_step()

    def prepare_step(self) -> None:
        """Have servers that were restarted load the version again."""
        version = self._version
        if version is not None:
            infos = self._servers.infos()
            self._load([server for server, info in infos.items() if not server.is_current(info, version)])

    def close(self) -> None:
        """Disconnect, and remove the checkpoint."""
        self._servers.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _load(self, servers: Sequence[Server]) -> int:
        """Have these servers load the version; how many did."""

        def load(server: Server) -> None:
            assert self._version is not None
            answer = server.client.reload(self._folder / "current", self._version, patience_s=self._servers.patience_s)
            server.served(answer.instance, self._version)

        return len(self._servers.ask(servers, load)) if servers else 0
