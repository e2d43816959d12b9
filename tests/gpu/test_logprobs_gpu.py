"""The output head on an NVIDIA GPU: as on the CPU, with kernels as without, twice the same, and within its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_engine.algo import head
from grpo_engine.algo.fused_loss import CHUNK_ELEMENTS, fused_policy_loss
from grpo_engine.algo.logprobs import token_logprobs
from grpo_engine.algo.loss import LossConfig, LossInputs, policy_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SETTINGS = {"soft_cap": 20.0, "temperature": 0.7}


def problem(
    dtype: torch.dtype, num_tokens: int = 300, vocabulary: int = 5003, hidden_size: int = 64, device: str = "cuda"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and labels; a vocabulary that nothing divides, one word of it blocked."""
    random = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=random)
        for shape in ((num_tokens, hidden_size), (vocabulary, hidden_size), (vocabulary,))
    )
    labels = torch.randint(0, vocabulary - 1, (num_tokens,), generator=random).to(device)
    labels[:2] = torch.tensor([0, vocabulary - 2])
    bias[-1] = -torch.inf
    leaves = [each.to(device, dtype).requires_grad_() for each in (hidden.div(2), weight.div(2), bias)]
    return leaves[0], leaves[1], leaves[2], labels


def results(
    dtype: torch.dtype, device: str = "cuda", loss_of: Callable[[Tensor, Tensor], Tensor] | None = None
) -> list[Tensor]:
    """Log-probabilities, entropies, and the gradients of hidden, weight and bias."""
    hidden, weight, bias, labels = problem(dtype, device=device)
    outputs = token_logprobs(hidden, weight, labels, bias=bias, **SETTINGS)
    loss = loss_of(*outputs) if loss_of else (outputs[0] + 0.1 * outputs[1]).mean()
    return [*outputs, *torch.autograd.grad(loss, (hidden, weight, bias))]


