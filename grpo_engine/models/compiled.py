"""Compilation by torch of functions whose inputs have other sizes in each call."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch.fx.experimental import _config as symbols

from grpo_engine.models.inductor import shield_compilers

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`function` compiled for any sizes, into code that does not depend on those of the first call.

    By default torch assumes of the first call that sizes that are equal in it are always equal, and of later ones no
    longer. So a process that saw other rows first than the one before it found half of its code not in the cache: after
    a rank was killed, two GPUs compiled for 48 s (torch 2.11; `torch/fx/experimental/symbolic_shapes.py`, duck
    shapes).
    """
    shield_compilers()
    inner: Callable[Arguments, Result] = torch.compile(function, dynamic=True)

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with symbols.patch(use_duck_shape=False):  # type: ignore[attr-defined]  # takes 20 µs
            return inner(*args, **kwargs)

    return call
