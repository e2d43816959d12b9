"""Atropos's bridge file: vLLM's fused, padded and tied tensors as parameters of transformers, and back."""

from __future__ import annotations

import base64
import http.server
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest
import torch
from bridging import bridge_context, cuda_handle
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from vllm_fakes import Served

from grpo_engine.bridges.memory import cuda_tensors
from grpo_engine.bridges.memory.bridge_files import read_bridge_file
from grpo_engine.bridges.memory.stock_bridge_file import (
    Sizes,
    as_bridge_file,
    is_stock_file,
    read_stock_file,
    stock_form,
)
from grpo_engine.bridges.memory.weight_lock import WeightLock
from grpo_engine.bridges.placement import mapped as mapped_model
from grpo_engine.bridges.transport.stock_in_place import StockInPlaceBridge
from grpo_engine.errors import BridgeError
from grpo_engine.models.shared import load_model_on_shared
from grpo_engine.server.exports import Owner, write_bridge_file
from grpo_engine.server.vllm.layout import fused_parameters
from grpo_engine.wire.bridge_file import CudaHandle, SharedTensor, StockBridgeFile

SHAPE = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "llama with scaled positions, tied": LlamaConfig(
        **SHAPE,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2, biases": Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "qwen2, tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3, heads larger than their share": Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=False),
}
OFFSET = 7
"""Elements before each tensor in its storage."""


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def as_vllm_has_them(model: PreTrainedModel) -> dict[str, Tensor]:
    """Fused projections, vocabularies padded to 64 rows, a tied head left out."""
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    fused: dict[str, Tensor] = {}
    for name, tensor in own.items():
        for whole, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
            if f".{parts[0]}." in name:
                names = [name.replace(parts[0], part) for part in parts]
                fused[name.replace(parts[0], whole)] = torch.cat([own[each] for each in names])
            if any(f".{part}." in name for part in parts):
                break
        else:
            is_vocabulary = name in ("model.embed_tokens.weight", "lm_head.weight")
            fused[name] = torch.cat([tensor, torch.full((27, 32), torch.nan)]) if is_vocabulary else tensor
    return fused


def exported(tensors: Mapping[str, Tensor], device_index: int = 0) -> dict[str, SharedTensor]:
    """As the export of CUDA memory describes tensors; the handle is the name."""
    return {
        name: SharedTensor(
            handle=cuda_handle(name, device_index=device_index, num_bytes=(tensor.numel() + OFFSET) * 4, offset=OFFSET),
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            dtype=str(tensor.dtype),
        )
        for name, tensor in tensors.items()
    }


def storages(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.cat([torch.zeros(OFFSET), tensor.flatten()]) for name, tensor in tensors.items()}


