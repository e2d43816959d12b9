"""Adapters that are folded into the weights: the same model and gradient as PEFT's, and nothing lost by rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from training import attached, made_up_groups, settings
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from grpo_engine.data.batching import make_batch
from grpo_engine.errors import ModelError
from grpo_engine.models.config import LoraSettings
from grpo_engine.models.execution import recompute_layers
from grpo_engine.models.lora import add_lora, save_adapter
from grpo_engine.models.merged_lora import MergedLora, adapted_weights
from grpo_engine.train.reference import UnderAdapters
from grpo_engine.train.scoring import Scorer
from grpo_engine.train.step import gradient_step
from grpo_engine.train.trainee import Trainee

TOKEN_IDS = torch.arange(3, 23).view(2, 10)
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def biased_model(dtype: torch.dtype) -> Qwen2ForCausalLM:
    """With biases on q, k and v."""
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, initializer_range=0.2))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    return model.to(dtype)


def base_weights(model: PeftModel) -> dict[str, Tensor]:
    """What is under the adapters now."""
    base = model.get_base_model()
    return {
        name: base.get_submodule(name.removesuffix(".weight")).base_layer.weight.detach().clone()
        for name in adapted_weights(model)
    }


def adapted(dtype: torch.dtype, targets: tuple[str, ...] = ALL_LINEAR) -> PeftModel:
    """PEFT's model, whose adapters are not zero."""
    model = add_lora(biased_model(dtype), LoraSettings(rank=4, alpha=8, target_modules=targets))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def merged(model: PeftModel) -> MergedLora:
    lora = MergedLora(model, base_weights(model))
    lora.merge()
    return lora


def logits_and_gradients(model: PeftModel) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(TOKEN_IDS).logits
    torch.manual_seed(2)
    (logits * torch.randn_like(logits)).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize("recomputes", [False, True])
def test_where_nothing_is_rounded_output_and_gradient_are_those_of_peft(
    dtype: torch.dtype, tolerance: float, recomputes: bool
) -> None:
    theirs, ours = adapted(dtype), adapted(dtype)
    merged(ours)
    if recomputes:
        recompute_layers(ours)
        ours.train()
    logits, gradients = logits_and_gradients(theirs)
    own_logits, own_gradients = logits_and_gradients(ours)
    torch.testing.assert_close(own_logits, logits, rtol=tolerance, atol=tolerance)
    assert own_gradients.keys() == gradients.keys()
    assert len(gradients) == 2 * 7 * 2  # layers, modules, factors
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0.01
        torch.testing.assert_close(own_gradients[name], gradient, rtol=tolerance, atol=tolerance)


def test_in_bfloat16_the_gradient_of_fp32_factors_is_near_that_of_fp32_weights() -> None:
    exact, rounded = adapted(torch.float32), adapted(torch.bfloat16)
    merged(rounded)
    _, gradients = logits_and_gradients(exact)
    _, own = logits_and_gradients(rounded)
    for name, gradient in gradients.items():
        assert own[name].dtype is torch.float32
        assert (own[name] - gradient).norm() < 0.05 * gradient.norm(), name


def test_a_thousand_merges_are_rounded_once() -> None:
    model = adapted(torch.bfloat16, ("q_proj",))
    lora, base = merged(model), base_weights_of_a_fresh_model(model)
    name = adapted_weights(model)[0]
    layer = model.get_base_model().get_submodule(name.removesuffix(".weight"))
    added_up = layer.base_layer.weight.detach().clone()
    first, second = layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()
    direction = torch.randn(second.shape, generator=torch.Generator().manual_seed(3))
    for _ in range(1000):
        second.add_(direction, alpha=1e-5)
        added_up += (2 * 1e-5 * direction @ first).to(torch.bfloat16)  # what others do: each change onto the last sum
        lora.merge()
    exact = base[name].float() + 2 * second @ first
    assert torch.equal(layer.base_layer.weight, exact.to(torch.bfloat16))
    moved = (2 * 1e-2 * direction @ first).norm()
    assert (added_up.float() - exact).norm() > 0.5 * moved  # most of it was lost by rounding
    assert (layer.base_layer.weight.float() - exact).norm() < 0.2 * moved


