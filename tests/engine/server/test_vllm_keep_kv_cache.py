"""Completions of a real vLLM that go on over a weight update with the keys and values that they have."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from serving import model_logprobs, save_tiny_model, shift
from vllm_serving import LONG_PROMPT, Stack, assert_agreement, assert_close, counter_of, segments_now, serving_vllm

from grpo_engine.bridges.memory.shared_tensors import SEGMENT_PREFIX, unlink_segments

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.extended("test_vllm_engine.py: the same update with the cache computed again"),
    pytest.mark.timeout(600),
]
RUN = f"vllmkeep{os.getpid()}"


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("keeping")
    model = save_tiny_model(folder / "model", seed=1)
    flags = ("--logprobs-mode", "processed", "--keep-kv-cache", "--max-num-seqs", "4")
    try:
        with serving_vllm(model, folder, *flags, environment={"GRPO_TUI_RUN": RUN}) as stack:
            yield stack
    finally:
        unlink_segments(name for name in segments_now() if name.startswith(f"{SEGMENT_PREFIX}{RUN}-"))


def test_running_completions_keep_their_cache_and_later_ones_read_none_of_it(keeping: Stack) -> None:
    bridge = keeping.bridge({"mode": "shared_vllm"})
    model = bridge.attach().model.eval()
    writers = [shift(model, 20), shift(model, 21)]
    bridge.publish(1, writers[1])
    answers: list[dict] = []
    body = {"prompt": {"prompt_token_ids": LONG_PROMPT}, "n": 4, "max_tokens": 150, "ignore_eos": True, "logprobs": 0}
    request = threading.Thread(target=lambda: answers.append(keeping.server.generate(**body)))
    before = counter_of(keeping, "vllm:generation_tokens_total")
    request.start()
    while counter_of(keeping, "vllm:generation_tokens_total") == before:
        pass
    bridge.publish(2, writers[0])
    request.join()
    [answer] = answers
    assert {version for versions in answer["policy_versions"] for version in versions} == {1, 2}
    assert counter_of(keeping, "vllm:num_preemptions_total") == 0
    assert_agreement(keeping, model, version=2, prompt=LONG_PROMPT)
    bridge.close()


def test_a_prompt_that_waited_for_a_place_reads_no_keys_of_earlier_weights(keeping: Stack) -> None:
    bridge = keeping.bridge({"mode": "shared_vllm"})
    model = bridge.attach().model.eval()
    writers = [shift(model, 20), shift(model, 21)]
    bridge.publish(3, writers[1])
    prompt = LONG_PROMPT[:140]  # longer than a block of the prefix cache
    body = {"prompt": {"prompt_token_ids": prompt}, "n": 5, "max_tokens": 110, "ignore_eos": True, "logprobs": 0}
    with ThreadPoolExecutor() as pool:
        before = counter_of(keeping, "vllm:generation_tokens_total")
        asked = pool.submit(keeping.server.generate, **body)  # of the five completions four have a place
        while counter_of(keeping, "vllm:generation_tokens_total") == before:
            pass
        bridge.publish(4, writers[0])
        answer = asked.result()
    [waited] = [number for number, versions in enumerate(answer["policy_versions"]) if set(versions) == {4}]
    values = torch.tensor([next(iter(each[0].values())) for each in answer["logprobs"][waited]])
    assert_close(values, model_logprobs(model, prompt, answer["token_ids"][waited]))
    bridge.close()
