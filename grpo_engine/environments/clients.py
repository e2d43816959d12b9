"""HTTP client of an environment for the rollout API."""

from __future__ import annotations

import asyncio
import gzip
import logging
import secrets
import time
from collections.abc import Sequence

import httpx
from pydantic import BaseModel

from grpo_engine.environments.peers import Peer, read, request_until_answered
from grpo_engine.environments.status_requests import ANSWER_S, BatchLimits, StatusRequests, request_status
from grpo_engine.errors import PeerError
from grpo_engine.wire.codec import Message
from grpo_engine.wire.rollouts import (
    POST_HEADER,
    EnvironmentStatus,
    EvaluationAnswer,
    RegisterEnvironmentRequest,
    RegisterEnvironmentResponse,
    ScoredGroup,
    StatusRequest,
)

log = logging.getLogger(__name__)

_COMPRESS_FROM_BYTES = 1024
_REGISTER_EVERY_S = 0.25


class WandbInfo(Message):
    """Answer of `GET /wandb_info`; None before a trainer registered, empty where it has none."""

    group: str | None = None
    project: str | None = None


class RolloutApi:
    """Client of the rollout API."""

    def __init__(self, http: httpx.AsyncClient, *, statuses: StatusRequests | None = None) -> None:
        """
        Args:
            statuses: requests them for all environments of a process; None: this one asks for its own.
        """
        self._http = http
        self._statuses = statuses
        self._peer = Peer("rollout API")
        self.posts_since: float | None = None
        """Unix time at which the post began that is not answered yet."""
        self.registers_since: float | None = None
        """The same for a registration, which waits for a trainer."""
        self._name = secrets.token_hex(8)
        self._num_posts = 0

    async def limits(self) -> BatchLimits:
        """The trainer's batch size and longest sequence."""
        return read(BatchLimits, await self._ask("GET", "/info"))

    async def limits_at_status(self) -> BatchLimits:
        """The limits at the last status, with which they come where it is requested for many environments."""
        known = self._statuses and self._statuses.limits
        return known or await self.limits()

    async def wandb_info(self) -> WandbInfo:
        """The trainer's project and group at Weights & Biases."""
        return read(WandbInfo, await self._ask("GET", "/wandb_info"))

    async def register(self, request: RegisterEnvironmentRequest) -> RegisterEnvironmentResponse:
        """Register once the trainer has asked for its first batch."""
        is_logged = False
        self.registers_since = time.time()
        while True:
            answer = read(RegisterEnvironmentResponse, await self._ask("POST", "/register-env", json=request))
            if answer.status == "success" and answer.env_id is not None:
                self.registers_since = None
                return answer
            if not is_logged:
                log.info("waiting for the trainer (%s: %s)", self._http.base_url, answer.status)
                is_logged = True
            await asyncio.sleep(_REGISTER_EVERY_S)

    async def status(self, request: StatusRequest) -> EnvironmentStatus:
        """Step, queue and evaluation; the API may hold its answer for `wait_s` while there is no news.

        It counts the time for which it holds the answer as time in which the environment has nothing to do.

        Raises:
            UnknownEnvironment: register again.
        """
        if self._statuses is not None:
            return await self._statuses.ask(request)
        return await request_status(self._http, self._peer, request)

    async def post(self, groups: Sequence[ScoredGroup]) -> None:
        """Post one or several groups, compressed if that makes them smaller; one call at a time.

        If the API stops after it stored them and before it answers, the post is repeated; its header identifies it.
        """
        self._num_posts += 1
        bodies = [group.model_dump_json(exclude_none=True).encode() for group in groups]
        path, body = ("/scored_data", bodies[0]) if len(bodies) == 1 else ("/scored_data_list", _array(bodies))
        headers = {"Content-Type": "application/json", POST_HEADER: f"{self._name}:{self._num_posts}"}
        if len(body) >= _COMPRESS_FROM_BYTES:
            packed = gzip.compress(body, 1, mtime=0)
            if len(packed) < len(body):
                body, headers = packed, {**headers, "Content-Encoding": "gzip"}

        async def send() -> httpx.Response:
            return await self._http.post(path, content=body, headers=headers, timeout=ANSWER_S)

        self.posts_since = time.time()
        try:
            await request_until_answered(send, self._peer)
        finally:
            self.posts_since = None

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
        except (httpx.TransportError, PeerError) as error:
            log.info("rollout API not reachable for /disconnect-env: %s", error or type(error).__name__)

    async def _ask(self, method: str, path: str, json: BaseModel | None = None) -> httpx.Response:
        content = json.model_dump_json().encode() if json else None
        headers = {"Content-Type": "application/json"} if content else None
        return await request_until_answered(
            lambda: self._http.request(method, path, content=content, headers=headers, timeout=ANSWER_S), self._peer
        )


def _array(bodies: Sequence[bytes]) -> bytes:
    return b"[" + b",".join(bodies) + b"]"
