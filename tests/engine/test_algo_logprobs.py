"""Chunked log-probabilities and entropies against the plain computation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_engine.algo.logprobs import token_logprobs

torch.set_num_threads(1)


def plain(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """All logits at once, as the definition says."""
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if isinstance(temperature, Tensor):
        temperature = temperature.expand(labels.shape)[..., None]
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs.gather(-1, labels[..., None]).squeeze(-1), -(logprobs.exp() * logprobs).sum(-1)


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*s, generator=random).to(dtype) for s in ((3, 4, 5), (7, 5), (7,)))
    labels = torch.randint(0, 7, (3, 4), generator=random)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), labels


TEMPERATURES = [1.0, 0.7, torch.tensor([[0.7], [1.0], [1.6]]).double(), torch.linspace(0.5, 2, 12).double().view(3, 4)]


@pytest.mark.parametrize("chunk_size", [1, 5, 12, None])
@pytest.mark.parametrize("temperature", TEMPERATURES, ids=["one", "number", "per row", "per token"])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_values_and_gradients_are_those_of_the_plain_computation(
    chunk_size: int | None, temperature: float | Tensor, soft_cap: float | None
) -> None:
    hidden, weight, bias, labels = problem()
    ours = token_logprobs(
        hidden, weight, labels, bias=bias, temperature=temperature, chunk_size=chunk_size, soft_cap=soft_cap
    )
    theirs = plain(hidden, weight, labels, bias, temperature, soft_cap)
    pulls = (torch.linspace(-1, 1, 12).double().view(3, 4), torch.linspace(2, -1, 12).double().view(3, 4))
    for used in ((0,), (1,), (0, 1)):
        measured, expected = (
            torch.autograd.grad(
                [o[i] for i in used], (hidden, weight, bias), [pulls[i] for i in used], retain_graph=True
            )
            for o in (ours, theirs)
        )
        for ours_grad, their_grad in zip(measured, expected, strict=True):
            torch.testing.assert_close(ours_grad, their_grad)
    for output, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(output, reference)


def test_gradcheck_holds_for_both_outputs() -> None:
    hidden, weight, bias, labels = problem()
    assert torch.autograd.gradcheck(
        lambda h, w, b: token_logprobs(h, w, labels, bias=b, temperature=TEMPERATURES[2], chunk_size=5, soft_cap=3.0),
        (hidden, weight, bias),
    )


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation returned."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


@pytest.mark.parametrize("chunk_size", [16, None])
def test_no_tensor_ever_holds_all_tokens_times_the_vocabulary(
    chunk_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_engine.algo.logprobs.CHUNK_ELEMENTS", {"cpu": 16 * 500})
    hidden, weight = torch.randn(256, 8, requires_grad=True), torch.randn(500, 8, requires_grad=True)
    labels = torch.randint(0, 500, (256,))
    with LargestTensor() as largest:
        logprobs, entropy = token_logprobs(hidden, weight, labels, chunk_size=chunk_size)
        (logprobs.sum() + entropy.sum()).backward()  # type: ignore[no-untyped-call]
    assert largest.num_elements == 16 * 500


def test_halves_are_accumulated_in_fp32() -> None:
    hidden, weight, bias, labels = problem(torch.bfloat16)
    logprobs, entropy = token_logprobs(hidden, weight, labels, bias=bias, chunk_size=5)
    exact_inputs = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    exact = plain(exact_inputs[0], exact_inputs[1], labels, exact_inputs[2])
    assert logprobs.dtype is entropy.dtype is torch.float32
    torch.testing.assert_close(logprobs.double(), exact[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), exact[1], atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad(logprobs.sum(), (hidden, weight, bias))
    expected = torch.autograd.grad(exact[0].sum(), exact_inputs)
    for gradient, reference in zip(gradients, expected, strict=True):
        assert gradient.dtype is torch.bfloat16
        torch.testing.assert_close(gradient.double(), reference, atol=2e-2, rtol=2**-8)


def test_autocast_does_not_round_the_logits() -> None:
    hidden, weight, _, labels = problem(torch.float32)
    expected = token_logprobs(hidden, weight, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        measured = token_logprobs(hidden, weight, labels)
    assert torch.equal(measured[0], expected[0])
    assert torch.equal(measured[1], expected[1])


def test_labels_may_be_of_any_integer_dtype() -> None:
    hidden, weight, _, labels = problem()
    expected, _ = token_logprobs(hidden, weight, labels)
    assert torch.equal(token_logprobs(hidden, weight, labels.to(torch.int32))[0], expected)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_gives_what_a_cpu_gives(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*s, generator=random).div(4).to(dtype) for s in ((256, 64), (1000, 64)))
    labels = torch.randint(0, 1000, (256,), generator=random)
    results = []
    for device in ("cpu", "cuda"):
        leaves = [t.detach().to(device).requires_grad_() for t in (hidden, weight)]
        logprobs, entropy = token_logprobs(leaves[0], leaves[1], labels.to(device), temperature=0.7, chunk_size=100)
        gradients = torch.autograd.grad(logprobs.mean() + entropy.mean(), leaves)
        results.append([t.cpu().float() for t in (logprobs, entropy, *gradients)])
    for index, (on_cpu, on_gpu) in enumerate(zip(*results, strict=True)):
        is_gradient = index > 1  # rounded to the parameters' dtype, and its operands too
        tolerance = 1e-4 if not is_gradient else 2e-2 * on_cpu.abs().max().item()
        torch.testing.assert_close(on_gpu, on_cpu, atol=tolerance, rtol=1e-4)


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_never_holds_the_logits_of_a_long_batch() -> None:
    hidden = torch.randn(8192, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(128_000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 128_000, (8192,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, entropy = token_logprobs(hidden, weight, labels)
    (logprobs.sum() + entropy.sum()).backward()  # type: ignore[no-untyped-call]
    assert torch.cuda.max_memory_allocated() - before < 1.5e9  # the logits alone are 4.2e9 bytes


def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_do() -> None:
    hidden, weight, _, labels = problem()
    logprobs, _ = token_logprobs(hidden, weight.detach(), labels)
    logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is None
    assert hidden.grad is not None
    assert hidden.grad.abs().sum() > 0


def test_logits_far_apart_stay_finite() -> None:
    hidden = torch.tensor([[1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]])
    logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([1]))
    (logprobs + entropy).sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.item() == pytest.approx(-2e4)
    assert entropy.item() == 0.0
    assert hidden.grad is not None
    assert hidden.grad.item() == pytest.approx(-2.0)


def test_no_tokens_give_empty_outputs_with_a_graph() -> None:
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    logprobs, entropy = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64))
    (logprobs.sum() + entropy.sum()).backward()  # type: ignore[no-untyped-call]
    assert logprobs.shape == (0,)
    assert weight.grad is not None
    assert weight.grad.abs().sum().item() == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": torch.zeros(3, 5, dtype=torch.int64)}, "must have the shape of hidden"),
        ({"labels": torch.zeros(3, 4)}, "expected token ids"),
        ({"weight": torch.zeros(7, 6)}, r"must be \(V, 5\)"),
        ({"bias": torch.zeros(6)}, "one a row of weight"),
        ({"temperature": 0.0}, "temperature = 0.0"),
        ({"temperature": torch.ones(4)}, "unsqueeze it"),
        ({"chunk_size": 0}, "chunk_size = 0"),
        ({"soft_cap": 0.0}, "soft_cap = 0.0"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    hidden, weight, bias, labels = problem(torch.float32)
    arguments: dict[str, object] = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias}
    with pytest.raises(ValueError, match=message):
        token_logprobs(**(arguments | changes))  # type: ignore[arg-type]
