"""Whether requests queue at the inference servers, by vLLM's metrics: more at a time would not be sampled sooner then.

A server without these metrics (the torch engine, or another one) may be full or not.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import httpx

from grpo_engine.errors import GrpoError
from grpo_engine.wire.rollouts import SamplingLimit

_QUEUED = re.compile(r"^vllm:num_requests_waiting(?:\{[^}\n]*\})?[ \t]+(?P<count>[0-9.e+]{1,30})", re.MULTILINE)
_ASK_EVERY_S = 2.0
_LIMIT_S = 5.0
_NUM_IN_A_ROW = 2
"""Answers by which requests queue: those that have just arrived wait for a decode step to end."""


def num_queued(metrics: str) -> float | None:
    """Requests that wait for a place in the batch or the KV cache, over all engines; None: the text does not say.

    >>> num_queued('vllm:num_requests_waiting{engine="0"} 3.0')
    3.0
    """
    try:
        counts = [float(found["count"]) for found in _QUEUED.finditer(metrics)]
    except ValueError:
        return None
    return sum(counts) if counts else None


class ServerQueues:
    """Asks all servers again and again; `limit` says what they answered last."""

    def __init__(self, https: Sequence[httpx.AsyncClient]) -> None:
        self._https = https
        self._num_in_a_row = [0] * len(https)
        self._without_metrics: set[int] = set()

    def limit(self) -> SamplingLimit | None:
        """`SERVERS` where requests queue at every server, and did at the answer before; None where one has room."""
        num_in_a_row = [count for place, count in enumerate(self._num_in_a_row) if place not in self._without_metrics]
        if any(count < _NUM_IN_A_ROW for count in num_in_a_row):
            return None
        return SamplingLimit.UNKNOWN if self._without_metrics or not num_in_a_row else SamplingLimit.SERVERS

    async def watch(self) -> None:
        """Ask until it is cancelled, or no server has the metrics."""
        while len(self._without_metrics) < len(self._https):
            await self.ask()
            await asyncio.sleep(_ASK_EVERY_S)

    async def ask(self) -> None:
        """Ask every server once."""
        await asyncio.gather(*(self._ask(place) for place in range(len(self._https))))

    async def _ask(self, place: int) -> None:
        if place in self._without_metrics:
            return
        try:
            answer = await self._https[place].get("/metrics", timeout=_LIMIT_S)
        except httpx.TransportError:  # the environment's other requests say what is wrong
            self._num_in_a_row[place] = 0
            return
        except (httpx.HTTPError, GrpoError):  # e.g. an answer without an end: no metrics of vLLM's
            self._without_metrics.add(place)
            self._num_in_a_row[place] = 0
            return
        count = num_queued(answer.text) if answer.status_code == httpx.codes.OK else None
        if count is None and answer.status_code < httpx.codes.INTERNAL_SERVER_ERROR:
            self._without_metrics.add(place)
        self._num_in_a_row[place] = self._num_in_a_row[place] + 1 if count else 0
