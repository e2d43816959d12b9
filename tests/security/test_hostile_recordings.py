"""Run folders and sweeps from elsewhere, given to `simulate` and `sweep status`."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from grpo_engine.config import read_table
from grpo_engine.errors import ConfigError
from grpo_engine.simulate.recording import figures_of, read_recording
from grpo_tui.profile import simulated
from grpo_tui.profile.simulated import recorded_figures, shape_of
from grpo_tui.run_files.resolved import read_resolved
from grpo_tui.sweeps.asked import Asked, points
from grpo_tui.sweeps.chooser import STUDY_FILE, Chooser
from grpo_tui.sweeps.grid import checked_values, points_of

SERVICES: dict[str, dict[str, Any]] = {
    "trainer": {"kind": "trainer", "batch_size": 8},
    "vllm": {"kind": "inference", "engine": "torch", "max_batch_size": 8},
    "env": {"kind": "environment", "group_size": 4, "max_workers": 4, "max_batches_offpolicy": 3},
}
METRICS = {
    "train/step_time": 2.0, "train/data_fetch_time": 0.5, "train/sync_time": 0.1, "train/tokens_per_second": 1000.0,
    "rollout/length_mean": 20.0, "rollout/busy_fraction": 0.5, "train/busy_fraction": 0.5,
}  # fmt: skip
TIMES = ("train/step_time", "train/data_fetch_time", "train/sync_time", "train/tokens_per_second")
BAD_VALUES = (1e308, -1e308, 1e-308, -5.0)


def recorded(
    folder: Path, services: object = SERVICES, changes: dict[str, float] | None = None, time_step: float = 2.0
) -> Path:
    """A run of thirty steps."""
    lines = [
        {"time": 1.7e9 + time_step * step, "step": step, "metrics": {**METRICS, **(changes or {})}}
        for step in range(1, 31)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    group = json.dumps({"completions": [{"token_ids": [1] * 20}] * 4})
    (folder / "rollouts.jsonl").write_text(f"{group}\n" * 8)
    (folder / "resolved.json").write_text(json.dumps({"services": services}))
    return folder


def test_a_recorded_run_gives_figures(tmp_path: Path) -> None:
    assert recorded_figures(recorded(tmp_path)).trainer.tokens_per_s > 0


@pytest.mark.parametrize("line", [b'{"\xf9step": 3}', b'{"step": 3, "x": ' + b"[" * 100_000], ids=["bytes", "depth"])
def test_a_line_that_is_no_text_or_nested_too_deep_is_left_out_by_simulate(line: bytes, tmp_path: Path) -> None:
    folder = recorded(tmp_path)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        (folder / name).write_bytes(line + b"\n" + (folder / name).read_bytes())
    assert recorded_figures(folder).trainer.tokens_per_s > 0


@pytest.mark.parametrize("name", [*TIMES, "rollout/busy_fraction", "rollout/length_mean"])
def test_figures_that_no_run_measures_are_left_out_or_refused_by_simulate(name: str, tmp_path: Path) -> None:
    for value in BAD_VALUES:
        folder = recorded(tmp_path, changes={name: value})
        with suppress(ConfigError):
            recording = read_recording(folder)
            figures = figures_of(recording, shape_of(SERVICES), num_ranks=1, batch_size=8)
            assert 0 < figures.trainer.tokens_per_s < 1e12
            assert 0 <= recording.wait_s < 1e12


@pytest.mark.parametrize("time_step", [0.0, -3.0, 1e300])
def test_times_that_are_none_of_steps_are_refused_by_simulate(time_step: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        recorded_figures(recorded(tmp_path, time_step=time_step))


@pytest.mark.parametrize(
    "services",
    [
        *({**SERVICES, "trainer": {**SERVICES["trainer"], "batch_size": value}} for value in (10**18, -4, "x", None)),
        *({**SERVICES, "vllm": {**SERVICES["vllm"], "replicas": value}} for value in (10**12, 1e400)),
        *({**SERVICES, "vllm": {**SERVICES["vllm"], "max_batch_size": value}} for value in (10**18, -1, "x")),
        {**SERVICES, "env": {"kind": "environment"}},
        {"trainer": 5},
        [],
        None,
    ],
    ids=str,
)
def test_settings_of_no_run_are_refused_by_simulate(services: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        recorded_figures(recorded(tmp_path, services))


@pytest.mark.parametrize("changes", [
    {"trainer": {"batch_size": 1 << 18}, "env": {"group_size": 1}}, {"trainer": {"max_staleness": 1 << 20}},
])  # fmt: skip
def test_settings_that_take_endless_to_simulate_are_refused_in_time(
    changes: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated, "FITTED_WITHIN_S", 0.3)
    services = {name: {**service, **changes.get(name, {})} for name, service in SERVICES.items()}
    folder = recorded(tmp_path, services)
    began = time.process_time()  # of this process: another one may have the cores
    with pytest.raises(ConfigError, match="its servers cannot be fitted within"):
        recorded_figures(folder)
    assert time.process_time() - began < 10


def test_a_pipe_in_place_of_recorded_metrics_is_not_waited_for(tmp_path: Path) -> None:
    recorded(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ConfigError, match="not a regular file"):
        recorded_figures(tmp_path)


# --- sweeps ----------------------------------------------------------------------------------------------------------


def test_a_grid_of_more_combinations_than_fit_into_memory_is_refused(tmp_path: Path) -> None:
    settings = {f"k{number}": list(range(10)) for number in range(20)}
    for num_random in (None, 5):
        with pytest.raises(ConfigError, match=r"10{20} (points|combinations) are"):
            points_of(settings, num_random=num_random)
    with pytest.raises(ConfigError, match="1000000 values are more than"):
        checked_values("k", range(1_000_000))
    asked = Asked(profile="p", optuna=5, seeds=10**12, settings={"services.t.env.V": ["x", "y"]})
    table = {"services": {"t": {"kind": "environment", "model_name": "m", "task": {"name": "arithmetic"}}}}
    with pytest.raises(ConfigError, match="--optuna: 5000000000000 points are more than"):
        points(asked, table, tmp_path / "p.toml", [{"services.t.env.V": "x"}])


@pytest.mark.parametrize("name", ["deep.toml", "deep.json", "deep.yaml"])
def test_settings_nested_deeper_than_any_are_refused_before_they_are_walked_through(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    deep = {"deep.toml": ".".join("a" * 500) + " = 1", "deep.json": '{"a":' * 200 + "1" + "}" * 200}
    path.write_text(deep.get(name, "a: " + "[" * 200 + "]" * 200))
    with pytest.raises(ConfigError, match="nested too deep"):
        read_table(path)
    (tmp_path / "resolved.json").write_text(deep["deep.json"])
    with pytest.raises(ValueError, match="nested too deep"):
        read_resolved(tmp_path)


def test_a_study_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    (tmp_path / STUDY_FILE).symlink_to(tmp_path / "other.db")
    with pytest.raises(ConfigError, match="is a link"):
        Chooser(tmp_path, {"k": [1, 2]}, None)
    assert not (tmp_path / "other.db").exists()


def test_a_study_whose_journal_has_sqlite_delete_another_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    (tmp_path / f"{STUDY_FILE}-journal").write_bytes(bytes.fromhex("d9d505f920a163d7"))
    with pytest.raises(ConfigError, match="its journal names another file, which SQLite would delete"):
        Chooser(tmp_path, {"k": [1, 2]}, None)
