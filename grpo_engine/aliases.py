"""Programs of other trainers under their names there: `run-api`, `atropos-grpo` and `atropos-grpo-run` of Atropos's
example trainer, `run-colocated-grpo` of co-located ones."""

from __future__ import annotations

import argparse
import sys

from grpo_engine.cli import main


def run_api() -> int:
    """As `grpo-engine api`."""
    return _run("api", sys.argv[1:])


def atropos_grpo() -> int:
    """As `grpo-engine train`; the modes `none` and `lora_restart` start the server, where none answers."""
    return _run("train", with_own_server(sys.argv[1:]))


def atropos_grpo_run() -> int:
    """As `grpo-engine launch`."""
    return _run("launch", sys.argv[1:])


def run_colocated_grpo() -> int:
    """As `grpo-engine train` in the mode in which it samples itself; there `python run_colocated_grpo.py`."""
    return main(["train", "--weight-bridge-mode", "colocate", *sys.argv[1:]])


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


def _run(command: str, flags: list[str]) -> int:
    sys.argv[1:] = [command, *flags]
    return main()
