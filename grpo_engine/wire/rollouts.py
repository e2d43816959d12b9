"""HTTP bodies of the rollout API: the Atropos trajectory API as stock clients use it, and extensions.

Environments post groups, `grpo_engine.rollouts` stores them, and the trainer fetches batches. A group is several
completions of one prompt. Two keys extend the stock fourteen, `policy_versions` and `truncated`; stock clients neither
send nor read them. Evaluations are an extension too: the trainer orders one, environments that registered with
`evaluates` find the order in their status and answer it, and the trainer reads the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, Field, FiniteFloat

from grpo_engine.wire.codec import Message, Reason

MASKED_LABEL = -100
"""Label of a position that is not trained, in `ScoredGroup.masks`."""
MASKED_LOGPROB = 1.0
"""Log-probability at such a position: a real one is never positive."""
TOKEN_BOUND = 2**31
"""Above every vocabulary, and the bound of an int32 tensor."""
LARGEST_NUMBER = 3.4028234663852886e38
"""Largest float32: a log-probability or reward beyond it would be infinite in the trainer."""
LARGEST_WHOLE = 2**53
Whole = Annotated[int, Field(ge=-LARGEST_WHOLE, le=LARGEST_WHOLE)]
"""An integer that JSON readers with double-precision numbers keep exact."""


def _is_printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError("a control character, which logs and screens would carry out: use printable characters")
    return name


Name = Annotated[str, Field(max_length=256), AfterValidator(_is_printable)]
"""A name that is shown on terminals."""
ShownName = Annotated[str, Field(max_length=1024)]
"""A name as a rollout API tells it; a stock one has names of any characters, and adds a number to them."""
MAX_SEQUENCES = 2**20
"""Bound on a batch or group, far above practical sizes: forming a batch takes memory proportional to its size."""

MAX_WAIT_S = 20.0
"""Longest time for which a request is held."""
MAX_REPORTS = 1000
"""Environments of a request for statuses."""

FIRST_BATCHES_AHEAD, MOST_BATCHES_AHEAD = 3, 8
"""Batches that environments sample ahead where neither they nor a staleness bound fix it: at the start, as stock ones
do, and at most. With 8 an 8B trainer beside vLLM on one H200 waited 0.02 s a step instead of 0.54, at a staleness of
5.1 versions instead of 2.3."""

POST_HEADER = "Idempotency-Key"
"""Identifies a post of groups as `sender:number`: a post whose answer was lost is repeated, and must not count twice.
Stock environments send none; ours send one post at a time, so the last number of each sender is sufficient."""


class RegisterRequest(Message):
    """Body of `POST /register`: a trainer announces a run."""

    wandb_group: Name
    wandb_project: Name
    batch_size: int = Field(gt=0, le=MAX_SEQUENCES)
    """Sequences per batch."""
    max_token_len: Whole
    checkpoint_dir: str
    save_checkpoint_interval: Whole
    starting_step: Whole = Field(ge=0)
    num_steps: Whole
    eval_every: Whole = Field(0, ge=0)
    """Steps between the evaluations that it orders, the last one after its last step; 0: none. Stock trainers send
    none of the keys from this one on."""
    max_staleness: Whole | None = Field(None, ge=0)
    """Environments may sample this many batches ahead, and groups whose oldest token is more than this many policy
    versions old are dropped."""
    is_served: bool = False
    """Whether inference has the weights of its first step: environments begin now, not at its request for a batch."""


class RegisterResponse(Message):
    """Answer of `POST /register`."""

    uuid: int | str
    """Of this registration: a number, except from an API that is not ours."""
    changes: str = ""
    """What it changed, for people; absent from a stock API."""


class RegisterEnvironmentRequest(Message):
    """Body of `POST /register-env`."""

    max_token_length: Whole
    desired_name: Name
    weight: float = Field(ge=-1e6, le=1e6)
    """Stock environments send -1 for no weight."""
    group_size: int = Field(gt=0, le=MAX_SEQUENCES)
    min_batch_allocation: float | None = Field(None, ge=0, le=1)
    """Least share of every batch."""
    evaluates: bool = False
    """Whether it answers evaluations. Stock environments send neither this key nor the next."""
    takes_slots: bool = False
    """Whether it says in each request of its status how many groups it samples, and starts as many as it is granted."""
    service: Name | None = None
    """The run and its service, of which one process runs at a time: it replaces earlier ones of this name."""


class RegisterEnvironmentResponse(Message):
    """Answer of `POST /register-env` once the trainer has asked for its first batch."""

    status: str
    env_id: Whole | None = None
    wandb_name: str | None = None
    checkpoint_dir: str | None = None
    starting_step: int | None = None
    checkpoint_interval: int | None = None
    num_steps: int | None = None


class EvaluationOrder(Message):
    """Body of `POST /evaluations`: an evaluation order. Repeating it with the same id is safe."""

    id: str = Field(min_length=1, max_length=64, pattern=r"^[\w-]+$")
    """Chosen by the trainer."""
    step: Whole = Field(ge=0)
    """Optimizer steps done."""
    policy_version: Whole = Field(ge=0)
    """Policy version that inference serves during it."""
    num_prompts: Whole = Field(ge=1)
    """Held-out prompts of each environment, or all that it has."""
    num_samples: int = Field(ge=1, le=MAX_SEQUENCES)
    """Completions per prompt."""


class EvaluationAnswer(Message):
    """Body of `POST /evaluations/{id}/answers`: the results of one environment. P prompts, G completions of each."""

    env_id: Whole
    rewards: list[list[FiniteFloat]] = []
    """(P, G)."""
    lengths: list[list[Whole]] = []
    """(P, G) tokens of each completion."""
    truncated: list[list[bool]] = []
    """(P, G) whether it ended at its length limit."""
    policy_versions: list[list[list[Whole]]] | None = None
    """(P, G, …) distinct policy versions that sampled each completion; absent: unknown."""
    solved_from: float = 1.0
    """Least reward of a completion that counts as solved, for pass@k."""
    time_s: float = 0.0
    """Seconds from the order to the last completion."""
    problem: Reason | None = None
    """Why there are no results."""

    def fault(self, order: EvaluationOrder) -> str | None:
        """How it does not match its order; None when it does."""
        if self.problem is not None:
            return None
        num_prompts = len(self.rewards)
        if not 1 <= num_prompts <= order.num_prompts:
            return f"rewards: {num_prompts} prompts where 1 to {order.num_prompts} were ordered"
        tables: dict[str, Sequence[Sequence[object]]] = {
            "rewards": self.rewards,
            "lengths": self.lengths,
            "truncated": self.truncated,
        }
        if self.policy_versions is not None:
            tables["policy_versions"] = self.policy_versions
        for name, rows in tables.items():
            if len(rows) != num_prompts:
                return f"{name}: {len(rows)} entries for {num_prompts} prompts"
            for index, row in enumerate(rows):
                if len(row) != order.num_samples:
                    return f"{name}: prompt {index} has {len(row)} entries where {order.num_samples} were ordered"
        return None


class NamedAnswer(Message):
    """An answer with the name of the environment that gave it."""

    environment: ShownName
    """As registered, e.g. `sort6_0`."""
    desired_name: ShownName
    """Requested name, e.g. `sort6`; the same after a restart."""
    answer: EvaluationAnswer


class EvaluationState(Message):
    """Answer of `POST /evaluations` and of `GET /evaluations/{id}`."""

    order: EvaluationOrder
    is_over: bool
    """Whether no more answers will come."""
    answers: list[NamedAnswer]
    waiting_for: list[str]
    """Environments that have not answered yet."""
    missing: list[str]
    """Environments that received the order and disconnected without an answer, and were not replaced."""
    unable: list[str]
    """Environments that do not evaluate."""


class SamplingLimit(StrEnum):
    """What keeps an environment from sampling more at a time."""

    BATCHES_AHEAD = "batches_ahead"
    """The number of batches ahead."""
    WORKERS = "workers"
    """Its `max_workers`, or its share of them."""
    SERVERS = "servers"
    """Requests queue at every inference server, for a place in its batch or in its KV cache."""
    UNKNOWN = "unknown"
    """The number of batches ahead, or the servers: none of them says that no requests queue at it."""


class BatchesAhead(Message):
    """How far environments may sample ahead, where that follows what the trainer needs."""

    batches: Whole
    why: str = ""
    """It was changed to that, for people."""
    limit: SamplingLimit | None = None
    """What keeps most environments from sampling more, where it is not this number."""


class EnvironmentStatus(Message):
    """Answer of `GET /status-env`; all counts are groups of the asking environment's size."""

    current_step: Whole
    queue_size: Whole
    unallocated_fraction: float
    self_queue_size: Whole
    max_group_size: Whole
    env_weight: float = Field(ge=-1e6, le=1e6)
    evaluation: EvaluationOrder | None = None
    """The order that the environment has yet to answer; this key and the next are only sent to environments that
    evaluate."""
    is_evaluation_to_come: bool | None = None
    """True once the trainer has its last batch and its last evaluation is not over."""
    may_start: Whole | None = None
    """Groups that it may start now, beyond those that it said it samples; absent: staleness has no bound, or it did not
    ask."""
    needs_no_more: bool | None = None
    """True once the trainer has its last batch; only sent to environments that take slots."""
    ahead: BatchesAhead | None = None
    """Only sent to environments that said what limits them; absent where staleness has a bound."""


