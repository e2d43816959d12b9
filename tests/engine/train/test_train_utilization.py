"""The operations that `train/mfu` counts are those that torch counts in the forward and backward pass."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from training import VOCABULARY, made_up_groups, small_model
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_engine.data.batching import make_batch
from grpo_engine.models.layers import freeze_except_layers
from grpo_engine.train import utilization
from grpo_engine.train.scoring import Scorer
from grpo_engine.train.utilization import ModelFlops, peak_flops


@pytest.mark.parametrize("trained", [None, (1, 2), (0, 2)])
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_operations_of_a_step_are_those_that_torch_counts(trained: tuple[int, ...] | None, is_tied: bool) -> None:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=is_tied, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if trained is not None:
        freeze_except_layers(model, set(trained))
    rows, width = 4, 32
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(VOCABULARY, (rows, width))).logits.sum().backward()
    # Eager attention computes the whole square of a row, of which half is needed.
    ours = ModelFlops(model).of(positions=rows * width, labels=rows * width, mean_length=2 * width)
    assert counter.get_total_flops() == pytest.approx(ours, rel=0.005)


def test_positions_are_those_that_go_through_the_layers() -> None:
    scorer = Scorer(small_model())
    batch = make_batch(made_up_groups(0, size=6), seq_len=32)
    scorer.logprobs(batch)
    assert 0 < scorer.num_positions <= batch.num_inputs
    scorer.shares_prompts, before = False, scorer.num_positions
    scorer.logprobs(batch)
    assert scorer.num_positions - before == batch.inputs.numel()


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
        ("NVIDIA H100 PCIe", torch.float16, 756),
        ("NVIDIA H200", torch.bfloat16, 989),
        ("NVIDIA H200", torch.float32, None),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA L4", torch.bfloat16, 121),
        ("NVIDIA L40S", torch.bfloat16, 362),
        ("NVIDIA Unheard Of", torch.bfloat16, None),
    ],
)
def test_the_peak_is_that_of_the_card_in_16_bits(
    name: str, dtype: torch.dtype, tflops: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = SimpleNamespace(get_device_name=lambda device: name)
    monkeypatch.setattr(utilization.torch, "cuda", fake)
    assert peak_flops(torch.device("cuda"), dtype) == (None if tflops is None else tflops * 1e12)
    assert peak_flops(torch.device("cpu"), dtype) is None