def assert_close(measured: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    """Outputs to fp32's rounding; gradients to that of the dtype in which a GPU multiplies them."""
    of_dtype = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for index, (ours, theirs) in enumerate(zip(measured, expected, strict=True)):
        ours, theirs = ours.detach().cpu().float(), theirs.detach().cpu().float()
        tolerance = 1e-4 if index < 2 else of_dtype * theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=1e-4)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 tokens × 5003 words are 3 × 5 tiles then."""
    monkeypatch.setattr(head, "TILES", {"cuda": (128, 1024), "cpu": (128, 1024)})


@DTYPES
@pytest.mark.usefixtures("small_tiles")
def test_a_gpu_gives_what_a_cpu_gives(dtype: torch.dtype) -> None:
    assert_close(results(dtype), results(dtype, device="cpu"), dtype)


@DTYPES
def test_one_tile_gives_what_many_give(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = results(dtype)
    monkeypatch.setitem(head.TILES, "cuda", (128, 1024))
    assert_close(results(dtype), whole, dtype)


@DTYPES
@pytest.mark.usefixtures("small_tiles")
def test_the_kernels_give_what_the_eager_arithmetic_gives(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernels = results(dtype)
    monkeypatch.setattr(head, "_has_kernels", lambda *_: False)
    assert_close(with_kernels, results(dtype), dtype)


def test_the_kernels_are_what_runs_on_a_gpu() -> None:
    hidden, weight, bias, labels = problem(torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        token_logprobs(hidden, weight, labels, bias=bias)[0].sum().backward()  # type: ignore[no-untyped-call]
    names = {event.key for event in profile.key_averages()}
    assert {"_fold", "_gradient"} <= names


@DTYPES
@pytest.mark.usefixtures("small_tiles")
def test_two_runs_agree_bit_for_bit(dtype: torch.dtype) -> None:
    for first, second in zip(results(dtype), results(dtype), strict=True):
        assert torch.equal(first, second)


def test_gradients_of_unlikely_words_do_not_vanish_in_fp16() -> None:
    def small(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return (logprobs.mean() + entropy.mean()) * 1e-2  # 7e-9 a word and token: fp16 has no number below 6e-8

    hidden, weight, bias, labels = problem(torch.float16)
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight, bias)]
    loss = small(*token_logprobs(exact[0], exact[1], labels, bias=exact[2], **SETTINGS))
    expected = torch.autograd.grad(loss, exact[2])[0]
    measured = results(torch.float16, loss_of=small)[4]
    assert expected.abs().median() > 5e-7  # over the tokens they add up to what fp16 holds
    torch.testing.assert_close(measured.double(), expected, atol=1e-7, rtol=5e-3)


def test_what_is_not_a_number_shows_in_its_own_token_alone() -> None:
    hidden, weight, bias, labels = problem(torch.bfloat16)
    broken = hidden.detach().clone()
    broken[7, 0] = torch.nan
    for output in token_logprobs(broken, weight, labels, bias=bias):
        assert output.isnan().nonzero().flatten().tolist() == [7]


def test_a_label_outside_the_vocabulary_gives_nan() -> None:
    hidden, weight, bias, labels = problem(torch.bfloat16)
    labels[3] = -100
    assert token_logprobs(hidden, weight, labels, bias=bias)[0].isnan().nonzero().flatten().tolist() == [3]


def test_autocast_changes_nothing() -> None:
    expected = results(torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        measured = results(torch.float32)
    for ours, theirs in zip(measured, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "ppo_dual_clip"])
@pytest.mark.usefixtures("small_tiles")
def test_the_fused_loss_is_that_of_the_two_steps(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_ELEMENTS, "cuda", 70 * 5003)
    config = LossConfig.preset(preset)  # type: ignore[arg-type]
    hidden, weight, bias, labels = problem(torch.bfloat16)
    mask = torch.zeros(3, 128, dtype=torch.bool, device="cuda")
    mask[:, :100] = True
    logprobs, entropy = (
        torch.zeros(3, 128, device="cuda").masked_scatter(mask, each)
        for each in token_logprobs(hidden, weight, labels, bias=bias, **SETTINGS)
    )
    noise = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)).cuda()
    inputs = LossInputs(logprobs, logprobs.detach() + 0.2 * noise, torch.tensor([1.0, -0.5, 0.3]).cuda(), mask)
    expected = policy_loss(replace(inputs, entropy=entropy), config)
    fused = fused_policy_loss(
        hidden, weight, labels, replace(inputs, logprobs=logprobs.detach()), config, bias=bias, **SETTINGS
    )
    torch.testing.assert_close(fused.outputs.loss, expected.loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fused.outputs.metrics, expected.metrics, atol=1e-4, rtol=1e-4)
    leaves = (hidden, weight, bias)
    measured_grads = torch.autograd.grad(fused.outputs.loss, leaves)
    for ours, theirs in zip(measured_grads, torch.autograd.grad(expected.loss, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-2 * theirs.abs().max().item(), rtol=2e-2)


def test_the_fused_loss_refuses_fp16() -> None:
    hidden, weight, _, labels = problem(torch.float16)
    values = torch.zeros(1, 300, device="cuda")
    inputs = LossInputs(values, values, torch.ones(1, device="cuda"), torch.ones_like(values, dtype=torch.bool))
    with pytest.raises(ValueError, match="fp16"):
        fused_policy_loss(hidden, weight, labels, inputs, LossConfig())


def peak_bytes(run: Callable[[], Tensor]) -> int:
    """Most that was allocated at a time in a forward and backward pass, above what was there before."""
    run().backward()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run().backward()  # type: ignore[no-untyped-call]
    return torch.cuda.max_memory_allocated() - before


def test_8192_tokens_of_a_128k_vocabulary_take_a_gigabyte() -> None:
    hidden, weight, _, labels = problem(torch.bfloat16, num_tokens=8192, vocabulary=128_256, hidden_size=256)
    values = torch.full((8, 1024), -11.0, device="cuda")
    inputs = LossInputs(values, values, torch.linspace(-1, 1, 8).cuda(), torch.ones_like(values, dtype=torch.bool))

    def two_steps() -> Tensor:
        logprobs, entropy = token_logprobs(hidden, weight, labels)
        return (logprobs + 0.01 * entropy).mean()

    def fused() -> Tensor:
        return fused_policy_loss(hidden, weight, labels, inputs, LossConfig()).outputs.loss

    assert peak_bytes(two_steps) < 1.2e9  # the logits alone are 4.2e9 bytes
    assert peak_bytes(fused) < 2.0e9  # 1 GB of logits, and the weight's gradient in fp32
