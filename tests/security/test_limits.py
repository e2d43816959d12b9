"""What one client can take of a service: connections, completions, and paths."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI
from forked import start_forked
from jinja2 import TemplateError
from limited_service import CHUNKED, MIB, app, client_of, length, limited
from pydantic import ValidationError
from rollout_fakes import ENVIRONMENT, REGISTRATION, api_client, served
from rollout_processes import answer_to
from serving import running_server, save_tiny_model
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
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import Completion, Generation
from grpo_engine.server.http.app import Service, create_app
from grpo_engine.server.http.openai_routes import openai_routes
from grpo_engine.server.http.requests import AnswerMaker, add_error_answers, read_path
from grpo_engine.server.prompts import PromptCodec, check_listed_prompts, check_num_completions, max_new_tokens
from grpo_engine.server.torch import engine as torch_engine
from grpo_engine.server.torch.engine import TorchEngine
from grpo_engine.server.vllm import slots
from grpo_engine.server.vllm.stock import StockApp, add_our_errors
from grpo_engine.serving import connections
from grpo_engine.serving.access import AccessControl, Caller, Token, _caller
from grpo_engine.serving.bodies import BodyLimits
from grpo_engine.serving.connections import LimitedProtocol
from grpo_engine.wire.inference import GenerateRequest, GroupMeeting
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


def test_a_server_may_have_as_many_descriptors_as_its_hard_limit_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(connections.resource, "setrlimit", lambda _kind, limits: set_to.append(limits))
    for limits in ((1024, 4096), (1024, connections.resource.RLIM_INFINITY), (4096, 4096)):
        monkeypatch.setattr(connections.resource, "getrlimit", lambda _kind, limits=limits: limits)
        raise_descriptor_limit()
        assert connections.max_connections() == limits[0] * 7 // 8
    assert set_to == [(4096, 4096), (1 << 16, connections.resource.RLIM_INFINITY)]


def attacked_member(rank: int, folder: Path) -> None:
    """A member of groups of two by Gloo; it fails where somebody can connect to one that has met."""
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    before = own_listening_ports()
    place = RankPlace(rank=rank, world_size=2, local_rank=rank, store_file=folder / "ranks")
    meeting = GroupMeeting(epoch=1, store=folder / "weights", size=2, timeout_s=60)
    with contextlib.closing(RankGroup(place, timeout_s=60, num_replicas=2)) as ranks:
        mesh = ranks.mesh()
        group = WeightGroup(meeting, rank=rank, device=torch.device("cpu"))
        ports = own_listening_ports() - before
        assert len(ports) >= 4
        for port in ports:
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), timeout=0.2)
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
def test_nobody_can_connect_to_a_process_group_that_has_met_and_use_up_its_descriptors(tmp_path: Path) -> None:
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


# --- numbers and paths -----------------------------------------------------------------------------------------------


def test_more_completions_than_a_group_could_have_are_refused_with_the_bound() -> None:
    check_num_completions(4096)
    with pytest.raises(DataError, match="n: 100000 completions of one prompt; at most 4096"):
        check_num_completions(100_000)


@pytest.mark.parametrize(
    ("given", "asked", "status"),
    [
        ("no", {"n": 4096, "max_tokens": 60, "logprobs": 20}, 400),
        ("t", {"n": 4096, "max_tokens": 60, "logprobs": 20}, 200),
        ("no", {"n": 4096, "max_tokens": 60, "logprobs": 0}, 200),
        ("no", {"n": 1, "max_tokens": 10**6, "logprobs": 5}, 400),
        ("no", {"n": 1, "max_tokens": 1, "prompt_logprobs": 20, "prompt": {"prompt_token_ids": [1] * 30_000}}, 400),
    ],
)
async def test_a_request_without_the_token_may_ask_for_half_a_million_log_probabilities(
    given: str, asked: dict[str, Any], status: int
) -> None:
    """One for 5 million took 1.2 GB and held the event loop for 6 s, and the run for 22 s."""

    async def generate(request: Request) -> PlainTextResponse:
        params = GenerateRequest.model_validate({"prompt": "a"} | await request.json())
        prompt = [1] if isinstance(params.prompt, str) else params.prompt.prompt_token_ids
        return PlainTextResponse(str(max_new_tokens(prompt, params, max_model_len=10**6, vocabulary=100)))

    ours = FastAPI(routes=[Route("/generate", generate, methods=["POST"])])
    add_error_answers(ours)
    async with client_of(AccessControl(ours, host="127.0.0.1", token="t")) as client:
        answer = await client.post("/generate", json=asked, headers={"Authorization": f"Bearer {given}"})
        assert answer.status_code == status
        if status == 400:
            assert "a request without the token of the run may have 524288" in answer.json()["detail"]


async def test_the_prompts_of_a_list_share_the_log_probabilities_of_a_request_without_the_token() -> None:
    async def completions(request: Request) -> PlainTextResponse:
        asked = GenerateRequest(prompt="", **await request.json())
        for _ in range(4):
            max_new_tokens([1], asked, max_model_len=10**6, vocabulary=100)
        return PlainTextResponse("well")

    ours = FastAPI(routes=[Route("/v1/completions", completions, methods=["POST"])])
    add_error_answers(ours)
    async with client_of(AccessControl(ours, host="127.0.0.1", token="t")) as client:
        for max_tokens, status in ((1 << 17, 200), (1 + (1 << 17), 400)):
            assert (await client.post("/v1/completions", json={"max_tokens": max_tokens})).status_code == status


@pytest.mark.parametrize(
    ("path", "logprobs", "most"),
    [
        ("/v1/completions", 0, 1 << 19),
        ("/v1/chat/completions", 0, 1 << 16),
        ("/v1/responses", 0, 1 << 16),
        ("/v1/chat/completions", None, 1 << 19),
    ],
)
async def test_a_log_probability_counts_eightfold_where_vllm_makes_an_object_of_it(
    path: str, logprobs: int | None, most: int
) -> None:
    """Half a million in one answer of a chat held the event loop for 7 s."""
    stock = FastAPI()
    add_our_errors(stock)

    @stock.post(path)
    async def answered(request: Request) -> str:
        params = GenerateRequest(prompt="", logprobs=logprobs, max_tokens=(await request.json())["max_tokens"])
        return str(max_new_tokens([1], params, max_model_len=10**6, vocabulary=100))

    async with client_of(AccessControl(StockApp(stock), host="127.0.0.1", token="t")) as client:
        assert (await client.post(path, json={"max_tokens": most})).status_code == 200
        answer = await client.post(path, json={"max_tokens": most + 1})
        assert (answer.status_code, f"the run may have {most}:" in answer.text) == (400, True)
        owner = {"Authorization": "Bearer t"}
        assert (await client.post(path, json={"max_tokens": most + 1}, headers=owner)).status_code == 200


async def test_bodies_without_the_token_are_few_at_a_time_in_vllm_and_those_with_it_do_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six texts of 8 MB, which vLLM encodes one after the other, held a text of the run for 93 s and took 6 GB."""
    monkeypatch.setattr(slots, "MAX_WAITING_BODIES", 1)
    stock, may_end = FastAPI(), asyncio.Event()
    inside: list[int] = []

    @stock.post("/tokenize")
    async def tokenize(request: Request) -> None:
        inside.append(len(await request.body()))
        if request.headers.get("authorization") is None:
            await may_end.wait()

    ours = AccessControl(with_errors(StockApp(stock)), host="127.0.0.1", token="t")
    async with client_of(ours) as client:
        long, short = b"a" * MIB, b"b"
        first = asyncio.create_task(client.post("/tokenize", content=long))
        await until(lambda: inside == [MIB])
        second = asyncio.create_task(client.post("/tokenize", content=short))
        await asyncio.sleep(0.01)
        assert (await client.post("/tokenize", content=long, headers={"Authorization": "Bearer t"})).status_code == 200
        assert inside == [MIB, MIB]
        assert (await client.post("/tokenize", content=short)).status_code == 503
        may_end.set()
        assert [(await each).status_code for each in (first, second)] == [200, 200]
        assert inside == [MIB, MIB, 1]


