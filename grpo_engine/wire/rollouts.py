"""HTTP bodies of the rollout API: the Atropos trajectory API, as stock clients speak it.

Posted by environments, handed to the trainer, kept by `grpo_engine.rollouts`. A group is several completions of one
prompt. Two keys go beyond the stock fourteen, `policy_versions` and `truncated`; stock clients neither send nor read
them. So do evaluations: the trainer orders one, environments that said they evaluate find the order in their status and
answer it, and the trainer reads the answers.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, FiniteFloat

from grpo_engine.wire.codec import Message

MASKED_LABEL = -100
"""Label of a position that is not trained, in `ScoredGroup.masks`."""
MASKED_LOGPROB = 1.0
"""Log-probability of such a position: no real one is positive."""
LARGEST_WHOLE = 2**53
Whole = Annotated[int, Field(ge=-LARGEST_WHOLE, le=LARGEST_WHOLE)]
"""An integer that every reader of JSON keeps, also those with double-precision numbers."""
MAX_SEQUENCES = 2**20
"""Of a batch or group, and more than anybody trains on: finding groups for a batch takes memory that grows with it."""
TOKEN_VARIABLE = "GRPO_API_TOKEN"
"""Environment variable with the bearer token of a rollout API that asks for one; keeps it off command lines."""

POST_HEADER = "Idempotency-Key"
"""Names a post of groups as `sender:number`: one whose answer was lost is sent again, and must not count twice. Stock
environments send none; ours send one post at a time, so that the last of each sender is all that has to be known."""


class RegisterRequest(Message):
    """Body of `POST /register`: a trainer announces a run."""

    wandb_group: str
    wandb_project: str
    batch_size: int = Field(gt=0, le=MAX_SEQUENCES)
    """Sequences a batch."""
    max_token_len: Whole
    checkpoint_dir: str
    save_checkpoint_interval: Whole
    starting_step: Whole = Field(ge=0)
    num_steps: Whole
    eval_every: Whole = Field(0, ge=0)
    """Steps between the evaluations that it will order, the last of them after its last step; 0: it orders none. Stock
    trainers send no such key, nor the next."""
    max_staleness: Whole | None = Field(None, ge=0)
    """Groups whose oldest token is older than so many policy versions are dropped instead of being handed out."""


class RegisterEnvironmentRequest(Message):
    """Body of `POST /register-env`."""

    max_token_length: Whole
    desired_name: str
    weight: float = Field(ge=-1e6, le=1e6)
    """Stock environments send -1 where it is not to count."""
    group_size: int = Field(gt=0, le=MAX_SEQUENCES)
    min_batch_allocation: float | None = Field(None, ge=0, le=1)
    """Least share of every batch."""
    evaluates: bool = False
    """Whether it answers evaluations. Stock environments send no such key."""


class RegisterEnvironmentResponse(Message):
    """Answer of `POST /register-env` once the trainer has asked for its first batch."""

    status: str
    env_id: int | None = None
    wandb_name: str | None = None
    checkpoint_dir: str | None = None
    starting_step: int | None = None
    checkpoint_interval: int | None = None
    num_steps: int | None = None


class EvaluationOrder(Message):
    """Body of `POST /evaluations`: what the trainer wants measured. Sending it again under the same id is safe."""

    id: str = Field(min_length=1, max_length=64, pattern=r"^[\w-]+$")
    """Chosen by the trainer."""
    step: Whole = Field(ge=0)
    """Optimizer steps done."""
    policy_version: Whole = Field(ge=0)
    """Version of the weights that inference serves meanwhile."""
    num_prompts: Whole = Field(ge=1)
    """Held-out prompts of each environment; one that has fewer answers what it has."""
    num_samples: Whole = Field(ge=1)
    """Completions of each prompt."""


class EvaluationAnswer(Message):
    """Body of `POST /evaluations/{id}/answers`: what one environment measured. P prompts, G completions of each."""

    env_id: Whole
    rewards: list[list[FiniteFloat]] = []
    """(P, G)."""
    lengths: list[list[Whole]] = []
    """(P, G) tokens of each completion."""
    truncated: list[list[bool]] = []
    """(P, G) whether it ended at its length limit."""
    policy_versions: list[list[list[Whole]]] | None = None
    """(P, G, …) the versions that sampled the tokens of each completion, each once; absent: the server does not say."""
    solved_from: float = 1.0
    """Least reward of a completion that counts as solved, for pass@k."""
    time_s: float = 0.0
    """From reading the order to the last completion."""
    problem: str | None = None
    """Why there is nothing above."""


class NamedAnswer(Message):
    """An answer with the name of the environment that gave it."""

    environment: str
    """As registered, e.g. `sort6_0`."""
    desired_name: str
    """As it wanted to be called, e.g. `sort6`; the same after a restart."""
    answer: EvaluationAnswer


class EvaluationState(Message):
    """Answer of `POST /evaluations` and of `GET /evaluations/{id}`."""

    order: EvaluationOrder
    is_over: bool
    """Whether no more answers will come."""
    answers: list[NamedAnswer]
    waiting_for: list[str]
    """Environments that are at it."""
    missing: list[str]
    """Environments that had the order and are gone without an answer, their successors too."""
    unable: list[str]
    """Environments that do not evaluate."""


class EnvironmentStatus(Message):
    """Answer of `GET /status-env`; all counts are groups of the asking environment's size."""

    current_step: int
    queue_size: int
    unallocated_fraction: float
    self_queue_size: int
    max_group_size: int
    env_weight: float
    evaluation: EvaluationOrder | None = None
    """The order that the asking environment has yet to answer; this key and the next only come where there is news for
    an environment that evaluates."""
    is_evaluation_to_come: bool | None = None
    """True once the trainer has its last batch and has yet to order its last evaluation, or to get its answer."""


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
    """E.g. `{"temperature": 1.0, "logprobs_mode": "processed"}`; where a group does not say: raw, as stock servers."""
    inference_logprobs: list[list[float]] | None = None
    """(S, T) of the sampled token where trained, 1.0 elsewhere."""
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any | None = None
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None
    policy_versions: list[list[int]] | None = None
    """(S, T) version of the weights that sampled each token; 0 at masked positions."""
    truncated: list[bool] | None = None
    """(S,) whether the completion ended at its length limit."""


class BatchResponse(Message):
    """Answer of `GET /batch`: null while none is ready."""

    batch: list[ScoredGroup] | None
    status: str | None = None
    message: str | None = None
    lease: str | None = None
    """Hand it back as `?ack=` of the next `GET /batch`; a batch that is never acknowledged is offered again."""
    environments: dict[int, str] = Field(default_factory=dict)
    """Who the ids of its groups are, by the names that stay the same after a restart (`sort6`, not `sort6_0`)."""
