"""The two servers that an environment talks to: the rollout API and the inference server.

A server that is away is waited for, without limit and with a log line now and then: the supervisor decides what is too
long. An answer that refuses is an error at once, because asking again would not change it.
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

from grpo_engine.environments.groups import Completions
from grpo_engine.errors import PeerError
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
"""Between two attempts at a server that is away."""
_AWAY_AFTER_S, _SAY_EVERY_S = 1.0, 10.0
_COMPRESS_FROM_BYTES = 1024
_REGISTER_EVERY_S = 0.25
_ANSWER_S = 60.0
"""The API may hold a post for some time when its queue is full."""


class UnknownEnvironment(PeerError):
    """The rollout API does not know our id: it was reset, or lost its database."""


class UnknownEvaluation(PeerError):
    """The rollout API does not know an evaluation (any more): it is over, or the API was reset."""


class BatchLimits(BaseModel):
    """Answer of `GET /info`; -1 before a trainer registered."""

    batch_size: int
    max_token_len: int


class RolloutApi:
    """The rollout API, as an environment sees it."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._peer = _Peer("rollout API")
        self._name = secrets.token_hex(8)
        self._num_posts = 0

    async def limits(self) -> BatchLimits:
        """Batch size and longest sequence; waits until the API answers."""
        return _read(BatchLimits, await self._ask("GET", "/info"))

    async def register(self, request: RegisterEnvironmentRequest) -> RegisterEnvironmentResponse:
        """Register, as soon as the trainer has asked for its first batch."""
        is_said = False
        while True:
            answer = _read(RegisterEnvironmentResponse, await self._ask("POST", "/register-env", json=request))
            if answer.status == "success" and answer.env_id is not None:
                return answer
            if not is_said:
                log.info("waiting for the trainer (%s: %s)", self._http.base_url, answer.status)
                is_said = True
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

        return _read(EnvironmentStatus, await _patiently(ask, self._peer))

    async def post(self, groups: Sequence[ScoredGroup]) -> None:
        """Hand over groups, one or several, compressed when that makes them smaller; one call at a time.

        An API that took them and was ended before it said so is asked again, and knows the post by its name.
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

        await _patiently(send, self._peer)

    async def answer(self, evaluation_id: str, answer: EvaluationAnswer) -> None:
        """Hand over what an evaluation measured; sending it again is safe.

        Raises:
            UnknownEvaluation: nobody wants it any more.
        """
        await self._ask("POST", f"/evaluations/{evaluation_id}/answers", json=answer)

    async def disconnect(self, env_id: int) -> None:
        """Say goodbye, so that our share lapses at once; an API that is gone is left alone."""
        try:
            await self._http.post("/disconnect-env", json={"env_id": env_id}, timeout=0.5)
        except httpx.TransportError as error:
            log.info("left without goodbye: %s", error or type(error).__name__)

    async def _ask(self, method: str, path: str, json: BaseModel | None = None) -> httpx.Response:
        content = json.model_dump_json().encode() if json else None
        headers = {"Content-Type": "application/json"} if content else None
        return await _patiently(
            lambda: self._http.request(method, path, content=content, headers=headers, timeout=_ANSWER_S), self._peer
        )


class InferenceServer:
    """The inference server, as an environment sees it."""

    def __init__(self, http: httpx.AsyncClient, *, timeout_s: float) -> None:
        self._http = http
        self._peer = _Peer("inference server")
        self._timeout_s = timeout_s

    async def wait_until_healthy(self) -> None:
        """Wait for `/health` to say 200."""
        await _patiently(lambda: self._http.get("/health", timeout=5.0), self._peer)

    async def generate(self, request: GenerateRequest) -> Completions:
        """Sample; an answer that was cut off by the server is asked for again.

        Raises:
            PeerError: it refuses the request, or answers something else.
        """
        body = request.model_dump_json(exclude_unset=True, exclude_none=True).encode()
        headers = {"Content-Type": "application/json"}
        while True:
            answer = await _patiently(
                lambda: self._http.post("/generate", content=body, headers=headers, timeout=self._timeout_s),
                self._peer,
            )
            completions = _read(Completions, answer)
            if "abort" not in completions.finish_reasons:
                return completions


class _Peer:
    """A server that may be away; of the many requests that then wait for it, one says so."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._away_since: float | None = None
        self._said_at = -math.inf

    def does_not_answer(self, since: float, trouble: str | None) -> None:
        """A request has been in vain since then, in monotonic seconds."""
        now = time.monotonic()
        if self._away_since is None and now - since <= _AWAY_AFTER_S:
            return
        if self._away_since is None or now - self._said_at > _SAY_EVERY_S:
            self._away_since, self._said_at = self._away_since or since, now
            log.warning(
                "%s does not answer since %.0f s (%s); asking again", self.name, now - self._away_since, trouble
            )

    def answers_again(self) -> None:
        """One that was in vain before is answered."""
        if self._away_since is not None:
            log.info("%s is back after %.1f s", self.name, time.monotonic() - self._away_since)
            self._away_since = None


async def _patiently(ask: Callable[[], Awaitable[httpx.Response]], peer: _Peer) -> httpx.Response:
    """Ask until an answer below 500 comes.

    Raises:
        UnknownEnvironment: it is 404 and about an environment.
        UnknownEvaluation: it is 404 and about an evaluation.
        PeerError: it refuses for any other reason.
    """
    away_since, pause_s = math.inf, _MIN_PAUSE_S
    while True:
        asked = time.monotonic()
        try:
            answer = await ask()
            trouble = f"{answer.status_code} {answer.text[:200]}" if answer.status_code >= 500 else None
        except httpx.TransportError as error:
            answer, trouble = None, str(error) or type(error).__name__
            if isinstance(error, httpx.TimeoutException):
                away_since = min(away_since, asked)  # all the while; what else fails may have gone well until then
        if answer is not None and trouble is None:
            if away_since < math.inf:
                peer.answers_again()
            return _accepted(answer, peer.name)
        away_since = min(away_since, time.monotonic())
        peer.does_not_answer(away_since, trouble)
        await asyncio.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _MAX_PAUSE_S)


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
