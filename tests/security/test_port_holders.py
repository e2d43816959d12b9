"""Another user's process on the port of a service: it gets no token, is never ready, and comes too late."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from ports import free_port
from rollout_fakes import served
from starlette.types import Receive, Scope, Send
from workplace import until

from grpo_engine.bridges.transport.server_client import ServerClient
from grpo_engine.data.source import RolloutApiSource
from grpo_engine.errors import ConfigError, PeerUnavailable
from grpo_engine.serving import listening
from grpo_engine.serving.listening import accept, plain_server, refuse_connections, start_listening, take_port
from grpo_engine.wire import socket_diag, tcp_sockets, token_clients
from grpo_engine.wire.supervisor import ProbeOutcome
from grpo_engine.wire.tcp_sockets import (
    client_socket,
    connected_stranger,
    listening_sockets,
    own_listening_ports,
    own_sockets,
    stranger_behind,
    user_name,
)
from grpo_engine.wire.token_clients import ForeignListener, _why_unsafe, open_async_client, open_client
from grpo_tui.services.base import Probe
from grpo_tui.supervisor.keeper.proc import command_line
from grpo_tui.supervisor.probes import ask

ME, OTHER = 1000, 1001
HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
V4, V4_ANY, V6_ANY = "0100007F:2329", "00000000:2329", f"{'0' * 32}:2329"
V4_CLIENT, MAPPED_CLIENT = "0100007F:9000", "0000000000000000FFFF00000100007F:9000"
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
SQUATTER = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
listener = socket.create_server(("127.0.0.1", int(sys.argv[2])))
print("up", flush=True)
while True:
    connection, _ = listener.accept()
    connection.settimeout(30)
    print(connection.recv(65536), flush=True)
    connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n{}")
"""


def row(local: str, uid: int, state: str = "0A", remote: str = "00000000:0000") -> str:
    return (
        f"   0: {local} {remote} {state} 00000000:00000000 00:00000000 00000000  {uid}        0 119 1 0 100 0 0 10 0\n"
    )


def seen(tmp_path: Path, *rows: str, peer: str = "127.0.0.1", own: tuple[str, int] | None = None) -> int | None:
    """The uid of the stranger at port 9001 by these tables; a row of an IPv6 address is in the table of IPv6."""
    for name, is_long in (("tcp", False), ("tcp6", True)):
        mine = [each for each in rows if (len(each.split()[1]) > 20) == is_long]
        (tmp_path / name).write_text(HEADER + "".join(mine))
    found = stranger_behind((peer, 9001), own, tables=tmp_path)
    return None if found is None else found.uid


HOARDER = """
import os, signal, socket, sys
os.setuid(int(sys.argv[1]))
signal.alarm(60)
listener = socket.create_server(("127.0.0.1", int(sys.argv[2])))
null = os.open("/dev/null", os.O_RDONLY)
while os.dup(null) < 900:
    pass
for _ in range(20):
    if os.fork() == 0:
        signal.alarm(60)
        signal.pause()
print("up", flush=True)
signal.pause()
"""
"""Has a port, in 21 processes with many descriptors."""


