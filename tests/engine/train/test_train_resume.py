"""Killed at any moment and started again, a trainer has the curve and the weights of one that was never killed."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from forked import Forked
from rollout_fakes import served_api
from serving import free_port, python_path, running_server, save_tiny_model
from training import ListeningBridge, made_up_groups, settings, small_model
from transformers import LlamaForCausalLM

from grpo_engine.data.source import RolloutSource
from grpo_engine.errors import CheckpointError
from grpo_engine.train.checkpointing import checkpoints
from grpo_engine.train.checkpointing.journal import Journal, JournalEntry, JournalHead
from grpo_engine.train.checkpointing.resuming import FREE_SETTINGS
from grpo_engine.train.checkpointing.state_files import read_state
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.loop import train
from grpo_engine.train.recording.recorder import Recorder
from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.rollouts import ScoredGroup

OF_TIME = re.compile(r"train/(\w+_time|tokens_per_second|gpu_memory_gb)")


class Killed(BaseException):
    """What a SIGKILL is to the code it ends: nothing of it runs any more."""


class Killer:
    """Ends this thread's doings on the disk at one moment, and whatever it would still do to clean up."""

    def __init__(self) -> None:
        self.moments = 0
        self._last: int | None = None
        self._thread = 0
        sys.addaudithook(self._notice)  # stays as long as the process, asleep

    @contextmanager
    def kills_at(self, moment: int | None) -> Iterator[None]:
        """Let `moment` be the first that is not lived to see; None: count them."""
        self.moments, self._last, self._thread = 0, moment, threading.get_ident()
        try:
            yield
        except Killed:
            pass
        finally:
            self._thread = 0

    def pass_moment(self) -> None:
        if threading.get_ident() != self._thread:
            return
        self.moments += 1
        if self._last is not None and self.moments > self._last:
            raise Killed

    def _notice(self, event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes or event in {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"}:
            self.pass_moment()


@pytest.fixture(scope="module")
def killer() -> Killer:
    return Killer()


class MortalBridge(ListeningBridge):
    """Goes with its trainer, while the memory that it writes to stays and keeps its version."""

    def __init__(self, killer: Killer, model: torch.nn.Module, *, serves: int = 0) -> None:
        super().__init__(model, serves=serves)  # type: ignore[arg-type]
        self._killer = killer

    def publish(self, version: int, write: Callable[[], None]) -> None:
        self._killer.pass_moment()
        super().publish(version, write)
        self._killer.pass_moment()


class MortalRecorder(Recorder):
    def __init__(self, killer: Killer, folder: Path, *, total_steps: int) -> None:
        super().__init__(folder, total_steps=total_steps, show_times=False)
        self._killer = killer

    def step(self, *arguments: Any) -> None:
        self._killer.pass_moment()
        super().step(*arguments)
        self._killer.pass_moment()


def batches(steps: int) -> list[ScoredGroup]:
    """Groups of `steps` batches of two, sampled at version 0 as they say."""
    return [group for seed in range(steps) for group in made_up_groups(seed)]


def post(url: str, groups: list[ScoredGroup]) -> None:
    with httpx.Client(trust_env=False) as client:
        for group in groups:
            answer = client.post(f"{url}/scored_data", json=group.model_dump(exclude_none=True))
            assert answer.status_code == 200, answer.text


def curve(run_folder: Path) -> list[tuple[int, int, dict[str, float]]]:
    lines = map(MetricsLine.model_validate_json, (run_folder / "metrics.jsonl").read_bytes().splitlines())
    return [
        (line.step, line.policy_version, {k: v for k, v in line.metrics.items() if not OF_TIME.fullmatch(k)})
        for line in lines
    ]


def sampled(run_folder: Path) -> list[str]:
    return [re.sub('"time":[^,]*,', "", line) for line in (run_folder / "rollouts.jsonl").read_text().splitlines()]


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
    assert sampled(one) == sampled(other)
    first, second = (folder / f"checkpoints/step_{step}" for folder in (one, other))
    states = [read_state(folder, "trainer") for folder in (first, second)]
    if shares_process:  # with an API that draws from Python's generator too
        for state in states:
            del state["random"]["python"]
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


def train_once(url: str, folder: Path, bridge: ListeningBridge, recorder: Recorder, config: TrainConfig) -> None:
    with recorder, RolloutSource(url) as source:
        train(config, source, bridge, recorder, decode=str, save_path=folder / "checkpoints")


def run_killed_at(killer: Killer, moment: int | None, folder: Path, config: TrainConfig) -> int:
    """Train, be killed at `moment`, and train to the end; returns how many moments the first trainer had."""
    steps = config.training_steps
    with served_api() as url:
        post(url, batches(steps))
        bridge = MortalBridge(killer, model_with_dropout())
        recorder = MortalRecorder(killer, folder, total_steps=steps)
        with killer.kills_at(moment):
            train_once(url, folder, bridge, recorder, config)
        moments = killer.moments
        served = bridge.published[-1][0] if bridge.published else 0
        with killer.kills_at(None):
            heir = MortalBridge(killer, bridge.model, serves=served)
            train_once(url, folder, heir, MortalRecorder(killer, folder, total_steps=steps), config)
        names: dict[int, float] = {}
        for version, weight in bridge.published + heir.published:
            assert names.setdefault(version, weight) == weight, f"version {version} names two sets of weights"
    return moments


@pytest.fixture
def saved_model(tmp_path: Path) -> Path:
    small_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


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
def test_a_trainer_killed_at_any_moment_goes_on_as_if_it_had_not_been(
    tmp_path: Path, saved_model: Path, killer: Killer, share: int, more: dict[str, object]
) -> None:
    base = {
        "batch_timeout_s": 5,
        "model_name": str(saved_model),
        "training_steps": 3,  # after the second the first checkpoint, which that of the end replaces
        "checkpoint_interval": 2,
        "keep_checkpoints": 1,
    }
    config = settings(**{**base, **more})
    moments = run_killed_at(killer, None, tmp_path / "whole", config)
    assert moments > 40
    for moment in range(share, moments, 4):
        folder = tmp_path / f"killed-{moment}"
        run_killed_at(killer, moment, folder, config)
        assert_same_end(tmp_path / "whole", folder, step=3, shares_process=True)


# --- settings, records and disks --------------------------------------------------------------------------------------


def cut_off_in_step_5(killer: Killer, folder: Path, config: TrainConfig, url: str) -> MortalBridge:
    """A run whose checkpoint is of step 3, with steps 4 and 5 in the journal; step 5 was not recorded."""
    post(url, batches(config.training_steps))
    bridge = MortalBridge(killer, small_model())
    recorder = Recorder(folder, total_steps=config.training_steps, show_times=False)

    def die(step: int, *arguments: Any) -> None:
        if step == 5:
            raise Killed
        Recorder.step(recorder, step, *arguments)

    recorder.step = die  # type: ignore[method-assign]
    with killer.kills_at(None):
        train_once(url, folder, bridge, recorder, config)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["journal", "step_3"]
    assert sorted(path.name for path in (folder / "checkpoints/journal").iterdir()) == ["step_4.jsonl", "step_5.jsonl"]
    return bridge


def go_on(url: str, folder: Path, config: TrainConfig, bridge: ListeningBridge) -> ListeningBridge:
    served = small_model()
    served.load_state_dict(bridge.model.state_dict())
    heir = ListeningBridge(served, serves=bridge.published[-1][0])
    train_once(url, folder, heir, Recorder(folder, total_steps=config.training_steps, show_times=False), config)
    return heir


@pytest.fixture
def config(saved_model: Path) -> TrainConfig:
    return settings(model_name=str(saved_model), training_steps=7, checkpoint_interval=3, batch_timeout_s=20)


def test_under_other_settings_the_steps_since_the_checkpoint_are_made_anew_and_named_anew(
    tmp_path: Path, config: TrainConfig, killer: Killer, caplog: pytest.LogCaptureFixture
) -> None:
    with served_api() as url:
        bridge = cut_off_in_step_5(killer, tmp_path, config, url)
        assert [version for version, _ in bridge.published] == [0, 1, 2, 3, 4, 5]
        heir = go_on(url, tmp_path, config.model_copy(update={"lr": 3e-2}), bridge)
    assert "lr 0.01 → 0.03" in caplog.text
    assert [version for version, _ in heir.published] == [6, 7, 8, 9, 10]
    assert [(step, version) for step, version, _ in curve(tmp_path)] == [
        *((step, step) for step in (1, 2, 3)),
        *((step, step + 3) for step in (4, 5, 6, 7)),
    ]
    aside = (tmp_path / "metrics-set-aside.jsonl").read_text().splitlines()
    assert [MetricsLine.model_validate_json(line).step for line in aside] == [4]


def test_a_longer_run_at_a_constant_rate_repeats_its_steps_as_they_were(
    tmp_path: Path, config: TrainConfig, killer: Killer
) -> None:
    with served_api() as url:
        bridge = cut_off_in_step_5(killer, tmp_path, config, url)
        before = bridge.published[-2:]
        post(url, batches(1))
        heir = go_on(url, tmp_path, config.model_copy(update={"training_steps": 8}), bridge)
    assert heir.published[1:3] == before


def test_weights_of_another_trainer_in_the_server_move_the_numbers_and_nothing_else(
    tmp_path: Path, config: TrainConfig, killer: Killer
) -> None:
    with served_api() as url:
        bridge = cut_off_in_step_5(killer, tmp_path, config, url)
        bridge.published.append((40, 0.0))
        heir = go_on(url, tmp_path, config, bridge)
    assert [version for version, _ in heir.published] == [41, 42, 43, 44, 45]
    assert heir.published[1][1] == bridge.published[4][1]


def test_a_state_that_does_not_fit_is_refused_with_what_is_different(
    tmp_path: Path, config: TrainConfig, killer: Killer
) -> None:
    with served_api() as url:
        bridge = cut_off_in_step_5(killer, tmp_path, config, url)
        with pytest.raises(CheckpointError, match=r"step_3: .*optimizer 'adamw' → 'adafactor'.*--no-resume"):
            go_on(url, tmp_path, config.model_copy(update={"optimizer": "adafactor"}), bridge)
        shutil.rmtree(tmp_path / "checkpoints/step_3")
        (tmp_path / "checkpoints/journal/step_4.jsonl").rename(tmp_path / "checkpoints/journal/step_1.jsonl")
        with pytest.raises(CheckpointError, match=r"journal: .*train_layer_indices None → '1'"):
            go_on(url, tmp_path, config.model_copy(update={"train_layer_indices": "1"}), bridge)


def test_without_resume_checkpoints_journal_and_records_are_set_aside(
    tmp_path: Path, config: TrainConfig, killer: Killer
) -> None:
    with served_api() as url:
        bridge = cut_off_in_step_5(killer, tmp_path, config, url)
        post(url, batches(7))
        go_on(url, tmp_path, config.model_copy(update={"resume": False}), bridge)
    [aside] = tmp_path.glob("checkpoints-until-*")
    assert sorted(path.name for path in aside.iterdir()) == ["journal", "step_3"]
    assert [step for step, _, _ in curve(tmp_path)] == list(range(1, 8))
    assert len((tmp_path / "metrics-set-aside.jsonl").read_text().splitlines()) == 4


def test_a_line_that_a_crash_cut_off_is_dropped(tmp_path: Path) -> None:
    with Recorder(tmp_path, total_steps=3, show_times=False) as recorder:
        recorder.step(1, 1, {"train/loss": 0.5})
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"time":1.0,"step":2,"pol')
    with Recorder(tmp_path, total_steps=3, show_times=False) as recorder:
        recorder.resume_after(2)
        assert recorder.has(1)
        assert not recorder.has(2)
        assert path.read_bytes() == whole
    assert not (tmp_path / "metrics-set-aside.jsonl").exists()


def full_disk(folder: Path, name: str, state: Any) -> None:
    (folder / f"{name}.json").write_text("half of it")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_is_full_ends_no_run_before_its_last_step(
    tmp_path: Path, config: TrainConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class DiskThatIsFullAfterStep3(Recorder):
        def step(self, step: int, *arguments: Any) -> None:
            super().step(step, *arguments)
            if step == 4:
                monkeypatch.setattr(checkpoints, "write_state", full_disk)

    with served_api() as url:
        post(url, batches(7))
        bridge = ListeningBridge(small_model())
        recorder = DiskThatIsFullAfterStep3(tmp_path, total_steps=7, show_times=False)
        with pytest.raises(CheckpointError, match=r"step_7: not saved: .*No space left.*GB are free.*step_3 is kept"):
            train_once(url, tmp_path, bridge, recorder, config)
        assert "step_6: not saved" in caplog.text
        assert [step for step, _, _ in curve(tmp_path)] == list(range(1, 8))
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["journal", "step_3"]
        monkeypatch.undo()
        heir = go_on(url, tmp_path, config, bridge)
    assert heir.published == bridge.published[3:]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_3", "step_6", "step_7"]


def test_a_journal_that_cannot_be_written_ends_no_run(
    tmp_path: Path, config: TrainConfig, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/journal").write_text("a file in its place")
    with served_api() as url:
        post(url, batches(7))
        train_once(
            url, tmp_path, ListeningBridge(small_model()), Recorder(tmp_path, total_steps=7, show_times=False), config
        )
    assert caplog.text.count("cannot be kept") == 1


def test_the_journal_gives_back_what_it_was_given_also_what_is_no_number(tmp_path: Path) -> None:
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


def test_steps_after_a_gap_in_the_journal_are_said_to_be_lost(
    tmp_path: Path, config: TrainConfig, killer: Killer, caplog: pytest.LogCaptureFixture
) -> None:
    with served_api() as url:
        bridge = cut_off_in_step_5(killer, tmp_path, config, url)
        (tmp_path / "checkpoints/journal/step_4.jsonl").unlink()
        post(url, batches(2))
        go_on(url, tmp_path, config, bridge)
    assert "the journal has a gap after step 3;" in caplog.text
    assert [step for step, _, _ in curve(tmp_path)] == list(range(1, 8))


def test_every_setting_that_is_free_exists() -> None:
    assert set(TrainConfig.model_fields) >= FREE_SETTINGS


# --- the real thing ---------------------------------------------------------------------------------------------------


class Run:
    """An API with groups enough and a server, both real processes, and a trainer that is killed and started again."""

    def __init__(
        self, folder: Path, url: str, server_url: str, model_name: str, flags: list[str], environment: dict[str, str]
    ) -> None:
        self.folder, self.url, self.model_name = folder, url, model_name
        self.run_folder = folder / "run"
        self._environment = environment
        self.flags = [
            *("--batch-size", "4", "--gradient-accumulation-steps", "2", "--model-name", model_name),
            *("--seq-len", "32", "--lr", "1e-3", "--training-steps", str(STEPS), "--checkpoint-interval", "3"),
            *("--threads", "1", "--device", "cpu", "--atropos-url", url, "--run-folder", str(self.run_folder)),
            *("--vllm-port", server_url.rpartition(":")[2], *flags),
        ]

    @contextmanager
    def trainer(self) -> Iterator[Forked]:
        process = Forked(
            "train", *self.flags, log=self.folder / "train.log", folder=self.folder, environment=self._environment
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def log(self) -> str:
        return (self.folder / "train.log").read_text(errors="replace")

    def num_steps(self) -> int:
        path = self.run_folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def is_saving(self) -> bool:
        return any((self.run_folder / "checkpoints").glob(".step_*.partial"))


STEPS = 24


@contextmanager
def prepared_run(
    folder: Path, flags: list[str], server_flags: list[str], *, num_batches: int | None = None
) -> Iterator[Run]:
    folder.mkdir()
    model = save_tiny_model(folder.parent / "model", seed=1)
    environment = {
        **os.environ,
        **{"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()},
        "VLLM_BRIDGE_CONFIG_PATH": str(folder / "bridge.json"),
    }
    with (
        served_api(folder / "rollouts.sqlite") as url,
        running_server(model, "--dtype", "bfloat16", *server_flags, folder=folder, environment=environment) as server,
    ):
        post(url, batches(num_batches or STEPS + 1))
        yield Run(folder, url, server.url, str(model), flags, environment)


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
    ],
    ids=["shared", "adapter", "adafactor"],
)
def test_a_trainer_under_kill_9_has_the_curve_and_the_weights_of_one_left_alone(
    tmp_path: Path, flags: list[str], server_flags: list[str], kills: int
) -> None:
    with prepared_run(tmp_path / "whole", flags, server_flags) as run, run.trainer() as trainer:
        assert trainer.wait(120) == 0, run.log()
    rng = random.Random(0)
    with prepared_run(tmp_path / "killed", flags, server_flags) as run:
        for number in range(kills):
            with run.trainer() as trainer:
                low = 1 + number * (STEPS - 4) // kills
                target = rng.randrange(low, low + 3)
                while run.num_steps() < target or (number % 2 == 1 and not run.is_saving()):
                    assert trainer.poll() is None, run.log()
                    if run.num_steps() >= STEPS - 2:
                        break
                for _ in range(rng.randrange(2000)):  # some more microseconds into it
                    run.is_saving()
                trainer.send_signal(signal.SIGKILL)
                assert trainer.wait() == -signal.SIGKILL, run.log()
        with run.trainer() as trainer:
            assert trainer.wait(120) == 0, run.log()
        assert run.log().count("are repeated from the journal") > 0
    assert [step for step, _, _ in curve(run.run_folder)] == list(range(1, STEPS + 1))
    assert_same_end(tmp_path / "whole/run", run.run_folder, step=STEPS, shares_process=False)


def awaits_a_batch(run: Run) -> bool:
    return (
        run.log().count("trainer ready") > run.log().count("a restart resumes there") and run.num_steps() >= STEPS // 2
    )


def newest_step(run: Run) -> int:
    newest = checkpoints.newest(run.run_folder / "checkpoints")
    return checkpoints.load(newest, model_name=run.model_name).marker.step if newest else 0


@pytest.mark.slow
def test_a_polite_signal_at_any_time_saves_what_was_done_and_exits_with_0(tmp_path: Path) -> None:
    moments: list[Callable[[Run], bool]] = [
        lambda run: any((run.run_folder / "checkpoints/journal").glob("step_*")),  # in a step
        Run.is_saving,
        awaits_a_batch,  # half of the groups come later
    ]
    with prepared_run(tmp_path / "run", ["--optimizer", "adamw"], [], num_batches=STEPS // 2) as run:
        for moment in moments:
            with run.trainer() as trainer:
                while not moment(run):
                    assert trainer.poll() is None, run.log()
                trainer.send_signal(signal.SIGTERM)
                assert trainer.wait(60) == 0, run.log()
            assert newest_step(run) == run.num_steps()
            assert not (run.run_folder / "checkpoints/journal").exists()
        assert run.num_steps() == STEPS // 2
        post(run.url, batches(STEPS)[STEPS:])
        with run.trainer() as trainer:
            assert trainer.wait(120) == 0, run.log()
    assert [step for step, _, _ in curve(run.run_folder)] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_a_polite_signal_while_the_api_is_awaited_is_no_failure(tmp_path: Path) -> None:
    with prepared_run(tmp_path / "run", ["--optimizer", "adamw"], []) as run:
        run.flags += ["--atropos-url", f"http://127.0.0.1:{free_port()}", "--api-timeout-s", "600"]
        with run.trainer() as trainer:
            while "training " not in run.log():  # the model is there, and the API is asked next
                assert trainer.poll() is None, run.log()
            trainer.send_signal(signal.SIGTERM)
            assert trainer.wait(60) == 0, run.log()
    assert "not retried, since training is stopping" in run.log()
    assert run.num_steps() == 0
