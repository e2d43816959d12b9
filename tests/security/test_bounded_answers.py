"""Clients of the engine bound what a server may answer: its bytes and the time for all of them."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
import socket
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import httpcore
import httpx
import pytest

from grpo_engine.bridges.transport.server_client import ServerClient, _detail
from grpo_engine.data import source
from grpo_engine.data.source import RolloutApiSource
from grpo_engine.environments import server_queues
from grpo_engine.environments.atropos.observers import Api, Servers
from grpo_engine.environments.clients import RolloutApi
from grpo_engine.environments.peers import read
from grpo_engine.environments.server_queues import ServerQueues
from grpo_engine.environments.tasks import hub
from grpo_engine.errors import PeerError
from grpo_engine.wire import bounded_answers
from grpo_engine.wire.bounded_answers import (
    LEAST_BYTES_PER_S,
    MAX_ANSWER_BYTES,
    MAX_ANSWER_MARKS,
    AnswerTooLong,
    allowing,
)
from grpo_engine.wire.rollouts import EnvironmentStatus, SamplingLimit
from grpo_engine.wire.token_clients import open_async_client, open_client

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b"400\r\n" + b" " * 1024 + b"\r\n"


async def answered(parts: Sequence[bytes], *, within_s: float | None = 5.0, is_async: bool, **request: object) -> bytes:
    """What a client makes of an answer that arrives in these reads."""
    if is_async:
        transport = httpx.AsyncHTTPTransport(verify=False)
        transport._pool = httpcore.AsyncConnectionPool(network_backend=httpcore.AsyncMockBackend(list(parts)))
        async with open_async_client(None, transport=transport, timeout=within_s) as asking:
            return (await asking.get("http://127.0.0.1:1/page?uuid=1", **request)).content  # type: ignore[arg-type]
    pool = httpcore.ConnectionPool(network_backend=httpcore.MockBackend(list(parts)))
    with httpx.HTTPTransport(verify=False) as plain:
        plain._pool = pool
        with open_client(None, transport=plain, timeout=within_s) as client:
            return client.get("http://127.0.0.1:1/page?uuid=1", **request).content  # type: ignore[arg-type]


both = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


@pytest.fixture
def a_second_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which each read of a connection takes a second."""
    clock = itertools.count()
    monkeypatch.setattr(bounded_answers.time, "monotonic", lambda: float(next(clock)))


@both
async def test_an_answer_of_any_parts_within_the_bounds_is_read_whole(is_async: bool) -> None:
    whole = OK + b"Content-Length: 10\r\n\r\n" + b"0123456789"
    assert await answered([bytes([each]) for each in whole], is_async=is_async) == b"0123456789"
    assert await answered([CHUNKED + CHUNK, CHUNK, b"0\r\n\r\n"], is_async=is_async) == b" " * 2048


@both
async def test_an_answer_that_never_ends_is_cut_off_at_the_limit(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_answers, "MAX_ANSWER_BYTES", 3000)
    with pytest.raises(AnswerTooLong, match=r"GET http://127.0.0.1:1/page: .* longer than 3,000 bytes"):
        await answered([CHUNKED, *[CHUNK] * 10_000], is_async=is_async)
    declared = OK + b"Content-Length: 3001\r\n\r\n"
    with pytest.raises(AnswerTooLong):
        await answered([declared], is_async=is_async)  # before anything of it is read
    enough = {"extensions": allowing(5000)}
    assert len(await answered([CHUNKED, *[CHUNK] * 4, b"0\r\n\r\n"], is_async=is_async, **enough)) == 4096


@both
@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "deflate, gzip"])
async def test_an_answer_that_would_grow_by_decompression_is_refused(is_async: bool, encoding: str) -> None:
    bomb = gzip.compress(bytes(10_000_000))
    head = f"Content-Encoding: {encoding}\r\nContent-Length: {len(bomb)}\r\n\r\n".encode()
    with pytest.raises(PeerError, match="the answer is compressed"):
        await answered([OK + head, bomb], is_async=is_async)


