"""The newest version of the weights in host memory, and the inference servers that are given it one after another.

A version is a checkpoint below /dev/shm, so that servers of this machine read it from memory, also as they start and
without the trainer. Only one server loads at a time: sampling never stops everywhere at once. Torch-free.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import ValidationError

from grpo_engine.bridges.memory.shared_names import run_of
from grpo_engine.bridges.transport.checkpoint_folder import (
    CheckpointFolder,
    StoredCheckpoint,
    choose_storage,
    newest_checkpoint,
)
from grpo_engine.bridges.transport.server_client import ServerClient
from grpo_engine.bridges.transport.servers import Server
from grpo_engine.errors import BridgeError, GrpoError, PeerUnavailable
from grpo_engine.retrying import never
from grpo_engine.wire.codec import read_whole
from grpo_engine.wire.handover import HandoverNote, PlacedPorts
from grpo_engine.wire.parameters import BeginRequest, ParametersState, ServedBy
from grpo_engine.wire.run_folder import HANDOVER_CURRENT, HANDOVER_IN_STEP, HANDOVER_NOTE, HANDOVER_PORTS

_ASK_WITHIN_S = 5.0
"""A server that was stopped must not hold up the others for longer."""
_RELOAD_PATIENCE_S = 3.0
_WATCH_EVERY_S = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """The newest one."""

    number: int
    checkpoint: StoredCheckpoint
    model: str


class Interrupted(BridgeError):
    """A version was not written to its end."""


class ParameterStore:
    """Holds it, and brings servers up to date in a thread of its own."""

    def __init__(
        self,
        folder: Path,
        server_urls: Sequence[str],
        *,
        storage: Path | None = None,
        is_stopping: Callable[[], bool] = never,
        has_placed_only: bool = False,
    ) -> None:
        """Take up what an earlier service has left in the folder, and begin to look at the servers.

        Args:
            folder: where servers that start find the newest version, as `current`.
            storage: where versions are written; None: /dev/shm, where there is room for two.
            has_placed_only: whether only those servers are here whose ports are in `ports.json` of the folder.
        """
        self._folder, self._storage, self._is_stopping = folder, storage, is_stopping
        self._instance = uuid.uuid4().hex[:12]
        self._known = [Server(ServerClient(url, patience_s=0.0, is_stopping=is_stopping)) for url in server_urls]
        self._has_placed_only = has_placed_only
        self._given: dict[Server, int] = {}
        """Number of the version that each was given, or has loaded as it started."""
        self._serves: dict[Server, int] = {}
        self._checkpoints: CheckpointFolder | None = None
        self._writing = ExitStack()
        self._begun: BeginRequest | None = None
        self._changing = threading.Lock()
        """Guards the fields around the newest version, and what is being written."""
        self._reading = threading.Lock()
        """Held while a server reads a version, which must not be removed."""
        self._rolling = threading.Lock()
        self._pull_every = 1
        self._settled = 0
        """Number of the newest version after the last look at all servers."""
        self._longest_s = 0.0
        self._problem = ""
        self._newest = _left_by_another(folder)
        self._woken = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._watch, name="parameter-store", daemon=True)
        self._thread.start()

    @property
    def newest(self) -> Version | None:
        """The newest version."""
        return self._newest

    @property
    def _servers(self) -> list[Server]:
        """Those of this machine; in a cluster they may be placed here, and elsewhere, at any time."""
        if not self._has_placed_only:
            return self._known
        try:
            ports = PlacedPorts.model_validate_json(read_whole(self._folder / HANDOVER_PORTS)).ports
        except (OSError, ValidationError):
            return []
        return [each for each in self._known if urlsplit(each.url).port in ports]

    def begin_behind(self) -> None:
        """Have servers that start wait until `tell_in_step`."""
        (self._folder / HANDOVER_IN_STEP).unlink(missing_ok=True)

    def tell_in_step(self) -> None:
        """Let servers start that wait for the newest version: it is here, or there is none.

        Raises:
            OSError: the folder cannot be written to.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / HANDOVER_IN_STEP).touch()

    def begin(self, request: BeginRequest) -> Path:
        """A folder to write a version into; one that was begun before and not committed is removed.

        Raises:
            BridgeError: the disk fails, or the store holds another model.
        """
        with self._changing:
            self._abandon()
            if self._newest is not None and self._newest.model != request.model:
                raise BridgeError(
                    f"{self._folder}: holds versions of {self._newest.model}, not of {request.model}: give each "
                    "trainer a parameter service of its own, or another --handover"
                )
            if self._checkpoints is None:
                storage = choose_storage(
                    self._folder, self._storage, num_bytes=request.most_bytes, on_gpu=True, environment=os.environ
                )
                logger.info("versions are written to %s", storage)
                self._checkpoints = CheckpointFolder(self._folder, storage, model=request.model)
            with self._reading:
                path = self._writing.enter_context(self._checkpoints.writing(request.policy_version))
            self._begun = request
            return path

    def commit(self, policy_version: int) -> ParametersState:
        """What was begun is complete: it is the newest version from now on.

        Raises:
            BridgeError: this version was not begun, or the disk fails.
        """
        with self._changing:
            begun = self._begun
            if begun is None or begun.policy_version != policy_version or self._checkpoints is None:
                raise BridgeError(
                    f"version {policy_version} was not begun here: the service was restarted: push it again"
                )
            self._begun = None
            self._writing.close()
            number = 1 if self._newest is None else self._newest.number + 1
            checkpoint = StoredCheckpoint(path=self._checkpoints.current(), policy_version=policy_version)
            self._newest = Version(number=number, checkpoint=checkpoint, model=begun.model)
            self._pull_every, self._longest_s, self._problem = begun.pull_every, 0.0, ""
        self._woken.set()
        return self.state()

    def state(self) -> ParametersState:
        """The newest version, and which server serves what."""
        newest = self._newest
        servers = [
            ServedBy(url=each.url, policy_version=self._serves.get(each), is_away=each.is_away)
            for each in self._servers
        ]
        state = ParametersState(instance=self._instance, servers=servers, problem=self._problem)
        if newest is None:
            return state
        try:
            files = {each.name: each.stat().st_size for each in newest.checkpoint.path.iterdir() if each.is_file()}
        except OSError:  # a newer version has taken its place
            files = {}
        return state.model_copy(
            update={
                "number": newest.number,
                "policy_version": newest.checkpoint.policy_version,
                "model": newest.model,
                "pull_every": self._pull_every,
                "files": files,
                "is_settled": self._settled == newest.number,
                "longest_s": self._longest_s,
            }
        )

    def roll(self) -> None:
        """Look at all servers, and have those that need the newest version load it, one after another."""
        with self._rolling:
            newest, num_answered = self._newest, 0
            if newest is None:
                return
            servers = self._servers
            for server in servers:
                try:
                    self._bring_up(server)
                except PeerUnavailable as error:
                    if not server.is_away:
                        logger.warning("inference server %s is away (%s)", server.url, error)
                    server.is_away = True
                else:
                    server.is_away = False
                    num_answered += 1
            if num_answered or not servers:
                self._settled = newest.number

    def close(self, *, keeps_newest: bool = False) -> None:
        """End the thread, and remove the versions."""
        self._is_closed = True
        self._woken.set()
        self._thread.join()
        with self._changing:
            self._abandon()
            if self._checkpoints is not None and not (keeps_newest and not self._is_in_folder()):
                self._checkpoints.close()
        for server in self._known:
            server.client.close()

    def _is_in_folder(self) -> bool:
        """Whether versions are on the disk of the folder, where no other program removes them."""
        return self._newest is not None and self._newest.checkpoint.path.is_relative_to(self._folder.resolve())

    def _bring_up(self, server: Server) -> None:
        info = server.client.info(patience_s=0.0, within_s=_ASK_WITHIN_S)
        self._serves[server] = info.policy_version
        newest = self._required()
        wanted = newest.checkpoint.policy_version
        is_restarted = info.instance != server.instance
        if (
            is_restarted and server.instance and info.policy_version == wanted > 0
        ):  # it has loaded the newest as it started
            server.instance, self._given[server] = info.instance, newest.number
            return
        has_it = self._given.get(server) == newest.number
        is_due = not 0 <= wanted - info.policy_version < self._pull_every or wanted == info.policy_version
        if not is_restarted and (has_it or not is_due):
            return
        with self._reading:
            newest = self._required()  # a newer one may be there by now
            began = time.perf_counter()
            answer = server.client.reload(
                newest.checkpoint.path, newest.checkpoint.policy_version, patience_s=_RELOAD_PATIENCE_S
            )
        self._longest_s = max(self._longest_s, time.perf_counter() - began)
        server.instance, self._given[server] = answer.instance, newest.number
        self._serves[server] = newest.checkpoint.policy_version

    def _required(self) -> Version:
        assert self._newest is not None
        return self._newest

    def _watch(self) -> None:
        while not self._is_closed and not self._is_stopping():
            try:
                self.roll()
            except GrpoError as error:  # a server refuses; the trainer is told by the state
                self._problem = str(error)
                logger.error("%s", error)
            except Exception as error:  # a bug must not end the thread unseen
                self._problem = f"{type(error).__name__}: {error}"
                logger.exception("the servers were not brought up to date")
            newest = self._newest
            is_done = newest is None or self._settled == newest.number or bool(self._problem)
            self._woken.wait(_WATCH_EVERY_S if is_done else _WATCH_EVERY_S / 10)
            self._woken.clear()

    def _abandon(self) -> None:
        """Remove what was begun and not committed."""
        if self._begun is not None:
            self._begun = None
            with suppress(Interrupted):
                self._writing.__exit__(Interrupted, Interrupted("not written to its end"), None)
            self._writing = ExitStack()


def _left_by_another(folder: Path) -> Version | None:
    """The newest version of a service that was killed."""
    note = Path(os.path.realpath(folder / HANDOVER_CURRENT)) / HANDOVER_NOTE
    try:
        model = HandoverNote.model_validate_json(read_whole(note)).model
    except (OSError, ValidationError):
        return None
    found = newest_checkpoint(folder, model)
    return None if found is None else Version(number=1, checkpoint=found, model=model)


def is_under_a_supervisor() -> bool:
    """Whether shared memory of this process is removed at the end of a run."""
    return run_of(os.environ) is not None
