"""A model sharded over ranks by FSDP2: each rank stores a part of every parameter, and layers are gathered to compute.

The shards are what the optimizer updates: fp32, or bf16 with stochastic rounding. Layers compute in the model's dtype,
gradients are summed over ranks in fp32. Whole tensors exist a layer at a time: in the forward and backward pass, and in
`weight_stream`; those of small layers together. See https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor, distribute_tensor

from grpo_engine.errors import CheckpointError
from grpo_engine.models.execution import decoder_layers, parameters_by_layer
from grpo_engine.models.places import part_of_whole, place_of, whole_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OUTER = "the embedding and output layer"
"""The parameters outside of all layers: they are gathered first and reduced last."""
WHOLE = "the whole model"
SMALL_LAYER_BYTES = 2**22
"""Layers below it are gathered and reduced together with all others: beside so little data the fixed costs of an
operation count. Of a 0.3 M-parameter model on two ranks of a CPU, layers apart took a tenth of the CPU time."""


class Around(Protocol):
    """Makes a context around a collective operation; as `RankGroup.collective`."""

    def __call__(
        self, operation: str, device: str, *, then: str, then_backward: str
    ) -> AbstractContextManager[None]: ...


def shard_model(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    shard_dtype: torch.dtype,
    reshard_after_forward: bool = True,
    offload: bool = False,
    kept_whole: Collection[nn.Parameter] = (),
    around: Around | None = None,
) -> None:
    """Shard a model on the CPU in place, layer by layer; the shards go to the mesh's devices.

    Args:
        mesh: ranks over which parameters are sharded; of two dimensions, they are replicated over the first.
        shard_dtype: of the stored shards; the model computes in the dtype that it has.
        reshard_after_forward: free gathered layers after each forward and backward pass (ZeRO-3); else keep them until
            the last backward pass of a step (`begin_micro_batch`).
        offload: keep shards and optimizer in main memory.
        kept_whole: parameters that are left as and where they are, as those of adapters.
        around: entered for each collective operation of a layer.
    """
    whole = set(kept_whole)
    compute_dtype = next(model.parameters()).dtype
    precision = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype is shard_dtype else compute_dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    where = CPUOffloadPolicy() if offload else OffloadPolicy()
    layers = _layers_apart(model, whole)
    for number, module in enumerate([*layers, model]):
        for parameter in module.parameters():  # buffers keep their dtype: positions are rotated in fp32
            if parameter not in whole and parameter.dtype is not shard_dtype:
                parameter.data = parameter.data.to(shard_dtype)
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=precision,
            offload_policy=where,
            # The outermost module's parameters are needed at the end of the forward and the start of the backward pass.
            reshard_after_forward=reshard_after_forward and module is not model,
            ignored_params=whole or None,
        )
        sharded = cast(FSDPModule, module)
        # Losses have the whole batch's normaliser, so gradients are summed and not averaged over ranks.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        if around is not None:
            name = f"layer {number}" if module is not model else OUTER if layers else WHOLE
            before = f"layer {number - 1}" if number else OUTER  # whose gradient is computed next
            sharded.set_custom_all_gather(_AllGather(around, name))
            sharded.set_custom_reduce_scatter(_ReduceScatter(around, name, "" if module is model else before))
        sharded.unshard()  # the first time moves shards of uneven sizes, to which others refer from now on
        sharded.reshard()


def _layers_apart(model: PreTrainedModel, kept_whole: Collection[nn.Parameter]) -> list[nn.Module]:
    """The layers that are gathered each by itself: none of a model whose layers are small."""
    layers = list(decoder_layers(model))
    sizes = [sum(p.nbytes for p in layer.parameters() if p not in kept_whole) for layer in layers]
    return layers if max(sizes, default=0) >= SMALL_LAYER_BYTES else []


class _AllGather(DefaultAllGather):
    """The operation of FSDP within `around`; in a backward pass the layer is not the next, but gathered ahead."""

    def __init__(self, around: Around, name: str) -> None:
        super().__init__()
        self._around, self._name = around, name

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with self._around(
            f"the all-gather of {self._name}", input_tensor.device.type, then=self._name, then_backward=""
        ):
            return super().__call__(output_tensor, input_tensor, group, async_op)


class _ReduceScatter(DefaultReduceScatter):
    """The operation of FSDP within `around`, after the gradient of a layer."""

    def __init__(self, around: Around, name: str, before: str) -> None:
        super().__init__()
        self._around, self._name, self._before = around, name, before

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work:
        with self._around(
            f"the reduce-scatter of {self._name}", input_tensor.device.type, then="", then_backward=self._before
        ):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)


def without_values(model: PreTrainedModel) -> PreTrainedModel:
    """The same model on the meta device, which has the configuration and the names that a file of weights needs."""
    with torch.device("meta"):
        bare = type(model)(copy.deepcopy(model.config)).to(next(model.parameters()).dtype)
    bare.generation_config = model.generation_config
    return bare


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard_model` was called on it."""
    return isinstance(model, FSDPModule)


