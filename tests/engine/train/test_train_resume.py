"""Killed at any moment and started again, a trainer has the curve and the weights of one that was never killed."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from curves import curve
from disk_faults import DiskFaults, Killed
from engine_processes import EngineProcesses
from rollout_fakes import served_api
from serving import free_port, running_server, save_tiny_model
from training import ListedSource, ListeningBridge, made_up_groups, settings, small_model, train_in
from transformers import LlamaForCausalLM

from grpo_engine.colocate.config import TrainerConfig
from grpo_engine.data.source import RolloutApiSource
from grpo_engine.errors import CheckpointError
from grpo_engine.train.checkpointing import checkpoints
from grpo_engine.train.checkpointing.journal import Journal, JournalEntry
from grpo_engine.train.checkpointing.state_files import read_state
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.loop import train
from grpo_engine.train.recording.recorder import Recorder
from grpo_engine.train.resumable import FREE_SETTINGS
from grpo_engine.wire.checkpoints import JournalHead
from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.rollouts import ScoredGroup


def batches(steps: int) -> list[ScoredGroup]:
    """Groups of `steps` batches of two, sampled at version 0."""
    return [group for seed in range(steps) for group in made_up_groups(seed)]


def post(url: str, groups: list[ScoredGroup]) -> None:
    with httpx.Client(trust_env=False) as client:
        for group in groups:
            answer = client.post(f"{url}/scored_data", json=group.model_dump(exclude_none=True))
            assert answer.status_code == 200, answer.text


def equal(one: Any, other: Any) -> bool:
    """Whether two nested states are the same to the last bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def assert_same_end(one: Path, other: Path, *, step: int, shares_process: bool) -> None:
    assert curve(one) == curve(other)
    sampled = [re.sub('"time":[^,]*,', "", (folder / "rollouts.jsonl").read_text()) for folder in (one, other)]
    assert sampled[0] == sampled[1]
    first, second = (folder / f"checkpoints/step_{step}" for folder in (one, other))
    states = [read_state(folder, "trainer") for folder in (first, second)]
    if shares_process:  # with an API that draws from Python's generator too
        for state in states:
            del state["random"][0]["python"]
    assert equal(*states)
    for file in first.glob("*model*.safetensors"):
        assert file.read_bytes() == (second / file.name).read_bytes()


# --- in one process, at every moment that leaves something behind -----------------------------------------------------


def model_with_dropout() -> LlamaForCausalLM:
    """Every forward pass draws random numbers."""
    model = small_model()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.2
    return model


class MortalBridge(ListeningBridge):
    """Ends with its trainer, while the memory that it writes to stays and keeps its version."""

    def __init__(self, faults: DiskFaults, model: LlamaForCausalLM, *, serves: int = 0) -> None:
        super().__init__(model, serves=serves)
        self._faults = faults

    def publish(self, version: int, write: Callable[[], None]) -> None:
        self._faults.add_operation()
        super().publish(version, write)
        self._faults.add_operation()


class MortalRecorder(Recorder):
    def __init__(self, faults: DiskFaults, folder: Path, *, total_steps: int) -> None:
        super().__init__(folder, total_steps=total_steps, show_times=False)
        self._faults = faults

    def step(self, *arguments: Any) -> None:
        self._faults.add_operation()
        super().step(*arguments)
        self._faults.add_operation()


@pytest.fixture(scope="module")
def faults() -> DiskFaults:
    return DiskFaults()


@pytest.fixture
def saved_model(tmp_path: Path) -> Path:
    small_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def train_once(
    url: str, folder: Path, bridge: ListeningBridge, config: TrainConfig, recorder: Recorder | None = None
) -> None:
    recorder = recorder or Recorder(folder, total_steps=config.training_steps, show_times=False)
    with recorder, RolloutApiSource(url) as source:
        train(config, source, bridge, recorder, decode=str, save_path=folder / "checkpoints")


def run_killed_at(faults: DiskFaults, moment: int | None, folder: Path, config: TrainConfig) -> int:
    """Train, be killed at `moment`, and train to the end; returns how many moments the first trainer had."""
    steps = config.training_steps
    with served_api() as url:
        post(url, batches(steps))
        bridge = MortalBridge(faults, model_with_dropout())
        recorder = MortalRecorder(faults, folder, total_steps=steps)
        with suppress(Killed), faults.failing(moment):
            train_once(url, folder, bridge, config, recorder)
        moments = faults.count
        served = bridge.published[-1][0] if bridge.published else 0
        successor = ListeningBridge(bridge.model, serves=served)
        train_once(url, folder, successor, config)
        weights: dict[int, float] = {}
        for version, weight in bridge.published + successor.published:
            assert weights.setdefault(version, weight) == weight, f"version {version} names two sets of weights"
    return moments


