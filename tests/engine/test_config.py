"""Settings: what a person reads when one is wrong, and that flags and files say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import AliasChoices, Field

from grpo_engine.config import Config, apply_overrides, read_table, validated
from grpo_engine.errors import ConfigError
from grpo_engine.flags import Flag, parse_flags, to_flags


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


@pytest.mark.parametrize("override", ["a.x", "=3", "a..x=1"])
def test_an_override_without_key_or_value_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="expected KEY=VALUE"):
        apply_overrides({}, [override])


def test_an_override_through_a_plain_value_says_which() -> None:
    with pytest.raises(ConfigError, match=r"a\.x is 1, not a table"):
        apply_overrides({"a": {"x": 1}}, ["a.x.y=2"])


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
    assert "bridge.every_steps has no effect with bridge.mode = 'shared_vllm'" in capsys.readouterr().err


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
        (["--single-copy"], "always has one copy: leave it out"),
        (["--use-shared-memory"], "--weight-bridge-mode none where they do not"),
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
