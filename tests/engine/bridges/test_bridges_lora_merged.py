"""`lora_merged` beyond the contract of all modes: what it merges into, starts from and refuses."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
import torch
from bridging import PROMPT, Serving, assert_agreement, bridge_to, config_for, curve, mapped_segments, served_logprobs
from serving import our_segments, save_tiny_model, shift
from training import ListedSource, made_up_groups
from transformers import AutoModelForCausalLM

from grpo_engine.bridges import Bridge
from grpo_engine.bridges.memory.bridge_files import read_bridge_file
from grpo_engine.bridges.memory.shared_tensors import map_tensors
from grpo_engine.errors import BridgeError
from grpo_engine.train.loop import train
from grpo_engine.train.recording.recorder import Recorder

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    torch.set_num_threads(1)
    before = our_segments()
    yield
    assert our_segments() == before


@pytest.fixture
def serving(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Serving]:
    model = save_tiny_model(tmp_path / "model", seed=1)
    server = Serving(model, tmp_path, getattr(request, "param", "bfloat16"))
    server.start()
    yield server
    server.close()


@pytest.fixture
def bridge(serving: Serving) -> Iterator[Bridge]:
    bridge = bridge_to(serving, "lora_merged")
    yield bridge
    bridge.close()


def served_weights(serving: Serving) -> dict[str, torch.Tensor]:
    """What the server reads, by a mapping of our own."""
    mapped = map_tensors(read_bridge_file(serving.folder / "bridge.json").tensors)
    return {name: tensor.clone() for name, tensor in mapped.items()}


def stored_weights(serving: Serving) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(serving.model, dtype=getattr(torch, serving.dtype))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_the_server_reads_base_plus_adapter_rounded_once_and_nothing_else_has_changed(
    serving: Serving, bridge: Bridge
) -> None:
    model = bridge.attach().model
    for version in range(1, 6):
        bridge.publish(version, shift(model, version))
    served, stored = served_weights(serving), stored_weights(serving)
    for name, layer in model.get_base_model().named_modules():
        if hasattr(layer, "lora_A"):
            change = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            exact = stored.pop(f"{name}.weight").float() + change
            torch.testing.assert_close(served.pop(f"{name}.weight").float(), exact, rtol=2**-8, atol=1e-6)
    assert len(stored) == len(served)
    assert all(torch.equal(served[name], values) for name, values in stored.items())


@pytest.mark.parametrize(("serving", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.03)], indirect=["serving"])
def test_trainer_and_server_agree_on_what_was_published(serving: Serving, bridge: Bridge, tolerance: float) -> None:
    model = bridge.attach().model.eval()
    differences = []
    for version in range(1, 4):
        bridge.publish(version, shift(model, version))
        body = {"prompt": {"prompt_token_ids": PROMPT}, "n": 8, "max_tokens": 12, "logprobs": 0}
        answer = serving.now.generate(**body)
        assert answer["policy_version"] == version
        for tokens, entries in zip(answer["token_ids"], answer["logprobs"], strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1].float()
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
            values = torch.tensor([next(iter(position[0].values())) for position in entries])
            differences.append((values - expected).abs())
    assert torch.cat(differences).mean() < tolerance


def test_a_trainer_that_was_killed_leaves_nothing_that_the_next_takes_for_the_base(
    serving: Serving, bridge: Bridge, caplog: pytest.LogCaptureFixture
) -> None:
    killed = bridge_to(serving, "lora_merged")
    model = killed.attach().model
    killed.publish(5, shift(model, 5))  # and no word more
    stored = stored_weights(serving)
    assert not all(torch.equal(values, stored[name]) for name, values in served_weights(serving).items())

    attached = bridge.attach()
    assert attached.policy_version == 5
    bridge.publish(6, lambda: None)
    assert all(torch.equal(values, stored[name]) for name, values in served_weights(serving).items())
    assert_agreement(serving.now, attached.model.eval(), 6, tolerance=0.5)
    assert "reloads" not in caplog.text
    killed.close()


def test_weights_changed_by_a_full_model_trainer_are_reloaded(
    serving: Serving, bridge: Bridge, caplog: pytest.LogCaptureFixture
) -> None:
    before = bridge_to(serving, "shared_vllm")
    before.publish(5, shift(before.attach().model, 5))
    before.close()
    with caplog.at_level(logging.WARNING):
        attached = bridge.attach()
    assert "changed by an earlier trainer; the server reloads" in caplog.text
    assert attached.policy_version == 6  # one that was never used
    stored = stored_weights(serving)
    assert all(torch.equal(values, stored[name]) for name, values in served_weights(serving).items())


def test_a_server_of_another_model_of_the_same_shape_is_refused(serving: Serving, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "other", seed=2)
    serving.model = tmp_path / "other"
    bridge = bridge_to(serving, "lora_merged")
    with pytest.raises(
        BridgeError, match=r"shares the weights of .*/model, but the trainer was given .*/other: give both"
    ):
        bridge.attach()
    bridge.close()


def test_a_server_whose_checkpoint_was_overwritten_since_its_start_is_refused(serving: Serving, bridge: Bridge) -> None:
    save_tiny_model(serving.model, seed=2)
    with pytest.raises(
        BridgeError, match=r"row \d+ is not that of .*the served weights are not those of .*/model: start both"
    ):
        bridge.attach()


def test_of_a_server_that_has_ended_nothing_is_kept_and_the_adapter_is_saved_all_the_same(
    serving: Serving, bridge: Bridge, tmp_path: Path
) -> None:
    attached = bridge.attach()
    model = attached.model
    bridge.publish(1, shift(model, 1))
    serving.end(signal.SIGKILL)
    bridge.poll_server()
    assert mapped_segments() == set()
    write = shift(model, 2)
    bridge.publish(2, write)  # no server runs
    attached.save(tmp_path / "saved")
    serving.start()
    bridge.ensure_current()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
    answer, tokens, values = served_logprobs(serving.now)
    assert answer["policy_version"] == 2
    with torch.no_grad():
        logprobs = again(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    expected = logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert (values - expected).abs().mean() < 0.2
    served = served_weights(serving)
    assert all(torch.equal(p, served[name]) for name, p in _unwrapped(model).items())


def _unwrapped(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = model.get_base_model().named_parameters()
    return {name.replace(".base_layer", ""): p.detach() for name, p in named if "lora_" not in name}


def test_a_stopped_and_resumed_run_continues_with_equal_numbers(serving: Serving, tmp_path: Path) -> None:
    groups = [made_up_groups(seed) for seed in range(6)]

    def run(name: str, batches: list, stop: Callable[[], bool], **changes: object) -> None:
        torch.manual_seed(0)
        config = config_for(serving, "lora_merged", **changes)
        bridge = bridge_to(serving, "lora_merged")
        try:
            with Recorder(tmp_path / name, total_steps=6, show_times=False) as recorder:
                path = tmp_path / name / "checkpoints"
                train(config, ListedSource(batches), bridge, recorder, decode=str, save_path=path, stop=stop)
        finally:
            bridge.close()

    run("whole", groups, lambda: False)
    serving.end()
    serving.start()
    asked = count()
    run("halves", groups, lambda: next(asked) > 6)
    done = len(curve(tmp_path / "halves"))
    assert 0 < done < 6
    torch.manual_seed(99)  # whatever a new adapter begins with
    run("halves", groups[done:], lambda: False)
    assert curve(tmp_path / "halves") == curve(tmp_path / "whole")