class EnvironmentReport(Message):
    """What an environment says of itself as it asks for its status; a stock one sends only its id.

    With what it knows of its status, its request may be held until there is news.
    """

    env_id: Whole
    current_step: Whole | None = None
    queue_size: Whole | None = None
    evaluation: str | None = None
    """Id of the evaluation that it knows and has yet to answer."""
    sampled: Whole | None = Field(None, ge=0, le=MAX_SEQUENCES)
    """Groups that it samples or has yet to post, so that it can be granted slots for more."""
    wanted_items: Whole = Field(0, ge=0)
    """Items that it would start now."""
    groups_per_item: Whole = Field(1, ge=1, le=MAX_SEQUENCES)
    limit: SamplingLimit | None = None
    """What keeps it from sampling more, so that it is told how many batches it may sample ahead."""

    def is_news(self, status: EnvironmentStatus) -> bool:
        """Whether the status says more than it knows; more groups in the queue are not news."""
        evaluation = status.evaluation.id if status.evaluation else None
        if self.queue_size is None or (status.current_step, evaluation) != (self.current_step, self.evaluation):
            return True
        return bool(status.may_start) or status.queue_size < self.queue_size


class StatusRequest(EnvironmentReport):
    """Body of `GET /status-env`."""

    wait_s: float = Field(0.0, ge=0, le=MAX_WAIT_S)
    """Hold the answer for this long while there is no news."""


