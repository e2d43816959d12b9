"""What an optimizer needs of a saved state, so that one of a damaged checkpoint is refused before the first step.

An optimizer takes any state, and asks for its entries in its next step; kernels for 8-bit state read as many scales as
there should be. A parameter without state is one without gradient until then: it begins with a fresh one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_engine.models.config import BLOCK_8BIT

_STEP = "step"
_NUM_CODES = 256
"""Values of a code of 8-bit state."""


def fault_of_state(optimizer: torch.optim.Optimizer, parameter: Tensor, state: Mapping[str, Any]) -> str | None:
    """The first entry of a parameter's state that is missing, or of another shape; None where none is."""
    if not state:
        return None
    shape, step = tuple(parameter.shape), state.get(_STEP)
    if step is None:
        return f"{_STEP} is missing"
    is_number = isinstance(step, int | float) or (isinstance(step, Tensor) and step.numel() == 1)
    if not is_number or not 0 <= float(step) < math.inf:
        return f"{_STEP} is no count"
    for name, wanted in _shapes(optimizer, shape, state).items():
        if (value := state.get(name)) is None:
            return f"{name} is missing"
        if not isinstance(value, Tensor) or tuple(value.shape) != wanted:
            found = f"a {type(value).__name__}" if not isinstance(value, Tensor) else tuple(value.shape)
            return f"{name} is {found} instead of {wanted}"
    return None


def _shapes(
    optimizer: torch.optim.Optimizer, shape: tuple[int, ...], state: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Of the tensors that an optimizer of `build_optimizer` has for a parameter of this shape."""
    match optimizer:
        case torch.optim.AdamW():
            return {"exp_avg": shape, "exp_avg_sq": shape}
        case _ if "scale_parameter" in optimizer.defaults:  # Adafactor
            if len(shape) < 2:
                return {"exp_avg_sq": shape}
            return {"exp_avg_sq_row": shape[:-1], "exp_avg_sq_col": shape[:-2] + shape[-1:]}
        case _:  # 8-bit AdamW, whose small parameters have fp32 state
            first = state.get("state1")
            moments = {"state1": shape, "state2": shape}
            if not isinstance(first, Tensor) or first.dtype is not torch.uint8:
                return moments
            scales = (math.ceil(math.prod(shape) / BLOCK_8BIT),)
            return moments | {"absmax1": scales, "absmax2": scales, "qmap1": (_NUM_CODES,), "qmap2": (_NUM_CODES,)}
