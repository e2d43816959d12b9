"""A trainer that samples itself: the order of phases, rounds over ranks, and whole runs on a CPU."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bridging import bridge_context
from serving import shift

from grpo_engine import aliases, cli
from grpo_engine.bridges.engine import Layer
from grpo_engine.bridges.placement.own import OwnModel
from grpo_engine.bridges.transport.in_process import (
    PHASE_MEMORY,
    PHASES,
    EngineOfRanks,
    EngineState,
    InProcessBridge,
    StatefulEngine,
)
from grpo_engine.colocate.config import TrainerConfig
from grpo_engine.colocate.main import engine_of, run
from grpo_engine.colocate.rounds import RoundInference, shares
from grpo_engine.errors import BridgeError, ConfigError
from grpo_engine.flags import parse_flags, to_flags
from grpo_engine.models.loading import load_model
from grpo_engine.ranks.group import RankGroup
from grpo_engine.server.engine import Generation
from grpo_engine.server.vllm.in_process import VllmInProcess
from grpo_engine.train.memory.plan import Card
from grpo_engine.train.memory.sampling import SamplingPhase
from grpo_engine.wire.inference import GenerateRequest, TokenPrompt
from grpo_engine.wire.metrics import MetricsLine

FLAGS = (
    *("--weight-bridge-mode", "colocate", "--task", "sort6", "--group-size", "4", "--max-tokens", "8"),
    *("--batch-size", "8", "--gradient-accumulation-steps", "2", "--lr", "3e-4", "--dtype", "float32"),
    *("--device", "cpu", "--seq-len", "64", "--threads", "1"),
)


class NoEngine:
    """Two weights, and nothing else of an engine."""

    def start(self) -> None: ...
    def sleep(self, *, keeps_weights: bool) -> None: ...
    def wake_weights(self) -> None: ...
    def load(self, layer: Layer) -> None: ...
    def wake_cache(self) -> None: ...
    def close(self) -> None: ...

    def parameter_names(self) -> Collection[str]:
        return ["a", "b"]


def settings(model: Path, folder: Path, *flags: str) -> TrainerConfig:
    given = ["--model", str(model), "--run-folder", str(folder), *FLAGS, *flags]
    return parse_flags(TrainerConfig, given, prog="grpo-engine train", description="")


def lines_of(folder: Path) -> list[MetricsLine]:
    complete, _, _ = (folder / "metrics.jsonl").read_bytes().rpartition(b"\n")  # a trainer may be writing the next line
    return [MetricsLine.model_validate_json(line) for line in complete.splitlines()]


def test_an_engine_samples_again_only_when_it_was_woken_in_order_with_all_weights() -> None:
    now = iter(float(second) for second in range(100))
    engine = StatefulEngine(NoEngine(), clock=lambda: next(now))
    with pytest.raises(BridgeError, match="not started"):
        engine.sleep(keeps_weights=True)
    engine.start()
    for action in (engine.wake_weights, lambda: engine.load({}), lambda: engine.wake_cache(1)):
        with pytest.raises(BridgeError, match="is awake"):
            action()
    engine.sleep(keeps_weights=False)
    for action in (engine.require_awake, lambda: engine.load({}), lambda: engine.sleep(keeps_weights=True)):
        with pytest.raises(BridgeError, match="is asleep"):
            action()
    engine.wake_weights()
    engine.load({"a": torch.zeros(1)})
    with pytest.raises(BridgeError, match=r"no values for 1 of its weights \(b"):
        engine.wake_cache(1)
    engine.load({"b": torch.zeros(1)})
    engine.wake_cache(1)
    assert (engine.state, engine.policy_version) == (EngineState.AWAKE, 1)
    measured = engine.take_phase_times()
    assert {name: measured.pop(name) for name in PHASES.values()} == dict.fromkeys(
        PHASES.values(), pytest.approx(1.0, abs=1.0)
    )
    assert measured.keys() == set(PHASE_MEMORY.values())
    assert all(0.01 < used_gb < 100 for used_gb in measured.values())


def test_engines_sleep_while_steps_are_repeated_from_the_journal(model_folder: Path, tmp_path: Path) -> None:
    placement = OwnModel(bridge_context(model_folder, "http://127.0.0.1:1", tmp_path))
    own = engine_of(settings(model_folder, tmp_path).own_server)
    engines = EngineOfRanks(own, placement.stream, RankGroup(), is_partial=False)
    bridge = InProcessBridge(placement, engines, every_steps=1)
    attached = bridge.attach()
    attached.repeat(range(4))
    for version in (1, 2):
        assert bridge.publish(version, shift(attached.model, version)) is None
        assert (engines.engine.state, engines.engine.num_bytes_loaded) == (EngineState.ASLEEP, 0)
        bridge.prepare_step()
    update = bridge.publish(3, shift(attached.model, 3))
    assert update is not None
    assert update.num_bytes > 0
    assert (engines.engine.state, engines.engine.policy_version) == (EngineState.AWAKE, 3)


def test_ranks_sample_about_as_many_tokens_each() -> None:
    asked = [
        GenerateRequest(prompt=TokenPrompt(prompt_token_ids=[1]), n=2, max_tokens=size) for size in (8, 1, 4, 3, 2)
    ]
    assert shares(asked, 2) == [[0, 1], [2, 3, 4]]


def test_prompts_that_come_together_share_a_round_and_get_its_error_if_it_fails() -> None:
    rounds: list[int] = []

    def sample(requests: Sequence[GenerateRequest]) -> list[Generation]:
        rounds.append(len(requests))
        raise MemoryError("no room")

    async def ask() -> list[object]:
        inference = RoundInference(sample)
        request = GenerateRequest(prompt=TokenPrompt(prompt_token_ids=[1]))
        return await asyncio.gather(*(inference.generate(request) for _ in range(3)), return_exceptions=True)

    assert {type(answer) for answer in asyncio.run(ask())} == {MemoryError}
    assert rounds == [3]


def test_weights_of_an_engine_that_sleeps_are_freed_and_written_anew(model_folder: Path, tmp_path: Path) -> None:
    config = settings(model_folder, tmp_path)
    engine = engine_of(config.own_server)
    engine.start()
    request = GenerateRequest(prompt=TokenPrompt(prompt_token_ids=[3, 4, 5]), n=2, max_tokens=4, seed=1, logprobs=0)
    [before] = engine.generate([request], 0)
    engine.sleep(keeps_weights=True)
    engine.wake_weights()
    assert engine.generate([request], 0) == [before]
    engine.sleep(keeps_weights=False)
    engine.wake_weights()
    trained = load_model(str(model_folder), dtype="float32", device="cpu")
    engine.load(dict(trained.named_parameters()))
    engine.wake_cache()
    assert engine.generate([request], 0) == [before]


def test_what_a_trainer_that_samples_needs_is_named_by_its_setting(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no task is set: set environment.task, or --task"):
        parse_flags(TrainerConfig, ["--model", "m", "--weight-bridge-mode", "colocate"], prog="x", description="")
    with pytest.raises(ConfigError, match=r"environment: \(task\) has no effect with weight_bridge_mode none"):
        parse_flags(TrainerConfig, ["--model", "m", "--task", "sort6"], prog="x", description="")
    with pytest.raises(ConfigError, match=r"environment: \(group_size\) has no effect .* give it to grpo-engine env"):
        parse_flags(TrainerConfig, ["--model", "m", "--group-size", "8"], prog="x", description="")
    with pytest.raises(ConfigError, match=r"16 sequences a step, not a multiple of group_size 5"):
        settings(model_folder, tmp_path, "--group-size", "5")
    with pytest.raises(ConfigError, match="leaves no room for a prompt within seq_len 64"):
        settings(model_folder, tmp_path, "--max-tokens", "64")
    config = settings(model_folder, tmp_path, "--task.name", "arithmetic", "--task.difficulty", "2")
    assert parse_flags(TrainerConfig, to_flags(config), prog="x", description="") == config


@pytest.mark.usefixtures("own_signal_handlers")
def test_a_trainer_samples_every_batch_by_its_newest_weights(tiny_model_dir: Path, tmp_path: Path) -> None:
    assert run(settings(tiny_model_dir, tmp_path, "--training-steps", "2", "--eval-every", "2")) == 0
    untrained, *steps = lines_of(tmp_path)
    assert [line.policy_version for line in steps] == [1, 2]
    for line in steps:
        assert line.metrics["rollout/staleness_max"] == 0
        assert line.metrics["alignment/diff_max"] < 1e-4  # the engine computes with the trainer's weights
        assert {*PHASES.values(), *PHASE_MEMORY.values(), "inference/tokens_per_second"} <= line.metrics.keys()
    assert untrained.metrics["eval/avg@4"] > 0
    assert steps[-1].metrics["eval/other_version_fraction"] == 0


@pytest.mark.usefixtures("own_signal_handlers")
@pytest.mark.extended("test_a_trainer_samples_every_batch_by_its_newest_weights")
def test_weights_that_are_written_every_second_step_are_one_step_old_between(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    assert run(settings(tiny_model_dir, tmp_path, "--training-steps", "4", "--sync-frequency", "2")) == 0
    assert [line.metrics["rollout/staleness_max"] for line in lines_of(tmp_path)] == [0, 1, 0, 1]


def test_the_file_of_a_co_located_trainer_is_read_whole_by_its_program(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(Path(__file__).parents[3] / "training_configs" / "dr_grpo_config.yaml")
    flags = ["--model", "local/tiny", "--task", "sort6", "--max-tokens", "8", "--gpus", "2", "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["run_colocated_grpo.py", "--config", file, *flags, "--device", "cpu"])
    monkeypatch.setattr(aliases, "main", lambda: cli.main(sys.argv[1:]))  # this process is not the trainer's alone
    assert aliases.run_colocated_grpo() == 0
    printed, told = capsys.readouterr()
    for setting in ("--max-num-seqs 32", "--enforce-eager", "--sync-frequency 100", "--processes 2"):
        assert setting in printed
    assert "vllm_config.max_model_len: seq_len = 2048 here" in told


def test_sampling_fits_where_the_engine_has_its_share_beside_what_lasts() -> None:
    phase = SamplingPhase(trainer_bytes=30, share=0.5, weight_bytes=10, token_bytes=100_000_000)
    card = Card(name="card", total_bytes=20_000_000_000, free_bytes=20_000_000_000)
    assert phase.cache_tokens(card) == 74  # 10 GB less weights, and 2.5 GB beside them
    assert phase.spare_bytes(card) == 20_000_000_000 - 30 - 10_000_000_000
    assert phase.fits(card, longest=74)
    assert not phase.fits(card, longest=75)
    assert not replace(phase, trainer_bytes=10_000_000_001).fits(card, longest=74)


class NotedLlm:
    """The part of vLLM's `LLM` that sleeping uses, which needs a GPU; notes the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {' '.join(tags)}")

    def collective_rpc(self, method: str, args: tuple[Layer]) -> None:
        self.calls.append(f"{method} {' '.join(args[0])}")

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")


