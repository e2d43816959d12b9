"""HTTP clients of an environment: the rollout API and the inference server.

Requests to a server that does not answer are repeated without limit, with a log line every ten seconds: the supervisor
decides when to give up. A 4xx answer is an error at once, because repeating the request would not change it.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from grpo_engine.environments.sampling.groups import Completions
from grpo_engine.errors import PeerError, PeerUnavailable
from grpo_engine.retrying import RetryPolicy, retry_async
from grpo_engine.wire.codec import first_fault
from grpo_engine.wire.inference import GenerateRequest
from grpo_engine.wire.rollouts import (
    POST_HEADER,
    EnvironmentStatus,
    EvaluationAnswer,
    RegisterEnvironmentRequest,
    RegisterEnvironmentResponse,
    ScoredGroup,
)

log = logging.getLogger(__name__)

MessageT = TypeVar("MessageT", bound=BaseModel)

_MIN_PAUSE_S = 0.1
_MAX_PAUSE_S = 2.0
"""Pause between two attempts."""
_REPORT_AFTER_S, _LOG_EVERY_S = 1.0, 10.0
_COMPRESS_FROM_BYTES = 1024
_REGISTER_EVERY_S = 0.25
_ANSWER_S = 60.0
"""Longer than the API holds a post while its queue is full."""


class UnknownEnvironment(PeerError):
    """The rollout API does not know this environment's id: it was reset, or lost its store."""


class UnknownEvaluation(PeerError):
    """The rollout API does not know the evaluation: it is closed, or the API was reset."""


class BatchLimits(BaseModel):
    """Answer of `GET /info`; -1 before a trainer registered."""

    batch_size: int
    max_token_len: int


class RolloutApi:
    """Client of the rollout API."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._peer = _Peer("rollout API")
        self._name = secrets.token_hex(8)
        self._num_posts = 0

    async def limits(self) -> BatchLimits:
        """The trainer's batch size and longest sequence."""
        return _read(BatchLimits, await self._ask("GET", "/info"))

    async def register(self, request: RegisterEnvironmentRequest) -> RegisterEnvironmentResponse:
        """Register once the trainer has asked for its first batch."""
        is_logged = False
        while True:
            answer = _read(RegisterEnvironmentResponse, await self._ask("POST", "/register-env", json=request))
            if answer.status == "success" and answer.env_id is not None:
                return answer
            if not is_logged:
                log.info("waiting for the trainer (%s: %s)", self._http.base_url, answer.status)
                is_logged = True
            await asyncio.sleep(_REGISTER_EVERY_S)

    async def status(
        self, env_id: int, *, known: EnvironmentStatus | None = None, wait_s: float = 0.0
    ) -> EnvironmentStatus:
        """Step, queue and evaluation; the API may hold its answer for `wait_s` while they are as `known`.

        Raises:
            UnknownEnvironment: register again.
        """
        body: dict[str, float | int | str] = {"env_id": env_id}
        if known is not None and wait_s > 0:
            body |= {"wait_s": wait_s, "current_step": known.current_step, "queue_size": known.queue_size}
            body |= {"evaluation": known.evaluation.id} if known.evaluation else {}

        async def ask() -> httpx.Response:
            return await self._http.request("GET", "/status-env", json=body, timeout=_ANSWER_S)

        return _read(EnvironmentStatus, await _request_until_answered(ask, self._peer))

    async def post(self, groups: Sequence[ScoredGroup]) -> None:
        """Post one or several groups, compressed if that makes them smaller; one call at a time.

        If the API stops after it stored them and before it answers, the post is repeated; its header identifies it.
        """
        self._num_posts += 1
        bodies = [group.model_dump_json(exclude_none=True).encode() for group in groups]
        path, body = ("/scored_data", bodies[0]) if len(bodies) == 1 else ("/scored_data_list", _array(bodies))
        headers = {"Content-Type": "application/json", POST_HEADER: f"{self._name}:{self._num_posts}"}
        if len(body) >= _COMPRESS_FROM_BYTES:
            packed = gzip.compress(body, 1)
            if len(packed) < len(body):
                body, headers = packed, {**headers, "Content-Encoding": "gzip"}

        async def send() -> httpx.Response:
            return await self._http.post(path, content=body, headers=headers, timeout=_ANSWER_S)

        await _request_until_answered(send, self._peer)

    async def answer(self, evaluation_id: str, answer: EvaluationAnswer) -> None:
        """Post the answer to an evaluation; repeating it is safe.

        Raises:
            UnknownEvaluation: it is closed.
        """
        await self._ask("POST", f"/evaluations/{evaluation_id}/answers", json=answer)

    async def disconnect(self, env_id: int) -> None:
        """Disconnect, so that the guaranteed share lapses at once; an error is only logged."""
        try:
            await self._http.post("/disconnect-env", json={"env_id": env_id}, timeout=0.5)
        except httpx.TransportError as error:
            log.info("rollout API not reachable for /disconnect-env: %s", error or type(error).__name__)

    async def _ask(self, method: str, path: str, json: BaseModel | None = None) -> httpx.Response:
        content = json.model_dump_json().encode() if json else None
        headers = {"Content-Type": "application/json"} if content else None
        return await _request_until_answered(
            lambda: self._http.request(method, path, content=content, headers=headers, timeout=_ANSWER_S), self._peer
        )


