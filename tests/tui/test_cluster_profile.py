"""`[cluster]` and `num_devices` in a profile: which GPUs and machines services get, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import launch

from grpo_engine.config import read_table
from grpo_engine.errors import ConfigError
from grpo_tui.paths import available_profiles
from grpo_tui.profile.devices import with_devices
from grpo_tui.profile.loaded import LoadedProfile
from grpo_tui.profile.loading import load
from grpo_tui.profile.plan import make_plan
from grpo_tui.profile.plan_file import Plan
from grpo_tui.services.base import NeedCondition
from grpo_tui.supervisor.placement.assignment import NoRoom, Room, assign

STACK = """
[model]
name = "local/tiny"
device = "cuda"
[bridge]
mode = "MODE"
[services.vllm]
kind = "inference"
num_devices = 2
replicas = 2
[services.trainer]
kind = "trainer"
training_steps = 9
num_devices = 2
"""


def loaded(tmp_path: Path, text: str, *overrides: str) -> LoadedProfile:
    path = tmp_path / "p.toml"
    path.write_text(text)
    return load(str(path), overrides)


def planned(tmp_path: Path, text: str, *overrides: str) -> Plan:
    return make_plan(loaded(tmp_path, text, *overrides), run_folder=tmp_path / "run", python="python")


def gpus(tmp_path: Path, *overrides: str, mode: str = "none") -> dict[str, tuple[int, ...]]:
    plan = planned(tmp_path, STACK.replace("MODE", mode), *overrides)
    return {each.name: each.gpus for each in plan.launches if each.gpus}


def test_num_devices_are_contiguous_slices_of_the_visible_gpus_with_the_trainer_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus(tmp_path) == {"trainer": (0, 1), "vllm": (2,), "vllm-2": (3,)}
    table = read_table(tmp_path / "p.toml")
    chosen, faults = with_devices(table, shares_weights=False, environment={"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert not faults
    assert {name: each["gpus"] for name, each in chosen["services"].items()} == {"trainer": [4, 5], "vllm": [6, 7]}


def test_services_that_share_memory_get_the_same_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    overrides = ["services.vllm.replicas=1", "services.vllm.num_devices=1", "services.trainer.num_devices=1"]
    assert gpus(tmp_path, *overrides, mode="shared_vllm") == {"trainer": (0,), "vllm": (0,)}


def test_explicit_gpus_win_and_an_overlap_is_refused_unless_both_share(tmp_path: Path) -> None:
    table = {
        "services": {
            "trainer": {"kind": "trainer", "num_devices": 2},
            "vllm": {"kind": "inference", "gpus": [2, 3], "num_devices": 4},
        }
    }
    chosen, faults = with_devices(table, shares_weights=False, environment={})
    assert (chosen["services"]["trainer"]["gpus"], chosen["services"]["vllm"]["gpus"]) == ([0, 1], [2, 3])
    assert not faults
    table["services"]["vllm"]["gpus"] = [1]
    _, (fault,) = with_devices(table, shares_weights=False, environment={})
    assert "takes GPUs 0, 1, and services.vllm.gpus names 1 too" in fault.text
    for service in table["services"].values():
        service["gpu_memory_share"] = 0.4
    assert with_devices(table, shares_weights=False, environment={})[1] == []


def test_more_devices_than_are_visible_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(ConfigError, match=r"services\.vllm\.num_devices: 2, but 1 of the visible GPUs"):
        gpus(tmp_path)


def test_a_plan_on_a_cluster_starts_the_cluster_and_its_broker_before_what_takes_devices() -> None:
    profile = load(str(available_profiles()["tiny-ray"]))
    plan = make_plan(profile, run_folder=Path("run"), python="python")
    by_name = {each.name: each for each in plan.launches}
    assert [each.name for each in plan.launches][:2] == ["ray", "machines"]
    assert {name: each.num_devices for name, each in by_name.items() if each.num_devices} == {"vllm": 1, "trainer": 1}
    assert by_name["trainer"].needs["machines"] is NeedCondition.READY
    assert "machines" not in by_name["env"].needs
    assert plan.cluster is not None
    assert Plan.from_json(plan.to_json()).cluster == plan.cluster
    assert by_name["ray"].env["RAY_AUTH_MODE"] == "token"
    assert by_name["ray"].env["RAY_USE_TLS"] == "1"


def test_an_existing_cluster_is_joined_without_starting_one() -> None:
    profile = load(str(available_profiles()["tiny-ray"]), ["cluster.address=head:6379"])
    plan = make_plan(profile, run_folder=Path("run"), python="python")
    (broker,) = [each for each in plan.launches if each.kind == "cluster"]
    assert broker.name == "machines"
    assert not broker.needs
    assert "RAY_USE_TLS" not in broker.env
    assert "RAY_AUTH_TOKEN_PATH" not in broker.env  # that of the cluster, from the environment of the supervisor


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["services.vllm.num_devices=2"], "a machine has cluster.devices_per_machine = 1"),
        (["cluster.machines=1"], "1 with 1 devices each, but services take 2"),
        (["bridge={mode='shared_vllm'}"], "shares memory between services"),
        (
            ["bridge={mode='broadcast'}", "cluster.address=a:1"],
            "'broadcast' connects trainer and servers over loopback",
        ),
        (["bridge={mode='parameter_service'}", "cluster.address=a:1"], "writes into memory that trainer and service"),
        (["services.vllm.gpus=[0]"], "keep num_devices alone"),
        (["cluster.kind=local", "cluster.address=head:1"], "has no effect with kind"),
    ],
)
def test_what_a_cluster_cannot_have_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(str(available_profiles()["tiny-ray"]), overrides)


def test_services_are_assigned_machine_after_machine() -> None:
    asked = [
        launch("env", kind="environment"),
        launch("vllm", kind="inference", num_devices=1),
        launch("vllm-2", kind="inference", num_devices=1),
        launch("trainer", kind="trainer", num_devices=2),
    ]
    rooms = [Room(name="a", num_free=2), Room(name="b", num_free=2)]
    assert assign(asked, rooms) == {"trainer": "a", "vllm": "b", "vllm-2": "b"}
    with pytest.raises(NoRoom, match=r"no machine has 1 free devices, which services\.vllm-2\.num_devices asks for"):
        assign(asked, [Room(name="a", num_free=2), Room(name="b", num_free=1)])
