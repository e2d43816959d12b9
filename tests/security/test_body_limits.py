"""What bodies can take of a service: memory by unfinished ones, and the event loop by many or long ones."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from limited_service import MIB, client_of, limited
from rollout_fakes import ENVIRONMENT, REGISTRATION, api_client
from rollout_processes import api_process
from stage import until
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from grpo_engine.rollouts.http import app as rollout_routes
from grpo_engine.rollouts.http import bodies as rollout_bodies
from grpo_engine.rollouts.storage.store import Store
from grpo_engine.serving import bodies


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


@pytest.mark.parametrize("headers", [{}, {"Content-Length": "100"}])
async def test_bodies_that_are_half_received_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]
) -> None:
    """1,500 short ones that were aborted kept others without the token from being received for 20 s."""
    monkeypatch.setattr(bodies, "SHORT_ROOM_BYTES", 0)
    monkeypatch.setattr(bodies, "ROOM_WITHIN_S", 2.0)
    async with client_of(limited(num_at_once=1 if headers else 2)) as client:
        parts = [Parts(b"a" * 60, b"b" * 40) for _ in range(6)]
        posts = await begun(client, *parts[:2], **headers)
        posts += [asyncio.create_task(client.post("/", content=each, headers=headers)) for each in parts[2:]]
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

    async with client_of(limited()) as client, asyncio.timeout(60):
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
        moved_at = time.monotonic()
        while not any(rest == 0 for rest in left.values()) or time.monotonic() < moved_at + 0.5:  # then they wait
            for sender, rest in left.items():
                with contextlib.suppress(BlockingIOError):
                    if rest and (count := sender.send(bytes(min(rest, MIB)))):
                        left[sender], moved_at = rest - count, time.monotonic()
            assert time.monotonic() < moved_at + 30
        assert sum(num_bytes - rest for rest in left.values()) < 180 * MIB  # with what the kernel holds
        assert api.rss_bytes() - before < 200 * MIB
        with api.client() as other:  # a short one does not wait
            assert other.post("/register", json=REGISTRATION).status_code == 200
            assert other.post("/register-env", json=ENVIRONMENT).status_code == 200


async def test_long_bodies_are_unpacked_and_parsed_one_at_a_time_and_a_short_one_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_THREAD_FROM_BYTES", "_LONG_FROM_BYTES"):
        monkeypatch.setattr(rollout_bodies, name, 1000)
    running, most, unpacked = 0, 0, 0
    may_end, lock = threading.Event(), threading.Lock()

    def parse(body: bytes) -> str:
        nonlocal running, most
        if len(body) <= 1000:
            return "short"
        with lock:
            running += 1
            most = max(most, running)
        may_end.wait(20)
        with lock:
            running -= 1
        return str(len(body))

    async def parsed(request: Request) -> PlainTextResponse:
        nonlocal unpacked
        unpacked += 1
        return PlainTextResponse(await rollout_bodies.parsed(request, parse, max_bytes=MIB))

    routes = FastAPI(routes=[Route("/", parsed, methods=["POST"])])
    routes.state.body_turns = rollout_bodies.BodyTurns()
    zipped = {"Content-Encoding": "gzip"}
    async with client_of(routes) as client, asyncio.timeout(20):
        bodies_sent = [gzip.compress(b"a" * 5000)] * 3 + [b"a" * 5000] * 3
        posts = [
            asyncio.create_task(client.post("/", content=each, headers=zipped if len(each) < 1000 else {}))
            for each in bodies_sent
        ]
        await until(lambda: unpacked == 6 and running >= 1)
        for short in (b"a", gzip.compress(b"a" * 900)):
            headers = zipped if len(short) > 1 else {}
            assert (await client.post("/", content=short, headers=headers)).text == "short"
        assert running == 1
        may_end.set()
        assert [(await post).text for post in posts] == ["5000"] * 6
    assert most == 1


async def test_of_bodies_that_grow_to_megabytes_few_are_decompressed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 of 4 kB, of 4 MiB each, took 1.2 GB and held the event loop for 21 s."""
    num_unpacked, may_end = 0, threading.Event()
    decompressed = rollout_bodies.decompressed

    def counted(*of: Any, max_bytes: int) -> bytes:
        nonlocal num_unpacked
        content = decompressed(*of, max_bytes=max_bytes)
        num_unpacked += 1
        return content

    async def parsed(request: Request) -> PlainTextResponse:
        await rollout_bodies.parsed(request, lambda _: may_end.wait(20), max_bytes=MIB)
        return PlainTextResponse("read")

    monkeypatch.setattr(rollout_bodies, "decompressed", counted)
    routes = FastAPI(routes=[Route("/", parsed, methods=["POST"])])
    routes.state.body_turns = rollout_bodies.BodyTurns()
    async with client_of(routes) as client, asyncio.timeout(20):
        zipped, headers = gzip.compress(b" " * 300_000), {"Content-Encoding": "gzip"}
        posts = [asyncio.create_task(client.post("/", content=zipped, headers=headers)) for _ in range(12)]
        await until(lambda: num_unpacked >= 4)
        for _ in range(20):
            await asyncio.sleep(0)
        assert num_unpacked == 4
        may_end.set()
        assert [(await post).text for post in posts] == ["read"] * 12


