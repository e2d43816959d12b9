"""`grpo-engine api | server | env | atropos-env | train | check`: each service by hand, and a check before training.

Imports only the chosen command.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from grpo_engine.errors import ConfigError, GrpoError
from grpo_engine.flags import parse_flags

USAGE_ERROR = 2
"""What argparse exits with too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one service until it exits; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in {"-h", "--help"}:
        print(_usage())
        return 0 if words else USAGE_ERROR
    command = COMMANDS.get(words[0])
    if command is None:
        print(f"grpo-engine: {words[0]!r} is not one of {', '.join(COMMANDS)}", file=sys.stderr)
        return USAGE_ERROR
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # one line per request adds nothing to the metrics
    logging.getLogger("huggingface_hub").propagate = False  # it prints its lines on its own
    try:
        code = command(words[1:])
    except GrpoError as error:
        who = f"grpo-engine {words[0]}: "  # messages about settings have the prefix already, on each line
        print(who + str(error).removeprefix(who), file=sys.stderr)
        code = USAGE_ERROR if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    if command is _server and code:
        _leave(code)
    return code


def _leave(code: int) -> NoReturn:
    """Exit a failed server without the destructors of torch and vLLM.

    Triton's bindings report leaks there: sixty lines after the error message.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _api(argv: Sequence[str]) -> int:
    """Collects scored groups from environments, hands batches to the trainer."""
    from grpo_engine.rollouts.config import ApiConfig

    config = parse_flags(ApiConfig, argv, prog="grpo-engine api", description=_api.__doc__ or "")
    from grpo_engine.rollouts.main import run

    return run(config)


def _server(argv: Sequence[str]) -> int:
    """Samples completions with their log-probabilities, and takes new weights."""
    from grpo_engine.server.config import ServerConfig

    config = parse_flags(ServerConfig, argv, prog="grpo-engine server", description=_server.__doc__ or "")
    from grpo_engine.server.main import run

    return run(config)


def _env(argv: Sequence[str]) -> int:
    """Turns the items of a task into scored groups."""
    from grpo_engine.environments.config import EnvironmentConfig

    config = parse_flags(EnvironmentConfig, argv, prog="grpo-engine env", description=_env.__doc__ or "")
    from grpo_engine.environments.main import run

    return run(config)


def _atropos_env(argv: Sequence[str]) -> int:
    """Runs an environment of Atropos, and reports when it uses the wrong inference server."""
    from grpo_engine.environments.atropos.config import AtroposEnvConfig

    description = _atropos_env.__doc__ or ""
    config = parse_flags(AtroposEnvConfig, argv, prog="grpo-engine atropos-env", description=description)
    from grpo_engine.environments.atropos.main import run

    return run(config)


def _train(argv: Sequence[str]) -> int:
    """Trains on batches from the rollout API and hands new weights to inference."""
    from grpo_engine.train.config import TrainConfig

    config = parse_flags(TrainConfig, argv, prog="grpo-engine train", description=_train.__doc__ or "")
    from grpo_engine.train.main import run

    return run(config)


def _check(argv: Sequence[str]) -> int:
    """Checks before training whether sampler and trainer agree; takes the flags of train."""
    from grpo_engine.check.config import CheckConfig

    config = parse_flags(CheckConfig, argv, prog="grpo-engine check", description=_check.__doc__ or "")
    from grpo_engine.check.main import run

    return run(config)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "api": _api,
    "server": _server,
    "env": _env,
    "atropos-env": _atropos_env,
    "train": _train,
    "check": _check,
}


def _usage() -> str:
    lines = [f"  {name:<13}{command.__doc__}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: grpo-engine COMMAND [flags]   (grpo-engine COMMAND --help)", "", *lines])


if __name__ == "__main__":
    raise SystemExit(main())
