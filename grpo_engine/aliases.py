"""Programs of other trainers under their names there: `run-api`, `atropos-grpo` and `atropos-grpo-run` of Atropos's
example trainer, `run-colocated-grpo` of co-located ones; and files that are run there by their path, of a checkout."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from grpo_engine.cli import main
from grpo_engine.config import read_table
from grpo_engine.errors import ConfigError
from grpo_engine.python_command import is_of_others

COLOCATED_CONFIG = Path("training_configs/dr_grpo_config.yaml")
"""The configuration that a co-located trainer reads unless it is given another."""


def run_api() -> int:
    """As `grpo-engine api`."""
    return _run("api", sys.argv[1:])


def atropos_grpo() -> int:
    """As `grpo-engine train`; the modes `none` and `lora_restart` start the server, where none answers."""
    return _run("train", with_own_server(sys.argv[1:]))


def atropos_grpo_run() -> int:
    """As `grpo-engine launch`."""
    return _run("launch", sys.argv[1:])


def vllm_api_server() -> int:
    """As `grpo-engine server`."""
    return _run("server", sys.argv[1:])


def gsm8k_server() -> int:
    """As `grpo-engine env --task gsm8k`."""
    return _run("env", ["--task", "gsm8k", *(word for word in sys.argv[1:] if word != "serve")])


def run_colocated_grpo() -> int:
    """As `grpo-engine train` in the mode in which it samples itself; there `python run_colocated_grpo.py`."""
    given = sys.argv[1:]
    try:
        defaults = colocated_defaults(given, Path.cwd())
    except ConfigError as error:
        sys.stderr.write(f"run-colocated-grpo: {error}\n")
        return 2
    if defaults:
        sys.stderr.write(f"run-colocated-grpo: by default {' '.join(defaults)}\n")
    return _run("train", ["--weight-bridge-mode", "colocate", *defaults, *given])


def with_own_server(argv: list[str]) -> list[str]:
    """The flags of a trainer, with `--bridge-restart` for the modes of which the stock trainer starts the server."""
    from grpo_engine.bridges.transport.server_control import is_listening

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--weight-bridge-mode", default="none")
    parser.add_argument("--vllm-port", default="9001")
    parser.add_argument("--bridge-restart", action=argparse.BooleanOptionalAction)
    parser.add_argument("--server-urls", nargs="*")
    given, _ = parser.parse_known_args(argv)
    starts_one = given.weight_bridge_mode in ("none", "lora_restart") and not given.server_urls
    if not starts_one or given.bridge_restart is not None or not given.vllm_port.isdigit():
        return argv
    return argv if is_listening(f"http://127.0.0.1:{given.vllm_port}") else [*argv, "--bridge-restart"]


def colocated_defaults(given: list[str], folder: Path) -> list[str]:
    """Flags that a co-located trainer need not be given: its configuration file, where `folder` has it, and its task,
    the game in which agents deceive each other."""
    if any(word in ("-h", "--help") for word in given):
        return []
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--task", "--task.name")
    known, others = parser.parse_known_args(given)
    file: Path | None = known.config
    if file is None and (folder / COLOCATED_CONFIG).is_file():
        if is_of_others(folder / COLOCATED_CONFIG, folder):
            raise ConfigError(
                f"{COLOCATED_CONFIG} or its folder belongs to another user, or all users may write to it: after you "
                f"have read it, name it with --config {COLOCATED_CONFIG}"
            )
        file = COLOCATED_CONFIG
    flags = ["--config", str(file)] if file is not None and known.config is None else []
    is_asked = known.task is not None or any(word.startswith("env.dataset=") for word in others)
    if is_asked or (file is not None and _names_a_task(folder / file)):
        return flags
    return [*flags, "--task", "mafia", "--task.policy-plays", "town"]


def _names_a_task(file: Path) -> bool:
    """Whether a configuration file has a table of the environment; a file that cannot be read is reported later."""
    try:
        return "environment" in read_table(file)
    except ConfigError:
        return True


def _run(command: str, flags: list[str]) -> int:
    sys.argv[1:] = [command, *flags]
    return main()
