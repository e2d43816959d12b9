"""Attaching a model to weights in the memory of another process: the same logits, the same memory, nothing missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from training import small_model
from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from grpo_engine.errors import ModelError
from grpo_engine.models.shared import load_model_on_shared

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def attachable(**changes: Any) -> LlamaForCausalLM:
    sizes = {"vocab_size": 64, "intermediate_size": 48, "max_position_embeddings": 256, "tie_word_embeddings": False}
    return small_model(1, **{**sizes, **changes}).eval()


def stored(model: torch.nn.Module) -> dict[str, Tensor]:
    """Each parameter once, as a server exports them."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"rope_parameters": LLAMA3_ROPE},
        {"head_dim": 24},
        {"head_dim": 24, "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ],
    ids=["untied", "tied", "llama3 rope", "head size of its own", "all at once", "large theta"],
)
def test_an_attached_model_computes_what_a_loaded_one_does_on_the_same_memory(changes: dict[str, Any]) -> None:
    original = attachable(**changes)
    config = original.config
    tensors = stored(original)
    aliases = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}
    attached = load_model_on_shared(config, tensors, aliases)
    token_ids = torch.arange(120).remainder(64).view(1, -1)
    torch.testing.assert_close(attached(token_ids).logits, original(token_ids).logits, rtol=0, atol=0)
    for name, parameter in attached.named_parameters():
        assert parameter.data_ptr() == tensors[name].data_ptr()
        assert parameter.requires_grad
    assert not any(t.is_meta for t in (*attached.parameters(), *attached.buffers()))
    assert (attached.lm_head.weight is attached.model.embed_tokens.weight) is config.tie_word_embeddings


def test_biases_and_another_architecture_attach_as_well() -> None:
    config = Qwen2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        tie_word_embeddings=True,
    )
    original = Qwen2ForCausalLM(config).eval()
    attached = load_model_on_shared(config, stored(original))
    token_ids = torch.arange(20).view(1, -1)
    torch.testing.assert_close(attached(token_ids).logits, original(token_ids).logits, rtol=0, atol=0)


def test_debug_loading_shows_that_parts_of_a_fused_tensor_share_its_memory(caplog: pytest.LogCaptureFixture) -> None:
    original = attachable()
    tensors = stored(original)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    fused = torch.cat([tensors[name] for name in names])
    rows = [len(tensors[name]) for name in names]
    tensors |= dict(zip(names, fused.split(rows), strict=True))
    with caplog.at_level("DEBUG", "grpo_engine.models"):
        load_model_on_shared(original.config, tensors)
    said = {line.split(" ")[0]: line for line in caplog.messages}
    at = f"of memory at 0x{fused.untyped_storage().data_ptr():x}"
    first = 0
    for name, num_rows in zip(names, rows, strict=True):
        assert f"({num_rows}, 32) float32 on cpu, element {first} {at}" in said[name]
        first += num_rows * 32
    assert caplog.messages[0].startswith("built LlamaForCausalLM on ")


def test_views_of_a_fused_tensor_attach_and_a_write_to_it_is_seen() -> None:
    original = attachable()
    config = original.config
    tensors = stored(original)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    fused = torch.cat([tensors[name] for name in names])  # (32 + 16 + 16, hidden), as inference servers keep it
    tensors.update(zip(names, fused.split([32, 16, 16]), strict=True))
    attached = load_model_on_shared(config, tensors)
    token_ids = torch.arange(20).view(1, -1)
    torch.testing.assert_close(attached(token_ids).logits, original(token_ids).logits, rtol=0, atol=0)
    fused.zero_()
    assert attached.model.layers[0].self_attn.k_proj.weight.abs().sum() == 0
    assert not torch.allclose(attached(token_ids).logits, original(token_ids).logits)


def test_gradients_of_a_tied_embedding_add_up() -> None:
    original = attachable(tie_word_embeddings=True)
    config = original.config
    attached = load_model_on_shared(config, stored(original))
    token_ids = torch.arange(20).view(1, -1)
    for model in (original, attached):
        model(token_ids, labels=token_ids).loss.backward()
    torch.testing.assert_close(attached.lm_head.weight.grad, original.model.embed_tokens.weight.grad)


def test_the_type_of_the_shared_tensors_is_kept() -> None:
    original = attachable()
    config = original.config
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in stored(original).items()}
    attached = load_model_on_shared(config, tensors)
    assert {parameter.dtype for parameter in attached.parameters()} == {torch.bfloat16}
    assert attached.model.rotary_emb.inv_freq.dtype is torch.float32


def test_tensors_that_do_not_fit_are_refused_by_name() -> None:
    original = attachable()
    config, tensors = original.config, stored(original)
    norm = tensors.pop("model.norm.weight")
    tensors["model.final_norm.weight"] = norm
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:60]
    with pytest.raises(ModelError) as caught:
        load_model_on_shared(config, tensors)
    message = str(caught.value)
    assert "not given: model.norm.weight" in message
    assert "not parameters of this model: model.final_norm.weight" in message
    assert "lm_head.weight (60, 32) instead of (64, 32)" in message


def test_tensors_must_be_tied_exactly_as_the_model_is() -> None:
    untied = attachable()
    tensors = stored(untied)
    del tensors["lm_head.weight"]
    with pytest.raises(ModelError, match=r"not given: lm_head\.weight"):
        load_model_on_shared(untied.config, tensors)
    with pytest.raises(ModelError, match="separate in the model, but given as one tensor"):
        load_model_on_shared(untied.config, tensors, {"lm_head.weight": "model.embed_tokens.weight"})
    tied = attachable(tie_word_embeddings=True)
    tensors = {**stored(tied), "lm_head.weight": tied.model.embed_tokens.weight.detach().clone()}
    with pytest.raises(ModelError, match="tied in the model, but given as separate tensors"):
        load_model_on_shared(tied.config, tensors)


def test_an_alias_to_nothing_is_refused() -> None:
    original = attachable(tie_word_embeddings=True)
    config, tensors = original.config, stored(original)
    with pytest.raises(ModelError, match=r"aliases of tensors that are not given: lm_head\.weight → model\.embed"):
        load_model_on_shared(config, tensors, {"lm_head.weight": "model.embed.weight"})
    with pytest.raises(ModelError, match="no tensors"):
        load_model_on_shared(config, {})
