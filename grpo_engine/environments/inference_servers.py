"""Client of one or several inference servers that serve the same policy.

A request goes to the server with the fewest open tokens. A server that does not answer is left out: its request goes to
another one at once, and the server takes part again when its `/health` answers. While none answers, requests are
repeated with pauses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import httpx

from grpo_engine.environments.ahead import least_loaded
from grpo_engine.environments.peers import Attempts, Peer, read, repeated, request_until_answered
from grpo_engine.environments.sampling.groups import ABORTED, Completions, check_completions, finished, joined
from grpo_engine.environments.server_queues import ServerQueues
from grpo_engine.errors import PeerError, PeerUnavailable
from grpo_engine.wire.bounded_answers import MAX_ANSWER_MARKS, allowing
from grpo_engine.wire.inference import GenerateRequest, TokenPrompt

_SAMPLED_TOKEN_BYTES = 128
"""Generous: with id, log-prob, policy version and text a sampled token has about 50 bytes in JSON."""
_SAMPLED_TOKEN_MARKS = 24
"""Likewise: four around its log-prob, and the quotes of its text."""
_HEALTH_TIMEOUT_S = 5.0
_REFUSED_PAUSE_S = 2.0
"""Before a server is asked again that has refused `/health`."""


class Session:
    """The server that the turns of one conversation go to: its prefix cache has the tokens of the earlier ones."""

    def __init__(self) -> None:
        self.server: InferenceServer | None = None


class InferenceServer:
    """One server, and what this environment has open there."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.url = str(http.base_url).rstrip("/")
        self.peer = Peer(f"inference server {self.url}")
        self.is_up = True
        """Whether its last request or health check was answered, or there was none."""
        self.num_open = 0
        """Requests that are not answered yet."""
        self.num_open_tokens = 0
        """Tokens of their prompts and of their longest completions."""
        self.num_answered = 0
        self.num_tokens = 0
        """Tokens that were sent there, counted as open ones."""
        self.watch: asyncio.Task[None] | None = None
        """The task that waits for its `/health` while it is not up."""


