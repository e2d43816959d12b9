"""Restart the inference server: through the supervisor that owns it, or as a child that is this trainer's own.

One owner a process: under a supervisor the trainer only asks. A server that does not come up is an error here, and the
end of the training run; nothing is ever ended that this process has not started.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import urlsplit

import httpx
import psutil

from grpo_engine.bridges.protocol import BridgeContext, never
from grpo_engine.errors import BridgeError, PeerError, PeerUnavailable
from grpo_engine.wire.codec import to_line
from grpo_engine.wire.supervisor import (
    ADDRESS_FILE,
    PROTOCOL_VERSION,
    RUN_FOLDER_VARIABLE,
    SERVICE_VARIABLE,
    Address,
    Command,
    Hello,
    Reply,
    read_from_daemon,
)

_POLL_S = 0.1
_GRACE_S = 10.0
"""Between SIGTERM and SIGKILL: vLLM ends its engine in two seconds."""
_PORT_WITHIN_S = 15.0
_NUM_LAST_WORDS = 15

_TIED = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)\n"  # PR_SET_PDEATHSIG
    "os.getppid() == int(sys.argv[1]) or os._exit(1)\n"  # it died before that
    "os.execv(sys.argv[2], sys.argv[2:])"
)
"""Runs a command that is killed with the process that started it. A program of its own, since nothing but exec is safe
in the child of a process with threads."""

logger = logging.getLogger(__name__)


class ServerControl(Protocol):
    """Whoever can restart the inference server."""

    def attach(self) -> None:
        """Have a server run."""

    def restart(self) -> None:
        """End it, start it anew, and return once it is healthy.

        Raises:
            BridgeError: it does not come up.
            PeerUnavailable: not awaited any longer, since training is to stop.
        """

    def look_after(self) -> None:
        """Start a server again that has ended by itself, if that is this process's business; never waits."""

    def close(self) -> None:
        """End what this process has started."""


def server_control(
    context: BridgeContext, handover: Path, settings: Path | None, environment: Mapping[str, str]
) -> ServerControl:
    """The supervisor's where there is one, else a server of this process's own.

    Args:
        handover: folder that a server of its own is given.
        settings: file with more settings of such a server.

    Raises:
        BridgeError: the supervisor's inference server has no name.
    """
    run_folder = environment.get(RUN_FOLDER_VARIABLE)
    if run_folder is None:
        more = () if settings is None else ("--config", str(settings.absolute()))
        argv = (sys.executable, "-m", "grpo_engine", "server", *more, *context.server_flags)
        return LocalServer(
            (*argv, "--handover", str(handover)),
            url=context.server_url,
            log=context.folder / "server.log",
            environment={**environment, **context.server_environment},
            patience_s=context.patience_s,
            is_stopping=context.is_stopping,
        )
    service = environment.get(SERVICE_VARIABLE)
    if not service:
        raise BridgeError(
            f"{SERVICE_VARIABLE} is not set, so nobody knows which service of {run_folder} to restart: the profile "
            "needs one service of kind inference, or a bridge without restart"
        )
    return SupervisedServer(Path(run_folder), service, patience_s=context.patience_s, is_stopping=context.is_stopping)


