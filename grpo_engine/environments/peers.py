"""Requests of an environment to the rollout API and to inference servers: when they are repeated, what is logged.

Requests to a server that does not answer are repeated without limit, with a log line every ten seconds: the supervisor
decides when to give up. A 4xx answer is an error at once, because repeating the request would not change it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from grpo_engine.errors import PeerError, PeerUnavailable
from grpo_engine.retrying import RetryPolicy, retry_async
from grpo_engine.wire.codec import first_fault
from grpo_engine.wire.inference import wrong_server

log = logging.getLogger(__name__)

MessageT = TypeVar("MessageT", bound=BaseModel)
ResultT = TypeVar("ResultT")

_MIN_PAUSE_S = 0.1
_MAX_PAUSE_S = 2.0
"""Pause between two attempts."""
_REPORT_AFTER_S, _LOG_EVERY_S = 1.0, 10.0


class UnknownEnvironment(PeerError):
    """The rollout API does not know this environment's id: it was reset, or lost its store."""


class NoStatusList(PeerError):
    """The rollout API answers for one environment at a time, as stock ones do."""


class UnknownEvaluation(PeerError):
    """The rollout API does not know the evaluation: it is closed, or the API was reset."""


class Peer:
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


class Attempts:
    """The attempts of one request at one server."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._down_since = math.inf

    async def answer(self, ask: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
        """The answer of one attempt.

        Raises:
            PeerUnavailable: there is none, or its status is 500 or more.
            UnknownEnvironment: 404 for an environment.
            UnknownEvaluation: 404 for an evaluation.
            NoStatusList: there is no route for many environments.
            PeerError: any other 4xx.
        """
        asked = time.monotonic()
        try:
            answer = await ask()
        except httpx.TransportError as error:
            # A time-out means no answer since the request was sent; any other failure may have begun just now.
            is_timeout = isinstance(error, httpx.TimeoutException)
            self._down_since = min(self._down_since, asked if is_timeout else time.monotonic())
            raise PeerUnavailable(str(error) or type(error).__name__) from None
        if answer.status_code >= 500:
            self._down_since = min(self._down_since, time.monotonic())
            raise PeerUnavailable(f"{answer.status_code} {answer.text[:200]}")
        if self._down_since < math.inf:
            self._peer.report_recovery()
        return _accepted(answer, self._peer.name)

    def report(self, error: Exception) -> None:
        """Log that the last attempt failed and is repeated."""
        self._peer.report_failure(self._down_since, str(error))


async def request_until_answered(ask: Callable[[], Awaitable[httpx.Response]], peer: Peer) -> httpx.Response:
    """Repeat a request until it is answered with a status below 500.

    Raises:
        PeerError: as `Attempts.answer`, for a 4xx.
    """
    attempts = Attempts(peer)
    return await repeated(lambda: attempts.answer(ask), attempts.report)


async def repeated(attempt: Callable[[], Awaitable[ResultT]], on_failure: Callable[[Exception], None]) -> ResultT:
    """Repeat an attempt until it does not end in `PeerUnavailable`, with pauses that grow."""
    policy = RetryPolicy(
        retried=PeerUnavailable,
        first_pause_s=_MIN_PAUSE_S,
        longest_pause_s=_MAX_PAUSE_S,
        on_failure=on_failure,
    )
    return await retry_async(attempt, policy)


def read(kind: type[MessageT], answer: httpx.Response) -> MessageT:
    """The message in an answer.

    Raises:
        PeerError: it is no such message.
    """
    try:
        return kind.model_validate_json(answer.content)
    except ValidationError as error:
        raise PeerError(f"{answer.request.url}: not a {kind.__name__}: {first_fault(error)}") from None


def _accepted(answer: httpx.Response, peer: str) -> httpx.Response:
    if answer.status_code < 400:
        return answer
    request, path = answer.request, answer.request.url.path
    if answer.status_code == httpx.codes.NOT_FOUND and path.endswith("/status-env"):
        raise UnknownEnvironment(answer.text[:200])
    if answer.status_code == httpx.codes.NOT_FOUND and "/evaluations/" in path:
        raise UnknownEvaluation(answer.text[:200])
    is_missing = answer.status_code in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED)
    if is_missing and path.endswith("/status-env-list"):
        raise NoStatusList(answer.text[:200])
    if is_missing and path.endswith("/generate"):
        address = str(request.url).removesuffix("/generate")
        raise PeerError(f"{peer}: POST /generate answered {answer.status_code}: {wrong_server(address)}")
    raise PeerError(
        f"{peer}: {request.method} {request.url} was refused with {answer.status_code}: {answer.text[:500]}"
    )
