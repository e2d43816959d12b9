"""Files of tensors that are on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from grpo_engine.bridges.transport import saving
from grpo_engine.bridges.transport.saving import write_whole
from grpo_engine.models import tensor_files
from grpo_engine.train.checkpointing.state_files import read_state, write_state

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_on_a_gpu_is_written_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(saving, "_FILE_SIZE", "1MB")
    monkeypatch.setattr(tensor_files, "_STAGE_BYTES", 100_000)
    config = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=3, vocab_size=1000)
    model = LlamaForCausalLM(config).to("cuda", dtype)
    write_whole(model, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    written = {name: tensor for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert all(torch.equal(written[name], tensor.cpu()) for name, tensor in model.state_dict().items())
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict()
    assert all(torch.equal(again[name], tensor.cpu()) for name, tensor in model.state_dict().items())


def test_an_optimizer_on_a_gpu_is_written_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "_STAGE_BYTES", 1000)
    layer = torch.nn.Linear(70, 50, device="cuda")
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.randn(3, 70, device="cuda")).sum().backward()
    optimizer.step()
    few = torch.arange(9).to("cuda", torch.uint8)
    write_state(
        tmp_path, "state", {"adam": optimizer.state_dict(), "turned": layer.weight.T, "few": few}, shard_bytes=9000
    )
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    again = read_state(tmp_path, "state")
    for name, tensor in optimizer.state_dict()["state"][0].items():
        assert torch.equal(again["adam"]["state"][0][name], tensor.cpu())
    assert torch.equal(again["turned"], layer.weight.T.cpu())
    assert torch.equal(again["few"], few.cpu())
