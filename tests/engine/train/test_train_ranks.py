"""A trainer of several ranks computes what one rank computes, and they resume each other's checkpoints."""

from __future__ import annotations

import os
import pickle
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_training import Trained, Training, make_model, run_ranks, train_on_ranks
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save

from grpo_engine.errors import CheckpointError, PeerError
from grpo_engine.ranks.group import RankGroup, RanksFailed
from grpo_engine.train.checkpointing.sharded_state import FOLDER, MASTER, read_sharded
from grpo_engine.train.main import _closing
from grpo_engine.train.step import rank_metrics

NAMES = ("step_time", "wait_time")

ADAPTER = {"bridge": {"mode": "lora_restart"}, "lora_r": 4, "lora_dropout": 0.0}  # each rank drops others


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def assert_equal(one: Trained, several: Trained, tolerance: float = 1e-6) -> None:
    assert one.parameters.keys() == several.parameters.keys()
    for name, value in one.parameters.items():
        torch.testing.assert_close(
            several.parameters[name], value, atol=tolerance, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )
    for before, after in zip(one.metrics[-len(several.metrics) :], several.metrics, strict=True):
        assert of_training(after) == pytest.approx(of_training(before), rel=1e-3, abs=1e-6)


def of_training(metrics: dict[str, float]) -> dict[str, float]:
    """Those that do not depend on the number of ranks."""
    return {name: value for name, value in metrics.items() if not name.startswith("rank/")}


@pytest.mark.extended("test_two_ranks_resume_as_one_and_as_three_and_one_as_two")
def test_two_ranks_train_the_parameters_of_one_over_twenty_steps(model: Path, tmp_path: Path) -> None:
    def train(folder: str, num_ranks: int, **more: Any) -> Trained:
        return train_on_ranks(
            Training(model=model, folder=tmp_path / folder, num_ranks=num_ranks, steps=range(20), **more)
        )

    one = train("one", 1)
    assert_equal(one, train("two", 2))
    assert_equal(one, train("two of small layers", 2, are_layers_apart=False))


def test_two_ranks_resume_as_one_and_as_three_and_one_as_two(model: Path, tmp_path: Path) -> None:
    def train(folder: str, num_ranks: int, steps: range, **more: Any) -> Trained:
        return train_on_ranks(Training(model=model, folder=tmp_path / folder, num_ranks=num_ranks, steps=steps, **more))

    whole = train("whole", 1, range(6))
    two = train("two", 2, range(3), is_disk_full=True)  # which no rank waits for afterwards
    assert all({f"rank/{rank}/{name}" for rank in (0, 1) for name in NAMES} <= set(step) for step in two.metrics)
    train("one", 1, range(3))
    shutil.copytree(tmp_path / "two", tmp_path / "also two")
    for folder, num_ranks, are_layers_apart in (("two", 1, True), ("also two", 3, True), ("one", 2, False)):
        assert_equal(whole, train(folder, num_ranks, range(3, 6), are_layers_apart=are_layers_apart))


