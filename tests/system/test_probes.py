"""Probes against real sockets, logs, files and commands, the unhelpful ones above all."""

from __future__ import annotations

import asyncio
import os
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
"""What a server says to a request; None for nothing at all, with the connection left open."""


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
async def connecting(greet: Callable[[socket.socket], None]) -> AsyncIterator[int]:
    """A server that closes each connection once it is there and greeted; yields its port."""

    async def handle(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greet(writer.get_extra_info("socket"))
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


async def test_a_page_that_answers_200_passes(tmp_path: Path) -> None:
    assert await asked_http(tmp_path, b"HTTP/1.1 200 OK\r\n\r\n") == Answer(P.PASSED, "/health answers 200")


async def test_another_status_is_told(tmp_path: Path) -> None:
    answer = await asked_http(tmp_path, b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
    assert answer == Answer(P.BAD_STATUS, "/health answers 503")


async def test_the_wanted_statuses_are_a_list(tmp_path: Path) -> None:
    answer = await asked_http(tmp_path, b"HTTP/1.0 404 Not Found\r\n\r\n", status=(200, 404))
    assert answer == Answer(P.PASSED, "/health answers 404")


async def test_a_body_that_never_ends_does_not_hide_the_status(tmp_path: Path) -> None:
    answer = await asked_http(tmp_path, b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\nabc...", timeout_s=10)
    assert answer.passed


async def test_a_server_that_accepts_and_says_nothing_is_no_answer(tmp_path: Path) -> None:
    answer = await asked_http(tmp_path, None, timeout_s=0.05)
    assert answer == Answer(P.SILENT, "/health: no answer in 0.05 s")


async def test_a_server_that_hangs_up_is_told_from_one_that_speaks_no_http(tmp_path: Path) -> None:
    hung_up = await asked_http(tmp_path, b"")
    assert hung_up == Answer(P.HUNG_UP, "/health: connection closed without an answer")
    assert await asked_http(tmp_path, b"SSH-2.0-OpenSSH\r\n") == Answer(P.NO_HTTP, "/health does not answer in HTTP")
    assert (await asked_http(tmp_path, b"x" * 200_000)).kind is P.NO_HTTP


async def test_a_connection_that_is_reset_is_hung_up(tmp_path: Path) -> None:
    resets = struct.pack("ii", 1, 0)  # closed with what was sent unread: the peer gets a reset
    async with connecting(lambda peer: peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, resets)) as port:
        answer = await asked(tmp_path, http=f"http://127.0.0.1:{port}/health")
    assert answer == Answer(P.HUNG_UP, "/health: Connection reset by peer")


async def test_a_stopped_process_that_still_holds_its_port_is_silent(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:  # the kernel accepts in its place
        port = listening.getsockname()[1]
        answer = await asked(tmp_path, http=f"http://127.0.0.1:{port}/health", timeout_s=0.05)
    assert answer.kind is P.SILENT


async def test_a_host_that_does_not_exist_cannot_be_asked(tmp_path: Path) -> None:
    assert (await asked(tmp_path, http="http://no-such-host.invalid/health", timeout_s=60)).kind is P.UNASKABLE
    assert (await asked(tmp_path, tcp="no-such-host.invalid:80", timeout_s=60)).kind is P.UNASKABLE


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"detail":"the model is loading"}', ": the model is loading"),
        ('{"error": {"message": "no\\n  GPU", "code": 503}}', ": no GPU"),
        ('{"error": "busy"}', ": busy"),
        ('{"detail": [{"msg": "not for people"}]}', ""),
        ('19\r\n{"detail": "in chunks"}\r\n0\r\n\r\n', ": in chunks"),
        ("<html>503</html>", ""),
        ('{"detail": "cut of', ""),
        ('{"detail": "' + "x" * 9000 + '"}', ""),
        ("", ""),
    ],
)
async def test_the_body_of_a_refusal_tells_the_reason(tmp_path: Path, body: str, reason: str) -> None:
    answer = await asked_http(tmp_path, b"HTTP/1.1 503 No\r\nServer: uvicorn\r\n\r\n" + body.encode())
    assert answer == Answer(P.BAD_STATUS, f"/health answers 503{reason}")


async def test_a_refusal_whose_body_hangs_is_a_refusal_with_what_came_of_it(tmp_path: Path) -> None:
    refused = b"HTTP/1.1 503 No\r\n\r\n"
    answer = await asked_http(tmp_path, refused + b'{"detail": "cut..."}...', timeout_s=0.2)
    assert answer == Answer(P.BAD_STATUS, "/health answers 503: cut...")
    answer = await asked_http(tmp_path, b"HTTP/1.1 503 No\r\nX-Long: ...", timeout_s=0.2)
    assert answer == Answer(P.BAD_STATUS, "/health answers 503")


async def test_a_web_server_whose_engine_is_stalled_is_told_from_one_that_loads(tmp_path: Path) -> None:
    body = b'{"detail":"no token for 130 s","engine":"stalled"}'
    answer = await asked_http(tmp_path, b"HTTP/1.1 503 Service Unavailable\r\n\r\n" + body)
    assert answer == Answer(P.ENGINE_STALLED, "/health answers 503: no token for 130 s")


async def test_a_closed_port_is_told_for_http_and_tcp(tmp_path: Path) -> None:
    [port] = free_ports(1)
    closed = Answer(P.CLOSED, f"port {port} is closed")
    assert await asked(tmp_path, http=f"http://127.0.0.1:{port}/health") == closed
    assert await asked(tmp_path, tcp=f"127.0.0.1:{port}") == closed


