"""Chunked log-probabilities and entropies against the plain computation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

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


def problem(dtype: torch.dtype = torch.float64, vocabulary: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = ((3, 4, 5), (vocabulary, 5), (vocabulary,))
    hidden, weight, bias = (torch.randn(*s, generator=random).to(dtype) for s in shapes)
    labels = torch.randint(0, vocabulary, (3, 4), generator=random)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), labels


TEMPERATURES = [1.0, 0.7, torch.tensor([[0.7], [1.0], [1.6]]).double(), torch.linspace(0.5, 2, 12).double().view(3, 4)]


@pytest.mark.parametrize(("chunk_size", "vocabulary"), [(1, 7), (5, 7), (None, 7), (5, 150), (None, 150)])
@pytest.mark.parametrize("temperature", TEMPERATURES, ids=["one", "number", "per row", "per token"])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_values_and_gradients_are_those_of_the_plain_computation(
    chunk_size: int | None,
    vocabulary: int,
    temperature: float | Tensor,
    soft_cap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("grpo_engine.algo.head.TILES", {"cpu": (12, 8)})  # tiles of at most 64 words then
    hidden, weight, bias, labels = problem(vocabulary=vocabulary)
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
        torch.testing.assert_close(measured, expected)
    torch.testing.assert_close(ours, theirs)


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


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("chunk_size", "largest_tile"), [(16, 16 * 500), (None, 128 * 64)])
def test_no_tensor_ever_holds_all_tokens_times_the_vocabulary(
    chunk_size: int | None, largest_tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_engine.algo.head.TILES", {"cpu": (128, 64)})
    hidden, weight = torch.randn(256, 8, requires_grad=True), torch.randn(500, 8, requires_grad=True)
    labels = torch.randint(0, 500, (256,))
    with LargestTensor() as largest:
        logprobs, entropy = token_logprobs(hidden, weight, labels, chunk_size=chunk_size)
        (logprobs.sum() + entropy.sum()).backward()  # type: ignore[no-untyped-call]
    assert largest.num_elements == largest_tile


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


@pytest.mark.parametrize("away", [1e4, -1e4])
def test_logits_far_from_zero_keep_their_digits(away: float) -> None:
    hidden, weight, bias, labels = problem(torch.float32)
    shifted = token_logprobs(hidden, weight, labels, bias=torch.full_like(bias, away))
    exact = plain(hidden.double(), weight.double(), labels)
    measured = tuple(each.double() for each in shifted)
    torch.testing.assert_close(measured, exact, atol=5e-3, rtol=0)  # fp32 has steps of 1e-3 at 1e4
    shifted[0].sum().backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    expected_grad = torch.autograd.grad(exact[0].sum(), hidden)[0]
    torch.testing.assert_close(hidden.grad, expected_grad, atol=5e-3, rtol=0)


@pytest.mark.parametrize("blocked", [[0], list(range(64)), list(range(149)), [149]])
def test_a_bias_of_minus_infinity_takes_words_out_of_the_vocabulary(
    blocked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_engine.algo.head.TILES", {"cpu": (12, 8)})
    hidden, weight, bias, labels = problem(vocabulary=150)
    kept = [word for word in range(150) if word not in blocked]
    closed = bias.detach().index_fill(0, torch.tensor(blocked), -torch.inf).requires_grad_()
    labels = torch.tensor(kept)[labels % len(kept)]
    ours = token_logprobs(hidden, weight, labels, bias=closed)
    position = torch.zeros(150, dtype=torch.int64).index_copy(0, torch.tensor(kept), torch.arange(len(kept)))
    theirs = plain(hidden, weight[kept], position[labels], bias[kept])
    torch.testing.assert_close(ours, theirs)
    measured_grads = torch.autograd.grad(ours[0].sum() + ours[1].sum(), (hidden, weight, closed))
    expected_grads = torch.autograd.grad(theirs[0].sum() + theirs[1].sum(), (hidden, weight, bias))
    torch.testing.assert_close(measured_grads, expected_grads)


def test_a_blocked_word_has_a_log_probability_of_minus_infinity() -> None:
    hidden, weight, bias, labels = problem()
    closed = bias.detach().index_fill(0, labels[0, :1], -torch.inf)
    logprobs, entropy = token_logprobs(hidden, weight, labels, bias=closed)
    assert logprobs[0, 0] == -torch.inf
    assert entropy.isfinite().all()


def test_a_nan_state_affects_its_own_token_only() -> None:
    hidden, weight, _, labels = problem()
    broken = hidden.detach().clone()
    broken[1, 2, 0] = torch.nan
    logprobs, entropy = token_logprobs(broken, weight, labels)
    expected = torch.zeros(3, 4, dtype=torch.bool)
    expected[1, 2] = True
    assert torch.equal(logprobs.isnan(), expected)
    assert torch.equal(entropy.isnan(), expected)


def test_inputs_may_have_any_strides() -> None:
    hidden, weight, bias, labels = problem()
    expected = token_logprobs(hidden, weight, labels, bias=bias)
    strided = torch.empty(5, 4, 3).double().permute(2, 1, 0).copy_(hidden.detach()).requires_grad_()
    tied = weight.detach().T.contiguous().T.requires_grad_()
    assert not strided.is_contiguous()
    assert not tied.is_contiguous()
    wide = torch.stack((bias.detach(), bias.detach()), -1)[:, 0]
    measured = token_logprobs(strided, tied, labels.T.contiguous().T, bias=wide)
    torch.testing.assert_close(measured, expected)
    pull = torch.ones(()).double().expand(3, 4)  # a gradient without memory of its own
    gradients = torch.autograd.grad(measured, (strided, tied), (pull, pull))
    references = torch.autograd.grad(expected, (hidden, weight), (pull, pull))
    torch.testing.assert_close(gradients, references)


def test_a_weight_tied_to_the_embedding_gets_both_gradients() -> None:
    _, weight, _, labels = problem()
    logprobs, _ = token_logprobs(torch.nn.functional.embedding(labels, weight), weight, labels)
    reference, _ = plain(torch.nn.functional.embedding(labels, weight), weight, labels)
    (ours,), (theirs,) = (torch.autograd.grad(each.sum(), weight) for each in (logprobs, reference))
    torch.testing.assert_close(ours, theirs)


def test_it_works_inside_activation_checkpointing() -> None:
    hidden, weight, _, labels = problem()
    expected = torch.autograd.grad(token_logprobs(hidden, weight, labels)[0].sum(), (hidden, weight))
    logprobs, _ = checkpoint(token_logprobs, hidden, weight, labels, use_reentrant=False)
    for gradient, reference in zip(torch.autograd.grad(logprobs.sum(), (hidden, weight)), expected, strict=True):
        assert torch.equal(gradient, reference)


def test_a_frozen_head_costs_no_product_for_its_gradient() -> None:
    hidden, weight, _, labels = problem()
    counts = []
    for head in (weight, weight.detach()):
        with Products() as products:
            token_logprobs(hidden, head, labels)[0].sum().backward()  # type: ignore[no-untyped-call]
        counts.append(products.count)
    assert counts == [4, 3]


@pytest.mark.parametrize("label", [-100, -1, 7])
def test_a_label_outside_the_vocabulary_is_refused(label: int) -> None:
    hidden, weight, _, labels = problem()
    labels[1, 1] = label
    with pytest.raises(ValueError, match="the vocabulary from 0 to 6"):
        token_logprobs(hidden, weight, labels)


def test_one_token_and_labels_at_both_ends_of_the_vocabulary_work() -> None:
    _, weight, _, _ = problem(vocabulary=150)
    for label in (0, 149):
        hidden = torch.linspace(-1, 1, 5).double()
        logprobs, entropy = token_logprobs(hidden, weight, torch.tensor(label))
        reference = plain(hidden, weight, torch.tensor(label))
        assert logprobs.shape == entropy.shape == ()
        torch.testing.assert_close((logprobs, entropy), reference)


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
