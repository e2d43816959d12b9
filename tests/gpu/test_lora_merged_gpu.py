"""Merged adapters on an NVIDIA GPU: values, gradients, and how long they take beside PEFT's own layers (printed)."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from peft import PeftModel
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_engine.models.config import LoraSettings
from grpo_engine.models.execution import compile_layers, recompute_layers
from grpo_engine.models.lora import add_lora
from grpo_engine.models.merged_lora import MergedLora

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
LORA = LoraSettings(rank=16, alpha=32, target_modules=("q_proj", "v_proj"))


def adapted(hidden: int, layers: int, dtype: torch.dtype = torch.bfloat16) -> PeftModel:
    """A Llama with heads as an 8B model has them, whose adapters change the model, unlike new ones."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(hidden // 512, 1),
    )
    with torch.device("cuda"):
        model = add_lora(LlamaForCausalLM(config).to(dtype), LORA)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def base_weights(model: PeftModel) -> dict[str, torch.Tensor]:
    modules = model.get_base_model().named_modules()
    return {f"{name}.weight": m.base_layer.weight.detach().clone() for name, m in modules if hasattr(m, "lora_A")}


def merged(model: PeftModel) -> MergedLora:
    lora = MergedLora(model, base_weights(model))
    lora.merge()
    return lora


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    for _ in range(3):
        work()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def backward(model: PeftModel, num_tokens: int = 512) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(512, (1, num_tokens), device="cuda")
    model.zero_grad()
    hidden = model.get_base_model().get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
    torch.manual_seed(2)
    (hidden.float() * torch.randn_like(hidden, dtype=torch.float32)).sum().backward()
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def test_adapters_of_queries_and_values_of_an_8b_model_are_merged_and_rounded_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = adapted(hidden=4096, layers=32)
    base = base_weights(model)
    assert sum(weight.nbytes for weight in base.values()) == 32 * 2 * (4096 + 1024) * 4096
    held = torch.cuda.memory_allocated()
    lora = merged(model)
    kept = torch.cuda.memory_allocated() - held
    torch.cuda.reset_peak_memory_stats()
    duration = milliseconds(lora.merge, repeats=20)
    extra = torch.cuda.max_memory_allocated() - held - kept
    with capsys.disabled():
        sys.stdout.write(f"\nmerge of q and v of 32 layers: {duration:.2f} ms; ")
        sys.stdout.write(f"kept {kept / 1e9:.2f} GB, passing {extra / 1e6:.0f} MB\n")
    for name, layer in model.get_base_model().named_modules():
        if hasattr(layer, "lora_A"):
            change = 2 * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
            exact = base[f"{name}.weight"].double() + change
            now = layer.base_layer.weight
            assert torch.all((now.double() - exact).abs() <= 0.5001 * 2**-7 * exact.abs() + 1e-8)
            assert not torch.equal(now, base[f"{name}.weight"])


@pytest.mark.parametrize("variant", ["plain", "recompute", "compiled"])
@pytest.mark.filterwarnings("default")  # those of the compiler are not ours
def test_the_gradient_is_that_of_adapters_beside_fp32_weights(variant: str) -> None:
    exact, ours = backward(adapted(1024, 4, torch.float32)), adapted(1024, 4)
    merged(ours)
    ours.train()
    if variant == "recompute":
        recompute_layers(ours)
    if variant == "compiled":
        compile_layers(ours.get_base_model())
    own, theirs = backward(ours), backward(adapted(1024, 4))
    assert own.keys() == exact.keys() == theirs.keys()
    for name, gradient in exact.items():
        assert own[name].dtype is torch.float32
        off, off_of_peft = (each[name].sub(gradient).norm() / gradient.norm() for each in (own, theirs))
        assert off < 2 * off_of_peft + 0.01, f"{name}: {off:.4f}, PEFT {off_of_peft:.4f}"


def test_a_pass_over_long_rows_takes_less_memory_than_with_adapters_beside_the_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = adapted(hidden=4096, layers=4)

    tokens = torch.randint(512, (1, 8192), device="cuda")

    @torch.no_grad()
    def forward() -> object:
        return model.get_base_model().get_decoder()(input_ids=tokens, use_cache=False)

    def timed() -> tuple[float, float, int]:
        torch.cuda.reset_peak_memory_stats()
        alone = milliseconds(forward, repeats=10)
        both = milliseconds(lambda: backward(model, 8192), repeats=5)
        return alone, both, torch.cuda.max_memory_allocated()

    beside = timed()
    merged(model)
    with_merged = timed()
    with model.disable_adapter():
        bare = milliseconds(forward, repeats=10)
    with capsys.disabled():
        for name, (alone, both, peak) in {"beside (PEFT)": beside, "merged": with_merged}.items():
            line = f"forward {alone:.2f} ms, with backward {both:.2f} ms, peak {peak / 1e9:.2f} GB"
            sys.stdout.write(f"\n{name:>14}: {line}")
        sys.stdout.write(f"\n{'base model':>14}: forward {bare:.2f} ms\n")
    assert with_merged[2] < beside[2]  # one bf16 input for q and v in place of an fp32 copy for each
