"""Probes of real sockets, logs, files and commands, above all of those that fail."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from stage import free_ports, until

from grpo_engine.wire.supervisor import ProbeOutcome as P
from grpo_tui.services.base import Probe
from grpo_tui.supervisor import probes
from grpo_tui.supervisor.probes import Answer, LogSearch, Prober, ask

Reply = Callable[[bytes], bytes | None]
"""What a server answers to a request; None for no answer, with the connection left open."""


@asynccontextmanager
async def serving(reply: Reply) -> AsyncIterator[int]:
    """A server that answers each request with bytes of the test's choice; yields its port."""
    writers: list[asyncio.StreamWriter] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        answer = reply(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer or b"")
        if answer is not None and not answer.endswith(b"..."):
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        for writer in writers:
            writer.close()
        server.close()


@asynccontextmanager
async def connecting(prepare: Callable[[socket.socket], None]) -> AsyncIterator[int]:
    """A server that closes each connection after a call of `prepare`; yields its port."""

    async def handle(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        prepare(writer.get_extra_info("socket"))
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def asked(folder: Path, **probe: object) -> Answer:
    return await ask(Probe(**probe), log=folder / "a.log", log_offset=0, cwd=folder, env={})  # type: ignore[arg-type]


async def asked_http(folder: Path, answer: bytes | None, **more: object) -> Answer:
    async with serving(lambda _: answer) as port:
        return await asked(folder, http=f"http://127.0.0.1:{port}/health", **more)


REFUSED = b"HTTP/1.1 503 Service Unavailable\r\n"
JSON = REFUSED + b"Server: uvicorn\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "settings", "answer"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", {}, Answer(P.PASSED, "/health answers 200")),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\nabc...", {}, Answer(P.PASSED, "/health answers 200")),
        (b"HTTP/1.0 404 Not Found\r\n\r\n", {"status": (200, 404)}, Answer(P.PASSED, "/health answers 404")),
        (None, {"timeout_s": 0.05}, Answer(P.SILENT, "/health: no answer in 0.05 s")),
        (b"", {}, Answer(P.HUNG_UP, "/health: connection closed without an answer")),
        (b"SSH-2.0-OpenSSH\r\n", {}, Answer(P.NO_HTTP, "/health does not answer in HTTP")),
        (
            JSON + b'{"detail":"no token for 130 s","engine":"stalled"}',
            {},
            Answer(P.ENGINE_STALLED, "/health answers 503: no token for 130 s"),
        ),
        (JSON + b'{"detail": "cut..."}...', {}, Answer(P.BAD_STATUS, "/health answers 503: cut...")),
        (REFUSED + b"X-Long: ...", {}, Answer(P.BAD_STATUS, "/health answers 503")),
    ],
    ids=[
        *("200", "endless body", "listed status", "silent", "closed", "SSH", "stalled engine"),
        *("endless body of a refusal", "endless headers of a refusal"),
    ],
)
async def test_an_http_probe_reads_the_status(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sent: bytes | None,
    settings: dict[str, object],
    answer: Answer,
) -> None:
    monkeypatch.setattr(probes, "BODY_WITHIN_S", 0.1)
    assert await asked_http(tmp_path, sent, **{"timeout_s": 10, **settings}) == answer


async def test_an_endless_first_line_is_not_http(tmp_path: Path) -> None:
    assert (await asked_http(tmp_path, b"x" * 200_000)).kind is P.NO_HTTP


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"detail":"the model is loading"}', ": the model is loading"),
        (b'{"error": {"message": "no\\n  GPU", "code": 503}}', ": no GPU"),
        (b'{"error": "busy"}', ": busy"),
        (b'{"detail": [{"msg": "not a text"}]}', ""),
        (b'19\r\n{"detail": "in chunks"}\r\n0\r\n\r\n', ": in chunks"),
        (b"<html>503</html>", ""),
        (b'{"detail": "cut of', ""),
        (b'{"detail": "' + b"x" * 9000 + b'"}', ""),
        (b"", ""),
    ],
)
async def test_the_body_of_a_refusal_has_the_reason(tmp_path: Path, body: bytes, reason: str) -> None:
    answer = await asked_http(tmp_path, JSON + body)
    assert answer == Answer(P.BAD_STATUS, f"/health answers 503{reason}")


