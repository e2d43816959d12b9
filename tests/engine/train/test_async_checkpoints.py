"""Checkpoints that are written while training goes on: they count once they are durable, and resume bit for bit."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import start_forked
from rank_training import Training, make_model, train_on_ranks
from torch.testing import assert_close
from training import (
    ListedSource,
    attached,
    made_up_groups,
    metrics_lines,
    saving,
    settings,
    small_model,
    train_in,
)

from grpo_engine.bridges.lora_only import LoraOnly
from grpo_engine.models.config import LoraSettings
from grpo_engine.models.lora import add_lora
from grpo_engine.train.batch import trainable_batch
from grpo_engine.train.checkpointing import checkpoints, writing
from grpo_engine.train.checkpointing.staging import StagingMemory, copy_bytes
from grpo_engine.train.checkpointing.state_files import read_state
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.memory.checkpoint_copy import checkpoint_copy_bytes
from grpo_engine.train.memory.dry_run import model_shape
from grpo_engine.train.recording.recorder import Recorder
from grpo_engine.train.step import gradient_step
from grpo_engine.train.trainee import Trainee
from grpo_engine.wire.metrics import CHECKPOINT_WAIT, CHECKPOINT_WRITE

NUM_STEPS = 6
TO_DISK = checkpoints._bring_to_disk


def copying(**changes: object) -> TrainConfig:
    return settings(checkpoint_async_mode="async", training_steps=NUM_STEPS, **changes)


def source(first: int = 0) -> ListedSource:
    return ListedSource([made_up_groups(seed) for seed in range(first, NUM_STEPS)])


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def assert_same_checkpoint(one: Path, other: Path) -> None:
    assert same(read_state(one, "trainer"), read_state(other, "trainer"))
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that waited for each of its checkpoints."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train_in(folder, settings(training_steps=NUM_STEPS), source())
    return folder


def stuck_at(step: int, reached: Path) -> None:
    """The disk takes no more from the checkpoint of this step on."""

    def bring(folder: Path) -> None:
        if folder.name == f".step_{step}.partial":
            reached.touch()
            time.sleep(600)
        TO_DISK(folder)

    checkpoints._bring_to_disk = bring


def train_until_killed(folder: Path) -> None:
    torch.set_num_threads(1)
    stuck_at(4, folder / "reached")
    train_in(folder, copying(), source())


def test_a_trainer_killed_before_its_checkpoint_is_durable_resumes_from_the_one_before_bit_for_bit(
    tmp_path: Path, undisturbed: Path
) -> None:
    trainer = start_forked(train_until_killed, tmp_path)
    last = tmp_path / "checkpoints/journal/step_6.jsonl"
    while not ((tmp_path / "reached").exists() and last.exists()):  # two steps further than what is being written
        assert trainer.is_alive()
        time.sleep(0.02)
    trainer.kill()
    trainer.join()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        ".step_4.partial",
        "journal",
        "step_2",
    ]
    names = sorted(path.name for path in (tmp_path / "checkpoints/journal").iterdir())
    assert names == [f"step_{step}.jsonl" for step in (3, 4, 5, 6)]
    assert train_in(tmp_path, copying(), source(NUM_STEPS)) == NUM_STEPS
    assert [line.step for line in metrics_lines(tmp_path)] == list(range(1, NUM_STEPS + 1))
    assert_same_checkpoint(undisturbed / "checkpoints/step_6", tmp_path / "checkpoints/step_6")


def test_training_goes_on_beside_a_slow_disk_and_one_checkpoint_is_written_at_a_time(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, is_released, now, most = threading.Event(), threading.Event(), 0, 0

    def slow(folder: Path) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        has_begun.set()
        assert is_released.wait(60)
        TO_DISK(folder)
        now -= 1

    class Watching(Recorder):
        def step(self, step: int, policy_version: int, metrics: Mapping[str, float]) -> None:
            super().step(step, policy_version, metrics)
            if step == 3:  # with the checkpoint of step 2 not yet durable
                assert has_begun.wait(60)
                there = {path.name for path in (tmp_path / "checkpoints").iterdir()}
                assert ".step_2.partial" in there
                assert "step_2" not in there
                assert (tmp_path / "checkpoints/journal/step_1.jsonl").exists()
                is_released.set()

    monkeypatch.setattr(checkpoints, "_bring_to_disk", slow)
    monkeypatch.setattr("training.Recorder", Watching)
    train_in(tmp_path, copying(), source())
    assert most == 1
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_2", "step_4", "step_6"]
    for step in (2, 4, 6):
        assert_same_checkpoint(undisturbed / f"checkpoints/step_{step}", tmp_path / f"checkpoints/step_{step}")
    lines = metrics_lines(tmp_path)
    assert [line.step for line in lines if CHECKPOINT_WAIT in line.metrics] == [3, 5]
    assert any(CHECKPOINT_WRITE in line.metrics for line in lines)


def test_a_full_disk_of_the_background_is_logged_and_keeps_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(folder: Path) -> None:
        if folder.name == ".step_2.partial":
            raise OSError(errno.ENOSPC, "No space left on device")
        TO_DISK(folder)

    monkeypatch.setattr(checkpoints, "_bring_to_disk", full)
    train_in(tmp_path, copying(), source())
    assert "step_2: not saved: [Errno 28] No space left on device" in caplog.text
    assert "training continues, the next checkpoint is tried when due" in caplog.text
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_4", "step_6"]


def test_a_fault_in_the_background_ends_the_training_and_names_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(folder: Path) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(checkpoints, "_bring_to_disk", faulty)
    with pytest.raises(ValueError, match="a fault") as raised:
        train_in(tmp_path, copying(), source())
    assert raised.value.__notes__ == ["while the checkpoint of step 2 was written in the background"]


def test_without_memory_for_a_copy_training_waits_for_the_disk(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writing, "free_memory", lambda: 10_000)
    threads = []
    monkeypatch.setattr(
        checkpoints, "_bring_to_disk", lambda folder: (threads.append(threading.current_thread()), TO_DISK(folder))
    )
    train_in(tmp_path, copying().model_copy(update={"checkpoint_async_mode": "auto"}), source())
    assert "training waits while a checkpoint is written: a copy of the state takes" in caplog.text
    assert set(threads) == {threading.main_thread()}
    assert_same_checkpoint(undisturbed / "checkpoints/step_6", tmp_path / "checkpoints/step_6")


@pytest.mark.parametrize("has_adapter", [False, True], ids=["model", "adapter"])
def test_a_step_computed_meanwhile_is_not_in_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_adapter: bool
) -> None:
    batches = [trainable_batch(made_up_groups(seed), 32, vocab_size=64) for seed in range(3)]
    config = copying(bridge=LoraOnly()) if has_adapter else copying()

    def fresh(seed: int) -> Trainee:
        if not has_adapter:
            return Trainee(attached(small_model(seed), is_shared=False), config)
        torch.manual_seed(seed)
        model = add_lora(small_model(), LoraSettings(rank=4, alpha=8, dropout=0.1, target_modules=("q_proj", "v_proj")))
        return Trainee(attached(model, is_shared=False, save=saving(model, save_embedding_layers=False)), config)

    is_released = threading.Event()
    monkeypatch.setattr(checkpoints, "_bring_to_disk", lambda folder: (is_released.wait(60), TO_DISK(folder)))
    one = fresh(0)
    for step in range(2):
        gradient_step(one, batches[step], step=step, policy_version=step)
        one.write_weights()
    planned = checkpoint_copy_bytes(model_shape(small_model().config, config), config)
    if not has_adapter:
        assert planned <= one.num_copied_bytes() <= planned + 64 * 60
    seconds = one.begin_save(tmp_path, step=2, policy_version=2, lease="", settings={})
    expected = gradient_step(one, batches[2], step=2, policy_version=2).metrics
    one.write_weights()
    is_released.set()
    assert seconds.result() > 0
    other = fresh(1)
    other.restore(checkpoints.load(tmp_path / "step_2", model_name="test/model"))
    other.write_weights()
    assert gradient_step(other, batches[2], step=2, policy_version=2).metrics == expected


def test_two_ranks_write_in_the_background_what_one_resumes(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    apart = Training(model=model, folder=tmp_path / "ranks", num_ranks=2, steps=range(2), is_copied=True)
    train_on_ranks(apart)
    (tmp_path / "ranks/store-0").unlink(missing_ok=True)
    resumed = train_on_ranks(Training(model=model, folder=tmp_path / "ranks", num_ranks=1, steps=range(2, 3)))
    whole = train_on_ranks(Training(model=model, folder=tmp_path / "whole", num_ranks=1, steps=range(3)))
    assert resumed.parameters.keys() == whole.parameters.keys()
    for name, value in whole.parameters.items():
        assert_close(resumed.parameters[name], value, atol=2e-6, rtol=0)


def test_staging_memory_is_used_again_and_a_tensor_of_two_names_is_copied_once() -> None:
    table = torch.arange(6.0)
    state = {"a": table, "b": [table.view(2, 3).T, table], "empty": torch.zeros(0), "step": torch.tensor(3), "n": 7}
    memory = StagingMemory()
    first = memory.copy(state)
    assert same(first, state)
    assert first["a"] is first["b"][1]
    assert first["b"][0].is_contiguous()
    assert memory.num_bytes == copy_bytes(state) == 3 * 64
    place = first["a"].data_ptr()
    table += 1
    assert first["a"][0] == 0
    assert memory.copy(state)["a"].data_ptr() == place
    memory.close()
    assert memory.num_bytes == 0
