"""Inference servers for `gpu.py`: start, throughput, end, and memory left on the GPU.

Every process of a server carries its mark in the environment (`grpo_tui.supervisor.keeper.proc`), so that none is lost
whatever it does; nothing is ended by name.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollouts import HOST, Connection, free_port, request

from grpo_engine.wire.environment_variables import RUN_VARIABLE
from grpo_tui.supervisor.keeper import proc
from grpo_tui.supervisor.usage.gpus import GpuReader

HAS_ITS_MEMORY = r"KV cache size|Available KV cache memory"
"""A log line of vLLM after which its memory is stable: the next server may measure what is free."""
POLL_S = 0.02
SETTLED_S, SETTLED_MB = 1.0, 64.0
GONE_WITHIN_S, GONE_WITHIN_S_OF_KILL = 10.0, 4.0
ANSWERS_WITHIN_S = 120.0
SHARED_MEMORY = Path("/dev/shm")
_MARKS = iter(range(10**6))


class Failed(Exception):
    """A server did not become healthy, or an answer was wrong."""


class Gpu:
    """Memory of the first GPU from NVML; None without a GPU."""

    def __init__(self) -> None:
        self._reader = GpuReader()

    def used_mb(self) -> float | None:
        """Memory used by all processes."""
        gpus = asyncio.run(self._reader.memory(limit_s=20))
        return gpus[0].used_bytes / 1e6 if gpus else None


@dataclass(frozen=True, kw_only=True)
class Route:
    """A route that samples tokens."""

    path: str
    body: Callable[[list[int], int], dict[str, Any]]
    """Prompt and number of new tokens → request body."""
    count: Callable[[dict[str, Any]], int]
    """Generated tokens of an answer."""


def completions(model: str, **more: Any) -> Route:
    """The OpenAI route of a server."""
    return Route(
        path="/v1/completions",
        body=lambda prompt, num_new: (
            {"model": model, "prompt": prompt, "max_tokens": num_new, "ignore_eos": True, "temperature": 1.0} | more
        ),
        count=lambda answer: int(answer["usage"]["completion_tokens"]),
    )


GENERATE = Route(
    path="/generate",
    body=lambda prompt, num_new: {
        "prompt": {"prompt_token_ids": prompt},
        "max_tokens": num_new,
        "ignore_eos": True,
        "temperature": 1.0,
        "logprobs": 0,
    },
    count=lambda answer: sum(map(len, answer["token_ids"])),
)
"""The request of our environments: with the log-probability of every sampled token."""


@dataclass(kw_only=True)
class Server:
    """A server, running or ended."""

    name: str
    port: int
    mark: str
    log: Path
    process: subprocess.Popen[bytes]
    began: float
    loaded_s: float = field(default=0.0)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def told(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-3000:]

    def wait(self, *, within_s: float, line: str | None = None) -> None:
        """Return once it is healthy, or its log has a line.

        Raises:
            Failed: it ended, or took longer.
        """
        while True:
            if self.process.poll() is not None:
                raise Failed(f"{self.name} ended with {self.process.returncode}:\n{self.told()}")
            if line is not None and re.search(line, self.log.read_text(errors="replace")):
                return
            if self._is_healthy():
                self.loaded_s = self.loaded_s or time.monotonic() - self.began
                return
            if time.monotonic() - self.began > within_s:
                raise Failed(f"{self.name} is not up after {within_s:.0f} s:\n{self.told()}")
            time.sleep(0.1)

    def _is_healthy(self) -> bool:
        try:
            return asyncio.run(self._ask("GET", "/health", None))[0] == 200
        except (OSError, asyncio.IncompleteReadError):
            return False

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[Any, float]:
        """The answer to a request that must succeed, and its milliseconds."""
        began = time.perf_counter()
        status, answer = asyncio.run(self._ask(method, path, body))
        took_ms = 1e3 * (time.perf_counter() - began)
        if status != 200:
            raise Failed(f"{self.name}: {method} {path}: {status} {answer[:300]!r}")
        try:
            return json.loads(answer), took_ms
        except ValueError:  # a stock route answers with plain text
            return answer.decode(), took_ms

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection(HOST, self.port, limit=2**26)
        try:
            return await Connection(reader, writer).ask(
                request(method, path, b"" if body is None else json.dumps(body).encode())
            )
        finally:
            writer.close()

    def tokens_per_s(self, route: Route, prompts: list[list[int]], num_new: int) -> float:
        """Generated tokens per second of concurrent requests, from the first byte sent to the last received."""
        return asyncio.run(self._tokens_per_s(route, prompts, num_new))

    async def _tokens_per_s(self, route: Route, prompts: list[list[int]], num_new: int) -> float:
        posts = [request("POST", route.path, json.dumps(route.body(prompt, num_new)).encode()) for prompt in prompts]
        # vLLM's workers on a CPU take up to a second to wake up: one token is sampled before, and not counted.
        status, answer = await self._ask("POST", route.path, route.body(prompts[0][1:], 1))
        if status != 200:
            raise Failed(f"{self.name}: POST {route.path}: {status} {answer[:300]!r}")
        pairs = [await asyncio.open_connection(HOST, self.port, limit=2**26) for _ in posts]
        try:
            began = time.perf_counter()
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                answers = await asyncio.gather(
                    *(Connection(*pair).ask(post) for pair, post in zip(pairs, posts, strict=True))
                )
            seconds = time.perf_counter() - began
        finally:
            for _, writer in pairs:
                writer.close()
        for status, answer in answers:
            if status != 200:
                raise Failed(f"{self.name}: POST {route.path}: {status} {answer[:300]!r}")
        num_tokens = sum(route.count(json.loads(answer)) for _, answer in answers)
        if num_tokens != num_new * len(prompts):
            raise Failed(f"{self.name}: {num_tokens} tokens came, {num_new * len(prompts)} were asked for")
        return num_tokens / seconds

    def processes(self) -> list[proc.Stat]:
        """Its live processes."""
        return proc.processes_of_run(self.mark)

    def end(self, number: signal.Signals, gpu: Gpu) -> dict[str, Any]:
        """Signal its first process, then measure when the others exit and the memory is free.

        Whoever is left after some seconds is ended, and counted.
        """
        before_mb = gpu.used_mb()
        self.process.send_signal(number)
        began = settled = time.monotonic()
        within_s = GONE_WITHIN_S_OF_KILL if number is signal.SIGKILL else GONE_WITHIN_S
        gone_s: float | None = None
        used_mb = before_mb
        while True:
            now_mb, now = gpu.used_mb(), time.monotonic()
            self.process.poll()
            if gone_s is None and not self.processes():
                gone_s = now - began
            if now_mb is not None and used_mb is not None and abs(now_mb - used_mb) > SETTLED_MB:
                used_mb, settled = now_mb, now
            is_over = gone_s is not None and now - settled > SETTLED_S
            if is_over or now - began > within_s:
                break
            time.sleep(POLL_S)
        left = self.processes()
        self.kill()
        return {
            "processes_gone_s": None if gone_s is None else round(gone_s, 3),
            "memory_free_s": None if before_mb is None or left else round(settled - began, 3),
            "freed_mb": None if before_mb is None or used_mb is None else round(before_mb - used_mb),
            "still_used_mb": None if used_mb is None else round(used_mb),
            "processes_left": [stat.comm for stat in left],
        }

    def kill(self) -> None:
        """Kill its remaining processes."""
        until = time.monotonic() + GONE_WITHIN_S
        while (left := self.processes()) and time.monotonic() < until:
            for process in left:
                proc.send_signal(process, signal.SIGKILL)
            time.sleep(POLL_S)
        self.process.wait(GONE_WITHIN_S)
        for kept in SHARED_MEMORY.glob(f"*{self.mark}*"):  # a marked server leaves its weights for the next of its run
            kept.unlink(missing_ok=True)


@dataclass(kw_only=True)
class Fleet:
    """Servers and helpers of a stage; a context that ends all of them."""

    folder: Path
    """For logs and bridge files."""
    environment: dict[str, str]
    within_s: float
    """Limit for the start of a server."""
    _ends: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def marked(self, name: str) -> tuple[str, dict[str, str]]:
        """A marker for the processes of one server or helper, and the environment that holds it."""
        mark = f"bench-{os.getpid()}-{next(_MARKS)}-{name}"
        return mark, {**self.environment, RUN_VARIABLE: mark}

    def start(self, name: str, argv: list[str], **environment: str) -> Server:
        """Start a server; it may not be healthy yet."""
        port, log = free_port(), self.folder / f"{name}.log"
        mark, marked = self.marked(name)
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", *argv, "--port", str(port)],
                cwd=self.folder,
                env=marked | environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        server = Server(name=name, port=port, mark=mark, log=log, process=process, began=time.monotonic())
        self._ends.callback(server.kill)
        return server

    def ended_with_me(self, end: Callable[[], None]) -> None:
        """Register a function that ends something else."""
        self._ends.callback(end)


def random_prompts(count: int, num_tokens: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Random prompts that no prefix cache contains."""
    rng = random.Random(seed)
    return [[rng.randrange(vocabulary // 20, vocabulary) for _ in range(num_tokens)] for _ in range(count)]
