"""Transport adapter: every version is written as a new adapter, which the server loads over HTTP.

Adapters have versioned names (`policy@000123`), so that a server that keys its prefix cache by name never serves keys
and values of older weights. They are written to shared memory where it has room, and to disk otherwise.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_engine.bridges.memory.shared_names import (
    adapter_name,
    adapters_name,
    make_own_folder,
    remove_stale_adapters,
    run_of,
)
from grpo_engine.bridges.memory.shared_tensors import dtype_from_text
from grpo_engine.bridges.memory.weight_lock import SHARED_MEMORY
from grpo_engine.bridges.placement.adapter import AdaptedModel
from grpo_engine.bridges.protocol import BridgeContext, BridgeModel, Update
from grpo_engine.bridges.transport.saving import explain_write_errors
from grpo_engine.bridges.transport.servers import Server, Servers, unshared_model
from grpo_engine.errors import BridgeError

if TYPE_CHECKING:
    import torch
    from peft import PeftModel

    from grpo_engine.wire.inference import BridgeInfo

_KEPT_ADAPTERS = 2
"""The served adapter and its predecessor, which a request may still use."""
_NUM_FITTING = 2 * _KEPT_ADAPTERS
"""Shared memory must have room for those, one that is being written, and one that a long request still needs."""
_MOST_IN_USE = 256
"""Older ones that are kept because a server says that requests use them, as many as it has sequences by default: a
server that says so of all would fill the memory."""

logger = logging.getLogger(__name__)


class AdapterBridge:
    """See `grpo_engine.bridges.protocol.Bridge`."""

    def __init__(self, context: BridgeContext, placement: AdaptedModel, *, folder: Path | None) -> None:
        self._context = context
        self._placement = placement
        self._run = run_of(os.environ)
        self._configured_folder = folder
        self._servers = Servers(context)
        self._version: int | None = None
        """Published last."""
        self._kept: list[Path] = []
        self._folder: Path
        self._dtype: torch.dtype | None
        self._model: PeftModel

    def attach(self) -> BridgeModel:
        """Load the base model and put an adapter on it that changes nothing yet.

        Raises:
            BridgeError: the server does not accept such adapters, or serves another model.
        """
        infos = self._servers.find(
            lambda port: f"start it (grpo-engine server --model {self._context.model_name} --port {port} --enable-lora)"
        )
        for server, info in zip(self._servers.all, infos, strict=True):
            self._check_server(server, info)
        self._model = self._placement.load()
        self._folder = self._chosen_folder()
        return unshared_model(self._model, self._placement, infos)

    def publish(self, version: int, write: Callable[[], None]) -> Update:
        """Write the new values and have the server load them as an adapter."""
        write()
        self._version = version
        return self._load_adapter(self._servers.asked)

    def poll_server(self) -> None:
        """Update one among several servers that is back."""
        if self._servers.look_for_lost():
            self.prepare_step()

    def prepare_step(self) -> None:
        """Load the adapter again into servers that were restarted or serve another version."""
        behind = []
        for server, info in self._servers.infos().items():
            if self._version is not None and not server.is_current(info, self._version):
                logger.warning(
                    "%s: serves version %d instead of %d; loading the adapter again",
                    server.url,
                    info.policy_version,
                    self._version,
                )
                behind.append(server)
        if behind:
            self._load_adapter(behind)

    def close(self) -> None:
        """Remove adapters in shared memory, which the server has read; on disk the last one stays."""
        self._servers.close()
        if self._kept and self._is_in_shared_memory():
            shutil.rmtree(self._folder, ignore_errors=True)
        else:
            self._remove_all_but(1, in_use=())

    def _check_server(self, server: Server, info: BridgeInfo) -> None:
        """Refuse before loading what the server would refuse at the first weight update."""
        from grpo_engine.models.same_model import is_same_model

        if not is_same_model(self._context.model_name, info.model_name):
            raise BridgeError(
                f"{server.url}: serves {info.model_name}, but the adapter is trained on "
                f"{self._context.model_name}: give both the same model"
            )
        status, rank = server.client.lora_status(), self._context.lora.rank
        if not status.lora_available:
            raise BridgeError(f"{server.url}: does not accept adapters: start the inference server with --enable-lora")
        if status.max_lora_rank and rank > status.max_lora_rank:
            raise BridgeError(
                f"{server.url}: serves adapters up to rank {status.max_lora_rank}, not {rank}: start it with "
                f"--max-lora-rank {rank}, or train with --lora-r {status.max_lora_rank}"
            )
        self._dtype = None if status.adapter_dtype is None else dtype_from_text(status.adapter_dtype)

    def _chosen_folder(self) -> Path:
        if self._configured_folder is not None:
            return self._configured_folder.absolute()
        from grpo_engine.models.lora import adapter_tensors

        remove_stale_adapters(self._run)
        on_disk = (self._context.folder / "adapters").absolute()
        factors = adapter_tensors(self._model).values()
        needed_bytes = _NUM_FITTING * sum(each.numel() * (self._dtype or each.dtype).itemsize for each in factors)
        try:
            free_bytes = shutil.disk_usage(SHARED_MEMORY).free
        except OSError as error:
            logger.warning("%s: %s; adapters are written to %s", SHARED_MEMORY, error, on_disk)
            return on_disk
        if free_bytes >= needed_bytes:
            return SHARED_MEMORY / adapters_name(self._run)
        logger.warning(
            "%s: %.0f MB free, but the adapters of this run take up to %.0f MB; using %s, which may be slower. Mount "
            "it "
            "larger (in a container: --shm-size)",
            SHARED_MEMORY,
            free_bytes / 1e6,
            needed_bytes / 1e6,
            on_disk,
        )
        return on_disk

    def _load_adapter(self, servers: Sequence[Server]) -> Update:
        from grpo_engine.models.lora import save_adapter

        assert self._version is not None
        name = adapter_name(self._version)
        path = self._folder / name
        self._kept = [kept for kept in self._kept if kept != path]
        with explain_write_errors(path):
            if self._is_in_shared_memory():
                make_own_folder(self._folder)
            save_adapter(self._model, path, self._dtype)
        self._kept.append(path)
        version, patience_s = self._version, self._servers.patience_s

        def load(server: Server) -> list[str]:
            answer = server.client.load_adapter(path, name, version, patience_s=patience_s)
            server.served(answer.instance, version)
            return answer.paths_in_use

        try:
            answers = self._servers.ask(servers, load)
        except BridgeError as error:
            raise BridgeError(
                f"{error}. The server keeps the previous adapter, so training ends: no further step would reach "
                "inference"
            ) from error
        self._remove_all_but(_KEPT_ADAPTERS, in_use={each for paths in answers.values() for each in paths})
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        return Update(pause_s=0.0, num_bytes=num_bytes, num_servers=len(answers))  # requests change over one by one

    def _remove_all_but(self, count: int, in_use: Collection[str]) -> None:
        """Remove the older adapters, unless the server may read one again for a long request."""
        older, kept = self._kept[:-count], self._kept[-count:]
        used = [path for path in older if str(path) in in_use][-_MOST_IN_USE:]
        for path in set(older).difference(used):
            shutil.rmtree(path, ignore_errors=True)
        self._kept = [*used, *kept]

    def _is_in_shared_memory(self) -> bool:
        return self._configured_folder is None and self._folder.is_relative_to(SHARED_MEMORY)
