"""What the routes ask of an engine, whatever computes underneath: torch here, or vLLM.

Types and a protocol only; imports neither torch nor vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from grpo_engine.errors import GrpoError
from grpo_engine.wire.inference import GenerateRequest, LogprobsMode

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

FinishReason = Literal["stop", "length", "abort"]
TopLogprobs = list[list[tuple[int, float]]]
"""`[position] -> [(token id, logprob)]`, most probable first."""

LOWEST_LOGPROB = -9999.0
"""What stands for minus infinity, which is no JSON; vLLM uses the same."""


class EngineUnavailable(GrpoError):
    """The engine is loading, overloaded, has stopped, or its weights are half-written: ask again later (503)."""


class EngineStalled(EngineUnavailable):
    """The engine has work and gives no sign of life: it hangs."""


class WeightsBusy(GrpoError):
    """Somebody else has paused the engine or is changing its weights (409)."""


class NotANumber(GrpoError):
    """The model computes NaN, so nothing that it says can be trained on (500)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One completion. Every list has one entry a generated token, the end token included."""

    token_ids: list[int]
    logprobs: list[float]
    """Of the sampled tokens; natural logarithm, finite."""
    top_logprobs: TopLogprobs | None
    """The `logprobs` most probable tokens at each position, where more than the sampled one was asked for."""
    finish_reason: FinishReason
    policy_versions: list[int]
    text: str
    """Without special tokens, and cut before a stop string."""

    def __post_init__(self) -> None:
        if math.isnan(sum(self.logprobs)):
            raise NotANumber(
                f"the weights of version {self.policy_versions[-1]} compute NaN: they hold NaN or infinities, or "
                "overflow in this dtype. Train on from an earlier checkpoint with a lower --lr, and restart the "
                "inference server: vLLM's cache keeps NaN, whatever weights follow"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The answer to one request: as many completions as it asked for."""

    prompt_token_ids: list[int]
    prompt_logprobs: list[list[tuple[int, float]] | None] | None
    """`[position] -> [(token id, logprob)]`, the prompt's own token first; None at the first position."""
    completions: list[Completion]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Where the engine stands."""

    engine: str
    """What computes, with its version, e.g. `torch 2.11.0`."""
    device: str
    dtype: str
    policy_version: int
    update_count: int
    last_update_time: float
    """Unix seconds; 0 before the first update."""
    is_paused: bool
    is_sharing: bool
    """Whether a trainer can map the weights."""
    patches: Mapping[str, bool] = field(default_factory=dict)
    """What was changed in the engine's own code, and whether that is in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter that is served."""

    name: str
    path: str
    number: int
    """Counts the loads, from 1."""
    paths_in_use: tuple[str, ...] = ()
    """Of earlier adapters on which requests ran when this one was loaded; their files may be read again."""


class StockApp(Protocol):
    """The engine's own HTTP application, for requests that are for none of our routes."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

    def endpoints(self) -> dict[str, list[str]]:
        """Path → methods of what it answers; may take a second."""


class Engine(Protocol):
    """A model that generates, and whose weights change only between its batches."""

    logprobs_mode: LogprobsMode

    def check_health(self) -> None:
        """Return when a request would be answered; raises `EngineUnavailable` or `HalfWritten` otherwise.

        An engine that has had work and given no sign of life for `stalled_after_s` raises `EngineStalled`.
        """

    def info(self) -> EngineInfo:
        """Where the engine stands."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text prompt, with the model's own opening token."""

    def decode(self, token_ids: list[int]) -> str:
        """Text of tokens, special tokens included."""

    def render_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Tokens of a conversation up to where the assistant begins; raises `DataError` without a chat template."""

    async def generate(self, prompt_token_ids: list[int], params: GenerateRequest) -> Generation:
        """Generate; cancelling the call aborts the generation.

        Raises:
            DataError: the request cannot be served as it is.
            EngineUnavailable, HalfWritten: not now.
        """

    async def pause(self, owner_pid: int | None, timeout_s: float) -> None:
        """Return once no batch runs; no other begins until `resume`, the owner's death or the time limit."""

    async def resume(self, policy_version: int | None) -> None:
        """Let waiting requests go on, under this version where one is given."""

    async def reload(self, path: Path, policy_version: int) -> None:
        """Put the weights of a checkpoint in place of those served; a checkpoint that does not fit changes nothing."""

    async def load_adapter(self, path: Path, name: str | None, policy_version: int | None) -> Adapter:
        """Serve an adapter from the next batch on; one that cannot be loaded leaves the old one in place."""

    async def unload_adapter(self) -> Adapter | None:
        """Serve the bare model again; returns what was served before."""

    def adapter(self) -> Adapter | None:
        """The adapter that is served."""

    def stock_app(self) -> StockApp | None:
        """The engine's own routes; None where it has none. Raises `EngineUnavailable` while they are not there yet."""

    async def close(self) -> None:
        """End the work at once; waiting requests are refused."""


class StartableEngine(Engine, Protocol):
    """An engine as its process sees it."""

    def start(self) -> None:
        """Begin to load the model, and return."""

    def wait_loaded(self) -> None:
        """Return once requests can be served; raises what keeps the model from loading."""

    async def wait_failed(self) -> None:
        """Return after `close`; raises `EngineUnavailable` when the engine has died and cannot come back."""
