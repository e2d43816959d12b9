"""The parameter service: versions in memory, servers that load them one after another, and services that fetch them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
from grpo_engine.parameters import machines
from grpo_engine.parameters.app import create_app
from grpo_engine.parameters.fetching import Fetcher
from grpo_engine.parameters.machines import OtherMachines
from grpo_engine.wire.handover import PlacedPorts
from grpo_engine.wire.log_lines import WAITING_FOR_WEIGHTS
from grpo_engine.wire.parameters import BeginRequest, MachineReport, ParametersState, ServedBy
from grpo_engine.wire.run_folder import HANDOVER_PORTS


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


def told(machine: str, state: ParametersState, source: ParametersState | None, **changes: Any) -> MachineReport:
    """What a machine reports that has fetched what the source had."""
    fetched = {} if source is None else {"source_instance": source.instance, "source_number": source.number}
    return MachineReport(machine=machine, state=state.model_copy(update=changes), **fetched)


def test_the_service_that_others_fetch_from_answers_for_their_machines_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(machines.time, "monotonic", lambda: now_s[0])
    urls = [f"http://127.0.0.1:{port}" for port in (1, 2, 3)]
    others = OtherMachines(urls)
    served = [ServedBy(url=url, policy_version=7, is_away=False) for url in urls]
    own = ParametersState(instance="a", number=3, policy_version=7, is_settled=True)
    assert [each.is_away for each in others.with_them(own).servers] == [True, True, True]  # not placed yet

    here = ParametersState(instance="b", is_settled=True, longest_s=2.0)
    others.take(told("m2", here, own, servers=served[:2]))
    state = others.with_them(own)
    assert (state.is_settled, state.late, state.longest_s) == (True, [], 2.0)
    assert [(each.url, each.is_away) for each in state.servers] == [(urls[0], False), (urls[1], False), (urls[2], True)]

    pushed = own.model_copy(update={"number": 4, "policy_version": 8})
    state = others.with_them(pushed)
    assert (state.is_settled, state.late) == (False, ["m2 does not have version 8 yet (it is being fetched)"])
    others.take(told("m2", here, pushed, servers=served[:2], is_settled=False))
    assert others.with_them(pushed).late == ["servers of m2 are loading version 8"]
    others.take(told("m2", here, pushed, servers=served[:2], problem="it does not fit"))
    assert others.with_them(pushed).problem == "m2: it does not fit"

    others.take(told("m3", here, None, servers=[served[2].model_copy(update={"is_away": True})]))
    others.take(told("m2", here, pushed, servers=served[:2]))
    assert others.with_them(pushed).is_settled  # no server of m3 answers, so nobody waits for it
    now_s[0] += machines.SILENT_AFTER_S
    state = others.with_them(own)  # both are lost
    assert (state.is_settled, [each.is_away for each in state.servers]) == (True, [True, True, True])


def test_a_service_of_a_cluster_has_the_servers_that_are_placed_on_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameter_store, "ServerClient", FakeServer)
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    with closing(ParameterStore(tmp_path / "here", urls, storage=tmp_path, has_placed_only=True)) as store:
        assert store.state().servers == []

        def place(*ports: int) -> list[str]:
            (tmp_path / "here").mkdir(exist_ok=True)
            (tmp_path / "here" / HANDOVER_PORTS).write_text(PlacedPorts(ports=[*ports]).model_dump_json())
            store.roll()
            return [each.url for each in store.state().servers]

        push(store, 1)
        assert place(2) == [urls[1]]
        assert (SERVERS[urls[0]].loaded, SERVERS[urls[1]].loaded) == ([], [1])
        assert place(1, 2) == urls
        assert SERVERS[urls[0]].loaded == [1]


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


@pytest.mark.slow
@pytest.mark.extended("test_the_service_that_others_fetch_from_answers_for_their_machines_too, without processes")
def test_a_server_loads_when_its_machine_has_the_newest_version_and_the_trainer_asks_one_service(
    model_folder: Path, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("trainer", "servers")]
    for folder in folders:
        folder.mkdir()
    handover = folders[1] / "handover"
    server = Serving(model_folder, folders[1], "--handover", str(handover), "--awaits-handover")
    here = Service(folders[0], "--machine", "m1", "--server-urls", server.url)
    flags = ("--machine", "m2", "--server-urls", server.url, "--source", here.url)
    processes = [here.process]
    handover.mkdir()
    (handover / HANDOVER_PORTS).write_text(PlacedPorts(ports=[server.port]).model_dump_json())
    first = Serving(model_folder, folders[0])  # for the trainer to attach to
    try:
        first.start()
        with closing(bridge_of(here, [first], tmp_path)) as bridge:
            model = bridge.attach().model.eval()
            service_of_trainer = httpx.get(f"{here.url}/parameters").json()
            assert [each["is_away"] for each in service_of_trainer["servers"]] == [True]
            with ThreadPoolExecutor() as pool:
                publishing = pool.submit(bridge.publish, 1, shift(model, 1))
                starting = pool.submit(server.start)
                log = folders[1]
                while not any(WAITING_FOR_WEIGHTS.text[:40] in path.read_text() for path in log.glob("*.log")):
                    assert not starting.done()
                assert not publishing.done()  # no server has it
                there = Service(folders[1], *flags)
                processes.append(there.process)
                update = publishing.result()
                starting.result()
            assert update is not None
            assert update.num_servers == 1
            assert_agreement(server.now, model, 1)
            bridge.publish(2, shift(model, 2))
            assert_agreement(server.now, model, 2)
    finally:
        end_all(processes)
        server.close()
        first.close()
