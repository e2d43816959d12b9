"""Optimizers by name, and the fp32 masters that they step on.

Parameters in bf16 cannot be stepped in place: at usual learning rates an update is far below their last bit, and most
would be rounded away. Parameters that an inference server reads must not be stepped in place either: it would see half
an update. In both cases the optimizer steps on masters, and `publish` copies them over.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import assert_never

import torch
from torch import Tensor, nn
from transformers import Adafactor

from grpo_engine.errors import ModelError
from grpo_engine.models.config import OptimizerSettings


def build_optimizer(parameters: Iterable[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """The optimizer that `settings` names, over `parameters` (or over the masters of `MasterWeights`).

    Raises:
        ModelError: nothing to train, or the optimizer cannot run here; it says what to install or to choose instead.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise ModelError("no parameter requires a gradient: the layer filter or adapter leaves nothing to train")
    match settings.name:
        case "adamw":
            return torch.optim.AdamW(
                trained,
                lr=settings.lr,
                betas=settings.betas,
                eps=settings.eps,
                weight_decay=settings.weight_decay,
                fused=True,  # one kernel for all parameters, on CPU as on GPU
            )
        case "adamw_8bit":
            return _adamw_8bit(trained, settings)
        case "adafactor":
            adafactor: torch.optim.Optimizer = Adafactor(
                trained,
                lr=None if settings.adafactor_relative_step else settings.lr,
                weight_decay=settings.weight_decay,
                scale_parameter=settings.adafactor_scale_parameter,
                relative_step=settings.adafactor_relative_step,
            )
            return adafactor
        case _:
            assert_never(settings.name)


class MasterWeights:
    """fp32 masters of a model's trained parameters, and the way of gradients to them and of values back.

    One step: backward; `collect_gradients`; the optimizer steps on `parameters`; `publish`, when nobody is reading.

        masters = MasterWeights(model.named_parameters(), are_shared=True)
        optimizer = build_optimizer(masters.parameters, settings)
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], *, are_shared: bool = False) -> None:
        """Copy every parameter that learns to fp32.

        Args:
            are_shared: somebody else reads the parameters' memory, so that fp32 ones need a copy as well; otherwise
                an fp32 parameter is its own master.
        """
        self._live: dict[str, nn.Parameter] = {}
        self._masters: dict[str, nn.Parameter] = {}
        for name, parameter in named_parameters:
            if not parameter.requires_grad:
                continue
            self._live[name] = parameter
            is_own_master = parameter.dtype is torch.float32 and not are_shared
            self._masters[name] = parameter if is_own_master else nn.Parameter(_fp32_copy(parameter))
        self._copied = [name for name, master in self._masters.items() if master is not self._live[name]]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer steps on, fp32, in the order of the model's parameters."""
        return list(self._masters.values())

    def collect_gradients(self) -> None:
        """Move the parameters' gradients to the masters as fp32; a parameter without one leaves its master without."""
        for name in self._copied:  # one at a time: both copies of one gradient exist at most
            live, master = self._live[name], self._masters[name]
            master.grad = None if live.grad is None else live.grad.to(torch.float32)
            live.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the parameters, rounding to their type."""
        if self._copied:
            live = [self._live[name].data for name in self._copied]
            torch._foreach_copy_(live, [self._masters[name].data for name in self._copied])

    def state_dict(self) -> dict[str, Tensor]:
        """The masters by parameter name; not copied."""
        return {name: master.detach() for name, master in self._masters.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state_dict` gave; the parameters see it at the next `publish`.

        Raises:
            ModelError: names or shapes differ; nothing is changed then.
        """
        different = sorted(set(state) ^ set(self._masters)) or [
            f"{name} {tuple(state[name].shape)} instead of {tuple(master.shape)}"
            for name, master in self._masters.items()
            if state[name].shape != master.shape
        ]
        if different:
            raise ModelError(
                f"saved master weights do not fit the parameters trained now: {', '.join(different[:8])}"
                f"{' …' if len(different) > 8 else ''}; resume with the same model, adapter and layer filter"
            )
        for name, master in self._masters.items():
            master.copy_(state[name])


def _fp32_copy(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _adamw_8bit(trained: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError("optimizer adamw_8bit needs bitsandbytes: pip install bitsandbytes, or choose adamw")
    if any(parameter.device.type != "cuda" for parameter in trained):
        raise ModelError("optimizer adamw_8bit runs on NVIDIA GPUs only, and this model is on the CPU: choose adamw")
    from bitsandbytes.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(
        trained, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )
    return optimizer
