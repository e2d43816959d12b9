"""What one client can take of a service: memory by unfinished bodies, connections, completions, and paths."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from rollout_fakes import ENVIRONMENT, REGISTRATION, api_client, served
from rollout_processes import answer_to, api_process
from serving import running_server, save_tiny_model
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from grpo_engine.errors import DataError
from grpo_engine.rollouts import coordinator
from grpo_engine.server.http.requests import read_path
from grpo_engine.server.prompts import check_num_completions
from grpo_engine.serving import bodies, connections
from grpo_engine.serving.access import AccessControl
from grpo_engine.serving.bodies import BodyLimits
from grpo_engine.serving.connections import LimitedProtocol

MIB = 1 << 20


async def length(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


def app() -> FastAPI:
    return FastAPI(routes=[Route("/", length, methods=["GET", "POST"])])


def limited(token: str | None = None, **settings: int) -> AccessControl:
    limits = BodyLimits(app(), **{"longest_bytes": 100, "num_at_once": 2, **settings})
    return AccessControl(limits, host="127.0.0.1", token=token)


def client_of(limits: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(limits), base_url="http://localhost")


class Parts:
    """A body in parts, the second of which comes when it is let."""

    def __init__(self, first: bytes, second: bytes) -> None:
        self.first, self.second = first, second
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self.has_begun.set()
        yield self.first
        await self.may_end.wait()
        yield self.second


# --- bodies ----------------------------------------------------------------------------------------------------------


async def begun(client: httpx.AsyncClient, *parts: Parts, **headers: str) -> list[asyncio.Task[httpx.Response]]:
    """Requests whose first part has been received, or waits for room."""
    posts = [asyncio.create_task(client.post("/", content=each, headers=headers)) for each in parts]
    for each in parts:
        await each.has_begun.wait()
    return posts


async def test_a_body_waits_while_there_is_no_room_for_more_of_it() -> None:
    async with client_of(limited()) as client:
        first, second = Parts(b"a" * 60, b"b" * 40), Parts(b"c" * 100, b"")
        posts = await begun(client, first, second)  # chunked, so not short
        other = Parts(b"d", b"")
        other.may_end.set()
        third = asyncio.create_task(client.post("/", content=other))
        assert (await client.get("/")).text == "0"  # without a body it takes no room
        assert not third.done()
        first.may_end.set()
        assert (await posts[0]).text == "100"
        assert (await third).text == "1"
        second.may_end.set()
        assert (await posts[1]).text == "100"


async def test_a_body_for_which_no_room_comes_is_refused_to_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "ROOM_WITHIN_S", 0.01)
    async with client_of(limited(num_at_once=1)) as client:
        slow = Parts(b"a", b"b")
        (post,) = await begun(client, slow)
        refused = await client.post("/", content=Parts(b"c", b""))
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
        slow.may_end.set()
        assert (await post).text == "2"
        assert (await client.post("/", content=b"c")).text == "1"


async def test_bodies_that_are_half_received_do_not_wait_for_each_other() -> None:
    async with client_of(limited()) as client:
        parts = [Parts(b"a" * 60, b"b" * 40) for _ in range(6)]
        posts = await begun(client, *parts[:2])
        posts += [asyncio.create_task(client.post("/", content=each)) for each in parts[2:]]
        for each in parts:
            each.may_end.set()
        assert [(await post).text for post in posts] == ["100"] * 6


async def test_a_body_takes_the_room_of_what_came_of_it_not_of_what_it_declares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "SHORT_BYTES", 10)
    monkeypatch.setattr(bodies, "ROOM_WITHIN_S", 0.01)
    async with client_of(limited()) as client:
        slow = [Parts(b"{", b"") for _ in range(4)]
        posts = await begun(client, *slow, **{"Content-Length": "100"})
        assert (await client.post("/", content=b"a" * 90)).text == "90"
        for each in slow:
            each.may_end.set()
        assert [(await post).text for post in posts] == ["1"] * 4


async def test_requests_with_the_token_do_not_wait_for_bodies_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "ROOM_WITHIN_S", 0.01)
    async with client_of(limited("secret", num_at_once=1, longest_without_token_bytes=50)) as client:
        slow = Parts(b"{", b"")
        (post,) = await begun(client, slow)
        assert (await client.post("/", content=Parts(b"a", b""))).status_code == 503
        ours = Parts(b"a" * 90, b"")
        ours.may_end.set()
        assert (await client.post("/", content=ours, headers={"Authorization": "Bearer secret"})).text == "90"
        slow.may_end.set()
        assert (await post).text == "1"


async def test_without_the_token_of_a_service_a_body_has_a_lower_limit() -> None:
    async with client_of(limited("secret", longest_without_token_bytes=50)) as client:
        long = Parts(b"a" * 30, b"a" * 30)
        long.may_end.set()
        for content in (b"a" * 60, long):
            refused = await client.post("/", content=content)
            assert (refused.status_code, "longer than 50 bytes" in refused.text) == (413, True)
        assert (await client.post("/", content=b"a" * 50)).text == "50"
        answer = await client.post("/", content=b"a" * 60, headers={"Authorization": "Bearer secret"})
        assert answer.text == "60"
    async with client_of(limited(None, longest_without_token_bytes=50)) as client:
        assert (await client.post("/", content=b"a" * 60)).text == "60"


async def test_a_short_body_does_not_wait_for_long_ones() -> None:
    async with client_of(limited(num_at_once=1)) as client:
        slow = Parts(b"a" * 100, b"")
        (post,) = await begun(client, slow)
        assert (await client.post("/", content=b"b")).text == "1"
        slow.may_end.set()
        assert (await post).text == "100"


async def test_a_body_that_stalls_is_given_up_and_its_room_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BEHIND_S", 0.01)
    async with client_of(limited(num_at_once=1)) as client:
        stalled = await client.post("/", content=Parts(b"a", b"b"))
        assert (stalled.status_code, "0.01 s later" in stalled.text) == (408, True)
        assert (await client.post("/", content=b"c" * 100)).text == "100"


async def test_a_body_that_comes_byte_by_byte_is_given_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BEHIND_S", 0.05)
    monkeypatch.setattr(bodies, "LEAST_BYTES_PER_S", 1000)

    async def trickle() -> AsyncIterator[bytes]:
        while True:
            yield b"a"
            await asyncio.sleep(0.01)

    async with client_of(limited()) as client, asyncio.timeout(10):
        assert (await client.post("/", content=trickle())).status_code == 408


@pytest.mark.slow
def test_unfinished_bodies_do_not_add_up_in_the_memory_of_the_rollout_api(tmp_path: Path) -> None:
    """Six bodies of 60 MiB, none of which ends; there is room for two of the longest, 64 MiB each, and for more short
    ones."""
    num_bytes, flags = 60 * MIB, ("--max-body-bytes", str(64 * MIB))
    with api_process(tmp_path, *flags, is_forked=False) as api, contextlib.ExitStack() as open_connections:
        before = api.rss_bytes()
        senders = [open_connections.enter_context(api.connection()) for _ in range(6)]
        head = f"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nContent-Length: {num_bytes}\r\n\r\n".encode()
        for sender in senders:
            sender.sendall(head)
            sender.setblocking(False)
        left = dict.fromkeys(senders, num_bytes - 1)
        until = time.monotonic() + 3
        while any(left.values()) and time.monotonic() < until:
            for sender, rest in left.items():
                with contextlib.suppress(BlockingIOError):
                    left[sender] -= sender.send(bytes(min(rest, MIB))) if rest else 0
        assert any(rest == 0 for rest in left.values())
        assert sum(num_bytes - rest for rest in left.values()) < 180 * MIB  # with what the kernel holds
        assert api.rss_bytes() - before < 200 * MIB
        with api.client() as other:  # a short one does not wait
            assert other.post("/register", json=REGISTRATION).status_code == 200
            assert other.post("/register-env", json=ENVIRONMENT).status_code == 200


# --- connections -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", httpx.URL(url).port), timeout=30) as connection:
        yield connection


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Half: "])
def test_a_connection_whose_headers_do_not_end_is_closed(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connections, "HEADERS_WITHIN_S", 0.1)
    monkeypatch.setattr(connections, "_LOOK_AGAIN_S", 0.01)
    with served(app(), http=LimitedProtocol) as url, connected(url) as connection:
        connection.sendall(sent)
        assert connection.recv(100) == b""
    with served(app(), http=LimitedProtocol) as url, connected(url) as connection:
        assert answer_to(connection, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") == (200, b"0")
        connection.sendall(sent or b"G")  # the second request of a connection
        assert connection.recv(100) == b""


def test_a_body_may_take_longer_than_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADERS_WITHIN_S", 0.05)
    monkeypatch.setattr(connections, "_LOOK_AGAIN_S", 0.01)
    with served(app(), http=LimitedProtocol) as url, connected(url) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\na")
        time.sleep(0.2)  # several times the limit of headers
        assert answer_to(connection, b"b") == (200, b"2")


def test_headers_without_end_are_not_collected() -> None:
    with served(app(), http=LimitedProtocol) as url, connected(url) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        with pytest.raises(ConnectionError):
            connection.sendall(bytes(64 * MIB))


# --- numbers and paths -----------------------------------------------------------------------------------------------


def test_more_completions_than_a_group_could_have_are_refused_with_the_bound() -> None:
    check_num_completions(4096)
    with pytest.raises(DataError, match="n: 100000 completions of one prompt; at most 4096"):
        check_num_completions(100_000)


async def test_environments_that_register_without_end_are_refused_and_so_are_endless_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coordinator, "MAX_ENVIRONMENTS", 2)
    async with api_client() as api:
        await api.post("/register", json=REGISTRATION)
        await api.get("/batch")  # environments register from then on
        names = ["a", "b" * 257, "b" * 256, "c"]
        answers = [await api.post("/register-env", json={**ENVIRONMENT, "desired_name": name}) for name in names]
        assert [answer.status_code for answer in answers] == [200, 422, 200, 503]
        assert "2 times" in answers[-1].json()["detail"]


@pytest.mark.parametrize(
    ("path", "why"), [("/" + "a" * 5000, "File name too long"), ("/a\0b", "null"), ("a/" * 5000, "File name too long")]
)
def test_a_path_that_no_file_can_have_is_an_error_of_the_client(path: str, why: str) -> None:
    with pytest.raises(DataError, match=why) as refused:
        read_path(path)
    assert len(str(refused.value)) < 300


def test_a_path_where_nothing_is_yet_is_left_to_the_route(tmp_path: Path) -> None:
    assert read_path(str(tmp_path / "none" / "there")) == tmp_path / "none" / "there"


@pytest.mark.slow
def test_the_inference_server_refuses_both_with_400(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", seed=0)
    with running_server(model, "--enable-lora", folder=tmp_path) as server, server.client as client:
        long = "/" + "a" * 5000
        requests: list[tuple[str, dict[str, Any]]] = [
            ("/bridge/reload", {"path": long, "policy_version": 1}),
            ("/lora/load", {"adapter_path": long}),
            ("/generate", {"prompt": "a", "n": 10**6}),
            ("/v1/completions", {"prompt": "a", "n": 10**6}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 10**6}),
        ]
        answers = [(path, client.post(path, json=body)) for path, body in requests]
        assert [(path, answer.status_code) for path, answer in answers] == [(path, 400) for path, _ in requests]
        assert all(len(answer.json()["detail"]) < 300 for _, answer in answers)
        assert client.post("/generate", json={"prompt": "a", "max_tokens": 1}).status_code == 200
