"""Messages of the command line before it runs a command."""

from __future__ import annotations

import errno
import json
import os
import resource
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grpo_engine.errors import ConfigError
from grpo_engine.wire.codec import write_atomically
from grpo_tui import cli
from grpo_tui.cli import build_app
from grpo_tui.cli.overrides import own_overrides, with_set
from grpo_tui.cli.printing import write_file
from grpo_tui.client.launch import make_folder
from grpo_tui.exit_codes import ExitCode
from grpo_tui.profile.loading import load
from grpo_tui.profile.plan import make_plan
from grpo_tui.services.base import Launch


def test_a_misspelt_command_names_the_nearest() -> None:
    result = CliRunner().invoke(build_app(), ["statsu"])
    assert result.exit_code == ExitCode.USAGE
    assert "No such command 'statsu' (did you mean 'status'?)." in result.output


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("up mine.toml --new", "(did you mean `grpo-tui up --profile mine.toml --new`?)"),
        ("up --new --set model.name=tiny-cpu mine.toml", "--set model.name=tiny-cpu --profile mine.toml`?)"),
        ("up --new --name tiny-cpu", "Missing option '--profile'"),
        ("plan tiny-cpu", "(did you mean `grpo-tui plan --profile tiny-cpu`?)"),
        ("mine.toml", "(did you mean `grpo-tui --profile mine.toml`?)"),
        ("list", "(did you mean 'ps'?)"),
        ("stop", "`grpo-tui down` ends the whole run"),
        ("check --help", "(did you mean `grpo-engine check --help`?)"),
        ("sweep mine.toml", "(did you mean `grpo-tui sweep --profile mine.toml`?)"),
        ("sweep list", "`grpo-tui` alone lists all sweeps"),
    ],
)
def test_words_that_are_no_command_are_answered_with_what_to_type(words: str, answer: str) -> None:
    result = CliRunner().invoke(build_app(), words.split())
    assert result.exit_code == ExitCode.USAGE
    assert answer in result.output


def test_commands_of_the_engine_are_known_as_such() -> None:
    from grpo_engine.cli import COMMANDS

    assert COMMANDS.keys() - cli.COMMANDS == cli.ENGINE_COMMANDS


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
    assert "profile tiny-cpu has no service of kind reference: add one, or leave it out" in str(result.exception)


def planned(*words: str) -> dict[str, Launch]:
    profile = load("gsm8k-async", own_overrides("gsm8k-async", words))
    return {each.name: each for each in make_plan(profile, run_folder=Path("run"), python="python").launches}


def test_numbers_of_devices_by_the_names_of_another_trainer_are_those_of_the_services_of_a_profile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    services = planned("train_model.num_devices=2", "ref_model.num_devices=2", "inference_model.num_devices=2")
    gpus = {name: each.gpus for name, each in services.items() if each.gpus}
    assert gpus == {"trainer": (0, 1), "vllm": (2, 3), "reference": (4,), "reference-2": (5,)}
    trainer, vllm = (" ".join(services[name].argv) for name in ("trainer", "vllm"))
    assert "--reference-urls http://127.0.0.1:9101 http://127.0.0.1:9102" in trainer
    assert "--tensor-parallel-size 2" in vllm
    services = planned("train_model.devices=[0,1]", "inference_model.devices=[4,5]", "ref_model.devices=[2,3]")
    gpus = {name: each.gpus for name, each in services.items() if each.gpus}
    assert gpus == {"trainer": (0, 1), "vllm": (4, 5), "reference": (2,), "reference-2": (3,)}


def test_a_number_of_devices_is_refused_where_a_profile_names_the_gpus() -> None:
    words = ["plan", "--profile", "hermes8b-shared", "train_model.num_devices=2"]
    result = CliRunner().invoke(build_app(), words)
    assert isinstance(result.exception, ConfigError)
    assert "services.trainer.gpus is [0] in this profile: set that instead" in str(result.exception)


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


def test_a_low_limit_of_open_files_is_a_message_with_the_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(prog_name: str) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(cli, "build_app", lambda: start)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8, 8))
    with pytest.raises(SystemExit, match=str(ExitCode.FAILED.value)):
        cli.main()
    assert capsys.readouterr().err.startswith("Too many open files: the limit is 8 (ulimit -n): raise it")


