"""The parameter service: versions in memory, servers that load them one after another, and services that fetch them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from bridging import Serving, assert_agreement, make_bridge
from forked import Forked
from safetensors.torch import save_file
from serving import end_all, free_port, python_path, shift
from starlette.testclient import TestClient

from grpo_engine.bridges import Bridge
from grpo_engine.bridges.transport import parameter_store
from grpo_engine.bridges.transport.parameter_store import ParameterStore
from grpo_engine.errors import BridgeError, PeerUnavailable
from grpo_engine.parameters.app import create_app
from grpo_engine.parameters.fetching import Fetcher
from grpo_engine.wire.parameters import BeginRequest, ParametersState


class FakeServer:
    """An inference server as the store asks it."""

    loading = 0
    most_loading = 0

    def __init__(self, url: str, **_: Any) -> None:
        self.url, self.instance, self.version = url, "first", 0
        self.loaded: list[int] = []
        self.is_away = False
        self.refuses = False
        SERVERS[url] = self

    def info(self, **_: Any) -> Any:
        if self.is_away:
            raise PeerUnavailable("refused")
        return SimpleNamespace(instance=self.instance, policy_version=self.version)

    def reload(self, path: Path, version: int, **_: Any) -> Any:
        if self.refuses:
            raise BridgeError("it does not fit")
        FakeServer.loading += 1
        FakeServer.most_loading = max(FakeServer.most_loading, FakeServer.loading)
        assert (path / "model.safetensors").is_file()
        self.version = version
        self.loaded.append(version)
        FakeServer.loading -= 1
        return SimpleNamespace(instance=self.instance)

    def close(self) -> None:
        pass


SERVERS: dict[str, FakeServer] = {}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ParameterStore]:
    """With two servers that are fakes."""
    monkeypatch.setattr(parameter_store, "ServerClient", FakeServer)
    monkeypatch.setattr(FakeServer, "most_loading", 0)
    with closing(ParameterStore(tmp_path / "handover", ["http://a", "http://b"], storage=tmp_path)) as made:
        yield made


def push(store: ParameterStore, version: int, *, pull_every: int = 1, model: str = "m") -> ParametersState:
    request = BeginRequest(policy_version=version, model=model, most_bytes=0, pull_every=pull_every)
    folder = store.begin(request)
    save_file({"w": torch.full((3,), float(version))}, folder / "model.safetensors")
    return store.commit(version)


def test_servers_load_every_version_one_at_a_time(store: ParameterStore) -> None:
    for version in range(5):
        push(store, version)
        store.roll()
    assert SERVERS["http://a"].loaded[-1] == SERVERS["http://b"].loaded[-1] == 4
    assert FakeServer.most_loading == 1
    assert store.state().is_settled
    assert [each.policy_version for each in store.state().servers] == [4, 4]


def test_a_server_loads_a_version_only_when_it_is_pull_every_steps_behind(store: ParameterStore) -> None:
    served = []
    for version in range(8):
        push(store, version, pull_every=3)
        store.roll()
        served.append(SERVERS["http://a"].version)
        assert store.state().is_settled
    assert served == [0, 0, 0, 3, 3, 3, 6, 6]
    push(store, 2, pull_every=3)  # the trainer went back to a checkpoint
    store.roll()
    assert SERVERS["http://a"].version == 2


def test_a_server_that_is_away_holds_up_nobody_and_gets_the_newest_when_it_is_back(store: ParameterStore) -> None:
    away, other = SERVERS["http://a"], SERVERS["http://b"]
    away.is_away = True
    push(store, 1)
    push(store, 2)
    store.roll()
    assert other.version == 2
    assert [each.is_away for each in store.state().servers] == [True, False]
    away.is_away, away.instance = False, "second"
    store.roll()
    assert away.version == 2
    away.instance = "third"  # it was restarted, and has loaded `current` as it started
    num_loads = len(away.loaded)
    store.roll()
    assert len(away.loaded) == num_loads
    away.instance, away.version = "fourth", 0  # it was restarted without it
    store.roll()
    assert away.version == 2


def test_what_a_server_refuses_is_told_and_a_version_that_was_not_finished_is_removed(
    store: ParameterStore, tmp_path: Path
) -> None:
    push(store, 1)
    store.roll()
    SERVERS["http://a"].refuses = True
    push(store, 2)
    with pytest.raises(BridgeError, match="it does not fit"):
        store.roll()
    SERVERS["http://a"].refuses = False
    half = store.begin(BeginRequest(policy_version=3, model="m", most_bytes=0, pull_every=1))
    (half / "model.safetensors").write_bytes(b"half")
    push(store, 3)
    assert not (half / "model.safetensors").exists() or (half / "model.safetensors").read_bytes() != b"half"
    with pytest.raises(BridgeError, match="version 7 was not begun here"):
        store.commit(7)
    with pytest.raises(BridgeError, match="holds versions of m, not of other"):
        push(store, 4, model="other")


def test_a_service_of_another_machine_has_the_same_files_and_refuses_others(
    store: ParameterStore, tmp_path: Path
) -> None:
    push(store, 5)
    with (
        closing(ParameterStore(tmp_path / "elsewhere", [], storage=tmp_path / "elsewhere")) as copy,
        TestClient(create_app(store, host="127.0.0.1", token=None), base_url="http://127.0.0.1") as http,
    ):
        fetcher = Fetcher("http://127.0.0.1", copy, http)
        fetcher.look()
        assert copy.state().policy_version == 5
        names = [state.files for state in (store.state(), copy.state())]
        assert names[0].keys() == names[1].keys()
        assert copy.newest is not None
        assert store.newest is not None
        paths = [each.newest.checkpoint.path / "model.safetensors" for each in (store, copy)]
        assert paths[0].read_bytes() == paths[1].read_bytes()
        push(store, 6)
        path = store.newest.checkpoint.path / "model.safetensors"
        before = path.stat().st_mtime_ns
        number = store.newest.number
        assert http.get(f"/parameters/files/{number}/model.safetensors/sha256").status_code == 200
        path.write_bytes(path.read_bytes()[:-1] + b"?")  # as a memory error would
        os.utime(path, ns=(before, before))
        with pytest.raises(BridgeError, match="others than were sent"):
            fetcher.look()
        assert copy.state().policy_version == 5
        for wrong in ("..%2Fhandover.json", "nothing", ".."):
            assert http.get(f"/parameters/files/{number}/{wrong}").status_code == 404
        assert http.get(f"/parameters/files/{number - 1}/model.safetensors").status_code == 404


def test_every_route_but_health_requires_the_token_and_bodies_are_checked(store: ParameterStore) -> None:
    with TestClient(create_app(store, host="127.0.0.1", token="secret"), base_url="http://127.0.0.1") as http:
        assert http.get("/health").status_code == 200
        assert http.get("/parameters").status_code == 401
        assert http.post("/parameters/begin", json={}).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert http.get("/parameters", headers=headers).status_code == 200
        answer = http.post("/parameters/begin", json={"policy_version": -1}, headers=headers)
        assert (answer.status_code, "policy_version" in answer.json()["detail"]) == (422, True)
        answer = http.post("/parameters/commit", json={"policy_version": 1}, headers=headers)
        assert (answer.status_code, "was not begun here" in answer.json()["detail"]) == (400, True)


class Service:
    """A parameter service in a process of its own."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder, self.handover = folder, folder / "handover"
        self._words = ("parameters", "--port", str(self.port), "--handover", str(self.handover))
        self._words += ("--storage", str(folder / "storage"), *flags)
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": python_path()}
        log = self._folder / "parameters.log"
        self.process = Forked(*self._words, log=log, folder=self._folder, environment=environment)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def bridge_of(
    service: Service, servers: list[Serving], folder: Path, *others: Service, served_file: Path | None = None
) -> Bridge:
    urls = tuple(each.url for each in servers)
    return make_bridge(
        {"mode": "parameter_service"},
        servers[0].model,
        urls[0],
        folder,
        server_urls=urls,
        parameter_urls=(service.url, *(each.url for each in others)),
        served_file=served_file,
    )