@pytest.mark.parametrize("charset", ["undefined", "zlib", "base64", "rot13", "idna", "punycode"])
def test_an_answer_does_not_choose_the_codec_by_which_its_text_is_read(charset: str) -> None:
    headers = {"content-type": f"text/plain; charset={charset}"}
    stub = httpx.MockTransport(lambda request: httpx.Response(400, content=b"a-9 \xff", headers=headers))
    with open_client(None, transport=stub) as client:
        assert client.get("http://127.0.0.1:1/").text == "a-9 \N{REPLACEMENT CHARACTER}"


async def test_an_environment_reads_text_of_answers_as_utf_8_too() -> None:
    headers = {"content-type": "text/plain; charset=zlib"}
    stub = httpx.MockTransport(lambda request: httpx.Response(400, content=b"no", headers=headers))
    async with open_async_client(None, transport=stub) as client:
        assert (await client.get("http://127.0.0.1:1/")).text == "no"


def test_cookies_of_a_server_are_neither_kept_nor_sent_to_another() -> None:
    sent: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers.get("cookie"))
        return httpx.Response(200, headers=[("set-cookie", f"c{number}=1") for number in range(100)])

    with open_client(None, transport=httpx.MockTransport(answer)) as client:
        client.get("http://127.0.0.1:1/")
        client.get("http://127.0.0.1:2/")
        assert (sent, len(client.cookies)) == ([None, None], 0)


@both
async def test_a_redirection_to_what_is_no_url_is_an_answer_as_any_other(is_async: bool) -> None:
    """httpx fails at it with a class of its own, which ended trainers, environments and `check` with a traceback."""
    head = b"HTTP/1.1 302 Found\r\nLocation: http:[\r\nContent-Length: 2\r\n\r\n"
    assert await answered([head, b"no"], is_async=is_async) == b"no"


def test_metrics_of_vllm_are_found_below_their_own_path() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(307, headers={"location": "http://elsewhere/metrics/"})
        return httpx.Response(200, content=b"vllm:num_requests_running 3\n")

    with open_client(None, transport=httpx.MockTransport(answer)) as client:
        assert Servers(client, ["http://127.0.0.1:1"]).num_requests() == 3


@pytest.mark.parametrize(
    "metrics", ["a 1\n", "vllm:num_requests_running 3\n", "vllm:num_requests_running{a=" + "x" * 30 + "}"]
)
def test_metrics_of_a_server_without_end_take_no_memory_of_an_environment(metrics: str) -> None:
    """60 MB of them took the watcher of an Atropos environment more than 1.8 GB and 150 s."""
    body = metrics * ((2 << 20) // len(metrics))
    with open_client(None, transport=httpx.MockTransport(lambda request: httpx.Response(200, text=body))) as client:
        tracemalloc.start()
        assert Servers(client, ["http://127.0.0.1:1"]).num_requests() is None
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 16 << 20  # the body, its text, and lines up to the limit


@both
@pytest.mark.usefixtures("a_second_a_read")
@pytest.mark.parametrize(
    "trickle",
    [
        [bytes([each]) for each in OK + b"X-Long: " + b"x" * 100],
        [OK + b"Content-Length: 100\r\n\r\n", *[b"x"] * 100],
        [CHUNKED, *[b"0"] * 100],
    ],
    ids=["headers", "body", "length of a chunk"],
)
async def test_an_answer_that_trickles_has_the_read_timeout_for_all_of_it(
    trickle: Sequence[bytes], is_async: bool
) -> None:
    with pytest.raises(httpx.ReadTimeout, match=r"GET .*/page: no complete answer in 5 s, of which \d+ bytes arrived"):
        await answered(trickle, is_async=is_async)


@both
@pytest.mark.usefixtures("a_second_a_read")
async def test_a_long_answer_has_a_second_more_for_what_a_slow_network_carries_in_one(is_async: bool) -> None:
    parts = [OK + f"Content-Length: {20 * LEAST_BYTES_PER_S}\r\n\r\n".encode(), *[bytes(LEAST_BYTES_PER_S)] * 20]
    assert len(await answered(parts, is_async=is_async)) == 20 * LEAST_BYTES_PER_S


@both
@pytest.mark.usefixtures("a_second_a_read")
async def test_a_request_without_a_read_timeout_may_be_answered_at_any_time(is_async: bool) -> None:
    parts = [OK + b"Content-Length: 100\r\n\r\n", *[b"x"] * 100]
    assert await answered(parts, is_async=is_async, within_s=None) == b"x" * 100


def test_no_request_may_be_answered_with_less_than_others() -> None:
    assert list(allowing(1, 1).values()) == [MAX_ANSWER_BYTES, MAX_ANSWER_MARKS]


@both
async def test_an_answer_of_more_lists_and_texts_than_was_asked_for_is_cut_off_before_it_is_parsed(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_answers, "MAX_ANSWER_MARKS", 1000)
    lists = b"400\r\n" + b"[]" * 512 + b"\r\n"
    end = b"0\r\n\r\n"
    assert len(await answered([CHUNKED, lists, end], is_async=is_async)) == 1024
    with pytest.raises(AnswerTooLong, match="more than 1,000 brackets, braces and quotes"):
        await answered([CHUNKED, *[lists] * 10_000], is_async=is_async)
    for more in (allowing(1, 2048), allowing(1)):
        assert len(await answered([CHUNKED, *[lists] * 4, end], is_async=is_async, extensions=more)) == 4096


def test_a_batch_of_lists_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_MAX_BATCH_MARKS", 1000)
    monkeypatch.setattr(bounded_answers, "MAX_ANSWER_MARKS", 1000)
    content = b'{"batch": [' + b"[]," * 1000 + b"[]]}"
    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=httpx.ByteStream(content)))
    with (
        RolloutApiSource("http://127.0.0.1:1", transport=transport) as batches,
        pytest.raises(PeerError, match="more than 1,000 brackets"),
    ):
        batches.poll()


