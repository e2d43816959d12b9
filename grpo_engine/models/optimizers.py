"""Optimizers by name, and the fp32 master weights that they update.

bf16 parameters cannot be updated in place: at usual learning rates an update is far below their last bit, and most
would be rounded away. Parameters that an inference server reads must not be updated in place either: it would read half
an update. In both cases the optimizer updates masters, and `publish` copies them to the parameters.

Gradients are accumulated in fp32 too. Autograd gives a bf16 parameter a bf16 gradient and would accumulate in bf16,
where small gradients are lost; so each gradient is added to its master's as soon as it is computed, and freed. The sum
is fp32, or bf16 with stochastic rounding; every update is computed in fp32.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, assert_never, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from grpo_engine.compilers import has_compiler
from grpo_engine.errors import ConfigError, ModelError
from grpo_engine.models.config import MasterKind, OptimizerSettings, lacking_for_optimizer
from grpo_engine.models.places import Place, place_of
from grpo_engine.models.rounding import add_rounded_, round_to_bf16_
from grpo_engine.models.sharded import local_part

GradientDtype = Literal["float32", "bfloat16"]
"""Of the accumulated gradients of bf16 parameters."""

STEPPED_AT_ONCE = 1 << 24
"""Elements converted to fp32 at a time where weights or gradients are bf16: 64 MB, and many small parameters per
call."""


def build_optimizer(parameters: Iterable[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """The optimizer that `settings` names, over `parameters` (or over the masters of `MasterWeights`).

    Weight decay acts on matrices only, as in transformers' Trainer (so TRL's too), nanoGPT and OpenRLHF: norms and
    biases are scales and offsets for which zero is no better value.

    Raises:
        ModelError: no trained parameter.
        ConfigError: the optimizer cannot run here.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise ModelError("no parameter requires a gradient: the layer filter or adapter leaves nothing to train")
    groups = _decay_groups(trained)
    match settings.name:
        case "adamw":
            return torch.optim.AdamW(
                groups,
                lr=settings.lr,
                betas=settings.betas,
                eps=settings.eps,
                weight_decay=settings.weight_decay,
                fused=True,  # one kernel for all parameters, on CPU as on GPU
            )
        case "adamw_8bit":
            return _adamw_8bit(groups, settings)
        case "adafactor":
            from transformers import Adafactor  # imports peft and bitsandbytes, which asks the driver for the GPU

            adafactor: torch.optim.Optimizer = Adafactor(
                groups,
                lr=None if settings.adafactor_relative_step else settings.lr,
                weight_decay=settings.weight_decay,
                scale_parameter=settings.adafactor_scale_parameter,
                relative_step=settings.adafactor_relative_step,
            )
            return adafactor
        case _:
            assert_never(settings.name)