FURTHER = pytest.mark.extended("the first case of each test: one trainer killed in the same way")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "more"),
    [
        (0, {"lr_schedule": "cosine", "warmup_steps": 2}),
        pytest.param(1, {"num_iterations": 2}, marks=FURTHER),
        pytest.param(2, {"optimizer": "adafactor", "checkpoint_interval": 0}, marks=FURTHER),
        pytest.param(3, {"checkpoint_interval": 1}, marks=FURTHER),
    ],
)
def test_a_trainer_killed_at_any_moment_resumes_with_the_same_records_and_weights(
    tmp_path: Path, saved_model: Path, faults: DiskFaults, share: int, more: dict[str, object]
) -> None:
    base = {
        "batch_timeout_s": 5,
        "model_name": str(saved_model),
        "training_steps": 3,  # after the second the first checkpoint, which that of the end replaces
        "checkpoint_interval": 2,
        "keep_checkpoints": 1,
    }
    config = settings(**{**base, **more})
    moments = run_killed_at(faults, None, tmp_path / "whole", config)
    assert moments > 40
    for moment in range(share + 1, moments + 1, 4):
        folder = tmp_path / f"killed-{moment}"
        run_killed_at(faults, moment, folder, config)
        assert_same_end(tmp_path / "whole", folder, step=3, shares_process=True)


# --- settings, records and disks --------------------------------------------------------------------------------------


@pytest.fixture
def config(saved_model: Path) -> TrainConfig:
    return settings(model_name=str(saved_model), training_steps=7, checkpoint_interval=3, batch_timeout_s=20)


@dataclass(frozen=True)
class CutOffRun:
    """A run with a checkpoint of step 3 and steps 4 and 5 in the journal; step 5 was not recorded."""

    url: str
    folder: Path
    config: TrainConfig
    bridge: ListeningBridge

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def resume(self, **changes: object) -> ListeningBridge:
        """Train to the end with the weights that the server holds now."""
        served = small_model()
        served.load_state_dict(self.bridge.model.state_dict())
        bridge = ListeningBridge(served, serves=self.bridge.published[-1][0])
        train_once(self.url, self.folder, bridge, self.config.model_copy(update=changes))
        return bridge


@pytest.fixture
def cut_off(tmp_path: Path, config: TrainConfig) -> Iterator[CutOffRun]:
    class KilledInStep5(Recorder):
        def step(self, step: int, *arguments: Any) -> None:
            if step == 5:
                raise Killed
            super().step(step, *arguments)

    with served_api() as url:
        post(url, batches(config.training_steps))
        run = CutOffRun(url, tmp_path, config, ListeningBridge(small_model()))
        with pytest.raises(Killed):
            train_once(url, tmp_path, run.bridge, config, KilledInStep5(tmp_path, total_steps=7, show_times=False))
        assert sorted(path.name for path in run.checkpoints.iterdir()) == ["journal", "step_3"]
        names = sorted(path.name for path in (run.checkpoints / "journal").iterdir())
        assert names == ["step_4.jsonl", "step_5.jsonl"]
        yield run


