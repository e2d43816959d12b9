"""Start an inference server and the trainer that updates it, by one command; the server ends with the trainer.

Torch-free to import: the settings are read before anything heavy.
"""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

from pydantic import Field

from grpo_engine.bridges import AnyBridge, SharedVllm, Turns
from grpo_engine.bridges.protocol import BridgeContext
from grpo_engine.bridges.transport.in_place import InPlaceSettings
from grpo_engine.bridges.transport.server_control import LocalServer
from grpo_engine.errors import ConfigError, PeerUnavailable
from grpo_engine.flags import OtherFlags, flags_of_table
from grpo_engine.python_command import module_command
from grpo_engine.train.config import TrainConfig
from grpo_engine.wire.run_folder import HANDOVER_FOLDER
from grpo_engine.wire.secrets import without_secrets

SERVER_LOG = "vllm.log"
"""In the folder of --log-dir."""


class LaunchConfig(TrainConfig):
    """Settings of a training run whose inference server is started with it."""

    bridge: AnyBridge = SharedVllm()
    """How new weights reach inference."""
    server: Annotated[dict[str, Any], OtherFlags()] = Field(default_factory=dict)
    """Further settings of the server; on the command line, every flag that is not one of the trainer."""

    @property
    def starts_server(self) -> bool:
        """Always."""
        return True


def run(config: LaunchConfig) -> int:
    """Start the server, train, and end the server; returns the exit code of the trainer.

    Raises:
        ConfigError: several ranks, or nothing is left to train.
        BridgeError: the port is taken, or the server does not become healthy.
    """
    from grpo_engine.train import main as trainer
    from grpo_engine.train.checkpointing.resuming import has_steps_left

    if config.bridge.samples_in_process:
        raise ConfigError(f"bridge mode {config.bridge.mode} has no inference server to start: use grpo-engine train")
    if config.num_ranks > 1:
        raise ConfigError(f"{config.num_ranks} ranks: only one is started here: start `grpo-engine server` and `train`")
    if config.dry_run:
        return trainer.run(config)
    _, save_path = trainer.output_folders(config, time.localtime())
    if config.run_folder is None and not has_steps_left(config, save_path):
        return 0
    if isinstance(config.bridge, Turns) and config.bridge.handover is None:  # of both
        bridge = config.bridge.model_copy(update={"handover": (config.log_dir / HANDOVER_FOLDER).absolute()})
        config = config.model_copy(update={"bridge": bridge})
    stop = trainer.StopRequest()
    context = trainer.bridge_context(config, config.log_dir, is_stopping=stop)
    flags, hidden = without_secrets(server_flags(config, context))  # some may come from a file
    server = LocalServer(
        module_command("grpo_engine", "server", *flags),
        url=context.server_urls[0],
        log=config.log_dir / SERVER_LOG,
        environment={**os.environ, **context.server_environment, **hidden},
        patience_s=context.patience_s,
        is_stopping=stop,
    )
    try:
        server.attach()
        return trainer.run(config)
    except PeerUnavailable:
        if not stop():
            raise
        return 0
    finally:
        server.close()


def server_flags(config: LaunchConfig, context: BridgeContext) -> list[str]:
    """The command line of the server: what the trainer says of it, what the mode needs, and then what was given."""
    needs = {"shared_weights": False, **config.bridge.server_settings}
    flags = [*context.server_flags, *flags_of_table(needs)]
    if config.device != "auto":
        flags += ["--device", config.device]
    if isinstance(config.bridge, InPlaceSettings) and config.bridge.config_path is not None:
        flags += ["--bridge-file", str(config.bridge.config_path)]
    if isinstance(config.bridge, Turns) and config.bridge.handover is not None:
        flags += ["--handover", str(config.bridge.handover)]
    return [*flags, *flags_of_table(config.server)]
