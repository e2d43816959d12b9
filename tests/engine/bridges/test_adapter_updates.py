"""Adapter updates: where adapters are written, which are refused, and which files are removed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
import torch
from bridging import PROMPT, Serving, assert_agreement, bridge_to, served_logprobs, serving
from peft import PeftModel
from safetensors.torch import load_file, save_file
from serving import model_logprobs, save_tiny_model, shift
from transformers import AutoModelForCausalLM

from grpo_engine.bridges import Bridge
from grpo_engine.bridges.transport import adapter as adapter_transport
from grpo_engine.errors import BridgeError, ModelError
from grpo_engine.models.config import LoraSettings
from grpo_engine.models.lora import add_lora, save_adapter
from grpo_engine.models.same_model import is_same_model
from grpo_engine.server.adapter_files import check_adapter, refuse_unbound
from grpo_engine.server.vllm.checkpoint import parameters_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def settings() -> dict[str, object]:
    return {"mode": "lora_only"}


@pytest.fixture
def published(bridge: Bridge) -> PeftModel:
    """A model whose adapter is served as version 1."""
    model = bridge.attach().model.eval()
    bridge.publish(1, shift(model, 1))
    return model


def test_lora_only_keeps_two_adapters_in_shared_memory_and_none_at_its_end(
    server: Serving, bridge: Bridge, tmp_path: Path
) -> None:
    model = bridge.attach().model.eval()
    with server.now.client as client:
        num_loaded = client.get("/lora/status").json()["load_count"]
    for version in range(4):
        bridge.publish(version, shift(model, version))
    with server.now.client as client:
        status = client.get("/lora/status").json()
    served = Path(status["active_adapter_path"])
    assert served.is_relative_to("/dev/shm")
    assert str(os.getpid()) in served.parent.name
    assert served.parent.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in served.parent.iterdir()) == ["policy@000002", "policy@000003"]
    assert not (tmp_path / "run").exists()
    assert (status["active_adapter_name"], status["load_count"]) == ("policy@000003", num_loaded + 4)
    with server.now.client as client:
        assert client.post("/lora/unload").json()["previous_name"] == "policy@000003"
        assert client.get("/lora/status").json()["active_adapter_name"] is None
    _, tokens, values = served_logprobs(server.now)
    with model.disable_adapter():
        expected = model_logprobs(model, PROMPT, tokens)
    torch.testing.assert_close(values, expected, atol=1e-4, rtol=0)
    bridge.close()
    assert not served.parent.exists()


def test_adapters_are_written_to_the_run_folder_if_shared_memory_is_too_small(
    server: Serving, bridge: Bridge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = shutil.disk_usage("/dev/shm")._replace(free=1000)
    monkeypatch.setattr(adapter_transport.shutil, "disk_usage", lambda _path: free)
    model = bridge.attach().model.eval()
    assert "/dev/shm: 0 MB free" in caplog.text
    assert "--shm-size" in caplog.text
    bridge.publish(1, shift(model, 1))
    assert_agreement(server.now, model, 1)
    bridge.close()
    assert [path.name for path in (tmp_path / "run" / "adapters").iterdir()] == ["policy@000001"]


def test_the_next_trainer_removes_a_killed_ones_adapters_in_shared_memory(bridge: Bridge) -> None:
    killed = subprocess.Popen(["true"])
    left = Path("/dev/shm", f"grpo-hand-adapters-{killed.pid}-1")
    left.mkdir()
    killed.wait()
    bridge.attach()
    assert not left.exists()


def test_lora_only_is_refused_before_the_model_is_loaded_where_the_server_cannot_serve_it(
    server: Serving, tmp_path: Path
) -> None:
    other = str(save_tiny_model(tmp_path / "other", seed=5))
    for settings, message in (
        ({"lora": LoraSettings(rank=100)}, r"up to rank \d+, not 100: start it with --max-lora-rank 100"),
        ({"model_name": other}, "give both the same model"),
    ):
        bridge = bridge_to(server, "lora_only", tmp_path, **settings)
        with closing(bridge), pytest.raises(BridgeError, match=message):
            bridge.attach()


def test_a_new_server_of_the_run_begins_with_the_adapter_that_was_served_last(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_TUI_RUN", f"test-adapters-{os.getpid()}")
    with serving(model_folder, tmp_path, "--enable-lora") as server:
        bridge = bridge_to(server, "lora_only", tmp_path)
        with closing(bridge):
            model = bridge.attach().model.eval()
            for version in (6, 7):
                bridge.publish(version, shift(model, version))
            server.end(signal.SIGKILL)
            server.start()
            assert_agreement(server.now, model, 7)
            bridge.prepare_step()
            bridge.publish(8, shift(model, 8))
            assert_agreement(server.now, model, 8)


def test_a_refused_adapter_ends_the_training_with_what_to_do_and_the_old_one_stays(
    server: Serving, bridge: Bridge, published: PeftModel
) -> None:
    published.peft_config["default"].r = 4096
    with pytest.raises(BridgeError, match=r"rank 4096 is above --max-lora-rank.*training ends"):
        bridge.publish(2, lambda: None)
    assert_agreement(server.now, published, 1)


def test_an_adapter_that_is_broken_or_changes_another_model_is_refused_and_the_old_one_stays(
    server: Serving, published: PeftModel, tmp_path: Path
) -> None:
    folder = tmp_path / "broken"
    save_adapter(published, folder)

    def assert_refused(status: int, message: str, path: Path = folder) -> None:
        with server.now.client as client:
            answer = client.post("/lora/load", json={"adapter_path": str(path)})
        assert answer.status_code == status
        assert message in answer.json()["detail"]
        assert_agreement(server.now, published, 1)

    assert_refused(404, "nowhere", Path("/nowhere"))
    change_config(folder, base_model_name_or_path="someone/else")
    assert_refused(400, "made for someone/else")
    change_config(folder, base_model_name_or_path=None)
    file = folder / "adapter_model.safetensors"
    save_file({name.replace("layers.1", "layers.7"): each for name, each in load_file(file).items()}, file)
    assert_refused(400, "are no layers of the served model")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert_refused(400, "broken")


def test_patterns_in_an_adapter_are_not_matched_since_its_tensors_name_the_modules(
    server: Serving, published: PeftModel, tmp_path: Path
) -> None:
    save_adapter(published, tmp_path / "patterns")
    endless = r"(\w+\.?)+(\w+\.?)+x"  # held the server, with its other requests
    change_config(tmp_path / "patterns", target_modules=endless, exclude_modules=endless)
    with server.now.client as client:
        client.post("/lora/load", json={"adapter_path": str(tmp_path / "patterns")}).raise_for_status()
    assert_agreement(server.now, published, 2)


# --- what can be seen of an adapter before it is loaded --------------------------------------------------------------


@pytest.fixture
def adapter(model_folder: Path, tmp_path: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    save_adapter(add_lora(model, LoraSettings(rank=4)), tmp_path / "adapter")
    return tmp_path / "adapter"


def check(adapter: Path, model_folder: Path) -> list[str]:
    served = parameters_of(str(model_folder))
    return check_adapter(
        adapter, model_name=str(model_folder), shapes=served.shapes, aliases=served.aliases, max_rank=8
    )


def change_config(adapter: Path, **values: object) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_fitting_adapter_names_its_modules(adapter: Path, model_folder: Path) -> None:
    parts = [f"model.layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "qv"]
    assert sorted(check(adapter, model_folder)) == parts


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"r": 16}, "rank 16 is above --max-lora-rank 8"),
        ({"r": None}, "has rank None"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"use_dora": True}, "weight-decomposed"),
        ({"modules_to_save": ["lm_head"]}, "whole modules"),
        ({"monteclora_config": {"num_samples": 8000}}, "samples its factors"),  # PEFT made 10 GB of them
        ({"use_qalora": True}, "pools its inputs"),
        ({"rank_pattern": {"q_proj": 2}}, "different ranks for some modules"),
        ({"bias": "all"}, "bias 'all'"),
        ({"init_lora_weights": "pissa"}, "'pissa'"),
        ({"base_model_name_or_path": "someone/else"}, "made for someone/else, but .*tiny is served"),
        ({"base_model_name_or_path": "b" * 10**6}, "made for b{300}…, but"),
        ({"r": 2}, "its configuration has the wrong rank"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused_by_what_is_wrong(
    adapter: Path, model_folder: Path, values: dict[str, object], message: str
) -> None:
    change_config(adapter, **values)
    with pytest.raises(ModelError, match=message):
        check(adapter, model_folder)


def test_factors_that_fit_no_layer_of_the_served_model_are_refused_by_name(adapter: Path, model_folder: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    factors = load_file(file)
    renamed = {name.replace("layers.1", "layers.7"): each for name, each in factors.items()}
    halves = {name: each[:, : each.shape[1] // 2].contiguous() for name, each in factors.items()}
    only_a = {name: each for name, each in factors.items() if "lora_A" in name}
    of_embedding = {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 128)}
    for tensors, message in (
        (renamed, r"layers\.7.*are no layers"),
        (halves, "has factors"),
        (only_a, "has factors"),
        (of_embedding, "no factor of a linear layer"),
        ({}, "has no factors"),
    ):
        save_file(tensors, file)
        with pytest.raises(ModelError, match=message):
            check(adapter, model_folder)
    for broken, content in ((file, file.read_bytes()[:-1]), (adapter / "adapter_config.json", b"{")):
        broken.write_bytes(content)
        with pytest.raises(ModelError, match=rf"{broken.stem}.*cannot be read"):
            check(adapter, model_folder)


def test_modules_that_reached_nothing_are_named() -> None:
    refuse_unbound(Path("a"), [], "m")
    with pytest.raises(ModelError, match="a: m has no layer for q, k, v, o and 1 more"):
        refuse_unbound(Path("a"), ["q", "k", "v", "o", "p"], "m")


def test_different_names_of_one_model_are_recognised(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_same_model("owner/name", "owner/name")
    assert is_same_model("owner/name", "/models/Name")
    assert is_same_model("owner/name", "/hub/models--owner--name/snapshots/0123abc")
    assert not is_same_model("owner/name", "owner/name-instruct")
    monkeypatch.chdir(model_folder.parent)
    assert is_same_model("tiny", str(model_folder))
    copy = shutil.copytree(model_folder, tmp_path / "copy")
    assert is_same_model(str(copy), str(model_folder))
    assert not is_same_model(str(save_tiny_model(tmp_path / "trained", seed=2)), str(model_folder))
