"""Messages of the command line before it runs a command."""

from __future__ import annotations

from importlib.metadata import version

from typer.testing import CliRunner

from grpo_tui.cli import build_app
from grpo_tui.exit_codes import ExitCode


def test_a_misspelt_command_names_the_nearest() -> None:
    result = CliRunner().invoke(build_app(), ["statsu"])
    assert result.exit_code == ExitCode.USAGE
    assert "No such command 'statsu' (did you mean 'status'?)." in result.output


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(build_app(), ["--version"])
    assert (result.exit_code, result.output) == (ExitCode.OK, f"grpo-tui {version('grpo-tui')}\n")