def with_errors(stock: StockApp) -> FastAPI:
    """As the server has it, below its own routes."""
    ours = FastAPI()
    add_error_answers(ours)
    ours.router.default = stock
    return ours


class Letters:
    """A tokenizer whose longest token has 3 characters; its encoding of "x" waits until it is let."""

    chat_template = "letters"

    def __init__(self) -> None:
        self.may_encode = threading.Event()

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "aaa": 1}

    def __deepcopy__(self, memo: dict[int, Any]) -> Letters:
        return self

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert text != "x" or self.may_encode.wait(30)
        return [0] * len(text)

    def apply_chat_template(self, messages: list[dict[str, str]], **options: bool) -> str:
        if messages[0].get("role") == "system":
            raise TemplateError("System role not supported")
        return "".join(message["content"] for message in messages)


async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded() -> None:
    codec = PromptCodec("m", Letters(), max_model_len=4)
    assert await codec.encode("a" * 12) == [0] * 12
    with pytest.raises(DataError, match="15000000 characters; with --max-model-len 4 at most 12"):
        await codec.encode("a" * 15_000_000)
    assert await codec.render_chat([{"content": "aa"}, {"content": "a"}]) == [0] * 3
    for messages in ([{"content": "a" * 13}], [{"content": ""}] * 13):
        with pytest.raises(DataError, match="at most 12"):
            await codec.render_chat(messages)
    with pytest.raises(DataError, match="the chat template of m refuses them: System role not supported"):
        await codec.render_chat([{"role": "system", "content": ""}])


