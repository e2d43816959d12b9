"""Restarts the inference server: by a request to its supervisor, or as a child process of the trainer.

Every process has one owner: under a supervisor the trainer only sends requests, and it never terminates a process that
it has not started. A server that does not become healthy ends the training run with an error.
"""

from __future__ import annotations

import logging
import os
import select
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

from grpo_engine.bridges.protocol import BridgeContext
from grpo_engine.errors import BridgeError, PeerError, PeerUnavailable
from grpo_engine.own_file import open_own_file
from grpo_engine.processes import ProcessTree, kill, running, terminate
from grpo_engine.python_command import module_command
from grpo_engine.retrying import RetryPolicy, Stopped, never, retry
from grpo_engine.wire.codec import to_line
from grpo_engine.wire.environment_variables import INFERENCE_VARIABLE, RUN_FOLDER_VARIABLE
from grpo_engine.wire.run_folder import ADDRESS_FILE, service_log
from grpo_engine.wire.supervisor import PROTOCOL_VERSION, Address, Command, Hello, Reply, read_from_daemon
from grpo_engine.wire.token_clients import open_client
from grpo_engine.wire.unix_peers import require_supervisor

_POLL_S = 0.1
_GRACE_S = 10.0
"""Between SIGTERM and SIGKILL: vLLM ends its engine in two seconds."""
_KILL_WITHIN_S = 10.0
_PORT_WITHIN_S = 15.0
_NUM_LAST_WORDS = 15

_TIED = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)\n"  # PR_SET_PDEATHSIG
    "os.getppid() == int(sys.argv[1]) or os._exit(1)\n"  # the parent exited before that
    "os.execv(sys.argv[2], sys.argv[2:])"
)
"""Runs a command that is killed when its parent exits. A program of its own, since only exec is safe in a forked child
of a process with threads."""

logger = logging.getLogger(__name__)


class ServerControl(Protocol):
    """Restarts the inference server."""

    def attach(self) -> None:
        """Ensure that a server runs."""

    def restart(self) -> None:
        """Stop the server, start it, and return once it is healthy.

        Raises:
            BridgeError: it does not become healthy.
            PeerUnavailable: training is stopping.
        """

    def restart_if_exited(self) -> None:
        """Start the server again if it has exited and this process started it; never waits."""

    def close(self) -> None:
        """Terminate the server if this process started it."""