async def test_a_connection_that_is_reset_counts_as_closed(tmp_path: Path) -> None:
    resets = struct.pack("ii", 1, 0)  # closed with what was sent unread: the peer gets a reset
    async with connecting(lambda peer: peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, resets)) as port:
        answer = await asked(tmp_path, http=f"http://127.0.0.1:{port}/health")
    assert answer == Answer(P.HUNG_UP, "/health: Connection reset by peer")


async def test_a_stopped_process_that_still_holds_its_port_is_silent(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:  # the kernel accepts connections for it
        port = listening.getsockname()[1]
        answer = await asked(tmp_path, http=f"http://127.0.0.1:{port}/health", timeout_s=0.05)
    assert answer.kind is P.SILENT


async def test_a_host_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    assert (await asked(tmp_path, http="http://no-such-host.invalid/health", timeout_s=60)).kind is P.UNASKABLE
    assert (await asked(tmp_path, tcp="no-such-host.invalid:80", timeout_s=60)).kind is P.UNASKABLE


async def test_a_port_is_open_or_closed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert await asked(tmp_path, tcp=f"127.0.0.1:{port}") == Answer(P.PASSED, f"port {port} is open")
    [port] = free_ports(1)
    closed = Answer(P.CLOSED, f"port {port} is closed")
    assert await asked(tmp_path, http=f"http://127.0.0.1:{port}/health") == closed
    assert await asked(tmp_path, tcp=f"127.0.0.1:{port}") == closed


async def test_a_second_page_detects_a_stalled_engine_behind_a_healthy_web_server(tmp_path: Path) -> None:
    def reply(request: bytes) -> bytes | None:
        for path, answer in answers.items():
            if request.startswith(f"GET {path} ".encode()):
                return answer
        raise AssertionError(request)

    ok, gone = b"HTTP/1.1 200 OK\r\n\r\n", b'HTTP/1.1 500 No\r\n\r\n{"detail": "died"}'
    for deep, timeout_s, kind, words in (
        (ok, 60, P.PASSED, "/deep answers 200"),
        (gone, 60, P.ENGINE_STALLED, "/health answers 200, but /deep answers 500: died"),
        (None, 1, P.ENGINE_STALLED, "/health answers 200, but /deep does not answer in 0.5 s"),
    ):
        answers = {"/health": ok, "/deep": deep}
        async with serving(reply) as port:
            pages = {"http": f"http://127.0.0.1:{port}/health", "then_http": f"http://127.0.0.1:{port}/deep"}
            assert await asked(tmp_path, **pages, timeout_s=timeout_s) == Answer(kind, words)


async def test_host_and_query_are_those_of_the_address(tmp_path: Path) -> None:
    requests: list[bytes] = []

    def record(request: bytes) -> bytes:
        requests.append(request)
        return b"HTTP/1.1 200 OK\r\n\r\n"

    async with serving(record) as port:
        answer = await asked(tmp_path, http=f"http://127.0.0.1:{port}/ready?deep=1")
    assert answer == Answer(P.PASSED, "/ready answers 200")
    assert requests[0].startswith(b"GET /ready?deep=1 HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n" % port)


async def test_a_file_passes_when_it_is_there(tmp_path: Path) -> None:
    assert await asked(tmp_path, file="made") == Answer(P.NOT_YET, "made does not exist yet")
    (tmp_path / "made").touch()
    assert await asked(tmp_path, file="made") == Answer(P.PASSED, "made exists")


async def test_a_text_that_a_log_must_have_is_named_without_the_signs_of_a_regular_expression(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"")
    prober = Prober(Probe(log=re.escape("cluster is ready at")), log=log, log_offset=0, cwd=tmp_path, env={})
    assert await prober.ask() == Answer(P.NOT_YET, "log does not contain 'cluster is ready at'")
    prober = Prober(Probe(log=r"port \d+\.$"), log=log, log_offset=0, cwd=tmp_path, env={})
    assert await prober.ask() == Answer(P.NOT_YET, r"log does not contain 'port \d+\.$'")


async def test_only_lines_of_this_attempt_are_searched_in_a_log(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"server up\n")
    prober = Prober(Probe(log="^server up$"), log=log, log_offset=10, cwd=tmp_path, env={})
    assert await prober.ask() == Answer(P.NOT_YET, "log does not contain '^server up$'")
    with log.open("ab") as file:
        file.write(b"\xff\xfe broken \x80 text\nserver")
    assert not (await prober.ask()).passed
    with log.open("ab") as file:
        file.write(b" up")
    assert await prober.ask() == Answer(P.PASSED, "log contains '^server up$'")
    log.write_bytes(b"")
    assert (await prober.ask()).passed  # a line that was found counts forever


async def test_a_progress_bar_ends_its_lines_with_carriage_returns(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"loading 10%\rloading 100%\rdone")
    assert (await asked(tmp_path, log="^loading 100%$")).passed
    assert not (await asked(tmp_path, log="^done loading$")).passed


def test_a_log_is_read_once_and_again_from_its_start_if_it_is_truncated(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"nothing\n" * 1000 + b"ha")
    search = LogSearch(log, 0, "half")
    assert not search.search().passed
    with log.open("r+b") as file:
        file.write(b"half\n")  # where the search has been already
    assert not search.search().passed
    log.write_bytes(b"half\n")
    assert search.search().passed


def test_a_line_longer_than_a_part_does_not_stop_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "MAX_LOG_PART_BYTES", 64)
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * 1000 + b"\nserver up\n" + b"y" * 100)
    assert LogSearch(log, 0, "^server up$").search().passed
    assert not LogSearch(log, 0, "^absent$").search().passed