class MasterWeights:
    """fp32 masters of a model's trained parameters: gradients are sent to them, values are published from them.

    One step: backward once per micro-batch; `step`; `publish`, while no server reads.

        masters = MasterWeights(model.named_parameters(), are_shared=True)
        optimizer = build_optimizer(masters.parameters, settings)

    A bf16 parameter's master and gradient take 4 bytes per element each. With `kind="stochastic_rounding"` there is no
    master: parameters are converted to fp32 during their update, some at a time, and rounded back stochastically, so
    that updates below the last bit accumulate on average. With `gradient_dtype="bfloat16"` the gradient takes 2 bytes:
    the first micro-batch's as autograd computes it, further ones added in fp32 and rounded stochastically. Parameters
    of other dtypes have fp32 gradients.

    Of a parameter that is sharded over ranks, master, gradient and optimizer state are of this rank's part; an fp32
    master is the part itself. Every optimizer that updates elements independently then runs unchanged.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        are_shared: bool = False,
        kind: MasterKind = "float32",
        gradient_dtype: GradientDtype = "float32",
    ) -> None:
        """Create a master of every trained parameter.

        Args:
            are_shared: an inference server reads the parameters' memory, which must not change before `publish`: fp32
                parameters need a copy too, and stochastically rounded ones a private copy in bf16. Otherwise both are
                updated in place.

        Raises:
            ModelError: parameters of a dtype without stochastic rounding.
        """
        self._live = {name: parameter for name, parameter in named_parameters if parameter.requires_grad}
        self._masters: dict[str, nn.Parameter] = {}
        self._private: dict[str, Tensor] = {}
        self._rounded: list[str] = []
        self._with_bf16_gradient: list[str] = []
        for name, live in self._live.items():
            part = local_part(live)
            if live.dtype is torch.float32 and not are_shared:
                self._masters[name] = live if part is live else nn.Parameter(part.detach())
            elif live.dtype is torch.float32 or kind == "float32":
                self._masters[name] = nn.Parameter(_copy(part, torch.float32))
            else:
                _require_bf16(name, live)
                self._masters[name] = _placeholder(part)
                self._rounded.append(name)
                if are_shared:
                    self._private[name] = _copy(part, torch.bfloat16)
            if gradient_dtype == "bfloat16" and live.dtype is torch.bfloat16:
                self._with_bf16_gradient.append(name)
                self._masters[name].grad_dtype = None  # any: bf16 between steps, fp32 in them
        self._in_portions = [name for name in self._live if name in {*self._rounded, *self._with_bf16_gradient}]
        copied = [name for name, master in self._masters.items() if master is not self._live[name]]
        own = [name for name in copied if are_shared or self._live[name].dtype is not torch.float32]
        self._published = [name for name in own if name not in self._rounded or are_shared]
        hooks = [
            _send_gradients(
                self._live[name],
                self._masters[name],
                dtype=torch.bfloat16 if name in self._with_bf16_gradient else torch.float32,
            )
            for name in copied
        ]
        weakref.finalize(self, _remove, hooks)  # else they take the gradients of this model's next masters

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The fp32 parameters of the optimizer, in the order of the model's; gradients accumulate in them."""
        return list(self._masters.values())

    @property
    def live_parameters(self) -> dict[str, nn.Parameter]:
        """The model's trained parameters, by name."""
        return self._live

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """`parameters` with their names."""
        return self._masters.items()

    @property
    def gradients(self) -> list[Tensor]:
        """The accumulated gradients (of this rank's parts)."""
        return [master.grad for master in self._masters.values() if master.grad is not None]

    @property
    def are_parts(self) -> bool:
        """Whether the parameters are sharded or split over ranks, and masters of this rank's parts; else each rank has
        all."""
        return any(isinstance(each, DTensor) or place_of(each) is not None for each in self._live.values())

    @property
    def placed_gradients(self) -> list[tuple[Tensor, Place]]:
        """The gradients of parts of a split model, with their places."""
        return [
            (gradient, place)
            for name, master in self._masters.items()
            if (place := place_of(self._live[name])) is not None and (gradient := master.grad) is not None
        ]

    @property
    def placed_values(self) -> list[tuple[Tensor, Place]]:
        """The values of parts of a split model (masters, or what is rounded instead), with their places."""
        places = {name: place_of(live) for name, live in self._live.items()}
        return [(self._value(name), place) for name, place in places.items() if place is not None]

    @property
    def have_bf16_gradients(self) -> bool:
        """Whether any gradient is accumulated in bf16."""
        return bool(self._with_bf16_gradient)

    @property
    def are_rounded(self) -> bool:
        """Whether any parameter is rounded stochastically instead of having a master."""
        return bool(self._rounded)

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """The norm of all gradients (of this rank's parts) together, fp32 and 0-dimensional, whatever their dtype.

        Of what several ranks have, the first of them counts it. torch's clipping would round the norm of bf16 gradients
        to bf16, which is off by up to 0.4 %.
        """
        counted = self.gradients
        if placed := self.placed_gradients:
            counted = [gradient for gradient, place in placed if place.is_first]
        if not counted:
            return torch.zeros((), device=next(iter(self._live.values())).device)
        norms = torch.stack(torch._foreach_norm(counted, 2.0, dtype=torch.float32))
        return cast(Tensor, torch.linalg.vector_norm(norms))

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, *, gradient_scale: float = 1.0) -> None:
        """Run a step of an optimizer over `parameters`, and free the gradients.

        Args:
            gradient_scale: of the gradients, for clipping; applied in fp32.
        """
        is_direct = getattr(optimizer, "updates_bf16", lambda parameter: False)
        gradients = self._take_gradients(name for name in self._in_portions if not is_direct(self._masters[name]))
        with self._in_place(name for name in self._rounded if name not in gradients):
            _step_once(optimizer, self._masters.values(), gradient_scale)  # the others, in one call
        for names in _portions({name: gradient.numel() for name, gradient in gradients.items()}):
            masters = [self._masters[name] for name in names]
            placeholders = [master.data for master in masters]
            for name, master in zip(names, masters, strict=True):
                if name in self._rounded:
                    master.data = _copy(self._value(name), torch.float32)
                master.grad = gradients.pop(name).to(torch.float32)  # popped, so that the bf16 gradient is freed
            _step_once(optimizer, masters, gradient_scale)
            for name, master, placeholder in zip(names, masters, placeholders, strict=True):
                if name in self._rounded:
                    self._value(name).copy_(round_to_bf16_(master.data))
                    master.data = placeholder

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the parameters, rounding to their dtype."""
        if self._published:
            live = [local_part(self._live[name]).data for name in self._published]
            torch._foreach_copy_(live, [self._value(name) for name in self._published])

    def state_dict(self) -> dict[str, Tensor]:
        """The masters by parameter name (bf16 where rounded stochastically); not copied."""
        return {name: self._value(name) for name in self._masters}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a `state_dict` of either kind; the next `publish` copies it to the parameters.

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
        for name in self._masters:
            self._value(name).copy_(state[name])

    def _take_gradients(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Move gradients out of the masters, so that the optimizer skips these."""
        gradients = {}
        for name in names:
            gradient, self._masters[name].grad = self._masters[name].grad, None
            if gradient is not None:
                gradients[name] = gradient
        return gradients

    @contextmanager
    def _in_place(self, names: Iterable[str]) -> Iterator[None]:
        """Within, the optimizer's parameters of these names are the rounded values themselves."""
        masters = [(self._masters[name], self._masters[name].data, self._value(name)) for name in names]
        for master, _, value in masters:
            master.data = value
        try:
            yield
        finally:
            for master, placeholder, _ in masters:
                master.data = placeholder

    def _value(self, name: str) -> Tensor:
        """A parameter's value between steps; looked up each time, since a bridge may move its memory."""
        if name not in self._rounded:
            return self._masters[name].data
        return self._private[name] if name in self._private else local_part(self._live[name]).data