@as_root
@pytest.mark.parametrize(("within_s", "num_found"), [(60.0, 4), (0.0, 0)])
def test_descriptors_of_another_user_are_not_looked_at_without_end(
    within_s: float, num_found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 million of them, in 400 processes, took each look who has a port 32 s, a refused start a minute."""
    read, num_read = tcp_sockets._link, 0

    def count(path: str) -> str:
        nonlocal num_read
        link = read(path)
        num_read += link == "/dev/null"
        return link

    port = free_port()
    words = [sys.executable, "-c", HOARDER, str(NOBODY), str(port)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            (held,) = listening_sockets([port])
            monkeypatch.setattr(tcp_sockets, "_link", count)
            monkeypatch.setattr(tcp_sockets, "_OTHERS_WITHIN_S", within_s)
            found = tcp_sockets.socket_owners([held.inode])[held.inode]
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert len(found) == num_found
    assert num_read < 10 * 900


# --- whose the listening socket is -----------------------------------------------------------------------------------


@pytest.fixture
def me(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_sockets.os, "geteuid", lambda: ME)


@pytest.mark.usefixtures("me")
def test_a_listener_of_this_user_or_of_root_is_trusted_and_another_is_not(tmp_path: Path) -> None:
    for uid, stranger in ((ME, None), (0, None), (OTHER, OTHER)):
        for local in (V4, V4_ANY, V6_ANY):
            assert seen(tmp_path, row(local, uid)) == stranger, local
            assert seen(tmp_path, row(local, uid), peer="::ffff:127.0.0.1") == stranger, local
    assert seen(tmp_path) is None


@pytest.mark.usefixtures("me")
def test_of_several_listeners_the_one_counts_that_the_kernel_connects_to(tmp_path: Path) -> None:
    assert seen(tmp_path, row(V4, ME), row(V6_ANY, OTHER)) is None
    assert seen(tmp_path, row(V4_ANY, ME), row(V6_ANY, OTHER)) is None
    assert seen(tmp_path, row(V4, OTHER), row(V6_ANY, ME)) == OTHER
    assert seen(tmp_path, row(V4, ME), row(V6_ANY, OTHER), peer="::1") == OTHER
    assert seen(tmp_path, row("0200007F:2329", OTHER), row("0100007F:232A", OTHER), row(V4, ME)) is None


@pytest.mark.usefixtures("me")
def test_of_a_command_line_of_megabytes_the_words_that_fit_are_read_and_shown() -> None:
    """Any user may start a process with such, or say that it is terabytes (`PR_SET_MM_MAP`), and hold a port with it:
    with 1 GiB `up` took 10 GB and a minute."""
    words = [sys.executable, "-c", "import time; time.sleep(600)", "--token", "abc", *(["-u," * 40_000] * 4)]
    with subprocess.Popen(words) as process:
        shown = f"{sys.executable} -c 'import time; time.sleep(600)' --token '***' …"
        until(lambda: "sleep" in command_line(process.pid))
        tracemalloc.start()
        found = command_line(process.pid).replace("'…'", "…")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        process.kill()
    assert found == shown
    assert peak < 1_000_000  # of all of it 2 MB


def test_other_machines_are_not_checked(tmp_path: Path) -> None:
    assert seen(tmp_path, row(V4_ANY, OTHER), peer="10.0.0.7") is None


@pytest.mark.usefixtures("me")
def test_who_accepted_the_connection_counts_too_where_the_listener_has_changed_since(tmp_path: Path) -> None:
    own = ("127.0.0.1", 0x9000)
    accepted = row(V4, OTHER, "01", V4_CLIENT)
    assert seen(tmp_path, row(V4, ME), accepted) is None
    assert seen(tmp_path, row(V4, ME), accepted, own=own) == OTHER
    assert seen(tmp_path, accepted, own=own) == OTHER
    assert seen(tmp_path, accepted, own=("127.0.0.1", 0x9001)) is None
    mapped = row("0000000000000000FFFF00000100007F:2329", OTHER, "08", MAPPED_CLIENT)
    assert seen(tmp_path, row(V6_ANY, ME), mapped, own=own) == OTHER


@pytest.mark.usefixtures("me")
def test_of_the_sockets_of_others_only_those_with_both_ports_of_a_connection_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read, read = 0, tcp_sockets._address

    def count(text: str) -> tuple[str, int]:
        nonlocal num_read
        num_read += 1
        return read(text)

    monkeypatch.setattr(tcp_sockets, "_address", count)
    flood = [row(f"0100007F:{port:04X}", OTHER, "01", V4) for port in range(0xA000, 0xB000)]
    flood += [row(V4, OTHER, "01", f"0100007F:{port:04X}") for port in range(0xA000, 0xB000)]
    own = ("127.0.0.1", 0x9000)
    assert seen(tmp_path, row(V4, ME), *flood, row(V4, OTHER, "01", V4_CLIENT), own=own) == OTHER
    assert num_read < 20


@pytest.mark.skipif(not socket_diag.is_available(), reason="this kernel does not answer for one socket")
def test_the_sockets_of_a_connection_are_found_without_reading_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 connections at once read a list of 48,000 sockets of others 64 times."""
    monkeypatch.setattr(tcp_sockets, "_rows", lambda *_, **__: pytest.fail("reads the list of all sockets"))
    me = os.geteuid()
    for host, reached_at, device in (
        ("127.0.0.1", "127.0.0.1", b""),
        ("0.0.0.0", "127.0.0.1", b""),
        ("127.0.0.1", "127.0.0.1", b"lo"),
        ("::", "127.0.0.1", b""),
        ("::", "::1", b""),
    ):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device)
            listener.bind((host, 0))
            listener.listen()
            peer = reached_at, listener.getsockname()[1]
            with socket.create_connection(peer) as client:
                own = client.getsockname()[:2]
                accepted, _ = listener.accept()
                assert stranger_behind(peer) is None
                monkeypatch.setattr(tcp_sockets.os, "geteuid", lambda: me + 1)
                monkeypatch.setattr(tcp_sockets, "ROOT", me + 1)
                found = stranger_behind(peer)
                assert found is not None
                assert (found.is_listening, found.port, found.uid) == (True, peer[1], me), (host, device)
                assert found.inode == os.fstat(listener.fileno()).st_ino
                listener.close()
                with accepted:
                    other_end = stranger_behind(peer, own)
                    assert other_end is not None
                    assert (other_end.host, other_end.peer) == (reached_at, own)
                    assert other_end.inode == os.fstat(accepted.fileno()).st_ino
                    assert client_socket(own, peer).inode == os.fstat(client.fileno()).st_ino  # type: ignore[union-attr]
                monkeypatch.undo()
                monkeypatch.setattr(tcp_sockets, "_rows", lambda *_, **__: pytest.fail("reads the list of all sockets"))
        assert stranger_behind(peer) is None


