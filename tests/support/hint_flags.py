"""The flags that hints name, and those that our commands have."""

from __future__ import annotations

import argparse
import inspect
import re
from types import ModuleType

from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.flags import add_flags
from grpo_engine.server.config import ServerConfig
from grpo_engine.train.config import TrainConfig

OTHER_FLAGS = {"--openai.server_type", "--profile", "--take-ports", "--from"}
"""Of the stock environments, and of `grpo-tui`."""


def service_flags() -> set[str]:
    """Every flag of trainer, inference server and environment, and the few others that hints may name."""
    flags = set(OTHER_FLAGS)
    for config in (TrainConfig, ServerConfig, EnvironmentConfig):
        parser = argparse.ArgumentParser(add_help=False)
        add_flags(parser, config)
        flags |= {flag for action in parser._actions for flag in action.option_strings}
    return flags


def named_flags(module: ModuleType) -> set[str]:
    """Every flag in the source of a module."""
    return set(re.findall(r"--[a-z][a-z0-9_.-]*[a-z0-9]", inspect.getsource(module)))
