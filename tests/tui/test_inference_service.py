"""The inference server as a service: how the supervisor may restart it."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_engine.server.vllm import requirements as vllm_requirements
from grpo_engine.server.vllm.environment import settle_environment
from grpo_engine.wire.environment_variables import RESTARTS_VARIABLE
from grpo_engine.wire.fork_server import RESTART_SIGNAL
from grpo_tui.services.base import Place
from grpo_tui.services.inference import Inference

PLACE = Place(profile_folder=Path("/profiles"), run_folder=Path("/run"), python="python")


def inference(**settings: object) -> Inference:
    return Inference.model_validate({"kind": "inference", "model_name": "local/tiny", **settings})


@pytest.mark.parametrize(
    ("settings", "restarts_in_place"),
    [
        ({"engine": "vllm"}, True),
        ({"engine": "vllm", "standby": False}, False),
        ({"engine": "torch"}, False),
        ({"engine": "torch", "standby": True}, True),
    ],
)
def test_a_server_with_a_fork_server_is_restarted_in_place(
    settings: dict[str, object], restarts_in_place: bool
) -> None:
    launch = inference(**settings).launch("vllm", PLACE)
    how = launch.restart_in_place
    assert (how is not None) == restarts_in_place
    if how is not None:
        assert how.signal == RESTART_SIGNAL.name
        assert how.file == Path("/run/vllm.restarts.json")
        assert launch.env[RESTARTS_VARIABLE] == str(how.file)


@pytest.mark.parametrize(
    ("settings", "inherited", "expected"),
    [
        (
            {"threads": 2, "device": "cuda"},
            {"XDG_CACHE_HOME": "/cache", "TRITON_CACHE_DIR": "/mine"},
            {
                "TRITON_CACHE_DIR": "/mine",
                "VLLM_CACHE_ROOT": "/cache/grpo-engine/vllm",
                "OMP_NUM_THREADS": "2",
                "SAGEMAKER_CONTAINER_LOG_LEVEL": "info",
                "VLLM_ENABLE_STARTUP_PLAN": None,  # by it, 0.26 to 0.32 take the cache of another share
                "VLLM_USE_MEGA_AOT_ARTIFACT": "1",
            },
        ),
        # vLLM refuses both together
        ({"device": "cuda"}, {"VLLM_USE_STANDALONE_COMPILE": "0"}, {"VLLM_USE_MEGA_AOT_ARTIFACT": None}),
        # on a CPU, vLLM cannot read back the programs it writes
        ({"device": "cpu"}, {}, {"VLLM_USE_AOT_COMPILE": "0", "VLLM_USE_MEGA_AOT_ARTIFACT": None}),
        ({"device": "cpu"}, {"VLLM_USE_AOT_COMPILE": "1"}, {"VLLM_USE_AOT_COMPILE": "1"}),
    ],
    ids=["cuda", "compiled otherwise", "cpu", "set by the user"],
)
def test_the_environment_of_vllm_keeps_the_users_settings_and_is_settled_once(
    settings: dict[str, object], inherited: dict[str, str], expected: dict[str, str | None]
) -> None:
    environment = dict(inherited)
    settle_environment(inference(**settings), environment)
    assert {name: environment.get(name) for name in expected} == expected
    settled = dict(environment)
    settle_environment(inference(**settings), environment)
    assert environment == settled


@pytest.mark.parametrize(("is_for_cpu", "expected"), [(True, "0"), (False, None)])
def test_without_a_device_setting_the_installed_vllm_decides(
    is_for_cpu: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = vllm_requirements.Installed(version="0.32.0", is_for_cpu=is_for_cpu)
    monkeypatch.setattr(vllm_requirements, "installed_vllm", lambda: installed)
    environment: dict[str, str] = {}
    settle_environment(inference(), environment)
    assert environment.get("VLLM_USE_AOT_COMPILE") == expected


@pytest.mark.parametrize(
    ("settings", "generations", "inherited", "expected"),
    [
        ({"enable_lora": True}, [9, 10], {}, "1"),
        ({"enable_lora": True}, [12], {"VLLM_LORA_DISABLE_PDL": "0"}, "0"),
        ({"enable_lora": True}, [9], {}, None),
        ({}, [10], {}, None),
    ],
)
def test_adapter_kernels_do_without_grid_dependency_control_on_blackwell_alone(
    settings: dict[str, object],
    generations: list[int],
    inherited: dict[str, str],
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = [
        vllm_requirements.GpuMemory(index=index, free_bytes=1, usable_bytes=1, generation=generation)
        for index, generation in enumerate(generations)
    ]
    monkeypatch.setattr(vllm_requirements, "visible_gpus", lambda environment: gpus)
    environment = dict(inherited)
    settle_environment(inference(device="cuda", **settings), environment)
    assert environment.get("VLLM_LORA_DISABLE_PDL") == expected