@pytest.mark.skipif(not socket_diag.is_available(), reason="this kernel does not answer for one socket")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
def test_who_listens_and_who_has_connected_is_found_without_the_list_of_all_sockets(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside 400,000 listening sockets of another user, which are cheap, a start and `down` took half a minute."""
    monkeypatch.setattr(tcp_sockets, "_rows", lambda *_, **__: pytest.fail("reads the list of all sockets"))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        assert port in own_listening_ports()
        found = [each for each in listening_sockets([port]) if each.inode == os.fstat(listener.fileno()).st_ino]
        assert [(each.host, each.is_listening, each.uid) for each in found] == [(host, True, os.geteuid())]
        assert not listening_sockets([])
        older = own_sockets()
        with socket.create_connection(("::1" if ":" in host else host, port)) as client:
            not_accepted = connected_stranger(older=older)
            assert not_accepted is not None
            assert not not_accepted.inode
            accepted, _ = listener.accept()
            with accepted:
                assert connected_stranger(older=older) is None
                monkeypatch.setattr(tcp_sockets.os, "geteuid", lambda: ME)
                monkeypatch.setattr(tcp_sockets, "ROOT", ME)
                stranger = connected_stranger(older=older)
                assert stranger is not None
                assert stranger.inode in {os.fstat(each.fileno()).st_ino for each in (client, accepted)}


@as_root
def test_where_the_kernel_does_not_answer_for_one_socket_the_list_of_all_says_who_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp_sockets, "is_available", lambda: False)
    port, older = free_port(), own_sockets()
    with squatter(port) as stranger, socket.create_connection(("127.0.0.1", port)) as client:
        assert [(each.port, each.uid) for each in listening_sockets([port])] == [(port, NOBODY)]
        # Until it has accepted the connection, the kernel does not say whose its end is.
        while (connected := connected_stranger(older=older)) is not None and not connected.inode:
            pass
        assert connected is not None
        assert connected.uid == NOBODY
        for own in (None, client.getsockname()):
            found = stranger_behind(client.getpeername(), own)
            assert found is not None
            assert found.uid == NOBODY
        assert stranger.poll() is None
        mine = client_socket(client.getsockname(), client.getpeername())
        assert mine is not None
        assert mine.inode == os.fstat(client.fileno()).st_ino


# --- clients ---------------------------------------------------------------------------------------------------------


@contextmanager
def squatter(port: int) -> Iterator[subprocess.Popen[str]]:
    """A process of user nobody that answers 200 to everything, and prints what it receives."""
    argv = [sys.executable, "-I", "-S", "-c", SQUATTER, str(NOBODY), str(port)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "up\n"
            yield process
        finally:
            process.kill()


def received(process: subprocess.Popen[str]) -> list[str]:
    """The first bytes of each connection that it has accepted; it is ended."""
    process.kill()
    assert process.stdout is not None
    return process.stdout.read().splitlines()


def app() -> FastAPI:
    made = FastAPI()
    made.get("/info")(lambda: {"batch_size": 1})
    return made


@as_root
def test_no_client_sends_its_token_to_another_user_and_all_go_on_when_the_port_is_free_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRPO_API_TOKEN", "secret-token")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    bridge, source = ServerClient(url, patience_s=0), RolloutApiSource(url)
    with squatter(port) as stranger:
        named = rf"127.0.0.1:{port} is held by user {user_name(NOBODY)} \(pid {stranger.pid}\).*: the token is not sent"
        with pytest.raises(PeerUnavailable, match=named):
            bridge.info()
        with pytest.raises(PeerUnavailable, match=named):
            source.poll()
        with pytest.raises(PeerUnavailable, match=named):
            source.wait_until_reachable(0)
        with_password = f"http://run:secret-token@127.0.0.1:{port}"
        with open_client(None, base_url=with_password) as by_url, pytest.raises(ForeignListener):
            by_url.get("/info")
        assert not any("GET" in each or "POST" in each for each in received(stranger))
    with served(app(), port=port):
        source.wait_until_reachable(10)
    bridge.close()
    source.close()


@as_root
async def test_an_environment_sends_neither_token_nor_prompts_to_another_user() -> None:
    port = free_port()
    with squatter(port) as stranger:
        for sends_token in (True, False):
            url = f"http://127.0.0.1:{port}"
            async with open_async_client("secret", sends_token=sends_token, base_url=url) as client:
                with pytest.raises(ForeignListener, match="is held by user"):
                    await client.post("/generate", json={"prompt": "a"})
        assert not any("POST" in each for each in received(stranger))


def test_a_client_without_a_token_asks_whom_it_is_told_to() -> None:
    with served(app()) as url, open_client(None, base_url=url) as client:
        assert "authorization" not in client.get("/info").request.headers


async def test_a_client_with_a_token_is_answered_by_a_process_of_this_user() -> None:
    with served(app()) as url, open_client("secret", base_url=url) as client:
        assert client.get("/info").request.headers["authorization"] == "Bearer secret"
    with served(app()) as url:
        async with open_async_client("secret", sends_token=False, base_url=url) as asking:
            assert "authorization" not in (await asking.get("/info")).request.headers


# --- probes ----------------------------------------------------------------------------------------------------------


@as_root
async def test_another_users_listener_is_never_ready_and_is_named(tmp_path: Path) -> None:
    port = free_port()
    with squatter(port) as stranger:
        for probe in (Probe(http=f"http://127.0.0.1:{port}/"), Probe(tcp=f"localhost:{port}")):
            answer = await ask(probe, log=tmp_path / "log", log_offset=0, cwd=tmp_path, env={}, ports=[port])
            assert answer.kind is ProbeOutcome.FOREIGN_LISTENER
            assert f"port {port} is held by user {user_name(NOBODY)} (pid {stranger.pid})" in answer.words
            # A service may wait for a port that is not its own, such as that of a system's database.
            assert (await ask(probe, log=tmp_path / "log", log_offset=0, cwd=tmp_path, env={}, ports=[])).passed


# --- servers ---------------------------------------------------------------------------------------------------------


async def answer_nothing(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def listen_beside(port: int) -> None:
    """Listen where another socket is only bound, as kernels allow where both sockets allow it."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()


def listen_is_refused(port: int) -> None:
    with pytest.raises(OSError, match="Address already in use"):
        listen_beside(port)


class SharedWhereItMay(socket.socket):
    """A socket beside which another one tries to listen whenever this one begins or ends to."""

    has_failed = False
    """Whether it listens for the second time, and another one may for a moment."""
    earliest: socket.socket
    """A client that is connected as soon as it listens."""

    def listen(self, backlog: int = 1, /) -> None:
        if not self.has_failed:
            listen_is_refused(self.getsockname()[1])
        self.has_failed = not self.has_failed
        super().listen(backlog)
        self.has_failed = False
        self.earliest = socket.create_connection(self.getsockname())

    def shutdown(self, how: int, /) -> None:
        super().shutdown(how)
        listen_is_refused(self.getsockname()[1])


def test_a_server_has_its_port_before_and_after_it_listens_and_refuses_connections_then() -> None:
    port = free_port()
    with SharedWhereItMay(fileno=take_port("127.0.0.1", port).detach()) as listener:
        for _ in range(2):  # a server that is restarted in place
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
            start_listening(listener, 1)
            listen_is_refused(port)
            with listener.earliest, socket.create_connection(("127.0.0.1", port)):
                accept(listener).close()  # the kernel keeps it for a minute
                listener.accept()[0].close()  # as of a process that is killed as soon as it has accepted it
            refuse_connections(listener)
            refuse_connections(listener)
        served = listener.dup()
        server = plain_server(answer_nothing, served, log_level="warning")
        serving = threading.Thread(target=server.run)
        serving.start()
        until(lambda: hasattr(served, "earliest"))
        listen_is_refused(port)
        with served.earliest as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            while client.recv(4096):
                pass
        server.should_exit = True
        serving.join()
    take_port("127.0.0.1", port).close()


def test_a_port_that_another_took_before_a_server_listens_is_named_with_its_holder() -> None:
    port = free_port()
    with take_port("127.0.0.1", port) as listener:
        listening._allow_reuse(listener, True)
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", port))
            other.listen()
            with pytest.raises(ConfigError, match=rf"--port {port}: cannot listen: .*, held by user "):
                start_listening(listener, 1)


def test_a_port_that_is_taken_is_refused_with_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        who = rf"held by user {user_name(os.geteuid())} \(pid [\d, ]*{os.getpid()}"
        with pytest.raises(ConfigError, match=rf"--port {port}: cannot listen: Address already in use, {who}"):
            take_port("127.0.0.1", port)
    with httpx.Client() as client, pytest.raises(httpx.ConnectError):
        client.get(f"http://127.0.0.1:{port}")


def test_a_connection_that_was_reset_at_once_is_tried_again_as_a_refused_one() -> None:
    class Reset:
        def get_extra_info(self, _name: str) -> None:
            """What anyio returns where getpeername fails."""

    assert isinstance(_why_unsafe(Reset()), httpx.ConnectError)


async def test_a_connection_is_closed_where_its_request_is_cancelled_during_the_look_at_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stayed open until the memory of the process was collected, and a test that came later failed by it."""
    looks, may_end = threading.Event(), threading.Event()

    def look(stream: object) -> None:
        looks.set()
        may_end.wait(10)

    monkeypatch.setattr(token_clients, "_why_unsafe", look)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with open_async_client("secret") as client:
            asking = asyncio.create_task(client.get(f"http://127.0.0.1:{listener.getsockname()[1]}/"))
            accepted, _ = await asyncio.to_thread(listener.accept)
            await asyncio.to_thread(looks.wait, 10)
            asking.cancel()
            await asyncio.wait([asking])
            may_end.set()
        with accepted:
            accepted.settimeout(60)
            assert accepted.recv(1) == b""


def test_a_connection_that_no_descriptor_is_left_to_look_at_is_tried_again() -> None:
    """The error of the look ended an environment with a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        ends = {"server_addr": client.getpeername(), "client_addr": client.getsockname()}
        stream = SimpleNamespace(get_extra_info=ends.get)
        assert _why_unsafe(stream) is None
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        try:
            error = _why_unsafe(stream)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert isinstance(error, httpx.ConnectError)
    assert "Too many open files" in str(error)
