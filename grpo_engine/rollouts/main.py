"""Run the rollout API until SIGTERM or SIGINT; it exits within a second of the signal."""

from __future__ import annotations

import gc
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
from grpo_engine.rollouts.config import ApiConfig
from grpo_engine.rollouts.http.app import make_app
from grpo_engine.rollouts.stock.connections import WatchedProtocol
from grpo_engine.rollouts.storage.store import IN_MEMORY, Store
from grpo_engine.serving.access import is_loopback
from grpo_engine.serving.listening import ListeningServer, take_port
from grpo_engine.serving.reporting import Reporter
from grpo_engine.serving.turn import begin_in_turn
from grpo_engine.wire.access_token import find_token, read_token
from grpo_engine.wire.run_folder import ROLLOUT_STORE
from grpo_engine.wire.terminal_text import printable

_LINGER_S = 1
"""Time for open requests during shutdown; requests that are held are refused before."""
_KEEP_ALIVE_S = 75
"""Longer than clients keep an idle connection: else one may post into a connection that is being closed, and stock
clients then wait up to ten seconds before they retry."""


def run(config: ApiConfig) -> int:
    """Serve until a signal; returns the exit code.

    Raises:
        ConfigError: the port is taken, or the store cannot be used.
    """
    _configure_logging(config.log_level)
    begin_in_turn(lambda: None, os.environ)  # what it needs is imported
    config = config.model_copy(update={"token": _token(config)})
    listener = take_port(config.host, config.port)
    path = _store_path(config)
    config = config.model_copy(update={"store": path})
    store = Store(path)
    if config.fresh:
        store.commit([store.clear])
    _report_stored(store, path)
    if config.token is None and not is_loopback(config.host):
        _event(
            logging.WARNING,
            "every host that reaches this address can add training data or reset the run",
            host=config.host,
            instead="set --token-file, or listen on 127.0.0.1",
        )
    # uvicorn raises the signal again after its shutdown, for its caller; here the process exits anyway.
    previous = {number: signal.signal(number, _ignore) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server = _Server(
            uvicorn.Config(
                make_app(config, store, Reporter.from_environment(os.environ)),
                host=config.host,
                port=config.port,
                log_level=config.log_level,
                access_log=config.access_log,
                timeout_graceful_shutdown=_LINGER_S,
                timeout_keep_alive=_KEEP_ALIVE_S,
                http=WatchedProtocol,
                ws="none",
            ),
            listener,
        )
        gc.freeze()  # a full collection stops all requests, 50 ms where it looks at every module
        server.run()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        listener.close()
    return 0 if server.started else 1


class _Server(ListeningServer):
    """A server, except that held requests do not delay the shutdown."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse held requests, then shut down."""
        self.config.app.state.coordinator.close()  # type: ignore[union-attr]
        await super().shutdown(sockets)


class _JsonLines(logging.Formatter):
    """Formats an event as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """The event with its time, level and fields."""
        fields = getattr(record, "fields", {})
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        line = {"time": stamp, "level": record.levelname.lower(), "event": record.getMessage(), **fields}
        return printable(json.dumps(line, ensure_ascii=False, default=str))


def _configure_logging(level: str) -> None:
    logging.raiseExceptions = False  # with a full disk every line would add a traceback
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    logger = logging.getLogger("grpo_engine.rollouts")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())


def _token(config: ApiConfig) -> str | None:
    """The token that requests must carry, from setting, file or environment."""
    if config.allow_without_token:
        return None
    if config.token_file is not None:
        return read_token(config.token_file, where="--token-file")
    return config.token or find_token(os.environ)


def _store_path(config: ApiConfig) -> Path:
    """The store's file; a new one unless one is named."""
    path = config.store
    if path is None:
        names = itertools.chain([ROLLOUT_STORE], (f"rollouts-{number}.sqlite" for number in itertools.count(2)))
        path = next(Path(name) for name in names if _is_created(Path(name)))
        _event(logging.INFO, "new store; --store FILE resumes an earlier one", store=str(path.resolve()))
    elif str(path) != IN_MEMORY:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--store {path}: {error.strerror}: name another file") from None
    return path


def _is_created(path: Path) -> bool:
    """Create an empty file atomically; False when it exists."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError as error:
        raise ConfigError(f"{path.resolve()}: {error.strerror}: name a file with --store FILE") from None
    return True


def _event(level: int, event: str, **fields: object) -> None:
    logging.getLogger("grpo_engine.rollouts").log(level, event, extra={"fields": fields})


def _report_stored(store: Store, path: object) -> None:
    try:
        stored = store.load()
    except (sqlite3.Error, ValidationError) as error:
        fault = error.errors(include_input=False)[0] if isinstance(error, ValidationError) else None
        why = str(error) if fault is None else ": ".join([*map(str, fault["loc"]), fault["msg"]])
        raise ConfigError(
            f"--store {path}: damaged: {why}: move it away, name another file, or delete its content with --fresh"
        ) from error
    if stored.run is None and not stored.groups:
        return
    step = stored.run.step if stored.run else 0
    _event(
        logging.INFO,
        "resumed; --fresh would delete it",
        store=str(path),
        step=step,
        groups=len(stored.groups),
        environments=len(stored.environments),
    )


def _ignore(number: int, frame: FrameType | None) -> None:
    return None
