"""An adapter folded into the weights that it stands beside."""

from __future__ import annotations

import pytest
import torch
from test_models_lora import small_model
from torch import Tensor

from grpo_engine.models.config import LoraSettings
from grpo_engine.models.lora import add_lora
from grpo_engine.models.merging import frozen_state, merged_weights


def adapted(dtype: torch.dtype = torch.float32):
    model = add_lora(small_model().to(dtype), LoraSettings(rank=4, target_modules=("q_proj", "down_proj")))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def test_merged_and_frozen_weights_together_are_a_bare_model_with_the_adapters_logits() -> None:
    model, bare = adapted(), small_model().eval()
    merged, frozen = dict(merged_weights(model)), frozen_state(model)
    assert merged.keys().isdisjoint(frozen)
    assert {name.rsplit(".", 2)[1] for name in merged} == {"q_proj", "down_proj"}
    bare.load_state_dict({**frozen, **merged})
    tokens = torch.arange(3, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(bare(tokens).logits, model(tokens).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_merges", [1, 3])
def test_merging_again_and_again_rounds_once_and_leaves_the_model_alone(num_merges: int) -> None:
    model = adapted(torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged: dict[str, Tensor] = {}
    for _ in range(num_merges):
        merged = dict(merged_weights(model))
    module = model.get_base_model().model.layers[0].self_attn.q_proj
    factor_a, factor_b = module.lora_A["default"].weight, module.lora_B["default"].weight
    expected = (module.base_layer.weight.float() + (32 / 4) * factor_b @ factor_a).bfloat16()
    assert torch.equal(merged["model.layers.0.self_attn.q_proj.weight"], expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