def base_weights_of_a_fresh_model(model: PeftModel) -> dict[str, Tensor]:
    fresh = dict(biased_model(torch.bfloat16).named_parameters())
    return {name: fresh[name].detach() for name in adapted_weights(model)}


def test_adapters_of_zero_restore_the_base_weights_bit_for_bit() -> None:
    model = adapted(torch.bfloat16)
    lora, base = merged(model), base_weights_of_a_fresh_model(model)
    now = base_weights(model)
    assert not any(torch.equal(now[name], base[name]) for name in base)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    lora.merge()
    now = base_weights(model)
    assert all(torch.equal(now[name], base[name]) for name in base)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_with_adapters_off_it_is_the_base_model_bit_for_bit(dtype: torch.dtype) -> None:
    model = adapted(dtype)
    merged(model)
    batch = make_batch(made_up_groups(1), seq_len=32)
    expected, _ = Scorer(biased_model(dtype)).logprobs(batch)
    policy, _ = Scorer(model).logprobs(batch)
    assert torch.equal(UnderAdapters(model).logprobs(batch), expected)
    assert not torch.allclose(policy, expected, atol=0.1)
    assert torch.equal(Scorer(model).logprobs(batch)[0], policy)


def test_unmerged_it_computes_what_the_next_merge_will() -> None:
    model = adapted(torch.bfloat16)
    lora = merged(model)
    before = model(TOKEN_IDS).logits
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(2)
    weights = base_weights(model)
    assert torch.equal(model(TOKEN_IDS).logits, before)
    with lora.apart():
        ahead = model(TOKEN_IDS).logits
    assert torch.equal(model(TOKEN_IDS).logits, before)
    assert all(torch.equal(weights[name], now) for name, now in base_weights(model).items())
    lora.merge()
    assert not torch.equal(ahead, before)
    assert torch.equal(model(TOKEN_IDS).logits, ahead)


def test_several_updates_on_a_batch_are_those_of_adapters_beside_the_weights() -> None:
    batch, adapters = make_batch(made_up_groups(2), seq_len=32), []
    for is_merged in (False, True):
        model = adapted(torch.float32)
        more = {"unmerged": merged(model).apart} if is_merged else {}
        subject = Trainee(
            attached(model, is_shared=False, **more), settings(num_iterations=3, bridge={"mode": "lora_only"})
        )
        before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        gradient_step(subject, batch, step=0, policy_version=0)
        adapters.append({name: p.detach() - before[name] for name, p in model.named_parameters() if name in before})
    plain, folded = adapters
    for name, change in plain.items():
        assert change.abs().max() > 0.01  # three updates of Adam at a rate of 0.01
        torch.testing.assert_close(folded[name], change, rtol=0, atol=2e-3)


def test_a_saved_adapter_is_peft_s_and_gives_the_merged_model(tmp_path: Path) -> None:
    model = adapted(torch.float32)
    merged(model)
    save_adapter(model, tmp_path / "adapter")
    again = PeftModel.from_pretrained(biased_model(torch.float32), tmp_path / "adapter")
    torch.testing.assert_close(again(TOKEN_IDS).logits, model(TOKEN_IDS).logits, rtol=1e-4, atol=1e-4)


def test_adapters_with_dropout_or_on_transposed_weights_are_refused() -> None:
    with_dropout = add_lora(biased_model(torch.float32), LoraSettings(dropout=0.1))
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.q_proj\.weight: an adapter with dropout cannot be"):
        MergedLora(with_dropout, base_weights(with_dropout))
    gpt2: PreTrainedModel = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32))
    transposed = add_lora(gpt2, LoraSettings(target_modules=("c_attn",)))
    with pytest.raises(ModelError, match=r"c_attn\.weight: an adapter of Conv1D cannot be merged"):
        MergedLora(transposed, base_weights(transposed))
