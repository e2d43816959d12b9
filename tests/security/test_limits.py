"""What one client can take of a service: connections, groups, names, and paths."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvloop
from fastapi import FastAPI
from forked import start_forked
from limited_service import CHUNKED, MIB, app, limited
from rollout_fakes import ENVIRONMENT, REGISTRATION, api_client, served
from rollout_processes import answer_to
from stage import until
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from torch import distributed

from grpo_engine.bridges.transport.weight_group import WeightGroup
from grpo_engine.environments.atropos.observers import RunStatus
from grpo_engine.errors import DataError
from grpo_engine.processes import raise_descriptor_limit
from grpo_engine.ranks.group import RankGroup
from grpo_engine.ranks.launching import LOOPBACK
from grpo_engine.ranks.place import RankPlace
from grpo_engine.rollouts import coordinator
from grpo_engine.rollouts.http import app as rollout_routes
from grpo_engine.rollouts.metrics import MAX_ENVIRONMENTS_NAMED, Counters
from grpo_engine.server.http.requests import read_path
from grpo_engine.serving import connections
from grpo_engine.serving.access import AccessControl, Caller, Token
from grpo_engine.serving.bodies import BodyLimits
from grpo_engine.serving.connections import LimitedProtocol
from grpo_engine.serving.listening import plain_server, take_port
from grpo_engine.wire.inference import GroupMeeting
from grpo_engine.wire.tcp_sockets import own_listening_ports

# --- connections -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", httpx.URL(url).port), timeout=30) as connection:
        yield connection


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Half: "])
def test_a_connection_whose_headers_do_not_end_is_closed(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connections, "_LOOK_AGAIN_S", 0.01)
    with served(app(), http=LimitedProtocol) as url, connected(url) as connection:
        assert answer_to(connection, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") == (200, b"0")
        monkeypatch.setattr(connections, "HEADERS_WITHIN_S", 0.1)
        connection.sendall(sent or b"G")  # the second request of a connection
        assert connection.recv(100) == b""
        closed_already = contextlib.suppress(ConnectionError)  # where this process was held up before it sends
        with connected(url) as another, closed_already:
            another.sendall(sent)
            assert another.recv(100) == b""


def test_one_connection_too_many_closes_the_oldest_idle_one_without_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "max_connections", lambda: 3)
    request = b"GET / HTTP/1.1\r\nHost: localhost\r\n%s\r\n"
    with contextlib.ExitStack() as opened:
        url = opened.enter_context(served(limited("secret"), http=LimitedProtocol))
        ours = opened.enter_context(connected(url))
        assert answer_to(ours, request % b"Authorization: Bearer secret\r\n") == (200, b"0")
        others = []
        for _ in range(5):
            others.append(opened.enter_context(connected(url)))
            assert answer_to(others[-1], request % b"") == (200, b"0")
        for closed in others[:3]:
            with contextlib.suppress(ConnectionError):
                assert closed.recv(1) == b""
        for still_open in (ours, *others[3:]):
            assert answer_to(still_open, request % b"") == (200, b"0")


def test_many_connections_are_accepted_in_one_round_of_the_loop() -> None:
    async def num_rounds() -> int:
        with contextlib.ExitStack() as opened:
            listener = opened.enter_context(take_port("127.0.0.1", 0))
            server = plain_server(app(), listener, log_level="warning")
            server.config.load()
            server.lifespan = server.config.lifespan_class(server.config)
            await server.startup()
            for _ in range(100):
                opened.enter_context(socket.create_connection(listener.getsockname(), timeout=30))
            rounds = 0
            while len(server.server_state.connections) < 100:
                await asyncio.sleep(0)
                rounds += 1
            await server.shutdown()
            return rounds

    assert uvloop.run(num_rounds()) < 20  # by uvloop itself: 101


def test_requests_without_the_token_take_turns_and_those_with_it_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "TURNS", 2)
    monkeypatch.setattr(connections, "TURNS_EVERY_S", 0.2)
    request = b"GET / HTTP/1.1\r\nHost: localhost\r\n%s\r\n"
    with served(limited("secret"), http=LimitedProtocol) as url, connected(url) as ours, connected(url) as another:
        began = time.monotonic()
        for _ in range(3):
            assert answer_to(another, request % b"") == (200, b"0")
        another.sendall(request % b"")
        for _ in range(20):
            assert answer_to(ours, request % b"Authorization: Bearer secret\r\n") == (200, b"0")
        assert not select.select([another], [], [], 0)[0] or time.monotonic() - began > 0.2
        assert another.recv(1000).startswith(b"HTTP/1.1 200")


async def test_a_request_for_a_websocket_is_answered_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    request = (
        b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    with served(limited("secret"), http=LimitedProtocol, ws="websockets-sansio") as url, connected(url) as connection:
        assert answer_to(connection, request) == (200, b"0")


def test_of_each_warning_about_requests_one_a_minute_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    seconds = iter([0.0, 1.0, 1.0, 59.9, 60.0, 61.0])
    logger = logging.getLogger("test_limits.warnings")
    limit = connections.SomeWarnings(now=lambda: next(seconds))
    logger.addFilter(limit)
    for text in ("Invalid HTTP request received.", "Invalid HTTP request received.", "Unsupported upgrade request."):
        logger.warning(text)
    logger.error("Exception in ASGI application")
    logger.error("Exception in ASGI application")
    for _ in range(3):
        logger.warning("Invalid HTTP request received.")
    assert [record.levelname[0] + record.message[0] for record in caplog.records] == ["WI", "WU", "EE", "EE", "WI"]


def test_of_tracebacks_of_one_place_one_a_minute_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """300 requests a second at which a route of vLLM fails wrote 2 MB/s."""
    seconds = iter([0.0, 1.0, 2.0, 60.0])
    logger = logging.getLogger("test_limits.tracebacks")
    logger.addFilter(connections.SomeWarnings(now=lambda: next(seconds)))
    for text in ("a", "b", "", "c"):
        try:
            int(text) if text else {}["d"]
        except (ValueError, KeyError) as error:
            logger.error("Exception in ASGI application", exc_info=error)
    logged = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert [str(error)[-3:] for error in logged] == ["'a'", "'d'", "'c'"]


def test_a_refused_request_writes_no_line_of_its_length_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM logs the name of a model that it does not have, for each request with one: 900 kB each."""
    seconds = iter([0.0, 1.0, 2.0, 60.0])
    logger = logging.getLogger("test_limits.refusals")
    logger.addFilter(connections.SomeWarnings(connections.warning_place, now=lambda: next(seconds)))
    for name in ("a" * 900_000, "b", "c"):
        logger.error("Error with model %s", name)
        logger.error(f"{name} at a place of its own") if name == "b" else None
    logged = [record.getMessage()[-9:] for record in caplog.records]
    assert logged == ["aaaaaaaa…", "place of its own"[-9:], "h model c"]
    assert max(len(record.getMessage()) for record in caplog.records) == connections.MAX_WARNING_CHARS + 1


