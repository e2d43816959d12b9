"""The Triton kernels of the output head against its eager arithmetic: compiled on a GPU, elsewhere interpreted."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from grpo_engine.algo import head, tiles
from grpo_engine.algo.logprobs import token_logprobs
from grpo_engine.algo.tiles import Running, Softmax, Tile

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
pytest.importorskip("triton")
runs_kernels = pytest.mark.skipif(
    not (IS_INTERPRETED or torch.cuda.is_available()), reason="needs an NVIDIA GPU, or TRITON_INTERPRET=1"
)


@pytest.mark.extended("test_algo_logprobs, of the eager arithmetic")
@pytest.mark.slow
@pytest.mark.skipif(IS_INTERPRETED or torch.cuda.is_available(), reason="they run in this process")
def test_the_kernels_agree_with_the_eager_arithmetic_when_interpreted() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def tile_of(num_columns: int, bias: Tensor | None, temperature: Tensor | None, soft_cap: float | None) -> Tile:
    """Five tokens, the labels of the last two in other tiles."""
    random = torch.Generator().manual_seed(0)
    products = torch.randn(5, num_columns, generator=random).mul(4).to(DEVICE)
    labels = torch.tensor([0, num_columns - 1, num_columns // 2, -1, num_columns], device=DEVICE)
    return Tile(products, labels, bias, temperature, soft_cap)


def bias_of(kind: str, num_columns: int) -> Tensor | None:
    if kind == "none":
        return None
    bias = torch.linspace(-1, 1, num_columns, device=DEVICE)
    return bias.bfloat16() if kind == "bf16" else bias.index_fill(0, torch.tensor([1, 3], device=DEVICE), -torch.inf)


@runs_kernels
@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("temperature", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("bias", ["none", "bf16", "blocked"])
@pytest.mark.parametrize("num_columns", [5, 64, 150])
def test_a_tile_is_folded_and_turned_into_its_gradient_as_eagerly(
    num_columns: int, bias: str, temperature: bool, soft_cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpo_engine.algo import logprobs_kernels as kernels

    monkeypatch.setattr(kernels, "WORDS", 64)  # 150 words are then three stretches
    divisor = torch.linspace(0.5, 2, 5, device=DEVICE) if temperature else None

    def tile() -> Tile:
        return tile_of(num_columns, bias_of(bias, num_columns), divisor, soft_cap)

    eager, measured = (Running.of_no_words(5, torch.float32, torch.device(DEVICE)) for _ in range(2))
    for _ in range(2):  # a second tile meets the numbers of the first
        tiles.fold_tile(tile(), eager)
        kernels.fold_tile(tile(), measured)
    torch.testing.assert_close(tuple(measured), tuple(eager), equal_nan=True)

    log_total = eager.total.log()
    softmax = Softmax(eager.maximum, log_total, log_total - eager.weighted / eager.total)
    pulls = torch.linspace(-1, 1, 5, device=DEVICE), torch.linspace(2, -1, 5, device=DEVICE)
    cases = [(*pulls, torch.float32), (pulls[0], None, torch.bfloat16), (None, pulls[1], torch.float16)]
    for of_logprobs, of_entropy, dtype in cases:  # the type is that of what is written, whatever pulls
        expected = tiles.tile_gradient(tile(), softmax, of_logprobs, of_entropy, dtype)
        gradient = kernels.tile_gradient(tile(), softmax, of_logprobs, of_entropy, dtype)
        assert gradient.dtype is dtype
        torch.testing.assert_close(gradient, expected)


@runs_kernels
def test_the_head_gives_the_same_with_and_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(head.TILES, DEVICE, (8, 16))  # 20 tokens, 150 words: nine tiles
    random = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*s, generator=random).to(DEVICE) for s in ((20, 16), (150, 16), (150,)))
    labels = torch.randint(0, 150, (20,), generator=random).to(DEVICE)
    leaves = [each.requires_grad_() for each in (hidden, weight, bias)]
    results = []
    for has_kernels in (False, True):
        monkeypatch.setattr(head, "_has_kernels", lambda *_, answer=has_kernels: answer)
        outputs = token_logprobs(hidden, weight, labels, bias=bias, temperature=0.7, soft_cap=5.0)
        results.append((*outputs, *torch.autograd.grad(outputs[0].sum() - outputs[1].mean(), leaves)))
    torch.testing.assert_close(results[1], results[0])


@runs_kernels
def test_nan_passes_through_the_kernels() -> None:
    from grpo_engine.algo import logprobs_kernels as kernels

    tile = tile_of(150, None, None, None)
    tile.products[2, 100] = torch.nan
    running = Running.of_no_words(5, torch.float32, torch.device(DEVICE))
    kernels.fold_tile(tile, running)
    assert running.total.isnan().tolist() == [False, False, True, False, False]
    softmax = Softmax(running.maximum, running.total.log(), running.total)
    gradient = kernels.tile_gradient(tile, softmax, torch.ones(5, device=DEVICE), None, torch.bfloat16)
    assert gradient.isnan().any(-1).tolist() == [False, False, True, False, False]