async def test_a_command_passes_with_exit_code_0_in_its_folder_and_environment(tmp_path: Path) -> None:
    (tmp_path / "here").touch()
    probe = Probe(command=("sh", "-c", "test -e here && exit $CODE"))

    async def exits(code: str) -> Answer:
        return await ask(probe, log=tmp_path / "a.log", log_offset=0, cwd=tmp_path, env={"CODE": code})

    assert await exits("0") == Answer(P.PASSED, "sh exits 0")
    assert await exits("3") == Answer(P.NOT_YET, "sh exits 3")


async def test_a_command_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    answer = await asked(tmp_path, command=("no-such-check",))
    assert answer == Answer(P.UNASKABLE, "cannot run no-such-check: No such file or directory")


async def test_a_cancelled_command_is_killed_with_its_children(tmp_path: Path) -> None:
    hanging = f"trap '' TERM; sleep 1000 & echo $! > {tmp_path}/child; echo $$ > {tmp_path}/leader; wait"
    started = [tmp_path / "child", tmp_path / "leader"]
    asking = asyncio.create_task(asked(tmp_path, command=("sh", "-c", hanging), timeout_s=60))
    await until(lambda: all(path.exists() and path.read_text().endswith("\n") for path in started))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    child, leader = (int(path.read_text()) for path in started)
    await until(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in (child, leader)))


async def test_a_command_that_cannot_be_killed_is_not_awaited_and_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = Probe(command=("sh", "-c", f"echo $$ >> {tmp_path}/started; exec sleep 1000"), timeout_s=0.3)
    prober = Prober(probe, log=tmp_path / "a.log", log_offset=0, cwd=tmp_path, env={})
    with monkeypatch.context() as patched:  # as one that hangs in a driver
        patched.setattr(probes, "_kill_group", lambda process: None)
        patched.setattr(probes, "COMMAND_END_LIMIT_S", 0.0)
        assert await prober.ask() == Answer(P.SILENT, "sh: no answer in 0.3 s")
        words = "sh is still alive after SIGKILL: it hangs in the kernel"
        assert await prober.ask() == Answer(P.SILENT, words)
    started = tmp_path / "started"
    await until(lambda: started.exists() and bool(started.read_text()))
    (pid,) = map(int, started.read_text().split())
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not os.path.exists(f"/proc/{pid}"))


async def test_a_log_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.log").mkdir()
    answer = await asked(tmp_path, log="up")
    assert answer == Answer(P.UNASKABLE, "Is a directory")


async def test_a_command_over_its_time_limit_is_no_answer(tmp_path: Path) -> None:
    answer = await asked(tmp_path, command=("sleep", "1000"), timeout_s=0.05)
    assert answer == Answer(P.SILENT, "sleep: no answer in 0.05 s")
