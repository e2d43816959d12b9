"""What the rollout API remembers of a run, an environment, a batch that it handed out and an evaluation.

Immutable; kept as JSON.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_engine.wire.rollouts import EvaluationAnswer, EvaluationOrder, RegisterRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A trainer's registration and how far it got."""

    request: RegisterRequest
    uuid: int
    """The registration's own number, by which a trainer can tell that another one took its place."""
    step: int
    """`starting_step` plus the batches that were handed out; a batch that is offered again counts once."""
    has_started: bool = False
    """Whether the trainer has asked for a batch or an evaluation: only then environments are let in."""
    is_left: bool = False
    """Whether the trainer said goodbye after its last batch."""

    @property
    def is_over(self) -> bool:
        """Whether the trainer has had as many batches as it announced."""
        return 0 < self.request.num_steps <= self.step


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRecord:
    """An environment's registration."""

    id: int
    """Consecutive from 0, valid across restarts."""
    desired_name: str
    name: str
    """`desired_name` with the number of environments of that name before it."""
    weight: float
    group_size: int
    max_token_length: int
    min_batch_allocation: float | None
    evaluates: bool = False
    is_connected: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A batch that was handed out and is not known to have arrived."""

    id: str
    group_ids: tuple[int, ...]
    num_sequences: int
    client: str
    """Address and user agent of who got it."""
    is_explicit: bool
    """Whether that client acknowledges in words; stock ones do it by asking for the next batch."""
    delivered_at: float
    """Unix seconds; of the last time, where it was offered again."""
    is_sent: bool = False
    """Whether it has gone out: only then can asking for the next mean that it arrived."""
    is_open: bool = False
    """Whether it is to be offered again at once."""
    has_arrived: bool = False
    """Whether all of it is known to be with its client, who may only have to read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """The newest evaluation that the trainer ordered, and what came of it."""

    order: EvaluationOrder
    ordered_at: float
    """Unix seconds."""
    answers: tuple[EvaluationAnswer, ...] = ()
    is_closed: bool = False
    """Whether the trainer has what it wanted, or wants it no more."""