class SupervisedServer:
    """A server that a supervisor runs."""

    def __init__(
        self, run_folder: Path, service: str, *, patience_s: float, is_stopping: Callable[[], bool] = never
    ) -> None:
        self._run_folder = run_folder
        self._service = service
        self._patience_s = patience_s
        self._is_stopping = is_stopping

    def attach(self) -> None:
        """The supervisor has started it, or will."""

    def restart(self) -> None:
        """Ask for it; a supervisor that dies meanwhile is asked again when it is back."""
        logger.info("asking the supervisor to restart %s", self._service)
        began = time.monotonic()
        before: int | None = None
        until = began + self._patience_s
        while True:
            try:
                attempt = self._attempt()
                before = attempt if before is None else before
                reply = self._ask("restart" if attempt == before else "start", wait=True)
                break
            except PeerUnavailable as error:
                if self._is_stopping() or time.monotonic() >= until:
                    raise
                logger.warning("%s; asking again", error)
                time.sleep(_POLL_S)
        if not reply.ok:
            raise BridgeError(f"{self._service} did not come up again: {reply.error}; its log is {self._log()}")
        logger.info("%s is ready again after %.1f s", self._service, time.monotonic() - began)

    def look_after(self) -> None:
        """The supervisor does."""

    def close(self) -> None:
        """It is the supervisor's."""

    def _log(self) -> Path:
        return self._run_folder / f"{self._service}.log"

    def _attempt(self) -> int:
        status = self._ask("status").status
        attempts = {service.name: service.attempt for service in status.services} if status else {}
        if self._service not in attempts:
            raise BridgeError(f"{self._service!r} is not a service of {self._run_folder.name}: {', '.join(attempts)}")
        return attempts[self._service]

    def _ask(self, do: Literal["status", "start", "restart"], *, wait: bool = False) -> Reply:
        """One question on a connection of its own; waits for the answer as long as the supervisor lives."""
        name = f"the supervisor of {self._run_folder.name}"
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                address = Address.model_validate_json((self._run_folder / ADDRESS_FILE).read_bytes())
                connection.connect(address.socket)
                connection.sendall(
                    to_line(Hello(run=self._run_folder.name, pid=os.getpid()))
                    + to_line(Command(id=1, do=do, service=self._service, wait=wait))
                )
                return self._reply(connection, name)
            except (OSError, ValueError) as error:  # between two daemons there may be no address, or nobody at it
                raise PeerUnavailable(f"{name} does not answer: {error}") from None

    def _reply(self, connection: socket.socket, name: str) -> Reply:
        received = b""
        while True:
            if not select.select([connection], [], [], _POLL_S)[0]:
                if self._is_stopping():
                    raise PeerUnavailable(f"{self._service} is not awaited, since training is to stop")
                continue
            part = connection.recv(65536)
            if not part:
                raise PeerUnavailable(f"{name} hung up before it answered")
            *lines, received = (received + part).split(b"\n")
            for line in lines:
                match read_from_daemon(line):
                    case Hello(version=version) if version != PROTOCOL_VERSION:
                        raise PeerError(
                            f"{name} speaks protocol {version}, and this program {PROTOCOL_VERSION}: run both from the "
                            "same installation"
                        )
                    case Reply() as reply:
                        return reply


