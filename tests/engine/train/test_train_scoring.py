"""Log-probabilities of models of many kinds are those of their own forward pass, packed and padded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from training import VOCABULARY, made_up_groups, small_model
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    SiglipVisionConfig,
)

from grpo_engine.data.batching import Batch, make_batch
from grpo_engine.errors import ModelError
from grpo_engine.models.layers import takes_any_mask
from grpo_engine.train import scoring
from grpo_engine.train.scoring import Scorer

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
HEAD = {"head_dim": 16}


def falcon(**changes: object) -> PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return FalconForCausalLM(FalconConfig(**sizes, **changes))


def gemma3_with_vision() -> PreTrainedModel:
    """The kind that Gemma 3 is from 4B on: settings of its language model stand one level down."""
    text = Gemma3TextConfig(**SIZES, **HEADS, **HEAD, sliding_window=4)
    vision = SiglipVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=8, patch_size=4
    )
    config = Gemma3Config(text_config=text.to_dict(), vision_config=vision.to_dict(), mm_tokens_per_image=1)
    config.image_token_id = VOCABULARY - 1
    return Gemma3ForConditionalGeneration(config)


def falcon_h1() -> PreTrainedModel:
    state = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
    return FalconH1ForCausalLM(FalconH1Config(**SIZES, **HEADS, **state, lm_head_multiplier=0.3))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2)),
    "falcon": falcon,
    "falcon with alibi": lambda: falcon(alibi=True),
    "falcon h1": falcon_h1,
    "mistral with a window": lambda: MistralForCausalLM(MistralConfig(**SIZES, **HEADS, sliding_window=4)),
    "gemma 2": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **SIZES, **HEADS, **HEAD, sliding_window=4, attn_logit_softcapping=0.5, final_logit_softcapping=3.0
        )
    ),
    "gemma 3 with vision": gemma3_with_vision,
    "recurrent gemma": lambda: RecurrentGemmaForCausalLM(
        RecurrentGemmaConfig(**SIZES, **HEADS, lru_width=32, attention_window_size=8, logits_soft_cap=2.0)
    ),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, **HEADS, logits_scaling=8.0)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SIZES, **HEADS, logit_scale=0.25)),
}


def made(name: str) -> PreTrainedModel:
    """With weights so large that an error shows."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data.normal_(0, 0.3)
    return model


def own_logprobs(model: PreTrainedModel, batch: Batch) -> Tensor:
    """(B, T) of the model's forward pass, every row by itself, with the attention that leaves nothing out."""
    chosen = model.config._attn_implementation
    model.set_attn_implementation("eager")
    result = torch.zeros(batch.mask.shape)
    with torch.no_grad():
        for row, length in enumerate(batch.lengths.tolist()):
            logprobs = model(input_ids=batch.inputs[row : row + 1, :length]).logits[0].log_softmax(-1)
            result[row, :length] = logprobs.gather(-1, batch.labels[row, :length, None])[:, 0]
    model.set_attn_implementation(chosen)
    return torch.where(batch.mask, result, 0.0)


@pytest.mark.parametrize("least_gain", [-1.0, 2.0], ids=["packed", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_gets_the_log_probabilities_of_its_own_forward_pass(
    name: str, least_gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "LEAST_GAIN", {"cpu": least_gain})
    model, batch = made(name), make_batch(made_up_groups(0), seq_len=32)
    expected = own_logprobs(model, batch)
    with torch.no_grad():
        logprobs, _ = Scorer(model).logprobs(batch)
    torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-4)


def test_a_model_with_its_own_computation_of_logits_is_refused() -> None:
    class ScaledLogits(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits *= 4
            return output

    with pytest.raises(ModelError, match=r"ScaledLogits .* another model"):
        Scorer(ScaledLogits(small_model().config))


def test_shared_prompts_are_used_only_for_models_whose_attention_depends_on_the_mask_alone() -> None:
    assert [name for name in MODELS if takes_any_mask(made(name))] == ["gpt2", "granite", "cohere"]