class InferenceServers:
    """All servers of the policy; a context manager, which ends the health checks."""

    def __init__(self, https: Sequence[httpx.AsyncClient], *, timeout_s: float, first: int = 0) -> None:
        """Make the client.

        Args:
            https: an HTTP client for each server.
            first: the place of the server that is asked first. Each environment balances what it sends itself, so many
                that begin with the same server would all be at the same one at a time.
            timeout_s: longest time to an answer of `/generate`.
        """
        self._servers = [InferenceServer(http) for http in https]
        self.queues = ServerQueues(https)
        self._first = first
        self._timeout_s = timeout_s
        self.num_open = 0
        """Requests that are not answered yet."""
        self.num_cut = 0
        """Completions that servers have cut off, and that were sampled again."""
        self.answered_at = time.time()
        """Unix time of the last answer, or of the first request after a pause."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await _cancel([server.watch for server in self._servers if server.watch is not None])

    def progress(self) -> str:
        """What went to each of several servers, and what they have cut off, for a log line."""
        of_servers = [
            f"{server.url}: {server.num_answered} requests answered, {server.num_open} open"
            + ("" if server.is_up else " (does not answer)")
            for server in (self._servers if len(self._servers) > 1 else ())
        ]
        cut = [f"{self.num_cut} completions cut off and sampled again"] if self.num_cut else []
        return ", ".join([*of_servers, *cut])

    async def wait_until_healthy(self) -> None:
        """Wait until `/health` of one server answers 200; the others take part when theirs do.

        Raises:
            PeerError: the first one that answers has no `/health`.
        """
        checks = [asyncio.create_task(_health(server)) for server in self._servers]
        try:
            answered, _ = await asyncio.wait(checks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(checks)
        for server, check in zip(self._servers, checks, strict=True):
            if check in answered:
                check.result()
            else:
                self._leave_out(server)

    async def generate(self, request: GenerateRequest, session: Session | None = None) -> Completions:
        """Sample completions; the request is repeated, at another server where there is one, until it is answered.

        Completions that a server has cut off are sampled again from the prompt.

        Raises:
            PeerError: a server refuses the request, or its answer is invalid.
        """
        sent = self._sent(request, session)
        if not self.num_open:
            self.answered_at = time.time()
        self.num_open += 1
        kept: Completions | None = None
        try:
            while True:
                answer = await repeated(partial(self._attempt, sent), sent.report)
                whole = answer if kept is None else joined(kept, answer)
                if (num_cut := whole.finish_reasons.count(ABORTED)) == 0:
                    self.answered_at = time.time()
                    return whole
                self.num_cut += num_cut
                if request.seed is None:  # else fewer copies would repeat the random numbers of those that are kept
                    kept = finished(whole)
                    sent = self._sent(request.model_copy(update={"n": num_cut}), session)
        finally:
            self.num_open -= 1

    def _sent(self, request: GenerateRequest, session: Session | None) -> _Sent:
        return _Sent(
            body=request.model_dump_json(exclude_unset=True, exclude_none=True).encode(),
            num_completions=request.n,
            num_tokens=_longest(request),
            most_bytes=request.n * request.max_tokens * _SAMPLED_TOKEN_BYTES,
            most_marks=request.n * request.max_tokens * _SAMPLED_TOKEN_MARKS,
            session=session,
            attempts={server: Attempts(server.peer) for server in self._servers},
        )

    async def _attempt(self, sent: _Sent) -> Completions:
        """The answer of the first server that answers; those that are known not to are left out.

        Raises:
            PeerUnavailable: none answers.
        """
        tried: list[InferenceServer] = []
        while True:
            server = sent.last = self._choose(sent.session, tried)
            try:
                return await self._ask(server, sent)
            except PeerUnavailable as error:
                self._leave_out(server)
                tried.append(server)
                if not any(other.is_up and other not in tried for other in self._servers):
                    raise
                sent.report(error)

    def _choose(self, session: Session | None, tried: Collection[InferenceServer]) -> InferenceServer:
        """The server of the session, or else the one with the fewest open tokens; any where none is up."""
        untried = [server for server in self._servers if server not in tried]
        candidates = [server for server in untried if server.is_up] or untried
        if session is not None and session.server in candidates:
            return session.server
        first = self._first % len(candidates)
        chosen = least_loaded([*candidates[first:], *candidates[:first]])
        if session is not None:
            session.server = chosen
        return chosen

    async def _ask(self, server: InferenceServer, sent: _Sent) -> Completions:
        headers, length = {"Content-Type": "application/json"}, sent.allowed
        server.num_open += 1
        server.num_open_tokens += sent.num_tokens
        server.num_tokens += sent.num_tokens
        try:
            answer = await sent.attempts[server].answer(
                lambda: server.http.post(
                    "/generate", content=sent.body, headers=headers, timeout=self._timeout_s, extensions=length
                )
            )
        finally:
            server.num_open -= 1
            server.num_open_tokens -= sent.num_tokens
        server.is_up = True
        server.num_answered += 1
        completions = read(Completions, answer)
        check_completions(completions, sent.num_completions, server.peer.name)
        return completions

    def _leave_out(self, server: InferenceServer) -> None:
        """Send a server nothing until it is healthy."""
        server.is_up = False
        if server.watch is None or server.watch.done():
            server.watch = asyncio.create_task(_watch(server))


@dataclass(kw_only=True)
class _Sent:
    """A request on its way."""

    body: bytes
    num_completions: int
    num_tokens: int
    """Of its prompt, and of the longest completions that it may get."""
    most_bytes: int
    """Of its answer."""
    most_marks: int
    """Of its answer: brackets, braces and quotes, beside as many as any answer may have."""
    session: Session | None
    attempts: Mapping[InferenceServer, Attempts]
    last: InferenceServer | None = None
    """The server that it was sent to last."""

    @property
    def allowed(self) -> dict[str, Any]:
        """What its answer may be, as extensions of the request."""
        return allowing(self.most_bytes, MAX_ANSWER_MARKS + self.most_marks)

    def report(self, error: Exception) -> None:
        """Log that the last attempt failed."""
        assert self.last is not None
        self.attempts[self.last].report(error)


async def _watch(server: InferenceServer) -> None:
    """Wait until a server is healthy, also while another program has its port."""
    while True:
        try:
            return await _health(server)
        except PeerError:
            await asyncio.sleep(_REFUSED_PAUSE_S)


async def _health(server: InferenceServer) -> None:
    """Wait until `/health` answers 200.

    Raises:
        PeerError: it is refused.
    """
    await request_until_answered(lambda: server.http.get("/health", timeout=_HEALTH_TIMEOUT_S), server.peer)
    server.is_up = True


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _longest(request: GenerateRequest) -> int:
    """Tokens of the prompt and of the longest completions that it may get."""
    prompt = request.prompt
    num_prompt_tokens = len(prompt.prompt_token_ids if isinstance(prompt, TokenPrompt) else prompt)
    return num_prompt_tokens + request.n * request.max_tokens
