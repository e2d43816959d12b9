"""The loss whose gradient is taken as the logits go by, against `token_logprobs` and `policy_loss`."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_engine.algo.fused_loss import fused_policy_loss, is_sum_over_tokens, token_loss
from grpo_engine.algo.logprobs import token_logprobs
from grpo_engine.algo.loss import LossConfig, LossInputs, LossOutputs, policy_loss
from grpo_engine.algo.loss_config import Preset

torch.set_num_threads(1)

PRESETS = {name: LossConfig.preset(name) for name in get_args(Preset)}
CONFIGS = {
    **{name: config for name, config in PRESETS.items() if is_sum_over_tokens(config)},
    "constant length": LossConfig(aggregation="constant", constant_length=9),
    "kl": LossConfig(kl_coef=0.1, kl_estimator="k2"),
    "unbiased kl": LossConfig(kl_coef=0.1, kl_unbiased=True),
    "entropy": LossConfig(entropy_coef=0.05),
    "truncated": LossConfig(correction="truncate", correction_max=1.1),
    "masked": LossConfig(correction="mask", correction_min=0.7, correction_max=1.3, aggregation="token_mean"),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens a chunk, in tiles of at most 64 words."""
    monkeypatch.setattr("grpo_engine.algo.fused_loss.CHUNK_ELEMENTS", {"cpu": 4 * 150})
    monkeypatch.setattr("grpo_engine.algo.head.TILES", {"cpu": (12, 8)})


