"""How a number of GPUs is divided between trainer and servers so that neither waits for long. Pure."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from grpo_engine.errors import ConfigError
from grpo_engine.simulate.figures import Figures
from grpo_engine.simulate.layout import Layout
from grpo_engine.wire.rollouts import MOST_BATCHES_AHEAD


def divided(layout: Layout, figures: Figures, *, num_gpus: int, gpus_per_server: int, num_ranks: int | None) -> Layout:
    """The layout on so many GPUs, divided by the speeds alone: what waits for what is left to the simulation.

    Args:
        num_ranks: of the trainer; None: as many as make a step the shortest.

    Raises:
        ConfigError: there is no GPU for one of the sides.
    """
    most = num_gpus - gpus_per_server
    if most < 1 or (num_ranks is not None and num_ranks > most):
        raise ConfigError(
            f"{num_gpus} GPUs: {num_ranks or 1} for the trainer and {gpus_per_server} for a server are more: take more "
            "machines or GPUs a machine, or fewer --trainers"
        )
    layouts = [
        replace(layout, num_ranks=ranks, num_servers=(num_gpus - ranks) // gpus_per_server, shares_device=False)
        for ranks in ([num_ranks] if num_ranks is not None else range(1, most + 1))
    ]
    return min(layouts, key=lambda each: _step_s(each, figures))


def _step_s(layout: Layout, figures: Figures) -> float:
    """A step in which no time is lost: the longer of both times, or their sum in turns."""
    lengths = figures.lengths
    mean = fmean(length for group in lengths.groups for length in group) if lengths.groups else lengths.mean
    batches = layout.max_batches_offpolicy or MOST_BATCHES_AHEAD
    bound = batches - 1 if layout.max_staleness is None else layout.max_staleness
    ahead = layout.batch_size * (bound + 1)
    running = max(1, min(figures.server.max_running, ahead // layout.num_servers))
    sampling_s = layout.batch_size * mean / (layout.num_servers * figures.server.tokens_per_s(running))
    training_s = figures.trainer.step_s(round(layout.batch_size * (mean + lengths.prompt)), layout.num_ranks)
    return sampling_s + training_s if bound == 0 else max(sampling_s, training_s)
