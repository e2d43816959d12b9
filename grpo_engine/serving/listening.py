"""The port of an HTTP service: taken when the process starts, open when the application answers.

Between the two, which may be minutes of imports, no other process can take it, and connections are refused.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, MutableMapping
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from grpo_engine.errors import ConfigError
from grpo_engine.processes import raise_descriptor_limit
from grpo_engine.serving.connections import LimitedProtocol, SomeWarnings, max_connections
from grpo_engine.wire.environment_variables import LISTENER_VARIABLE
from grpo_engine.wire.tcp_sockets import listening_sockets, who_has

MAX_ACCEPTED = 64
"""Connections that are accepted in one round of the event loop; fewer, where the process may have few descriptors.

libuv 1.52 accepts one in each round: beside 3,500 connections of one client, each with a request at all times, a new
one waited for more than 60 s."""
ACCEPT_AGAIN_S = 0.1
"""After one that could not be accepted, for want of descriptors or memory."""


def take_port(host: str, port: int, environment: MutableMapping[str, str] | None = None) -> socket.socket:
    """A socket that is bound and does not listen; the one that a fork server handed on in `environment`, if it did.

    Raises:
        ConfigError: another process has the port, or this machine has no such address.
    """
    if environment is not None and (descriptor := environment.pop(LISTENER_VARIABLE, None)) is not None:
        inherited = socket.socket(fileno=int(descriptor))
        inherited.set_inheritable(False)
        return inherited
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets with an explicit protocol; without it an answer may take 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    _allow_reuse(listener, True)  # of a port whose earlier connections are not forgotten yet
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise _no_port(host, port, error) from None
    # Two sockets that both allow it, and do not listen, may have the same port, also of different users.
    _allow_reuse(listener, False)
    return listener


def start_listening(listener: socket.socket, backlog: int) -> None:
    """Listen, without a moment before or after it in which another socket may have the port.

    A user who tried without pause listened first where reuse was allowed while the application started.

    Raises:
        ConfigError: another process has the port nevertheless.
    """
    try:
        listener.listen(backlog)
    except OSError:  # earlier connections are not forgotten yet
        _allow_reuse(listener, True)
        try:
            listener.listen(backlog)
        except OSError as error:
            _allow_reuse(listener, False)
            host, port = listener.getsockname()[:2]
            raise _no_port(host, port, error) from None
    # No socket may have the port of one that listens. Each connection takes the option from here as it is made: the
    # kernel keeps those of a killed process for up to 60 s, and one without it keeps the next process from the port.
    _allow_reuse(listener, True)


def accept(listener: socket.socket) -> socket.socket:
    """Take a connection that waits; once closed it keeps no process, after this one, from the port."""
    connection, _ = listener.accept()
    _allow_reuse(connection, True)  # for one that was made just before the listening socket had it
    return connection


def refuse_connections(listener: socket.socket) -> None:
    """Stop listening, in every process that has this socket, and keep the port."""
    _allow_reuse(listener, False)
    if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # else it could not listen again after this
        listener.shutdown(socket.SHUT_RDWR)


def _no_port(host: str, port: int, error: OSError) -> ConfigError:
    holders = {who_has(each) for each in listening_sockets([port])} if port else set()
    held = f", held by {' and '.join(sorted(holders))}" if holders else ""
    return ConfigError(
        f"--host {host} --port {port}: cannot listen: {error.strerror or error}{held}; "
        "stop the process that uses the port, or choose another port"
    )


def _allow_reuse(listener: socket.socket, is_allowed: bool) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, is_allowed)


class ListeningServer(uvicorn.Server):
    """uvicorn on a socket of `take_port`."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self._listener = listener
        self._accepted: set[asyncio.Task[None]] = set()

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal."""
        raise_descriptor_limit()
        logging.getLogger("uvicorn.error").addFilter(SomeWarnings())
        super().run(sockets=[self._listener])

    def run_until_signal(self) -> bool:
        """Serve until SIGTERM or SIGINT; whether it was ever up."""
        # uvicorn raises the signal again after its shutdown, for its caller; here the process exits anyway.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _ignore)
        self.run()
        return bool(self.started)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and log the address, which uvicorn does not do for a socket that it was given."""
        await super().startup([])
        if self.started:
            start_listening(self._listener, self.config.backlog)
            self._listener.setblocking(False)
            self._accept_from_now_on()
            host, port = self._listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            scheme = "https" if self.config.is_ssl else "http"
            logger = logging.getLogger("uvicorn.error")
            logger.info("Uvicorn running on %s://%s:%d (Press CTRL+C to quit)", scheme, shown, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new connections, also where a fork server has the socket open, and answer those that are there."""
        asyncio.get_running_loop().remove_reader(self._listener)
        refuse_connections(self._listener)
        await super().shutdown(sockets)

    def _accept_from_now_on(self) -> None:
        if not self.should_exit:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Accept the connections that wait."""
        loop = asyncio.get_running_loop()
        for _ in range(max(1, min(MAX_ACCEPTED, max_connections() // 16))):
            try:
                connection = accept(self._listener)
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                loop.remove_reader(self._listener)
                loop.call_later(ACCEPT_AGAIN_S, self._accept_from_now_on)
                return
            task = loop.create_task(self._take(connection))
            self._accepted.add(task)
            task.add_done_callback(self._accepted.discard)

    async def _take(self, connection: socket.socket) -> None:
        protocol: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        made = partial(protocol, config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(made, connection, ssl=self.config.ssl)
        except OSError:  # it is closed already, or no TLS
            connection.close()


def plain_server(application: Any, listener: socket.socket, *, log_level: str) -> ListeningServer:
    """A server for an application without a lifespan, on a socket of `take_port`."""
    host, port = listener.getsockname()[:2]
    config = uvicorn.Config(
        application,
        host=host,
        port=port,
        log_level=log_level,
        access_log=log_level == "debug",
        lifespan="off",
        http=LimitedProtocol,
        timeout_graceful_shutdown=1,
    )
    return ListeningServer(config, listener)


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing."""
