"""Replicas of an inference server in a profile: the services, ports and GPUs that they become, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_engine.errors import ConfigError
from grpo_engine.wire.environment_variables import INFERENCE_VARIABLE
from grpo_tui.profile.loaded import LoadedProfile
from grpo_tui.profile.loading import load, require_needs
from grpo_tui.profile.plan import make_plan
from grpo_tui.services.base import Launch, NeedCondition
from grpo_tui.services.environment import Environment
from grpo_tui.services.trainer import Trainer

STACK = """
[model]
name = "local/tiny"
device = "cpu"
[bridge]
mode = "none"
[services.api]
kind = "rollout_api"
port = 8000
[services.vllm]
kind = "inference"
engine = "torch"
port = 9001
replicas = 3
needs = ["api"]
[services.env]
kind = "environment"
task = "sort6"
needs = ["api", "vllm"]
restart_with = ["vllm"]
[services.trainer]
kind = "trainer"
training_steps = 9
needs = { api = "ready", vllm = "started" }
[[hooks]]
on = ["failed"]
services = ["vllm"]
argv = ["notify"]
"""
NAMES = ["vllm", "vllm-2", "vllm-3"]


def loaded(folder: Path, *overrides: str, text: str = STACK, moved: dict[int, int] | None = None) -> LoadedProfile:
    (folder / "p.toml").write_text(text)
    return load(str(folder / "p.toml"), overrides, moved_ports=moved)


def planned(profile: LoadedProfile) -> dict[str, Launch]:
    plan = make_plan(profile, run_folder=Path("/runs/r"), python="python")
    return {launch.name: launch for launch in plan.launches}


def test_each_replica_is_a_service_on_the_next_port_and_the_next_gpus(tmp_path: Path) -> None:
    gpus = ["services.vllm.tensor_parallel_size=2", "services.vllm.gpus=[2,3,4,5,6,7]"]
    launches = planned(loaded(tmp_path, *gpus))
    assert [launches[name].ports for name in NAMES] == [(9001,), (9002,), (9003,)]
    assert [launches[name].gpus for name in NAMES] == [(2, 3), (4, 5), (6, 7)]
    assert [launches[name].settings for name in NAMES] == ["services.vllm"] * 3
    assert all(launches[name].ready.http.endswith(f":{9001 + i}/health") for i, name in enumerate(NAMES))
    assert "--replicas" not in launches["vllm"].argv


def test_what_names_the_service_means_all_replicas(tmp_path: Path) -> None:
    profile = loaded(tmp_path)
    env, trainer = profile.profile.services["env"], profile.profile.services["trainer"]
    assert isinstance(env, Environment)
    assert isinstance(trainer, Trainer)
    assert env.needs == dict.fromkeys(["api", *NAMES], NeedCondition.READY)
    assert trainer.needs == {"api": NeedCondition.READY, **dict.fromkeys(NAMES, NeedCondition.STARTED)}
    assert env.restart_with == tuple(NAMES)
    assert profile.profile.hooks[0].services == tuple(NAMES)
    urls = tuple(f"http://127.0.0.1:{port}" for port in (9001, 9002, 9003))
    assert env.inference_urls == trainer.server_urls == urls
    assert planned(profile)["trainer"].env[INFERENCE_VARIABLE] == "vllm,vllm-2,vllm-3"
    assert profile.written["services"]["vllm"]["replicas"] == 3, "a run is resumed from what people wrote"


def test_servers_written_out_by_hand_are_all_of_the_policy_but_for_those_of_another_model(tmp_path: Path) -> None:
    others = """
    [services.big]
    kind = "inference"
    engine = "torch"
    port = 9100
    [services.judge]
    kind = "inference"
    engine = "torch"
    port = 9200
    model_name = "local/smollm2-135m-instruct"
    """
    profile = loaded(tmp_path, "services.vllm.replicas=1", text=STACK + others)
    env, trainer = profile.profile.services["env"], profile.profile.services["trainer"]
    assert isinstance(env, Environment)
    assert isinstance(trainer, Trainer)
    assert env.inference_urls == trainer.server_urls == ("http://127.0.0.1:9001", "http://127.0.0.1:9100")
    assert trainer.inference_service == ("vllm", "big")


def test_a_second_run_moves_the_port_of_one_replica_alone(tmp_path: Path) -> None:
    profile = loaded(tmp_path, moved={9002: 9012})
    assert [planned(profile)[name].ports for name in NAMES] == [(9001,), (9012,), (9003,)]
    env = profile.profile.services["env"]
    assert isinstance(env, Environment)
    assert [url.rpartition(":")[2] for url in env.inference_urls] == ["9001", "9012", "9003"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["services.vllm.gpus=[1,2]"], "3 replicas × tensor_parallel_size 1 take 3 different GPUs"),
        (["services.vllm.gpus=[1,2,2]"], "gpus = [1, 2, 2] names a GPU twice"),
        (["model.device=cuda"], "services.vllm.gpus: not set, so all 3 replicas would take GPU 0: name each"),
        (["services.api.port=9003"], "services.vllm.port: replica vllm-3: 9003 is already the port of services.api"),
        (["services.vllm.port=65534"], "less than or equal to 65535, but this is 65536"),
        (["services.vllm-2.kind=command", "services.vllm-2.argv=[true]"], "replica 2 is 'vllm-2', the name of another"),
        (
            ["bridge.mode=lora_merged"],
            "lora_merged updates one server, and there are vllm, vllm-2, vllm-3: choose ",
        ),
        (["bridge.mode=shared_vllm"], "keep one of them (replicas = 1), or set services.trainer.vllm_port"),
        (["bridge.mode=shared_vllm", "services.trainer.vllm_port=9001"], "bridge_file: replica vllm-2: unset, as for"),
        (["services.vllm.threads=0"], "--set services.vllm.threads=0: input should be greater than or equal to 1"),
        (["services.vllm.replicas=0"], "--set services.vllm.replicas=0: input should be greater than or equal to 1"),
    ],
)
def test_replicas_that_cannot_be_are_refused_with_what_to_set(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(tmp_path, *overrides)
    assert message in str(refused.value)
    assert "services.vllm-3" not in str(refused.value).replace("--set services.vllm-2", ""), "as it was written"


def test_what_this_machine_lacks_is_said_once_by_the_service_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_tui.profile.start_checks.has_gpu_driver", lambda: False)
    with pytest.raises(ConfigError) as refused:
        require_needs(loaded(tmp_path, "services.vllm.device=cuda", "services.vllm.gpus=[0,1,2]"))
    assert str(refused.value).count("no GPU driver is loaded here") == 1
    assert "--set services.vllm.device=cpu" in str(refused.value)