def _send_gradients(live: nn.Parameter, master: nn.Parameter, dtype: torch.dtype) -> RemovableHandle:
    """Add each gradient of a parameter to its master's, in this dtype, as soon as backward has computed it."""

    def send(live: Tensor) -> None:
        assert live.grad is not None  # the hook runs after accumulation
        gradient, live.grad = local_part(live.grad), None
        master.grad = _added(master.grad, gradient, dtype)

    return cast(RemovableHandle, live.register_post_accumulate_grad_hook(send))  # type: ignore[no-untyped-call]


def _added(total: Tensor | None, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """The `total` with a gradient added, in place; without one the gradient in `dtype`, contiguous."""
    has_kernel = gradient.device.type == "cuda" and gradient.dtype is not torch.float32 and has_compiler()
    if has_kernel and (total is not None or dtype is torch.float32):
        from grpo_engine.models.update_kernels import add

        return add(total, gradient)
    if total is None:
        return gradient.to(dtype).contiguous()
    return add_rounded_(total, gradient) if dtype is torch.bfloat16 else total.add_(gradient)


def _step_once(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], gradient_scale: float) -> None:
    """Scale the fp32 gradients, run an optimizer step, and free them."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    if hasattr(optimizer, "gradient_scale"):
        optimizer.gradient_scale = gradient_scale  # its kernel reads the gradients anyway
    elif gradient_scale != 1.0:
        torch._foreach_mul_(gradients, gradient_scale)
    optimizer.step()
    optimizer.zero_grad()


def _portions(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """The names in order, in lists of at most `STEPPED_AT_ONCE` elements, or of one name."""
    names: list[str] = []
    for name, size in sizes.items():
        if names and sum(sizes[other] for other in names) + size > STEPPED_AT_ONCE:
            yield names
            names = []
        names.append(name)
    if names:
        yield names


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _copy(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    return parameter.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


def _placeholder(live: Tensor) -> nn.Parameter:
    """An fp32 parameter of the same shape without memory, for the optimizer between steps."""
    return nn.Parameter(torch.zeros((), device=live.device).expand(live.shape))


def _require_bf16(name: str, parameter: nn.Parameter) -> None:
    if parameter.dtype is not torch.bfloat16:
        raise ModelError(
            f"stochastic_rounding is for bfloat16 parameters, and {name} is {parameter.dtype}: "
            "choose master_weights float32, or load the model as bfloat16"
        )


def _decay_groups(trained: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Matrices, then norms and biases, which never decay; empty groups are omitted."""
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _adamw_8bit(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW; parameters of fewer than 4096 elements have 32-bit state there."""
    on_cpu = any(parameter.device.type == "cpu" for group in groups for parameter in group["params"])
    lack = lacking_for_optimizer(settings.name, on_cpu=on_cpu)
    if lack is not None:
        raise ConfigError(f"optimizer {lack[0]}: {lack[1]}")
    if on_cpu or not has_compiler():
        from bitsandbytes.optim import AdamW8bit as Optimizer
    else:
        from grpo_engine.models.adamw_8bit import FusedAdamW8bit as Optimizer
    optimizer: torch.optim.Optimizer = Optimizer(
        groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )
    return optimizer
