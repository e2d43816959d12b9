"""Concurrent requests and unusual orders: a request while a batch is being sent, a kill after a registration, a sender
that disconnects while its post is held. No group is lost, accepted twice or stuck.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from rollout_fakes import ENVIRONMENT, REGISTRATION, api_client, group, served, tags
from rollout_processes import api_process, read_answer

from grpo_engine.rollouts.config import ApiConfig
from grpo_engine.rollouts.coordinator import Coordinator
from grpo_engine.rollouts.http.app import make_app
from grpo_engine.rollouts.state import environments
from grpo_engine.rollouts.stock.connections import WatchedProtocol
from grpo_engine.rollouts.storage.store import Store
from grpo_engine.rollouts.validation import CheckedGroup, Refusal, read_group
from grpo_engine.wire.rollouts import RegisterEnvironmentRequest, RegisterRequest


def checked(tag: int, num_sequences: int = 4) -> CheckedGroup:
    return read_group(json.dumps(group(num_sequences, tag=tag)).encode(), {})


@contextlib.asynccontextmanager
async def a_coordinator(store: Store, **settings: Any) -> AsyncIterator[Coordinator]:
    """The rollout API without HTTP, with a run that waits for batches of four."""
    coordinator = Coordinator(ApiConfig(**settings), store, store.load())
    await coordinator.register(RegisterRequest.model_validate(REGISTRATION), uuid=1)
    yield coordinator
    await coordinator.close_store()


@contextlib.contextmanager
def served_app(**settings: Any) -> Iterator[tuple[FastAPI, httpx.Client, tuple[str, int]]]:
    """An API with a run on a real socket: its application, a client, and its address."""
    app = make_app(ApiConfig(store=Path(":memory:"), **settings), Store(Path(":memory:")))
    with served(app, http=WatchedProtocol) as url, httpx.Client(base_url=url, trust_env=False) as http:
        http.post("/register", json=REGISTRATION)
        yield app, http, ("127.0.0.1", http.base_url.port or 0)


def get_batch(http: httpx.Client) -> list[int] | None:
    """As stock trainers ask, without leases."""
    batch = http.get("/batch").json()["batch"]
    return None if batch is None else tags(batch)


def ask_for_a_batch(connection: socket.socket, http: httpx.Client, *more: str) -> None:
    """Send the request of a stock trainer with the user agent of `http`."""
    lines = ["GET /batch HTTP/1.1", "Host: localhost", f"User-Agent: {http.headers['user-agent']}", *more]
    connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n")


# --- batches being sent ---------------------------------------------------------------------------------------------


async def test_a_request_during_the_write_of_a_batch_does_not_acknowledge_it() -> None:
    async with a_coordinator(Store(Path(":memory:"))) as coordinator:
        await coordinator.add_groups([checked(10), checked(11)])
        # The first request timed out while the disk was slow, and was repeated.
        first, second = await asyncio.gather(*(coordinator.next_batch(client="stock", ack=None) for _ in range(2)))
        assert first is not None
        assert second is not None
        assert first.lease.id != second.lease.id
        coordinator.record_sent(second.lease, "its second connection")
        await coordinator.reclaim(first.lease)
        third = await coordinator.next_batch(client="stock", ack=None)
        assert third is not None
        assert third.lease.id == first.lease.id


@pytest.mark.slow
def test_a_client_that_disconnects_while_its_batch_is_compressed_gets_it_again(tmp_path: Path) -> None:
    with api_process(tmp_path) as api, api.client() as http:
        http.post("/register", json=REGISTRATION)
        for tag in range(10, 14):
            http.post("/scored_data", json=group(1, tag=tag, generation_params={"text": "x" * 15_000_000}))
        with api.connection() as impatient:
            ask_for_a_batch(impatient, http, "Accept-Encoding: gzip")
            while "grpo_api_batches_total 1" not in http.get("/metrics").text:
                pass
        while (batch := get_batch(http)) is None:  # it may still be leased to the closed connection
            pass
        assert batch == [10, 11, 12, 13]
        assert get_batch(http) is None


@pytest.mark.slow
@pytest.mark.parametrize("is_asked_before_the_kill", [False, True])
def test_a_batch_of_a_killed_trainer_survives_a_kill_of_the_api(tmp_path: Path, is_asked_before_the_kill: bool) -> None:
    with api_process(tmp_path) as api, api.client() as http:
        http.post("/register", json=REGISTRATION)
        http.post("/scored_data", json=group(4, tag=10, generation_params={"text": "x" * 10_000_000}))
        with api.client() as trainer:
            assert get_batch(trainer) == [10]
        http.post("/register", json=REGISTRATION)  # its successor
        with api.connection(receive_bytes=4096) as successor:
            if is_asked_before_the_kill:
                ask_for_a_batch(successor, http)
                assert successor.recv(100).startswith(b"HTTP/1.1 200 ")
            api.restart()
        assert get_batch(http) == [10]
        assert get_batch(http) is None


@pytest.mark.slow
def test_a_batch_left_unread_by_a_closed_connection_survives_a_kill_of_the_api(tmp_path: Path) -> None:
    with api_process(tmp_path) as api, api.client() as http:
        http.post("/register", json=REGISTRATION)
        http.post("/scored_data", json=group(4, tag=10))
        with api.connection() as trainer:
            ask_for_a_batch(trainer, http)
            assert trainer.recv(1) == b"H"  # all of it is in this machine's buffers
            for tag in range(11, 31):
                http.post("/scored_data", json=group(1, tag=tag))
        http.post("/scored_data", json=group(1, tag=31))
        api.restart()
        assert get_batch(http) == [10]


@pytest.mark.slow
def test_only_a_batch_whose_client_disconnected_early_is_delivered_again(tmp_path: Path) -> None:
    with api_process(tmp_path) as api, api.client() as http:
        http.post("/register", json=REGISTRATION)
        for tag in range(10, 52):  # each combination of the remainders below
            http.post("/scored_data", json=group(4, tag=tag, generation_params={"text": "x" * (5_000 * (tag % 7))}))
            with api.connection() as impatient:
                ask_for_a_batch(impatient, http)
                if tag % 3:  # else it disconnects before an answer
                    impatient.recv(tag % 3)
            while (batch := get_batch(http)) is None:
                pass
            assert batch == [tag]
            http.post("/scored_data", json=group(4, tag=7, generation_params={"text": "x" * 300_000}))
            with api.connection() as patient:
                ask_for_a_batch(patient, http, *["Connection: close"][: tag % 2])
                assert read_answer(patient)[0] == 200
            assert get_batch(http) is None


def test_a_trainer_that_stopped_reading_does_not_reclaim_the_batch_of_its_successor() -> None:
    with served_app() as (app, http, address):
        http.post("/scored_data", json=group(4, tag=10, generation_params={"text": "x" * 3_000_000}))
        with socket.socket() as hanging:
            hanging.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            hanging.connect(address)
            place = hanging.getsockname()
            ask_for_a_batch(hanging, http)
            assert hanging.recv(100).startswith(b"HTTP/1.1 200 ")
            http.post("/register", json=REGISTRATION)
            assert get_batch(http) == [10]
        while place in app.state.coordinator.deliveries:
            http.get("/info")
        assert get_batch(http) is None


def test_a_client_that_disconnected_while_its_request_was_held_leaves_no_state() -> None:
    with served_app() as (app, http, address):
        with socket.create_connection(address) as leaving:
            place = leaving.getsockname()
            leaving.sendall(b"GET /batch?ack=&wait_s=20 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        http.post("/scored_data", json=group(4, tag=10))
        batch = http.get("/batch", params={"ack": "", "wait_s": 10}).json()["batch"]
        assert tags(batch) == [10]
        # A later connection may have the same port, and its end would be taken for that of this one.
        assert place not in app.state.coordinator.deliveries


async def test_the_held_request_of_a_replaced_trainer_gets_no_batch() -> None:
    async with api_client() as api:
        uuid = (await api.post("/register", json=REGISTRATION)).json()["uuid"]
        old = asyncio.create_task(api.get("/batch", params={"ack": "", "wait_s": 20, "uuid": uuid}))
        await asyncio.sleep(0)
        assert (await api.get("/batch", params={"ack": ""})).json()["batch"] is None
        await api.post("/register", json=REGISTRATION)
        await api.post("/scored_data", json=group(4, tag=10))
        assert (await old).status_code == 409
        assert tags((await api.get("/batch", params={"ack": ""})).json()["batch"]) == [10]


async def test_a_waiting_trainer_gets_a_batch_when_the_environment_with_the_share_disconnects() -> None:
    async with a_coordinator(Store(Path(":memory:"))) as coordinator:
        assert await coordinator.next_batch(client="ours", ack="") is None
        request = RegisterEnvironmentRequest.model_validate({**ENVIRONMENT, "min_batch_allocation": 0.5})
        environment = await coordinator.register_environment(request)
        assert environment is not None
        await coordinator.add_groups([checked(10)])
        waiting = asyncio.create_task(coordinator.next_batch(client="ours", ack="", wait_s=300))
        await asyncio.sleep(0)
        await coordinator.disconnect(environment.id)
        assert await waiting is not None


# --- posts ---------------------------------------------------------------------------------------------------------


def test_a_held_post_is_not_accepted_once_its_sender_has_disconnected() -> None:
    with served_app(max_queued_sequences=8) as (_, http, address):
        for tag in (10, 11):
            http.post("/scored_data", json=group(4, tag=tag))
        body = json.dumps(group(4, tag=12)).encode()
        with socket.create_connection(address) as leaving:
            leaving.sendall(
                b"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            while "grpo_api_held 1" not in http.get("/metrics").text:
                pass
        assert get_batch(http) == [10]
        while "grpo_api_held 0" not in http.get("/metrics").text:
            pass
        # It was not answered, and stock environments send it again.
        assert http.post("/scored_data", content=body).status_code == 200
        assert [get_batch(http) for _ in range(3)] == [[11], [12], None]


async def test_a_held_post_is_accepted_when_stale_groups_leave_room() -> None:
    async with api_client(max_queued_sequences=8, max_staleness=0, hold_s=20) as api:
        await api.post("/register", json=REGISTRATION)
        for tag in (10, 11):
            await api.post("/scored_data", json=group(4, tag=tag, policy_versions=[[0, 0, 1, 1]] * 4))
        newer = group(2, tag=12, policy_versions=[[0, 0, 5, 5]] * 2)
        held = asyncio.create_task(api.post("/scored_data", json=newer))
        while "grpo_api_held 1" not in (await api.get("/metrics")).text:
            await asyncio.sleep(0)
            assert not held.done()
        assert (await api.get("/batch", params={"policy_version": 5})).json()["batch"] is None
        assert (await held).json() == {"status": "received"}


async def test_a_full_queue_that_makes_no_batch_admits_groups_that_complete_one() -> None:
    async with api_client(max_queued_sequences=8, hold_s=0) as api:
        await api.post("/register", json=REGISTRATION)
        await api.get("/batch")
        slow, fast = [
            (await api.post("/register-env", json={**ENVIRONMENT, "min_batch_allocation": share})).json()["env_id"]
            for share in (0.5, None)
        ]
        for tag in range(10, 14):
            assert (await api.post("/scored_data", json=group(2, tag=tag, env_id=fast))).status_code == 200
        late = group(2, tag=20, env_id=slow)
        assert (await api.post("/scored_data", json=late)).status_code == 503  # no batch was requested yet
        assert (await api.get("/batch")).json()["batch"] is None
        assert (await api.post("/scored_data", json=group(2, tag=14, env_id=fast))).status_code == 503
        assert (await api.post("/scored_data", json=late)).status_code == 200
        assert tags((await api.get("/batch")).json()["batch"]) == [10, 20]


async def test_two_batches_are_accepted_however_large_their_groups_are() -> None:
    async with api_client(max_queued_bytes=1, hold_s=0) as api:
        await api.post("/register", json=REGISTRATION)
        for tag in range(10, 14):
            assert (await api.post("/scored_data", json=group(2, tag=tag))).status_code == 200
        assert (await api.post("/scored_data", json=group(2, tag=14))).status_code == 503
        assert tags((await api.get("/batch")).json()["batch"]) == [10, 11]


async def test_a_group_refused_by_a_store_that_fails_is_not_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(Path(":memory:"))

    def fail(*arguments: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    async with a_coordinator(store) as coordinator:
        await coordinator.add_groups([checked(10, 2)])
        with monkeypatch.context() as broken:
            broken.setattr(store, "commit", fail)
            broken.setattr(store, "load", fail)
            with pytest.raises(Refusal, match="disk I/O error"):
                await coordinator.add_groups([checked(11, 2)])
        with contextlib.suppress(Refusal):  # until it has read the store again
            await coordinator.next_batch(client="stock", ack=None)
        await coordinator.add_groups([checked(12, 2)])
        delivery = await coordinator.next_batch(client="stock", ack=None)
        assert delivery is not None
        assert tags([json.loads(body) for body in delivery.bodies]) == [10, 12]


@pytest.mark.parametrize("service", [None, "run/env"], ids=["silent for long enough", "the same service"])
async def test_an_environment_that_was_replaced_does_not_come_back_with_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: str | None
) -> None:
    if service is None:
        monkeypatch.setattr(environments, "REPLACED_AFTER_S", -1.0)
    sums = RegisterEnvironmentRequest.model_validate({**ENVIRONMENT, "service": service})
    for num_more, expected in ((2, ["sums_1"]), (0, ["sums_1"])):
        async with a_coordinator(Store(tmp_path / "rollouts.sqlite")) as coordinator:
            await coordinator.next_batch(client="trainer", ack=None)
            for _ in range(num_more):
                await coordinator.register_environment(sums)
            assert [each.name for each in coordinator.state.environments.live(time.time()).records] == expected
