"""A real vLLM that sleeps while a step is computed: on a GPU its memory is free meanwhile, on a CPU it only waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from serving import save_tiny_model, shift
from vllm_serving import HAS_GPU, LONG_PROMPT, Stack, assert_agreement, assert_close, logprobs_of, serving_vllm

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.extended("tests/engine/bridges/test_turns.py and test_bridges_contract.py, with the torch engine"),
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """vLLM in sleep mode."""
    folder = tmp_path_factory.mktemp("turns")
    flags = ("--logprobs-mode", "processed", "--enable-sleep-mode")
    with serving_vllm(save_tiny_model(folder / "model", seed=1), folder, *flags, is_sharing=False) as stack:
        yield stack


def test_vllm_serves_what_it_is_handed_after_each_sleep(stack: Stack) -> None:
    with closing(stack.bridge({"mode": "turns", "check_every": 1})) as bridge:
        model = bridge.attach().model.eval()
        for version in (1, 2, 3):
            bridge.prepare_step()
            with stack.server.client as client:
                assert client.get("/bridge/info").json()["sleep_state"] == "asleep"
                assert client.get("/health").json()["engine"] == "asleep"
            update = bridge.publish(version, shift(model, version))
            assert update is not None
            if HAS_GPU:
                assert update.metrics()["sync/freed_gb"] > 1  # of the tenth of the card that vLLM has
            assert_agreement(stack, model, version=version)


def test_every_token_of_requests_that_slept_comes_from_its_reported_version(stack: Stack) -> None:
    expected: dict[int, dict[tuple[int, ...], torch.Tensor]] = {}
    answers: list[dict] = []
    is_over = threading.Event()

    def send_requests() -> None:
        body = {"n": 2, "max_tokens": 50, "ignore_eos": True, "logprobs": 0}
        while not is_over.is_set():
            answers.append(stack.server.generate(prompt={"prompt_token_ids": LONG_PROMPT}, **body))

    with closing(stack.bridge({"mode": "turns"})) as bridge:
        model = bridge.attach().model.eval()
        writers = [shift(model, 20), shift(model, 21)]
        bridge.publish(10, writers[0])
        threads = [threading.Thread(target=send_requests) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            version = 10
            while not any(len(set(each)) > 1 for answer in list(answers) for each in answer["policy_versions"]):
                version += 1
                bridge.prepare_step()
                bridge.publish(version, writers[version % 2])
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        completions = [
            completion
            for answer in answers
            for completion in zip(answer["token_ids"], answer["logprobs"], answer["policy_versions"], strict=True)
        ]
        for which in (0, 1):
            writers[which]()
            expected[which] = {
                tuple(tokens): logprobs_of(model, LONG_PROMPT, tokens, 1) for tokens, _, _ in completions
            }
        for tokens, entries, versions in completions:
            values = torch.tensor([next(iter(position[0].values())) for position in entries])
            by_version = torch.stack([expected[which][tuple(tokens)] for which in (0, 1)])
            assert_close(values, by_version[torch.tensor(versions) % 2, torch.arange(len(tokens))])
            assert versions == sorted(versions)


def test_a_vllm_that_sleeps_ends_at_once(stack: Stack) -> None:
    bridge = stack.bridge({"mode": "turns"})
    bridge.attach()
    assert stack.server.stop() == 0
    bridge.close()
