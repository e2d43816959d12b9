"""The interface between the HTTP routes and an engine (torch or vLLM).

Types and protocols only; imports neither torch nor vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from grpo_engine.errors import GrpoError
from grpo_engine.wire.inference import (
    GenerateRequest,
    JoinRequest,
    LogprobsMode,
    ReceiveRequest,
    SleepState,
    TakeRequest,
    WakeRequest,
    WokenRequest,
)

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

FinishReason = Literal["stop", "length", "abort"]
TopLogprobs = list[list[tuple[int, float]]]
"""`[position] -> [(token id, logprob)]`, most probable first."""

LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have; vLLM uses the same value."""


class EngineUnavailable(GrpoError):
    """The engine is loading, overloaded or stopped, or its weights are half-written: retry later (503)."""


class EngineStalled(EngineUnavailable):
    """The engine hangs: it has work and produces nothing."""


class WeightsBusy(GrpoError):
    """Another client has paused the engine or is changing its weights (409)."""


class NotANumber(GrpoError):
    """The model computes NaN, so its completions cannot be trained on (500)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One completion. Every list has one entry per generated token, including the end token."""

    token_ids: list[int]
    logprobs: list[float]
    """Of the sampled tokens; natural logarithm, finite."""
    top_logprobs: TopLogprobs | None
    """The `logprobs` most probable tokens at each position, if more than the sampled one was requested."""
    finish_reason: FinishReason
    policy_versions: list[int]
    text: str
    """Without special tokens, and cut before a stop string."""

    def __post_init__(self) -> None:
        if math.isnan(sum(self.logprobs)):
            raise NotANumber(
                f"the weights of version {self.policy_versions[-1]} compute NaN: they contain NaN or infinities, or "
                "overflow in this dtype. Resume from an earlier checkpoint with a lower --lr, and restart the "
                "inference server, because vLLM's cache keeps NaN"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The completions of one request."""

    prompt_token_ids: list[int]
    prompt_logprobs: list[list[tuple[int, float]] | None] | None
    """`[position] -> [(token id, logprob)]`, the prompt's token first; None at the first position."""
    completions: list[Completion]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """State of the engine."""

    engine: str
    """Library and version, e.g. `torch 2.11.0`."""
    device: str
    dtype: str
    policy_version: int
    update_count: int
    last_update_time: float
    """Unix seconds; 0 before the first update."""
    is_paused: bool
    is_sharing: bool
    """Whether a trainer can map the weights."""
    num_ranks: int = 1
    """Processes that hold weights."""
    sleep_state: SleepState = "awake"
    sleep_words: str | None = None
    """Why it does not sample, for people; None where it is awake."""
    sleeps_since: float | None = None
    """Unix seconds."""
    patches: Mapping[str, bool] = field(default_factory=dict)
    """Patches of the engine's code, and whether each is in place."""

    def __str__(self) -> str:
        """`torch 2.13.0+cpu on cpu, float32, policy version 0, shares its weights`, for the log."""
        parts = [f"{self.engine} on {self.device}", self.dtype, f"policy version {self.policy_version}"]
        parts += [f"{self.num_ranks} ranks"] if self.num_ranks > 1 else []
        parts += ["shares its weights"] if self.is_sharing else []
        missing = [name for name, is_in_place in self.patches.items() if not is_in_place]
        parts += [f"patches that are not in place: {', '.join(missing)}"] if missing else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter that is served."""

    name: str
    path: str
    number: int
    """Counts the loads, from 1."""
    paths_in_use: tuple[str, ...] = ()
    """Paths of earlier adapters that requests still used when this one was loaded; they may be read again."""


class StockApp(Protocol):
    """The engine's own HTTP application, for requests that match none of our routes."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

    def endpoints(self) -> dict[str, list[str]]:
        """Path → methods of its routes; may take a second."""


class Engine(Protocol):
    """A model that generates, and whose weights change only between its batches."""

    logprobs_mode: LogprobsMode

    def check_health(self) -> None:
        """Return when a request would be answered.

        Raises:
            EngineStalled: it has had work and produced nothing for `stalled_after_s`.
            EngineUnavailable, HalfWritten: a request would fail.
        """

    def info(self) -> EngineInfo:
        """State of the engine."""

    async def encode(self, text: str) -> list[int]:
        """Tokens of a text prompt, with the model's own opening token.

        Raises:
            DataError: it is too long to fit.
        """

    def decode(self, token_ids: list[int]) -> str:
        """Text of tokens, special tokens included."""

    async def render_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Tokens of a conversation up to where the assistant's answer begins.

        Raises:
            DataError: the model has no chat template, or the conversation is too long to fit.
        """

    async def generate(self, prompt_token_ids: list[int], params: GenerateRequest) -> Generation:
        """Generate; cancelling the call aborts the generation.

        Raises:
            DataError: the request is invalid.
            EngineUnavailable, HalfWritten: retry later.
        """

    async def pause(self, owner_pid: int | None, timeout_s: float) -> None:
        """Return once no batch runs; none begins until `resume`, the owner's exit or the time limit."""

    async def resume(self, policy_version: int | None) -> None:
        """Continue with waiting requests, under `policy_version` if given."""

    async def reload(self, path: Path, policy_version: int) -> None:
        """Replace the served weights by those of a checkpoint; one that does not fit changes nothing."""

    async def join(self, request: JoinRequest) -> None:
        """Take places in a weight group, in place of an earlier one; the meeting goes on after the call.

        Raises:
            BridgeError: the tensors that will be sent are not those that are served.
        """

    async def receive(self, request: ReceiveRequest) -> list[int]:
        """Serve the weights that the group's sender sends now; between two batches. The checksums, if asked for.

        Raises:
            BridgeError: the transfer failed, and the weights may be half-written; or no such group was joined.
        """

    async def sleep(self, owner_pid: int) -> None:
        """Free weights and cache between two batches; requests wait, also those that were begun, until `woken`.

        Raises:
            BridgeError: the engine was started without sleep mode.
            WeightsBusy: it sleeps for another trainer, which runs, or is paused by one.
        """

    async def wake_up(self, request: WakeRequest) -> None:
        """Allocate the weights of an engine that sleeps, whose values are taken next.

        Raises:
            BridgeError: there is no memory for them, or others will be handed over.
        """

    async def take(self, request: TakeRequest) -> None:
        """Copy what the staging memory holds now into the weights.

        Raises:
            BridgeError: it is not what comes next.
        """

    async def woken(self, request: WokenRequest) -> int | None:
        """Allocate the cache and continue, now that all weights have come; their checksum, if asked for.

        Raises:
            BridgeError: weights are missing, or there is no memory for the cache.
        """

    async def load_adapter(self, path: Path, name: str | None, policy_version: int | None) -> Adapter:
        """Serve an adapter from the next batch on; if it cannot be loaded, the old one is still served."""

    async def unload_adapter(self) -> Adapter | None:
        """Serve the model without an adapter; returns the adapter served before."""

    def adapter(self) -> Adapter | None:
        """The served adapter."""

    def stock_app(self) -> StockApp | None:
        """The engine's own routes; None if it has none. Raises `EngineUnavailable` while it is loading."""

    async def close(self) -> None:
        """Abort all work; waiting requests are refused."""


class StartableEngine(Engine, Protocol):
    """An engine with its life cycle."""

    def start(self) -> None:
        """Start to load the model, and return."""

    def wait_loaded(self) -> None:
        """Return once requests can be served; raises the error that prevents it."""

    async def wait_failed(self) -> None:
        """Return after `close`; raises `EngineUnavailable` when the engine has failed for good."""
