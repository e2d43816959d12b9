"""Adapter updates: where adapters are written, which are refused, and which files are removed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from bridging import PROMPT, SERVER_FLAGS, assert_agreement, make_bridge, served_logprobs, stack
from safetensors.torch import load_file, save_file
from serving import model_logprobs, running_server, save_tiny_model, shift
from transformers import AutoModelForCausalLM

from grpo_engine.bridges.transport import adapter as adapter_transport
from grpo_engine.errors import BridgeError, ModelError
from grpo_engine.models.config import LoraSettings
from grpo_engine.models.lora import add_lora, save_adapter
from grpo_engine.models.same_model import is_same_model
from grpo_engine.server.adapter_files import check_adapter, refuse_unbound
from grpo_engine.server.vllm.checkpoint import Parameters, parameters_of

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_lora_only_keeps_two_adapters_in_shared_memory_and_none_at_its_end(tmp_path: Path) -> None:
    with stack(tmp_path, {"mode": "lora_only"}) as (server, bridge):
        model = bridge.attach().model.eval()
        for version in range(4):
            bridge.publish(version, shift(model, version))
        with server.client as client:
            served = Path(client.get("/lora/status").json()["active_adapter_path"])
        assert served.is_relative_to("/dev/shm")
        assert str(os.getpid()) in served.parent.name
        assert served.parent.stat().st_mode & 0o777 == 0o700
        assert sorted(path.name for path in served.parent.iterdir()) == ["policy@000002", "policy@000003"]
        assert not (tmp_path / "run").exists()
        with server.client as client:
            status = client.get("/lora/status").json()
            assert (status["active_adapter_name"], status["load_count"]) == ("policy@000003", 4)
            assert client.post("/lora/unload").json()["previous_name"] == "policy@000003"
            assert client.get("/lora/status").json()["active_adapter_name"] is None
        base_logprob = served_logprobs(server)
        with model.disable_adapter():
            expected = model_logprobs(model, PROMPT, base_logprob[1])
        torch.testing.assert_close(base_logprob[2], expected, atol=1e-4, rtol=0)
        bridge.close()
        assert not served.parent.exists()


def test_adapters_are_written_to_the_run_folder_if_shared_memory_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = shutil.disk_usage("/dev/shm")._replace(free=1000)
    monkeypatch.setattr(adapter_transport.shutil, "disk_usage", lambda _path: free)
    with stack(tmp_path, {"mode": "lora_only"}) as (server, bridge):
        model = bridge.attach().model.eval()
        assert "/dev/shm: 0 MB free" in caplog.text
        assert "--shm-size" in caplog.text
        bridge.publish(1, shift(model, 1))
        assert_agreement(server, model, 1)
        bridge.close()
        assert [path.name for path in (tmp_path / "run" / "adapters").iterdir()] == ["policy@000001"]


def test_the_next_trainer_removes_a_killed_ones_adapters_in_shared_memory(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    left = Path("/dev/shm", f"grpo-hand-adapters-{dead.pid}-1")
    left.mkdir()
    dead.wait()
    with stack(tmp_path, {"mode": "lora_only"}) as (_, bridge):
        bridge.attach()
        assert not left.exists()


def test_lora_only_is_refused_before_the_model_is_loaded_where_the_server_cannot_serve_it(tmp_path: Path) -> None:
    with stack(tmp_path, {"mode": "lora_only"}, "--max-lora-rank", "2") as (server, bridge):
        with pytest.raises(BridgeError, match="up to rank 2, not 4: start it with --max-lora-rank 4"):
            bridge.attach()
        other = save_tiny_model(tmp_path / "other", seed=5)
        stranger = make_bridge({"mode": "lora_only"}, other, server.url, tmp_path)
        with closing(stranger), pytest.raises(BridgeError, match="give both the same model"):
            stranger.attach()
    with stack(tmp_path / "plain", {"mode": "none"}) as (server, _):
        unserved = make_bridge({"mode": "lora_only"}, tmp_path / "plain" / "model", server.url, tmp_path)
        with closing(unserved), pytest.raises(BridgeError, match="--enable-lora"):
            unserved.attach()


def test_a_new_server_of_the_run_begins_with_the_adapter_that_was_served_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_TUI_RUN", f"test-adapters-{os.getpid()}")
    with stack(tmp_path, {"mode": "lora_only"}) as (server, bridge):
        model = bridge.attach().model.eval()
        for version in (6, 7):
            bridge.publish(version, shift(model, version))
        server.stop(signal.SIGKILL)
        flags, port = SERVER_FLAGS["lora_only"], int(server.url.rsplit(":", 1)[1])
        with running_server(tmp_path / "model", *flags, folder=tmp_path, port=port) as again:
            assert_agreement(again, model, 7)
            bridge.ensure_current()
            bridge.publish(8, shift(model, 8))
            assert_agreement(again, model, 8)
        bridge.close()


def test_a_refused_adapter_ends_the_training_with_what_to_do_and_the_old_one_stays(tmp_path: Path) -> None:
    with stack(tmp_path, {"mode": "lora_only"}) as (server, bridge):
        model = bridge.attach().model.eval()
        write = shift(model, 1)
        bridge.publish(1, write)
        model.peft_config["default"].r = 4096
        with pytest.raises(BridgeError, match=r"rank 4096 is above --max-lora-rank.*training ends"):
            bridge.publish(2, write)
        assert_agreement(server, model, 1)


def test_a_broken_adapter_leaves_the_old_one_in_place(tmp_path: Path) -> None:
    with stack(tmp_path, {"mode": "lora_only"}) as (server, bridge):
        model = bridge.attach().model.eval()
        bridge.publish(1, shift(model, 1))
        model.save_pretrained(tmp_path / "broken")
        weights = tmp_path / "broken" / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
        with server.client as client:
            answer = client.post("/lora/load", json={"adapter_path": str(tmp_path / "broken")})
            assert answer.status_code == 400
            assert "broken" in answer.json()["detail"]
            assert client.post("/lora/load", json={"adapter_path": "/nowhere"}).status_code == 404
        assert_agreement(server, model, 1)


def test_an_adapter_that_would_change_other_layers_or_another_model_is_served_by_no_engine(tmp_path: Path) -> None:
    with stack(tmp_path, {"mode": "lora_only"}) as (server, bridge), server.client as client:
        model = bridge.attach().model.eval()
        bridge.publish(1, shift(model, 1))
        save_adapter(model, tmp_path / "adapter")

        def refused(words: str) -> None:
            answer = client.post("/lora/load", json={"adapter_path": str(tmp_path / "adapter")})
            assert answer.status_code == 400
            assert words in answer.json()["detail"]
            assert_agreement(server, model, 1)

        change_config(tmp_path / "adapter", base_model_name_or_path="someone/else")
        refused("made for someone/else")
        change_config(tmp_path / "adapter", base_model_name_or_path=None)
        file = tmp_path / "adapter" / "adapter_model.safetensors"
        save_file({name.replace("layers.1", "layers.7"): each for name, each in load_file(file).items()}, file)
        refused("are no layers of the served model")


# --- what can be seen of an adapter before it is loaded --------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("base") / "model", seed=1)


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base)
    save_adapter(add_lora(model, LoraSettings(rank=4)), tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture(scope="module")
def served(base: Path) -> Parameters:
    return parameters_of(str(base))


def check(adapter: Path, base: Path, served: Parameters, max_rank: int = 8) -> list[str]:
    return check_adapter(adapter, model_name=str(base), shapes=served.shapes, aliases=served.aliases, max_rank=max_rank)


def change_config(adapter: Path, **values: object) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_fitting_adapter_names_its_modules(adapter: Path, base: Path, served: Parameters) -> None:
    parts = [f"model.layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "qv"]
    assert sorted(check(adapter, base, served)) == parts


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"r": 16}, "rank 16 is above --max-lora-rank 8"),
        ({"r": None}, "has rank None"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"use_dora": True}, "weight-decomposed"),
        ({"modules_to_save": ["lm_head"]}, "whole modules"),
        ({"rank_pattern": {"q_proj": 2}}, "different ranks for some modules"),
        ({"bias": "all"}, "bias 'all'"),
        ({"init_lora_weights": "pissa"}, "'pissa'"),
        ({"base_model_name_or_path": "someone/else"}, "made for someone/else, but .*model is served"),
        ({"r": 2}, "its configuration has the wrong rank"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused_by_what_is_wrong(
    adapter: Path, base: Path, served: Parameters, values: dict[str, object], words: str
) -> None:
    change_config(adapter, **values)
    with pytest.raises(ModelError, match=words):
        check(adapter, base, served)


def test_factors_that_fit_no_layer_of_the_served_model_are_refused_by_name(
    adapter: Path, base: Path, served: Parameters
) -> None:
    file = adapter / "adapter_model.safetensors"
    factors = load_file(file)

    def refused(tensors: dict[str, torch.Tensor], words: str) -> None:
        save_file(tensors, file)
        with pytest.raises(ModelError, match=words):
            check(adapter, base, served)

    refused({name.replace("layers.1", "layers.7"): each for name, each in factors.items()}, r"layers\.7.*are no layers")
    refused({name: each[:, : each.shape[1] // 2].contiguous() for name, each in factors.items()}, "has factors")
    refused({name: each for name, each in factors.items() if "lora_A" in name}, "has factors")
    refused({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 128)}, "no factor of a linear layer")
    refused({}, "has no factors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match="cannot be read"):
        check(adapter, base, served)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"adapter_config\.json cannot be read"):
        check(adapter, base, served)


def test_modules_that_reached_nothing_are_named() -> None:
    refuse_unbound(Path("a"), [], "m")
    with pytest.raises(ModelError, match="a: m has no layer for q, k, v, o and 1 more"):
        refuse_unbound(Path("a"), ["q", "k", "v", "o", "p"], "m")


def test_different_names_of_one_model_are_recognised(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_same_model("owner/name", "owner/name")
    assert is_same_model("owner/name", "/models/Name")
    assert is_same_model("owner/name", "/hub/models--owner--name/snapshots/0123abc")
    assert not is_same_model("owner/name", "owner/name-instruct")
    monkeypatch.chdir(base.parent)
    assert is_same_model("model", str(base))
    copy = shutil.copytree(base, tmp_path / "copy")
    assert is_same_model(str(copy), str(base))
    assert not is_same_model(str(save_tiny_model(tmp_path / "trained", seed=2)), str(base))