class LocalServer:
    """A server that is a child of this process, and ends with it however that ends."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        url: str,
        log: Path,
        environment: Mapping[str, str],
        patience_s: float,
        is_stopping: Callable[[], bool] = never,
    ) -> None:
        self._argv = list(argv)
        self._url = url
        self._log = log
        self._environment = dict(environment)
        self._patience_s = patience_s
        self._is_stopping = is_stopping
        self._process: subprocess.Popen[bytes] | None = None
        self._log_offset = 0
        """Where in the log this start begins."""
        self._was_healthy = False

    def attach(self) -> None:
        """Start it, and wait until it is healthy.

        Raises:
            BridgeError: somebody else has the port, or it does not come up.
        """
        if is_listening(self._url):
            raise BridgeError(
                f"{self._url}: something answers there already{self._who_listens()}, and this trainer is to start a "
                "server of its own (--bridge-restart): end it, choose another --vllm-port, or leave --bridge-restart "
                "out to use it"
            )
        self._start()
        self._wait_healthy()

    def restart(self) -> None:
        """End it, start it, and wait until it is healthy."""
        began = time.monotonic()
        self._end()
        self._await_port()
        self._start()
        self._wait_healthy()
        logger.info("the inference server is healthy again after %.1f s", time.monotonic() - began)

    def look_after(self) -> None:
        """Start it again if it has ended by itself.

        Raises:
            BridgeError: it has never been healthy since it was started again.
        """
        code = None if self._process is None else _exit_code(self._process)
        if code is None:
            self._was_healthy = self._was_healthy or (self._process is not None and self._is_healthy())
            return
        if not self._was_healthy:
            raise BridgeError(self._why_not_up())
        logger.warning("the inference server has ended (exit code %d); starting it again", code)
        self._end()
        self._await_port()
        self._start()

    def close(self) -> None:
        """End it."""
        self._end()

    def _start(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._was_healthy = False
        with self._log.open("ab") as log:
            self._log_offset = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *self._argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        logger.info("started the inference server (pid %d); its log is %s", self._process.pid, self._log)

    def _end(self) -> None:
        """SIGTERM, and after a grace period SIGKILL to whoever is left of its group."""
        process, self._process = self._process, None
        if process is None:
            return
        os.kill(process.pid, signal.SIGTERM)
        until = time.monotonic() + _GRACE_S
        while _exit_code(process) is None and time.monotonic() < until:
            time.sleep(_POLL_S)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _await_port(self) -> None:
        until = time.monotonic() + _PORT_WITHIN_S
        while is_listening(self._url):
            if time.monotonic() >= until:
                raise BridgeError(
                    f"{self._url}: still answers after the server of this trainer has ended{self._who_listens()}: end "
                    "it, or choose another --vllm-port"
                )
            time.sleep(_POLL_S)

    def _wait_healthy(self) -> None:
        assert self._process is not None
        until = time.monotonic() + self._patience_s
        while not self._is_healthy():
            if _exit_code(self._process) is not None or time.monotonic() >= until:
                raise BridgeError(self._why_not_up())
            if self._is_stopping():
                raise PeerUnavailable("the inference server is not awaited, since training is to stop")
            time.sleep(_POLL_S)
        self._was_healthy = True

    def _is_healthy(self) -> bool:
        """Whether it answers; somebody else may have taken its port while it was starting."""
        try:
            answer = httpx.get(f"{self._url}/health", timeout=5, trust_env=False)
        except httpx.TransportError:
            return False
        return answer.status_code == httpx.codes.OK and self._is_listening()

    def _is_listening(self) -> bool:
        assert self._process is not None
        with suppress(psutil.NoSuchProcess):
            server = psutil.Process(self._process.pid)
            own = {process.pid for process in (server, *server.children(recursive=True))}
            return not own.isdisjoint(listeners(self._url))
        return False

    def _who_listens(self) -> str:
        """`` (pid 17, python3)``; empty where nobody can see it."""
        with suppress(psutil.NoSuchProcess):
            for pid in listeners(self._url):
                return f" (pid {pid}, {psutil.Process(pid).name()})"
        return ""

    def _why_not_up(self) -> str:
        assert self._process is not None
        code = _exit_code(self._process)
        how = f"is not healthy after {self._patience_s:g} s" if code is None else f"ended with exit code {code}"
        with self._log.open("rb") as log:
            log.seek(self._log_offset)
            words = log.read().decode(errors="replace").strip().splitlines()[-_NUM_LAST_WORDS:]
        said = "\n  ".join(words) or "(nothing)"
        if is_listening(self._url) and not self._is_listening():
            how += f", and something else answers at {self._url}{self._who_listens()}"
        return f"the inference server {how}; its log, {self._log}, ends with:\n  {said}"


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """What a child ended with, negative for a signal; None while it runs.

    It is not reaped here: until it is, nobody else can get its number, and its group can be ended by it.
    """
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def listeners(url: str) -> set[int]:
    """The processes that accept connections at a URL's port, as far as this user can see."""
    port = urlsplit(url).port
    return {
        connection.pid
        for connection in psutil.net_connections(kind="tcp")
        if connection.pid
        and connection.status == psutil.CONN_LISTEN
        and connection.laddr
        and connection.laddr.port == port
    }


def is_listening(url: str) -> bool:
    """Whether somebody accepts connections at a URL's host and port."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    try:
        with socket.create_connection((address.hostname, address.port), timeout=1):
            return True
    except OSError:
        return False
