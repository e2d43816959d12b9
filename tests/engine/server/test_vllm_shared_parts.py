"""A real vLLM of two processes, and a trainer of two ranks on the very memory of their parts.

The tests share one server.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_training import TRAINED, Training, train_on_ranks
from serving import save_tiny_model
from vllm_serving import HAS_GPU, Stack, assert_agreement, load, segments_now, serving_vllm

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = [
    pytest.mark.extended("test_vllm_parts.py has the parts, test_train_parts.py the training"),
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(HAS_GPU, reason="the server and the trainer of this test would need two GPUs"),
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("parallel")
    before = segments_now()
    model = save_tiny_model(folder / "model", seed=5, tied=True)
    flags = ("--tensor-parallel-size", "2", "--logprobs-mode", "processed")
    with serving_vllm(model, folder, *flags) as started:
        yield started
    assert segments_now() == before


def test_what_two_ranks_train_is_served_at_once(stack: Stack, tmp_path: Path) -> None:
    untrained = load(stack.model)
    before = assert_agreement(stack, untrained, version=0, n=8)
    bridge = {"mode": "shared_vllm", "config_path": str(stack.bridge_file)}
    settings = {"bridge": bridge, "server_urls": [stack.server.url], "lr": 0.05}
    train_on_ranks(Training(model=stack.model, folder=tmp_path / "two", num_ranks=2, settings=settings, is_served=True))
    trained = load(tmp_path / "two" / TRAINED)
    after = assert_agreement(stack, trained, version=3, n=8)
    assert after.text != before.text
