"""A real vLLM of two processes, and a trainer of two ranks on the very memory of their parts.

The tests share one server.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked import start_forked
from rank_training import TRAINED, Training, train_on_ranks
from serving import save_tiny_model
from vllm_serving import HAS_GPU, Stack, assert_agreement, load, segments_now, serving_vllm

from grpo_engine.bridges.memory.bridge_files import read_bridge_file
from grpo_engine.bridges.memory.shared_tensors import map_tensors
from grpo_engine.bridges.memory.weight_lock import WeightLock
from grpo_engine.wire.bridge_file import BridgeFile

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
    model = save_tiny_model(folder / "model", seed=5, tied=True)
    flags = ("--tensor-parallel-size", "2", "--logprobs-mode", "processed")
    with serving_vllm(model, folder, *flags) as started:
        yield started
        own = read_bridge_file(folder / "bridge.json").fence_segment.removesuffix("-fence")
    assert not [name for name in segments_now() if own in name]  # others are of tests beside this one


def test_what_two_ranks_train_is_served_at_once(stack: Stack, tmp_path: Path) -> None:
    untrained = load(stack.model)
    before = assert_agreement(stack, untrained, version=0, n=8)
    bridge = {"mode": "shared_vllm", "config_path": str(stack.bridge_file)}
    settings = {"bridge": bridge, "server_urls": [stack.server.url], "lr": 0.05}
    train_on_ranks(Training(model=stack.model, folder=tmp_path / "two", num_ranks=2, settings=settings, is_served=True))
    trained = load(tmp_path / "two" / TRAINED)
    after = assert_agreement(stack, trained, version=3, n=8)
    assert after.text != before.text


def test_weights_that_a_killed_trainer_left_half_written_are_loaded_again_in_every_process(
    stack: Stack, tmp_path: Path
) -> None:
    file = read_bridge_file(stack.bridge_file)
    process = start_forked(_write_half, file)
    process.join()
    with stack.server.client as client:
        assert client.get("/health").status_code == 503
    settings = {"bridge": {"mode": "shared_vllm", "config_path": str(stack.bridge_file)}}
    settings |= {"server_urls": [stack.server.url], "lr": 0.05}
    training = Training(
        **{"model": stack.model, "num_ranks": 2, "settings": settings, "is_served": True}, folder=tmp_path / "two"
    )
    train_on_ranks(training)
    answer = assert_agreement(stack, load(tmp_path / "two" / TRAINED), version=3, n=8)
    assert answer.policy_version == 3


def _write_half(file: BridgeFile) -> None:
    """As a trainer that is killed when one of its ranks has written and the other has not."""
    with WeightLock.attach(file.fence_segment).writing(17):
        for tensor in map_tensors(file.parts[1]).values():
            tensor.fill_(torch.nan)
        os.kill(os.getpid(), signal.SIGKILL)
