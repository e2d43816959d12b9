"""`[cluster]` and `num_devices` in a profile: which GPUs and machines services get, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import launch

from grpo_engine.colocate.config import TrainerConfig
from grpo_engine.config import read_table
from grpo_engine.errors import ConfigError
from grpo_engine.flags import parse_flags
from grpo_tui.paths import available_profiles
from grpo_tui.profile.devices import with_devices
from grpo_tui.profile.loaded import LoadedProfile
from grpo_tui.profile.loading import load
from grpo_tui.profile.plan import make_plan, plan_text
from grpo_tui.profile.plan_file import Plan
from grpo_tui.services.base import Launch, NeedCondition
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
    assert int(by_name["ray"].env["RAY_ROTATION_MAX_BYTES"]) <= 4 << 20  # 9 kB for a request that is no HTTP
    assert by_name["ray"].env["GRPC_VERBOSITY"] == "NONE"  # else refused handshakes of strangers fill its logs


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
            ["bridge={mode='parameter_service'}", "cluster.address=a:1"],
            "writes into memory that trainer, service and ser",
        ),
        (["services.vllm.gpus=[0]"], "keep num_devices alone"),
        (["cluster.kind=local", "cluster.address=head:1"], "has no effect with kind"),
    ],
)
def test_what_a_cluster_cannot_have_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(str(available_profiles()["tiny-ray"]), overrides)


def test_a_trainer_and_servers_that_are_sent_weights_between_machines_are_placed_both() -> None:
    profile, joined = str(available_profiles()["tiny-broadcast"]), ["cluster={kind='ray', address='a:1'}"]
    placed = [f"services.{name}.num_devices={count}" for name, count in (("trainer", 1), ("vllm", 2))]
    load(profile, [*joined, *placed])
    with pytest.raises(ConfigError, match=r"services\.trainer\.num_devices: bridge.mode 'broadcast' connects the mach"):
        load(profile, [*joined, placed[1]])


def test_services_are_assigned_machine_after_machine() -> None:
    asked = [
        launch("env", kind="environment"),
        launch("vllm", kind="inference", num_devices=1),
        launch("vllm-2", kind="inference", num_devices=1),
        launch("trainer", kind="trainer", num_devices=2),
    ]
    rooms = [Room(name="a", num_free=2, num_devices=2), Room(name="b", num_free=2, num_devices=2)]
    assert assign(asked, rooms) == {"trainer": ("a",), "vllm": ("b",), "vllm-2": ("b",)}
    with pytest.raises(NoRoom, match=r"no machine has 1 free devices, which services\.vllm-2\.num_devices asks for"):
        assign(asked, [Room(name="a", num_free=2, num_devices=2), Room(name="b", num_free=1, num_devices=2)])


def rooms(**free: int) -> list[Room]:
    """Machines of eight devices."""
    return [Room(name=name, num_free=count, num_devices=8) for name, count in free.items()]


def over(num_devices: int, num_machines: int | None = None) -> Launch:
    """A trainer that can be on several machines."""
    return launch(
        "trainer", kind="trainer", num_devices=num_devices, num_machines=num_machines, part_arguments=("{number}",)
    )


def test_a_trainer_with_more_devices_than_a_machine_is_on_the_fewest_with_equal_shares() -> None:
    vllm = launch("vllm", kind="inference", num_devices=8)
    assert assign([vllm, over(16)], rooms(a=8, b=8, c=8)) == {"trainer": ("a", "b"), "vllm": ("c",)}
    assert assign([over(16)], rooms(a=8, b=4, c=4, d=4))["trainer"] == ("a", "b", "c", "d")
    assert assign([over(12)], rooms(a=8, b=5, c=6))["trainer"] == ("a", "c")
    with pytest.raises(NoRoom, match="no machines have equal shares of 16 free devices, which"):
        assign([over(16)], rooms(a=8, b=7, c=7))
    with pytest.raises(NoRoom, match=r"no machine has 16 free devices, which services\.vllm\.num_devices asks for: a"):
        assign([launch("vllm", kind="inference", num_devices=16)], rooms(a=8, b=8))


def test_a_trainer_that_fits_on_a_machine_waits_for_it_unless_it_asks_for_several() -> None:
    with pytest.raises(NoRoom, match="no machine has 8 free devices"):
        assign([over(8)], rooms(a=7, b=7))
    assert assign([over(8, num_machines=2)], rooms(a=7, b=3, c=8))["trainer"] == ("a", "c")
    with pytest.raises(
        NoRoom, match=r"no 2 machines have 4 free devices each, which .* asks for on 2 machines: a has 7"
    ):
        assign([over(8, num_machines=2)], rooms(a=7, b=3))


OVER_TWO = ["cluster.machines=3", "services.trainer.num_devices=2"]


def test_ranks_over_machines_of_a_private_cluster_are_planned_and_their_launcher_is_told_its_part() -> None:
    profile = load(str(available_profiles()["tiny-ray"]), OVER_TWO)
    plan = make_plan(profile, run_folder=Path("run"), python="python")
    (trainer,) = [each for each in plan.launches if each.kind == "trainer"]
    assert (trainer.num_devices, trainer.num_machines, trainer.num_ranks) == (2, None, 2)
    told = [
        word.format(num_devices=1, num_machines=2, number=1, address="a", port=9) for word in trainer.part_arguments
    ]
    argv = [*trainer.argv[trainer.argv.index("train") + 1 :], *told]
    config = parse_flags(TrainerConfig, argv, prog="train", description="")
    assert (config.processes, config.nodes, config.node_rank) == (1, 2, 1)
    assert (config.master_addr, config.master_port) == ("a", 9)
    assert config.num_ranks == 2
    assert "2 devices on 2 machines of the cluster, 1 of each" in plan_text(plan, profile)
    assert "rank 0 on machine 1 of 2, rank 1 on machine 2 of 2" in plan_text(plan, profile)


def test_a_trainer_can_ask_for_a_number_of_machines_of_any_cluster() -> None:
    overrides = ["cluster.address=head:6379", "services.trainer.num_devices=16", "services.trainer.nodes=4"]
    profile = load(str(available_profiles()["tiny-ray"]), overrides)
    plan = make_plan(profile, run_folder=Path("run"), python="python")
    (trainer,) = [each for each in plan.launches if each.kind == "trainer"]
    assert (trainer.num_machines, trainer.num_ranks) == (4, 16)
    text = plan_text(plan, profile)
    assert "16 devices on 4 machines of the cluster, 4 of each" in text
    assert "ranks 0 to 3 on machine 1 of 4, ranks 4 to 7 on machine 2 of 4, ranks 8 to 11" in text
    profile = load(str(available_profiles()["tiny-ray"]), overrides[:2])
    text = plan_text(make_plan(profile, run_folder=Path("run"), python="python"), profile)
    assert "16 devices of the cluster, on one machine or on the fewest with equal shares of them" in text
    assert "ranks 0 to 15, one on each device; memory" in text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["services.trainer.num_devices=4"],
            r": 4, but no number of the 3 machines .* equal shares .*: set 3",
        ),
        (["services.trainer.nodes=2", "services.trainer.num_devices=3"], "so set num_devices to a multiple of 2"),
        (
            ["services.trainer.nodes=4", "services.trainer.num_devices=4"],
            ": 4, but the cluster has cluster.machines",
        ),
        (["services.trainer.nodes=2", "services.trainer.num_devices=4"], ": 4, but 2 machines with"),
        (
            ["services.trainer.nodes=2", "services.trainer.num_devices=2", "services.trainer.node_rank=1"],
            ": 1, but the cluster chooses the machines: leave it out",
        ),
        (
            ["services.trainer.nodes=2", "services.trainer.num_devices=2", "services.trainer.processes=3"],
            ": 2, but processes = 3 and num_devices = 2 are not one rank a device: leave nodes out",
        ),
        (
            ["services.trainer.num_devices=2", "services.trainer.processes=1"],
            "devices_per_machine = 1, and processes = 1 and num_devices = 2 are not one rank a device",
        ),
        (["cluster.machines=2", "services.trainer.num_devices=2"], "2 with 1 devices each, but services take 3"),
    ],
)
def test_what_ranks_over_machines_cannot_have_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(str(available_profiles()["tiny-ray"]), ["cluster.machines=3", *overrides])


OTHERS_OF_POLICY = {"api": "rollout_api", "parameters": "parameters"}
ON_MACHINES = [
    "cluster={kind='ray', machines=3}",
    "services.parameters.every_machine=true",
    "services.trainer.num_devices=1",
    "services.vllm.num_devices=2",
]


def test_a_parameter_service_of_every_machine_is_beside_trainer_and_servers_which_wait_for_theirs() -> None:
    file = str(available_profiles()["tiny-parameters"])
    for more in ([], ["cluster.address=a:1"]):
        profile = load(file, [*ON_MACHINES, *more])
        plan = make_plan(profile, run_folder=Path("run"), python="python")
        by_name = {each.name: each for each in plan.launches}
        service, folder = by_name["parameters"], Path("run/handover").absolute()
        assert service.beside == ("trainer", "vllm", "vllm-2")
        assert (service.is_placed, service.num_devices, service.prepares) == (True, 0, False)
        assert service.needs == {"machines": NeedCondition.READY}
        assert service.machine_folder == by_name["vllm"].machine_folder == folder
        assert service.later_arguments == ("--source", "http://127.0.0.1:9201", "--port", "0")
        assert by_name["vllm-2"].machine_arguments == ("--handover", "{folder}")
        assert "--awaits-handover" in by_name["vllm-2"].argv
        assert "a part on each machine of trainer, vllm, vllm-2" in plan_text(plan, profile)
        assert Plan.from_json(plan.to_json()) == plan
    alone = make_plan(load(file), run_folder=Path("run"), python="python")
    assert not any(each.is_placed or "--awaits-handover" in each.argv for each in alone.launches)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.kind=local"], "every_machine=true: has no effect without a cluster"),
        (["services.parameters.source=http://a:1"], "source=http://a:1: 'http://a:1', but with every_machine each"),
        (["services.parameters.num_devices=1"], "num_devices=1: 1, but with every_machine"),
        (["services.vllm.handover=/a"], "handover=/a: replica vllm-2: with services.parameters.every_machine each"),
        (["services.second={kind='parameters', port=9300}"], "gives each machine a service already: remove services.s"),
    ],
)
def test_what_a_parameter_service_of_every_machine_cannot_have_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(str(available_profiles()["tiny-parameters"]), [*ON_MACHINES, *overrides])


def test_a_parameter_service_of_every_machine_needs_trainer_and_servers_on_machines() -> None:
    file = str(available_profiles()["tiny-parameters"])
    with pytest.raises(ConfigError, match=r"services\.trainer\.num_devices: not set, and services\.parameters\.every_"):
        load(file, [*ON_MACHINES[:2], ON_MACHINES[3]])
    with pytest.raises(ConfigError, match="give a service of kind parameters every_machine = true"):
        load(file, [ON_MACHINES[0], "cluster.address=a:1", *ON_MACHINES[2:]])


def test_a_parameter_service_of_a_policy_keeps_versions_where_its_servers_look(tmp_path: Path) -> None:
    stack = STACK.replace("MODE", "parameter_service").replace("num_devices = 2\n", 'device = "cpu"\npolicy = "a"\n')
    of_policy = [f'[services.{name}]\nkind = "{kind}"\npolicy = "a"\n' for name, kind in OTHERS_OF_POLICY.items()]
    plan = planned(tmp_path, stack + "".join(of_policy))
    folders = {each.argv[each.argv.index("--handover") + 1] for each in plan.launches if "--handover" in each.argv}
    assert folders == {str(tmp_path / "run" / "policies" / "a" / "handover")}