def test_what_requests_without_the_token_have_vllm_log_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header of theirs is a line each, which wrote 30 kB/s; lines of the run's requests are all logged."""
    logger = logging.getLogger("test_limits.headers")
    logger.setLevel(logging.INFO)
    logger.addFilter(connections.SomeWarnings(connections.warning_place, now=lambda: 0.0))
    for token in (Token.WRONG, Token.WRONG, Token.RIGHT, Token.RIGHT):
        monkeypatch.setattr(connections, "caller", lambda token=token: Caller(token=token))
        logger.info("Created header for %s", token.name)
    assert [record.args for record in caplog.records] == [("WRONG",), ("RIGHT",), ("RIGHT",)]


def test_a_server_may_have_as_many_descriptors_as_its_hard_limit_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(connections.resource, "setrlimit", lambda _kind, limits: set_to.append(limits))
    for limits in ((1024, 4096), (1024, connections.resource.RLIM_INFINITY), (4096, 4096)):
        monkeypatch.setattr(connections.resource, "getrlimit", lambda _kind, limits=limits: limits)
        raise_descriptor_limit()
        assert connections.max_connections() == limits[0] * 7 // 8
    assert set_to == [(4096, 4096), (1 << 16, connections.resource.RLIM_INFINITY)]


def attacked_member(rank: int, folder: Path) -> None:
    """A member of groups of two by Gloo; it fails where connections to one that has met take descriptors of its own."""
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    before = own_listening_ports()
    place = RankPlace(rank=rank, world_size=2, local_rank=rank, store_file=folder / "ranks")
    meeting = GroupMeeting(epoch=1, store=folder / "weights", size=2, timeout_s=60)
    with contextlib.closing(RankGroup(place, timeout_s=60, num_replicas=2)) as ranks:
        mesh = ranks.mesh()
        group = WeightGroup(meeting, rank=rank, device=torch.device("cpu"))
        ports = own_listening_ports() - before
        assert len(ports) >= 4
        strangers = [socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK) for _ in range(10 * len(ports))]
        num_descriptors = len(os.listdir("/proc/self/fd"))
        for stranger, port in zip(strangers, 10 * list(ports), strict=True):
            stranger.connect_ex(("127.0.0.1", port))
        time.sleep(0.2)
        assert len(os.listdir("/proc/self/fd")) == num_descriptors
        for _ in range(3):
            assert ranks.sum(torch.ones(1000) * (1 + rank))[0] == 3
            assert ranks.gather(rank) == [0, 1]
            received = torch.ones(1000) * (1 + rank)
            group.broadcast([received])
            assert received[0] == 1
            for dimension in ("replicate", "shard"):
                distributed.all_reduce(received, group=mesh.get_group(dimension))
            assert received[0] == 2
        group.abort()


