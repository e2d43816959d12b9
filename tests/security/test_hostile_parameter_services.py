"""A parameter service that a trainer, or the service of another machine, was given and that is somebody else's."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from grpo_engine.bridges.protocol import BridgeContext
from grpo_engine.bridges.transport import checkpoint_folder, parameter_service
from grpo_engine.bridges.transport.parameter_service import RemoteStore
from grpo_engine.bridges.transport.parameter_store import ParameterStore
from grpo_engine.errors import BridgeError
from grpo_engine.parameters import fetching
from grpo_engine.parameters.fetching import Fetcher
from grpo_engine.wire.parameters import MACHINES_ROUTE, STATE_ROUTE, BeginRequest
from grpo_engine.wire.token_clients import open_client

NOBODY = 65534
STATE = {"instance": "a", "number": 1, "model": "m", "files": {"model.safetensors": 1}}
REQUEST = BeginRequest(policy_version=1, model="m", most_bytes=0, pull_every=1)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], Path]:
    """What a trainer takes of a folder that the service names."""

    class Client:
        def __init__(self, url: str, **_: Any) -> None:
            self.url = url

        def ask(self, *_: object) -> object:
            return SimpleNamespace(path=str(folder))

    folder: object = None
    monkeypatch.setattr(parameter_service, "ServerClient", Client)
    context = SimpleNamespace(patience_s=0.0, is_stopping=lambda: False, parameter_urls=["http://there:8100"])

    def begin(path: object) -> Path:
        nonlocal folder
        folder = path
        return RemoteStore(cast(BridgeContext, context)).begin(REQUEST)

    return begin


def test_a_trainer_writes_only_into_a_new_folder_whatever_a_parameter_service_names(
    named: Callable[[object], Path], tmp_path: Path
) -> None:
    model = tmp_path / "version-000001"  # e.g. the base model, whose files a trainer would replace
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    empty, link = tmp_path / "version-000002", tmp_path / "version-000003"
    empty.mkdir()
    link.symlink_to(empty)
    (tmp_path / "settings").mkdir()
    wrong = [model, link, tmp_path / "settings", tmp_path / "version-000004", "version-000002", "/", "a\0b"]
    if os.geteuid() == 0:
        wrong.append(tmp_path / "version-000005")
        (tmp_path / "version-000005").mkdir()
        os.chown(tmp_path / "version-000005", NOBODY, NOBODY)
    for path in (*wrong, f"{tmp_path}/settings/../version-000002"):
        with pytest.raises(BridgeError, match="which is no new folder of this user"):
            named(path)
    assert named(empty) == empty


def test_a_trainer_takes_the_folder_that_a_parameter_service_has_made(
    named: Callable[[object], Path], tmp_path: Path
) -> None:
    with closing(ParameterStore(tmp_path / "handover", [], storage=tmp_path)) as store:
        for _ in range(2):  # the second time beside the first version, `version-000001+`
            path = store.begin(REQUEST)
            assert named(path) == path
            store.commit(1)


@pytest.mark.parametrize("changes", [
    {"files": {"a": 2**62, "b": 2**62}}, {"files": {"a": -1}}, {"files": {"a" * 70_000: 1}}, {"pull_every": 0},
])  # fmt: skip
def test_no_answer_of_a_source_ends_the_thread_that_fetches_versions(
    changes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "LOOK_EVERY_S", 0.01)
    asked = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        return httpx.Response(200, content=json.dumps({**STATE, **changes}))

    http = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://there")
    with closing(ParameterStore(tmp_path / "handover", [], storage=tmp_path)) as store:
        fetcher = Fetcher("http://there", store, http)
        fetcher.start()
        try:
            deadline = time.monotonic() + 60
            while asked < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert asked >= 3
        finally:
            fetcher.close()


def test_no_answer_of_a_source_ends_the_thread_that_reports_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source then took this machine for lost until the service was restarted."""
    monkeypatch.setattr(fetching, "REPORT_EVERY_S", 0.01)
    reported = threading.Semaphore(0)

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == MACHINES_ROUTE:
            reported.release()
        return httpx.Response(200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(b""))

    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(fetching, "open_client", partial(open_client, transport=transport))
    with closing(ParameterStore(tmp_path / "handover", [], storage=tmp_path)) as store:
        fetcher = Fetcher("http://there", store, machine="one")
        fetcher.start()
        try:
            assert all(reported.acquire(timeout=60) for _ in range(3))
        finally:
            fetcher.close()


def _answering(sent: threading.Event, ended: threading.Event, *, size: int) -> httpx.Client:
    """Of a source with one file of this size, of which it sends a byte at a time for a minute."""

    class Bytes(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            for _ in range(6000):
                yield b"x"
                sent.set()
                time.sleep(0.01)
            ended.set()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == STATE_ROUTE:
            return httpx.Response(200, content=json.dumps({**STATE, "files": {"model.safetensors": size}}))
        return httpx.Response(200, stream=Bytes())

    return httpx.Client(transport=httpx.MockTransport(answer), base_url="http://there")


def test_a_service_that_fetches_a_file_without_end_ends_when_it_is_told_to(tmp_path: Path) -> None:
    sent, ended = threading.Event(), threading.Event()
    with closing(ParameterStore(tmp_path / "handover", [], storage=tmp_path)) as store:
        fetcher = Fetcher("http://there", store, _answering(sent, ended, size=1 << 20))
        fetcher.start()
        assert sent.wait(60)
        fetcher.close()
        assert not ended.is_set()
        assert store.newest is None


def test_a_version_for_which_there_is_no_room_is_not_fetched(tmp_path: Path) -> None:
    sent, ended = threading.Event(), threading.Event()
    size = 2 * shutil.disk_usage(tmp_path).total
    with closing(ParameterStore(tmp_path / "handover", [], storage=tmp_path)) as store:
        fetcher = Fetcher("http://there", store, _answering(sent, ended, size=size))
        with pytest.raises(BridgeError, match="has room for"):
            fetcher.look()
        fetcher.close()
    assert not sent.is_set()


def test_versions_in_shared_memory_leave_a_quarter_of_main_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source sends a short version first, for which shared memory is chosen, and then one of all that is free."""
    monkeypatch.setattr(checkpoint_folder, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    sent, ended = threading.Event(), threading.Event()
    with closing(ParameterStore(tmp_path / "handover", [], storage=tmp_path)) as store:
        fetcher = Fetcher("http://there", store, _answering(sent, ended, size=900 << 10))
        with pytest.raises(BridgeError, match=r"has room for 0\.0 GB"):
            fetcher.look()
        fetcher.close()
    assert not sent.is_set()


def test_headers_of_a_million_tensors_are_not_parsed(tmp_path: Path) -> None:
    """Each file of a version held all threads of the service for seconds."""
    with closing(ParameterStore(tmp_path / "handover", [], storage=tmp_path)) as store:
        folder = store.begin(REQUEST)
        (folder / "model.safetensors").write_bytes((17 << 20).to_bytes(8, "little") + b"{")
        with pytest.raises(BridgeError, match=r"is above 16,777,216 bytes"):
            store.commit(1)
        assert store.newest is None
