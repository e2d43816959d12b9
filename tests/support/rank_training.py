"""A trainer of several ranks without servers: forked processes that train a small model on made-up batches by Gloo."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import start_forked
from safetensors.torch import load_file
from torch import Tensor
from training import made_up_groups, settings, small_model
from transformers import AutoModelForCausalLM, PreTrainedConfig

from grpo_engine.bridges import BridgeModel
from grpo_engine.bridges.placement.adapter import AdaptedModel
from grpo_engine.bridges.placement.mapped_parts import MappedPart
from grpo_engine.bridges.placement.own import OwnModel
from grpo_engine.bridges.protocol import BridgeContext, Placement
from grpo_engine.data.batching import Batch, make_batch
from grpo_engine.errors import CheckpointError
from grpo_engine.models import sharded
from grpo_engine.models.tiny_tokenizer import tiny_tokenizer
from grpo_engine.ranks.group import RankGroup
from grpo_engine.ranks.place import RankPlace
from grpo_engine.train.checkpointing import checkpoints
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.following import Finished, follow
from grpo_engine.train.main import bridge_context
from grpo_engine.train.step import gradient_step
from grpo_engine.train.trainee import Trainee
from grpo_engine.wire.bridge_file import BridgeFile

TRAINED, SHARED = "trained", "shared"
"""Folders of the model after the last step, and of what its files are linked to."""
METRICS = "metrics.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What the ranks of one trainer do together."""

    model: Path
    folder: Path
    """Of the checkpoints and the result."""
    num_ranks: int
    steps: range = range(3)
    """A start above 0 restores the checkpoint of that step; the last step's is saved."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    are_layers_apart: bool = True
    """Whether each layer is gathered by itself, as those of larger models, or all together, as small ones are."""
    num_groups: int = 3
    timeout_s: float = 60.0
    """Of a rank's wait for another."""
    is_stopped_early: bool = False
    """Whether rank 0 is stopped before it loads the model."""
    is_copied: bool = False
    """Whether the checkpoint is written in the background while another step is computed."""
    is_disk_full: bool = False
    """Whether a first save fails on rank 0, before the one that counts."""
    file: BridgeFile | None = None
    """Parts of the model in shared memory, one for each rank, which train there as mode shared_vllm."""
    next_file: BridgeFile | None = None
    """Of the server that takes the place of the first one after each step; the trainer saves between."""
    is_served: bool = False
    """Whether the parts are those of the inference server that the settings name."""
    device: str = "cpu"
    """Or `cuda`: each rank has a GPU of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What came of it."""

    parameters: dict[str, Tensor]
    """As `from_pretrained` would load them."""
    metrics: list[dict[str, float]]
    """Of each step."""


