"""Run a parameter service until SIGTERM or SIGINT."""

from __future__ import annotations

import os
import signal
from types import FrameType

import uvicorn

from grpo_engine.bridges.transport.parameter_store import ParameterStore, is_under_a_supervisor
from grpo_engine.parameters.app import create_app
from grpo_engine.parameters.config import ParametersConfig
from grpo_engine.parameters.fetching import Fetcher
from grpo_engine.serving.connections import LimitedProtocol
from grpo_engine.serving.listening import ListeningServer, take_port
from grpo_engine.serving.turn import begin_in_turn
from grpo_engine.wire.access_token import find_token


def run(config: ParametersConfig) -> int:
    """Serve; the exit code is 1 where it could not listen.

    Raises:
        ConfigError: the port is taken.
    """
    begin_in_turn(lambda: None, os.environ)  # what it needs is imported
    listener = take_port(config.host, config.port)
    store = ParameterStore(config.handover.absolute(), config.server_urls, storage=config.storage)
    fetcher = None if config.source is None else Fetcher(config.source, store)
    if fetcher is not None:
        fetcher.start()
    server = ListeningServer(
        uvicorn.Config(
            create_app(store, host=config.host, token=None if config.allow_without_token else find_token(os.environ)),
            host=config.host,
            port=config.port,
            log_level=config.log_level,
            access_log=config.log_level == "debug",
            lifespan="off",
            http=LimitedProtocol,
            timeout_graceful_shutdown=1,
        ),
        listener,
    )
    # uvicorn raises the signal again after its shutdown, for its caller; here the process exits anyway.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ignore)
    server.run()
    if fetcher is not None:
        fetcher.close()
    store.close(keeps_newest=is_under_a_supervisor())  # for servers that start after a restart of this service
    return 0 if server.started else 1


def _ignore(number: int, frame: FrameType | None) -> None:
    return None