async def test_a_web_server_that_is_well_over_an_engine_that_is_not(tmp_path: Path) -> None:
    def reply(request: bytes) -> bytes | None:
        for path, answer in answers.items():
            if request.startswith(f"GET {path} ".encode()):
                return answer
        raise AssertionError(request)

    ok, gone = b"HTTP/1.1 200 OK\r\n\r\n", b'HTTP/1.1 500 No\r\n\r\n{"detail": "died"}'
    for deep, kind, words in (
        (ok, P.PASSED, "/deep answers 200"),
        (gone, P.ENGINE_STALLED, "/health answers 200, but /deep answers 500: died"),
        (None, P.ENGINE_STALLED, "/health answers 200, but /deep does not answer in 0.1 s"),
    ):
        answers = {"/health": ok, "/deep": deep}
        async with serving(reply) as port:
            pages = {"http": f"http://127.0.0.1:{port}/health", "then_http": f"http://127.0.0.1:{port}/deep"}
            assert await asked(tmp_path, **pages, timeout_s=0.2) == Answer(kind, words)


async def test_an_open_port_passes(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert await asked(tmp_path, tcp=f"127.0.0.1:{port}") == Answer(P.PASSED, f"port {port} is open")


async def test_host_and_query_are_sent_as_the_address_says(tmp_path: Path) -> None:
    requests: list[bytes] = []

    def note(request: bytes) -> bytes:
        requests.append(request)
        return b"HTTP/1.1 200 OK\r\n\r\n"

    async with serving(note) as port:
        answer = await asked(tmp_path, http=f"http://127.0.0.1:{port}/ready?deep=1")
    assert answer == Answer(P.PASSED, "/ready answers 200")
    assert requests[0].startswith(b"GET /ready?deep=1 HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n" % port)


async def test_a_file_passes_when_it_is_there(tmp_path: Path) -> None:
    assert await asked(tmp_path, file="made") == Answer(P.NOT_YET, "made does not exist yet")
    (tmp_path / "made").touch()
    assert await asked(tmp_path, file="made") == Answer(P.PASSED, "made exists")


async def test_a_log_is_searched_for_lines_of_this_attempt_alone(tmp_path: Path) -> None:
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
    assert (await prober.ask()).passed  # once said is said


async def test_a_log_that_does_not_exist_yet_says_nothing(tmp_path: Path) -> None:
    assert not (await asked(tmp_path, log="up")).passed


async def test_a_progress_bar_ends_its_lines_with_carriage_returns(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"loading 10%\rloading 100%\rdone")
    assert (await asked(tmp_path, log="^loading 100%$")).passed
    assert not (await asked(tmp_path, log="^done loading$")).passed


def test_what_was_searched_is_not_read_again_and_a_shrunken_log_is_read_from_its_start(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"nothing\n" * 1000 + b"ha")
    search = LogSearch(log, 0, "half")
    assert not search.search().passed
    with log.open("r+b") as file:
        file.write(b"half\n")  # written over what was read: nobody looks there again
    assert not search.search().passed
    log.write_bytes(b"half\n")
    assert search.search().passed


def test_a_line_longer_than_a_part_is_given_up_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    answer = await asked(tmp_path, command=("no-such-check",))
    assert answer == Answer(P.UNASKABLE, "cannot run no-such-check: No such file or directory")


async def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    hanging = f"trap '' TERM; sleep 1000 & echo $! > {tmp_path}/child; echo $$ > {tmp_path}/leader; wait"
    started = [tmp_path / "child", tmp_path / "leader"]
    asking = asyncio.create_task(asked(tmp_path, command=("sh", "-c", hanging), timeout_s=60))
    await until(lambda: all(path.exists() and path.read_text().endswith("\n") for path in started))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    child, leader = (int(path.read_text()) for path in started)
    await until(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in (child, leader)))


async def test_a_command_that_does_not_end_holds_up_nobody_and_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = Probe(command=("sh", "-c", f"echo $$ >> {tmp_path}/started; exec sleep 1000"), timeout_s=0.3)
    prober = Prober(probe, log=tmp_path / "a.log", log_offset=0, cwd=tmp_path, env={})
    with monkeypatch.context() as patched:  # as deaf to SIGKILL as one that hangs in a driver
        patched.setattr(probes, "_kill_group", lambda process: None)
        patched.setattr(probes, "COMMAND_END_LIMIT_S", 0.0)
        assert await prober.ask() == Answer(P.SILENT, "sh: no answer in 0.3 s")
        words = "sh is still alive after SIGKILL: it hangs in the kernel"
        assert await prober.ask() == Answer(P.SILENT, words)
    (pid,) = map(int, (tmp_path / "started").read_text().split())
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not os.path.exists(f"/proc/{pid}"))


async def test_what_may_not_be_read_cannot_be_asked(tmp_path: Path) -> None:
    (tmp_path / "a.log").mkdir()
    answer = await asked(tmp_path, log="up")
    assert answer == Answer(P.UNASKABLE, "Is a directory")


async def test_a_command_over_its_time_limit_is_no_answer(tmp_path: Path) -> None:
    answer = await asked(tmp_path, command=("sleep", "1000"), timeout_s=0.05)
    assert answer == Answer(P.SILENT, "sleep: no answer in 0.05 s")