def make_model(
    folder: Path, *, config: PreTrainedConfig | None = None, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Save a small random model: a Llama with these changes, or one of this configuration."""
    torch.manual_seed(0)
    model = small_model(**changes) if config is None else AutoModelForCausalLM.from_config(config)
    model.to(dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def train_on_ranks(training: Training) -> Trained:
    """Train in processes of their own, one a rank."""
    run_ranks(training)
    return Trained(
        parameters={
            name: value
            for file in (training.folder / TRAINED).glob("*.safetensors")
            for name, value in load_file(file).items()
        },
        metrics=json.loads((training.folder / METRICS).read_text()),
    )


def run_ranks(training: Training) -> None:
    """Start a process for each rank, all of which exit with 0."""
    assert [process.exitcode for process in ended_ranks(training)] == [0] * training.num_ranks


def ended_ranks(training: Training) -> list[BaseProcess]:
    """Start a process for each rank, and wait until they have ended."""
    store = training.folder / f"store-{training.steps.start}"
    training.folder.mkdir(exist_ok=True)
    places = [
        None
        if training.num_ranks == 1
        else RankPlace(rank=rank, world_size=training.num_ranks, local_rank=rank, store_file=store)
        for rank in range(training.num_ranks)
    ]
    processes = [_start(training, place) for place in places]
    for process in processes:
        process.join()
    return processes


def _start(training: Training, place: RankPlace | None) -> BaseProcess:
    """A process of a rank; forked ones cannot use CUDA where a preloaded library has."""
    if training.device == "cpu":
        return start_forked(_train, training, place)
    process = multiprocessing.get_context("spawn").Process(target=_train, args=(training, place))
    process.start()
    return process


def batch_of(training: Training, step: int) -> Batch:
    """The batch of a step: the same for any number of ranks."""
    return make_batch(made_up_groups(step, groups=training.num_groups), seq_len=32)


def why_ended(training: Training, rank: int) -> str:
    """The error that ended a rank of several."""
    return (training.folder / f"error-{rank}.txt").read_text()


def _train(training: Training, place: RankPlace | None) -> None:
    try:
        _train_ranks(training, place)
    except Exception as error:
        if place is not None:
            (training.folder / f"error-{place.rank}.txt").write_text(f"{type(error).__name__}: {error}")
        raise


def _train_ranks(training: Training, place: RankPlace | None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if training.are_layers_apart:
        sharded.SMALL_LAYER_BYTES = 0  # in this process alone
    config = settings(**{"model_name": str(training.model), "lr": 1e-3, **training.settings})
    device = "cpu" if training.device == "cpu" else f"cuda:{place.local_rank if place else 0}"
    with closing(RankGroup(place, device=device, timeout_s=training.timeout_s)) as ranks:
        context = bridge_context(config.model_copy(update={"device": device}), training.folder, ranks=ranks)
        if ranks.leads:
            _lead(training, config, context, ranks)
        else:
            follow(config, config.bridge.rank_placement(context), ranks)


def _lead(training: Training, config: TrainConfig, context: BridgeContext, ranks: RankGroup) -> None:
    if training.is_stopped_early:
        with ranks.together(Finished()):
            return
    if training.is_served:
        with closing(config.bridge.build(context)) as bridge:
            attached = bridge.attach()
            trainee = Trainee(attached, config, ranks)
            first = attached.policy_version
            bridge.publish(first, trainee.write_weights)
            versions = itertools.count(first + 1)
            _train_parts(training, trainee, lambda: bridge.publish(next(versions), trainee.write_weights))
        return
    if training.file is not None:
        part = MappedPart(str(training.model), training.file, ranks)
        model = BridgeModel(
            **{"model": part.model, "is_shared": True, "policy_version": 0, "save": part.save},
            tensors=part.tensors_to_save,
            prepare_save=lambda: None if part.is_mapped else part.write(trainee.write_weights),
        )
        trainee = Trainee(model, config, ranks)
        _train_parts(training, trainee, lambda: _move(part, trainee, training))
        return
    if ranks.size > 1:
        placement: Placement = config.bridge.rank_placement(context)
    else:
        placement = AdaptedModel(context) if config.bridge.trains_adapter else OwnModel(context)
    model = BridgeModel(
        model=placement.load(), is_shared=False, policy_version=0, save=placement.save, tensors=placement.tensors
    )
    trainee = Trainee(model, config, ranks)
    save_path = training.folder / "checkpoints"
    metrics = _train_steps(training, trainee, save_path, trainee.write_weights)
    if training.is_disk_full:
        with pytest.raises(CheckpointError, match="no space"):
            _save_on_a_full_disk(trainee, save_path)
    if training.is_copied:
        seconds = trainee.begin_save(save_path, step=training.steps.stop, policy_version=0, lease="", settings={})
        gradient_step(trainee, batch_of(training, training.steps.stop), step=training.steps.stop, policy_version=0)
        trainee.write_weights()
        seconds.result()
    else:
        trainee.save(save_path, step=training.steps.stop, policy_version=0, lease="", settings={})
    for folder in (TRAINED, SHARED):
        shutil.rmtree(training.folder / folder, ignore_errors=True)
    (training.folder / TRAINED).mkdir()
    placement.write(training.folder / TRAINED, training.folder / SHARED)
    (training.folder / METRICS).write_text(json.dumps(metrics))
    with ranks.together(Finished()):
        pass


def _move(part: MappedPart, trainee: Trainee, training: Training) -> None:
    """Write the weights; into another server's memory if there is one."""
    if training.next_file is not None:
        part.release(is_kept=lambda tensor: not tensor.requires_grad)
        trainee.save(training.folder / "unmapped", step=1, policy_version=0, lease="", settings={})
        part.remap(training.next_file)
    part.write(trainee.write_weights)


def _train_parts(training: Training, trainee: Trainee, publish: Callable[[], object]) -> None:
    save_path = training.folder / "checkpoints"
    metrics = _train_steps(training, trainee, save_path, publish)
    folder = trainee.save(save_path, step=training.steps.stop, policy_version=0, lease="", settings={})
    shutil.rmtree(training.folder / TRAINED, ignore_errors=True)
    shutil.copytree(folder, training.folder / TRAINED, ignore=lambda _, names: [n for n in names if "trainer" in n])
    (training.folder / METRICS).write_text(json.dumps(metrics))
    with trainee.ranks.together(Finished()):
        pass


def _train_steps(
    training: Training, trainee: Trainee, save_path: Path, publish: Callable[[], object]
) -> list[dict[str, float]]:
    """Train and publish; the metrics of each step."""
    if training.steps.start:
        folder = save_path / f"step_{training.steps.start}"
        trainee.restore(checkpoints.load(folder, model_name=trainee.config.model_name))
        publish()
    metrics = []
    for step in training.steps:
        metrics.append(gradient_step(trainee, batch_of(training, step), step=step, policy_version=step).metrics)
        publish()
    return metrics


def _save_on_a_full_disk(trainee: Trainee, save_path: Path) -> None:
    def fail(folder: Path, tensors: Mapping[str, Tensor]) -> None:
        write(folder, tensors)
        raise OSError(errno.ENOSPC, "no space")

    write, trainee._save_model = trainee._save_model, fail
    try:
        trainee.save(save_path, step=1000, policy_version=0, lease="", settings={})
    finally:
        trainee._save_model = write
