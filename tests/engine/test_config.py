"""Settings: what a person reads when one is wrong, and that flags and files say the same."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import AliasChoices, Field

from grpo_engine.cli import main
from grpo_engine.config import (
    OF_THE_ENVIRONMENT,
    OF_THE_TRAINER,
    Config,
    LogLevel,
    apply_overrides,
    read_table,
    setting_names,
    validated,
    with_absolute_paths,
)
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.errors import ConfigError
from grpo_engine.flags import Flag, flags_of, parse_flags, to_flags
from grpo_engine.models.config import check_model_name, is_from_hub
from grpo_engine.other_names import BESIDE_SECTIONS, DOTTED
from grpo_engine.rollouts.config import ApiConfig
from grpo_engine.server.config import ServerConfig
from grpo_engine.train.config import TrainConfig


class Restart(Config):
    mode: Annotated[Literal["none"], Flag(("--mode",))] = "none"
    every_steps: Annotated[int, Flag(("--restart-interval",))] = Field(3, ge=1)
    """Steps between restarts."""


class Shared(Config):
    mode: Annotated[Literal["shared_vllm"], Flag(("--mode",))]
    config_path: Path | None = None


AnyBridge = Annotated[Restart | Shared, Field(discriminator="mode")]


class Trainer(Config):
    kind: Literal["trainer"] = "trainer"
    model_name: Annotated[str, Flag(("--model-name", "--model"))]
    lr: float = Field(1e-5, gt=0, validation_alias=AliasChoices("lr", "learning_rate"))
    """Learning rate, 100 % of it."""
    modules: tuple[str, ...] = ()
    use_wandb: bool = False
    offset: int = 0
    layers: str | None = None
    log_level: LogLevel = "info"
    bridge: AnyBridge = Restart()


class Server(Config):
    kind: Literal["server"] = "server"
    port: int = 1


class Profile(Config):
    services: dict[str, Annotated[Trainer | Server, Field(discriminator="kind")]]


def faults(table: dict[str, object]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validated(Profile, table, where="p.toml")
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("service", "line"),
    [
        ({"leaning_rate": 1}, "leaning_rate: unknown setting (did you mean 'learning_rate'?)"),
        ({"lr": 1, "learning_rate": 2}, "learning_rate: another name of 'lr', which is also set: set only that"),
        (
            {"bridge": {"mode": "none", "evry_steps": 2}},
            "bridge.evry_steps: unknown setting (did you mean 'every_steps'?)",
        ),
        ({"kind": "trainr"}, "kind: 'trainr' is not one of trainer, server (did you mean 'trainer'?)"),
    ],
    ids=["unknown key", "two names of one setting", "unknown key in a union inside a union", "unknown kind"],
)
def test_a_wrong_setting_is_named_with_its_place_and_what_to_do(service: dict[str, object], line: str) -> None:
    table = {"services": {"trainer": {"kind": "trainer", "model_name": "m", **service}}}
    assert faults(table) == [f"p.toml: services.trainer.{line}"]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "t: model_name (--model-name): required, but missing"),
        (["--model", "m", "--mode", "x"], "t: bridge.mode (--mode): 'x' is not one of none, shared_vllm"),
        (["--model", "m", "--lr", "-1"], "t: lr: input should be greater than 0, but this is '-1'"),
    ],
    ids=["a missing one", "one by another name", "one by its name"],
)
def test_a_wrong_flag_is_named_where_its_setting_does_not_name_it(argv: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_flags(Trainer, argv, prog="t", description="")
    assert str(caught.value) == line


def test_a_table_that_is_missing_is_named_with_the_flag_of_what_chooses_it() -> None:
    with pytest.raises(ConfigError, match=r"^t: task \(--task\): required, but missing"):
        parse_flags(EnvironmentConfig, ["--model-name", "m"], prog="t", description="")


def test_every_fault_has_a_line_of_its_own() -> None:
    lines = faults({"services": {"t": {"kind": "trainer", "lr": -1}, "s": {"kind": "server", "port": "x"}, "u": {}}})
    assert [line.split(": ")[1] for line in lines] == [
        "services.t.model_name",
        "services.t.lr",
        "services.s.port",
        "services.u.kind",
    ]
    assert "required, but missing" in lines[0]
    assert "this is -1" in lines[1]
    assert "this is 'x'" in lines[2]


def test_an_override_is_read_as_toml_and_otherwise_as_text() -> None:
    table = {"a": {"x": 1}}
    result = apply_overrides(table, ["a.x=2e-6", "a.y=[1, 2]", "b.c.d=true", "b.name=plain text"])
    assert result == {"a": {"x": 2e-6, "y": [1, 2]}, "b": {"c": {"d": True}, "name": "plain text"}}
    assert table == {"a": {"x": 1}}


@pytest.mark.parametrize(("in_file", "other"), [("lr", "learning_rate"), ("learning_rate", "lr")])
def test_an_override_takes_the_place_of_a_setting_by_its_other_name(in_file: str, other: str) -> None:
    table: dict[str, object] = {"services": {"t": {"kind": "trainer", in_file: 1.0}, "s": {"kind": "server"}}}
    overridden = apply_overrides(table, [f"services.t.{other}=2.0", f"services.s.{other}=3.0"], model=Profile)
    assert overridden["services"]["t"] == {"kind": "trainer", other: 2.0}
    assert overridden["services"]["s"] == {"kind": "server", other: 3.0}, "a name of no setting there"


@pytest.mark.parametrize("words", [["--lr", "2e-6"], ["--learning-rate", "2e-6"], ["--set", "lr=2e-6"], ["lr=2e-6"]])
def test_flags_and_overrides_go_before_a_file_that_has_another_name_of_a_setting(
    words: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "t.toml"
    path.write_text('model_name = "m"\nlearning_rate = 1.0\n')
    config = parse_flags(Trainer, ["--config", str(path), *words], prog="t", description="")
    assert config.lr == 2e-6


@pytest.mark.parametrize(
    "text",
    ["1", "0.10", "1e5", "2024-01-31", "0-3,28-31", pytest.param("[" * 5000, id="["), pytest.param("9" * 5000, id="9")],
)
def test_an_override_of_a_text_may_look_like_a_number(text: str) -> None:
    argv = ["--model", "m", "--set", f"layers={text}"]
    assert parse_flags(Trainer, argv, prog="t", description="").layers == text


def test_a_number_in_a_file_is_taken_as_the_text_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text('model_name = "m"\nlayers = 0.10\nlr = 0.10\n')
    config = validated(Trainer, read_table(path), where="t")
    assert (config.layers, config.lr) == ("0.10", 0.1)


def test_a_log_level_is_taken_in_any_capitals() -> None:
    assert parse_flags(Trainer, ["--model", "m", "--log-level", "DEBUG"], prog="t", description="").log_level == "debug"


@pytest.mark.parametrize("model", [TrainConfig, EnvironmentConfig, ServerConfig, ApiConfig])
def test_every_service_has_a_log_level(model: type[Config]) -> None:
    assert "--log-level" in flags_of(model)


def test_a_name_of_another_trainer_is_answered_with_ours_and_not_with_what_looks_like_it() -> None:
    with pytest.raises(ConfigError, match=r"--max-iterations: unknown flag \(did you mean '--training-steps'\?\)"):
        parse_flags(TrainConfig, ["--model", "m", "--max-iterations", "9"], prog="t", description="")
    with pytest.raises(ConfigError, match=r"max_iterations: unknown setting \(did you mean 'training_steps'\?\)"):
        validated(TrainConfig, {"model_name": "m", "max_iterations": 9}, where="t")
    with pytest.raises(ConfigError, match=r"num_generations: .* \(did you mean 'group_size' of the environment\?\)"):
        validated(TrainConfig, {"model_name": "m", "num_generations": 9}, where="t")
    with pytest.raises(ConfigError, match=r"--kl-coeff: .* \(did you mean 'kl_coef' of the trainer\?\)"):
        parse_flags(EnvironmentConfig, ["--kl-coeff", "1"], prog="t", description="")


def test_an_unknown_key_in_a_section_of_another_trainer_is_refused_by_its_whole_name(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text("model: {name: m}\ntrain: {optim_batch_size: 4, mixed_up: 1}\n")
    with pytest.raises(ConfigError, match=r"train\.mixed_up: unknown setting"):
        parse_flags(TrainConfig, ["--config", str(tmp_path / "t.yaml")], prog="grpo-engine train", description="")


def test_what_names_of_other_trainers_are_answered_with_is_a_setting() -> None:
    assert set(OF_THE_TRAINER.values()) <= {*setting_names(TrainConfig), "weight_bridge_mode"}
    assert set(OF_THE_ENVIRONMENT.values()) <= set(setting_names(EnvironmentConfig))


def test_a_flag_of_another_service_is_answered_with_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--task", "sort6", "--model", "m", "--batch-size", "16"]) == 2
    assert "--batch-size: not a flag here, but of `grpo-engine train`" in capsys.readouterr().err


@pytest.mark.parametrize("override", ["a.x", "=3", "a..x=1"])
def test_an_override_without_key_or_value_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="expected KEY=VALUE"):
        apply_overrides({}, [override])


def test_an_override_through_a_plain_value_says_which() -> None:
    with pytest.raises(ConfigError, match=r"a\.x is 1, not a table"):
        apply_overrides({"a": {"x": 1}}, ["a.x.y=2"])


def test_an_override_goes_on_through_a_short_form() -> None:
    overrides = ["task=python:mine:score", "task.path=x.jsonl"]
    table = apply_overrides(
        {}, overrides, spell_out=lambda table: with_absolute_paths(EnvironmentConfig, table, Path("/"))
    )
    assert table == {"task": {"name": "python", "module": "mine", "functions": ["score"], "path": "x.jsonl"}}


@pytest.mark.parametrize("path", ["name.x", "name.x.y"])
def test_a_text_that_is_no_short_form_is_not_gone_through(path: str) -> None:
    with pytest.raises(ConfigError, match=r"name is 'cosine', not a table"):
        apply_overrides(
            {"name": "cosine"},
            [f"{path}=1"],
            spell_out=lambda table: with_absolute_paths(EnvironmentConfig, table, Path("/")),
        )


def test_a_malformed_file_names_itself_and_the_line(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text("a = 1\nb = \n")
    with pytest.raises(ConfigError, match=r"p\.toml: not valid TOML: .*line 2"):
        read_table(path)


def test_flags_give_the_settings_and_the_settings_give_the_flags() -> None:
    argv = ["--model", "m", "--learning-rate", "2e-6", "--modules", "q", "v", "--use-wandb", "--offset=-1"]
    argv += ["--mode", "shared_vllm", "--bridge.config-path", "/x"]
    config = parse_flags(Trainer, argv, prog="t", description="")
    assert config.lr == 2e-6
    assert config.modules == ("q", "v")
    assert config.offset == -1
    assert config.bridge == Shared(mode="shared_vllm", config_path=Path("/x"))
    assert parse_flags(Trainer, to_flags(config), prog="t", description="") == config


def test_defaults_make_no_flags_but_a_unions_tag_is_always_said() -> None:
    assert to_flags(Trainer(model_name="m")) == ["--model-name", "m", "--mode", "none"]


def test_a_flag_of_another_mode_warns_and_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", "m", "--mode", "shared_vllm", "--restart-interval", "5"]
    config = parse_flags(Trainer, argv, prog="t", description="")
    assert config.bridge == Shared(mode="shared_vllm")
    assert (
        "bridge.every_steps (--restart-interval) has no effect with bridge.mode = 'shared_vllm'"
        in capsys.readouterr().err
    )


def test_flags_override_a_file_and_set_overrides_both(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text('model_name = "file"\nlr = 1e-3\noffset = 1\n')
    argv = ["--config", str(path), "--lr", "1e-4", "--set", "offset=7", "--set", "bridge.every_steps=9"]
    config = parse_flags(Trainer, argv, prog="t", description="")
    assert (config.model_name, config.lr, config.offset) == ("file", 1e-4, 7)
    assert config.bridge == Restart(every_steps=9)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--learning-rat", "3"], r"t: --learning-rat: unknown flag \(did you mean '--learning-rate'\?\)"),
        (["--multirun", "optimizer.lr=1e-4,1e-5"], "--multirun: .* `grpo-tui sweep --profile NAME --multirun KEY=A,B`"),
        (["serve", "--env.group_size=4"], "--env.group_size: a flag of Atropos environments; .*atropos-env"),
    ],
)
def test_a_flag_that_is_none_here_is_answered_in_one_line(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_flags(Trainer, ["--model", "m", *argv], prog="t", description="")
    assert "\n" not in str(caught.value)


def test_help_shows_docstring_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_flags(Trainer, ["--help"], prog="t", description="")
    text = " ".join(capsys.readouterr().out.split())
    assert "Learning rate, 100 % of it. (default: 1e-05)" in text
    assert "Steps between restarts. (default: 3)" in text
    assert "--mode {none,shared_vllm}" in text


def test_a_yaml_file_gives_the_same_as_a_toml_file(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("model_name: m  # as it is\nlr: 1e-3\nmodules: [q, v]\nuse_wandb: true\n")
    config = parse_flags(Trainer, ["--config", str(path)], prog="t", description="")
    assert config == Trainer(model_name="m", lr=1e-3, modules=("q", "v"), use_wandb=True)
    path.write_text("a: [1\nb: 2\n")
    with pytest.raises(ConfigError, match=r"t\.yaml: not valid YAML: .*line 2"):
        read_table(path)


def test_overrides_need_no_flag_and_may_have_the_names_of_other_trainers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "m", "optimizer.lr=2e-5", "--wandb-project", "a.b=c", "batch_size=4", "policy.kl_coef=0.01"]
    words += ["lr_scheduler.num_warmup_steps=7"]
    config = parse_flags(TrainConfig, words, prog="grpo-engine train", description="")
    assert (config.lr, config.batch_size, config.kl_coef, config.wandb_project) == (2e-5, 4, 0.01, "a.b=c")
    assert capsys.readouterr().err.splitlines() == [
        "grpo-engine train: optimizer.lr=2e-5: lr=2e-5 here",
        "grpo-engine train: policy.kl_coef=0.01: kl_coef=0.01 here",
        "grpo-engine train: lr_scheduler.num_warmup_steps=7: warmup_steps=7 here",
    ]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("env.dataset=ifeval", "env.dataset=ifeval: task of grpo-engine env: give it there"),
        (
            "ref_model.num_devices=2",
            "give it to grpo-tui with a profile that has a service of kind reference, or leave it out",
        ),
        ("train.lr=1", "train: unknown setting"),
    ],
)
def test_an_override_that_is_no_setting_of_this_command_says_where_it_belongs(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse_flags(TrainConfig, ["--model", "m", word], prog="grpo-engine train", description="")


def test_every_name_of_another_trainer_is_a_setting_here_or_says_what_to_do() -> None:
    models = {"train": TrainConfig, "server": ServerConfig, "env": EnvironmentConfig}
    for name, named in {**DOTTED, **BESIDE_SECTIONS}.items():
        assert named.commands or named.note, name
        for command in named.commands:
            assert {named.of(command).split(".")[0]} <= set(setting_names(models[command])), (name, command)


def test_the_file_of_a_co_located_trainer_is_read_by_trainer_and_server(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(Path(__file__).parents[2] / "training_configs" / "dr_grpo_config.yaml")
    config = parse_flags(TrainConfig, ["--config", file], prog="grpo-engine train", description="")
    assert config.sequences_per_batch == 64
    assert (config.model_name, config.training_steps, config.lr) == ("microsoft/DialoGPT-medium", 5000, 1e-5)
    assert config.bridge.every_steps == 100
    assert (config.sharding_strategy, config.dtype, config.cpu_offload) == ("full_shard", "bfloat16", False)
    told = capsys.readouterr().err
    assert "fsdp_config.sharding_strategy: sharding_strategy = full_shard here" in told
    assert "vllm_config.max_num_seqs: of grpo-engine server" in told
    server = parse_flags(ServerConfig, ["--config", file], prog="grpo-engine server", description="")
    assert (server.max_batch_size, server.max_model_len, server.gpu_memory_utilization) == (32, 2048, 0.4)
    assert server.enforce_eager
    assert "max_iterations: of grpo-engine train" in capsys.readouterr().err


def test_a_number_of_completions_is_a_number_of_steps() -> None:
    def parsed(*words: str) -> TrainConfig:
        return parse_flags(TrainConfig, ["--model", "m", *words], prog="grpo-engine train", description="")

    assert parsed("train.total_dialog_turns=1000").training_steps == 16  # of 64
    config = parsed("--total-dialog-turns", "1000", "--batch-size", "5", "--gradient-accumulation-steps", "10")
    assert config.training_steps == 20
    assert parse_flags(TrainConfig, to_flags(config), prog="train", description="") == config
    with pytest.raises(ConfigError, match="1000 are 16 steps of 64 completions, not training_steps 10: leave one"):
        parsed("--total-dialog-turns", "1000", "--training-steps", "10")
    with pytest.raises(ConfigError, match="total_dialog_turns: input should be greater than or equal to 1"):
        parsed("--total-dialog-turns", "0")


def test_a_yaml_table_that_an_alias_puts_into_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("a: &a {b: *a}\n")
    with pytest.raises(ConfigError, match=r"t\.yaml: not valid YAML: an alias names the table or list that it is in"):
        read_table(path)
    path.write_text("a: &a {b: 1}\nc: *a\n")
    assert read_table(path) == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize("use", ["[{}]", "{{<<: [{}]}}"])
def test_yaml_aliases_that_stand_for_more_values_than_any_file_has_are_refused(use: str, tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    levels = [f"a{level}: &a{level} " + use.format(", ".join([f"*a{level - 1}"] * 9)) for level in range(1, 10)]
    path.write_text("\n".join(["a0: &a0 {x: 1}", *levels]))
    with pytest.raises(ConfigError, match=r"t\.yaml: not valid YAML: its aliases stand for more than 100000 values"):
        read_table(path)
    path.write_text("\n".join(["a0: &a0 {x: 1}", *levels[:3]]))
    assert len(read_table(path)["a3"]) in (1, 9)


def test_a_pipe_is_read_as_settings_only_where_it_is_open_already(tmp_path: Path) -> None:
    pipe = tmp_path / "t.toml"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=r"t\.toml: cannot be read: not a regular file"):
        read_table(pipe)
    out, into = os.pipe()
    os.write(into, b"a = 1")
    os.close(into)
    try:
        assert read_table(Path(f"/dev/fd/{out}")) == {"a": 1}
    finally:
        os.close(out)


def test_an_integer_that_python_refuses_to_write_and_a_file_without_end_are_no_settings(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text(f"a = [{{ b = 0x{'f' * 4000} }}]")
    with pytest.raises(ConfigError, match=r"t\.toml: not valid TOML: an integer of more than 1024 bits"):
        read_table(path)
    os.truncate(path, 1 << 40)
    with pytest.raises(ConfigError, match=r"t\.toml: cannot be read: longer than 4,194,304 bytes"):
        read_table(path)


def test_settings_nested_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"t\.json: not valid JSON: nested too deep"):
        read_table(path)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("t.toml", "a." * 100_000 + "a = 1", "not valid TOML: its lines have too many dots"),
        ("t.toml", "[" + "a." * 100_000 + "a]", "not valid TOML: its lines have too many dots"),
        ("t.yaml", "a: 1" + ":1" * 200_000, "longer than 262,144 bytes: write it as TOML"),
        ("t.json", f'{{"a": [{"0," * 262_143}0]}}', "more than 262,144 names and values"),
        ("t.json", f'{{"a": [{"{}," * 262_143}{{}}]}}', "more than 262,144 names and values"),  # each may be a fault
    ],
)
def test_settings_that_take_minutes_to_read_are_refused(name: str, text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_table(path)


def test_a_home_of_no_user_is_a_name_as_in_a_shell_and_no_path_has_a_nul(tmp_path: Path) -> None:
    class Saved(Config):
        path: Path

    assert with_absolute_paths(Saved, {"path": "~no.user/x"}, tmp_path) == {"path": f"{tmp_path}/~no.user/x"}
    with pytest.raises(ConfigError, match="has a NUL character"):
        with_absolute_paths(Saved, {"path": "x\0y"}, tmp_path)
    assert is_from_hub("~no.user/x") is False
    assert "neither a folder" in (check_model_name("~no.user/x") or "")
