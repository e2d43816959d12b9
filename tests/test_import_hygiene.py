"""What really loads, in a fresh interpreter: the terminal side never pays for torch, nor `status` for a screen."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "vllm", "peft")


def loaded_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after a statement."""
    code = f"import sys; {statement}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        "grpo_tui.cli",
        "grpo_tui.cli.planning",
        "grpo_tui.ui.app",
        "grpo_tui.supervisor.daemon",
        "grpo_tui.client.api",
        "grpo_tui.view.diagnosis",
        "grpo_tui.profile.plan",
        "grpo_engine.cli",
        "grpo_engine.bridges",
        "grpo_engine.train.config",
        "grpo_engine.server.config",
        "grpo_engine.rollouts.config",
        "grpo_engine.environments.config",
        "grpo_engine.models.config",
    ],
)
def test_the_terminal_side_and_every_setting_load_without_torch(module: str) -> None:
    assert not loaded_after(f"import {module}").intersection(HEAVY)


@pytest.mark.slow
def test_the_command_line_loads_neither_a_screen_nor_an_http_client() -> None:
    assert not loaded_after("import grpo_tui.cli").intersection({"textual", "httpx", "pynvml"})


@pytest.mark.slow
def test_the_daemon_loads_neither_a_screen_nor_a_command_line() -> None:
    assert not loaded_after("import grpo_tui.supervisor.daemon").intersection({"textual", "typer", "rich"})


@pytest.mark.slow
def test_the_mathematics_load_torch_and_nothing_of_transformers() -> None:
    loaded = loaded_after("import grpo_engine.algo.loss")
    assert "torch" in loaded
    assert not loaded.intersection({"transformers", "pydantic", "httpx"})
