"""What the doctor reports about ports and GPUs, given their holders."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fake_mps
import pytest

from grpo_engine.diagnosis.finding import Finding
from grpo_tui.profile.doctor import GpuFacts, Machine, examine
from grpo_tui.profile.loading import load
from grpo_tui.profile.plan import make_plan

STRANGER = "100.0 GB held by pid 4711 (user bob): python train.py"
LEFTOVER = "66.1 GB held by pid 4712, left by run tiny-1121 of this project: python server.py"


def findings(folder: Path, settings: str, check: str, **machine: Any) -> list[Finding]:
    """Findings of one check for a profile with one command `job`."""
    profile = folder / "p.toml"
    profile.write_text(f'[services.job]\nkind = "command"\nargv = ["true"]\n{settings}\n')
    loaded = load(str(profile), [])
    plan = make_plan(loaded, run_folder=folder / "run", python=sys.executable)
    facts: dict[str, Any] = {"gpus": (), "gpu_note": "no NVIDIA driver", "port_holders": lambda ports: (), **machine}
    return [each for each in examine(Machine(**facts), loaded, plan, folder) if each.id == check]


def card(index: int = 0, *, free: int, **more: Any) -> GpuFacts:
    """A GPU of 140 GB."""
    return GpuFacts(
        index=index, name="H200", uuid=f"GPU-{index}", total_bytes=140 * 10**9, free_bytes=free * 10**9, **more
    )


def test_a_gpu_with_too_little_free_memory_is_an_error_that_names_its_holders(tmp_path: Path) -> None:
    gpus = [card(0, free=140), card(1, free=40, holders=[STRANGER])]
    [_, _, problem] = findings(tmp_path, "gpus = [1]\ngpu_memory_share = 0.45", "gpu", gpus=gpus)
    assert problem.severity == "error"
    assert problem.text == f"job needs 45% of GPU 1 (63.0 GB), 40.0 GB are free; {STRANGER}"
    assert problem.hint == "free the GPU, or --set services.job.gpu_memory_share=…"


def test_a_machine_without_a_gpu_is_one_error_that_names_the_services(tmp_path: Path) -> None:
    other = '[services.other]\nkind = "command"\nargv = ["true"]\ngpus = [0, 1]'
    [note, problem] = findings(tmp_path, f"gpus = [0]\n{other}", "gpu")
    assert (note.severity, note.text) == ("warning", "no NVIDIA driver")
    assert (problem.severity, problem.text) == ("error", "job and other: set to run on a GPU, but none is visible")


def test_an_environment_of_atropos_that_is_not_there_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATROPOS_ENVIRONMENT", raising=False)
    settings = f"""[services.env]
kind = "atropos_environment"
file = "$ATROPOS_ENVIRONMENT"
python = "{sys.executable}"
model_name = "local/tiny"
rollout_server_url = "http://127.0.0.1:8000"
inference_url = "http://127.0.0.1:9001"
"""
    [problem] = findings(tmp_path, settings, "atropos")
    assert problem.text == "services.env.file: $ATROPOS_ENVIRONMENT is not a file"
    assert problem.hint.startswith("export ATROPOS_ENVIRONMENT=…, or --set services.env.file")


def test_stale_processes_are_a_note(tmp_path: Path) -> None:
    gpus = [card(free=40, holders=[LEFTOVER], left_over_bytes=66_100_000_000)]
    [_, note] = findings(tmp_path, "gpus = [0]\ngpu_memory_share = 0.45", "gpu", gpus=gpus)
    assert (note.severity, note.hint) == ("warning", "a start ends these stale processes")
    assert note.text.endswith(LEFTOVER)
    gpus = [card(free=40, holders=[STRANGER, LEFTOVER], left_over_bytes=22_000_000_000)]
    [_, problem] = findings(tmp_path, "gpus = [0]\ngpu_memory_share = 0.45", "gpu", gpus=gpus)
    assert problem.severity == "error"


@pytest.mark.parametrize("settings", ["gpus = [0]", "gpus = [0]\ngpu_memory_share = 0.25"])
def test_a_gpu_is_ok_with_enough_free_memory_or_without_a_stated_need(tmp_path: Path, settings: str) -> None:
    [well] = findings(tmp_path, settings, "gpu", gpus=[card(free=40, holders=[STRANGER])])
    assert (well.severity, well.text) == ("ok", "0: H200, 40 of 140 GB free")


def test_foreign_and_stale_processes_on_ports_are_reported_apart(tmp_path: Path) -> None:
    [free] = findings(tmp_path, "ports = [9001]", "port")
    assert (free.severity, free.text) == ("ok", "9001 free")
    [note, problem] = findings(
        tmp_path,
        "ports = [9001, 9002]",
        "port",
        port_holders=lambda ports: [f"port {ports[0]} is held by pid 7"],
        port_leftovers=lambda ports: [f"port {ports[1]} is held by a leftover"],
    )
    assert (note.severity, note.text) == ("warning", "port 9002 is held by a leftover")
    assert (problem.severity, problem.text) == ("error", "port 9001 is held by pid 7")


RANKS = """
[bridge]
mode = "broadcast"
[services.vllm]
kind = "inference"
model_name = "local/tiny"
gpus = [{server}]
env = {{ NCCL_P2P_DISABLE = "1", NCCL_DEBUG = "INFO" }}
[services.trainer]
kind = "trainer"
model_name = "local/tiny"
gpus = [0, 1]
"""


def test_gpus_of_ranks_that_nvlink_connects_and_nobody_shares_are_fine(tmp_path: Path) -> None:
    [fine, _] = findings(tmp_path, RANKS.format(server=2), "ranks", gpus=cards(3), links={(0, 1): "NVLink"})
    assert (fine.severity, fine.text) == ("ok", "trainer: rank 0 on GPU 0, rank 1 on GPU 1, connected by NVLink")


@pytest.mark.parametrize("path", ["", "bin"])
def test_a_slow_link_a_shared_gpu_and_variables_that_differ_are_warnings_with_mps_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    fake_mps.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(tmp_path / path))
    found = findings(tmp_path, RANKS.format(server=1), "ranks", gpus=cards(2), links={(0, 1): "PCIe"})
    assert [(each.severity, each.text) for each in found] == [
        (
            "warning",
            "trainer: rank 0 on GPU 0, rank 1 on GPU 1; GPUs 0 and 1 are connected by PCIe, not by NVLink",
        ),
        ("warning", "GPU 1 is that of a rank of trainer and of vllm: all ranks wait for the one that shares its GPU"),
        (
            "warning",
            "NCCL_P2P_DISABLE is not set for trainer and '1' for vllm: both are in one NCCL group, which may hang",
        ),
    ]


def test_ranks_without_a_gpu_each_and_a_port_that_is_taken_are_errors(tmp_path: Path) -> None:
    ranks = RANKS.format(server=0).replace("gpus = [0, 1]", "processes = 2\nnodes = 2\nmaster_port = 9001")
    found = findings(tmp_path, ranks, "ranks", gpus=cards(1))
    problems = [each.text for each in found if each.severity == "error"]
    assert problems == [
        "trainer: 2 ranks need a GPU each, and this machine has 1",
        "services.trainer.master_port: port 9001 is also that of vllm",
    ]


def cards(num: int) -> list[GpuFacts]:
    return [card(index, free=140) for index in range(num)]
