"""What a person reads who gives the trainer a setting that cannot be."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from training import settings, trainee

from grpo_engine.aliases import COLOCATED_CONFIG, colocated_defaults, with_own_server
from grpo_engine.cli import _log_from, _redirect_output, main, num_parts_of_server
from grpo_engine.colocate.config import TrainerConfig
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.errors import ConfigError
from grpo_engine.flags import parse_flags, to_flags
from grpo_engine.models.devices import ALLOCATOR_VARIABLES
from grpo_engine.processes import ProcessIdentity
from grpo_engine.ranks.positions import OwnPosition
from grpo_engine.rollouts.config import ApiConfig
from grpo_engine.server.config import ServerConfig
from grpo_engine.train import main as train_main
from grpo_engine.train.checkpointing.resuming import _compare, has_steps_left
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.launch import LaunchConfig, server_flags
from grpo_engine.train.main import bridge_context, output_folders
from grpo_engine.train.resumable import decisive_settings
from grpo_engine.train.unused_settings import settings_without_effect
from grpo_engine.wire.bridge_file import BridgeFile
from grpo_engine.wire.checkpoints import CheckpointMarker
from grpo_engine.wire.codec import write_json_atomically


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "foo"], "device: 'foo' is not a device: use auto, cpu, cuda, or cuda:0"),
        (["--atropos-url", "localhost:8000"], "atropos_url: 'localhost:8000' is not a URL: write it like http://"),
        (
            ["--atropos-url", "http://u:a'secret/1@host"],
            "atropos_url: 'http://***@host' is not a URL: write / and @ in a password as",
        ),
        (["--lr", "inf"], "lr: input should be a finite number, but this is 'inf'"),
        (["--weight-decay", "inf"], "weight_decay: input should be a finite number, but this is 'inf'"),
        (["--batch-size", str(10**12)], "batch_size 1000000000000 × gradient_accumulation_steps 32 are"),
        (["--lora-target-modules"], "lora_target_modules: tuple should have at least 1 item"),
        (["--device", "cuda:99"], "device 'cuda:99': torch "),
        (["--threads", "100000"], "threads: input should be less than or equal to 1024"),
        (["--mixed-precision", "fp8"], "mixed_precision 'fp8' is none of bf16, fp16 and fp32: choose one"),
        (
            ["--mixed-precision", "bf16", "--dtype", "float32"],
            "mixed_precision 'bf16' is dtype bfloat16, not float32: ",
        ),
        (["--vllm-gpu", "1"], "vllm_gpu 1 has no effect, since this trainer starts no inference server: give it"),
        (["--max-model-len", "512"], "max_model_len 512 has no effect, since this trainer starts no inference server"),
        (["--init-method", "tcp://a:1"], "init_method 'tcp://a:1' has no effect: ranks of one machine find"),
        (["--init-method", "file:///f", "--nodes", "2"], "init_method 'file:///f' has no effect: "),
        (["--seed", str(2**63)], "seed: input should be less than 9223372036854775808"),
    ],
)
def test_an_invalid_setting_is_refused_before_anything_starts(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--model", "local/tiny", *words]) == 2
    assert capsys.readouterr().err.startswith(f"grpo-engine train: {said}")


def test_flags_of_a_server_that_the_trainer_starts_reach_it() -> None:
    argv = ["--model", "m", "--bridge-restart", "--vllm-gpu", "1", "--max-model-len", "512"]
    argv += ["--gpu-memory-utilization", "0.3"]
    context = bridge_context(parse_flags(TrainConfig, argv, prog="train", description=""), Path("f"))
    assert context.server_environment == {"CUDA_VISIBLE_DEVICES": "1"}
    flags = dict(zip(context.server_flags[::2], context.server_flags[1::2], strict=True))
    assert (flags["--max-model-len"], flags["--gpu-memory-utilization"]) == ("512", "0.3")


def test_init_method_is_the_address_of_machine_0() -> None:
    argv = ["--model", "m", "--nodes", "2", "--init-method", "tcp://10.0.0.1:29400"]
    config = parse_flags(TrainConfig, argv, prog="train", description="")
    assert (config.master_addr, config.master_port) == ("10.0.0.1", 29400)


def test_several_machines_find_each_other_at_the_port_of_torchrun() -> None:
    def port(*flags: str) -> int:
        return parse_flags(TrainConfig, ["--model", "m", *flags], prog="train", description="").master_port

    on_two = ["--nodes", "2", "--node-rank", "1", "--master-addr", "192.168.1.100"]
    assert port(*on_two) == 29500
    assert port(*on_two, "--master-port", "29400") == 29400
    assert port() == port("--nodes", "1") == 0
    with pytest.raises(ConfigError, match="need one free port of machine 0"):
        port(*on_two, "--master-port", "0")


def finished(save_path: Path, *more: str) -> list[str]:
    """The flags of a trainer that has finished its 3 steps, and left a checkpoint of the last one."""
    argv = ["--model", "local/tiny", "--device", "cpu", "--training-steps", "3", "--save-path", str(save_path)]
    config = parse_flags(TrainConfig, argv, prog="train", description="")
    marker = CheckpointMarker(
        step=3, policy_version=3, model_name="local/tiny", bridge="none", settings=decisive_settings(config)
    )
    (save_path / "step_3").mkdir(parents=True)
    write_json_atomically(save_path / "step_3" / "checkpoint.json", marker)
    return ["train", *argv, *more]


def test_a_training_that_is_repeated_by_hand_says_that_nothing_is_to_do_and_reaches_no_service(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    argv = finished(tmp_path / "c", "--atropos-url", "http://127.0.0.1:1", "--vllm-port", "1")
    assert main(argv) == 0
    [message] = [record.getMessage() for record in caplog.records if "nothing to do" in record.getMessage()]
    assert all(flag in message for flag in ("--training-steps is 3", "--no-resume", "another --save-path"))
    assert "Training finished" not in caplog.text


def test_a_trainer_that_samples_itself_names_the_task_of_its_checkpoint_where_that_was_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def decisive(task: str) -> dict[str, Any]:
        flags = ["--model", "m", "--weight-bridge-mode", "colocate", "--batch-size", "8", "--task", task]
        return decisive_settings(parse_flags(TrainerConfig, flags, prog="train", description=""))

    before, now = decisive("python:rewards:short"), decisive("sort6")
    _compare(Path("step_3"), before, before)
    _compare(Path("step_3"), {**before, "task": "sort6"}, now)
    _compare(Path("step_3"), {name: value for name, value in before.items() if name != "task"}, now)  # an older one
    assert caplog.messages == []
    _compare(Path("step_3"), before, now)
    [message] = caplog.messages
    assert message == (
        "step_3 was trained on the task python module='rewards' functions=['short'], and training goes on from there "
        "with sort6: another --save-path, or --no-resume, begins anew"
    )


def test_a_training_that_is_repeated_with_another_rate_fails_instead_of_training_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(finished(tmp_path / "c", "--lr", "2e-6")) == 2
    said = capsys.readouterr().err
    assert "nothing to do: " in said
    assert "lr 1e-05 → 2e-06" in said


def test_a_training_that_is_to_go_on_has_steps_left(tmp_path: Path) -> None:
    argv = finished(tmp_path / "c")[1:]
    for more in (["--training-steps", "4"], ["--no-resume"], ["--save-path", str(tmp_path / "d")]):
        config = parse_flags(TrainConfig, [*argv, *more], prog="train", description="")
        assert config.save_path is not None
        assert has_steps_left(config, config.save_path)


@pytest.mark.parametrize(("mode", "dropout"), [("lora_only", 0.05), ("lora_restart", 0.05), ("lora_merged", 0.0)])
def test_adapters_have_the_dropout_of_the_stock_trainer_unless_they_are_merged(mode: str, dropout: float) -> None:
    config = settings(bridge={"mode": mode})
    assert config.lora_dropout == dropout
    assert not list(settings_without_effect(config))
    assert "--lora-dropout" not in to_flags(config)


def test_the_program_of_the_stock_trainer_starts_the_server_in_the_modes_of_which_the_stock_one_does() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        there = ["--model", "m", "--weight-bridge-mode", "lora_restart", "--vllm-port", port]
        assert with_own_server(there) == there
    assert with_own_server(there) == [*there, "--bridge-restart"]
    assert with_own_server(["--model", "m", "--vllm-port", port])[-1] == "--bridge-restart"
    for more in (["--no-bridge-restart"], ["--server-urls", "http://a:1"], ["--weight-bridge-mode", "lora_only"]):
        assert with_own_server([*there, *more]) == [*there, *more]


def test_a_trainer_by_hand_has_a_rank_for_each_process_of_the_server_whose_weights_it_maps(tmp_path: Path) -> None:
    def num_parts(*flags: str, **environment: str) -> int:
        config = parse_flags(TrainConfig, ["--model", "m", *flags], prog="train", description="")
        return num_parts_of_server(config, {"LOGDIR": str(tmp_path), **environment})

    own = ProcessIdentity.of(os.getpid())
    assert own is not None
    file = BridgeFile(
        model="m",
        pid=own.pid,
        pid_start_ticks=own.start_ticks,
        instance="i",
        fence_segment="f",
        tensors={},
        parts=[{}, {}],
    )
    shared = ["--weight-bridge-mode", "shared_vllm", "--single-copy"]
    assert num_parts(*shared) == 0
    write_json_atomically(tmp_path / "vllm_bridge_config.json", file)
    assert num_parts(*shared) == 2
    started = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert num_parts(*shared, "--gpus", "2") == num_parts(*shared, **started) == 0
    assert num_parts("--weight-bridge-mode", "shared_vllm", "--use-shared-memory") == num_parts() == 0
    write_json_atomically(tmp_path / "vllm_bridge_config.json", file.model_copy(update={"pid_start_ticks": 1}))
    assert num_parts(*shared) == 0


def test_a_co_located_trainer_by_its_own_name_has_the_defaults_of_that_name(tmp_path: Path) -> None:
    game = ["--task", "mafia", "--task.policy-plays", "town"]
    assert colocated_defaults(["--gpus", "4"], tmp_path) == game
    assert colocated_defaults(["--gpus", "4", "--task", "sort6"], tmp_path) == []
    assert colocated_defaults(["env.dataset=ifeval"], tmp_path) == []
    assert colocated_defaults(["--help"], tmp_path) == []
    file = tmp_path / COLOCATED_CONFIG
    file.parent.mkdir()
    file.write_text("learning_rate: 1e-5\n")
    assert colocated_defaults([], tmp_path) == ["--config", str(COLOCATED_CONFIG), *game]
    assert colocated_defaults(["--task=copy6"], tmp_path) == ["--config", str(COLOCATED_CONFIG)]
    own = tmp_path / "own.yaml"
    own.write_text("environment: {task: sort6}\n")
    assert colocated_defaults(["--config", str(own)], tmp_path) == []
    assert colocated_defaults(["--config", str(tmp_path / "missing.yaml")], tmp_path) == []


def test_the_configurations_of_co_located_trainers_can_be_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[3]
    monkeypatch.chdir(root)
    for flags in ([], ["--config", "configs/large_model_config.yaml"], ["--task", "sort6"]):
        argv = ["--weight-bridge-mode", "colocate", *colocated_defaults(flags, root), *flags]
        config = parse_flags(TrainerConfig, argv, prog="train", description="")
        assert config.environment is not None
        assert config.sequences_per_batch == 64
        assert config.environment.task.label() == ("sort6" if "sort6" in flags else "mafia")


def test_a_launch_starts_the_server_that_its_mode_needs_with_the_flags_that_are_not_of_the_trainer() -> None:
    argv = ["--model", "local/tiny", "--max-model-len", "64", "--vllm-port", "9", "--device", "cpu"]
    argv += ["--engine", "torch", "--enforce-eager", "--cuda-graph-sizes", "1", "2", "--vllm-config-path", "/b.json"]
    config = parse_flags(LaunchConfig, argv, prog="launch", description="")
    assert config.bridge.mode == "shared_vllm"
    server = parse_flags(
        ServerConfig, server_flags(config, bridge_context(config, Path("f"))), prog="s", description=""
    )
    assert (server.engine, server.device, server.shared_weights, server.enforce_eager) == ("torch", "cpu", True, True)
    assert (server.port, server.max_model_len, server.cuda_graph_sizes) == (9, 64, (1, 2))
    assert server.bridge_file == Path("/b.json")
    of_checkpoints = parse_flags(LaunchConfig, [*argv[:6], "--weight-bridge-mode", "none"], prog="l", description="")
    assert "--no-shared-weights" in server_flags(of_checkpoints, bridge_context(of_checkpoints, Path("f")))
    in_turns = ["--model", "m", "--weight-bridge-mode", "turns", "--handover", "/h"]
    config = parse_flags(LaunchConfig, in_turns, prog="l", description="")
    words = server_flags(config, bridge_context(config, Path("f")))
    asleep = parse_flags(ServerConfig, words, prog="s", description="")
    assert (asleep.enable_sleep_mode, asleep.handover, config.max_staleness) == (True, Path("/h"), 0)


def test_every_program_that_is_installed_exists() -> None:
    root = Path(__file__).parents[3]
    for target in tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"].values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_help_shows_the_default_bridge(capsys: pytest.CaptureFixture[str]) -> None:
    mode = parse_flags(TrainConfig, ["--model", "m"], prog="train", description="").bridge.mode
    with pytest.raises(SystemExit):
        parse_flags(TrainConfig, ["--help"], prog="train", description="")
    assert f"How new weights reach inference. (default: {mode})" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("given", "dtype"), [("bf16", "bfloat16"), ("true", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")]
)
def test_mixed_precision_is_another_name_of_dtype(given: str, dtype: str) -> None:
    words = ["--model", "m", "--mixed-precision", given]
    assert parse_flags(TrainConfig, words, prog="train", description="").dtype == dtype


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        (["--weight-bridge-mode", "shared_vllm", "--use-shared-memory", "--vllm-config-path", "f"], "broadcast"),
        (["--use-shared-memory"], "broadcast"),
        (["--weight-bridge-mode", "shared_vllm", "--single-copy"], "shared_vllm"),
    ],
)
def test_flags_of_the_first_stock_trainers_choose_the_kind_of_shared_weights(words: list[str], mode: str) -> None:
    assert parse_flags(TrainConfig, ["--model", "m", *words], prog="train", description="").bridge.mode == mode


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--weight-bridge-mode", "none", "--use-shared-memory"], r"no effect with bridge\.mode none"),
        (["--single-copy", "--use-shared-memory"], "choose one"),
    ],
)
def test_a_kind_of_shared_weights_that_the_mode_has_not_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_flags(TrainConfig, ["--model", "m", *words], prog="train", description="")


@pytest.mark.parametrize("level", ["DEBUG", "Debug", "debug"])
@pytest.mark.parametrize("model", [ApiConfig, EnvironmentConfig, ServerConfig, TrainConfig])
def test_every_service_takes_a_log_level_in_any_capitals(model: type[ApiConfig], level: str) -> None:
    needed = {ApiConfig: []}.get(model, ["--model", "m", *(["--task", "sort6"] if model is EnvironmentConfig else [])])
    assert parse_flags(model, [*needed, "--log-level", level], prog="p", description="").log_level == "debug"


def test_debug_logs_every_point_of_a_step_and_nothing_of_libraries(caplog: pytest.LogCaptureFixture) -> None:
    levels = {name: logging.getLogger(name).level for name in (None, "grpo_engine")}
    try:
        _log_from("debug")
        OwnPosition().at("the loss of micro-batch 1 of 2")
        assert [record.getMessage() for record in caplog.records][-1] == (
            "rank 0 is at the loss of micro-batch 1 of 2, the start"
        )
        assert not logging.getLogger("urllib3").isEnabledFor(logging.DEBUG)
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def test_redirect_output_takes_both_streams_of_all_processes(tmp_path: Path) -> None:
    file = tmp_path / "new" / "training.log"
    code = (
        "import subprocess, sys; from pathlib import Path; from grpo_engine.cli import _redirect_output as to; "
        "to(Path(sys.argv[1])); to(Path(sys.argv[1])); print('one', flush=True); print('two', file=sys.stderr); "
        "subprocess.run(['echo', 'three'])"
    )
    ended = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", f"stdout and stderr go to {file}\n")  # told once, ranks repeat it
    assert file.read_text().split() == ["one", "two", "three"]
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_redirection_that_cannot_be_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--model", "local/tiny", "--redirect-output", str(tmp_path)]) == 2
    assert f"--redirect-output {tmp_path}: cannot be opened: Is a directory; choose" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("link", "cannot be opened: it is a link"),
        ("pipe", "cannot be opened: No such device or address"),
        ("open", "has mode 0644, so that others may read or change it"),
    ],
)
def test_output_goes_to_no_link_no_pipe_and_no_file_that_others_can_read(tmp_path: Path, kind: str, why: str) -> None:
    path = tmp_path / "training.log"
    if kind == "link":
        path.symlink_to(tmp_path / "other")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.touch()
        path.chmod(0o644)
    with pytest.raises(ConfigError, match=why):
        _redirect_output(path)
    assert not (tmp_path / "other").exists()


def test_a_service_by_hand_closes_its_files_and_takes_no_compiled_code_from_tmp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PYTHONSAFEPATH"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    umask = os.umask(0o022)
    try:
        monkeypatch.setattr(sys, "argv", ["grpo-engine", "export", "--help"])
        with pytest.raises(SystemExit):
            main()
        assert os.umask(0o022) == 0o022
        assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
        monkeypatch.setattr(sys, "argv", ["grpo-engine", "train", "--help"])
        with pytest.raises(SystemExit):
            main()
        assert os.umask(0o022) == 0o077
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "grpo-engine" / "inductor")
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "grpo-engine" / "triton")
    finally:
        os.umask(umask)


def test_dated_folders_are_those_of_hydra(tmp_path: Path) -> None:
    now = time.strptime("2026-03-04 05:06:07", "%Y-%m-%d %H:%M:%S")

    def folders(*words: str) -> tuple[Path, Path]:
        return output_folders(parse_flags(TrainConfig, ["--model", "m", *words], prog="train", description=""), now)

    assert folders() == (Path("logs/train-0304-050607"), Path("trained_model_checkpoints").absolute())
    dated = Path("outputs/2026-03-04/05-06-07")
    assert folders("--output-layout", "dated") == (dated, (dated / "checkpoints").absolute())
    own = folders("--output-layout", "dated", "--log-dir", "/runs", "--save-path", "/kept")
    assert own == (Path("/runs/2026-03-04/05-06-07"), Path("/kept"))
    assert folders("--output-layout", "dated", "--run-folder", "/run") == (Path("/run"), Path("/run/checkpoints"))


def test_the_settings_in_a_checkpoint_are_those_of_the_run(tmp_path: Path) -> None:
    config = settings(lr=3e-4, loss="dapo")
    trainee(config).write_state(tmp_path)
    words = ["--config", str(tmp_path / "trainer-settings.json")]
    assert parse_flags(TrainConfig, words, prog="train", description="") == config
    trainee(settings(atropos_url="http://run:pw@h:1")).write_state(tmp_path)
    assert parse_flags(TrainConfig, words, prog="train", description="").atropos_url == "http://run:***@h:1"


@pytest.mark.parametrize(
    ("mode", "set_by_user", "pieces"),
    [("shared_vllm", "", True), ("broadcast", "", True), ("turns", "", False), ("broadcast", "backend:native", False)],
)
def test_memory_of_a_gpu_is_mapped_piece_by_piece_unless_it_is_exported_or_a_user_said_how(
    mode: str, set_by_user: str, pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reached(Exception):
        pass

    def stop(*_: object) -> None:
        raise Reached

    new, old = ALLOCATOR_VARIABLES
    monkeypatch.setenv(new, "")
    monkeypatch.setenv(old, set_by_user)
    monkeypatch.setattr(train_main, "prepare", lambda _: None)
    monkeypatch.setattr(train_main, "of_model", lambda config: config)
    monkeypatch.setattr(train_main, "require_device", lambda _: None)
    monkeypatch.setattr(train_main, "limit_threads", stop)
    with pytest.raises(Reached):
        train_main.run(TrainConfig.model_validate({"model_name": "m", "device": "cuda", "bridge": {"mode": mode}}))
    assert os.environ[new] == ("expandable_segments:True" if pieces else "")
    assert os.environ[old] == set_by_user