def mapped(manifest: Mapping[str, SharedTensor], memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What CUDA would map of it."""
    views = {}
    for name, entry in manifest.items():
        assert isinstance(entry.handle, CudaHandle)
        storage = memory[base64.b64decode(entry.handle.ipc_handle_b64).decode()]
        views[name] = storage.as_strided(entry.shape, entry.stride, entry.handle.tensor_storage_offset)
    return views


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_model_on_a_stock_servers_tensors_computes_what_the_server_does(config: PretrainedConfig) -> None:
    model = random_model(config)
    fused = as_vllm_has_them(model)
    memory = storages(fused)
    stock = stock_form("m", exported(fused))
    file = as_bridge_file(StockBridgeFile.model_validate_json(stock.model_dump_json()), Sizes.of(config), str)
    assert file.aliases == ({"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {})
    ours = load_model_on_shared(config, mapped(file.tensors, memory), file.aliases)
    tokens = torch.arange(90)[None]
    torch.testing.assert_close(ours(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    with torch.no_grad():
        ours.get_parameter("model.layers.1.self_attn.v_proj.weight").fill_(5)
    rows = memory["model.layers.1.self_attn.qkv_proj.weight"][OFFSET:].view(-1, 32)
    sizes = Sizes.of(config)
    assert rows[-sizes.key_value :].eq(5).all()
    assert not rows[: -sizes.key_value].eq(5).any()


def test_a_server_of_another_model_is_refused_by_the_tensor_that_shows_it() -> None:
    config = CONFIGS["llama"]
    stock = stock_form("m", exported(as_vllm_has_them(random_model(config))))
    with pytest.raises(BridgeError, match=r"qkv_proj\.weight: 64 rows, but .* says 64 \+ 32 \+ 32"):
        as_bridge_file(stock, Sizes.of(LlamaConfig(**SHAPE | {"head_dim": 16})), str)
    with pytest.raises(BridgeError, match="128 rows for a vocabulary of 129"):
        as_bridge_file(stock, Sizes.of(LlamaConfig(**SHAPE | {"vocab_size": 129})), str)


def test_what_our_server_exports_has_the_keys_and_values_that_atropos_reads() -> None:
    tensors = {"model.norm.weight": torch.ones(4)}
    form = json.loads(stock_form("m", exported(tensors, device_index=2)).model_dump_json())
    assert {key: form[key] for key in form.keys() - {"ipc_handles"}} == {
        "model": "m",
        "tp_degree": 1,
        "dp_shard_degree": 1,
        "num_params": 1,
        "param_names": ["model.norm.weight"],
        "shared_weights_enabled": True,
        "single_copy_enabled": True,
        "param_mappings": {
            "model.norm.weight": {
                "vllm_name": "model.norm.weight",
                "shape": [4],
                "dtype": "torch.float32",
                "device": "cuda:2",
            }
        },
    }
    assert form["ipc_handles"]["model.norm.weight"] == {
        "device_index": 2,
        "ipc_handle_b64": base64.b64encode(b"model.norm.weight").decode(),
        "storage_size": 44,
        "storage_offset_orig": 512,
        "ref_counter_handle_b64": "cmM=",
        "ref_counter_offset": 3,
        "event_handle_b64": "ZXY=",
        "event_sync_required": True,
        "tensor_storage_offset": 7,
        "shape": [4],
        "stride": [1],
        "dtype": "torch.float32",
    }


def test_one_file_is_read_by_both_trainers(tmp_path: Path) -> None:
    path = tmp_path / "bridge.json"
    lock = WeightLock.create("grpo-test-stock-fence")
    tensors = {"a": torch.ones(2)}
    try:
        written = write_bridge_file(
            path,
            owner=Owner(instance="i", run=None),
            model="m",
            fingerprint="f",
            lock=lock,
            manifest=exported(tensors),
            aliases={},
            stock=stock_form("m", exported({"fused": torch.ones(4)})),
        )
        assert read_bridge_file(path) == written
        assert not is_stock_file(path)
        assert read_stock_file(path).ipc_handles.keys() == {"fused"}
        write_bridge_file(
            path, owner=Owner(instance="i", run=None), model="m", fingerprint="f", lock=lock, manifest={}, aliases={}
        )
        assert json.loads(path.read_bytes())["param_mappings"] == {}  # what stock launchers take for "not exported"
        with pytest.raises(BridgeError, match="ipc_handles is empty"):
            read_stock_file(path)
    finally:
        lock.close()
        Path("/dev/shm/grpo-test-stock-fence").unlink()


def test_stock_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bridge.json"
    assert not is_stock_file(path)
    path.write_text(json.dumps({"model": "m", "tp_degree": 2, "param_mappings": {}}))
    assert is_stock_file(path)
    with pytest.raises(BridgeError, match="tp_degree 2"):
        read_stock_file(path)
    path.write_text(json.dumps({"model": "m", "param_mappings": {}, "ipc_handles": {"a": {}}}))
    with pytest.raises(BridgeError, match=r"not a bridge file of Atropos: ipc_handles\.a"):
        read_stock_file(path)
    path.write_text("[]")
    assert not is_stock_file(path)


@pytest.mark.parametrize("has_adapters", [False, True])
def test_vllms_own_names_stand_once_each_without_wrappers_and_padding(has_adapters: bool) -> None:
    model = Served(has_adapters=has_adapters)
    parameters = fused_parameters(model)
    assert {name: tuple(tensor.shape) for name, tensor in parameters.items()} == {
        "embed.weight": (5, 4),
        "attn.qkv_proj.weight": (8, 4),
        "attn.qkv_proj.bias": (8,),
        "norm.weight": (4,),
    }
    assert parameters["embed.weight"].data_ptr() == model.embed.weight.data_ptr()


# --- a trainer on a stock server -------------------------------------------------------------------------------------


class StockServer(http.server.BaseHTTPRequestHandler):
    """Those of Atropos's `/bridge/*` routes that a trainer calls."""

    can_pause = True
    model = "somebody/model"
    requests: list[str]
    before_answer: Callable[[], object] = staticmethod(lambda: None)
    """Called before it says which model it serves."""

    def do_GET(self) -> None:
        self.before_answer()
        self._answer({"model": self.model, "dtype": "torch.float32", "shared_weights_enabled": True})

    def do_POST(self) -> None:
        self.requests.append(self.path)
        done = {"/bridge/pause": "paused", "/bridge/resume": "resumed"}[self.path]
        self._answer({"status": done if self.can_pause else "not_supported"})

    def log_message(self, *_arguments: object) -> None:
        """Log nothing."""

    def _answer(self, body: dict[str, object]) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def stock_server() -> Iterator[tuple[type[StockServer], str]]:
    handler = type("Handler", (StockServer,), {"requests": []})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield handler, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_trainer_writes_into_a_stock_server_under_its_pause_and_attaches_again_after_a_restart(
    stock_server: tuple[type[StockServer], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    handler, url = stock_server
    config = CONFIGS["qwen2, biases"]
    config.save_pretrained(tmp_path / "model")
    fused = as_vllm_has_them(random_model(config))
    memory = storages(fused)
    monkeypatch.setattr(mapped_model, "map_cuda_tensors", lambda manifest: mapped(manifest, memory))
    monkeypatch.setattr(cuda_tensors, "gpu_uuid", str)  # no GPU here: host memory stands for the server's
    path = tmp_path / "bridge.json"
    path.write_text(stock_form(handler.model, exported(fused)).model_dump_json())
    context = bridge_context(tmp_path / "model", url, tmp_path, dtype="auto", patience_s=5)
    with closing(StockInPlaceBridge(path, context)) as bridge:
        model = bridge.attach().model

        def write() -> None:
            for parameter in model.parameters():
                parameter.data.fill_(3)

        bridge.publish(1, write)
        assert handler.requests == ["/bridge/pause", "/bridge/resume"]
        assert memory["model.layers.0.self_attn.qkv_proj.bias"][OFFSET:].eq(3).all()
        assert memory["model.embed_tokens.weight"].isnan().sum() == 27 * 32
        bridge.prepare_step()
        memory.update({f"{name}'": storage.clone().zero_() for name, storage in memory.items()})
        restarted = {f"{name}'": tensor for name, tensor in fused.items()}
        again = {name.removesuffix("'"): entry for name, entry in exported(restarted).items()}
        whole = stock_form(handler.model, again).model_dump_json()
        path.write_text(whole[:100])  # that server overwrites it while it starts
        handler.before_answer = staticmethod(lambda: path.write_text(whole))
        handler.can_pause = False
        with caplog.at_level(logging.WARNING):
            bridge.prepare_step()
            bridge.publish(2, write)
        assert memory["model.norm.weight'"][OFFSET:].eq(3).all()
        assert caplog.text.count("weights change under its running generations") == 1
        handler.model = "other"
        with pytest.raises(BridgeError, match=r"describes the weights of somebody/model, but .* serves other"):
            bridge.prepare_step()
