"""The output head on an NVIDIA GPU: as on the CPU, with kernels as without, twice the same, and within its memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from grpo_engine.algo import head
from grpo_engine.algo.logprobs import token_logprobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SETTINGS = {"soft_cap": 20.0, "temperature": 0.7}


def problem(
    dtype: torch.dtype, num_tokens: int = 300, vocabulary: int = 5003, hidden_size: int = 64, device: str = "cuda"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and labels; a vocabulary of odd size, one word of it blocked."""
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
    """Make 3 × 5 tiles of 300 tokens × 5003 words."""
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


def test_a_nan_affects_its_own_token_only() -> None:
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

    def loss() -> Tensor:
        logprobs, entropy = token_logprobs(hidden, weight, labels)
        return (logprobs + 0.01 * entropy).mean()

    assert peak_bytes(loss) < 1.2e9  # the logits alone are 4.2e9 bytes