def test_a_low_limit_of_memory_is_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(prog_name: str) -> None:  # `status` with ulimit -v 100000
        raise MemoryError

    monkeypatch.setattr(cli, "build_app", lambda: start)
    with pytest.raises(SystemExit, match=str(ExitCode.FAILED.value)):
        cli.main()
    assert capsys.readouterr().err.startswith("out of memory: ")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENAMETOOLONG])
def test_a_folder_that_may_not_be_read_or_written_is_a_message_with_its_path(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(prog_name: str) -> None:  # `sweep status` where others closed `logs` to us
        raise OSError(number, os.strerror(number), "logs/sweeps")

    monkeypatch.setattr(cli, "build_app", lambda: start)
    with pytest.raises(SystemExit, match=str(ExitCode.FAILED.value)):
        cli.main()
    assert capsys.readouterr().err == f"logs/sweeps: {os.strerror(number)}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("output", "expected"),
    [(">/dev/full", "No space left on device: make room, and try again"), (">&{}", ""), (">&-", "")],
    ids=["a full disk", "a closed pipe", "closed"],
)
def test_output_that_cannot_be_written_ends_no_command_with_a_traceback(
    output: str, expected: str, tmp_path: Path
) -> None:
    code = "import sys; from grpo_tui.cli import main; sys.argv[1:] = ['--version']; main()"
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = f"exec {shlex.join([sys.executable, '-c', code])} {output.format(write_end)}"
    ended = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, stderr=subprocess.PIPE, text=True, pass_fds=[write_end], check=False
    )
    os.close(write_end)
    assert ended.stderr == (f"{tmp_path}: {expected}\n" if expected else "")


def test_a_full_disk_is_a_message_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def start(prog_name: str) -> None:
        make_folder(load("tiny-cpu"), tmp_path / "logs", take_ports=False, fill=fill)

    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(cli, "build_app", lambda: start)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=str(ExitCode.FAILED.value)):
        cli.main()
    assert capsys.readouterr().err == f"{tmp_path}: No space left on device: make room, and try again\n"
    assert list((tmp_path / "logs").iterdir()) == []


def test_what_is_written_to_a_device_or_a_pipe_does_not_replace_it(tmp_path: Path) -> None:
    """As root, `compare -o /dev/null` made the null device of the machine a file."""
    ours, theirs = os.openpty()
    device, (read, write) = Path(os.ttyname(theirs)), os.pipe()
    write_file(device, b"to the device")
    write_file(Path(f"/dev/fd/{write}"), b"to the pipe")
    assert (os.read(ours, 100), os.read(read, 100)) == (b"to the device", b"to the pipe")
    (noted := Path(f"{tmp_path}/notes")).write_bytes(b"noted, ")
    with noted.open("ab") as appended:
        write_file(Path(f"/dev/fd/{appended.fileno()}"), b"to the notes")
    assert noted.read_bytes() == b"noted, to the notes"
    with pytest.raises(OSError, match="a device, which is not replaced"):
        write_atomically(device, b"")
    for descriptor in (ours, theirs, read, write):
        os.close(descriptor)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a pipe of another user")
def test_output_is_not_written_to_a_pipe_that_another_user_has_put_there(tmp_path: Path) -> None:
    """Of a pipe in /tmp that nobody reads, or a link to one, `compare -o` waited for a reader without end."""
    pipe, link = tmp_path / "page.html", tmp_path / "page.svg"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (link, pipe):
        os.lchown(path, 65534, 65534)
        write_file(path, b"page")  # root may replace it; others are told that they cannot
        assert (path.is_file(), path.read_bytes()) == (True, b"page")


def test_services_that_are_no_table_are_named_by_the_profile_whatever_is_overridden(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text("services = 3")
    assert own_overrides(str(tmp_path / "p.toml"), ["optimizer.lr=1"]) == ["optimizer.lr=1"]


def test_a_note_on_stderr_follows_the_table_it_is_about_in_a_file_that_both_go_to(tmp_path: Path) -> None:
    words = "from grpo_tui.cli.printing import write_line as w; w('table'); w('note', to_stderr=True); w('more')"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with (tmp_path / "both").open("wb") as both:
        subprocess.run([sys.executable, "-c", words], stdout=both, stderr=both, env=buffered, check=True, timeout=60)
    assert (tmp_path / "both").read_text() == "table\nnote\nmore\n"


def test_in_a_folder_without_runs_ps_says_how_to_start_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(build_app(), ["ps"])
    assert result.stdout.startswith("RUN ")
    assert "`grpo-tui --profile NAME` starts one" in result.stderr