def compute_device(model: nn.Module) -> torch.device:
    """Where the model computes; its shards may be in main memory."""
    parameter = next(model.parameters())
    if not isinstance(parameter, DTensor):
        return parameter.device
    kind = parameter.device_mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def as_forward(model: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a forward pass of a sharded model, with its outermost parameters gathered.

    Its results must be no views: FSDP starts the backward pass at them.
    """
    name = f"forward_{id(function)}"
    setattr(model, name, MethodType(lambda module, *arguments: function(*arguments), model))
    register_fsdp_forward_method(model, name)

    def forward(*arguments: Any) -> Any:
        results = getattr(model, name)(*arguments)
        if not torch.is_grad_enabled():
            free_gathered(model)
        return results

    return forward


def free_gathered(model: nn.Module) -> None:
    """Free the outermost parameters, which a forward pass leaves gathered for a backward pass: they would go stale."""
    cast(FSDPModule, model).reshard()


def begin_micro_batch(model: nn.Module, *, is_last: bool, keeps_gathered: bool) -> None:
    """Say what the next backward pass leaves: between micro-batches weights do not change.

    A model of small layers stays gathered and keeps its gradients, in fp32, until the last micro-batch of a step. Of
    larger ones each pass reduces one layer after the other, since whole gradients might not fit into memory.

    Args:
        keeps_gathered: larger layers, which stay gathered after the forward pass, also stay so after the backward pass:
            each is gathered once a step.
    """
    whole = cast(FSDPModule, model)
    if not any(is_sharded(layer) for layer in decoder_layers(cast("PreTrainedModel", model))):
        whole.set_requires_gradient_sync(is_last, recurse=False)
        whole.set_reshard_after_backward(is_last, recurse=False)
    elif keeps_gathered:
        whole.set_reshard_after_backward(is_last)


def local_part(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, in the parameter's memory; the whole of one that is not sharded."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor on the CPU, sharded or split as `like` is."""
    if (place := place_of(like)) is not None:
        part: Tensor = part_of_whole(whole, like, place)
        return part
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None).to_local()


def part_of_state(value: Any, like: Tensor) -> Any:
    """This rank's part of an optimizer's state for a whole parameter; of steps and the like, the same."""
    is_part = isinstance(like, DTensor) or place_of(like) is not None
    if not isinstance(value, Tensor) or value.ndim == 0 or not is_part:
        return value
    if tuple(value.shape) != (whole := whole_shape(like)):
        raise CheckpointError(
            f"optimizer state of shape {tuple(value.shape)} for a parameter of {whole} cannot be divided "
            "among ranks: resume with one rank, or choose an optimizer with full-precision state"
        )
    return part_of(value, like)


def weight_stream(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Whole parameters by name, as `parameters_by_layer` groups them, on this rank's device.

    Every rank must iterate to the end. A layer is gathered in one operation, and freed when the next one is asked for;
    small layers are gathered and freed together.

    Args:
        dtype: of the tensors.
    """
    paths = {module: f"{path}." for path, module in model.named_modules() if path}
    gathered: FSDPModule | None = None
    try:
        for module, names in zip([model, *decoder_layers(model)], parameters_by_layer(model), strict=True):
            unit = cast(FSDPModule, module if is_sharded(module) else model)
            if unit is not gathered:
                if gathered is not None:
                    gathered.reshard()
                gathered = unit
                gathered.unshard()
            whole = dict(module.named_parameters())
            yield {name: whole[name.removeprefix(paths.get(module, ""))].detach().to(dtype) for name in names}
    finally:
        if gathered is not None:
            gathered.reshard()