# --- clients of a server whose answers never end ---------------------------------------------------------------------


@contextmanager
def endless_server() -> Iterator[str]:
    """Answers every request with a body without an end."""

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(65536)
            connection.sendall(CHUNKED)
            while True:
                connection.sendall(CHUNK)

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def fails_with(call: Callable[[], object]) -> None:
    with pytest.raises(PeerError, match=r"longer than [0-9,]+ bytes: is this the right server"):
        call()


async def test_every_client_ends_at_an_answer_without_end_and_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_answers, "MAX_ANSWER_BYTES", 20_000)
    monkeypatch.setattr(source, "_MAX_BATCH_BYTES", 40_000)
    with endless_server() as url:
        server = ServerClient(url, patience_s=60)
        fails_with(server.info)
        server.close()
        with RolloutApiSource(url) as batches:
            fails_with(batches.wait_until_reachable)
            fails_with(batches.poll)
            batches.resume_after("lease")
            batches.acknowledge()  # only logs
        with open_client(None) as client:
            assert Api(client, url).run_status(4) is None
            assert Api(client, url).num_groups(None) is None
            assert not Servers(client, [url]).are_healthy()
        async with open_async_client(None, base_url=url) as asking:
            with pytest.raises(PeerError, match="longer than 20,000 bytes"):
                await RolloutApi(asking).limits()
            await RolloutApi(asking).disconnect(0)  # only logs