def test_under_other_settings_the_steps_since_the_checkpoint_are_repeated_under_new_versions(
    cut_off: CutOffRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert [version for version, _ in cut_off.bridge.published] == [0, 1, 2, 3, 4, 5]
    bridge = cut_off.resume(lr=3e-2)
    assert "lr 0.01 → 0.03" in caplog.text
    assert [version for version, _ in bridge.published] == [6, 7, 8, 9, 10]
    assert bridge.repeated == [range(6, 7)]  # each version is measured, so it must be served
    assert [(step, version) for step, version, _ in curve(tmp_path)] == [
        *((step, step) for step in (1, 2, 3)),
        *((step, step + 3) for step in (4, 5, 6, 7)),
    ]
    aside = (tmp_path / "metrics-set-aside.jsonl").read_text().splitlines()
    assert [MetricsLine.model_validate_json(line).step for line in aside] == [4]


def test_a_longer_run_at_a_constant_rate_repeats_its_steps_as_they_were(cut_off: CutOffRun) -> None:
    before = cut_off.bridge.published[-2:]
    post(cut_off.url, batches(1))
    bridge = cut_off.resume(training_steps=8)
    assert bridge.published[1:3] == before
    assert bridge.repeated == [range(6)]


def test_weights_of_another_trainer_in_the_server_change_the_versions_and_nothing_else(cut_off: CutOffRun) -> None:
    cut_off.bridge.published.append((40, 0.0))
    bridge = cut_off.resume()
    assert [version for version, _ in bridge.published] == [41, 42, 43, 44, 45]
    assert bridge.published[1][1] == cut_off.bridge.published[4][1]
    assert bridge.repeated == [range(41, 44)]


def test_a_state_that_does_not_fit_is_refused_with_what_is_different(cut_off: CutOffRun) -> None:
    with pytest.raises(CheckpointError, match=r"step_3: .*optimizer 'adamw' → 'adafactor'.*--no-resume"):
        cut_off.resume(optimizer="adafactor")
    shutil.rmtree(cut_off.checkpoints / "step_3")
    (cut_off.checkpoints / "journal/step_4.jsonl").rename(cut_off.checkpoints / "journal/step_1.jsonl")
    with pytest.raises(CheckpointError, match=r"journal: .*train_layer_indices None → '1'"):
        cut_off.resume(train_layer_indices="1")


def test_without_resume_checkpoints_journal_and_records_are_set_aside(cut_off: CutOffRun, tmp_path: Path) -> None:
    post(cut_off.url, batches(7))
    assert cut_off.resume(resume=False).published[1][0] == 7
    [aside] = tmp_path.glob("checkpoints-until-*")
    assert sorted(path.name for path in aside.iterdir()) == ["journal", "step_3"]
    assert [step for step, _, _ in curve(tmp_path)] == list(range(1, 8))
    assert len((tmp_path / "metrics-set-aside.jsonl").read_text().splitlines()) == 4


def full_disk(folder: Path, name: str, state: Any) -> None:
    (folder / f"{name}.json").write_text("half of it")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_is_full_ends_no_run_before_its_last_step(
    tmp_path: Path, config: TrainConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class DiskThatIsFullAfterStep4(Recorder):
        def step(self, step: int, *arguments: Any) -> None:
            super().step(step, *arguments)
            if step == 4:
                monkeypatch.setattr(checkpoints, "write_state", full_disk)

    with served_api() as url:
        post(url, batches(7))
        bridge = ListeningBridge(small_model())
        recorder = DiskThatIsFullAfterStep4(tmp_path, total_steps=7, show_times=False)
        with pytest.raises(CheckpointError, match=r"step_7: not saved: .*No space left.*GB are free.*step_3 is kept"):
            train_once(url, tmp_path, bridge, config, recorder)
        assert "step_6: not saved" in caplog.text
        assert [step for step, _, _ in curve(tmp_path)] == list(range(1, 8))
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["journal", "step_3"]
        monkeypatch.undo()
        resumed = CutOffRun(url, tmp_path, config, bridge).resume()
    assert resumed.published == bridge.published[3:]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_3", "step_6", "step_7"]


def test_a_journal_that_cannot_be_written_ends_no_run(
    tmp_path: Path, config: TrainConfig, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/journal").write_text("a file in its place")
    with served_api() as url:
        post(url, batches(7))
        train_once(url, tmp_path, ListeningBridge(small_model()), config)
    assert caplog.text.count("cannot be kept") == 1


def test_the_journal_returns_what_was_kept_also_values_that_are_not_finite(tmp_path: Path) -> None:
    [group, other] = made_up_groups(3)
    odd = other.model_copy(update={"scores": [float("nan"), float("-inf"), 1e-300, 0.1]})
    entry = JournalEntry(
        head=JournalHead(step=4, policy_version=9, lease="a", settings={"lr": 0.1}), groups=[group, odd]
    )
    journal = Journal(tmp_path)
    journal.keep(entry)
    read = journal.read(4)
    assert read is not None
    assert read.head == entry.head
    assert read.groups[0] == group
    assert str(read.groups[1]) == str(odd)  # NaN equals nothing, itself included
    (tmp_path / "journal/step_4.jsonl").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"step_4\.jsonl: unreadable.*remove it"):
        journal.heads(after=3)


def test_steps_after_a_gap_in_the_journal_are_logged_as_lost(
    cut_off: CutOffRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (cut_off.checkpoints / "journal/step_4.jsonl").unlink()
    post(cut_off.url, batches(2))
    cut_off.resume()
    assert "the journal has a gap after step 3;" in caplog.text
    assert [step for step, _, _ in curve(tmp_path)] == list(range(1, 8))


def test_what_was_served_before_steps_got_new_versions_does_not_lead_to_the_present_weights(
    cut_off: CutOffRun,
) -> None:
    class KilledAtOnce(Recorder):
        def step(self, step: int, *arguments: Any) -> None:
            raise Killed

    config = cut_off.config.model_copy(update={"lr": 3e-2})
    recorder = KilledAtOnce(cut_off.folder, total_steps=7, show_times=False)
    with pytest.raises(Killed):
        train_once(cut_off.url, cut_off.folder, ListeningBridge(small_model(), serves=5), config, recorder)
    assert cut_off.resume(lr=3e-2).repeated == [range(6, 9)]


def test_every_setting_that_may_change_on_resume_exists() -> None:
    assert set(TrainerConfig.model_fields) >= FREE_SETTINGS


# --- real processes --------------------------------------------------------------------------------------------------

STEPS = 24


@contextmanager
def trainer_of(
    folder: Path, flags: list[str], server_flags: list[str], *, num_batches: int = STEPS + 1
) -> Iterator[tuple[EngineProcesses, str]]:
    """A trainer, not yet started, beside a server and the API at the URL, which has batches for it."""
    folder.mkdir()
    model = save_tiny_model(folder.parent / "model", seed=1)
    environment = {"VLLM_BRIDGE_CONFIG_PATH": str(folder / "bridge.json")}
    with (
        served_api(folder / "rollouts.sqlite") as url,
        running_server(model, "--dtype", "bfloat16", *server_flags, folder=folder, environment=environment) as server,
    ):
        post(url, batches(num_batches))
        argv = [
            *("--batch-size", "4", "--gradient-accumulation-steps", "2", "--model-name", str(model)),
            *("--seq-len", "32", "--lr", "1e-3", "--training-steps", str(STEPS), "--checkpoint-interval", "3"),
            *("--threads", "1", "--device", "cpu", "--atropos-url", url, "--run-folder", str(folder / "run")),
            *("--vllm-port", server.url.rpartition(":")[2], *flags),
        ]
        run = EngineProcesses(folder, {"train": argv})
        try:
            yield run, url
        finally:
            run.end_all()


def is_saving(run: EngineProcesses) -> bool:
    return any((run.run_folder / "checkpoints").glob(".step_*.partial"))


@pytest.mark.extended("test_a_trainer_killed_at_any_moment_resumes_with_the_same_records_and_weights")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("flags", "server_flags", "kills"),
    [
        (["--weight-bridge-mode", "shared_vllm", "--optimizer", "adamw"], ["--shared-weights"], 3),
        pytest.param(
            ["--weight-bridge-mode", "lora_only", "--optimizer", "adamw", "--lora-dropout", "0.1"],
            ["--enable-lora"],
            2,
            marks=FURTHER,
        ),
        pytest.param(["--optimizer", "adafactor", "--num-iterations", "2"], [], 2, marks=FURTHER),
        pytest.param(
            ["--weight-bridge-mode", "turns", "--optimizer", "adamw", "--max-staleness", "1000"],
            ["--enable-sleep-mode"],
            2,
            marks=FURTHER,
        ),
    ],
    ids=["shared", "adapter", "adafactor", "turns"],
)
def test_a_trainer_under_kill_9_has_the_curve_and_the_weights_of_an_undisturbed_one(
    tmp_path: Path, flags: list[str], server_flags: list[str], kills: int
) -> None:
    with trainer_of(tmp_path / "whole", flags, server_flags) as (run, _):
        run.start("train")
        run.end("train")
    rng = random.Random(0)
    with trainer_of(tmp_path / "killed", flags, server_flags) as (run, _):
        for number in range(kills):
            low = 1 + number * (STEPS - 4) // kills
            target, kills_while_saving = rng.randrange(low, low + 3), number % 2 == 1

            def is_time(target: int = target, while_saving: bool = kills_while_saving) -> bool:
                steps = run.num_steps()
                return steps >= STEPS - 2 or (steps >= target and (not while_saving or is_saving(run)))

            run.start("train")
            run.wait_until(is_time, interval_s=0)
            for _ in range(rng.randrange(2000)):  # some more microseconds into it
                is_saving(run)
            assert run.processes["train"].poll() is None, run.log("train")
            run.kill("train")
        run.start("train")
        run.end("train")
        assert "are repeated from the journal" in run.log("train")
    assert [step for step, _, _ in curve(run.run_folder)] == list(range(1, STEPS + 1))
    assert_same_end(tmp_path / "whole/run", run.run_folder, step=STEPS, shares_process=False)


@pytest.mark.extended("test_two_ranks_resume_as_one_and_as_three_and_one_as_two")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_rank_ends_the_trainer_which_resumes_with_the_curve_and_weights_of_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    flags = ["--processes", "2", "--optimizer", "adamw"]
    with trainer_of(tmp_path / "whole", flags, []) as (run, _):
        run.start("train")
        run.end("train")
    with trainer_of(tmp_path / "killed", flags, []) as (run, _):
        for number, target in enumerate((4, 14)):
            run.start("train")
            run.wait_until(lambda target=target: run.num_steps() >= target, interval_s=0)
            launcher = run.processes.pop("train")
            ranks = sorted(psutil.Process(launcher.pid).children(), key=lambda rank: rank.create_time())
            ranks[number].kill()
            assert launcher.wait(60) == 128 + signal.SIGKILL
            assert not any(rank.is_running() for rank in ranks)
        run.start("train")
        run.end("train")
        assert "are repeated from the journal" in run.log("train")
        assert "was killed by SIGKILL; the other ranks are ended" in run.log("train")
    assert [step for step, _, _ in curve(run.run_folder)] == list(range(1, STEPS + 1))
    assert_same_end(tmp_path / "whole/run", run.run_folder, step=STEPS, shares_process=False)


def waits_for_a_batch(run: EngineProcesses) -> bool:
    log = run.log("train")
    return log.count("trainer ready") > log.count("a restart resumes there") and run.num_steps() >= STEPS // 2


@pytest.mark.extended("test_a_trainer_whose_server_was_killed_still_saves_its_steps_and_exits_with_0")
@pytest.mark.slow
def test_sigterm_at_any_time_saves_the_steps_done_and_exits_with_0(tmp_path: Path) -> None:
    moments: list[Callable[[EngineProcesses], bool]] = [
        lambda run: any((run.run_folder / "checkpoints/journal").glob("step_*")),  # in a step
        is_saving,
        waits_for_a_batch,  # half of the groups come later
    ]
    with trainer_of(tmp_path / "run", ["--optimizer", "adamw"], [], num_batches=STEPS // 2) as (run, url):
        for moment in moments:
            run.start("train")
            run.wait_until(partial(moment, run), interval_s=0)
            run.processes["train"].send_signal(signal.SIGTERM)
            run.end("train", 60)
            newest = checkpoints.newest(run.run_folder / "checkpoints")
            assert (newest.name if newest else "step_0") == f"step_{run.num_steps()}"
            assert not (run.run_folder / "checkpoints/journal").exists()
        assert run.num_steps() == STEPS // 2
        post(url, batches(STEPS)[STEPS:])
        run.start("train")
        run.end("train")
    assert [step for step, _, _ in curve(run.run_folder)] == list(range(1, STEPS + 1))


@pytest.mark.extended("test_a_trainer_whose_server_was_killed_still_saves_its_steps_and_exits_with_0")
@pytest.mark.slow
def test_sigterm_while_the_api_is_not_reachable_is_no_failure(tmp_path: Path) -> None:
    flags = ["--optimizer", "adamw", "--api-timeout-s", "600", "--atropos-url", f"http://127.0.0.1:{free_port()}"]
    with trainer_of(tmp_path / "run", flags, []) as (run, _):
        run.start("train")
        run.wait_until(lambda: "training " in run.log("train"))  # the model is there, and the API is asked next
        run.processes["train"].send_signal(signal.SIGTERM)
        run.end("train", 60)
    assert "not retried, since training is stopping" in run.log("train")
    assert run.num_steps() == 0


def test_steps_after_a_way_back_get_versions_that_no_weights_had(tmp_path: Path) -> None:
    batches = [made_up_groups(seed) for seed in range(5)]
    train_in(tmp_path, settings(training_steps=2), ListedSource(batches[:2]))
    used = tmp_path / "checkpoints" / "used_versions.json"
    used.write_text('{"through": 9}')  # as `grpo-tui resume --from step_2` leaves it
    for stops_before in (3, 5):  # the first is stopped before its first step, and so begins once more
        bridge = ListeningBridge(small_model())
        source = ListedSource(batches[2 : stops_before - 1])
        train_in(tmp_path, settings(training_steps=4), source, bridge)
        assert [version for version, _ in bridge.published] == [10, 11, 12][: stops_before - 2]
    bridge = ListeningBridge(small_model())
    train_in(tmp_path, settings(training_steps=5), ListedSource(batches[4:]), bridge)
    assert [version for version, _ in bridge.published] == [12, 13]
    assert bridge.repeated == [range(10, 13)]
    used.write_text("{")
    with pytest.raises(CheckpointError, match=r"used_versions.json: unreadable .* policy version in metrics-set"):
        train_in(tmp_path, settings(training_steps=6), ListedSource([]))
