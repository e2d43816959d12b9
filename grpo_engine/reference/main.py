"""Run a reference service until SIGTERM or SIGINT.

The port is taken at once, and open when the model is loaded; until then connections are refused.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial

from grpo_engine.models.loading import is_at_hand, modeling_module
from grpo_engine.reference.app import create_app
from grpo_engine.reference.config import ReferenceConfig
from grpo_engine.reference.memory import report
from grpo_engine.reference.scoring import FrozenModel
from grpo_engine.serving.listening import plain_server, take_port
from grpo_engine.serving.turn import begin_in_turn
from grpo_engine.wire.access_token import find_token


def run(config: ReferenceConfig) -> int:
    """Serve; the exit code is 1 after an error of the device.

    Raises:
        ConfigError: the port is taken, or there is no such device.
        ModelError: the model cannot be loaded.
    """
    if config.dry_run:
        text, fits = report(config)
        sys.stdout.write(text)
        return 0 if fits else 1
    begin_in_turn(partial(prepare, config), os.environ)
    listener = take_port(config.host, config.port)
    failures: list[BaseException] = []

    def fail(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True

    app = create_app(
        FrozenModel(config),
        host=config.host,
        token=None if config.allow_without_token else find_token(os.environ),
        fail=fail,
    )
    server = plain_server(app, listener, log_level=config.log_level)
    was_up = server.run_until_signal()
    return 1 if failures or not was_up else 0


def prepare(config: ReferenceConfig) -> None:
    """Import what the model needs; touch no GPU."""
    if is_at_hand(config.model_name) and (module := modeling_module(config.model_name)) is not None:
        importlib.import_module(module)
