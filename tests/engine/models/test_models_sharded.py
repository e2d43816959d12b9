"""How often the layers of a sharded model are gathered and reduced, counted in a group that transfers nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import small_model

from grpo_engine.models import sharded
from grpo_engine.models.sharded import as_forward, begin_micro_batch, shard_model

MICRO_BATCHES, LAYERS = 3, 2


@pytest.fixture
def _two_ranks() -> Iterator[None]:
    """A group of two, whose operations end at once and transfer nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_two_ranks")
@pytest.mark.parametrize(
    ("keeps_gathered", "gathers_of_a_layer"),
    [
        pytest.param(False, 2 * MICRO_BATCHES, id="full_shard: in each forward and backward pass"),
        pytest.param(True, 1, id="shard_grad_op: once a step"),
    ],
)
def test_how_often_a_layer_is_gathered_in_a_step_of_several_micro_batches(
    keeps_gathered: bool, gathers_of_a_layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded, "SMALL_LAYER_BYTES", 0)
    operations = Counter[str]()

    @contextmanager
    def counted(operation: str, device: str, *, then: str, then_backward: str) -> Iterator[None]:
        operations[operation] += 1
        yield

    tokens = torch.arange(12).view(MICRO_BATCHES, 1, 4)
    model, mesh = small_model(), init_device_mesh("cpu", (2,))
    shard_model(model, mesh, shard_dtype=torch.float32, reshard_after_forward=not keeps_gathered, around=counted)
    operations.clear()
    forward = as_forward(model, lambda rows: model(input_ids=rows, labels=rows).loss * 1)
    for step in (1, 2):
        for number, rows in enumerate(tokens):
            begin_micro_batch(model, is_last=number + 1 == MICRO_BATCHES, keeps_gathered=keeps_gathered)
            forward(rows).backward()
        for layer in range(LAYERS):
            assert operations[f"the all-gather of layer {layer}"] == step * gathers_of_a_layer
            assert operations[f"the reduce-scatter of layer {layer}"] == step * MICRO_BATCHES