@pytest.mark.slow
def test_connections_to_a_process_group_that_has_met_take_none_of_its_descriptors(tmp_path: Path) -> None:
    (tmp_path / "weights").touch()
    members = [start_forked(attacked_member, rank, tmp_path) for rank in range(2)]
    for member in members:
        member.join()
    assert [member.exitcode for member in members] == [0, 0]


def test_a_body_may_take_longer_than_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    class BegunWithHeaders(LimitedProtocol):
        """Has the limit from when headers arrive, however late the client of this test is."""

        def data_received(self, data: bytes) -> None:
            if self._closing is not None:
                self._end_wait()
                monkeypatch.setattr(connections, "HEADERS_WITHIN_S", 0.05)
                self._begin_wait()
            super().data_received(data)

    monkeypatch.setattr(connections, "_LOOK_AGAIN_S", 0.01)
    with served(app(), http=BegunWithHeaders) as url, connected(url) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\na")
        time.sleep(0.2)  # several times the limit of headers
        assert answer_to(connection, b"b") == (200, b"2")


def test_headers_without_end_are_not_collected() -> None:
    with served(app(), http=LimitedProtocol) as url, connected(url) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        with pytest.raises(ConnectionError):
            connection.sendall(b"x" * 64 * MIB)


@pytest.mark.parametrize("endless", [b"X-Long: " + b"x" * MIB, b"a:b\r\n" * (MIB // 5)], ids=["long", "many"])
def test_trailers_without_end_are_not_collected(endless: bytes) -> None:
    with served(app(), http=LimitedProtocol) as url, connected(url) as connection:
        connection.sendall(CHUNKED + b"2\r\n{}\r\n0\r\n")
        with pytest.raises(ConnectionError):
            connection.sendall(endless * 24)


def test_trailers_are_no_headers_and_the_parts_of_a_body_do_not_count_as_any() -> None:
    async def described(request: Request) -> PlainTextResponse:
        return PlainTextResponse(f"{len(await request.body())} {' '.join(request.headers)}")

    part = b"40000\r\n" + bytes(0x40000) + b"\r\n"
    application = FastAPI(routes=[Route("/", described, methods=["POST"])])
    with served(application, http=LimitedProtocol) as url, connected(url) as connection:
        for _ in range(2):
            answer = answer_to(connection, CHUNKED + part * 8 + b"0\r\nAuthorization: Bearer abc\r\n\r\n")
            assert answer == (200, b"2097152 host transfer-encoding")


def test_a_connection_with_many_requests_before_the_first_answer_is_closed_and_others_are_answered() -> None:
    request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    handled = []

    class Counting(LimitedProtocol):
        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            handled.append(self)

    with served(app(), http=Counting) as url, connected(url) as flood, connected(url) as few:
        few.sendall(request * (1 + connections.MAX_PIPELINED))
        answers = b""
        while answers.count(b"HTTP/1.1 200 OK") < 1 + connections.MAX_PIPELINED or not answers.endswith(b"\r\n\r\n0"):
            answers += few.recv(65536)
        handled.clear()
        flood.sendall(request * 1000)
        with contextlib.suppress(ConnectionError):  # what it sent is not read to its end
            assert b"".join(iter(lambda: flood.recv(65536), b"")).startswith(b"HTTP/1.1 400")
        assert len(handled) == 1 + connections.MAX_PIPELINED
        assert answer_to(few, request) == (200, b"0")


@pytest.mark.parametrize(
    "endless",
    [
        b"POST / HTTP/1.1\r\nContent-Length: 9\r\n" + b"a:\r\n" * 1000 + b"\r\n",
        b"POST / HTTP/1.1\r\n" + b"a:\r\n" * 1000,
        CHUNKED + b"0\r\n" + b"a:\r\n" * 1000,
        CHUNKED + b"1\r\na\r\n" * 2000,
    ],
    ids=["headers", "unfinished headers", "trailers", "chunks"],
)
def test_many_short_headers_trailers_and_chunks_end_the_connection(endless: bytes) -> None:
    """52 MB of headers of four bytes took 1.2 GB, and 60 MB of chunks of one byte held a service for 13 s."""
    with served(app(), http=LimitedProtocol) as url, connected(url) as connection:
        connection.sendall(endless)
        with contextlib.suppress(ConnectionError):  # what it sent is not read to its end
            assert b"".join(iter(lambda: connection.recv(65536), b"")).startswith(b"HTTP/1.1 400")


def test_a_body_may_have_any_number_of_longer_chunks_and_a_request_a_hundred_headers() -> None:
    headers = b"".join(b"X-%d: a\r\n" % number for number in range(connections.MAX_HEADERS - 2))
    chunk = b"40\r\n" + bytes(64) + b"\r\n"
    with served(app(), http=LimitedProtocol) as url, connected(url) as connection:
        for _ in range(2):
            request = CHUNKED[:-2] + headers + b"\r\n" + chunk * 5000 + b"0\r\n\r\n"
            assert answer_to(connection, request) == (200, b"320000")


async def test_a_request_ends_with_its_connection_also_where_another_waits_behind_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """uvicorn tells only the newest: the generation went on, and its answer was a traceback in the log."""
    has_begun, has_ended = threading.Event(), threading.Event()

    async def long(request: Request) -> PlainTextResponse:
        await request.body()
        has_begun.set()
        while (await request.receive())["type"] != "http.disconnect":
            pass
        has_ended.set()
        return PlainTextResponse("nobody reads this")

    first = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
    application = FastAPI(routes=[Route("/", long, methods=["GET", "POST"])])
    with served(application, http=LimitedProtocol) as url:
        with connected(url) as connection:
            connection.sendall(first + b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await until(has_begun.is_set)
        await until(has_ended.is_set)
    assert "Exception in ASGI application" not in caplog.text


async def test_a_client_that_is_gone_before_the_end_of_its_body_is_no_error_of_the_service() -> None:
    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    async def reading(scope: Any, receive: Any, send: Any) -> None:
        await Request(scope, receive).body()

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-length", b"9")]}
    limits = BodyLimits(reading, longest_bytes=100, num_at_once=2)
    await AccessControl(limits, host="127.0.0.1", token=None)(scope, receive, send)


def test_connections_without_the_token_have_a_limit_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """17,500 of them took 0.3 GB, and each 1000 further ones held the event loop for 5 to 9 s."""
    monkeypatch.setattr(connections, "MAX_WITHOUT_TOKEN", 3)
    request = b"GET / HTTP/1.1\r\nHost: localhost\r\n%s\r\n"
    half = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n%s\r\n{"
    ours = b"Authorization: Bearer secret\r\n"
    with contextlib.ExitStack() as opened:
        url = opened.enter_context(served(limited("secret"), http=LimitedProtocol))
        silent, busy_of_ours = (opened.enter_context(connected(url)) for _ in range(2))
        busy_of_ours.sendall(half % ours)
        many_of_ours = [opened.enter_context(connected(url)) for _ in range(6)]
        busy = opened.enter_context(connected(url))
        busy.sendall(half % b"")
        others = []
        for each in many_of_ours:
            assert answer_to(each, request % ours) == (200, b"0")
        for _ in range(5):
            others.append(opened.enter_context(connected(url)))
            assert answer_to(others[-1], request % b"") == (200, b"0")
        for closed in others[:3]:  # idle ones first
            with contextlib.suppress(ConnectionError):
                assert closed.recv(1) == b""
        for still_open in (silent, *many_of_ours):
            assert answer_to(still_open, request % ours) == (200, b"0")
        for still_open in (busy_of_ours, busy):
            assert answer_to(still_open, b"}") == (200, b"2")


@pytest.mark.parametrize("token", [None, "t"])
async def test_an_answer_that_is_not_read_is_given_up_unless_the_request_had_the_token(
    token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 of 33 MB each, whose clients lived and never read, took 1.1 GB for as long as they lived."""
    monkeypatch.setattr(connections, "READ_WITHIN_S", 0.05)
    monkeypatch.setattr(connections, "LEAST_READ_BYTES", MIB)

    async def long(_request: Request) -> PlainTextResponse:
        return PlainTextResponse("a" * (16 * MIB))

    seen: list[LimitedProtocol] = []

    class Seen(LimitedProtocol):
        looks = 0

        def pause_writing(self) -> None:
            super().pause_writing()
            seen.append(self)

        def _await_reader(self) -> None:
            super()._await_reader()
            self.looks += 1

    answering = AccessControl(FastAPI(routes=[Route("/", long)]), host="127.0.0.1", token="t")
    with served(answering, http=Seen) as url, connected(url) as client:
        credential = f"Authorization: Bearer {token}\r\n" if token else ""
        client.sendall(f"GET / HTTP/1.1\r\nHost: localhost\r\n{credential}\r\n".encode())
        await until(lambda: bool(seen) and (seen[0].transport.is_closing() or seen[0].looks > 3))
        assert seen[0].transport.is_closing() == (token is None)
        num_read = 0
        with contextlib.suppress(ConnectionError):
            while num_read < 16 * MIB and (part := client.recv(MIB)):
                num_read += len(part)
        assert (num_read >= 16 * MIB) == (token is not None)


async def test_answers_that_are_read_slowly_have_a_bound_together_unless_the_requests_had_the_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """109 of 11 MB, each read at 80 KiB/s, took 1.1 GB within 100 s."""
    monkeypatch.setattr(connections, "MAX_UNREAD_BYTES", 20 * MIB)

    async def long(_request: Request) -> PlainTextResponse:
        return PlainTextResponse("a" * (16 * MIB))

    seen: list[LimitedProtocol] = []

    class Seen(LimitedProtocol):
        def pause_writing(self) -> None:
            seen.append(self)
            super().pause_writing()

    answering = AccessControl(FastAPI(routes=[Route("/", long)]), host="127.0.0.1", token="t")
    with contextlib.ExitStack() as opened:
        url = opened.enter_context(served(answering, http=Seen))
        for credential in ("Authorization: Bearer t\r\n", "", "", "Authorization: Bearer t\r\n"):
            client = opened.enter_context(connected(url))
            num_before = len(seen)
            client.sendall(f"GET / HTTP/1.1\r\nHost: localhost\r\n{credential}\r\n".encode())
            await until(lambda num_before=num_before: len(seen) > num_before)  # type: ignore[misc]
        await until(lambda: seen[1].transport.is_closing())
        assert [each.transport.is_closing() for each in seen] == [False, True, False, False]


# --- numbers and paths -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", ["0.5", '"0.5"'], ids=["strict", "converted"])
async def test_a_post_of_very_many_groups_is_refused(score: str) -> None:
    """250,000 of them, 44 kB of gzip, held the rollout API for 40 s."""
    one = b'{"tokens":[[1,2]],"masks":[[1,2]],"scores":[%s]}' % score.encode()
    async with api_client() as api:
        for count, status in ((1025, 413), (1024, 200)):
            posted = await api.post("/scored_data_list", content=b"[" + b",".join([one] * count) + b"]")
            assert posted.status_code == status, posted.text
        assert (await api.get("/status")).json()["queue_size"] == 1024


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


async def test_the_status_names_the_newest_of_many_environments_and_says_how_many_more_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout_routes, "MAX_NAMES", 3)
    sizes = {"batch_size": 5}  # never made of groups of 2: the problem names who sends them
    async with api_client() as api:
        await api.post("/register", json={**REGISTRATION, **sizes})
        await api.get("/batch")
        for number in range(12):
            name = f"n{number:02}" + "x" * 250
            await api.post("/register-env", json={**ENVIRONMENT, "desired_name": name})
        status = (await api.get("/status")).json()
        assert [name[:3] for name in status["environments"]] == ["n09", "n10", "n11"]
        assert status["environments_left_out"] == 9
        assert "sends groups of 2 and 4 more" in status["problem"]
    seen = RunStatus(batch_size=8, queued=0, step=1, num_steps=None, environments=("a_0",), num_left_out=9)
    assert [seen.has_environment(name) for name in ("a", "b", None)] == [True, None, True]


def test_the_metrics_name_a_bounded_number_of_environments_and_count_the_others_together() -> None:
    counters = Counters()
    for number in range(2 * MAX_ENVIRONMENTS_NAMED):
        counters.add_group(f"e_{number}", num_sequences=2, num_bytes=10)
    counters.add_group("e_0", num_sequences=2, num_bytes=10)
    for counts in (counters.groups, counters.sequences, counters.bytes):
        assert len(counts) == MAX_ENVIRONMENTS_NAMED + 1
    assert (counters.groups["e_0"], counters.groups["others"]) == (2, MAX_ENVIRONMENTS_NAMED)
    assert counters.bytes["others"] == 10 * MAX_ENVIRONMENTS_NAMED


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/" + "a" * 5000, "File name too long"),
        ("/a\0b", "null"),
        ("a/" * 5000, "File name too long"),
        ("/\ud800", "surrogates"),
    ],
)
def test_a_path_that_no_file_can_have_is_an_error_of_the_client(path: str, why: str) -> None:
    with pytest.raises(DataError, match=why) as refused:
        read_path(path)
    assert len(str(refused.value).encode()) < 300


def test_a_path_where_nothing_is_yet_is_left_to_the_route(tmp_path: Path) -> None:
    assert read_path(str(tmp_path / "none" / "there")) == tmp_path / "none" / "there"
