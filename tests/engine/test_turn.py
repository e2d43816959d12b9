"""A service that was started before its turn prepares, and waits for a byte from its keeper."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ports import free_port
from stage import is_open

from grpo_engine.cli import _start_ranks
from grpo_engine.colocate.config import TrainerConfig
from grpo_engine.errors import ModelError
from grpo_engine.ranks.launching import RanksEnd
from grpo_engine.serving.turn import begin_in_turn
from grpo_engine.wire.environment_variables import GATE_VARIABLE

LAUNCHER = """
import os, sys, threading
from grpo_engine.ranks.launching import launch_ranks
from grpo_engine.serving.turn import begin_in_turn

def say(words):
    os.write(1, f"{words}\\n".encode())

def rank():
    say(f"rank {os.environ['RANK']} begins with {prepared}")
    return 0

prepared = begin_in_turn(lambda: say("prepared") or "a tokenizer", os.environ, always=True)
if "thread" in sys.argv:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
raise SystemExit(launch_ranks(["sh", "-c", "echo program $RANK"], num_local=2, run=rank).code)
"""
ASKS_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
TOUCHES = """
import os, sys, threading
def refuse(event, arguments):
    if event in ("socket.bind", "socket.connect", "socket.getaddrinfo"):
        raise AssertionError(f"{event} {arguments}")
sys.addaudithook(refuse)
from grpo_engine.environments import main as environment
from grpo_engine.environments.config import EnvironmentConfig
assert environment.prepare(EnvironmentConfig(model_name="local/tiny", task="sort6")) is not None
assert "torch" not in sys.modules, "an environment only tokenizes"
import torch
def touched(*_): raise AssertionError("CUDA")
for name in ("is_available", "device_count", "_lazy_init", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, touched)
from grpo_engine.server import main as server
from grpo_engine.server.config import ServerConfig
from grpo_engine.train import main as trainer
from grpo_engine.train.config import TrainConfig
assert trainer.prepare(TrainConfig(model_name="local/tiny", compile_layers=True)) is not None
assert "peft" not in sys.modules, "it imports bitsandbytes, which initialises CUDA"
from grpo_engine.reference import main as reference
from grpo_engine.reference.config import ReferenceConfig
adapter = {"mode": "lora_restart"}
reference.prepare(ReferenceConfig(model_name="local/tiny"))
assert trainer.prepare(TrainConfig(model_name="local/tiny", bridge=adapter, compile_layers=True)) is not None
server.prepare(ServerConfig(model_name="local/tiny", engine="torch"))
assert "peft" in sys.modules and "transformers.models.llama.modeling_llama" in sys.modules
assert threading.active_count() == 1, threading.enumerate()
print("untouched")
"""


@contextmanager
def gate() -> Iterator[tuple[dict[str, str], int]]:
    """The environment of a service that is held, and the end of the pipe that its keeper has."""
    theirs, ours = os.pipe()
    yield {GATE_VARIABLE: str(theirs)}, ours


def test_a_process_that_is_not_held_begins_at_once_and_prepares_nothing() -> None:
    assert begin_in_turn(lambda: pytest.fail("prepared"), {}) is None


def test_a_held_process_begins_with_what_it_prepared_and_hands_its_gate_to_nobody() -> None:
    with gate() as (environment, ours):
        os.write(ours, b"\n")
        assert begin_in_turn(lambda: "a tokenizer", environment) == "a tokenizer"
        assert environment == {}
        os.close(ours)


def test_no_garbage_is_collected_while_a_held_process_imports() -> None:
    with gate() as (environment, ours):
        os.write(ours, b"\n")
        assert begin_in_turn(lambda: [gc.isenabled()], environment) == [False]
        os.close(ours)
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0, "later collections look at every module again"
    gc.unfreeze()


def test_what_cannot_be_prepared_is_left_to_the_turn(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ModelError("no such model")

    with gate() as (environment, ours), caplog.at_level(logging.INFO):
        os.write(ours, b"\n")
        assert begin_in_turn(fail, environment) is None
        os.close(ours)
    assert "cannot prepare everything before its turn: ModelError: no such model" in caplog.text


def test_a_held_process_exits_when_its_keeper_has_ended() -> None:
    with gate() as (environment, ours):
        os.close(ours)
        with pytest.raises(SystemExit) as exit_:
            begin_in_turn(lambda: None, environment)
        assert exit_.value.code == 1


@pytest.mark.slow
@pytest.mark.parametrize("turn", ["has come", "comes", "never comes"])
def test_the_ranks_of_a_trainer_are_prepared_once_and_begin_at_its_turn(turn: str) -> None:
    with gate() as (environment, ours):
        theirs = int(environment[GATE_VARIABLE])
        if turn == "comes":
            os.write(ours, b"\n")
        os.close(ours)
        done = subprocess.run(
            [sys.executable, "-c", LAUNCHER],
            env={**os.environ, **({} if turn == "has come" else environment)},
            pass_fds=[theirs],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        os.close(theirs)
    begun = [] if turn == "never comes" else [f"rank {rank} begins with a tokenizer" for rank in (0, 1)]
    assert sorted(done.stdout.splitlines()) == ["prepared", *begun]
    assert done.returncode == (1 if turn == "never comes" else 0)


def test_ranks_are_programs_where_an_import_has_left_a_thread() -> None:
    done = subprocess.run([sys.executable, "-c", LAUNCHER, "thread"], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == ["prepared", "program 0", "program 1"]
    assert "the ranks are started as programs instead" in done.stderr


def test_what_ranks_are_forked_from_asks_nvml_whether_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks CUDA otherwise, which a fork cannot use any more."""
    monkeypatch.delenv(ASKS_NVML, raising=False)
    asked: list[str | None] = []
    monkeypatch.setattr("grpo_engine.train.main.prepare", lambda config: asked.append(os.environ.get(ASKS_NVML)))
    monkeypatch.setattr("grpo_engine.cli.launch_ranks", lambda *_, **__: RanksEnd(code=0))
    _start_ranks(TrainerConfig(model_name="local/tiny", processes=2), [])
    assert asked == ["1"]