def test_vllm_sleeps_and_wakes_in_the_order_in_which_it_loses_nothing(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    config = settings(model_folder, tmp_path, "--engine", "vllm").own_server
    engine, llm = VllmInProcess(config), NotedLlm()
    monkeypatch.setattr(engine, "_llm", llm)
    monkeypatch.setattr(engine, "_sleeps", True)
    engine.sleep(keeps_weights=False)
    engine.wake_weights()
    engine.load({"a": torch.zeros(1)})
    engine.wake_cache()
    engine.sleep(keeps_weights=True)
    assert llm.calls == ["sleep 2", "wake weights", "grpo_write a", "wake kv_cache", "reset", "sleep 1"]


@pytest.fixture
def own_signal_handlers() -> Iterator[None]:
    """Puts back those that a trainer in this process replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def trainer_process(model: Path, folder: Path, *flags: str) -> subprocess.Popen[bytes]:
    own = settings(model, folder, *flags)
    return subprocess.Popen([sys.executable, "-m", "grpo_engine", "train", *to_flags(own)], start_new_session=True)


@pytest.mark.extended("test_a_trainer_samples_every_batch_by_its_newest_weights; test_train_ranks")
def test_two_ranks_sample_and_train_as_one_does(tiny_model_dir: Path, tmp_path: Path) -> None:
    runs = [tmp_path / "one", tmp_path / "two"]
    for folder, more in zip(runs, ((), ("--gpus", "2")), strict=True):
        assert trainer_process(tiny_model_dir, folder, "--training-steps", "4", *more).wait(120) == 0
    one, two = map(lines_of, runs)
    assert [line.metrics["sync/num_servers"] for line in two] == [2] * 4
    for single, double in zip(one, two, strict=True):
        assert single.metrics["reward/mean"] == double.metrics["reward/mean"]
        assert single.metrics["train/grad_norm"] == pytest.approx(double.metrics["train/grad_norm"], abs=1e-2)


@pytest.mark.extended("test_a_trainer_samples_every_batch_by_its_newest_weights; test_train_resume")
def test_a_trainer_that_was_killed_goes_on_without_a_stale_row(tiny_model_dir: Path, tmp_path: Path) -> None:
    flags = ("--training-steps", "12", "--checkpoint-interval", "4")
    killed = trainer_process(tiny_model_dir, tmp_path, *flags)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (
            (tmp_path / "metrics.jsonl").exists() and len(lines_of(tmp_path)) >= 6
        ):
            time.sleep(0.02)
    finally:
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    assert trainer_process(tiny_model_dir, tmp_path, *flags).wait(120) == 0
    lines = lines_of(tmp_path)
    assert [line.step for line in lines] == list(range(1, 13))
    assert {line.metrics["rollout/staleness_max"] for line in lines} == {0}


@pytest.mark.extended("test_a_trainer_samples_every_batch_by_its_newest_weights; test_models_merged_lora")
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_an_adapter_is_merged_into_the_weights_of_every_engine(
    ranks: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    flags = ("--train-adapter", "--lora-r", "4", "--training-steps", "3", "--lr", "1e-2", "--gpus", ranks)
    assert trainer_process(tiny_model_dir, tmp_path, *flags).wait(120) == 0
    sizes = {line.metrics["sync/bytes"] for line in lines_of(tmp_path)}
    whole = sum(
        parameter.nbytes for parameter in load_model(str(tiny_model_dir), dtype="float32", device="cpu").parameters()
    )
    assert 0 < max(sizes) < whole / 2  # the weights with adapters alone
    assert max(line.metrics["alignment/diff_max"] for line in lines_of(tmp_path)) < 1e-4


@pytest.mark.usefixtures("own_signal_handlers")
@pytest.mark.extended("test_a_trainer_samples_every_batch_by_its_newest_weights; test_environments_turns")
def test_conversations_of_several_turns_are_sampled_in_rounds(tiny_model_dir: Path, tmp_path: Path) -> None:
    flags = ("--task", "guess_number", "--seq-len", "128", "--training-steps", "1")
    assert run(settings(tiny_model_dir, tmp_path, *flags)) == 0
    [line] = lines_of(tmp_path)
    assert line.metrics["rollout/length_mean"] > 8  # max_tokens of one turn
    assert line.metrics["alignment/diff_max"] < 1e-4


@pytest.mark.extended("test_weights_of_an_engine_that_sleeps_are_freed_and_written_anew: the same with a real vLLM")
@pytest.mark.parametrize("more", [(), ("--gpus", "2", "--train-adapter")], ids=["one rank", "two ranks, an adapter"])
def test_vllm_in_the_trainer_computes_with_the_trained_weights(
    more: tuple[str, ...], tiny_model_dir: Path, tmp_path: Path
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    flags = ("--engine", "vllm", "--training-steps", "2", "--lr", "1e-2", *more)
    assert trainer_process(tiny_model_dir, tmp_path, *flags).wait(300) == 0
    for line in lines_of(tmp_path):
        assert line.metrics["alignment/diff_max"] < 1e-3
        assert line.metrics["rollout/staleness_max"] == 0