@pytest.mark.parametrize("num_groups", [1, 20])
async def test_posts_that_arrive_at_once_are_read_in_turns_of_the_event_loop_and_long_ones_after_the_write_before(
    monkeypatch: pytest.MonkeyPatch, num_groups: int
) -> None:
    """300 posts of 1,024 groups held `/health` for 23 s, and 900 of 64 for 8 s."""
    monkeypatch.setattr(rollout_bodies, "_MANY_MARKS", 200, raising=False)
    monkeypatch.setattr(rollout_bodies, "_TURN_S", 0.0, raising=False)
    read_at, num_turns, num_written = [], 0, 0
    read_groups, add_groups = rollout_routes.read_groups, Store.add_groups

    def count_turns() -> None:
        nonlocal num_turns
        num_turns += 1
        asyncio.get_running_loop().call_soon(count_turns)

    def noted(*of: Any) -> Any:
        read_at.append((num_turns, num_written))
        return read_groups(*of)

    def written(*of: Any) -> None:
        nonlocal num_written
        num_written += 1
        add_groups(*of)

    monkeypatch.setattr(rollout_routes, "read_groups", noted)
    monkeypatch.setattr(Store, "add_groups", written)
    one = b'{"tokens":[[1,2]],"masks":[[1,2]],"scores":[0.5]}'
    async with api_client() as api:
        count_turns()
        post = b"[" + b",".join([one] * num_groups) + b"]"
        answers = await asyncio.gather(*(api.post("/scored_data_list", content=post) for _ in range(6)))
    assert [answer.status_code for answer in answers] == [200] * 6
    assert len({turn for turn, _ in read_at}) == 6
    if num_groups == 20:
        assert [before for _, before in read_at] == [0, 1, 2, 3, 4, 5]


async def test_groups_that_are_much_smaller_than_a_large_group_size_are_queued_as_they_are() -> None:
    """To put them together, one post of 1,024 held the rollout API for 22 s."""
    async with api_client() as api:
        await api.post("/register", json=REGISTRATION)
        await api.get("/batch")
        one = b'{"tokens":[[1,2]],"masks":[[1,2]],"scores":[0.5],"env_id":%d}'
        for env_id, (group_size, answer) in enumerate([(256, "buffered"), (257, "received")]):
            await api.post("/register-env", json={**ENVIRONMENT, "group_size": group_size})
            assert (await api.post("/scored_data", content=one % env_id)).json()["status"] == answer
        assert (await api.get("/status")).json()["queue_size"] == 1
