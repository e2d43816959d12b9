"""`lora_merged` beyond the contract of all modes: what it merges into, starts from and refuses."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest
import torch
from bridging import (
    PROMPT,
    RUN_STEPS,
    Serving,
    assert_agreement,
    bridge_to,
    config_for,
    mapped_segments,
    serving,
    train_beside,
)
from curves import curve
from peft import PeftModel
from serving import model_logprobs, save_tiny_model, shift
from training import ListedSource, made_up_groups
from transformers import AutoModelForCausalLM

from grpo_engine.bridges import Bridge
from grpo_engine.bridges.memory.bridge_files import read_bridge_file
from grpo_engine.bridges.memory.shared_tensors import map_tensors
from grpo_engine.bridges.transport.saving import own_tensors
from grpo_engine.errors import BridgeError
from grpo_engine.models.config import LoraSettings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dtype() -> str:
    return "bfloat16"


@pytest.fixture
def bridge(server: Serving, tmp_path: Path) -> Iterator[Bridge]:
    with closing(bridge_to(server, "lora_merged", tmp_path, lora=LoraSettings())) as bridge:
        yield bridge


def served_weights(server: Serving) -> dict[str, torch.Tensor]:
    """What the server reads, by a mapping of our own."""
    mapped = map_tensors(read_bridge_file(server.bridge_file).tensors)
    return {name: tensor.clone() for name, tensor in mapped.items()}


def stored_weights(server: Serving) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(server.model, dtype=getattr(torch, server.dtype))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_the_server_reads_base_plus_adapter_rounded_once_and_nothing_else_has_changed(
    server: Serving, bridge: Bridge
) -> None:
    model = bridge.attach().model
    for version in range(1, 6):
        bridge.publish(version, shift(model, version))
    served, stored = served_weights(server), stored_weights(server)
    for name, layer in model.get_base_model().named_modules():
        if hasattr(layer, "lora_A"):
            change = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            exact = stored.pop(f"{name}.weight").float() + change
            torch.testing.assert_close(served.pop(f"{name}.weight").float(), exact, rtol=2**-8, atol=1e-6)
    assert len(stored) == len(served)
    assert all(torch.equal(served[name], values) for name, values in stored.items())


def differences(server: Serving, bridge: Bridge) -> torch.Tensor:
    """Of the log-probs of trainer and server, of every token of three versions."""
    model = bridge.attach().model.eval()
    found = []
    for version in range(1, 4):
        bridge.publish(version, shift(model, version))
        answer = server.now.generate(prompt={"prompt_token_ids": PROMPT}, n=8, max_tokens=12, logprobs=0)
        assert answer["policy_version"] == version
        for tokens, entries in zip(answer["token_ids"], answer["logprobs"], strict=True):
            values = torch.tensor([next(iter(position[0].values())) for position in entries])
            found.append((values - model_logprobs(model, PROMPT, tokens)).abs())
    return torch.cat(found)


def test_trainer_and_server_agree_on_what_was_published(server: Serving, bridge: Bridge) -> None:
    assert server.dtype == "bfloat16"
    assert differences(server, bridge).mean() < 0.03


def test_in_float32_they_agree_to_a_few_roundings(model_folder: Path, tmp_path: Path) -> None:
    with serving(model_folder, tmp_path, "--shared-weights") as server:
        assert server.dtype == "float32"
        with closing(bridge_to(server, "lora_merged", tmp_path, lora=LoraSettings())) as bridge:
            assert differences(server, bridge).max() < 1e-4


def test_a_trainer_that_was_killed_leaves_nothing_that_the_next_takes_for_the_base(
    server: Serving, bridge: Bridge, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = stored_weights(server)
    with closing(bridge_to(server, "lora_merged", tmp_path)) as killed:
        killed.publish(5, shift(killed.attach().model, 5))
        assert not all(torch.equal(values, stored[name]) for name, values in served_weights(server).items())
        attached = bridge.attach()  # the other trainer has released nothing
        assert attached.policy_version == 5
        bridge.publish(6, lambda: None)
        assert all(torch.equal(values, stored[name]) for name, values in served_weights(server).items())
        assert_agreement(server.now, attached.model.eval(), 6, tolerance=0.5)
        assert "reloads" not in caplog.text


def test_weights_changed_by_a_full_model_trainer_are_reloaded(
    server: Serving, bridge: Bridge, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(bridge_to(server, "shared_vllm", tmp_path)) as before:
        before.publish(5, shift(before.attach().model, 5))
    with caplog.at_level(logging.WARNING):
        attached = bridge.attach()
    assert "changed by an earlier trainer; the server reloads" in caplog.text
    assert attached.policy_version == 6  # one that was never used
    stored = stored_weights(server)
    assert all(torch.equal(values, stored[name]) for name, values in served_weights(server).items())


def test_a_server_whose_checkpoint_was_overwritten_since_its_start_is_refused(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", seed=1)
    with serving(model, tmp_path, "--shared-weights") as server:
        save_tiny_model(model, seed=2)
        message = r"row \d+ is not that of .*the served weights are not those of .*/model: start both"
        with closing(bridge_to(server, "lora_merged", tmp_path)) as bridge, pytest.raises(BridgeError, match=message):
            bridge.attach()


def test_of_a_server_that_has_ended_nothing_is_kept_and_the_adapter_is_saved_all_the_same(
    server: Serving, bridge: Bridge, tmp_path: Path
) -> None:
    attached = bridge.attach()
    model: PeftModel = attached.model
    bridge.publish(1, shift(model, 1))
    server.end(signal.SIGKILL)
    bridge.poll_server()
    assert mapped_segments() == set()
    bridge.publish(2, shift(model, 2))  # no server runs
    attached.save(tmp_path / "saved", own_tensors(model))
    server.start()
    bridge.prepare_step()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
    assert_agreement(server.now, saved, 2, tolerance=0.5)
    served = served_weights(server)
    for name, parameter in model.get_base_model().named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter.detach(), served[name.replace(".base_layer", "")])


def test_a_stopped_and_resumed_run_continues_with_equal_numbers(server: Serving, tmp_path: Path) -> None:
    groups = [made_up_groups(seed) for seed in range(RUN_STEPS)]
    config = config_for(server, "lora_merged")
    train_beside(server, tmp_path / "whole", config, ListedSource(groups))
    server.reset()
    asked = count()
    halves = tmp_path / "halves"
    done = train_beside(server, halves, config, ListedSource(groups), stop=lambda: next(asked) > RUN_STEPS)
    assert 0 < done < RUN_STEPS
    train_beside(server, halves, config, ListedSource(groups[done:]), torch_seed=99)
    assert curve(halves) == curve(tmp_path / "whole")