class StatusListRequest(Message):
    """Body of `POST /status-env-list`, of a process with many environments."""

    environments: list[EnvironmentReport] = Field(max_length=MAX_REPORTS)
    wait_s: float = Field(0.0, ge=0, le=MAX_WAIT_S)
    """Hold the answer for this long while there is no news for any of them."""


class StatusList(Message):
    """Answer of `POST /status-env-list`."""

    batch_size: Whole
    """This and the next as `GET /info` has them."""
    max_token_len: Whole
    environments: list[EnvironmentStatus | None]
    """In the order of the request; null: it is not registered."""


class ScoredGroup(Message):
    """One group, as it is posted, stored and handed out. S sequences, each of its own length T.

    Example, a prompt of two tokens and a completion of two (the last one the end token):
    `tokens [[5, 9, 7, 2]]`, `masks [[-100, -100, 7, 2]]`, `scores [1.0]`,
    `inference_logprobs [[1.0, 1.0, -0.3, -0.01]]`.
    """

    tokens: list[list[int]]
    """(S, T) prompt and completion."""
    masks: list[list[int]]
    """(S, T) labels: the token itself where trained, -100 elsewhere."""
    scores: list[float]
    """(S,) rewards."""
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[Any] | None = None
    generation_params: dict[str, Any] | None = None
    """E.g. `{"temperature": 1.0, "logprobs_mode": "processed"}`; absent: raw, as on stock servers."""
    inference_logprobs: list[list[float]] | None = None
    """(S, T) of the sampled token where trained, 1.0 elsewhere."""
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any | None = None
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None
    policy_versions: list[list[int]] | None = None
    """(S, T) policy version that sampled each token; 0 at masked positions."""
    truncated: list[bool] | None = None
    """(S,) whether the completion ended at its length limit."""


class IdleTimes(Message):
    """How long environments had nothing to do, because they had sampled as far ahead of the trainer as they may."""

    since_s: float = Field(ge=0)
    """Seconds since the batch before, or since the API started."""
    idle_s: dict[int, float]
    """Of those, by the ids of the environments that hold their request until there is more to do; stock ones do not."""


class BatchResponse(Message):
    """Answer of `GET /batch`: null while none is ready."""

    batch: list[ScoredGroup] | None
    status: str | None = None
    message: str | None = None
    lease: str | None = Field(None, max_length=256)
    """Send it as `?ack=` of the next `GET /batch`; a batch that is not acknowledged is offered again."""
    environments: dict[int, ShownName] = Field(default_factory=dict)
    """Names by the environment ids of its groups; stable across restarts (`sort6`, not `sort6_0`)."""
    idle: IdleTimes | None = None
    """Absent for a batch that is offered again, and from a stock API."""
    ahead: BatchesAhead | None = None
    """When it was delivered; absent where no environment follows it, and for a batch that is offered again."""
    tokens_per_second: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Of completions that environments posted since the batch before; absent for the first batch, and for one that is
    offered again."""
    num_dropped: Whole = 0
    """Groups that were dropped since the batch before, because they were older than max_staleness."""