def test_a_hub_whose_headers_trickle_holds_a_task_no_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over, has_sent_all = threading.Event(), threading.Event()

    def serve(listener: socket.socket) -> None:
        with listener.accept()[0] as connection, suppress(OSError):
            connection.sendall(OK + b"X-Long: ")
            for _ in range(1000):
                connection.sendall(b"x")
                if is_over.wait(0.01):
                    return
            has_sent_all.set()

    monkeypatch.setattr(hub, "_HUB_WITHIN_S", 0.1)
    monkeypatch.delitem(sys.modules, "huggingface_hub", raising=False)
    for name in ("HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        hub.set_offline_if_unreachable()
        assert not has_sent_all.is_set()
        assert "HF_HUB_OFFLINE" not in os.environ  # there is one
        is_over.set()
        thread.join()


@pytest.mark.parametrize("content", [b'{"detail": "' + b"x" * 100_000 + b'"}', b'{"detail":' + b"[" * 100_000])
def test_of_what_a_server_says_on_a_refusal_messages_show_the_beginning(content: bytes) -> None:
    words = _detail(httpx.Response(400, content=content))
    assert 100 < len(words) < 2000
    assert words.endswith("…")


@both
async def test_informational_answers_without_end_are_cut_off(is_async: bool) -> None:
    early = b"HTTP/1.1 103 Early Hints\r\n\r\n" * 1000
    with pytest.raises(AnswerTooLong, match=r"GET http://127.0.0.1:1/page: 1,\d+,000 bytes arrived, and no answer yet"):
        await answered([early] * 1000, is_async=is_async)
    whole = OK + b"Content-Length: 2\r\n\r\nok"
    assert await answered([early, early, whole], is_async=is_async) == b"ok"


@pytest.mark.parametrize(
    "metrics",
    [
        b"vllm:num_requests_waiting many",
        b"vllm:num_requests_waiting 1e+e1",
        b"vllm:num_requests_waiting{\n" * 100_000,
        b" " * (MAX_ANSWER_BYTES + 1),
    ],
    ids=["no number", "no number of digits", "open braces", "longer than any answer"],
)
async def test_no_metrics_of_a_server_end_or_hang_an_environment(
    metrics: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_queues, "_ASK_EVERY_S", 0.0)
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=metrics))
    began = time.process_time()  # of this process: another one may have the cores
    async with open_async_client(None, transport=transport, base_url="http://127.0.0.1:1") as asking:
        queues = ServerQueues([asking])
        await queues.watch()  # ends, since no server has the metrics
    assert queues.limit() is SamplingLimit.UNKNOWN
    assert time.process_time() - began < 20


LONG = "1" + "0" * 400


LEASE = "x" * 70_000  # in an address it ended the trainer with another error than ours


@pytest.mark.parametrize("more", [f'"num_dropped": {LONG}', f'"ahead": {{"batches": {LONG}}}', f'"lease": "{LEASE}"'])
def test_counts_that_no_rollout_api_sends_are_no_batch(more: str) -> None:
    answer = f'{{"batch": [{{"tokens": [[1]], "masks": [[1]], "scores": [0]}}], {more}}}'
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=answer))
    with RolloutApiSource("http://127.0.0.1:1", transport=transport) as batches:
        with pytest.raises(PeerError, match="not a batch"):
            batches.poll()
        assert batches.time_metrics() == {}


def test_a_batch_of_many_more_sequences_than_were_asked_for_is_refused() -> None:
    size = 32  # made for an earlier trainer

    def answer(request: httpx.Request) -> httpx.Response:
        group = {"tokens": [[1, 2]] * size, "masks": [[-100, 2]] * size, "scores": [0] * size}
        known = {"/register": {"uuid": 1}, "/batch": {"batch": [group]}}
        return httpx.Response(200, json=known.get(request.url.path, {}))

    with RolloutApiSource("http://127.0.0.1:1", transport=httpx.MockTransport(answer)) as batches:
        registration = {"checkpoint_dir": "", "save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 1}
        batches.register(batch_size=8, max_token_len=64, **registration)
        assert batches.poll() is not None
        size = 60_000  # beside one row of 2048 tokens they took 4.9 GB
        with pytest.raises(PeerError, match="60000 sequences where 8 were asked for"):
            batches.poll()


@pytest.mark.parametrize("field", ["queue_size", "env_weight", "may_start", "current_step"])
def test_counts_that_no_rollout_api_sends_are_no_status(field: str) -> None:
    known = {"current_step": 0, "queue_size": 0, "unallocated_fraction": 1, "self_queue_size": 0, "max_group_size": 1}
    answer = json.dumps({**known, "env_weight": 1.0, field: -math.inf if field == "env_weight" else 10**400})
    with pytest.raises(PeerError, match=field):
        read(EnvironmentStatus, httpx.Response(200, content=answer, request=httpx.Request("GET", "http://there")))
