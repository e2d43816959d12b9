"""Loading profiles: shared settings reach every service, and every fault has file, key and remedy."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

import pytest

from grpo_engine import cli as engine_cli
from grpo_engine.bridges import OVER_RANKS
from grpo_engine.errors import ConfigError
from grpo_tui.profile.hub import hub_cache
from grpo_tui.profile.loading import find, load
from grpo_tui.profile.plan import describe, make_plan, plan_text
from grpo_tui.profile.plan_file import Plan
from grpo_tui.services.base import NeedCondition, Place
from grpo_tui.services.environment import Environment
from grpo_tui.services.hook import HookEvent
from grpo_tui.services.inference import Inference
from grpo_tui.services.kinds import KINDS, service_class
from grpo_tui.services.trainer import Trainer
from grpo_tui.ui.preferences import preferences_file

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


def stack(folder: Path, *overrides: str) -> tuple[Inference, Environment, Trainer]:
    services = load(write(folder, STACK), overrides).profile.services
    inference, environment, trainer = services["vllm"], services["env"], services["trainer"]
    assert isinstance(inference, Inference)
    assert isinstance(environment, Environment)
    assert isinstance(trainer, Trainer)
    return inference, environment, trainer


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
    _, _, trainer = stack(tmp_path, *overrides)
    assert ("gpu_memory_utilization" in trainer.model_fields_set) == is_planned_with
    assert trainer.gpu_memory_utilization == (0.3 if is_planned_with else 0.45)


def test_shared_settings_are_set_once_and_reach_every_service(tmp_path: Path) -> None:
    inference, environment, trainer = stack(tmp_path, "services.vllm.port=9200")
    assert {inference.model_name, environment.model_name, trainer.model_name} == {"local/tiny"}
    assert (inference.dtype, trainer.dtype) == ("float32", "float32")
    assert inference.shared_weights
    assert trainer.bridge.mode == "shared_vllm"
    assert (inference.max_model_len, trainer.seq_len) == (64, 64)
    assert environment.rollout_server_url.endswith(":8123")
    assert [url.rpartition(":")[2] for url in environment.inference_urls] == ["9200"]
    assert trainer.atropos_url.endswith(":8123")
    assert trainer.vllm_port == 9200
    assert environment.needs == {"api": NeedCondition.READY, "vllm": NeedCondition.READY}, "a list of needs means ready"


def test_a_setting_of_a_service_overrides_a_shared_one_and_the_rate_has_two_names(tmp_path: Path) -> None:
    _, _, trainer = stack(tmp_path, "services.trainer.seq_len=32", "services.trainer.learning_rate=2e-6")
    assert (trainer.seq_len, trainer.lr) == (32, 2e-6)


def test_a_rate_in_the_file_is_overridden_by_its_other_name(tmp_path: Path) -> None:
    *_, trainer = stack(tmp_path, "services.trainer.lr=1e-3", "services.trainer.learning_rate=2e-6")
    assert trainer.lr == 2e-6


ANY_COMMAND = commands("a ports = [9000]")
LORA_ONLI = '[bridge]\nmode = "lora_onli"\n' + ANY_COMMAND
KIND_NAMES = "command, rollout_api, inference, environment, atropos_environment, trainer, reference, parameters"


EXACT_FAULTS: list[tuple[str, list[str], str]] = [
    (STACK, ["services.trainer.leaning_rate=1"],
     "--set services.trainer.leaning_rate=1: unknown setting (did you mean 'learning_rate'?)"),
    (STACK, ["trainer.lr=1"], "--set trainer.lr=1: unknown setting (did you mean 'services.trainer.lr'?)"),
    (STACK, ["lr=1"], "--set lr=1: unknown setting (did you mean 'services.trainer.lr'?)"),
    (STACK, ["model_name=m"],
     "--set model_name=m: unknown setting (did you mean 'services.vllm.model_name' or 'services.env.model_name' or "
     "'services.trainer.model_name'?)"),
    (STACK, ["max_steps=1"], "--set max_steps=1: unknown setting (did you mean 'training_steps' of the trainer?)"),
    (commands("a port = [9000]"), [], "x.toml: services.a.port: unknown setting (did you mean 'ports'?)"),
    (ANY_COMMAND, ['services.a.kind="comand"'],
     f"--set services.a.kind=\"comand\": 'comand' is not one of {KIND_NAMES} (did you mean 'command'?)"),
    ("[services.a]\nargv = ['true']\n", [], "x.toml: services.a.kind: required, but missing"),
    (STACK.replace('env = "ready"', 'vlm = "ready"'), [],
     "x.toml: services.trainer.needs: 'vlm' is not a service here (did you mean 'vllm'?)"),
    (STACK, ["services.vllm.port=8123"], "--set services.vllm.port=8123: 8123 is already the port of services.api"),
    (STACK, ["model.dtype=int8"],
     "--set model.dtype=int8: input should be 'bfloat16', 'float16', 'float32' or 'auto', but this is 'int8'"),
    (STACK.replace('"float32"', '"int8"'), [],
     "x.toml: model.dtype: input should be 'bfloat16', 'float16', 'float32' or 'auto', but this is 'int8'"),
    (STACK, ["model.device=gpu"], "--set model.device=gpu: 'gpu' is not a device: use auto, cpu, cuda, or cuda:0"),
    (STACK, ["services.trainer.lr=1e-3", "services.trainer.seq_len=4"],
     "--set services.trainer.seq_len=4: input should be greater than or equal to 8, but this is 4"),
    (STACK.replace("\n[services.t", "\nmax_tokens = 8\n[services.t"), ["services.trainer.seq_len=8"],
     "--set services.trainer.seq_len=8: services.env.max_tokens: 8 leaves no room for a prompt within "
     "services.trainer.seq_len 8: lower it, or raise model.max_model_len"),
    (STACK, ["services.env.max_tokens=64"],
     "--set services.env.max_tokens=64: 64 leaves no room for a prompt within services.trainer.seq_len 64: lower it, "
     "or raise model.max_model_len"),
    (STACK, ["services.env.group_size=1"],
     "--set services.env.group_size=1: input should be greater than or equal to 2, but this is 1"),
    (STACK, ["services.trainer.clip_eps=20"],
     "--set services.trainer.clip_eps=20: input should be less than or equal to 1, but this is 20"),
    (STACK, ["services.vllm.tensor_parallel_size=1000000000"],
     "--set services.vllm.tensor_parallel_size=1000000000: input should be less than or equal to 1024, but this is "
     "1000000000"),
    (STACK, ["services.vllm.memory_limit_gb=1e300"],
     "--set services.vllm.memory_limit_gb=1e300: input should be less than or equal to 1000000000, but this is 1e+300"),
    (STACK, ["services.vllm.tensor_parallel_size=2"],
     "--set services.vllm.tensor_parallel_size=2: services.trainer.processes: 1 rank, and "
     "services.vllm.tensor_parallel_size is 2: with bridge.mode "
     "shared_vllm each rank maps the weights of one process of the server: set services.trainer.gpus = [0, 1], or "
     "tensor_parallel_size to 1"),
    (STACK, ["services.vllm.tensor_parallel_size=2", 'bridge.mode="lora_merged"'],
     "--set services.vllm.tensor_parallel_size=2: 2, and bridge.mode lora_merged maps the whole weights of one GPU: "
     "set it to 1, or bridge.mode to shared_vllm with the trainer on the same GPUs, or to broadcast with the trainer "
     "on another GPU"),
    (STACK, ["services.trainer.gpus=[1]"],
     "--set services.trainer.gpus=[1]: [1], and services.vllm.gpus is not set, so the first: bridge.mode shared_vllm "
     "maps the memory of the server's GPUs, in their order: set both to the same, or bridge.mode to broadcast, none or "
     "lora_only"),
    (STACK, ["services.trainer.gpus=[1]", "bridge.mode=turns"],
     "--set services.trainer.gpus=[1]: [1], and services.vllm.gpus is [0]: with bridge.mode turns both have the memory "
     "of one GPU in turn: set both to the same, or bridge.mode to broadcast"),
    (STACK, ["services.vllm.tensor_parallel_size=2", "bridge.mode=turns"],
     "--set services.vllm.tensor_parallel_size=2: services.vllm: enable_sleep_mode with tensor_parallel_size 2: whole "
     "weights are handed to one GPU: set it to 1"),
    (STACK, ["services.trainer.gpus=[1, 2]"],
     "--set services.trainer.gpus=[1, 2]: 2 ranks, and services.vllm.tensor_parallel_size is 1: with bridge.mode "
     "shared_vllm each rank maps the weights of one process of the server: set services.trainer.gpus = [0], or "
     "tensor_parallel_size to 2"),
    (STACK, ["services.trainer.gpus=[1, 0]", "services.vllm.gpus=[0, 1]", "services.vllm.tensor_parallel_size=2"],
     "--set services.trainer.gpus=[1, 0]: [1, 0], and services.vllm.gpus is [0, 1]: bridge.mode shared_vllm maps the "
     "memory of the server's GPUs, in their order: set both to the same, or bridge.mode to broadcast, none or "
     "lora_only"),
    (STACK, ["services.trainer.processes=2", "services.vllm.tensor_parallel_size=2", "model.device=cpu",
             "services.trainer.cpu_offload=true"],
     "--set services.trainer.processes=2, --set services.trainer.cpu_offload=true: services.trainer: cpu_offload is "
     "not possible for 2 ranks with "
     "weight_bridge_mode shared_vllm: leave it out, or choose broadcast"),
    (STACK, ["services.trainer.gpus=[1, 2]", 'bridge.mode="lora_merged"'],
     "--set services.trainer.gpus=[1, 2]: services.trainer: 2 ranks cannot train with weight_bridge_mode lora_merged, "
     f"which is of one process: choose {' or '.join(OVER_RANKS)}, or leave processes and nodes out, and name one of "
     "gpus"),
    (STACK, ["services.trainer.max_model_len=64"],
     "--set services.trainer.max_model_len=64: services.trainer: max_model_len 64 has no effect, since this trainer "
     "starts no inference server: give it to the server, or choose weight_bridge_mode none or lora_restart with "
     "--bridge-restart"),
    (HOOKS.replace('services = ["trainer"]', 'services = ["trainr"]'), [],
     "x.toml: hooks.1.services: 'trainr' is not a service here (did you mean 'trainer'?)"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "overrides", "message"), EXACT_FAULTS, ids=[row[-1] for row in EXACT_FAULTS])
def test_a_fault_is_reported_once_with_the_file_or_override_the_key_and_the_nearest_valid_value(
    text: str, overrides: list[str], message: str, tmp_path: Path
) -> None:
    assert fault(tmp_path, text, *overrides) == message


@pytest.mark.parametrize("gpus", [("[1]", "[1]"), ("[0]", None), (None, "[3]")])
def test_a_trainer_that_shares_memory_may_be_on_the_gpu_of_its_server(
    gpus: tuple[str | None, str | None], tmp_path: Path
) -> None:
    named = zip(("trainer", "vllm"), gpus, strict=True)
    overrides = [f"services.{name}.gpus={which}" for name, which in named if which is not None]
    assert stack(tmp_path, *overrides)[2].bridge.shares_memory


TO_100 = ["services.trainer.batch_size=4", "services.trainer.gradient_accumulation_steps=25"]
TO_4 = ["services.trainer.batch_size=2", "services.trainer.gradient_accumulation_steps=2"]
NO_STEPS_LEFT = ["services.trainer.lr_schedule=linear", "services.trainer.warmup_steps=500"]


FAULTS: list[tuple[str, list[str], str]] = [
    (ANY_COMMAND, ["services.a.kind=3"], "--set services.a.kind=3: "),
    (ANY_COMMAND, ["services.a.kind=[1]"], "--set services.a.kind=[1]: "),
    (ANY_COMMAND, ["services.a.kind={ a = 1 }"], "--set services.a.kind={ a = 1 }: "),
    ("[services]\na = 5\n", [], "x.toml: services.a: "),
    ("services = 5\n", [], "x.toml: services: "),
    ("[services]\n", [], "x.toml: services: "),
    (LORA_ONLI, [], "x.toml: bridge.mode: 'lora_onli' is not one of "),
    (LORA_ONLI, [], "(did you mean 'lora_only'?)"),
    (STACK, ["services.api.port=eighty"], "--set services.api.port=eighty: "),
    (STACK, ["services.api.port=eighty"], "'eighty'"),
    (STACK.replace('name = "local/tiny"', ""), [], "x.toml: model.name: required, but missing"),
    (STACK, ["model.name=/no/such/model"], "--set model.name=/no/such/model: "),
    (STACK, ["model.name=/no/such/model"], "/no/such/model"),
    (STACK, ["model.name=local/tinny"], "did you mean 'local/tiny'?"),
    (commands('a needs = ["a"]'), [], "a → a"),
    (commands("a ports = [9000]", "b ports = [9000]"), [], "9000 is already the port of services.a"),
    (STACK, ["services.trainer.batch_size=12"], "not a multiple of the environment's group_size 8"),
    (STACK, TO_100, "100 sequences per batch"),
    (STACK, TO_100, "set the two so that their product is 96 or 104"),
    (STACK, TO_4, "so that their product is 8, or"),
    (STACK, NO_STEPS_LEFT, "leaves none of the 10 training_steps"),
    (commands('a restart = "always"', 'b needs = { a = "finished" }'), [], "services.b.needs.a: never finishes"),
    (commands('a ready = { tcp = "x:1", log = "y" }'), [], "a probe has one of http, tcp, log, file, command"),
    (commands("a ready = { log = '(' }"), [], "log = '(' is not a regular expression"),
    (commands("a ready = { log = 'a{99999999999}' }"), [], "is not a regular expression: the repetition number is too"),
    (commands("a restart_in_place = { signal = 'SIGHUP' }"), [], "restart_in_place needs one of log and file"),
    (commands("a restart_in_place = { signal = 'SIGHUP', log = 'x', file = 'y' }"), [],
     "restart_in_place needs one of log and file"),
    (commands('a env = { A = "x\\u0000" }'), [], "env.A has a NUL character"),
    (commands("a gpus = [-1]"), [], "services.a.gpus.0"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "overrides", "words"), FAULTS, ids=[row[-1] for row in FAULTS])
def test_a_setting_that_cannot_work_is_refused(text: str, overrides: list[str], words: str, tmp_path: Path) -> None:
    assert words in fault(tmp_path, text, *overrides)


def test_faults_of_several_services_are_reported_at_once(tmp_path: Path) -> None:
    text = fault(tmp_path, STACK, "services.trainer.leaning_rate=1", "services.api.kind=rolout_api")
    assert "services.trainer.leaning_rate=1: unknown setting (did you mean 'learning_rate'?)" in text
    assert "services.api.kind=rolout_api: 'rolout_api' is not one of" in text
    assert "(did you mean 'rollout_api'?)" in text


def test_an_override_of_a_service_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path, STACK)
    with pytest.raises(ConfigError, match=r"--set services\.trainr: not a service here \(did you mean 'trainer'\?\)"):
        load(path, ["services.trainr.lr=1"])
    added = load(path, ["services.board.kind=command", 'services.board.argv=["true"]'])
    assert "board" in added.profile.services


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_called_like_its_file_and_chosen_by_that_name(kind: str) -> None:
    assert service_class(kind).model_fields["kind"].annotation == Literal[kind]


def test_a_cycle_is_spelled_out(tmp_path: Path) -> None:
    text = fault(tmp_path, commands('a needs = ["c"]', 'b needs = ["a"]', 'c needs = ["b"]'))
    assert "a cycle, so none of these can start first" in text
    assert {"a", "b", "c"} <= set(text.replace(" → ", " ").split())


@pytest.mark.parametrize("name", ["supervisor", "../x", "-w", "a b", ""])
def test_a_service_name_that_cannot_name_a_log_is_refused(tmp_path: Path, name: str) -> None:
    assert "x.toml: services" in fault(tmp_path, f"[services.'{name}']\nkind = 'command'\nargv = ['true']\n")


@pytest.mark.parametrize("name", ["", "A=B", "A\\u0000B"])
def test_a_name_that_no_environment_variable_can_have_is_refused(tmp_path: Path, name: str) -> None:
    text = fault(tmp_path, commands(f'a env = {{ "{name}" = "x" }}'))
    assert "x.toml: services.a" in text
    assert f"env has the name {name.replace(NUL, chr(0))!r}: a name is not empty and has neither '=' nor NUL" in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [('[""]', "[''] has no program"), ('["", "x"]', "has no program"), ('["x", "\\u0000"]', "has a NUL character")],
)
def test_a_command_that_cannot_be_executed_is_refused(tmp_path: Path, argv: str, words: str) -> None:
    assert words in fault(tmp_path, f"[services.a]\nkind = 'command'\nargv = {argv}\n")
    assert words in fault(tmp_path, commands(f"a ready = {{ command = {argv} }}"))
    assert words in fault(tmp_path, commands("a") + f"[[hooks]]\non = ['failed']\nargv = {argv}\n")


def test_a_relative_model_is_looked_for_beside_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}")
    path = write(tmp_path, STACK.replace("local/tiny", "./my-model"))
    model = load(path).profile.model
    assert model is not None
    assert model.name == str(tmp_path / "my-model")


def test_a_folder_without_a_dot_is_a_model_where_it_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profiles").mkdir()
    path = write(tmp_path / "profiles", STACK.replace("local/tiny", "logs/run/checkpoints/step_400"))
    with pytest.raises(ConfigError, match=r"x\.toml: model\.name: 'logs/.*' is neither a folder that exists"):
        load(path)
    folder = tmp_path / "logs" / "run" / "checkpoints" / "step_400"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    reference = "logs/run/checkpoints/step_400"
    overrides = ["services.vllm.model_name=local/tiny", f"services.trainer.reference_model={reference}"]
    services = load(path, overrides).profile.services
    assert isinstance(services["trainer"], Trainer)
    assert isinstance(services["vllm"], Inference)
    assert services["vllm"].model_name == "local/tiny"
    assert (services["trainer"].model_name, services["trainer"].reference_model) == (str(folder), str(folder))


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
    inference, _, _ = stack(tmp_path, f"bridge.mode={mode}")
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


def test_gpus_that_are_no_list_and_a_long_name_of_a_model_end_no_command(tmp_path: Path) -> None:
    assert "services.trainer.gpus" in fault(tmp_path, STACK, "services.trainer.gpus=3")
    assert "a part of more than 255 bytes" in fault(tmp_path, STACK, f"model.name={'a' * 300}")


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
        assert launch.final_exit_codes == (() if launch.kind == "command" else (engine_cli.FINAL_ERROR,))


def test_the_plan_has_the_hooks_and_their_folder(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, HOOKS))
    plan = Plan.from_json(make_plan(loaded, run_folder=tmp_path / "run", python="python").to_json())
    assert plan.profile_folder == tmp_path
    assert [hook.argv for hook in plan.hooks] == [("./archive",), ("./notify", "--loud")]
    assert plan.hooks[1].on == (HookEvent.FAILED, HookEvent.RESTARTED)
    assert plan.hooks[1].timeout_s == 5


@pytest.mark.parametrize(
    ("settings", "state_file"),
    [
        ({}, "/runs/one/env.items.json"),
        ({"curriculum": "rising"}, "/runs/one/env.items.json"),
        ({"curriculum": "rising", "state_file": "/mine.json"}, "/mine.json"),
    ],
)
def test_the_place_in_the_items_and_their_statistics_are_kept_in_the_run_folder(
    settings: dict[str, object], state_file: str | None
) -> None:
    table = {"kind": "environment", "task": "arithmetic", "model_name": "unused", **settings}
    place = Place(profile_folder=Path("/profiles"), run_folder=Path("/runs/one"), python="python3")
    argv = Environment.model_validate(table).launch("env", place).argv
    assert (argv[argv.index("--state-file") + 1] if "--state-file" in argv else None) == state_file


def test_a_path_is_relative_to_the_file_or_to_the_folder_of_the_shell_that_states_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_file, of_shell = tmp_path / "file", tmp_path / "shell"
    of_file.mkdir()
    of_shell.mkdir()
    (of_file / "p.toml").write_text("""
        model = { name = "local/tiny" }
        bridge = { mode = "none", handover = "handed" }
        services.api = { kind = "rollout_api", store = ":memory:" }
        services.vllm = { kind = "inference", logprobs_mode = "processed", vllm = { chat_template = "./t.jinja" } }
        services.rewards = { kind = "environment", task = "python:rewards.py:score" }
        services.sums = { kind = "environment", task = "jsonl:sums.jsonl", env_files = ["a.env"] }
        services.stock = { kind = "atropos_environment", file = "$HOME/stock.py", python = "~/python" }
        services.board = { kind = "command", argv = ["./board"], cwd = "board", ready = { file = "up" } }
        services.trainer = { kind = "trainer", save_path = "saved" }
    """)
    monkeypatch.chdir(of_shell)
    monkeypatch.setenv("HOME", "/home/me")

    def paths(*overrides: str) -> dict[str, object]:
        table = load("../file/p.toml", overrides).written
        services = table["services"]
        return {
            "handover": table["bridge"]["handover"],
            "store": services["api"]["store"],
            "template": services["vllm"]["vllm"]["chat_template"],
            "module": services["rewards"]["task"]["module"],
            "task": services["sums"]["task"]["path"],
            "env_files": services["sums"]["env_files"],
            "stock": (services["stock"]["file"], services["stock"]["python"]),
            "board": (services["board"]["cwd"], services["board"]["ready"]["file"]),
            "saved": services["trainer"]["save_path"],
        }

    stated = {
        "handover": f"{of_file}/handed",
        "store": ":memory:",
        "template": f"{of_file}/t.jinja",
        "module": f"{of_file}/rewards.py",
        "task": f"{of_file}/sums.jsonl",
        "env_files": [f"{of_file}/a.env"],
        "stock": ("$HOME/stock.py", "/home/me/python"),
        "board": (f"{of_file}/board", "up"),  # a probe's file is relative to the working directory of its service
        "saved": f"{of_file}/saved",
    }
    assert paths() == stated
    assert paths("services.trainer.save_path=logs/a/checkpoints", "services.rewards.task=python:../mine.py:score") == {
        **stated,
        "saved": f"{of_shell}/logs/a/checkpoints",
        "module": f"{tmp_path}/mine.py",
    }
    (of_shell / "mine.py").touch()
    mine = "services.rewards.task=python:mine:score"
    assert paths(mine) == {**stated, "module": f"{of_shell}/mine.py"}
    assert paths("services.rewards.task.module=mine") == {**stated, "module": f"{of_shell}/mine.py"}
    assert paths("services.rewards.task=python:elsewhere:score") == {**stated, "module": "elsewhere"}
    (of_shell / "mine.py").chmod(0o666)  # anyone's code
    assert paths(mine) == {**stated, "module": "mine"}
    (of_shell / "mine.py").chmod(0o644)
    file = of_file / "p.toml"
    file.write_text(file.read_text().replace("python:rewards.py", "python:mine"))
    assert paths("services.trainer.lr=1e-6", "services.rewards.task.timeout_s=5") == {**stated, "module": "mine"}


@pytest.mark.parametrize(
    ("devices", "gpus", "where"), [("gpus = [2, 3]", [2, 3], "GPU"), ("processes = 2", [None] * 2, "CPU")]
)
def test_a_plan_lists_the_ranks_of_a_trainer_with_their_gpus_and_the_sequences_of_a_step(
    devices: str, gpus: list[int | None], where: str, tmp_path: Path
) -> None:
    (tmp_path / "p.toml").write_text(
        f'[bridge]\nmode = "none"\n[services.t]\nkind = "trainer"\nmodel_name = "local/tiny"\n{devices}\n'
    )
    loaded = load(str(tmp_path / "p.toml"), [])
    plan = make_plan(loaded, run_folder=tmp_path / "run", python="python")
    [told] = describe(plan, loaded)["services"]
    assert told["ranks"] == [{"rank": rank, "gpu": gpu} for rank, gpu in enumerate(gpus)]
    words = [f"rank {rank} on {where}" + ("" if gpu is None else f" {gpu}") for rank, gpu in enumerate(gpus)]
    assert ", ".join(words) in plan_text(plan, loaded)
    assert "64 sequences a step" in plan_text(plan, loaded)  # 2 × 32


@pytest.mark.parametrize(
    ("services", "faults"),
    [
        (
            "".join(f'[services.v{i}]\nkind = "inference"\nport = {1100 + i}\nreplicas = 256\n' for i in range(1000)),
            ["services: 256000 of them with their replicas, at most 4096 are started"],
        ),
        (
            f'[services.x]\nkind = "command"\nargv = ["true"]\nenv_files = {["a.env"] * 5000}\n',
            ["services.x.env_files: those of all services are longer than 4,194,304 bytes"],
        ),
        (
            f'[services.x]\nkind = "command"\nargv = ["true"]\nneeds = {[f"s{i}" for i in range(9999)]}\n',
            [f"services.x.needs: 's{i}' is not a service here" for i in range(100)],
        ),
    ],
)
def test_a_profile_of_somebody_is_not_loaded_for_minutes(services: str, faults: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.env").write_text("A=1\n")
    path = tmp_path / "p.toml"
    path.write_text(services)
    with pytest.raises(ConfigError) as caught:
        load(str(path))
    assert str(caught.value).splitlines() == [f"{path}: {fault}" for fault in faults]


def test_without_a_home_the_hub_and_the_screen_have_folders_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)  # has no entry
    assert hub_cache().parts[-2:] == ("huggingface", "hub")
    assert preferences_file({}) == Path("/.config/grpo-tui/screen.json")
