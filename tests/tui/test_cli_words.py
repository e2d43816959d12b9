"""Messages of the command line before it runs a command."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from grpo_engine.errors import ConfigError
from grpo_tui.cli import build_app
from grpo_tui.cli.overrides import with_set
from grpo_tui.exit_codes import ExitCode


def test_a_misspelt_command_names_the_nearest() -> None:
    result = CliRunner().invoke(build_app(), ["statsu"])
    assert result.exit_code == ExitCode.USAGE
    assert "No such command 'statsu' (did you mean 'status'?)." in result.output


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(build_app(), ["--version"])
    assert (result.exit_code, result.output) == (ExitCode.OK, f"grpo-tui {version('grpo-tui')}\n")


def test_overrides_of_a_profile_need_no_flag_and_may_have_the_names_of_other_trainers() -> None:
    words = ["plan", "--profile", "tiny-cpu", "optimizer.lr=2e-5", "env.num_envs=7", "model.name=local/tiny", "--json"]
    result = CliRunner().invoke(build_app(), words)
    assert result.exit_code == ExitCode.OK, result.output
    argv = {service["name"]: service["argv"] for service in json.loads(result.stdout)["services"]}
    assert "2e-05" in argv["trainer"]
    assert "--max-workers 7" in " ".join(argv["env"])
    assert result.stderr.splitlines()[:2] == [
        "optimizer.lr=2e-5: services.trainer.lr=2e-5 here",
        "env.num_envs=7: services.env.max_workers=7 here",
    ]


def test_an_override_that_no_service_has_says_what_to_do() -> None:
    result = CliRunner().invoke(build_app(), ["plan", "--profile", "tiny-cpu", "ref_model.num_devices=2"])
    assert isinstance(result.exception, ConfigError)
    assert "the reference model is on the ranks of the trainer: leave it out" in str(result.exception)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--multirun", "a.b=1,2", "c.d=3,4"], ["--multirun", "a.b=1,2", "--set", "c.d=3,4"]),
        (["--set", "a=1", "--name", "x=y"], ["--set", "a=1", "--name", "x=y"]),
        (["--profile=P", "a=1"], ["--profile=P", "--set", "a=1"]),
    ],
)
def test_a_word_after_an_option_is_its_value_and_no_override(words: list[str], expected: list[str]) -> None:
    assert with_set(words) == expected
