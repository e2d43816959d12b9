"""bitsandbytes' AdamW with 8-bit states (Dettmers et al. 2022, arXiv:2110.02861), by a kernel of our own on CUDA.

States and checkpoints are those of bitsandbytes, in both directions. Parameters below 4096 elements, whose states are
fp32, are updated by its own kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.optim import AdamW8bit
from torch import Tensor

from grpo_engine.models.update_kernels import adamw_8bit_


class FusedAdamW8bit(AdamW8bit):  # type: ignore[misc]
    """bitsandbytes' AdamW with 8-bit states, with a kernel of our own, and gradients of any float type."""

    initialized: bool
    gradient_scale = 1.0
    """Factor of the gradients in the next step, for clipping; those of small parameters are scaled in place."""

    def updates_bf16(self, parameter: Tensor) -> bool:
        """Whether a parameter may be bf16, which is rounded stochastically, and its gradient of any float type."""
        return bool(parameter.numel() >= self.args.min_8bit_size)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have gradients; unlike bitsandbytes, without waiting for the GPU after each."""
        if not self.initialized:
            self.check_overrides()
            self.to_gpu()  # states of a checkpoint
            self.initialized = True
        for gindex, group in enumerate(self.param_groups):
            for pindex, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.init_state(group, p, gindex, pindex)
                self.update_step(group, p, gindex, pindex)

    @torch.no_grad()
    def update_step(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        """Update one parameter; as bitsandbytes names it."""
        state, grad = self.state[p], p.grad
        assert grad is not None
        if state["state1"].dtype is not torch.uint8:
            if self.gradient_scale != 1.0:
                grad.mul_(self.gradient_scale)
            super().update_step(group, p, gindex, pindex)
            return
        config = self.get_config(gindex, pindex, group)
        state["step"] += 1
        adamw_8bit_(
            p,
            grad,
            (state["state1"], state["state2"]),
            (state["absmax1"], state["absmax2"]),
            (state["qmap1"], state["qmap2"]),
            gradient_scale=self.gradient_scale,
            step=state["step"],
            lr=config["lr"],
            betas=config["betas"],
            eps=config["eps"],
            weight_decay=config["weight_decay"],
        )
