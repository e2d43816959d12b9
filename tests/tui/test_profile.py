"""Loading profiles: shared settings reach every service, and every fault names file, key and remedy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import pytest

from grpo_engine import cli as engine_cli
from grpo_engine.errors import ConfigError
from grpo_tui.profile.loading import find, load
from grpo_tui.profile.plan import describe, make_plan, plan_text
from grpo_tui.profile.plan_file import Plan
from grpo_tui.services.base import NeedCondition, Place
from grpo_tui.services.environment import Environment
from grpo_tui.services.hook import HookEvent
from grpo_tui.services.inference import Inference
from grpo_tui.services.kinds import KINDS, service_class
from grpo_tui.services.trainer import Trainer

NUL = "\\u0000"
STACK = """
[model]
name = "local/tiny"
dtype = "float32"
max_model_len = 64
[bridge]
mode = "shared_vllm"
[services.api]
kind = "rollout_api"
port = 8123
[services.vllm]
kind = "inference"
engine = "torch"
port = 9123
[services.env]
kind = "environment"
task = "sort6"
group_size = 8
needs = ["api", "vllm"]
[services.trainer]
kind = "trainer"
batch_size = 16
gradient_accumulation_steps = 1
needs = { env = "ready" }
"""

HOOKS = """
[services.trainer]
kind = "command"
argv = ["true"]
[[hooks]]
on = ["finished"]
argv = ["./archive"]
[[hooks]]
on = ["failed", "restarted"]
services = ["trainer"]
argv = ["./notify", "--loud"]
timeout_s = 5
"""


def write(folder: Path, text: str) -> str:
    path = folder / "x.toml"
    path.write_text(text)
    return str(path)


def fault(folder: Path, text: str, *overrides: str) -> str:
    path = write(folder, text)
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value).replace(path, "x.toml")


def commands(*services: str) -> str:
    return "".join(
        f'[services.{line.split()[0]}]\nkind = "command"\nargv = ["true"]\n{line[2:]}\n' for line in services
    )


@pytest.mark.parametrize(
    ("mode", "cards", "is_planned_with"),
    [
        ("none", ("[0]", "[0]"), True),
        ("none", ("[0]", "[1]"), False),
        ("shared_vllm", None, True),
        ("none", None, False),
    ],
)
def test_the_memory_share_of_inference_reaches_a_trainer_on_the_same_gpu(
    mode: str, cards: tuple[str, str] | None, is_planned_with: bool, tmp_path: Path
) -> None:
    overrides = [f"bridge.mode={mode}", "services.vllm.gpu_memory_utilization=0.3"]
    if cards is not None:
        overrides += [f"services.vllm.gpus={cards[0]}", f"services.trainer.gpus={cards[1]}"]
    trainer = load(write(tmp_path, STACK), overrides).profile.services["trainer"]
    assert isinstance(trainer, Trainer)
    assert ("gpu_memory_utilization" in trainer.model_fields_set) == is_planned_with
    assert trainer.gpu_memory_utilization == (0.3 if is_planned_with else 0.45)


def test_model_and_bridge_are_set_once_and_reach_every_service(tmp_path: Path) -> None:
    services = load(write(tmp_path, STACK)).profile.services
    inference, environment, trainer = services["vllm"], services["env"], services["trainer"]
    assert isinstance(inference, Inference)
    assert isinstance(environment, Environment)
    assert isinstance(trainer, Trainer)
    assert {inference.model_name, environment.model_name, trainer.model_name} == {"local/tiny"}
    assert (inference.dtype, trainer.dtype) == ("float32", "float32")
    assert inference.shared_weights
    assert trainer.bridge.mode == "shared_vllm"
    assert (inference.max_model_len, trainer.seq_len) == (64, 64)


def test_the_services_find_each_other_by_the_ports_of_the_profile(tmp_path: Path) -> None:
    services = load(write(tmp_path, STACK), ["services.vllm.port=9200"]).profile.services
    environment, trainer = services["env"], services["trainer"]
    assert isinstance(environment, Environment)
    assert isinstance(trainer, Trainer)
    assert environment.rollout_server_url.endswith(":8123")
    assert environment.inference_url.endswith(":9200")
    assert trainer.atropos_url.endswith(":8123")
    assert trainer.vllm_port == 9200


def test_a_service_setting_overrides_a_shared_one(tmp_path: Path) -> None:
    trainer = load(write(tmp_path, STACK), ["services.trainer.seq_len=32"]).profile.services["trainer"]
    assert isinstance(trainer, Trainer)
    assert trainer.seq_len == 32


def test_a_list_of_needs_means_ready(tmp_path: Path) -> None:
    service = load(write(tmp_path, STACK)).profile.services["env"]
    assert service.needs == {"api": NeedCondition.READY, "vllm": NeedCondition.READY}


def test_an_unknown_setting_of_the_trainer_names_the_nearest(tmp_path: Path) -> None:
    text = fault(tmp_path, STACK, "services.trainer.leaning_rate=1")
    assert text == "x.toml: services.trainer.leaning_rate: unknown setting (did you mean 'learning_rate'?)"


def test_an_unknown_kind_names_the_nearest_and_all_there_are(tmp_path: Path) -> None:
    text = fault(tmp_path, commands("a ports = [9000]"), 'services.a.kind="comand"')
    kinds = "command, rollout_api, inference, environment, atropos_environment, trainer"
    assert text == f"x.toml: services.a.kind: 'comand' is not one of {kinds} (did you mean 'command'?)"


@pytest.mark.parametrize("kind", ["3", "[1]", "{ a = 1 }"])
def test_a_kind_that_is_no_word_is_a_fault_and_not_a_crash(tmp_path: Path, kind: str) -> None:
    assert "x.toml: services.a" in fault(tmp_path, commands("a ports = [9000]"), f"services.a.kind={kind}")


def test_a_service_without_a_kind_or_that_is_no_table_is_named(tmp_path: Path) -> None:
    assert fault(tmp_path, "[services.a]\nargv = ['true']\n") == "x.toml: services.a.kind: required, but missing"
    assert "x.toml: services.a: " in fault(tmp_path, "[services]\na = 5\n")
    assert "x.toml: services: " in fault(tmp_path, "services = 5\n")
    assert "x.toml: services: " in fault(tmp_path, "[services]\n")


def test_faults_of_several_services_are_reported_at_once(tmp_path: Path) -> None:
    text = fault(tmp_path, STACK, "services.trainer.leaning_rate=1", "services.api.kind=rolout_api")
    assert "services.trainer.leaning_rate: unknown setting (did you mean 'learning_rate'?)" in text
    assert "services.api.kind: 'rolout_api' is not one of" in text
    assert "(did you mean 'rollout_api'?)" in text


def test_an_override_of_a_service_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path, STACK)
    with pytest.raises(ConfigError, match=r"--set services\.trainr: not a service here \(did you mean 'trainer'\?\)"):
        load(path, ["services.trainr.lr=1"])
    added = load(path, ["services.board.kind=command", 'services.board.argv=["true"]'])
    assert "board" in added.profile.services


def test_an_unknown_setting_names_the_nearest_where_all_services_are_of_one_kind(tmp_path: Path) -> None:
    text = fault(tmp_path, commands("a port = [9000]"))
    assert text == "x.toml: services.a.port: unknown setting (did you mean 'ports'?)"


def test_an_unknown_bridge_names_the_nearest(tmp_path: Path) -> None:
    text = fault(tmp_path, '[bridge]\nmode = "lora_onli"\n' + commands("a ports = [9000]"))
    assert text.startswith("x.toml: bridge.mode: 'lora_onli' is not one of ")
    assert text.endswith("(did you mean 'lora_only'?)")


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_called_like_its_file_and_chosen_by_that_name(kind: str) -> None:
    assert service_class(kind).model_fields["kind"].annotation == Literal[kind]


def test_the_rate_may_be_called_learning_rate(tmp_path: Path) -> None:
    trainer = load(write(tmp_path, STACK), ["services.trainer.learning_rate=2e-6"]).profile.services["trainer"]
    assert isinstance(trainer, Trainer)
    assert trainer.lr == 2e-6


def test_a_wrong_type_shows_the_value(tmp_path: Path) -> None:
    text = fault(tmp_path, STACK, "services.api.port=eighty")
    assert text.startswith("x.toml: services.api.port: ")
    assert "'eighty'" in text


def test_a_missing_model_table_is_named(tmp_path: Path) -> None:
    text = fault(tmp_path, STACK.replace('name = "local/tiny"\n', ""))
    assert "x.toml: model.name: required, but missing" in text


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    text = fault(tmp_path, STACK, "model.name=/no/such/model")
    assert text.startswith("x.toml: model.name: ")
    assert "/no/such/model" in text


def test_an_unknown_local_model_names_the_nearest(tmp_path: Path) -> None:
    assert "did you mean 'local/tiny'?" in fault(tmp_path, STACK, "model.name=local/tinny")


def test_an_unknown_need_names_the_nearest_service(tmp_path: Path) -> None:
    text = fault(tmp_path, STACK.replace('needs = { env = "ready" }', 'needs = { vlm = "ready" }'))
    assert text == "x.toml: services.trainer.needs: 'vlm' is not a service here (did you mean 'vllm'?)"


def test_a_cycle_is_spelled_out(tmp_path: Path) -> None:
    text = fault(tmp_path, commands('a needs = ["c"]', 'b needs = ["a"]', 'c needs = ["b"]'))
    assert "a cycle, so none of these can start first" in text
    assert {"a", "b", "c"} <= set(text.replace(" → ", " ").split())


def test_a_service_that_needs_itself_is_a_cycle(tmp_path: Path) -> None:
    assert "a → a" in fault(tmp_path, commands('a needs = ["a"]'))


def test_a_port_used_twice_names_both_services(tmp_path: Path) -> None:
    assert fault(tmp_path, STACK, "services.vllm.port=8123") == (
        "x.toml: services.vllm.port: 8123 is already the port of services.api"
    )
    assert "9000 is already the port of services.a" in fault(tmp_path, commands("a ports = [9000]", "b ports = [9000]"))


def test_a_batch_that_no_groups_can_fill_is_refused(tmp_path: Path) -> None:
    text = fault(tmp_path, STACK, "services.trainer.batch_size=12")
    assert "not a multiple of the environment's group_size 8" in text


def test_a_batch_that_no_groups_can_fill_is_refused_with_the_nearest_that_they_can(tmp_path: Path) -> None:
    hundred = ("services.trainer.batch_size=4", "services.trainer.gradient_accumulation_steps=25")
    assert "100 sequences per batch" in fault(tmp_path, STACK, *hundred)
    assert "set the two so that their product is 96 or 104" in fault(tmp_path, STACK, *hundred)
    four = ("services.trainer.batch_size=2", "services.trainer.gradient_accumulation_steps=2")
    assert "so that their product is 8, or" in fault(tmp_path, STACK, *four)


def test_a_need_to_finish_on_what_never_finishes_is_refused(tmp_path: Path) -> None:
    text = fault(tmp_path, commands('a restart = "always"', 'b needs = { a = "finished" }'))
    assert "services.b.needs.a: never finishes" in text


def test_a_probe_has_exactly_one_check(tmp_path: Path) -> None:
    text = fault(tmp_path, commands('a ready = { tcp = "x:1", log = "y" }'))
    assert "a probe has one of http, tcp, log, file, command" in text


def test_a_log_probe_that_is_no_regular_expression_is_refused(tmp_path: Path) -> None:
    text = fault(tmp_path, commands("a ready = { log = '(' }"))
    assert "log = '(' is not a regular expression" in text


@pytest.mark.parametrize("reports", ["", ", log = 'x', file = 'y'"])
def test_a_restart_in_place_is_reported_by_a_log_line_or_a_file(tmp_path: Path, reports: str) -> None:
    text = fault(tmp_path, commands(f"a restart_in_place = {{ signal = 'SIGHUP'{reports} }}"))
    assert "restart_in_place needs one of log and file" in text


@pytest.mark.parametrize("name", ["supervisor", "../x", "-w", "a b", ""])
def test_a_service_name_that_cannot_name_a_log_is_refused(tmp_path: Path, name: str) -> None:
    assert "x.toml: services" in fault(tmp_path, f"[services.'{name}']\nkind = 'command'\nargv = ['true']\n")


@pytest.mark.parametrize("name", ["", "A=B", "A\\u0000B"])
def test_a_name_that_no_environment_variable_can_have_is_refused(tmp_path: Path, name: str) -> None:
    text = fault(tmp_path, commands(f'a env = {{ "{name}" = "x" }}'))
    assert "x.toml: services.a" in text
    assert f"env has the name {name.replace(NUL, chr(0))!r}: a name is not empty and has neither '=' nor NUL" in text


def test_a_value_with_a_nul_character_is_refused(tmp_path: Path) -> None:
    assert "env.A has a NUL character" in fault(tmp_path, commands('a env = { A = "x\\u0000" }'))


@pytest.mark.parametrize(
    ("argv", "words"),
    [('[""]', "[''] has no program"), ('["", "x"]', "has no program"), ('["x", "\\u0000"]', "has a NUL character")],
)
def test_a_command_that_cannot_be_executed_is_refused(tmp_path: Path, argv: str, words: str) -> None:
    assert words in fault(tmp_path, f"[services.a]\nkind = 'command'\nargv = {argv}\n")
    assert words in fault(tmp_path, commands(f"a ready = {{ command = {argv} }}"))
    assert words in fault(tmp_path, commands("a") + f"[[hooks]]\non = ['failed']\nargv = {argv}\n")


def test_a_negative_gpu_is_refused(tmp_path: Path) -> None:
    assert "services.a.gpus.0" in fault(tmp_path, commands("a gpus = [-1]"))


def test_a_relative_model_is_looked_for_beside_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}")
    path = write(tmp_path, STACK.replace("local/tiny", "./my-model"))
    model = load(path).profile.model
    assert model is not None
    assert model.name == str(tmp_path / "my-model")


def test_a_schedule_without_room_after_its_warm_up_is_refused(tmp_path: Path) -> None:
    text = fault(tmp_path, STACK, "services.trainer.lr_schedule=linear", "services.trainer.warmup_steps=500")
    assert "leaves none of the 10 training_steps" in text


def test_a_profile_of_commands_alone_needs_no_model(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, commands("a ports = [9000]", 'b needs = { a = "started" }')))
    assert loaded.profile.model is None


def test_an_unknown_profile_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'tiny-cpu'.*hermes8b-shared"):
        find("tiny-cpuu")


@pytest.mark.parametrize(
    ("mode", "shares", "takes_adapters"),
    [("shared_vllm", True, False), ("lora_merged", True, False), ("lora_only", False, True), ("none", False, False)],
)
def test_inference_gets_the_flags_that_the_bridge_needs(
    mode: str, shares: bool, takes_adapters: bool, tmp_path: Path
) -> None:
    inference = load(write(tmp_path, STACK), [f"bridge.mode={mode}"]).profile.services["vllm"]
    assert isinstance(inference, Inference)
    assert (inference.shared_weights, inference.enable_lora) == (shares, takes_adapters)


@pytest.mark.parametrize("mode", ["shared_vllm", "lora_merged"])
def test_a_plan_is_in_start_order_and_keeps_everything_in_the_run_folder(mode: str, tmp_path: Path) -> None:
    loaded = load(write(tmp_path, STACK), [f"bridge.mode={mode}"])
    plan = make_plan(loaded, run_folder=tmp_path / "run", python=sys.executable)
    assert [launch.name for launch in plan.launches] == ["api", "vllm", "env", "trainer"]
    by_name = {launch.name: " ".join(launch.argv) for launch in plan.launches}
    bridge_file = str(tmp_path / "run" / "vllm_bridge_config.json")
    assert bridge_file in by_name["vllm"]
    assert bridge_file in by_name["trainer"]
    assert str(tmp_path / "run" / "rollouts.sqlite") in by_name["api"]


def test_a_described_plan_masks_secrets(tmp_path: Path) -> None:
    text = commands('a env = { WANDB_API_KEY = "s3cret", MODE = "x" }')
    text += '[services.api]\nkind = "rollout_api"\ntoken = "s3cret"\n'
    loaded = load(write(tmp_path, text))
    plan = make_plan(loaded, run_folder=tmp_path, python=sys.executable)
    shown = str(describe(plan, loaded))
    assert "s3cret" not in shown + plan_text(plan, loaded)
    assert "'MODE': 'x'" in shown


def test_gpus_become_cuda_visible_devices(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, commands("a gpus = [1, 3]", "b gpus = []", "c ports = [9000]")))
    launches = {x.name: x for x in make_plan(loaded, run_folder=tmp_path, python=sys.executable).launches}
    assert launches["a"].env["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert launches["b"].env["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in launches["c"].env


def test_the_exit_code_of_a_wrong_setting_is_final_except_for_commands(tmp_path: Path) -> None:
    assert engine_cli.main(["no-such-command"]) == 2
    stack = load(write(tmp_path, STACK + commands("t")))
    for launch in make_plan(stack, run_folder=tmp_path, python=sys.executable).launches:
        assert launch.final_exit_codes == (() if launch.kind == "command" else (engine_cli.USAGE_ERROR,))


def test_a_hook_names_services_of_the_profile(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(HOOKS.replace('services = ["trainer"]', 'services = ["trainr"]'))
    with pytest.raises(ConfigError) as caught:
        load(str(path))
    assert str(caught.value) == (f"{path}: hooks.1.services: 'trainr' is not a service here (did you mean 'trainer'?)")


def test_the_plan_has_the_hooks_and_their_folder(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(HOOKS)
    plan = Plan.from_json(make_plan(load(str(path)), run_folder=tmp_path / "run", python="python").to_json())
    assert plan.profile_folder == tmp_path
    assert [hook.argv for hook in plan.hooks] == [("./archive",), ("./notify", "--loud")]
    assert plan.hooks[1].on == (HookEvent.FAILED, HookEvent.RESTARTED)
    assert plan.hooks[1].timeout_s == 5


def state_file(**settings: object) -> str | None:
    """The `--state-file` on the command line of an environment named `env`."""
    table = {"kind": "environment", "task": "arithmetic", "model_name": "unused", **settings}
    place = Place(profile_folder=Path("/profiles"), run_folder=Path("/runs/one"), python="python3")
    argv = Environment.model_validate(table).launch("env", place).argv
    return argv[argv.index("--state-file") + 1] if "--state-file" in argv else None


@pytest.mark.parametrize("learning", [{"curriculum": "rising"}, {"easy_threshold": 1}, {"hard_threshold": 0}])
def test_item_statistics_are_kept_in_the_run_folder(learning: dict[str, object]) -> None:
    assert state_file(**learning) == "/runs/one/env.items.json"
    assert state_file(**learning, state_file="/mine.json") == "/mine.json"


def test_an_environment_without_item_statistics_keeps_no_file() -> None:
    assert state_file() is None
