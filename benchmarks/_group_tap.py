"""A relay between environments and the rollout API that notes which groups the API has accepted.

It passes bytes on as they are and closes both sides together, so that a killed API or environment breaks the same
connections as without it. Requests on a connection come one after the other, as those of our environments do.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from grpo_engine.wire.metrics import RolloutLine
from grpo_engine.wire.rollouts import MASKED_LABEL, POST_HEADER

Fingerprint = tuple[Any, ...]
"""Tokens, log-probs and policy versions of a group: no two groups of a run have the same."""
LIMIT_BYTES = 1 << 26


def posted_fingerprint(group: Mapping[str, Any]) -> Fingerprint:
    """Of a group as an environment posts it."""
    rows = []
    for tokens, masks, logprobs, versions in zip(
        group["tokens"], group["masks"], group["inference_logprobs"], group["policy_versions"], strict=True
    ):
        trained = [place for place, label in enumerate(masks) if label != MASKED_LABEL]
        in_float32 = torch.tensor([logprobs[place] for place in trained], dtype=torch.float32).tolist()
        rows.append(
            (
                tuple(tokens[place] for place in trained),
                tuple(round(value, 6) for value in in_float32),
                tuple(versions[place] for place in trained),
            )
        )
    return tuple(sorted(rows))


def trained_fingerprint(line: RolloutLine) -> Fingerprint:
    """Of a group as the trainer records it."""
    rows = (
        (tuple(each.token_ids), tuple(each.inference_logprobs), tuple(each.policy_versions))
        for each in line.completions
    )
    return tuple(sorted(rows))


class GroupTap:
    """Listens on a port of loopback in a thread, as a context manager."""

    def __init__(self, port: int, api_port: int) -> None:
        self._port, self._api_port = port, api_port
        self._loop = asyncio.new_event_loop()
        self._posts: dict[str, list[Fingerprint]] = {}
        self._accepted: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="group tap", daemon=True)
        self._is_listening = threading.Event()

    def __enter__(self) -> GroupTap:
        self._thread.start()
        assert self._is_listening.wait(10), f"port {self._port} cannot be listened on"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    @property
    def accepted(self) -> Counter[Fingerprint]:
        """Groups of posts that were answered with 200, each post once."""
        return Counter(group for post in list(self._accepted) for group in self._posts[post])

    @property
    def sent(self) -> list[Fingerprint]:
        """All groups, in the order in which they were sent first."""
        return [group for groups in list(self._posts.values()) for group in groups]

    @property
    def unanswered(self) -> Counter[Fingerprint]:
        """Groups of posts without such an answer: the API may have them or not."""
        return Counter(
            group for post, groups in list(self._posts.items()) if post not in self._accepted for group in groups
        )

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        serving = asyncio.start_server(self._relay, "127.0.0.1", self._port, limit=LIMIT_BYTES)
        server = self._loop.run_until_complete(serving)
        self._is_listening.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: requests one after the other, and what the API answers."""
        writers = [writer]
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            try:
                of_api, to_api = await asyncio.open_connection("127.0.0.1", self._api_port, limit=LIMIT_BYTES)
                writers.append(to_api)
                current = _Exchange()
                done, others = await asyncio.wait(
                    {
                        asyncio.create_task(self._requests(reader, to_api, current)),
                        asyncio.create_task(self._answers(of_api, writer, current)),
                    },
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in others:
                    task.cancel()
                await asyncio.gather(*done, *others, return_exceptions=True)
            finally:
                for each in writers:
                    each.close()

    async def _requests(self, reader: asyncio.StreamReader, to_api: asyncio.StreamWriter, current: _Exchange) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            headers = _headers(head)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            current.post = None
            if head.startswith(b"POST /scored_data"):
                content = gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body
                groups = json.loads(content)
                current.post = headers[POST_HEADER.lower()]
                self._posts[current.post] = [
                    posted_fingerprint(each) for each in (groups if isinstance(groups, list) else [groups])
                ]
            to_api.write(head + body)
            await to_api.drain()

    async def _answers(self, of_api: asyncio.StreamReader, writer: asyncio.StreamWriter, current: _Exchange) -> None:
        while data := await of_api.read(1 << 16):
            if current.post is not None and data.startswith(b"HTTP/1.1 200 "):
                self._accepted.add(current.post)
            writer.write(data)
            await writer.drain()


class _Exchange:
    """The request of a connection that is being answered."""

    post: str | None = None


def _headers(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    return {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
