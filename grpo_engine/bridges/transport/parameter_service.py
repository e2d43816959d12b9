"""Transport parameter service: a version is written into host memory, from where each server loads it in its turn.

The store is a service of its own (`grpo-engine parameters`), or, without one, in this process.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from grpo_engine.bridges.protocol import BridgeContext, BridgeModel, Placement, Update
from grpo_engine.bridges.transport.parameter_store import ParameterStore
from grpo_engine.bridges.transport.served_file import Repetition, ServedFile
from grpo_engine.bridges.transport.server_client import ServerClient
from grpo_engine.bridges.transport.servers import Servers, unshared_model
from grpo_engine.errors import BridgeError, PeerUnavailable
from grpo_engine.wire.parameters import (
    BEGIN_ROUTE,
    COMMIT_ROUTE,
    STATE_ROUTE,
    BeginAnswer,
    BeginRequest,
    CommitRequest,
    ParametersState,
)

_POLL_S = 0.02
KEPT = "kept-parameters"
_VERSION = re.compile(r"version-[0-9]{6,}\+*")
"""Name of the folder that a service makes for a version."""


class Store(Protocol):
    """Where versions go."""

    def begin(self, request: BeginRequest) -> Path:
        """A folder to write a version into."""

    def commit(self, policy_version: int) -> ParametersState:
        """What was written is complete."""

    def states(self) -> list[ParametersState]:
        """Of every machine."""

    def close(self) -> None:
        """Leave it."""


class OwnStore:
    """In this process."""

    def __init__(self, store: ParameterStore) -> None:
        self._store = store

    def begin(self, request: BeginRequest) -> Path:
        """See `ParameterStore`."""
        return self._store.begin(request)

    def commit(self, policy_version: int) -> ParametersState:
        """See `ParameterStore`."""
        return self._store.commit(policy_version)

    def states(self) -> list[ParametersState]:
        """Of this machine."""
        self._store.roll()
        return [self._store.state()]

    def close(self) -> None:
        """Remove the versions."""
        self._store.close()


class RemoteStore:
    """Parameter services: the first is on this machine, the others have the versions from it."""

    def __init__(self, context: BridgeContext) -> None:
        self._clients = [
            ServerClient(url, patience_s=context.patience_s, is_stopping=context.is_stopping)
            for url in context.parameter_urls
        ]

    def begin(self, request: BeginRequest) -> Path:
        """A folder of the first service.

        Raises:
            BridgeError: it names one that it has not made for this version.
        """
        path = Path(self._clients[0].ask("POST", BEGIN_ROUTE, request, BeginAnswer).path)
        if not _is_made_for_a_version(path):
            raise BridgeError(
                f"{self._clients[0].url}: names {str(path)!r} to write version {request.policy_version} into, which is "
                "no new folder of this user: start the parameter service as the user, and on the machine, of the "
                "trainer"
            )
        return path

    def commit(self, policy_version: int) -> ParametersState:
        """Have the first service hand it out."""
        request = CommitRequest(policy_version=policy_version)
        return self._clients[0].ask("POST", COMMIT_ROUTE, request, ParametersState)

    def states(self) -> list[ParametersState]:
        """Of every machine."""
        return [client.ask("GET", STATE_ROUTE, None, ParametersState) for client in self._clients]

    def close(self) -> None:
        """The services keep the newest version, for servers that start."""
        for client in self._clients:
            client.close()


def _is_made_for_a_version(path: Path) -> bool:
    """Whether it is an empty folder of this user, so that nothing that a trainer writes there replaces a file."""
    try:
        folder, parent = path.lstat(), path.parent.lstat()
        is_empty = stat.S_ISDIR(folder.st_mode) and not any(path.iterdir())
    except (OSError, ValueError):  # ValueError: a NUL character
        return False
    is_real = path.is_absolute() and os.path.realpath(path) == str(path)
    is_own = {folder.st_uid, parent.st_uid} == {os.geteuid()}
    return is_empty and is_real and is_own and _VERSION.fullmatch(path.name) is not None


class ParameterServiceBridge:
    """See `grpo_engine.bridges.protocol.Bridge`."""

    def __init__(
        self,
        context: BridgeContext,
        placement: Placement,
        *,
        folder: Path,
        push_every: int,
        pull_every: int,
        overlap: bool,
    ) -> None:
        self._context, self._placement, self._folder = context, placement, folder
        self._push_every, self._pull_every, self._overlap = push_every, pull_every, overlap
        self._servers = Servers(context)
        self._store: Store | None = None
        self._pushed: int | None = None
        """What the store has; where steps are repeated from the journal it may be a later version than the weights'."""
        self._served_file = ServedFile(context.served_file)
        self._repetition = Repetition()

    def attach(self) -> BridgeModel:
        """Find the servers, load the model, and find or make the store."""
        infos = self._servers.find(self._advice)
        model = self._placement.load()
        if self._context.parameter_urls:
            self._store = RemoteStore(self._context)
            self._store.states()
        else:
            self._store = OwnStore(
                ParameterStore(self._folder, self._context.server_urls, is_stopping=self._context.is_stopping)
            )
        return unshared_model(model, self._placement, infos, self._repetition.begin)

    def publish(self, version: int, write: Callable[[], None]) -> Update | None:
        """Write the new values; push them if a push is due, and the store does not have a later version."""
        write()
        if self._pushed is None:
            self._pushed = self._left_by_another()
        is_early = self._pushed is not None and version - self._pushed < self._push_every
        if is_early or (self._pushed is not None and self._repetition.goes_on_after(version)):
            return None
        from grpo_engine.models.loading import resolve_model

        assert self._store is not None
        request = BeginRequest(
            policy_version=version,
            model=resolve_model(self._context.model_name),
            most_bytes=self._placement.max_bytes(),
            pull_every=self._pull_every,
        )
        self._served_file.remove()
        path = self._store.begin(request)
        self._placement.write(path, path.parent / KEPT)
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        self._store.commit(version)
        self._pushed = version
        states = self._store.states() if self._overlap else self._settled(version)
        self._served_file.write(version, {state.instance: state.number for state in states})
        servers = [each for state in states for each in state.servers]
        return Update(
            pause_s=max(state.longest_s for state in states),
            num_bytes=num_bytes,
            num_servers=sum(each.policy_version == version and not each.is_away for each in servers),
        )

    def poll_server(self) -> None:
        """Nothing: the store looks after the servers."""

    def prepare_step(self) -> None:
        """Wait until the servers that answer have what is due to them; one of them must."""
        if self._pushed is not None and not self._overlap:
            self._settled(self._pushed)

    def close(self) -> None:
        """Leave the store."""
        self._servers.close()
        if self._store is not None:
            self._store.close()

    def _left_by_another(self) -> int | None:
        """The version that an earlier trainer of this run has pushed, where all services have it."""
        assert self._store is not None
        note = self._served_file.read(self._repetition)
        if note is None:
            return None
        has_it = [
            state.policy_version == note.policy_version and note.updates.get(state.instance) == state.number
            for state in self._store.states()
        ]
        return note.policy_version if all(has_it) else None

    def _settled(self, version: int) -> list[ParametersState]:
        """The states of all machines once servers have what is due to them.

        Raises:
            PeerUnavailable: no server of a machine answers for `patience_s`.
            BridgeError: one refuses the version.
        """
        assert self._store is not None
        until = time.monotonic() + self._context.patience_s
        while True:
            states = self._store.states()
            problem = next((state.problem for state in states if state.problem), "")
            if problem:
                raise BridgeError(f"version {version} cannot be served: {problem}")
            if all(
                state.policy_version == version
                and state.is_settled
                and (not state.servers or any(not each.is_away for each in state.servers))
                for state in states
            ):
                return states
            if time.monotonic() > until or self._context.is_stopping():
                urls = ", ".join(each.url for state in states for each in state.servers if each.is_away)
                why = "; ".join([each for state in states for each in state.late] or [f"no answer of {urls}"])
                raise PeerUnavailable(
                    f"version {version} is not served after {self._context.patience_s:g} s: {why}; look at the logs of "
                    "the parameter service and of the inference servers"
                )
            time.sleep(_POLL_S)

    def _advice(self, port: int) -> str:
        return (
            f"start it (grpo-engine server --model {self._context.model_name} --port {port} --handover {self._folder})"
        )
