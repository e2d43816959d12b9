"""One contract for every mode: a published version is served completely, and never an older or half-written one."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import own_transport
import pytest
import torch
from bridging import (
    MODES,
    PROMPT,
    SERVER_FLAGS,
    Serving,
    assert_agreement,
    bridge_context,
    bridge_to,
    served_logprobs,
    serving,
)
from serving import model_logprobs, save_tiny_model, shift
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_engine.bridges import BY_MODE, Bridge
from grpo_engine.bridges.transport.saving import own_tensors

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=MODES, ids=lambda settings: settings["mode"])
def settings(request: pytest.FixtureRequest) -> dict[str, object]:
    return dict(request.param)


def test_what_is_published_is_served(server: Serving, bridge: Bridge) -> None:
    attached = bridge.attach()
    model = attached.model.eval()
    assert attached.policy_version == 0
    bridge.poll_server()  # as while a batch is awaited: a server that sleeps during steps wakes
    assert_agreement(server.now, model, 0)
    _, tokens, before = served_logprobs(server.now)
    with server.now.client as client:
        num_updates = client.get("/bridge/info").json()["update_count"]
    for version in (1, 2, 3):
        bridge.publish(version, shift(model, version))
        assert_agreement(server.now, model, version)
    assert (model_logprobs(model, PROMPT, tokens) - before).abs().max() > 0.05
    with server.now.client as client:
        info = client.get("/bridge/info").json()
    assert (info["policy_version"], info["paused"]) == (3, False)
    assert info["update_count"] == num_updates + 3
    assert info["last_update_time"] > 0
    bridge.prepare_step()
    bridge.poll_server()
    assert_agreement(server.now, model, 3)


def test_no_answer_mixes_two_versions(server: Serving, bridge: Bridge) -> None:
    attached = bridge.attach()
    model = attached.model.eval()
    writers = [shift(model, 1), shift(model, 2)]
    bridge.publish(0, writers[0])
    fixed = server.now.generate(prompt={"prompt_token_ids": PROMPT}, n=4, max_tokens=8, logprobs=0)["token_ids"]
    expected: list[list[torch.Tensor]] = []
    for write in writers:
        write()
        with attached.unmerged():
            expected.append([model_logprobs(model, PROMPT, tokens[:-1]) for tokens in fixed])
    bridge.publish(2, writers[0])
    answers: list[dict] = []
    is_over = threading.Event()

    def send_requests(tokens: list[int]) -> None:
        while not is_over.is_set():
            body = {"prompt": {"prompt_token_ids": PROMPT + tokens[:-1]}, "prompt_logprobs": 0, "max_tokens": 4}
            answers.append({"tokens": tokens, **server.now.generate(**body, logprobs=0)})

    threads = [threading.Thread(target=send_requests, args=(tokens,)) for tokens in fixed]
    for thread in threads:
        thread.start()
    try:
        for version in range(3, 200):
            bridge.publish(version, writers[version % 2])
            if version > 18 and len({answer["policy_version"] for answer in answers}) > 3:
                break
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert len({answer["policy_version"] for answer in answers}) > 3
    for answer in answers:
        which, index = answer["policy_version"] % 2, fixed.index(answer["tokens"])
        entries = answer["prompt_logprobs"][len(PROMPT) :]
        values = torch.tensor([next(iter(entry.values())) for entry in entries])
        torch.testing.assert_close(values, expected[which][index], atol=1e-4, rtol=0)
        assert len(set(answer["policy_versions"][0])) == 1


def test_a_restarted_server_gets_the_current_weights_before_the_next_batch(server: Serving, bridge: Bridge) -> None:
    model = bridge.attach().model.eval()
    bridge.publish(7, shift(model, 1))
    assert server.end() == 0
    bridge.poll_server()  # never waits
    server.start()
    bridge.prepare_step()
    bridge.poll_server()
    assert_agreement(server.now, model, 7)
    bridge.publish(8, shift(model, 2))
    assert_agreement(server.now, model, 8)


def test_a_saved_model_loads_again(bridge: Bridge, tmp_path: Path) -> None:
    attached = bridge.attach()
    bridge.publish(1, shift(attached.model, 1))
    attached.save(tmp_path / "saved", attached.tensors() if attached.tensors else own_tensors(attached.model))
    expected = model_logprobs(attached.model.eval(), PROMPT, [40, 50, 60])
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
    torch.testing.assert_close(model_logprobs(again, PROMPT, [40, 50, 60]), expected, atol=1e-4, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").eos_token_id == 2


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of tied embeddings."""
    return save_tiny_model(tmp_path_factory.mktemp("tied") / "model", seed=1, tied=True)


@pytest.fixture(scope="module")
def tied_for_most(tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server of it for all modes whose servers stay awake."""
    flags = ("--shared-weights", "--enable-lora", "--receives-weights")
    with serving(tied_model, tmp_path_factory.mktemp("tied-server"), *flags) as server:
        yield server


@pytest.fixture
def tied(
    settings: dict[str, object], request: pytest.FixtureRequest, tied_model: Path, tmp_path: Path
) -> Iterator[Serving]:
    """A server of it for this mode."""
    mode = str(settings["mode"])
    if not BY_MODE[mode].takes_turns:
        yield request.getfixturevalue("tied_for_most")
        return
    with serving(tied_model, tmp_path, *SERVER_FLAGS[mode]) as server:
        yield server


def test_tied_embeddings_stay_tied(tied: Serving, tmp_path: Path, settings: dict[str, object]) -> None:
    tied.reset()
    with closing(bridge_to(tied, settings, tmp_path)) as bridge:
        model = bridge.attach().model.eval()
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
        bridge.publish(1, shift(model, 1))
        assert_agreement(tied.now, model, 1)


def test_a_transport_of_ones_own_is_one_file(model_folder: Path, tmp_path: Path) -> None:
    with serving(model_folder, tmp_path) as server:
        for keeps_contract in (
            test_what_is_published_is_served,
            test_a_restarted_server_gets_the_current_weights_before_the_next_batch,
        ):
            server.reset()
            context = bridge_context(server.model, server.url, tmp_path)
            with closing(own_transport.Folder().build(context)) as bridge:
                keeps_contract(server, bridge)


def test_bfloat16_weights_are_shared_as_they_are(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(model_folder, tmp_path, "--shared-weights", dtype="bfloat16") as server:
        bridge = bridge_to(server, "shared_vllm", tmp_path, dtype="float32")
        model = bridge.attach().model.eval()
        assert model.dtype == torch.bfloat16
        assert "dtype float32 has no effect: the weights are the server's, in bfloat16" in caplog.text
        bridge.publish(1, shift(model, 1))
        _, tokens, values = served_logprobs(server.now)
        expected = model_logprobs(model, PROMPT, tokens)
        assert math.isclose((values - expected).abs().mean(), 0, abs_tol=0.05)
        bridge.close()