async def test_the_event_loop_goes_on_while_a_text_is_encoded() -> None:
    letters = Letters()
    codec = PromptCodec("m", letters, max_model_len=4)
    encoding = [asyncio.create_task(codec.encode("x")), asyncio.create_task(codec.render_chat([{"content": "x"}]))]
    await asyncio.sleep(0)
    letters.may_encode.set()
    assert await asyncio.gather(*encoding) == [[0], [0]]


async def test_a_text_with_the_token_does_not_wait_for_those_without_it() -> None:
    """After 60 texts of 400 kB without it, it was encoded 47 s later."""
    letters = Letters()
    codec = PromptCodec("m", letters, max_model_len=4)

    async def encode(text: str, token: Token) -> list[int]:
        _caller.set(Caller(token=token))
        return await codec.encode(text)

    without = asyncio.create_task(encode("x", Token.WRONG))
    await asyncio.sleep(0.01)
    assert await asyncio.create_task(encode("a", Token.RIGHT)) == [0]
    assert not without.done()
    letters.may_encode.set()
    assert await without == [0]


@pytest.mark.slow
def test_a_batch_without_the_token_is_cut_for_a_request_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request of 150 bytes held a run for as long as its 64 completions of 8000 tokens took."""
    config = ServerConfig(model_name=str(save_tiny_model(tmp_path, seed=0)), engine="torch", device="cpu", threads=1)
    monkeypatch.setattr(torch_engine, "_YIELD_AFTER_S", 0.0)
    engine = TorchEngine(config, instance="i", environment={})
    engine.start()
    engine.wait_loaded()

    async def generate(token: Token, num_tokens: int) -> Generation:
        _caller.set(Caller(token=token))
        params = GenerateRequest(prompt="", max_tokens=num_tokens, ignore_eos=True)
        return await engine.generate([1], params)

    async def both() -> tuple[Generation, Generation]:
        without = asyncio.create_task(generate(Token.WRONG, 400))
        await until(lambda: bool(engine._running))
        own = await asyncio.create_task(generate(Token.RIGHT, 4))
        generations = await without, own
        await engine.close()
        return generations

    cut, whole = asyncio.run(both())
    assert [each.finish_reason for each in cut.completions] == ["abort"]
    assert 0 < len(cut.completions[0].token_ids) < 400
    assert [len(each.token_ids) for each in whole.completions] == [4]


async def test_generating_health_checks_of_any_number_of_clients_are_one_request_to_the_engine() -> None:
    """They count as requests with the token: 4096 filled the queue of a server that is paused or asleep."""
    engine = OneAtATime()
    config = ServerConfig(model_name="m", engine="torch")
    ours = create_app(Service(engine=engine, config=config, instance="i", token="t"))  # type: ignore[arg-type]
    async with client_of(ours) as client:
        asked = [asyncio.create_task(client.get("/health_generate")) for _ in range(10)]
        await asyncio.sleep(0.05)
        engine.may_answer.set()
        assert [(await each).status_code for each in asked] == [200] * 10
        assert engine.num_asked == 1
        assert (await client.get("/health_generate")).status_code == 200
        assert engine.num_asked == 2


class OneAtATime:
    """An engine that counts what it is asked for, and answers when it is let."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.may_answer = asyncio.Event()

    def check_health(self) -> None:
        pass

    async def encode(self, text: str) -> list[int]:
        return [0]

    async def generate(self, prompt_token_ids: list[int], params: GenerateRequest) -> None:
        self.num_asked += 1
        await self.may_answer.wait()


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("completions", {"prompt": [1], "logprobs": 1}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 1}),
    ],
)
async def test_others_are_answered_while_a_long_answer_to_a_request_without_the_token_is_made(
    path: str, asked: dict[str, Any]
) -> None:
    """With half a million log-probabilities one held the event loop for 7 s, and eight of them a run for a minute."""
    engine = Texts()
    config = ServerConfig(model_name="m", engine="torch")
    ours = create_app(Service(engine=engine, config=config, instance="i", token="t"))  # type: ignore[arg-type]
    async with client_of(ours) as client:
        answering = asyncio.create_task(client.post(f"/v1/{path}", json=asked))
        await until(lambda: bool(engine.asked_for))
        assert (await client.get("/v1/models")).status_code == 200
        engine.may_decode.set()
        assert (await answering).status_code == 200
        assert engine.asked_for == [[7], [8]]  # each token once