@pytest.mark.slow
def test_servers_that_start_have_the_newest_version_without_the_trainer_and_over_a_kill_of_the_service(
    model_folder: Path, tmp_path: Path
) -> None:
    handover = ("--handover", str(tmp_path / "handover"))
    servers = [Serving(model_folder, tmp_path, *handover) for _ in range(2)]
    service = Service(tmp_path, "--server-urls", *(each.url for each in servers))
    try:
        for each in servers:
            each.start()
        with closing(bridge_of(service, servers, tmp_path)) as bridge:
            model = bridge.attach().model.eval()
            bridge.publish(1, shift(model, 1))
            for each in servers:
                assert_agreement(each.now, model, 1)
            service.kill()
            service.start()
            update = bridge.publish(2, shift(model, 2))
            assert update is not None
            assert update.num_servers == 2
            for each in servers:
                assert_agreement(each.now, model, 2)
        servers[1].end(signal.SIGKILL)  # and the trainer is gone
        service.kill()
        servers[1].start()
        assert_agreement(servers[1].now, model, 2)
        service.start()
    finally:
        end_all([service.process])
        for each in servers:
            each.close()


@pytest.mark.slow
def test_a_service_keeps_its_version_while_the_next_trainer_repeats_those_that_lead_to_it(
    model_folder: Path, tmp_path: Path
) -> None:
    server = Serving(model_folder, tmp_path)
    service = Service(tmp_path, "--server-urls", server.url)
    try:
        server.start()
        for newest, sent in ((5, [5]), (6, [6]), (7, [2, 7])):
            if newest == 7:  # a service that was started again has another instance
                service.kill()
                service.start()
            with closing(bridge_of(service, [server], tmp_path, served_file=tmp_path / "served.json")) as bridge:
                attached = bridge.attach()
                attached.repeat(range(1, newest + 1))
                versions = [newest] if newest == 5 else [2, 3, 4, newest]
                updates = {version: bridge.publish(version, shift(attached.model, version)) for version in versions}
                assert [version for version, update in updates.items() if update is not None] == sent
                assert_agreement(server.now, attached.model.eval(), newest)
    finally:
        end_all([service.process])
        server.close()


@pytest.mark.slow
@pytest.mark.extended("test_a_service_of_another_machine_has_the_same_files_and_refuses_others, without servers")
def test_the_servers_of_another_machine_are_given_what_its_service_fetches(model_folder: Path, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("here", "there")]
    for folder in folders:
        folder.mkdir()
    servers = [Serving(model_folder, folder, "--handover", str(folder / "handover")) for folder in folders]
    here = Service(folders[0], "--server-urls", servers[0].url)
    there = Service(folders[1], "--server-urls", servers[1].url, "--source", here.url)
    try:
        for each in servers:
            each.start()
        with closing(bridge_of(here, servers, tmp_path, there)) as bridge:
            model = bridge.attach().model.eval()
            for version in (1, 2, 3):
                bridge.publish(version, shift(model, version))
                for each in servers:
                    assert_agreement(each.now, model, version)
        assert httpx.get(f"{there.url}/health").status_code == 200
    finally:
        end_all([here.process, there.process])
        for each in servers:
            each.close()
