"""Interface of an inference engine that is in a rank of the trainer. Torch-free to import."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Layer = dict[str, "Tensor"]
"""Whole parameters by their names in transformers, in the trained model's dtype."""


class InProcessEngine(Protocol):
    """An inference engine in a rank of the trainer, as far as weights and memory are concerned."""

    def start(self) -> None:
        """Load the model and allocate the cache, on all ranks at once; called first, before the trainer allocates.

        Raises:
            GrpoError: it does not load, or does not fit.
        """

    def sleep(self, *, keeps_weights: bool) -> None:
        """Free the cache, and the weights on the device; without `keeps_weights` their values are lost."""

    def wake_weights(self) -> None:
        """Allocate the weights again, with their values if those were kept."""

    def load(self, layer: Layer) -> None:
        """Copy new values over the weights with these names; they belong to the caller."""

    def wake_cache(self) -> None:
        """Allocate the cache again, empty; called with all weights in place."""

    def close(self) -> None:
        """End it, also where it was not started; called last, before the ranks leave their group."""

    def parameter_names(self) -> Collection[str]:
        """Of all weights, as `load` takes them; a tied one is listed once."""