class InferenceServer:
    """Client of the inference server."""

    def __init__(self, http: httpx.AsyncClient, *, timeout_s: float) -> None:
        self._http = http
        self._peer = _Peer("inference server")
        self._timeout_s = timeout_s

    async def wait_until_healthy(self) -> None:
        """Wait until `/health` answers 200."""
        await _request_until_answered(lambda: self._http.get("/health", timeout=5.0), self._peer)

    async def generate(self, request: GenerateRequest) -> Completions:
        """Sample completions; the request is repeated if the server aborted any.

        Raises:
            PeerError: it refuses the request, or the answer is invalid.
        """
        body = request.model_dump_json(exclude_unset=True, exclude_none=True).encode()
        headers = {"Content-Type": "application/json"}
        while True:
            answer = await _request_until_answered(
                lambda: self._http.post("/generate", content=body, headers=headers, timeout=self._timeout_s),
                self._peer,
            )
            completions = _read(Completions, answer)
            if "abort" not in completions.finish_reasons:
                return completions


class _Peer:
    """Availability of a server; of the many requests that wait for it, one logs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._down_since: float | None = None
        self._logged_at = -math.inf

    def report_failure(self, since: float, problem: str) -> None:
        """Log that a request has failed since `since`, in monotonic seconds."""
        now = time.monotonic()
        if self._down_since is None and now - since <= _REPORT_AFTER_S:
            return
        if self._down_since is None or now - self._logged_at > _LOG_EVERY_S:
            self._down_since, self._logged_at = self._down_since or since, now
            log.warning("%s has not answered for %.0f s (%s); retrying", self.name, now - self._down_since, problem)

    def report_recovery(self) -> None:
        """Log that a request succeeded after failures."""
        if self._down_since is not None:
            log.info("%s answers again after %.1f s", self.name, time.monotonic() - self._down_since)
            self._down_since = None


async def _request_until_answered(ask: Callable[[], Awaitable[httpx.Response]], peer: _Peer) -> httpx.Response:
    """Repeat a request until it is answered with a status below 500.

    Raises:
        UnknownEnvironment: 404 for an environment.
        UnknownEvaluation: 404 for an evaluation.
        PeerError: any other 4xx.
    """
    down_since = math.inf

    async def attempt() -> httpx.Response:
        nonlocal down_since
        asked = time.monotonic()
        try:
            answer = await ask()
        except httpx.TransportError as error:
            # A time-out means no answer since the request was sent; any other failure may have begun just now.
            is_timeout = isinstance(error, httpx.TimeoutException)
            down_since = min(down_since, asked if is_timeout else time.monotonic())
            raise PeerUnavailable(str(error) or type(error).__name__) from None
        if answer.status_code >= 500:
            down_since = min(down_since, time.monotonic())
            raise PeerUnavailable(f"{answer.status_code} {answer.text[:200]}")
        return answer

    policy = RetryPolicy(
        retried=PeerUnavailable,
        first_pause_s=_MIN_PAUSE_S,
        longest_pause_s=_MAX_PAUSE_S,
        on_failure=lambda error: peer.report_failure(down_since, str(error)),
    )
    answer = await retry_async(attempt, policy)
    if down_since < math.inf:
        peer.report_recovery()
    return _accepted(answer, peer.name)


def _accepted(answer: httpx.Response, peer: str) -> httpx.Response:
    if answer.status_code < 400:
        return answer
    request = answer.request
    if answer.status_code == httpx.codes.NOT_FOUND and request.url.path.endswith("/status-env"):
        raise UnknownEnvironment(answer.text[:200])
    if answer.status_code == httpx.codes.NOT_FOUND and "/evaluations/" in request.url.path:
        raise UnknownEvaluation(answer.text[:200])
    raise PeerError(
        f"{peer}: {request.method} {request.url} was refused with {answer.status_code}: {answer.text[:500]}"
    )


def _read(kind: type[MessageT], answer: httpx.Response) -> MessageT:
    try:
        return kind.model_validate_json(answer.content)
    except ValidationError as error:
        raise PeerError(f"{answer.request.url}: not a {kind.__name__}: {first_fault(error)}") from None


def _array(bodies: Sequence[bytes]) -> bytes:
    return b"[" + b",".join(bodies) + b"]"
