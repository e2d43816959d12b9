"""Run a parameter service until SIGTERM or SIGINT."""

from __future__ import annotations

import os

from grpo_engine.bridges.transport.parameter_store import ParameterStore, is_under_a_supervisor
from grpo_engine.parameters.app import create_app
from grpo_engine.parameters.config import ParametersConfig
from grpo_engine.parameters.fetching import Fetcher
from grpo_engine.parameters.machines import OtherMachines
from grpo_engine.serving.listening import plain_server, take_port
from grpo_engine.serving.turn import begin_in_turn
from grpo_engine.wire.access_token import find_token


def run(config: ParametersConfig) -> int:
    """Serve; the exit code is 1 where it could not listen.

    Raises:
        ConfigError: the port is taken.
    """
    begin_in_turn(lambda: None, os.environ)  # what it needs is imported
    listener = take_port(config.host, config.port)
    is_placed = config.machine is not None
    store = ParameterStore(
        config.handover.absolute(), config.server_urls, storage=config.storage, has_placed_only=is_placed
    )
    fetcher = None if config.source is None else Fetcher(config.source, store, machine=config.machine)
    if fetcher is None:
        store.tell_in_step()
    else:
        fetcher.start()
    token = None if config.allow_without_token else find_token(os.environ)
    others = OtherMachines(config.server_urls if is_placed and fetcher is None else ())
    application = create_app(store, host=config.host, token=token, machines=others)
    was_up = plain_server(application, listener, log_level=config.log_level).run_until_signal()
    if fetcher is not None:
        fetcher.close()
    store.close(keeps_newest=is_under_a_supervisor())  # for servers that start after a restart of this service
    return 0 if was_up else 1
