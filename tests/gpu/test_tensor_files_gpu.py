"""Files of tensors that lie on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from grpo_engine.bridges import saving, tensor_files
from grpo_engine.bridges.saving import write_whole

pytestmark = pytest.mark.gpu


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
