"""What is simulated: numbers of everything, and the settings that the rules go by. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from grpo_engine.rollouts.state.buffering import Buffering


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One stack."""

    num_servers: int
    num_ranks: int
    """Of the trainer."""
    num_environments: int
    batch_size: int
    """Sequences in each optimizer step."""
    group_size: int
    max_staleness: int | None
    max_workers: int = 64
    max_batches_offpolicy: int | None = None
    """None: as many as the rollout API says."""
    buffering: Buffering = field(default_factory=Buffering)
    update_every: int = 1
    """Steps between two weight updates."""
    shares_device: bool = False
    """Whether servers decode on the devices of the trainer, and so slow it down."""
    num_steps: int = 60
    num_warmup: int = 12
    """Steps at the start that are not counted."""
    seed: int = 0