@pytest.mark.parametrize("settings", [{}, ADAPTER])
def test_a_rank_0_that_is_stopped_before_it_has_found_the_servers_ends_the_others_at_once(
    settings: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """They waited in the collective operations of loading for as long as `rank_timeout_s`, and then failed."""
    run_ranks(Training(model=model, folder=tmp_path / "two", num_ranks=2, is_stopped_early=True, settings=settings))


def test_two_ranks_train_the_adapter_of_one(model: Path, tmp_path: Path) -> None:
    settings = {**ADAPTER, "kl_coef": 0.1}

    def train(folder: str, num_ranks: int, **more: Any) -> Trained:
        steps, path = range(2), tmp_path / folder
        return train_on_ranks(
            Training(model=model, folder=path, num_ranks=num_ranks, steps=steps, settings=settings, **more)
        )

    one, two = train("one", 1), train("two", 2)
    assert_equal(one, two)
    assert_equal(one, train("two of small layers", 2, are_layers_apart=False))
    assert two.metrics[1]["grpo/kl"] > 0  # from the base model, the adapter switched off


@pytest.mark.extended("test_two_ranks_train_the_adapter_of_one")
def test_two_ranks_train_the_adapter_of_one_over_twenty_steps(model: Path, tmp_path: Path) -> None:
    one, two = (
        train_on_ranks(Training(model=model, folder=tmp_path / str(n), num_ranks=n, steps=range(20), settings=ADAPTER))
        for n in (1, 2)
    )
    assert_equal(one, two)
    untrained = load_file(model / "model.safetensors")
    changed = {name for name, value in two.parameters.items() if not torch.equal(value, untrained[name])}
    assert changed == {f"model.layers.{n}.self_attn.{module}_proj.weight" for n in (0, 1) for module in "qv"}


@pytest.mark.extended("test_two_ranks_train_the_adapter_of_one")
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_two_ranks_resume_the_adapter_as_one_and_as_three(optimizer: str, model: Path, tmp_path: Path) -> None:
    def train(folder: str, num_ranks: int, steps: range) -> Trained:
        settings = {**ADAPTER, "optimizer": optimizer, "kl_coef": 0.1}
        return train_on_ranks(
            Training(model=model, folder=tmp_path / folder, num_ranks=num_ranks, steps=steps, settings=settings)
        )

    whole = train("whole", 1, range(6))
    train("two", 2, range(3))
    shutil.copytree(tmp_path / "two", tmp_path / "also two")
    for folder, num_ranks in (("two", 1), ("also two", 3)):
        assert_equal(whole, train(folder, num_ranks, range(3, 6)))
    one, three = (
        load_file(tmp_path / folder / "checkpoints/step_6/adapter_model.safetensors")
        for folder in ("whole", "also two")
    )
    assert one.keys() == three.keys()
    for name, value in one.items():
        torch.testing.assert_close(three[name], value, atol=1e-6, rtol=0)


@pytest.mark.extended("test_two_ranks_resume_as_one_and_as_three_and_one_as_two")
@pytest.mark.parametrize(
    ("settings", "num_groups"),
    [
        pytest.param({"loss": "gspo", "max_grad_norm": 0.01}, 3, id="gspo, clipped gradients"),
        pytest.param({"loss": "dapo", "micro_batch_tokens": 40, "num_iterations": 2}, 3, id="dapo, two updates"),
        pytest.param({"loss": "dr_grpo", "batch_size": 1, "entropy_coef": 0.01}, 1, id="dr_grpo, one group"),
        pytest.param({"loss": "bnpo", "kl_coef": 0.1, "drop_equal_groups": True}, 3, id="bnpo with a reference"),
        pytest.param({"loss": "cispo", "gradient_checkpointing": True}, 3, id="cispo, recomputing layers"),
        pytest.param({**ADAPTER, "gradient_checkpointing": True, "num_iterations": 2}, 3, id="an adapter, two updates"),
        pytest.param({"identical_data": True, "loss": "dapo", "kl_coef": 0.1}, 3, id="identical data on both"),
        pytest.param(
            {"sharding_strategy": "shard_grad_op", "micro_batch_tokens": 40, "num_iterations": 2, "kl_coef": 0.1},
            3,
            id="layers gathered once a step",
        ),
        pytest.param(
            {**ADAPTER, "sharding_strategy": "shard_grad_op", "micro_batch_tokens": 40},
            3,
            id="an adapter on layers gathered once a step",
        ),
    ],
)
def test_settings_mean_the_same_on_two_ranks(
    settings: dict[str, Any], num_groups: int, model: Path, tmp_path: Path
) -> None:
    one, two = (
        train_on_ranks(
            Training(model=model, folder=tmp_path / str(n), num_ranks=n, settings=settings, num_groups=num_groups)
        )
        for n in (1, 2)
    )
    assert_equal(one, two)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"num_iterations": 2, "gradient_checkpointing": True}, id="all parameters"),
        pytest.param({**ADAPTER, "kl_coef": 0.1}, id="an adapter"),
    ],
)
def test_two_ranks_add_up_the_gradients_of_small_layers_once_for_several_micro_batches(
    settings: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    def train(num_ranks: int) -> Trained:
        more = {**settings, "loss": "dapo", "micro_batch_tokens": 40}
        path = tmp_path / str(num_ranks)
        return train_on_ranks(
            Training(model=model, folder=path, num_ranks=num_ranks, settings=more, are_layers_apart=False)
        )

    assert_equal(train(1), train(2))


def test_a_rank_waits_as_long_as_it_is_longer_in_collectives_than_the_slowest() -> None:
    metrics = rank_metrics([[2.0, 0.25], [2.0, 1.25], [1.5, 0.5]])
    assert [metrics[f"rank/{rank}/wait_time"] for rank in range(3)] == [0.0, 1.0, 0.25]
    assert [metrics[f"rank/{rank}/step_time"] for rank in range(3)] == [2.0, 2.0, 1.5]


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made",)


@pytest.mark.parametrize(
    "content",
    [pickle.dumps(Harmful()), b"", pickle.dumps({}), b"\x80\x04cos\nsystem\n."],
    ids=["a call", "nothing", "a dict", "a function"],
)
def test_metadata_that_no_checkpoint_has_is_refused_and_runs_no_code(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer/.metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata: unreadable .*; remove .* to resume from the previous"):
        read_sharded(tmp_path, {}, {}, RankGroup())
    assert not (tmp_path / "made").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_with_a_pickled_object_in_place_of_a_master_is_refused_and_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save({f"{MASTER}w": Harmful()}, checkpoint_id=tmp_path / FOLDER, no_dist=True)
    with pytest.raises(CheckpointError, match=r"\.metadata: unreadable .* masters/w is no tensor"):
        read_sharded(tmp_path, {"w": torch.zeros(2)}, {"w": torch.zeros(2)}, RankGroup())
    assert not (tmp_path / "made").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_metadata_of_a_rank_is_never_unpickled_though_torch_cannot_read_those_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save({f"{MASTER}w": torch.ones(2)}, checkpoint_id=tmp_path / FOLDER, no_dist=True)
    whole = tmp_path / FOLDER / ".metadata"
    metadata = pickle.loads(whole.read_bytes())
    metadata.storage_meta = 1  # torch sets its attributes
    whole.write_bytes(pickle.dumps(metadata))
    (tmp_path / FOLDER / "__0.metadata").write_bytes(pickle.dumps(Harmful()))
    masters, _ = read_sharded(tmp_path, {"w": torch.zeros(2)}, {"w": torch.zeros(2)}, RankGroup())
    assert masters["w"].tolist() == [1, 1]
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("error", "closed"),
    [(None, ["checkpoints", "group"]), (PeerError("a server"), ["checkpoints", "group"]), (RanksFailed("rank 1"), [])],
    ids=["the end", "an error", "a rank that has exited"],
)
def test_a_rank_waits_for_no_other_that_has_exited_and_leaves_the_checkpoint_that_servers_load(
    error: Exception | None, closed: list[str]
) -> None:
    done: list[str] = []
    with (
        nullcontext() if error is None else pytest.raises(type(error)),
        _closing(lambda: done.append("checkpoints"), lambda: done.append("group")),
    ):
        if error is not None:
            raise error
    assert done == closed
