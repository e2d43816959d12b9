"""Requests for the statuses of environments: of one, or of all in a process together.

With one for each of a thousand environments, the rollout API and their processes spent most of their CPU on HTTP. So
those of a process that ask meanwhile are in one request. Where they have nothing to do, the API holds it until there is
news for one of them; for the others it is sent again, and their environments go on waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
from pydantic import BaseModel

from grpo_engine.environments.peers import NoStatusList, Peer, UnknownEnvironment, read, request_until_answered
from grpo_engine.errors import PeerError
from grpo_engine.wire.codec import Message
from grpo_engine.wire.rollouts import (
    MAX_REPORTS,
    EnvironmentStatus,
    StatusList,
    StatusListRequest,
    StatusRequest,
    Whole,
)

ANSWER_S = 60.0
"""Longer than the API holds a post while its queue is full."""
_INTERVAL_S = 0.02
"""Least time between two requests, in which more environments join the next one."""


class BatchLimits(Message):
    """Answer of `GET /info`; -1 before a trainer registered."""

    batch_size: Whole
    max_token_len: Whole


async def request_status(http: httpx.AsyncClient, peer: Peer, request: StatusRequest) -> EnvironmentStatus:
    """The status of one environment, as stock APIs answer it.

    Raises:
        UnknownEnvironment: register again.
    """
    return read(EnvironmentStatus, await _answer(http, peer, "GET", "/status-env", request))


class StatusRequests:
    """The requests of all environments of a process."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._peer = Peer("rollout API")
        self._prompt: asyncio.Queue[_Asked] = asyncio.Queue()
        """Those that are answered at once, one request at a time."""
        self._held: asyncio.Queue[_Asked] = asyncio.Queue()
        """Those that wait for news: an environment that begins to wait is in another request than those before it."""
        self._has_list = True
        """Whether the API answers for many environments at once; a stock one does not."""
        self.limits: BatchLimits | None = None
        """The trainer's, as they came with the last statuses."""

    async def ask(self, request: StatusRequest) -> EnvironmentStatus:
        """The status of an environment: of one that waits, when there is news, or after the time that the API holds it.

        Raises:
            UnknownEnvironment: register again.
        """
        asked = _Asked(request=request, status=asyncio.get_running_loop().create_future())
        queue = self._held if request.wait_s > 0 else self._prompt
        queue.put_nowait(asked)
        return await asked.status

    async def run(self) -> None:
        """Send requests until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send_held(tasks))
            while True:
                await self._send(await _next_of(self._prompt))
                await asyncio.sleep(_INTERVAL_S)

    async def _send_held(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            tasks.create_task(self._send(await _next_of(self._held)))
            await asyncio.sleep(_INTERVAL_S)

    async def _send(self, asked: Sequence[_Asked]) -> None:
        try:
            if self._has_list:
                return self._answered(asked, await self._list(asked))
        except NoStatusList:
            self._has_list = False
        except PeerError as error:
            for each in asked:
                each.fail(error)
            return
        await asyncio.gather(*map(self._send_alone, asked))

    async def _send_alone(self, asked: _Asked) -> None:
        try:
            asked.answer(await request_status(self._http, self._peer, asked.request))
        except PeerError as error:
            asked.fail(error)

    async def _list(self, asked: Sequence[_Asked]) -> StatusList:
        request = StatusListRequest(
            environments=[each.request for each in asked], wait_s=max(each.request.wait_s for each in asked)
        )
        answer = read(StatusList, await _answer(self._http, self._peer, "POST", "/status-env-list", request))
        if len(answer.environments) != len(asked):
            raise PeerError(f"rollout API: {len(answer.environments)} statuses for {len(asked)} environments")
        return answer

    def _answered(self, asked: Sequence[_Asked], answer: StatusList) -> None:
        self.limits = BatchLimits(batch_size=answer.batch_size, max_token_len=answer.max_token_len)
        statuses = answer.environments
        has_news = [s is None or each.request.is_news(s) for each, s in zip(asked, statuses, strict=True)]
        for each, status, is_news in zip(asked, statuses, has_news, strict=True):
            if status is None:
                each.fail(UnknownEnvironment(f"environment {each.request.env_id} is not registered"))
            elif each.request.wait_s > 0 and not is_news and any(has_news):
                self._held.put_nowait(each)
            else:
                each.answer(status)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Asked:
    """A request of an environment that waits for its status."""

    request: StatusRequest
    status: asyncio.Future[EnvironmentStatus]

    def answer(self, status: EnvironmentStatus) -> None:
        if not self.status.done():  # the environment may have been cancelled
            self.status.set_result(status)

    def fail(self, error: PeerError) -> None:
        if not self.status.done():
            self.status.set_exception(error)


async def _next_of(queue: asyncio.Queue[_Asked]) -> list[_Asked]:
    """All that ask now, or else the next one; none that were cancelled."""
    asked: list[_Asked] = []
    while not asked or (len(asked) < MAX_REPORTS and not queue.empty()):
        each = await queue.get()
        asked += [] if each.status.done() else [each]
    return asked


async def _answer(http: httpx.AsyncClient, peer: Peer, method: str, path: str, body: BaseModel) -> httpx.Response:
    content, headers = body.model_dump_json(exclude_none=True).encode(), {"Content-Type": "application/json"}

    async def ask() -> httpx.Response:
        return await http.request(method, path, content=content, headers=headers, timeout=ANSWER_S)

    return await request_until_answered(ask, peer)
