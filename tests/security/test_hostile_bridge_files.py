"""Bridge files whose numbers no server writes: mapping them fails with an error that names what is wrong."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
import torch

from grpo_engine.bridges.memory.shared_tensors import export_tensors, map_tensors, unlink_segments
from grpo_engine.errors import BridgeError
from grpo_engine.wire.bridge_file import SharedTensor


@pytest.fixture
def weight() -> Iterator[SharedTensor]:
    """A matrix of 3 × 5 in a segment."""
    segment = f"grpo-test-{secrets.token_hex(4)}-weights"
    manifest, _ = export_tensors({"weight": torch.zeros(3, 5)}, segment)
    yield manifest["weight"]
    unlink_segments([segment])


@pytest.mark.parametrize("layout", [
    {"stride": (-5, 1)}, {"stride": (5, 1000)}, {"stride": (5,)}, {"stride": (2**70, 1)}, {"stride": ()},
    {"shape": (-3, 5)}, {"shape": (-3, -5)}, {"shape": (0, 2**70)},
])  # fmt: skip
def test_a_stride_or_shape_that_no_tensor_has_is_an_error_of_the_bridge(
    weight: SharedTensor, layout: dict[str, tuple[int, ...]]
) -> None:
    with pytest.raises(BridgeError, match=r"no tensor has shape .* restart the inference server"):
        map_tensors({"weight": weight.model_copy(update=layout)})
