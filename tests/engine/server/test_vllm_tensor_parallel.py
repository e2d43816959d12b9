"""A real vLLM of two processes, each with a part of the weights: every way in which a trainer updates it.

The tests share one server.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from serving import save_tiny_model, shift
from vllm_serving import HAS_GPU, Stack, assert_agreement, load, processes_below, serving_vllm

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = [
    pytest.mark.extended("test_vllm_parts.py has the parts, test_several_servers.py the transfer"),
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(HAS_GPU, reason="the trainer of this test would need a third GPU"),
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("parallel")
    model = save_tiny_model(folder / "model", seed=5)
    flags = ("--tensor-parallel-size", "2", "--receives-weights", "--enable-lora", "--logprobs-mode", "processed")
    with serving_vllm(model, folder, *flags, is_sharing=False) as started:
        yield started


@pytest.mark.parametrize("mode", ["broadcast", "none", "lora_only"])
def test_both_processes_serve_what_is_trained(mode: str, stack: Stack) -> None:
    with stack.server.client as client:
        client.post("/lora/unload").raise_for_status()
        body = {"path": str(stack.model), "policy_version": 0}
        client.post("/bridge/reload", json=body).raise_for_status()
    assert_agreement(stack, load(stack.model), version=0, n=8)
    with closing(stack.bridge({"mode": mode, **({"every_steps": 1} if mode == "none" else {})})) as bridge:
        model = bridge.attach().model.eval()
        for version in (1, 2):
            bridge.publish(version, shift(model, version))
            bridge.prepare_step()
            assert_agreement(stack, model, version=version, n=8)


def test_a_step_has_room_for_as_many_tokens_as_in_stock(stack: Stack) -> None:
    """Which is 2,048 a process on a CPU, and 8,192 on an H100."""
    assert "max_num_batched_tokens=4096" in stack.server.log.read_text()


def test_no_name_of_the_memory_of_its_process_groups_stays_in_shared_memory(stack: Stack) -> None:
    """Two files of 4 MB stayed in /dev/shm after every such server, also after one that ended in order."""
    mapped = set()
    for process in processes_below(stack.server.process.pid):
        lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        mapped |= {line.partition("/dev/shm/")[2] for line in lines if "-cpushm_" in line}
    assert len(mapped) == 2
    assert all(name.endswith(" (deleted)") for name in mapped), mapped