def server_control(
    context: BridgeContext, handover: Path, settings: Path | None, environment: Mapping[str, str]
) -> ServerControl:
    """Control through the supervisor if there is one, else of a child process.

    Args:
        handover: checkpoint folder of the child.
        settings: file with more settings of the child.

    Raises:
        BridgeError: the supervisor's inference service is unknown.
    """
    run_folder = environment.get(RUN_FOLDER_VARIABLE)
    if run_folder is None:
        more = () if settings is None else ("--config", str(settings.absolute()))
        argv = module_command("grpo_engine", "server", *more, *context.server_flags)
        return LocalServer(
            (*argv, "--handover", str(handover)),
            url=context.server_urls[0],
            log=context.folder / "server.log",
            environment={**environment, **context.server_environment},
            patience_s=context.patience_s,
            is_stopping=context.is_stopping,
        )
    service = environment.get(INFERENCE_VARIABLE)
    if not service:
        raise BridgeError(
            f"{INFERENCE_VARIABLE} is not set, so the service of {run_folder} to restart is unknown: the profile "
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
        """Nothing: the supervisor starts it."""

    def restart(self) -> None:
        """Send a restart command; a supervisor that exits meanwhile gets it again from its successor."""
        logger.info("asking the supervisor to restart %s", self._service)
        began = time.monotonic()
        first_attempt: int | None = None

        def send_restart() -> Reply:
            nonlocal first_attempt
            attempt = self._attempt()
            first_attempt = attempt if first_attempt is None else first_attempt
            return self._ask("restart" if attempt == first_attempt else "start", wait=True)

        policy = RetryPolicy(
            retried=PeerUnavailable,
            first_pause_s=_POLL_S,
            longest_pause_s=_POLL_S,
            limit_s=self._patience_s,
            is_stopping=self._is_stopping,
            on_failure=lambda error: logger.warning("%s; retrying", error),
        )
        try:
            reply = retry(send_restart, policy)
        except Stopped as stopped:
            raise PeerUnavailable(str(stopped)) from None
        if not reply.ok:
            raise BridgeError(
                f"{self._service} did not become ready after its restart: {reply.error}; its log is {self._log()}"
            )
        logger.info("%s is ready again after %.1f s", self._service, time.monotonic() - began)

    def restart_if_exited(self) -> None:
        """Nothing: the supervisor does."""

    def close(self) -> None:
        """Nothing: the supervisor owns it."""

    def _log(self) -> Path:
        return service_log(self._run_folder, self._service)

    def _attempt(self) -> int:
        status = self._ask("status").status
        attempts = {service.name: service.attempt for service in status.services} if status else {}
        if self._service not in attempts:
            raise BridgeError(f"{self._service!r} is not a service of {self._run_folder.name}: {', '.join(attempts)}")
        return attempts[self._service]

    def _ask(self, do: Literal["status", "start", "restart"], *, wait: bool = False) -> Reply:
        """Send one command on a new connection, and wait for the reply while the supervisor runs."""
        name = f"the supervisor of {self._run_folder.name}"
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                address = Address.model_validate_json((self._run_folder / ADDRESS_FILE).read_bytes())
                connection.connect(address.socket)
                require_supervisor(connection, self._run_folder)
                connection.sendall(
                    to_line(Hello(run=self._run_folder.name, pid=os.getpid()))
                    + to_line(Command(id=1, do=do, service=self._service, wait=wait))
                )
                return self._reply(connection, name)
            except (OSError, ValueError) as error:  # no address or no listener between two supervisors
                raise PeerUnavailable(f"{name} does not answer: {error}") from None

    def _reply(self, connection: socket.socket, name: str) -> Reply:
        received = b""
        while True:
            if not select.select([connection], [], [], _POLL_S)[0]:
                if self._is_stopping():
                    raise PeerUnavailable(f"not waiting for {self._service}, since training is stopping")
                continue
            part = connection.recv(65536)
            if not part:
                raise PeerUnavailable(f"{name} closed the connection before it answered")
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
    """A server that is a child of this process, and is killed when this process exits."""

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
        """Length of the log at the last start."""
        self._was_healthy = False

    def attach(self) -> None:
        """Start it, and wait until it is healthy.

        Raises:
            BridgeError: the port is taken, or it does not become healthy.
        """
        if is_listening(self._url):
            raise BridgeError(
                f"{self._url}: in use already{self._who_listens()}, but --bridge-restart starts a server there: stop "
                "it, "
                "choose another --vllm-port, or omit --bridge-restart to use it"
            )
        self._start()
        self._wait_healthy()

    def restart(self) -> None:
        """Stop it, start it, and wait until it is healthy."""
        began = time.monotonic()
        self._end()
        self._await_port()
        self._start()
        self._wait_healthy()
        logger.info("the inference server is healthy again after %.1f s", time.monotonic() - began)

    def restart_if_exited(self) -> None:
        """Start it again if it has exited.

        Raises:
            BridgeError: it has not been healthy since the last start.
        """
        code = None if self._process is None else _exit_code(self._process)
        if code is None:
            self._was_healthy = self._was_healthy or (self._process is not None and self._is_healthy())
            return
        if not self._was_healthy:
            raise BridgeError(self._why_not_up())
        logger.warning("the inference server has exited (exit code %d); restarting it", code)
        self._end()
        self._await_port()
        self._start()

    def close(self) -> None:
        """Terminate it."""
        self._end()

    def _start(self) -> None:
        self._was_healthy = False
        with os.fdopen(open_own_file(self._log, f"{self._log}, the log of the inference server"), "ab") as log:
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
        """Send SIGTERM to the server, and after a grace period SIGKILL to all that is left of its process tree."""
        process, self._process = self._process, None
        if process is None:
            return
        tree = ProcessTree([process.pid])
        terminate(lambda: running(process.pid), grace_s=_GRACE_S)
        if left := kill(tree.living, within_s=_KILL_WITHIN_S):
            pids = ", ".join(str(each.pid) for each in left)
            raise BridgeError(
                f"inference server: process {pids} is still alive {_KILL_WITHIN_S:g} s after SIGKILL: stuck in the "
                "kernel, usually in a driver"
            )
        process.wait()

    def _await_port(self) -> None:
        until = time.monotonic() + _PORT_WITHIN_S
        while is_listening(self._url):
            if time.monotonic() >= until:
                raise BridgeError(
                    f"{self._url}: still in use after the trainer's server has exited{self._who_listens()}: stop that "
                    "process, or choose another --vllm-port"
                )
            time.sleep(_POLL_S)

    def _wait_healthy(self) -> None:
        assert self._process is not None
        until = time.monotonic() + self._patience_s
        while not self._is_healthy():
            if _exit_code(self._process) is not None or time.monotonic() >= until:
                raise BridgeError(self._why_not_up())
            if self._is_stopping():
                raise PeerUnavailable("not waiting for the inference server, since training is stopping")
            time.sleep(_POLL_S)
        self._was_healthy = True

    def _is_healthy(self) -> bool:
        """Whether it answers, and not another process that took its port."""
        try:
            with open_client(None, timeout=5) as client:
                answer = client.get(f"{self._url}/health")
        except (httpx.TransportError, PeerError):
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
        """`` (pid 17, python3)``; empty if that is not visible to this user."""
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
            how += f", and another process answers at {self._url}{self._who_listens()}"
        return f"the inference server {how}; its log, {self._log}, ends with:\n  {said}"


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """A child's exit code, negative for a signal; None while it runs.

    The child is not reaped, so that its pid stays reserved and its process group can be signalled.
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
    """Whether a process accepts connections at a URL's host and port."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    try:
        with socket.create_connection((address.hostname, address.port), timeout=1):
            return True
    except OSError:
        return False