class Texts:
    """An engine that answers with a few tokens at once, and whose texts of tokens wait until they are let."""

    logprobs_mode = "raw"

    def __init__(self) -> None:
        self.asked_for: list[list[int]] = []
        self.may_decode = threading.Event()

    async def render_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [0]

    async def generate(self, prompt_token_ids: list[int], params: GenerateRequest) -> Generation:
        made = Completion(
            token_ids=[7, 7],
            logprobs=[-1.0, -1.0],
            top_logprobs=[[(8, -2.0)], [(8, -2.0)]],
            finish_reason="length",
            policy_versions=[0, 0],
            text="",
        )
        return Generation(prompt_token_ids=[0], prompt_logprobs=None, completions=[made])

    def decode(self, token_ids: list[int]) -> str:
        self.asked_for.append(token_ids)
        assert self.may_decode.wait(30)
        return "a"


def test_a_list_of_prompts_counts_with_their_completions_and_a_prompt_of_tokens_is_one() -> None:
    for body in (
        {"prompt": "a", "n": 4096},
        {"prompt": [1] * 5000, "n": 2},
        {"prompt": ["a"] * 4096},
        {"prompt": [[1]] * 1024, "n": 4},
        {"messages": [{"role": "user", "content": "a"}] * 5000},
        {"prompt": [], "n": "many"},
    ):
        check_listed_prompts(body)
    for body in (
        {"prompt": ["a"] * 4097},
        {"prompt": [[1]] * 1025, "n": 4},
        {"prompt": [1, "a"] * 2049},
        {"prompt_embeds": ["a"] * 4097},
        {"messages": [[{"role": "user", "content": "a"}]] * 2049, "n": 2},
    ):
        with pytest.raises(DataError, match="at most 4096 completions are made"):
            check_listed_prompts(body)


async def test_both_engines_refuse_a_long_list_of_prompts_with_400() -> None:
    ours, vllms = FastAPI(), FastAPI()
    add_error_answers(ours)
    ours.include_router(openai_routes(None, ServerConfig(model_name="m"), AnswerMaker()), prefix="/v1")  # type: ignore[arg-type]
    vllms.router.routes.append(Route("/v1/completions", length, methods=["POST"]))
    for app_of_engine in (ours, StockApp(vllms)):
        async with client_of(app_of_engine) as client:
            refused = await client.post("/v1/completions", json={"prompt": [[1]] * 3_000_0, "n": 2})
            assert (refused.status_code, "30000 prompts" in refused.json()["detail"]) == (400, True)
    async with client_of(StockApp(vllms)) as client:
        body = b'{"prompt": ["a", "b"]}'
        assert (await client.post("/v1/completions", content=body)).text == str(len(body))  # passed on whole
        assert (await client.post("/v1/completions", content=b"[" * 100_000)).text == "100000"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("presence_penalty", 1e308), ("frequency_penalty", -2.1), ("repetition_penalty", 1e-320)),
        *(("repetition_penalty", 1e308), ("temperature", 1e308)),
        *(("stop", ["x"] * 65), ("stop", "x" * 1025), ("stop", ["x" * 1025]), ("stop_token_ids", [1] * 1025)),
    ],
)
def test_numbers_that_overflow_the_logits_and_endless_lists_of_ends_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        GenerateRequest.model_validate({"prompt": "a", field: value})


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


def logprobs_requests(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Requests for log-probabilities of so many tokens at each position."""
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "logprobs": True, "top_logprobs": count}
    return [
        ("/generate", {"prompt": "ab", "max_tokens": 1, "logprobs": count}),
        ("/generate", {"prompt": "ab", "max_tokens": 1, "prompt_logprobs": count}),
        ("/v1/completions", {"prompt": "ab", "max_tokens": 1, "logprobs": count}),
        ("/v1/chat/completions", chat),
    ]


@pytest.mark.parametrize("asked", [{"logprobs": 21}, {"prompt_logprobs": 21}])
def test_log_probabilities_of_more_tokens_than_vllm_answers_are_refused(asked: dict[str, int]) -> None:
    def room(**more: int) -> int:
        return max_new_tokens([1], GenerateRequest(prompt="", **asked), max_model_len=8, vocabulary=50_000, **more)

    with pytest.raises(DataError, match="logprobs: 21, but this server has at most 20 at each token"):
        room()
    with pytest.raises(DataError, match="at most 5"):
        room(max_logprobs=5)
    assert room(max_logprobs=21) == room(max_logprobs=-1) == 7  # set by the operator


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
        requests += logprobs_requests(21)
        answers = [(path, client.post(path, json=body)) for path, body in requests]
        assert [(path, answer.status_code) for path, answer in answers] == [(path, 400) for path, _ in requests]
        assert all(len(answer.json()["detail"]) < 300 for _, answer in answers)
        for path, body in logprobs_requests(20):
            assert (path, client.post(path, json=body).status_code) == (path, 200)
