"""One contract for every mode: a published version is served completely, and never an older or half-written one."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bridging import MODES, PROMPT, SERVER_FLAGS, assert_agreement, served_logprobs, stack
from serving import model_logprobs, our_segments, running_server, shift

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one_thread_and_nothing_left() -> Iterator[None]:
    torch.set_num_threads(1)
    before = our_segments()
    yield
    assert our_segments() == before


@pytest.mark.parametrize("settings", MODES, ids=lambda s: str(s["mode"]))
def test_what_is_published_is_served(tmp_path: Path, settings: dict[str, object]) -> None:
    with stack(tmp_path, settings) as (server, bridge):
        attached = bridge.attach()
        model = attached.model.eval()
        assert attached.policy_version == 0
        assert_agreement(server, model, 0)
        _, tokens, before = served_logprobs(server)
        for version in (1, 2, 3):
            bridge.publish(version, shift(model, version))
            assert_agreement(server, model, version)
        assert (model_logprobs(model, PROMPT, tokens) - before).abs().max() > 0.05
        with server.client as client:
            info = client.get("/bridge/info").json()
        assert (info["policy_version"], info["paused"]) == (3, False)
        assert info["update_count"] == 3
        assert info["last_update_time"] > 0
        bridge.ensure_current()
        assert_agreement(server, model, 3)


@pytest.mark.parametrize("settings", MODES, ids=lambda s: str(s["mode"]))
def test_no_answer_mixes_two_versions(tmp_path: Path, settings: dict[str, object]) -> None:
    with stack(tmp_path, settings) as (server, bridge):
        attached = bridge.attach()
        model = attached.model.eval()
        writers = [shift(model, 1), shift(model, 2)]
        bridge.publish(0, writers[0])
        fixed = server.generate(prompt={"prompt_token_ids": PROMPT}, n=4, max_tokens=8, logprobs=0)["token_ids"]
        expected: list[list[torch.Tensor]] = []
        for which in (0, 1):
            writers[which]()
            with attached.unmerged():
                expected.append([model_logprobs(model, PROMPT, tokens[:-1]) for tokens in fixed])
        bridge.publish(2, writers[0])
        answers: list[dict] = []
        is_over = threading.Event()

        def hammer(tokens: list[int]) -> None:
            while not is_over.is_set():
                body = {"prompt": {"prompt_token_ids": PROMPT + tokens[:-1]}, "prompt_logprobs": 0, "max_tokens": 4}
                answers.append({"tokens": tokens, **server.generate(**body, logprobs=0)})

        hammers = [threading.Thread(target=hammer, args=(tokens,)) for tokens in fixed]
        for thread in hammers:
            thread.start()
        try:
            for version in range(3, 19):
                bridge.publish(version, writers[version % 2])
        finally:
            is_over.set()
            for thread in hammers:
                thread.join()
        assert len({answer["policy_version"] for answer in answers}) > 3
        for answer in answers:
            which, index = answer["policy_version"] % 2, fixed.index(answer["tokens"])
            entries = answer["prompt_logprobs"][len(PROMPT) :]
            values = torch.tensor([next(iter(entry.values())) for entry in entries])
            torch.testing.assert_close(values, expected[which][index], atol=1e-4, rtol=0)
            assert len(set(answer["policy_versions"][0])) == 1


@pytest.mark.parametrize("settings", MODES, ids=lambda s: str(s["mode"]))
def test_a_restarted_server_gets_the_current_weights_before_the_next_batch(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    with stack(tmp_path, settings) as (server, bridge):
        model = bridge.attach().model.eval()
        bridge.publish(7, shift(model, 1))
        assert server.stop() == 0
        bridge.poll_server()  # never waits
        port = int(server.url.rsplit(":", 1)[1])
        flags = ("--bridge-file", str(tmp_path / "bridge.json"), *SERVER_FLAGS[str(settings["mode"])])
        with running_server(tmp_path / "model", *flags, folder=tmp_path, port=port) as again:
            bridge.ensure_current()
            assert_agreement(again, model, 7)
            bridge.publish(8, shift(model, 2))
            assert_agreement(again, model, 8)


@pytest.mark.parametrize("settings", MODES, ids=lambda s: str(s["mode"]))
def test_tied_embeddings_stay_tied(tmp_path: Path, settings: dict[str, object]) -> None:
    with stack(tmp_path, settings, tied=True) as (server, bridge):
        model = bridge.attach().model.eval()
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
        bridge.publish(1, shift(model, 1))
        assert_agreement(server, model, 1)


@pytest.mark.parametrize("settings", MODES, ids=lambda s: str(s["mode"]))
def test_a_saved_model_loads_again(tmp_path: Path, settings: dict[str, object]) -> None:
    with stack(tmp_path, settings) as (_, bridge):
        attached = bridge.attach()
        bridge.publish(1, shift(attached.model, 1))
        attached.save(tmp_path / "saved")
        expected = model_logprobs(attached.model.eval(), PROMPT, [40, 50, 60])
        from transformers import AutoModelForCausalLM, AutoTokenizer

        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
        torch.testing.assert_close(model_logprobs(again, PROMPT, [40, 50, 60]), expected, atol=1e-4, rtol=0)
        assert AutoTokenizer.from_pretrained(tmp_path / "saved").eos_token_id == 2


def test_none_sends_a_checkpoint_every_few_steps_only(tmp_path: Path) -> None:
    with stack(tmp_path, {"mode": "none", "every_steps": 3}) as (server, bridge):
        model = bridge.attach().model.eval()
        served = []
        for version in range(5):
            bridge.publish(version, shift(model, version))
            served.append(served_logprobs(server)[0]["policy_version"])
            bridge.ensure_current()
        assert served == [0, 0, 0, 3, 3]
        assert sorted(path.name for path in (tmp_path / "run" / "handover").iterdir()) == ["current", "version-000003"]
    assert not (tmp_path / "run" / "handover").exists()


def test_bfloat16_weights_are_shared_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"mode": "shared_vllm"}
    with stack(tmp_path, settings, "--dtype", "bfloat16") as (server, bridge):
        model = bridge.attach().model.eval()
        assert model.dtype == torch.bfloat16
        assert "dtype float32 has no effect: the weights are the server's, in bfloat16" in caplog.text
        bridge.publish(1, shift(model, 1))
        _, tokens, values = served_logprobs(server)
        expected = model_logprobs(model, PROMPT, tokens)
        assert math.isclose((values - expected).abs().mean(), 0, abs_tol=0.05)
