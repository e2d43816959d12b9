"""Fetches versions from the parameter service of the trainer's machine into the store of this one."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
from contextlib import suppress
from pathlib import Path

import httpx
from pydantic import ValidationError

from grpo_engine.bridges.transport.checkpoint_folder import room_in
from grpo_engine.bridges.transport.parameter_store import ParameterStore
from grpo_engine.errors import BridgeError, PeerError, PeerUnavailable
from grpo_engine.parameters.machines import REPORT_EVERY_S
from grpo_engine.wire.access_token import find_token
from grpo_engine.wire.bounded_answers import allowing
from grpo_engine.wire.codec import shortened
from grpo_engine.wire.parameters import (
    FILE_ROUTE,
    MACHINES_ROUTE,
    STATE_ROUTE,
    BeginRequest,
    MachineReport,
    ParametersState,
)
from grpo_engine.wire.run_folder import HANDOVER_NOTE
from grpo_engine.wire.token_clients import open_client

LOOK_EVERY_S = 0.2
_WITHIN_S = 60.0
_REPORTED_WITHIN_S = 2.0
_CLOSE_WITHIN_S = 2.0
"""The thread may wait for `_WITHIN_S` for a source that sends nothing more; it ends with the process."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
"""A file of a checkpoint: never hidden, never in another folder."""
_MOST_FILES = 10_000
_MOST_BYTES = 1 << 50

log = logging.getLogger(__name__)


class Fetcher:
    """A thread that looks for newer versions, and another one that reports to the source."""

    def __init__(
        self, source: str, store: ParameterStore, http: httpx.Client | None = None, *, machine: str | None = None
    ) -> None:
        """Look for nothing until `start`.

        Args:
            http: of the source; None: a new one.
            machine: the name under which it reports; None: it does not.
        """
        self._source, self._store, self._machine = source.rstrip("/"), store, machine
        self._http = http or open_client(find_token(os.environ), base_url=self._source, timeout=_WITHIN_S)
        self._fetched: tuple[str, int] | None = None
        """Start of the source, and number of the version there."""
        self._fault = ""
        self._is_closed = threading.Event()
        self._threads = [threading.Thread(target=self._run, name="fetcher", daemon=True)]
        if machine is not None:
            self._threads.append(threading.Thread(target=self._report, name="reporter", daemon=True))

    def start(self) -> None:
        """Look for versions, and report, until `close`."""
        self._store.begin_behind()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads; what was being fetched is not used."""
        self._is_closed.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_CLOSE_WITHIN_S)
        self._http.close()

    def _run(self) -> None:
        while not self._is_closed.wait(LOOK_EVERY_S):
            try:
                self.look()
                self._fault = ""
                self._store.tell_in_step()
            except Exception as error:  # whatever a source answers: its next answer may be right
                if str(error) != self._fault:
                    log.warning("%s: %s; trying again", self._source, error)
                self._fault = str(error)

    def _report(self) -> None:
        with open_client(find_token(os.environ), base_url=self._source, timeout=_REPORTED_WITHIN_S) as http:
            while not self._is_closed.wait(REPORT_EVERY_S):
                with suppress(httpx.HTTPError, PeerError):  # the thread that looks for versions says what is wrong
                    http.post(MACHINES_ROUTE, content=self.report().model_dump_json())

    def report(self) -> MachineReport:
        """What this machine tells the source."""
        instance, number = self._fetched or ("", 0)
        return MachineReport(
            machine=self._machine or "",
            state=self._store.state().model_copy(update={"files": {}}),
            source_instance=instance,
            source_number=number,
            fault=self._fault,
        )

    def look(self) -> None:
        """Fetch the newest version of the source, unless it is here.

        Raises:
            httpx.HTTPError, PeerUnavailable: the source does not answer, or has a newer version by now.
            BridgeError: what arrived is not what the source has, or there is no room for it.
            OSError: it cannot be written here.
        """
        state = self._state()
        if state.number == 0 or (state.instance, state.number) == self._fetched:
            return
        names = [name for name in state.files if name != HANDOVER_NOTE]
        bad = next((name for name in names if _NAME.fullmatch(name) is None), None)
        if bad is not None or len(names) > _MOST_FILES:
            raise BridgeError(
                f"{self._source}: a version of {len(names)} files, of which {shortened(repr(bad))} is no file name"
            )
        num_bytes = sum(state.files.values())
        if min(state.files.values(), default=0) < 0 or num_bytes > _MOST_BYTES:
            raise BridgeError(f"{self._source}: a version of {num_bytes:,} bytes, which no machine has in memory")
        request = BeginRequest(
            policy_version=state.policy_version,
            model=state.model,
            most_bytes=2 * num_bytes,
            pull_every=state.pull_every,
        )
        folder = self._store.begin(request)
        room = room_in(folder)
        if num_bytes > room:
            has = f"{folder} has room for {room / 1e9:.1f} GB"  # no digits that change at each look: each is logged
            raise BridgeError(f"{self._source}: a version of {num_bytes:,} bytes, and {has}")
        for name in names:
            self._fetch(state, name, folder / name)
        self._store.commit(state.policy_version)
        self._fetched = (state.instance, state.number)
        log.info("version %d fetched from %s: %d files", state.policy_version, self._source, len(names))

    def _state(self) -> ParametersState:
        response = self._http.get(STATE_ROUTE)
        if not response.is_success:
            raise PeerUnavailable(f"answered {response.status_code}: {response.text[:200]}")
        try:
            return ParametersState.model_validate_json(response.content)
        except ValidationError:
            raise PeerUnavailable("is no parameter service") from None

    def _fetch(self, state: ParametersState, name: str, path: Path) -> None:
        route, size = f"{FILE_ROUTE}/{state.number}/{name}", state.files[name]
        digest, num_bytes = hashlib.sha256(), 0
        try:
            with self._http.stream("GET", route, extensions=allowing(size)) as response, path.open("xb") as file:
                if not response.is_success:
                    raise PeerUnavailable(f"{route}: answered {response.status_code}; there may be a newer version")
                for part in response.iter_raw():
                    if self._is_closed.is_set():
                        raise PeerUnavailable(f"{route}: this service ends")
                    num_bytes += len(part)
                    digest.update(part)
                    file.write(part)
            expected = self._http.get(f"{route}/sha256")
            if not expected.is_success:
                raise PeerUnavailable(f"{route}: answered {expected.status_code}; there may be a newer version")
            if num_bytes != size or digest.hexdigest() != expected.text:
                raise BridgeError(
                    f"{route}: {num_bytes:,} bytes of {size:,} arrived, or others than were sent (SHA-256); not used"
                )
        except BaseException:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            raise