IMPORTS_TORCH = pytest.mark.extended(
    "api and atropos-env wait by the same function; imports of torch take seconds each"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    [
        ("api", "--port", "{port}", "--store", "{folder}/store"),
        ("atropos-env", "--file", "{folder}/e.py", "--python", "{folder}/python", "--model-name", "local/tiny"),
        pytest.param(
            ("server", "--engine", "torch", "--model-name", "local/tiny", "--port", "{port}"), marks=IMPORTS_TORCH
        ),
        ("parameters", "--port", "{port}", "--handover", "{folder}/handover"),
        pytest.param(("env", "--task", "sort6", "--model-name", "local/tiny"), marks=IMPORTS_TORCH),
        pytest.param(("train", "--model-name", "local/tiny", "--run-folder", "{folder}"), marks=IMPORTS_TORCH),
        pytest.param(("reference", "--model-name", "local/tiny", "--port", "{port}"), marks=IMPORTS_TORCH),
    ],
    ids=lambda argv: argv[0],
)
def test_every_service_waits_for_its_turn_and_exits_without_one(argv: tuple[str, ...], tmp_path: Path) -> None:
    port = free_port()
    words = [word.format(port=port, folder=tmp_path) for word in argv]
    with gate() as (environment, ours):
        os.set_inheritable(int(environment[GATE_VARIABLE]), True)
        log = tmp_path / "log"
        with log.open("wb") as file:
            held = subprocess.Popen(
                [sys.executable, "-m", "grpo_engine", *words],
                env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
                pass_fds=[int(environment[GATE_VARIABLE])],
                stdout=file,
                stderr=file,
            )
        while "prepared in" not in log.read_text():
            assert held.poll() is None, log.read_text()
            time.sleep(0.05)
        assert not is_open(port)
        os.close(ours)
        assert held.wait(60) == 1
    assert "its keeper has ended before its turn came" in log.read_text()


@pytest.mark.extended("test_held_starts.py has what is held begin at its turn; the real services begin in every run")
def test_preparing_opens_no_connection_and_starts_neither_cuda_nor_a_thread() -> None:
    done = subprocess.run([sys.executable, "-c", TOUCHES], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["untouched"], done.stderr
