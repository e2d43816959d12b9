"""Staging memory of a size that no trainer has: a server that wakes refuses it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from grpo_engine.bridges.memory.shared_names import staging_name
from grpo_engine.bridges.memory.shared_tensors import export_tensors, unlink_segments
from grpo_engine.errors import BridgeError
from grpo_engine.server import staged
from grpo_engine.server.receiving import Part
from grpo_engine.server.staged import StagedReceiver
from grpo_engine.wire.bridge_file import SharedTensor
from grpo_engine.wire.inference import StagedWeights, TensorShape, WakeRequest


@pytest.fixture
def memory() -> Iterator[SharedTensor]:
    name = staging_name(f"staging{os.getpid()}")
    described, _ = export_tensors({"staging": torch.zeros(4)}, name)
    yield described["staging"]
    unlink_segments([name])


@pytest.mark.timeout(30)
@pytest.mark.parametrize("num_elements", [0, 1])
def test_staging_memory_that_would_be_filled_for_ever_is_refused(
    num_elements: int, memory: SharedTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged, "_MOST_CONTENTS", 8)
    small = memory.model_copy(update={"shape": (num_elements,)})
    layers = [[TensorShape(name="w", shape=(9,))]]
    parts = {"w": Part(torch.zeros(9))}
    receiver = StagedReceiver()
    with pytest.raises(BridgeError, match=f"staging memory of {num_elements} elements: too small"):
        receiver.begin(WakeRequest(owner_pid=os.getpid(), staged=StagedWeights(memory=small, layers=layers)), parts)
    receiver.begin(WakeRequest(owner_pid=os.getpid(), staged=StagedWeights(memory=memory, layers=layers)), parts)
    receiver.close()
