"""Checkpoints on disk: what goes in comes out, whatever ends the writer, and others can load the model."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_faults import DiskFaults, Killed
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors import safe_open
from serving import python_path
from training import attached, made_up_groups, saving, settings, small_model, trainee

from grpo_engine.bridges.lora_only import LoraOnly
from grpo_engine.errors import CheckpointError
from grpo_engine.models.config import LoraSettings
from grpo_engine.models.lora import add_lora
from grpo_engine.train.batch import trainable_batch
from grpo_engine.train.checkpointing import checkpoints
from grpo_engine.train.checkpointing.state_files import read_state, write_state
from grpo_engine.train.step import gradient_step
from grpo_engine.train.trainee import Trainee
from grpo_engine.wire.checkpoints import CheckpointMarker

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8, torch.int64, torch.bool]


def tensors() -> st.SearchStrategy[torch.Tensor]:
    return st.builds(
        lambda shape, dtype, seed, transposed: (lambda t: t.T if transposed and t.ndim == 2 else t)(
            (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 200 - 50).to(dtype)
        ),
        st.lists(st.integers(0, 3), max_size=3),
        st.sampled_from(DTYPES),
        st.integers(0, 9),
        st.booleans(),
    )


text = st.text(st.characters(codec="utf-8"), max_size=6)
plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), text, st.sampled_from(DTYPES))
states = st.recursive(
    st.one_of(plain, tensors()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(text, st.integers()), inner, max_size=4),
    ),
    max_leaves=20,
)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    else:
        assert one == other or (math.isnan(one) and math.isnan(other))


@given(state=states, shard_bytes=st.sampled_from([1, 40, 10**9]))
@hypothesis_settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_any_nested_state_is_read_back_equal(tmp_path: Path, state: Any, shard_bytes: int) -> None:
    write_state(tmp_path, "state", state, shard_bytes=shard_bytes)
    assert_same(read_state(tmp_path, "state"), state)


def test_shared_memory_is_written_once_and_views_become_tensors_with_memory_of_their_own(tmp_path: Path) -> None:
    table = torch.arange(12.0)
    state = {"a": table, "b": table, "rows": list(table.view(3, 4)), "c": {"d": table[2:5]}, "c/d": torch.ones(2)}
    write_state(tmp_path, "state", state)
    back = read_state(tmp_path, "state")
    assert_same(back, state)
    assert back["a"] is back["b"]
    with safe_open(tmp_path / "state-00001.safetensors", "pt") as file:
        assert len(file.keys()) == 6
    back["rows"][0].zero_()
    assert back["a"].count_nonzero() == 11  # of a memory of its own


def test_a_value_that_cannot_be_saved_is_named_by_its_place(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"/state/0/hook: a function cannot be saved"):
        write_state(tmp_path, "state", {"state": [{"hook": lambda: None}]})


@pytest.mark.parametrize("name", ["adamw", "adafactor", "adamw_8bit"])
@pytest.mark.parametrize(
    "dtypes",
    [
        {},
        {"dtype": "bfloat16", "gradient_dtype": "bfloat16"},
        {"dtype": "bfloat16", "master_weights": "stochastic_rounding"},
        {"dtype": "bfloat16", "master_weights": "stochastic_rounding", "gradient_dtype": "bfloat16"},
    ],
    ids=["float32", "bf16 gradients", "rounded", "rounded, bf16 gradients"],
)
def test_a_restored_trainee_makes_the_next_step_of_the_one_that_was_saved(
    tmp_path: Path, name: str, dtypes: dict[str, object]
) -> None:
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes", minversion="0.50")
    config = settings(optimizer=name, batch_size=2, gradient_accumulation_steps=4, **dtypes)
    groups = [trainable_batch(made_up_groups(seed), 32, vocab_size=64) for seed in range(3)]

    def fresh(seed: int) -> Trainee:
        return Trainee(attached(small_model(seed).to(getattr(torch, config.dtype))), config)

    one = fresh(0)
    for step in range(2):
        gradient_step(one, groups[step], step=step, policy_version=step)
        one.write_weights()
    one.save(tmp_path, step=2, policy_version=2, lease="abc", settings={"lr": 1.0})
    expected = gradient_step(one, groups[2], step=2, policy_version=2).metrics
    drawn = torch.rand(3)

    other = fresh(1)
    marker = other.restore(checkpoints.load(tmp_path / "step_2", model_name="test/model"))
    other.write_weights()
    assert (marker.step, marker.policy_version, marker.lease, marker.settings) == (2, 2, "abc", {"lr": 1.0})
    assert gradient_step(other, groups[2], step=2, policy_version=2).metrics == expected
    assert torch.equal(torch.rand(3), drawn)
    for kept in ("_masters", "optimizer"):
        assert_same(getattr(one, kept).state_dict(), getattr(other, kept).state_dict())


def test_every_random_generator_resumes_from_its_saved_state() -> None:
    import random

    import numpy as np

    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(()))]

    draw()
    state = checkpoints.random_state(torch.device("cpu"))
    drawn = draw()
    checkpoints.seed_everything(1)
    checkpoints.restore_random_state(state, torch.device("cpu"))
    assert draw() == drawn


def test_weight_decay_of_a_resumed_run_is_what_its_settings_say(tmp_path: Path) -> None:
    trainee(settings(weight_decay=0.0)).save(tmp_path, step=1, policy_version=1, lease="", settings={})
    other = trainee(settings(weight_decay=0.5))
    other.restore(checkpoints.load(tmp_path / "step_1", model_name="test/model"))
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.5


# --- killed writers and full disks ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faults() -> DiskFaults:
    return DiskFaults()


def saved(subject: Trainee, folder: Path, step: int) -> None:
    subject.save(folder, step=step, policy_version=step, lease="", settings={})


def whole_step(folder: Path) -> int:
    newest = checkpoints.newest(folder)
    assert newest is not None
    state = checkpoints.load(newest, model_name="test/model")
    assert (newest / "model.safetensors").is_file()
    return state.marker.step


@pytest.mark.parametrize(
    "again",
    [
        pytest.param(False, id="a new step"),
        pytest.param(True, id="the same step again", marks=pytest.mark.extended("the same with a new step")),
    ],
)
def test_a_killed_writer_leaves_the_checkpoint_before_or_the_new_one(
    tmp_path: Path, faults: DiskFaults, again: bool
) -> None:
    subject = trainee(settings(keep_checkpoints=1))
    new = 1 if again else 2
    seen = set()
    for moment in itertools.count(1):
        folder = tmp_path / str(moment)
        saved(subject, folder, 1)
        try:
            with faults.failing(moment):
                saved(subject, folder, new)
        except Killed:
            checkpoints.tidy(folder)
            seen.add(whole_step(folder))
            assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
        else:
            break
        saved(subject, folder, 3)
        assert [path.name for path in folder.iterdir()] == ["step_3"]
    assert moment > 10
    assert seen == {1, new}


def test_a_full_disk_at_any_operation_leaves_the_previous_checkpoint_and_is_reported(
    tmp_path: Path, faults: DiskFaults
) -> None:
    subject = trainee(settings(keep_checkpoints=1))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for moment in itertools.count(1):
        folder = tmp_path / str(moment)
        saved(subject, folder, 1)
        refusals = []
        try:
            with faults.failing(moment, full):
                saved(subject, folder, 2)
        except CheckpointError as error:
            refusals.append(str(error))
        if faults.count < moment:
            break
        assert whole_step(folder) == (1 if refusals else 2)
        for refusal in refusals:
            assert f"{folder}/step_2: not saved: [Errno 28]" in refusal
            assert "step_1 is kept; make room" in refusal
            assert [path.name for path in folder.iterdir()] == ["step_1"]
    assert moment > 10


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    saved(trainee(), tmp_path, 1)
    suffixes = {path.suffix for path in (tmp_path / "step_1").rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors"}
    for path in (tmp_path / "step_1").glob("*.json"):
        json.loads(path.read_text())


# --- other readers ----------------------------------------------------------------------------------------------------


def in_a_fresh_interpreter(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout.strip()


def test_checkpoints_of_an_adapter_have_the_names_of_the_stock_trainer_too(tmp_path: Path) -> None:
    def write_adapter(folder: Path) -> None:
        (folder / "adapter_config.json").write_text("{}")

    def names() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    for step in (1, 2, 3):
        marker = CheckpointMarker(step=step, policy_version=step, model_name="m", bridge="lora_only")
        checkpoints.save(tmp_path, marker, write_adapter, keep=2)
    assert names() == ["adapter_step_2", "adapter_step_3", "step_2", "step_3"]
    assert (tmp_path / "adapter_step_3" / "adapter_config.json").read_text() == "{}"
    assert checkpoints.newest(tmp_path) == tmp_path / "step_3"
    marker = CheckpointMarker(step=4, policy_version=4, model_name="m", bridge="none")
    checkpoints.save(tmp_path, marker, lambda folder: None, keep=1)
    assert names() == ["step_4"]


@pytest.mark.slow
@pytest.mark.extended("test_a_saved_model_loads_again of the bridges")
def test_a_fresh_transformers_loads_the_model_and_a_fresh_peft_the_adapter(tmp_path: Path) -> None:
    whole = trainee()
    saved(whole, tmp_path / "whole", 1)
    small_model().save_pretrained(tmp_path / "base")
    model = add_lora(small_model(), LoraSettings(rank=4, alpha=8, dropout=0.0, target_modules=("q_proj", "v_proj")))
    save = saving(model, save_embedding_layers=False)
    adapted = Trainee(attached(model, is_shared=False, save=save), settings(bridge=LoraOnly()))
    gradient_step(adapted, trainable_batch(made_up_groups(0), 32, vocab_size=64), step=0, policy_version=0)
    adapted.write_weights()
    saved(adapted, tmp_path / "run", 1)
    printed = in_a_fresh_interpreter(
        "import torch; from peft import PeftModel; from transformers import AutoModelForCausalLM; "
        "torch.set_num_threads(1); "
        f"whole = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'whole/step_1')!r}); "
        "print(type(whole).__name__, repr(float(sum(p.double().sum() for p in whole.parameters())))); "
        f"base = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'base')!r}); "
        f"model = PeftModel.from_pretrained(base, {str(tmp_path / 'run/step_1')!r}).eval(); "
        "print(repr(float(model(torch.arange(3, 9)[None]).logits.double().sum())))"
    )
    [*_, total, logits] = printed.splitlines()
    own = float(sum(p.detach().double().sum() for p in whole.model.parameters()))
    assert total == f"LlamaForCausalLM {own!r}"
    with torch.no_grad():
        own = float(model.eval()(torch.arange(3, 9)[None]).logits.double().sum())
    assert float(logits) == pytest.approx(own, abs=1e-9)
    with model.disable_adapter(), torch.no_grad():
        assert abs(float(model(torch.arange(3, 9)[None]).logits.double().sum()) - own) > 1e-4
