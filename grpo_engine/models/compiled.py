"""Compilation by torch of functions whose inputs have other sizes in each call."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch._inductor import config as inductor
from torch.fx.experimental import _config as symbols

from grpo_engine.models.inductor import shield_compilers

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_FUSION = "mix_order_reduction"
_OPTIONS: dict[str, Any] = {f"triton.{_FUSION}": False} if hasattr(inductor.triton, _FUSION) else {}
"""Without a fusion for which inductor makes other code below, between and above two sizes: that of a norm's reductions
along both axes, from 8,192 positions of an 8B model on. The first micro-batch below 1,280 positions was compiled within
a step of training, for 5 s, or more than 30 where no cache had it (torch 2.11, `MixOrderReduction` in
`torch/_inductor/scheduler.py`)."""


def compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`function` compiled for any sizes, into code that does not depend on those of the first call.

    By default torch assumes of the first call that sizes that are equal in it are always equal, and of later ones no
    longer. So a process that saw other rows first than the one before it found half of its code not in the cache: after
    a rank was killed, two GPUs compiled for 48 s (torch 2.11; `torch/fx/experimental/symbolic_shapes.py`, duck
    shapes).
    """
    shield_compilers()
    inner: Callable[Arguments, Result] = torch.compile(function, dynamic=True, options=_OPTIONS)

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with symbols.patch(use_duck_shape=False):  # type: ignore[attr-defined]  # takes 20 µs
            return inner(*args, **kwargs)

    return call
