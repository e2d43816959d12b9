"""Adapters and layer filters: what learns, what is saved, and what others can load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from training import small_model
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
)

from grpo_engine.errors import ModelError
from grpo_engine.models.config import LoraSettings, OptimizerSettings
from grpo_engine.models.layers import freeze_except_layers, layer_of
from grpo_engine.models.lora import add_lora, save_adapter
from grpo_engine.models.merged_lora import frozen_state, merged_weights
from grpo_engine.models.optimizers import build_optimizer

TOKEN_IDS = torch.arange(20).view(1, -1)


def layered_model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    model = small_model(seed=1, num_hidden_layers=4, intermediate_size=48, tie_word_embeddings=False)
    return model.to(dtype).eval()


def adapted(dtype: torch.dtype = torch.float32, **settings: Any) -> PeftModel:
    """With adapters whose factors are not zero."""
    model = add_lora(layered_model(dtype), LoraSettings(rank=4, **settings))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def trained_names(model: torch.nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_a_new_adapter_changes_nothing_and_is_the_only_trained_part() -> None:
    model = layered_model()
    before = model(TOKEN_IDS).logits
    with_adapters = add_lora(model, LoraSettings(rank=4, alpha=8))
    torch.testing.assert_close(with_adapters(TOKEN_IDS).logits, before, rtol=0, atol=0)
    names = trained_names(with_adapters)
    assert len(names) == 4 * 2 * 2  # layers, target modules, factors
    assert all("lora_" in name and ("q_proj" in name or "v_proj" in name) for name in names)


def test_an_adapter_has_no_dropout_by_default() -> None:
    model = adapted()
    evaluated = model.eval()(TOKEN_IDS).logits
    torch.testing.assert_close(model.train()(TOKEN_IDS).logits, evaluated, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"target_modules": ("q_proj", "c_attn", "mlp")},
            r"c_attn, mlp are no linear layers of this model; it has .*q_proj",
        ),
        ({"target_modules": ("q_proj", "lm_head")}, r"lm_head is the output layer.*leave it out"),
        ({"layer_indices": "3-5"}, "4, 5 not in this model, which has 4 layers, 0 to 3"),
    ],
)
def test_targets_and_layers_that_cannot_be_adapted_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        add_lora(layered_model(), LoraSettings(**changes))


def test_a_saved_adapter_is_loaded_by_peft_with_the_same_logits(tmp_path: Path) -> None:
    model = adapted()
    folder = tmp_path / "adapters" / "policy_000001"
    save_adapter(model, folder)
    loaded = PeftModel.from_pretrained(layered_model(), folder).eval()
    torch.testing.assert_close(loaded(TOKEN_IDS).logits, model(TOKEN_IDS).logits, rtol=0, atol=0)
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_saved_adapter_holds_what_peft_itself_would_save(tmp_path: Path) -> None:
    model = adapted(target_modules=("q_proj", "down_proj"), layer_indices="1-2")
    save_adapter(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    ours, theirs = (load_file(tmp_path / whose / "adapter_model.safetensors") for whose in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    configs = [json.loads((tmp_path / whose / "adapter_config.json").read_text()) for whose in ("ours", "theirs")]
    assert configs[0] == configs[1]
    save_adapter(model, tmp_path / "half", torch.bfloat16)
    half = load_file(tmp_path / "half" / "adapter_model.safetensors")
    assert all(torch.equal(half[name], ours[name].bfloat16()) for name in ours)


def test_saving_an_adapter_again_replaces_it_but_never_something_else(tmp_path: Path) -> None:
    folder = tmp_path / "final"
    save_adapter(add_lora(layered_model(), LoraSettings(rank=4)), folder)
    save_adapter(add_lora(layered_model(), LoraSettings(rank=8)), folder)
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 8
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    (tmp_path / "notes").mkdir()
    with pytest.raises(ModelError, match="exists and is not an adapter"):
        save_adapter(add_lora(layered_model(), LoraSettings()), tmp_path / "notes")


def test_a_layer_that_is_not_there_freezes_nothing() -> None:
    model = layered_model()
    for indices in ((), (4,)):
        with pytest.raises(ModelError, match="layer indices"):
            freeze_except_layers(model, indices)
    assert all(parameter.requires_grad for parameter in model.parameters())


def of_family(name: str) -> tuple[PreTrainedModel, str]:
    """A small random model with four layers, and the name of its attention's first linear layer."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "vocab_size": 64}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    match name:
        case "gpt2":
            return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=16, n_head=2, vocab_size=64, **special)), "c_attn"
        case "falcon":
            return FalconForCausalLM(FalconConfig(num_hidden_layers=4, **sizes, **special)), "query_key_value"
        case "neox":
            config = GPTNeoXConfig(num_hidden_layers=4, intermediate_size=32, **sizes, **special)
            return GPTNeoXForCausalLM(config), "query_key_value"
        case _:
            return layered_model(), "q_proj"


def changed_by_a_step(model: torch.nn.Module) -> set[str]:
    """Names of the parameters that one optimizer step on all that learns gives other values."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model.parameters(), OptimizerSettings(lr=0.1))
    torch.autograd.backward(model(TOKEN_IDS).logits.square().mean())
    optimizer.step()
    return {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon", "neox"])
def test_a_step_changes_the_chosen_layers_and_nothing_else(family: str) -> None:
    model, _ = of_family(family)
    freeze_except_layers(model, (0, 3))
    assert changed_by_a_step(model) == {name for name, _ in model.named_parameters() if layer_of(name) in {0, 3}}


@pytest.mark.parametrize("is_filtered_later", [False, True], ids=["layer_indices", "freeze_except_layers"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon", "neox"])
def test_a_step_changes_adapters_on_the_chosen_layers_and_nothing_else(family: str, is_filtered_later: bool) -> None:
    model, target = of_family(family)
    indices = None if is_filtered_later else "0,3"
    model = add_lora(model, LoraSettings(rank=2, target_modules=(target,), layer_indices=indices))
    if is_filtered_later:
        freeze_except_layers(model, (0, 3))
    assert len(trained_names(model)) == 2 * 2  # layers, factors
    changed = changed_by_a_step(model)
    assert {layer_of(name) for name in changed} == {0, 3}
    assert all("lora_B" in name and target in name for name in changed)  # A's gradient is zero while B is


def test_merged_and_frozen_weights_together_are_a_bare_model_with_the_adapters_logits() -> None:
    model, bare = adapted(target_modules=("q_proj", "down_proj")), layered_model()
    merged, frozen = dict(merged_weights(model)), frozen_state(model)
    assert merged.keys().isdisjoint(frozen)
    assert {name.rsplit(".", 2)[1] for name in merged} == {"q_proj", "down_proj"}
    bare.load_state_dict({**frozen, **merged})
    tokens = torch.arange(3, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(bare(tokens).logits, model(tokens).logits, atol=1e-5, rtol=0)


def test_merging_again_and_again_rounds_once_and_leaves_the_model_alone() -> None:
    model = adapted(torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged: dict[str, Tensor] = {}
    for _ in range(3):
        merged = dict(merged_weights(model))
    module = model.get_base_model().model.layers[0].self_attn.q_proj
    factor_a, factor_b = module.lora_A["default"].weight, module.lora_B["default"].weight
    expected = (module.base_layer.weight.float() + (32 / 4) * factor_b @ factor_a).bfloat16()
    assert torch.equal(merged["model.layers.0.self_attn.q_proj.weight"], expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
