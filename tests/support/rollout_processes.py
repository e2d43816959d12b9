"""The rollout API as a process, for tests that kill it, fill its disk, watch its memory or speak bad HTTP to it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import psutil
from forked import Forked
from serving import end_all, free_port


class ApiProcess:
    """`grpo-engine api` on a port and a store that stay the same over its restarts."""

    process: subprocess.Popen[bytes] | Forked

    def __init__(
        self,
        folder: Path,
        *flags: str,
        store: Path | None = None,
        wrapper: Sequence[str] = (),
        is_forked: bool = True,
    ) -> None:
        """Start it.

        Args:
            wrapper: a command that runs the one behind it, as `unshare` does; that one is never forked.
            is_forked: spare it the second of its imports. What memory it takes is then no longer its own alone.
        """
        self.store = store or folder / "rollouts.sqlite"
        self.log = folder / "api.log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._is_forked = is_forked and not wrapper
        self._wrapper = wrapper
        self._words = ("api", "--port", str(self.port), "--store", str(self.store), *flags)
        self.start()

    def start(self) -> None:
        """Start it, again perhaps, without waiting for it."""
        self._read_from = self.log.stat().st_size if self.log.exists() else 0
        if self._is_forked:
            self.process = Forked(*self._words, log=self.log, folder=Path.cwd(), environment=os.environ)
            return
        command = [*self._wrapper, sys.executable, "-m", "grpo_engine", *self._words]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log)

    def wait_until_ready(self) -> None:
        """Wait until it answers; the test's own limit ends this."""
        with self.client() as http:
            while True:
                assert self.process.poll() is None, self.log.read_text(errors="replace")
                with contextlib.suppress(httpx.TransportError):
                    if http.get("/info").status_code == 200:
                        return
                time.sleep(0.01)  # the interval of a probe

    def said(self) -> str:
        """What it wrote since it was started last."""
        with self.log.open("rb") as log:
            log.seek(self._read_from)
            return log.read().decode()

    def kill(self) -> None:
        """`kill -9`, and wait until nothing is left."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def restart(self) -> None:
        """Kill it and start it again."""
        self.kill()
        self.start()
        self.wait_until_ready()

    def client(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, trust_env=False, **{"timeout": 60, **options})  # type: ignore[arg-type]

    def connection(self, *, receive_bytes: int | None = None) -> socket.socket:
        """A bare connection, for what no client library would send.

        Args:
            receive_bytes: size of the receive buffer, so that a large answer stops halfway while nobody reads it.
        """
        connection = socket.socket()
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def rss_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def peak_rss_bytes(self) -> int:
        """The most that it ever held in memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))

    def forget_peak_rss(self) -> None:
        """Count the most from here on."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def num_threads(self) -> int:
        return int(psutil.Process(self.process.pid).num_threads())

    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


@contextlib.contextmanager
def api_process(
    folder: Path, *flags: str, store: Path | None = None, wrapper: Sequence[str] = (), is_forked: bool = True
) -> Iterator[ApiProcess]:
    """A running API, ended at the end, whose log has no traceback."""
    api = ApiProcess(folder, *flags, store=store, wrapper=wrapper, is_forked=is_forked)
    try:
        api.wait_until_ready()
        yield api
    finally:
        end_all([api.process])
    log = api.log.read_text(errors="replace")
    assert "Traceback" not in log, log[-5000:]


def answer_to(connection: socket.socket, request: bytes) -> tuple[int, bytes]:
    """Send `request` as it is and read one whole answer: its status, or 0 where the connection ended; and its bytes."""
    with contextlib.suppress(ConnectionError):
        connection.sendall(request)
    return read_answer(connection)


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """The next answer on `connection`, as `answer_to` returns it; interim answers (1xx) are passed over."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while b"\r\n\r\n" not in received or received.startswith(b"HTTP/1.1 1"):
            if received.startswith(b"HTTP/1.1 1") and b"\r\n\r\n" in received:
                received = received.partition(b"\r\n\r\n")[2]
                continue
            part = connection.recv(65536)
            if not part:
                return 0, received
            received += part
        head, _, body = received.partition(b"\r\n\r\n")
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                while len(body) < int(line.partition(b":")[2]):
                    part = connection.recv(65536)
                    if not part:
                        break
                    body += part
        return int(head.split()[1]), body
    return 0, received
