"""Clients that are killed, hang, send a wrong length or other HTTP: none gets a 500, and other clients are served.

One process for all tests: after each it accepts a group and delivers it, and at the end its log has no traceback.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from rollout_fakes import ENVIRONMENT, REGISTRATION, group, tags
from rollout_processes import ApiProcess, answer_to, api_process, read_answer

pytestmark = pytest.mark.slow

GOOD = json.dumps(group(4, tag=7)).encode()


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiProcess]:
    with api_process(
        tmp_path_factory.mktemp("broken_clients"), "--log-level", "warning", "--max-body-bytes", "33554432"
    ) as api:
        yield api


Api = tuple[ApiProcess, httpx.Client]


@pytest.fixture
def api(process: ApiProcess) -> Iterator[Api]:
    """An API with a run that just began; it still works when the test is over."""
    with process.client() as http:
        http.get("/reset_data", params={"force": "true"})
        http.post("/register", json=REGISTRATION)
        http.get("/batch")
        yield process, http
        http.get("/reset_data", params={"force": "true"})
        http.post("/register", json=REGISTRATION)
        assert http.post("/scored_data", json=group(4, tag=42)).status_code == 200
        assert tags(http.get("/batch").json()["batch"]) == [42]


def post_head(length: int | str, *more: str) -> bytes:
    lines = ["POST /scored_data HTTP/1.1", "Host: localhost", f"Content-Length: {length}", *more]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def large(tag: int) -> dict[str, Any]:
    """A group larger than the socket buffers between two processes."""
    return group(4, tag=tag, messages=[[{"role": "user", "content": "x" * 3_000_000}]] * 4)


def test_a_batch_of_a_trainer_killed_while_reading_goes_to_the_next(
    api: Api,
) -> None:
    process, http = api
    for tag in (10, 11):
        http.post("/scored_data", json=large(tag))
    for times in range(3):
        with process.connection(receive_bytes=4096) as killed:
            killed.sendall(b"GET /batch?ack= HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert killed.recv(1000).startswith(b"HTTP/1.1 200 ")
            if times == 1:  # reset in place of an orderly end
                killed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    first = http.get("/batch", params={"ack": ""}).json()
    assert tags(first["batch"]) == [10]
    assert tags(http.get("/batch", params={"ack": first["lease"]}).json()["batch"]) == [11]
    assert http.get("/status").json()["current_step"] == 2


@pytest.mark.parametrize("query", ["ack=&wait_s=20", "wait_s=20"], ids=["ours", "stock"])
def test_a_trainer_killed_while_its_request_is_held_loses_no_batch(api: Api, query: str) -> None:
    process, http = api
    for _ in range(5):
        with process.connection() as killed:
            killed.sendall(f"GET /batch?{query} HTTP/1.1\r\nHost: localhost\r\nUser-Agent: other\r\n\r\n".encode())
    http.post("/scored_data", json=group(4, tag=10))
    assert tags(http.get("/batch", params={"ack": "", "wait_s": 10}).json()["batch"]) == [10]


def test_an_environment_killed_during_a_post_leaves_no_partial_group(
    api: Api,
) -> None:
    process, http = api
    for cut in range(0, len(GOOD), 7):
        with process.connection() as killed:
            killed.sendall(post_head(len(GOOD)) + GOOD[:cut])
    assert http.get("/status").json()["queue_size"] == 0


def test_a_reset_during_requests_causes_no_server_error(api: Api) -> None:
    process, http = api
    env_id = http.post("/register-env", json=ENVIRONMENT).json()["env_id"]
    http.post("/scored_data", json=group(4, tag=10))
    lease = http.get("/batch", params={"ack": ""}).json()["lease"]
    with process.connection() as trainer, process.connection() as environment, process.connection() as posting:
        trainer.sendall(f"GET /batch?ack={lease}&wait_s=20 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        question = json.dumps({"env_id": env_id, "wait_s": 20, "current_step": 1, "queue_size": 0}).encode()
        environment.sendall(
            b"GET /status-env HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(question)
        )
        environment.sendall(question)
        posting.sendall(post_head(len(GOOD)) + GOOD[:50])
        assert http.get("/reset_data", params={"force": "true"}).status_code == 200
        posting.sendall(GOOD[50:])
        assert read_answer(posting)[0] == 200
        assert read_answer(environment)[0] in (200, 404)
        status, body = read_answer(trainer)
        assert status == 200
        assert json.loads(body)["batch"] in (None, [])
    assert http.post("/acknowledge", params={"lease": lease}).status_code == 200
    assert http.get("/batch", params={"ack": lease}).json()["status"] == "error"
    assert http.request("GET", "/status-env", json={"env_id": env_id}).status_code == 404
    assert http.get("/status").json()["queue_size"] == 1


def test_concurrent_registrations_leave_one_run(api: Api) -> None:
    process, http = api
    http.post("/scored_data", json=group(8, tag=10))
    connections = [process.connection() for _ in range(20)]
    for number, connection in enumerate(connections):
        body = json.dumps({**REGISTRATION, "batch_size": 8, "wandb_group": f"number {number}"}).encode()
        head = b"POST /register HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n" % len(body)
        connection.sendall(head + b"Content-Type: application/json\r\n\r\n" + body)
    assert [read_answer(connection)[0] for connection in connections] == [200] * 20
    for connection in connections:
        connection.close()
    assert http.get("/wandb_info").json()["group"].startswith("number ")
    assert tags(http.get("/batch").json()["batch"]) == [10]


def test_clients_that_hang_in_a_request_do_not_block_others(api: Api) -> None:
    process, http = api
    halves = [b"", b"G", b"POST /scored_data HTTP/1.1\r\nHo", post_head(10_000), post_head(10_000) + b'{"tokens": [[1']
    with contextlib.ExitStack() as stack:
        for number in range(100):
            hanging = stack.enter_context(process.connection())
            hanging.sendall(halves[number % len(halves)])
        for tag in range(10, 20):
            assert http.post("/scored_data", json=group(4, tag=tag)).status_code == 200
            assert tags(http.get("/batch").json()["batch"]) == [tag]


def test_three_hundred_idle_connections_do_not_block_others(api: Api) -> None:
    process, http = api
    before = process.num_files()
    with contextlib.ExitStack() as stack:
        for number in range(300):
            idle = stack.enter_context(process.connection())
            if number % 2:
                assert answer_to(idle, b"GET /info HTTP/1.1\r\nHost: localhost\r\n\r\n")[0] == 200
        assert http.post("/scored_data", json=group(4, tag=10)).status_code == 200
        assert tags(http.get("/batch").json()["batch"]) == [10]
    while process.num_files() > before + 10:  # until they are closed
        assert http.get("/info").status_code == 200


@pytest.mark.parametrize("length", ["-1", "abc", "1e3", "", "9" * 30, "12, 13", "0x10"])
def test_an_invalid_content_length_is_refused(api: Api, length: str) -> None:
    process, _ = api
    with process.connection() as connection:
        status, _ = answer_to(connection, post_head(length) + GOOD)
        assert status in (0, 400, 413, 422)


def test_a_body_shorter_or_longer_than_its_content_length_is_refused(api: Api) -> None:
    process, http = api
    with process.connection() as connection:
        connection.sendall(post_head(len(GOOD) + 100) + GOOD)
        connection.shutdown(socket.SHUT_WR)
        assert read_answer(connection)[0] in (0, 400)
    with process.connection() as connection:
        assert answer_to(connection, post_head(len(GOOD) - 10) + GOOD)[0] in (400, 422)
        assert read_answer(connection)[0] in (0, 400)
    assert http.get("/status").json()["queue_size"] == 0


def test_chunked_bodies_are_read_and_broken_ones_refused(api: Api) -> None:
    process, http = api
    head = b"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(GOOD[at : at + 9]), GOOD[at : at + 9]) for at in range(0, len(GOOD), 9))
    with process.connection() as connection:
        assert answer_to(connection, head + chunks + b"0\r\n\r\n")[0] == 200
    for broken in (b"zz\r\n", b"-5\r\nhello\r\n", b"fffffffffffffffff\r\n", b"5\r\nhello world\r\n0\r\n\r\n"):
        with process.connection() as connection:
            assert answer_to(connection, head + broken)[0] in (0, 400, 413, 422)
    both = head.replace(b"\r\n\r\n", b"\r\nContent-Length: 3\r\n\r\n")
    with process.connection() as connection:  # two lengths: a way to smuggle requests
        assert answer_to(connection, both + chunks + b"0\r\n\r\n")[0] in (0, 200, 400)
    assert http.get("/status").json()["queue_size"] in (1, 2)


def test_an_expect_continue_header_is_answered(api: Api) -> None:
    process, _ = api
    with process.connection() as connection:
        connection.sendall(post_head(len(GOOD), "Expect: 100-continue"))
        assert connection.recv(1000).startswith(b"HTTP/1.1 100 ")
        assert answer_to(connection, GOOD)[0] == 200


def test_http_1_0_requests_are_answered(api: Api) -> None:
    process, _ = api
    with process.connection() as connection:
        assert answer_to(connection, post_head(len(GOOD)).replace(b"HTTP/1.1", b"HTTP/1.0") + GOOD)[0] == 200
    with process.connection() as connection:
        status, body = answer_to(connection, b"GET /info HTTP/1.0\r\n\r\n")
        assert (status, json.loads(body)["batch_size"]) == (200, 4)
        assert connection.recv(1) == b""


@pytest.mark.parametrize(
    "request_line",
    [
        *(f"{method} /batch HTTP/1.1" for method in ("PUT", "PATCH", "DELETE", "TRACE", "FOO", "get", "OPTIONS")),
        *(f"GET {path} HTTP/1.1" for path in ("/", "//", "/..%2f..%2fetc/passwd", "/%00", "/%ff", "/batch/", "*")),
        *(
            f"GET {path} HTTP/1.1"
            for path in ("/evaluations/%0a%0d", "/batch?ack=%00", "/batch?ack=%ff", "/?" + "a" * 9_000)
        ),
        *(
            f"GET /batch?{query} HTTP/1.1"
            for query in ("wait_s=nan", "wait_s=inf", "wait_s=-1", "wait_s=x", "ack=&ack=a")
        ),
        *(f"GET /batch?policy_version={version} HTTP/1.1" for version in ("-1", "x", "9" * 400, "9" * 5_000)),
        *(f"GET /batch?uuid={uuid} HTTP/1.1" for uuid in ("-1", "x", "9" * 400)),
        *(f"GET /status-env?env_id={env_id} HTTP/1.1" for env_id in ("", "x", "nan", "9" * 400, "%00", "1&env_id=2")),
        *(
            "GET http://elsewhere.example/batch HTTP/1.1",
            "CONNECT elsewhere.example:443 HTTP/1.1",
            "GET /batch HTTP/9.9",
        ),
        *("GET /batch", "", "\x00\x01\x02", "\x16\x03\x01\x02\x00\x01", "PRI * HTTP/2.0", "GET /é HTTP/1.1"),
    ],
    ids=lambda line: repr(line[:40]),
)
def test_no_request_line_causes_a_server_error(api: Api, request_line: str) -> None:
    process, _ = api
    with process.connection() as connection:
        connection.settimeout(3)
        with contextlib.suppress(TimeoutError):  # it may wait for more
            status, _ = answer_to(connection, request_line.encode("latin-1") + b"\r\nHost: localhost\r\n\r\n")
            assert status < 500 or status == 505


@pytest.mark.parametrize(
    "header",
    [
        *("Idempotency-Key: ", "Idempotency-Key: :", "Idempotency-Key: a:", "Idempotency-Key: " + "a" * 20_000 + ":1"),
        *("Idempotency-Key: \xff:\xff", "Idempotency-Key: a:b:c", "Content-Type: nonsense", "Content-Type: \xff"),
        *("Content-Type: application/json; charset=utf-16", "Accept-Encoding: \xff", "Accept: nothing/at-all"),
        *("Content-Encoding: \xff", "Content-Encoding: gzip;q=1", "Origin: null", "Origin: \xff", "Host: other"),
        *("Authorization: Bearer \xff", "Authorization: " + "x" * 20_000, "User-Agent: \xff\xfe", "User-Agent:"),
        *(
            "Connection: upgrade\r\nUpgrade: websocket",
            "Connection: upgrade\r\nUpgrade: h2c",
            "Transfer-Encoding: gzip",
        ),
        *(": nameless", "name less", "X: " + "y" * 200_000, "\r\n".join(f"X-{number}: y" for number in range(500))),
    ],
    ids=lambda header: repr(header[:40]),
)
def test_no_header_causes_a_server_error(api: Api, header: str) -> None:
    process, _ = api
    with process.connection() as connection:
        assert answer_to(connection, post_head(len(GOOD), header) + GOOD)[0] < 500
    with process.connection() as connection:
        asking = b"GET /batch HTTP/1.1\r\nHost: localhost\r\n" + header.encode("latin-1") + b"\r\n\r\n"
        assert answer_to(connection, asking)[0] < 500


def test_ten_pipelined_requests_are_answered(api: Api) -> None:
    process, http = api
    with process.connection() as connection:
        connection.sendall((post_head(len(GOOD)) + GOOD) * 10)
        received = b""
        while received.count(b"HTTP/1.1 200 ") < 10:
            received += (part := connection.recv(65536))
            assert part, "the connection was closed"
    assert http.get("/status").json()["queue_size"] == 10
