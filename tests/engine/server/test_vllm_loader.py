"""Which loader reads the model's files when vLLM starts on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from serving import save_tiny_model

from grpo_engine.server.config import ServerConfig
from grpo_engine.server.vllm import loader
from grpo_engine.server.vllm.loader import reads_with_instant_tensor

PLAIN: dict[str, Any] = {
    "model_loader_extra_config": {},
    "quantization": None,
    "speculative_config": None,
    "enable_sleep_mode": False,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, on a machine with a GPU and InstantTensor."""
    platforms = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(is_cuda=lambda: True)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setattr(loader, "installed_version", {"instanttensor": "0.2.2"}.get)
    return save_tiny_model(tmp_path / "model", seed=1)


def reads(model: Path, **others: Any) -> bool:
    arguments: Any = SimpleNamespace(**PLAIN | others)
    return reads_with_instant_tensor(ServerConfig(model_name=str(model)), arguments)


def test_a_plain_start_on_one_gpu_reads_with_instant_tensor(model: Path) -> None:
    assert reads(model)


@pytest.mark.parametrize(
    "others",
    [
        {"model_loader_extra_config": {"enable_multithread_load": True}},
        {"quantization": "bitsandbytes"},
        {"speculative_config": {"model": "draft"}},
        {"enable_sleep_mode": True},
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2},
    ],
    ids=lambda others: next(iter(others)),
)
def test_a_start_that_asks_for_more_leaves_the_loader_to_vllm(model: Path, others: dict[str, Any]) -> None:
    assert not reads(model, **others)


@pytest.mark.parametrize("version", [None, "0.1.8"])
def test_a_machine_without_a_version_that_reads_the_page_cache_has_vllms_loader(
    model: Path, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    monkeypatch.setattr(loader, "installed_version", {"instanttensor": version}.get)
    assert not reads(model)


def test_a_cpu_has_vllms_loader(model: Path) -> None:
    sys.modules["vllm.platforms"].current_platform.is_cuda = lambda: False
    assert not reads(model)


def test_a_loader_that_the_user_names_is_kept(model: Path) -> None:
    config = ServerConfig(model_name=str(model), vllm={"load_format": "auto"})
    arguments: Any = SimpleNamespace(**PLAIN)
    assert not reads_with_instant_tensor(config, arguments)


@pytest.mark.parametrize("damage", ["cut off", "a header that is too long", "another format"])
def test_damaged_files_are_left_to_vllms_loader_which_reports_them(model: Path, damage: str) -> None:
    file = model / "model.safetensors"
    whole = file.read_bytes()
    if damage == "another format":
        file.rename(model / "pytorch_model.bin")
    else:
        file.write_bytes(whole[:-8] if damage == "cut off" else b"\xff" * 8 + whole[8:])
    assert not reads(model)


def test_mistrals_own_layout_is_left_to_vllms_loader_which_looks_for_it(model: Path) -> None:
    (model / "consolidated.safetensors").hardlink_to(model / "model.safetensors")
    assert not reads(model)
