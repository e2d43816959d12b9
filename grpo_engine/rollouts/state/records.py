"""Records of the rollout API: run, environment, lease, evaluation, and what the store holds at a start. Immutable."""

from __future__ import annotations

from dataclasses import dataclass, field

from grpo_engine.rollouts.state.batch_forming import QueuedGroup
from grpo_engine.wire.rollouts import EvaluationAnswer, EvaluationOrder, RegisterRequest

QUEUE = "queue"
"""Place of a group that waits for a batch."""
BUFFER = "buffer"
"""Place of a group that waits for others to complete its environment's group size. All other places are lease ids."""
MOST_COMBINED = 256
"""Group size up to which smaller groups are put together. To look for those that fit takes the longer the larger it is:
posts of 1,024 groups of 1 held the event loop for 22 s each with a group size of 16,384."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A trainer's registration and its progress."""

    request: RegisterRequest
    uuid: int
    """Identifies the registration, so that a trainer that was replaced by another can be refused."""
    step: int
    """`starting_step` plus the batches delivered; a batch that is offered again counts once."""
    has_started: bool = False
    """Whether the trainer has asked for a batch or an evaluation: environments can register from then on."""
    is_left: bool = False
    """Whether the trainer has acknowledged its last batch, and so has ended."""

    @property
    def is_over(self) -> bool:
        """Whether the trainer has received as many batches as it announced."""
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
    takes_slots: bool = False
    """Whether it says what it samples, and starts what it is granted."""
    service: str | None = None

    def buffers(self, num_sequences: int) -> bool:
        """Whether a group of so many waits for others that complete its group size."""
        return num_sequences < self.group_size <= MOST_COMBINED


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A batch that was delivered and is not yet acknowledged."""

    id: str
    group_ids: tuple[int, ...]
    num_sequences: int
    client: str
    """Address and user agent of its client."""
    is_explicit: bool
    """Whether that client acknowledges by `ack`; stock clients do it by asking for the next batch."""
    delivered_at: float
    """Unix seconds of the latest delivery."""
    is_sent: bool = False
    """Whether it was sent: only then does a request for the next one imply that it arrived."""
    is_open: bool = False
    """Whether it is offered again to the next request."""
    has_arrived: bool = False
    """Whether the client's kernel is known to have all of it."""
    is_served: bool = False
    """Whether it was trained, and inference serves the new version: its slots are free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """The newest evaluation that the trainer ordered, with its answers."""

    order: EvaluationOrder
    ordered_at: float
    """Unix seconds."""
    answers: tuple[EvaluationAnswer, ...] = ()
    is_closed: bool = False
    """Whether the trainer accepts no more answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Content of a store, without the bodies of its groups."""

    run: RunRecord | None
    environments: list[EnvironmentRecord]
    leases: list[Lease]
    groups: list[tuple[QueuedGroup, str]]
    """Each group, oldest first, with its place."""
    latest_body: bytes | None
    posts: dict[str, str] = field(default_factory=dict)
    """Number of the last post of each sender."""
    evaluation: EvaluationRecord | None = None
