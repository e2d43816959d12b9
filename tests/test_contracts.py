"""Names and lines on which several processes must agree, each spelled out once more: a change of one is deliberate."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from grpo_engine.bridges import BY_MODE
from grpo_engine.wire import environment_variables, log_lines, run_folder
from grpo_engine.wire.log_lines import LogLine

LINES = {name: line for name, line in vars(log_lines).items() if isinstance(line, LogLine)}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_the_supervisor_finds_every_line_that_a_service_logs(line: LogLine) -> None:
    assert re.search(line.pattern, re.sub(r"%[.\d]*[a-z]", "7", line.text))


def test_the_markers_that_probes_wait_for_keep_their_words() -> None:
    assert log_lines.TRAINER_READY.pattern == "trainer ready"
    assert log_lines.ENVIRONMENT_READY.pattern == "environment ready"


def test_files_and_variables_that_people_and_scripts_use_keep_their_names() -> None:
    files = [value for name, value in vars(run_folder).items() if name.isupper() and isinstance(value, str)]
    assert sorted(name for name in files if not name.startswith("_")) == sorted(
        [
            *("plan.json", "resolved.json", "state.json", "daemon.json", "daemon.lock", ".start.lock"),
            *("broker.address", "machines.json", ".ended"),
            *("supervisor.log", "events.jsonl", "metrics.jsonl", "rollouts.jsonl", "rollouts.sqlite", "keepers"),
            *(
                "vllm_bridge_config.json",
                "handover",
                "current",
                "handover.json",
                "sender.json",
                "checkpoints",
                ".checkpoints.lock",
                ".spec.json",
            ),
            *(
                "access.token",
                "checkpoint.json",
                "journal",
                "settings.json",
                "lives",
                "policies",
                "parent.json",
                "sweep.json",
                "sweeps",
                "set-aside",
                "turn.lock",
                "in-step",
                "ports.json",
                "served.json",
                "used_versions.json",
            ),
        ]
    )
    variables = [value for value in vars(environment_variables).values() if isinstance(value, str) and value.isupper()]
    assert sorted(variables) == sorted(
        [
            *("GRPO_TUI_RUN", "GRPO_TUI_RUN_FOLDER", "GRPO_TUI_SERVICE", "GRPO_TUI_ATTEMPT", "GRPO_TUI_INFERENCE"),
            *("GRPO_TUI_GATE", "GRPO_SECRET_ARGUMENT_"),
            *("GRPO_TUI_HOOK_", "GRPO_API_TOKEN", "GRPO_API_TOKEN_FILE", "VLLM_BRIDGE_CONFIG_PATH", "LOGDIR"),
            *(
                "GRPO_FORK_SERVER_PID",
                "GRPO_FORK_SERVER_RESTARTS",
                "GRPO_SERVER_SPEEDS",
                "GRPO_VLLM_SERVER",
                "GRPO_VLLM_SHARE_WEIGHTS",
            ),
            *("GRPO_LISTENER", "GRPO_INFERENCE_KEY", "GRPO_MACHINE_ADDRESS", "GRPO_REPORTS_SOCKET"),
        ]
    )


def test_file_names_with_a_service_attempt_or_step(tmp_path: Path) -> None:
    assert run_folder.service_log(tmp_path, "vllm") == tmp_path / "vllm.log"
    assert run_folder.crash_report_file(tmp_path, "vllm", 3) == tmp_path / "crash-vllm-3.txt"
    assert run_folder.keeper_state_file(tmp_path, "vllm", 3) == tmp_path / "keepers" / "vllm.3.json"
    assert run_folder.keeper_spec_file(tmp_path, "vllm", 3) == tmp_path / "keepers" / "vllm.3.spec.json"
    assert run_folder.checkpoint_folder(tmp_path, 12) == tmp_path / "step_12"
    assert [run_folder.checkpoint_step(tmp_path / name) for name in ("step_12", ".step_12.removed")] == [12, None]


def test_crash_reports_are_listed_by_attempt(tmp_path: Path) -> None:
    for name in ("crash-a-2.txt", "crash-a-10.txt", "crash-a-b-1.txt", "crash-a-x.txt"):
        (tmp_path / name).touch()
    assert list(run_folder.crash_report_files(tmp_path, "a")) == [2, 10]
    assert run_folder.newest_crash_report(tmp_path, "a") == tmp_path / "crash-a-10.txt"
    assert run_folder.newest_crash_report(tmp_path / "gone", "a") is None


def test_functions_that_contributing_names_exist() -> None:
    root = Path(__file__).parents[1]
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (root / "CONTRIBUTING.md").read_text())
    missing = [name for path, name in named if not re.search(rf"(def|class) {name}\b", (root / path).read_text())]
    assert (len(named) > 10, missing) == (True, [])


def test_nothing_outside_of_bridges_asks_which_mode_it_is() -> None:
    root = Path(__file__).parents[1]
    asked = [
        f"{file.relative_to(root)}:{node.lineno}"
        for package in ("grpo_engine", "grpo_tui")
        for file in (root / package).rglob("*.py")
        if not file.is_relative_to(root / "grpo_engine" / "bridges")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Compare)
        and isinstance(node.left, ast.Attribute | ast.Call)
        and "mode" in ast.unparse(node.left)
        and any(repr(mode) in ast.unparse(other) for mode in BY_MODE for other in node.comparators)
    ]
    translated = "grpo_engine/aliases.py", "grpo_engine/train/config.py"  # `--use-shared-memory` and stock programs
    assert [each for each in asked if not each.startswith(translated)] == []
