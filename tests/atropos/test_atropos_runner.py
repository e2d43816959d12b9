"""The runner of stock environments: their process, their settings file, and the report of an idle one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from stack import ENVIRONMENT, Stack

from grpo_tui.supervisor.keeper.proc import identify

pytestmark = [pytest.mark.slow, pytest.mark.atropos, pytest.mark.timeout(300)]

WRITES_SETTINGS = """
import json, os, sys, yaml
os.write(1, b"out \\xff\\x00 no newline")
os.write(2, b"err\\n")
with open(sys.argv[3]) as file:
    settings = {"argv": sys.argv[1:3], "unbuffered": os.environ["PYTHONUNBUFFERED"], **yaml.safe_load(file)}
with open("settings.json", "w") as file:
    json.dump(settings, file)
sys.exit(7)
"""
HANDLES_SIGNALS = """
import signal, sys
def leave(number, frame):
    print("got", number, flush=True)
    sys.exit(number)
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, leave)
print("up", flush=True)
while True: signal.pause()
"""
LEAVES_A_PROCESS = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid, flush=True)
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, stock: Path, tiny_model_dir: Path) -> Iterator[Stack]:
    """A run whose trainer waits, and an environment with a wrong server: it takes long to start, beside the tests."""
    stack = Stack(tmp_path_factory.mktemp("runner"), stock)
    run = {"wandb_group": "", "wandb_project": "", "checkpoint_dir": "", "save_checkpoint_interval": 0}
    try:
        stack.start_api()
        stack.start_server(tiny_model_dir)
        stack.ask("POST", "/register", **run, batch_size=16, max_token_len=64, starting_step=0, num_steps=5)
        stack.ask("GET", "/batch")
        stack.start_env("local/tiny", "--silent-after-s", "3", file=ENVIRONMENT.with_name("lost_env.py"))
        yield stack
    finally:
        stack.end_all()


class Runner:
    """The runner with a program as its environment, and pipes for the output."""

    def __init__(self, stack: Stack, folder: Path, program: str, *flags: str) -> None:
        file = folder / "program.py"
        file.write_text(program)
        argv = [sys.executable, "-m", "grpo_engine", "atropos-env", "--file", str(file), "--model-name", "some/model"]
        argv += ["--python", str(stack.stock / "python"), "--rollout-server-url", stack.api_url, *flags]
        pipe = subprocess.PIPE
        environment = {
            **os.environ,
            "PYTHONPATH": os.getcwd(),
            "TMPDIR": str(folder),
        }
        self.process = subprocess.Popen(argv, cwd=folder, env=environment, stdout=pipe, stderr=pipe)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def end(self) -> tuple[int, bytes, bytes]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


def is_gone(pid: int) -> bool:
    return identify(pid) is None


def test_output_and_exit_code_are_those_of_the_environment(stack: Stack, tmp_path: Path) -> None:
    code, out, err = Runner(stack, tmp_path, WRITES_SETTINGS).end()
    assert code == 7
    assert out == b"out \xff\x00 no newline"
    assert b"\nerr\n" in err


def test_the_settings_file_of_an_environment_names_our_server_twice(stack: Stack, tmp_path: Path) -> None:
    flags = ("--inference-url", "http://127.0.0.1:9/v1", "--group-size", "4", "--yaml-file", "kept.yaml")
    Runner(stack, tmp_path, WRITES_SETTINGS, *flags, "--set", "settings.lr=1e-5", "--set", "server.timeout=60").end()
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["argv"] == ["serve", "--config"]
    assert settings["unbuffered"] == "1"
    assert settings["env"] == {
        **{"tokenizer_name": "some/model", "use_wandb": False, "group_size": 4, "lr": 1e-5},
        **{"rollout_server_url": stack.api_url, "total_steps": 1_000_000_000},
    }
    server = {
        **{"model_name": "some/model", "tokenizer_name": "some/model", "base_url": "http://127.0.0.1:9/v1"},
        **{"server_type": "vllm", "api_key": "x", "timeout": 60},
    }
    assert settings["openai"] == [server, server]
    assert (tmp_path / "kept.yaml").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_the_exit_code_is_returned(
    stack: Stack, tmp_path: Path, number: signal.Signals
) -> None:
    runner = Runner(stack, tmp_path, HANDLES_SIGNALS)
    assert runner.line() == "up"
    runner.process.send_signal(number)
    code, out, _ = runner.end()
    assert out.decode().strip() == f"got {number.value}"
    assert code == number.value


def test_processes_that_an_environment_leaves_behind_are_ended(stack: Stack, tmp_path: Path) -> None:
    runner = Runner(stack, tmp_path, LEAVES_A_PROCESS)
    left = int(runner.line())
    code, _, _ = runner.end()
    assert code == 0
    assert is_gone(left)


def test_an_environment_does_not_outlive_a_killed_runner(stack: Stack, tmp_path: Path) -> None:
    runner = Runner(stack, tmp_path, "import os, signal; print(os.getpid(), flush=True); signal.pause()")
    environment = int(runner.line())
    runner.process.kill()
    runner.process.communicate(timeout=60)
    while not is_gone(environment):
        time.sleep(0.02)  # the limit is that of the test


def test_an_api_that_requires_another_token_is_an_error(stack: Stack, tmp_path: Path) -> None:
    guarded = Stack(tmp_path, stack.stock)
    try:
        words = ("--port", str(guarded.api_port), "--store", ":memory:", "--token", "secret")
        guarded.start_ours("api", "api", *words)
        guarded.wait_until(lambda: guarded.answers(f"{guarded.api_url}/info"))
        code, _, err = Runner(guarded, tmp_path, WRITES_SETTINGS).end()
    finally:
        guarded.end_all()
    assert code == 2
    assert b"requires another token: set $GRPO_API_TOKEN" in err


def test_an_environment_that_uses_another_server_is_reported_with_the_state_of_the_queue(stack: Stack) -> None:
    """It registers and then waits without a line of output: ports 9004 to 9007 do not answer."""
    stack.wait_until(lambda: "no request has reached" in stack.log("env"))
    (said,) = [line for line in stack.log("env").splitlines() if "no request has reached" in line]
    assert re.search(
        rf"the inference server {stack.server_url} for ([3-9]|\d\d+) s, while the trainer waits for groups", said
    )
    assert "(0 of 16 sequences are queued)" in said
    assert "ports 9004 to 9007" in said
    assert "lost_env.py" in said
