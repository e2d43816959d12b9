"""A model whose parameters are given tensors, such as the inference server's memory mapped into this process.

Nothing is copied. Buffers that are not stored (rotary frequencies) are computed by the model's own modules. Every
parameter must be given, in the right shape: a partly initialised model would train without an error.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from grpo_engine.errors import ModelError, first_of
from grpo_engine.models.auto import AutoModelForCausalLM
from grpo_engine.models.places import Place, place_parameter

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)


def load_model_on_shared(
    config: PreTrainedConfig,
    tensors: Mapping[str, Tensor],
    aliases: Mapping[str, str] | None = None,
    *,
    attn_implementation: str | None = None,
    places: Mapping[str, Place] | None = None,
) -> PreTrainedModel:
    """Build the causal language model of `config` on `tensors`, in evaluation mode, without copying any of them.

    Args:
        tensors: parameter name → tensor of its shape; of any float type and stride, all on one device.
        aliases: tied parameters: name → the name in `tensors` that it is the same as.
        places: where each tensor belongs in the whole parameter, if they are parts; such a model computes with the
            other ranks after `split_layers`.

    Raises:
        ModelError: parameters that are missing, unknown, of another shape or device, or tied on one side only; each is
            named.
    """
    aliases = aliases or {}
    if not tensors:
        raise ModelError("the shared weights hold no tensors: the server that offers them has not loaded its model")
    if dangling := [f"{name} → {source}" for name, source in aliases.items() if source not in tensors]:
        raise ModelError(f"the shared weights have aliases of tensors that are not given: {first_of(dangling)}")
    model = _empty_model(config, attn_implementation)
    tied_names = _tied_groups(model)
    given = {**tensors, **{name: tensors[source] for name, source in aliases.items()}}
    places = {name: places[aliases.get(name, name)] for name in given} if places else {}
    _check(model, tied_names, given, places)
    device = next(iter(tensors.values())).device
    for names in tied_names:
        first = next(name for name in names if name in given)
        parameter = nn.Parameter(given[first].detach(), requires_grad=given[first].is_floating_point())
        if first in places:
            place_parameter(parameter, places[first])
        for name in names:  # one Parameter under every name, so that gradients add up
            module_name, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module_name), attribute, parameter)
    _place_buffers(model, given, device)
    log.debug("built %s on %d shared tensors of %s, %d tied", type(model).__name__, len(tensors), device, len(aliases))
    log_tensors(model)
    return model.eval()


def log_tensors(model: nn.Module) -> None:
    """Log each parameter and buffer for `debug_loading`: shape, type, device, and its place in the memory that it
    is a part of. Parts of one fused tensor have the same memory."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in {**parameters, **dict(model.named_buffers())}.items():
        log.debug(
            "%s %s %s on %s, element %d of memory at 0x%x (%.1f MB)%s",
            *(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.device),
            *(tensor.storage_offset(), tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes() / 1e6),
            "" if name in parameters else ", a buffer",
        )
    log.debug(
        "%d parameters with %d values, %.2f GB, %d of them tied",
        len(parameters),
        sum(tensor.numel() for tensor in model.parameters()),
        sum(tensor.nbytes for tensor in model.parameters()) / 1e9,
        len(parameters) - len(list(model.parameters())),
    )


def _empty_model(config: PreTrainedConfig, attn_implementation: str | None) -> PreTrainedModel:
    """The model with parameters on the meta device and real buffers, its tied parameters one object."""
    kwargs = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with init_empty_weights(include_buffers=False), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no-op.*meta.*")  # initialising meta tensors: intended
        model = AutoModelForCausalLM.from_config(config, **kwargs)
    model.tie_weights()
    return model


def _tied_groups(model: nn.Module) -> list[list[str]]:
    """The names of each parameter: one, or several where it is tied."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return list(groups.values())


def _check(
    model: nn.Module, tied_names: list[list[str]], given: Mapping[str, Tensor], places: Mapping[str, Place]
) -> None:
    whole = {name: places[name].whole if name in places else tuple(tensor.shape) for name, tensor in given.items()}
    shapes = {name: tensor.shape for name, tensor in model.named_parameters(remove_duplicate=False)}
    buffers = dict(model.named_buffers())
    faults = []
    if missing := [names[0] for names in tied_names if not any(name in given for name in names)]:
        faults.append(f"not given: {first_of(missing)}")
    if unknown := [name for name in given if name not in shapes and name not in buffers]:
        faults.append(f"not parameters of this model: {first_of(unknown)}")
    if misshapen := [
        f"{name} {whole[name]} instead of {tuple(shape)}"
        for name, shape in shapes.items()
        if name in given and whole[name] != tuple(shape)
    ]:
        faults.append(f"of another shape: {first_of(misshapen)}")
    faults += _tie_faults(tied_names, given)
    if len(devices := {tensor.device for tensor in given.values()}) > 1:
        faults.append(f"on several devices: {first_of(sorted(map(str, devices)))}")
    if faults:
        raise ModelError(
            f"the shared weights do not fit {type(model).__name__}: {'; '.join(faults)}. "
            "Trainer and server must load the same model"
        )


def _tie_faults(tied_names: list[list[str]], given: Mapping[str, Tensor]) -> list[str]:
    """Parameters that are tied on one side only."""
    faults = []
    owner_of: dict[tuple[int, int], str] = {}
    for names in tied_names:
        present = [name for name in names if name in given]
        places = {_place(given[name]) for name in present}
        if len(places) > 1:
            faults.append(f"tied in the model, but given as separate tensors: {first_of(present)}")
        for place in places:
            other = owner_of.setdefault(place, present[0])
            if other != present[0]:
                faults.append(f"separate in the model, but given as one tensor: {first_of([other, present[0]])}")
    return faults


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _place_buffers(model: nn.Module, given: Mapping[str, Tensor], device: torch.device) -> None:
    for module_name, module in model.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            full_name = f"{module_name}.{name}" if module_name else name
            source = given.get(full_name, buffer)
            if source.is_meta:
                raise ModelError(
                    f"{type(model).__name__} leaves its buffer {full_name} without values on this loading path"
                )
            setattr(module, name, source.to(device))
