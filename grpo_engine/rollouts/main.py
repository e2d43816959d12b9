"""Run the rollout API until SIGTERM or SIGINT, which it answers within a second."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import socket
import sqlite3
import sys
import time
from pathlib import Path
from types import FrameType

import uvicorn
from pydantic import ValidationError

from grpo_engine.errors import ConfigError
from grpo_engine.rollouts.app import make_app
from grpo_engine.rollouts.config import ApiConfig
from grpo_engine.rollouts.connections import WatchedProtocol
from grpo_engine.rollouts.guard import LOOPBACK
from grpo_engine.rollouts.store import IN_MEMORY, Store
from grpo_engine.wire.rollouts import TOKEN_VARIABLE

_LINGER_S = 1
"""Seconds that open requests have once the end was asked for; posts that wait for room are turned away before."""
_KEEP_ALIVE_S = 75
"""Longer than clients keep a connection that they do not use: else one may post into a connection that is just closed,
and stock ones then wait up to ten seconds before they try again."""


def run(config: ApiConfig) -> int:
    """Serve until a signal; returns the exit code.

    Raises:
        ConfigError: the port is taken, or the database is not ours to use.
    """
    _log_events(config.log_level)
    config = config.model_copy(update={"token": _token(config)})
    listener = _listen(config.host, config.port)
    path = _store_path(config)
    config = config.model_copy(update={"store": path})
    store = Store(path)
    if config.fresh:
        store.commit([store.clear])
    _say_what_is_there(store, path)
    if config.token is None and config.host not in LOOPBACK:
        _say(
            logging.WARNING,
            "anybody who reaches this address can add training data or reset the run",
            host=config.host,
            instead="give --token-file, or listen on 127.0.0.1",
        )
    # uvicorn raises the signal again once it has ended, so that its caller notices; here the end is the answer to it.
    previous = {number: signal.signal(number, _ignore) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server = _Server(
            uvicorn.Config(
                make_app(config, store),
                host=config.host,
                port=config.port,
                log_level=config.log_level,
                access_log=config.access_log,
                timeout_graceful_shutdown=_LINGER_S,
                timeout_keep_alive=_KEEP_ALIVE_S,
                http=WatchedProtocol,
                ws="none",
            )
        )
        server.run(sockets=[listener])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        listener.close()
    return 0 if server.started else 1


class _Server(uvicorn.Server):
    """uvicorn, except that those who wait for an answer do not keep it from ending."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin, and say where: uvicorn leaves that to whoever opened the socket."""
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            logging.getLogger("uvicorn.error").info(
                "Uvicorn running on http://%s:%d (Press CTRL+C to quit)", shown, port
            )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End: first those who wait, then the rest."""
        self.config.app.state.exchange.close()  # type: ignore[union-attr]
        await super().shutdown(sockets)


class _JsonLines(logging.Formatter):
    """One JSON object an event."""

    def format(self, record: logging.LogRecord) -> str:
        """The event with its time, level and fields."""
        fields = getattr(record, "fields", {})
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        line = {"time": stamp, "level": record.levelname.lower(), "event": record.getMessage(), **fields}
        return json.dumps(line, ensure_ascii=False, default=str)


def _log_events(level: str) -> None:
    logging.raiseExceptions = False  # a log on a full disk is no reason for a traceback a line
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    logger = logging.getLogger("grpo_engine.rollouts")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only where the protocol is named; with it each answer may take 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there: {error.strerror or error}; "
            "end who uses it, or choose another port"
        ) from None
    return listener


def _token(config: ApiConfig) -> str | None:
    """The token that is asked for, from wherever it is given."""
    if config.token_file is None:
        return config.token or os.environ.get(TOKEN_VARIABLE) or None
    try:
        token = config.token_file.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--token-file {config.token_file}: cannot be read: {why}") from None
    if not token:
        raise ConfigError(f"--token-file {config.token_file}: its first line is empty: write the token there")
    return token


def _store_path(config: ApiConfig) -> Path:
    """The file to keep everything in; a new one unless one is named."""
    path = config.store
    if path is None:
        names = itertools.chain(["rollouts.sqlite"], (f"rollouts-{number}.sqlite" for number in itertools.count(2)))
        path = next(Path(name) for name in names if _makes(Path(name)))
        _say(logging.INFO, "new store; --store FILE goes on with an earlier one", store=str(path.resolve()))
    elif str(path) != IN_MEMORY:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--store {path}: {error.strerror}: name another file") from None
    return path


def _makes(path: Path) -> bool:
    """Make an empty file, or say that there is one; nobody else can get the same."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError as error:
        raise ConfigError(f"{path.resolve()}: {error.strerror}: name a file with --store FILE") from None
    return True


def _say(level: int, event: str, **fields: object) -> None:
    logging.getLogger("grpo_engine.rollouts").log(level, event, extra={"fields": fields})


def _say_what_is_there(store: Store, path: object) -> None:
    try:
        stored = store.load()
    except (sqlite3.Error, ValidationError) as error:
        fault = error.errors(include_input=False)[0] if isinstance(error, ValidationError) else None
        why = str(error) if fault is None else ": ".join([*map(str, fault["loc"]), fault["msg"]])
        raise ConfigError(
            f"--store {path}: damaged: {why}: move it away, name another file, or forget what it holds by --fresh"
        ) from error
    if stored.run is None and not stored.groups:
        return
    step = stored.run.step if stored.run else 0
    _say(
        logging.INFO,
        "resumed; --fresh would forget it",
        store=str(path),
        step=step,
        groups=len(stored.groups),
        environments=len(stored.environments),
    )


def _ignore(number: int, frame: FrameType | None) -> None:
    return None