class Case:
    """Three sequences of up to five tokens, eleven of them trained, one sequence without any."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        random = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random).to(dtype)

        self.mask = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 1, 0]]).bool()
        self.hidden, self.weight, self.bias = (normal(*shape).requires_grad_() for shape in ((11, 6), (150, 6), (150,)))
        self.labels = torch.randint(0, 150, (11,), generator=random)
        self.temperature = torch.linspace(0.6, 1.5, 11).to(dtype)
        self.leaves = (self.hidden, self.weight, self.bias)
        with torch.no_grad():
            present = self.in_rows(self.chosen()[0])
        near = torch.randn(4, 5, generator=random).to(dtype)
        self.inputs = LossInputs(
            logprobs=torch.full_like(present, torch.nan),
            rollout_logprobs=torch.where(self.mask, present + near * 0.3, torch.nan),
            advantages=normal(4),
            mask=self.mask,
            old_logprobs=torch.where(self.mask, present + near.flip(0) * 0.2, torch.nan),
            ref_logprobs=torch.where(self.mask, present + near.flip(1) * 0.2, torch.nan),
        )

    def chosen(self) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            self.hidden, self.weight, self.labels, bias=self.bias, temperature=self.temperature, soft_cap=4.0
        )

    def in_rows(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.mask.shape).masked_scatter(self.mask, values)

    def plain(self, inputs: LossInputs, config: LossConfig) -> LossOutputs:
        logprobs, entropy = (self.in_rows(each) for each in self.chosen())
        return policy_loss(replace(inputs, logprobs=logprobs, entropy=entropy), config)


@pytest.mark.parametrize("denominator", [None, 7.0])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_gradient_and_metrics_are_those_of_the_two_steps(name: str, denominator: float | None) -> None:
    case, config = Case(), CONFIGS[name]
    inputs = replace(case.inputs, denominator=denominator)
    if config.correction == "none" and "kl" not in name:
        inputs = replace(inputs, old_logprobs=None, ref_logprobs=None)
    expected = case.plain(inputs, config)
    measured = fused_policy_loss(
        case.hidden,
        case.weight,
        case.labels,
        inputs,
        config,
        bias=case.bias,
        temperature=case.temperature,
        soft_cap=4.0,
    )
    torch.testing.assert_close(measured.outputs.loss, expected.loss)
    torch.testing.assert_close(measured.outputs.metrics, expected.metrics)
    torch.testing.assert_close(measured.logprobs, case.in_rows(case.chosen()[0]).detach())
    torch.testing.assert_close(measured.entropy, case.in_rows(case.chosen()[1]).detach())
    assert not measured.logprobs.requires_grad
    expected_grads = torch.autograd.grad(2.5 * expected.loss, case.leaves)
    measured_grads = torch.autograd.grad(2.5 * measured.outputs.loss, case.leaves)
    assert expected_grads[1].abs().max() > 1e-3
    torch.testing.assert_close(measured_grads, expected_grads)


def test_in_a_first_update_the_present_policy_is_the_old_one() -> None:
    case, config = Case(), CONFIGS["truncated"]
    present = case.in_rows(case.chosen()[0].detach())
    expected = case.plain(replace(case.inputs, old_logprobs=present), config)
    inputs = replace(case.inputs, old_logprobs=None)
    arguments = {"bias": case.bias, "temperature": case.temperature, "soft_cap": 4.0}
    measured = fused_policy_loss(
        case.hidden, case.weight, case.labels, inputs, config, is_first_update=True, **arguments
    ).outputs
    torch.testing.assert_close(measured.loss, expected.loss)
    torch.testing.assert_close(measured.metrics, expected.metrics)
    torch.testing.assert_close(
        torch.autograd.grad(measured.loss, case.leaves), torch.autograd.grad(expected.loss, case.leaves)
    )


@pytest.mark.parametrize(
    "config",
    [
        LossConfig.preset("gspo"),
        LossConfig(correction="mask", correction_level="sequence"),
        LossConfig(correction="truncate", correction_level="geometric"),
    ],
    ids=["ratio of a sequence", "correction of a sequence", "geometric correction"],
)
def test_a_loss_that_needs_whole_sequences_is_refused(config: LossConfig) -> None:
    case = Case()
    with pytest.raises(ValueError, match="depends on its whole sequence"):
        fused_policy_loss(case.hidden, case.weight, case.labels, case.inputs, config)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_what_is_trained_gets_a_gradient(wanted: tuple[bool, ...]) -> None:
    case = Case()
    for leaf, is_wanted in zip(case.leaves, wanted, strict=True):
        leaf.requires_grad_(is_wanted)
    outputs = fused_policy_loss(case.hidden, case.weight, case.labels, case.inputs, LossConfig(), bias=case.bias)
    outputs.outputs.loss.backward()  # type: ignore[no-untyped-call]
    for leaf, is_wanted in zip(case.leaves, wanted, strict=True):
        assert (leaf.grad is not None and leaf.grad.abs().sum() > 0) == is_wanted


def test_gradients_come_in_the_dtype_of_their_tensor_and_sums_are_kept_in_fp32() -> None:
    case, exact = Case(torch.bfloat16), Case()
    for ours, reference in zip(exact.leaves, case.leaves, strict=True):
        ours.data = reference.data.double()
    inputs = replace(exact.inputs, old_logprobs=None)
    results = []
    for each in (case, exact):
        loss = fused_policy_loss(
            each.hidden, each.weight, each.labels, inputs, LossConfig(), bias=each.bias
        ).outputs.loss
        results.append((loss, *torch.autograd.grad(loss, each.leaves)))
    assert [each.dtype for each in results[0][1:]] == [torch.bfloat16] * 3
    torch.testing.assert_close(results[0][0].double(), results[1][0].double(), atol=1e-5, rtol=1e-5)
    for gradient, reference in zip(results[0][1:], results[1][1:], strict=True):
        torch.testing.assert_close(gradient.double(), reference, atol=1e-4, rtol=2**-8)


def test_no_trained_token_gives_no_loss_and_gradients_of_zero() -> None:
    case = Case()
    inputs = replace(case.inputs, mask=torch.zeros_like(case.mask))
    outputs = fused_policy_loss(case.hidden[:0], case.weight, case.labels[:0], inputs, LossConfig()).outputs
    outputs.loss.backward()  # type: ignore[no-untyped-call]
    assert outputs.loss.item() == 0.0
    assert case.weight.grad is not None
    assert case.weight.grad.abs().sum() == 0.0


def test_a_token_loss_may_leave_out_either_of_its_two_numbers() -> None:
    case = Case()
    losses = {
        "logprobs": lambda rows, chosen, entropy: -chosen.sum(),
        "entropy": lambda rows, chosen, entropy: entropy.sum(),
    }
    for position, loss_of in enumerate(losses.values()):
        loss, *_ = token_loss(case.hidden, case.weight, case.labels, loss_of)
        numbers = token_logprobs(case.hidden, case.weight, case.labels)
        expected = (-numbers[0].sum(), numbers[1].sum())[position]
        torch.testing.assert_close(loss, expected)
        leaves = (case.hidden, case.weight)
        torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves))


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


def test_the_logits_are_made_once_and_gradients_only_where_wanted() -> None:
    case = Case()
    counts = []
    for has_graph, weight in ((True, case.weight), (True, case.weight.detach()), (False, case.weight)):
        with Products() as products, torch.set_grad_enabled(has_graph):
            outputs = fused_policy_loss(case.hidden, weight, case.labels, case.inputs, LossConfig()).outputs
        assert outputs.loss.requires_grad == has_graph
        counts.append(products.count)
    num_tiles = 3 * 3  # eleven tokens by four, 150 words by 64
    assert counts == [3 * num_tiles, 2 * num_tiles, num_tiles]


def test_a_second_backward_pass_is_refused() -> None:
    case = Case()
    loss = fused_policy_loss(case.hidden, case.weight, case.labels, case.inputs, LossConfig()).outputs.loss
    torch.autograd.grad(loss, case.weight, retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        torch.autograd.grad(loss, case.weight)
