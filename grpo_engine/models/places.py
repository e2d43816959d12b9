"""Which part of a whole parameter a tensor parallel rank has, and which other ranks have the same part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from grpo_engine.wire.bridge_file import WeightPart

_ATTRIBUTE = "grpo_place"
ADDED_AT_ONCE = 1 << 24
"""Elements of copies that are combined in one operation: 64 MB."""


class Copies(StrEnum):
    """What other ranks have of the same part, and what that means for its gradient."""

    NONE = "none"
    EQUAL = "equal"
    """Each computes the whole gradient, as of the norms between layers, whose inputs are the same on all ranks."""
    SUMMED = "summed"
    """Each computes the gradient of its own heads alone, as of a key that several ranks have and of norms of heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Of a rank's part in the whole parameter."""

    whole: tuple[int, ...]
    """Shape of the whole parameter."""
    start: tuple[int, ...]
    """Where the part begins."""
    copies: Copies = Copies.NONE
    is_first: bool = True
    """Whether no lower rank has the same part; such parts, of all ranks together, make up the whole."""

    def region(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """The part as an index of the whole."""
        return tuple(slice(first, first + size) for first, size in zip(self.start, shape, strict=True))


class Summing(Protocol):
    """The ranks that have the parts, as `RankGroup`."""

    def sum(self, values: Tensor, what: str = "") -> Tensor:
        """The sum over all ranks, on every rank."""


def place_parameter(parameter: nn.Parameter, place: Place) -> None:
    """Note where a parameter's values belong."""
    setattr(parameter, _ATTRIBUTE, place)


def place_of(parameter: Tensor) -> Place | None:
    """Where a parameter's values belong in the whole one; None: it is the whole, or sharded by FSDP."""
    place: Place | None = getattr(parameter, _ATTRIBUTE, None)
    return place


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape of the whole parameter."""
    place = place_of(parameter)
    return tuple(parameter.shape) if place is None else place.whole


def is_split(model: nn.Module) -> bool:
    """Whether the model's parameters are parts, of one tensor parallel rank."""
    return any(place_of(parameter) is not None for parameter in model.parameters())


def places_on_rank(parts: Sequence[Mapping[str, WeightPart]], rank: int) -> dict[str, Place]:
    """The places of a rank's parts, by their names in transformers.

    Args:
        parts: of every rank.
    """
    places: dict[str, Place] = {}
    for name, own in parts[rank].items():
        same = [n for n, of_rank in enumerate(parts) if _region(of_rank[name]) == _region(own)]
        copies = Copies.NONE if len(same) == 1 else Copies.SUMMED if _is_of_heads(name) else Copies.EQUAL
        places[name] = Place(whole=own.whole, start=own.start, copies=copies, is_first=same[0] == rank)
    return places


def _region(part: WeightPart) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return part.start, part.shape


def _is_of_heads(name: str) -> bool:
    """Whether a rank computes with it what belongs to its own heads alone."""
    return name.rpartition(".")[0].rpartition(".")[2] in {"k_proj", "v_proj", "q_norm", "k_norm"}


@torch.no_grad()
def add_up_copies(gradients: Sequence[tuple[Tensor, Place]], ranks: Summing) -> None:
    """Replace gradients of parts that several ranks have by their sums."""
    summed = [(gradient, place, True) for gradient, place in gradients if place.copies is Copies.SUMMED]
    _combine(summed, ranks, "the gradients of what several ranks have")


@torch.no_grad()
def equalize_copies(values: Sequence[tuple[Tensor, Place]], ranks: Summing) -> None:
    """Replace the values of parts that several ranks have by those of the first of these ranks.

    They are equal already, unless they were rounded at random or a kernel adds up in another order each time.
    """
    of_first = [(value, place, place.is_first) for value, place in values if place.copies is not Copies.NONE]
    _combine(of_first, ranks, "what several ranks have")


def _combine(parts: Sequence[tuple[Tensor, Place, bool]], ranks: Summing, what: str) -> None:
    for some in _portions(parts):
        wholes = [torch.zeros(place.whole, dtype=torch.float32, device=part.device) for part, place, _ in some]
        for whole, (part, place, counts) in zip(wholes, some, strict=True):
            if counts:
                whole[place.region(part.shape)] = part
        summed = ranks.sum(torch.cat([whole.flatten() for whole in wholes]), what)
        for flat, (part, place, _) in zip(torch.split(summed, [w.numel() for w in wholes]), some, strict=True):
            part.copy_(flat.view(place.whole)[place.region(part.shape)])


def _portions(parts: Sequence[tuple[Tensor, Place, bool]]) -> Iterator[list[tuple[Tensor, Place, bool]]]:
    some: list[tuple[Tensor, Place, bool]] = []
    size = 0
    for each in parts:
        numel = torch.Size(each[1].whole).numel()
        if some and size + numel > ADDED_AT_ONCE:
            yield some
            some, size = [], 0
        some.append(each)
        size += numel
    if some:
        yield some


def gathered(part: Tensor, place: Place, ranks: Summing) -> Tensor:
    """The whole parameter on every rank, from the parts of all of them."""
    whole = part.new_zeros(place.whole)
    if place.is_first:
        whole[place.region(part.shape)] = part
    return ranks.sum(whole, "a whole parameter")


def part_of_whole(whole: Any, part: Tensor, place: Place) -> Any:
    """The rank's part of a whole tensor; other values as they are."""
    if not isinstance(whole, Tensor) or whole.ndim == 0:
        return whole
    return whole[place.region(part.shape)].contiguous()
