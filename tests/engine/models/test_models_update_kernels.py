"""The Triton kernels of accumulation and of 8-bit AdamW against torch: compiled on a GPU, elsewhere interpreted."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
pytest.importorskip("triton")
runs_kernels = pytest.mark.skipif(
    not (IS_INTERPRETED or torch.cuda.is_available()), reason="needs an NVIDIA GPU, or TRITON_INTERPRET=1"
)
BLOCK, BETAS, LR, EPS, DECAY, SCALE = 256, (0.9, 0.99), 1e-2, 1e-8, 0.1, 0.5


@pytest.mark.extended("nothing: they run on GPUs only, where test_optimizers_gpu covers them")
@pytest.mark.slow
@pytest.mark.skipif(IS_INTERPRETED or torch.cuda.is_available(), reason="they run in this process")
def test_the_kernels_agree_with_torch_when_interpreted() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def values_of_codes(*, signed: bool) -> Tensor:
    """The 256 values of bitsandbytes' `create_dynamic_map`, ascending: decades of equal bins, 0 and 1."""
    values = [0.0, 1.0]
    for decade in range(7):
        bins = 2 ** (decade if signed else decade + 1)
        centers = (0.1 + 0.9 * (torch.arange(bins) + 0.5) / bins) * 10.0 ** (decade - 6)
        values += [*centers.tolist(), *((-centers).tolist() if signed else [])]
    return torch.tensor(sorted(values), device=DEVICE)


def nearest(shares: Tensor, values: Tensor, *, signed: bool) -> Tensor:
    codes = (shares[:, None] - values).abs().argmin(dim=1)
    return torch.where((shares < 0) & (codes == 127), 126, codes) if signed else codes


def blocks(flat: Tensor) -> Tensor:
    """(blocks, 256), filled up with 0."""
    return torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8_bit_adamw_is_adamw_on_states_with_the_nearest_code(dtype: torch.dtype) -> None:
    from grpo_engine.models.update_kernels import adamw_8bit_

    random = torch.Generator().manual_seed(0)
    numel = 5 * BLOCK + 100
    parameter = torch.randn(numel, generator=random).to(DEVICE)
    maps = values_of_codes(signed=True), values_of_codes(signed=False)
    codes = tuple(torch.full((numel,), start, dtype=torch.uint8, device=DEVICE) for start in (127, 0))
    scales = tuple(torch.zeros(6, device=DEVICE) for _ in maps)
    for step in (1, 2, 3):
        magnitudes = 10 ** torch.empty(numel).uniform_(-7, 0, generator=random)
        gradient = (torch.randn(numel, generator=random) * magnitudes).to(DEVICE, dtype)
        gradient[:BLOCK] = 0  # a block without a scale
        old = [
            (blocks(values[code.long()]) * scale[:, None]).flatten()[:numel]
            for values, code, scale in zip(maps, codes, scales, strict=True)
        ]
        scaled = SCALE * gradient.float()
        first = BETAS[0] * old[0] + (1 - BETAS[0]) * scaled
        second = BETAS[1] * old[1] + (1 - BETAS[1]) * scaled.square()
        corrected = (first / (1 - BETAS[0] ** step)) / ((second / (1 - BETAS[1] ** step)).sqrt() + EPS)
        wanted = (parameter - LR * corrected) * (1 - LR * DECAY)

        adamw_8bit_(
            parameter, gradient, codes, scales, maps,
            gradient_scale=SCALE, step=step, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY,
        )  # fmt: skip
        torch.testing.assert_close(parameter, wanted, rtol=1e-4, atol=1e-6)
        for moment, values, code, scale, signed in zip(
            (first, second), maps, codes, scales, (True, False), strict=True
        ):
            largest = blocks(moment).abs().amax(dim=1)
            torch.testing.assert_close(scale, largest)
            shares = (blocks(moment) / largest.clamp(min=1e-30)[:, None]).flatten()[:numel]
            off = code.int() - nearest(shares, values, signed=signed)
            assert (off != 0).float().mean() < 0.002  # at the middle between two values, rounding decides
            assert off.abs().max() <= 1


@runs_kernels
def test_gradients_in_16_bits_add_up_in_fp32() -> None:
    from grpo_engine.models.update_kernels import add

    gradients = [torch.randn(3, 1700, device=DEVICE).bfloat16() for _ in range(3)]
    total = None
    for gradient in gradients:
        total = add(total, gradient)
    assert total is not None
    assert total.dtype is torch.float32
    assert torch.equal(total, gradients[0].float() + gradients[1] + gradients[2])


@runs_kernels
def test_a_gradient_with_gaps_is_added_as_it_reads() -> None:
    from grpo_engine.models.update_kernels import add

    turned = torch.randn(40, 30, device=DEVICE).bfloat16().t()
    assert torch.equal(add(None, turned), turned.float())


@runs_kernels
def test_bf16_totals_and_parameters_are_rounded_stochastically() -> None:
    """Neither a sum nor an update that is a tenth of the last bit is lost on average, and a seed repeats it."""
    from grpo_engine.models.update_kernels import adamw_8bit_, add

    numel = 64 * BLOCK
    tenth = 0.1 * 2.0**-7  # of the distance between 1 and the next bf16
    tolerance = 5 * (0.09 / numel) ** 0.5 * 2.0**-7
    torch.manual_seed(0)
    total = add(torch.ones(numel, device=DEVICE).bfloat16(), torch.full((numel,), tenth, device=DEVICE).bfloat16())
    assert total.dtype is torch.bfloat16
    assert set(total.unique().tolist()) == {1.0, 1.0 + 2.0**-7}
    assert total.double().mean().item() == pytest.approx(1 + tenth, abs=tolerance + 1e-5)

    def updated() -> Tensor:
        parameter = torch.ones(numel, device=DEVICE).bfloat16()
        codes = tuple(torch.full((numel,), start, dtype=torch.uint8, device=DEVICE) for start in (127, 0))
        scales = tuple(torch.zeros(numel // BLOCK, device=DEVICE) for _ in codes)
        maps = values_of_codes(signed=True), values_of_codes(signed=False)
        gradient = torch.full((numel,), -1.0, device=DEVICE).bfloat16()
        adamw_8bit_(
            parameter, gradient, codes, scales, maps,
            gradient_scale=1.0, step=1, lr=tenth, betas=BETAS, eps=EPS, weight_decay=0.0,
        )  # fmt: skip
        return parameter

    torch.manual_seed(1)
    first = updated()
    assert first.double().mean().item() == pytest.approx(1 + tenth, abs=tolerance)
    torch.manual_seed(1)
    assert torch.equal(updated(), first)
    assert not torch.equal(updated(), first)
