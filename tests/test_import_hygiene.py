"""What is imported, in a fresh interpreter: the terminal side never imports torch, nor `status` a screen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_tui.services.kinds import KINDS

HEAVY = {"torch", "transformers", "vllm", "peft"}
LIGHT = [
    "grpo_tui.cli.planning",
    "grpo_tui.ui.app",
    "grpo_tui.client.api",
    "grpo_tui.view.diagnosis",
    "grpo_tui.view.model_card",
    "grpo_tui.profile.plan",
    "grpo_tui.profile.doctor",
    "grpo_tui.profile.start_checks",
    "grpo_tui.profile.simulated",
    "grpo_engine.cli",
    "grpo_engine.bridges",
    "grpo_engine.diagnosis.alignment",
    "grpo_engine.train.config",
    "grpo_engine.colocate.config",
    "grpo_engine.simulate.result",
    "grpo_engine.export.config",
    "grpo_engine.server.config",
    "grpo_engine.reference.config",
    "grpo_engine.parameters.config",
    "grpo_engine.rollouts.config",
    "grpo_engine.environments.config",
    "grpo_engine.environments.atropos.config",
    "grpo_engine.models.config",
]


def modules_after(statement: str) -> set[str]:
    """Modules that a fresh interpreter holds after a statement."""
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def loaded_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after a statement."""
    return {name.partition(".")[0] for name in modules_after(statement)}


@pytest.mark.slow
def test_the_terminal_side_and_every_setting_load_without_torch() -> None:
    """One interpreter imports one after the other, so the first line with a heavy module names what imports it."""
    lines = ["import importlib, sys", f"for name in {LIGHT}:", "    importlib.import_module(name)"]
    code = "\n".join([*lines, f"    print(name, *{HEAVY} & sys.modules.keys())"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == LIGHT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("grpo_tui.cli", {"textual", "httpx", "pynvml"}),
        ("grpo_tui.supervisor.daemon", {"textual", "typer", "rich"}),
        ("grpo_engine.algo.loss", {"transformers", "pydantic", "httpx"}),
        ("grpo_engine.server.main", {"numpy"}),  # with torch it starts threads, unless `preload` forbids it before
    ],
)
def test_a_part_of_the_program_loads_nothing_of_another(module: str, unwanted: set[str]) -> None:
    loaded = loaded_after(f"import {module}")
    assert not loaded & unwanted
    assert loaded & HEAVY == ({"torch"} if module == "grpo_engine.algo.loss" else set())


@pytest.mark.slow
def test_a_profile_of_commands_loads_no_setting_of_the_engine(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('[services.a]\nkind = "command"\nargv = ["true"]\n')
    loaded = modules_after(f"from grpo_tui.profile.loading import load; load({str(tmp_path / 'x.toml')!r})")
    assert "grpo_tui.services.command" in loaded
    packages = ("train", "server", "rollouts", "environments", "bridges", "models", "data", "algo", "flags")
    assert not {name for name in loaded for package in packages if f"{name}.".startswith(f"grpo_engine.{package}.")}


@pytest.mark.slow
def test_a_command_on_a_run_loads_no_profile_and_no_kind_of_service() -> None:
    loaded = modules_after("import grpo_tui.cli.look, grpo_tui.cli.follow, grpo_tui.cli.act, grpo_tui.cli.up")
    kinds = {f"grpo_tui.services.{kind}" for kind in KINDS}
    assert not loaded & {"grpo_tui.profile.loading", "grpo_tui.profile.model", "rich.console", "httpx", *kinds}


@pytest.mark.slow
@pytest.mark.parametrize("module", ["grpo_tui.cli.up", "grpo_tui.cli.screen"])
def test_a_command_that_starts_a_run_imports_little_before_the_supervisor_starts(module: str) -> None:
    loaded = modules_after(f"import {module}")
    ours = {name for name in loaded if name.partition(".")[0] in ("grpo_tui", "grpo_engine")}
    assert ours - {"grpo_tui.cli.arguments", "grpo_tui.cli.printing", "grpo_tui.client.interrupts"} == {
        "grpo_engine",
        "grpo_engine.errors",
        "grpo_engine.python_command",
        "grpo_tui",
        "grpo_tui.cli",
        "grpo_tui.client",
        "grpo_tui.client.new_daemon",
        "grpo_tui.exit_codes",
        "grpo_tui.paths",
        module,
    }
    assert not loaded & {"asyncio", "textual"}


@pytest.mark.slow
def test_the_status_of_a_run_loads_no_setting_and_nothing_that_starts_or_ends_a_service() -> None:
    live = modules_after("import grpo_tui.cli.look, grpo_tui.view.diagnosis")
    ended = modules_after("import grpo_tui.cli.look, grpo_tui.view.diagnosis, grpo_tui.supervisor.state_file")
    assert not ended & {"grpo_engine.config", "grpo_tui.services", "grpo_tui.profile", "grpo_tui.supervisor.teardown"}
    assert not live & {"grpo_tui.supervisor.state_file", "grpo_tui.supervisor.machine"}


@pytest.mark.slow
def test_a_model_loads_without_scikit_learn_which_is_there_for_others(tmp_path: Path) -> None:
    package = tmp_path / "sklearn"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "metrics.py").write_text("roc_curve = 1")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from grpo_engine.models import loading; "
        "print('sklearn' in sys.modules); from transformers.utils import is_sklearn_available; "
        "from sklearn.metrics import roc_curve; print(is_sklearn_available())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
