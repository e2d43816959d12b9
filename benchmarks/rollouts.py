"""Our rollout API beside the stock one of Atropos 0.4.0, in the same run and under the same requests.

    .venv/bin/python benchmarks/rollouts.py [--stock FOLDER/bin/run-api] [--only CASE] [--json]

CASES: through: groups of 4 × 2,048 tokens, gzipped as stock environments do it, posted over eight connections while a
trainer fetches batches of 64 sequences: groups a second from the first post to the last batch; ours has every group on
the disk (fsync) before it is acknowledged. waiting: 64 environments ask `/status-env` eight times a second each while
10,000 groups wait, and then one `/batch` is fetched. shares: the same with a guaranteed share for each. memory: ours
alone, resident memory over 100,000 groups that are posted and fetched.

Targets: at least three times the stock server's groups a second, `/status-env` within 10 ms in 99 of 100, memory flat.
About five minutes on two cores, most of them the stock server's; the machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

HOST = "127.0.0.1"
POSTERS = 8
NUM_SEQUENCES, NUM_TOKENS, NUM_PROMPT = 4, 2048, 256
NUM_GROUPS = 480
BATCH_SIZE = 64
WAITING = 10_000
ENVIRONMENTS = 64
POLL_S, POLLS = 1 / 8, 80
MEMORY_GROUPS, MEMORY_MARKS = 100_000, 10
REPEATS = 3
TARGETS = {
    ("through", "groups_per_s"): "target: 3 × or more",
    ("waiting", "status_p99_ms"): "target: 10 or less",
    ("shares", "status_p99_ms"): "target: 10 or less",
    ("memory", "growth_mb"): "target: flat",
}


@dataclass(frozen=True)
class Server:
    """A running rollout API."""

    name: str
    port: int
    process: psutil.Process

    def rss_mb(self) -> float:
        """Resident memory of the process."""
        return self.process.memory_info().rss / 1e6

    def cpu_s(self) -> float:
        """CPU seconds that it has used."""
        times = self.process.cpu_times()
        return times.user + times.system


class Connection:
    """One keep-alive HTTP connection with little overhead, so that the server dominates the measurement."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of the answer to a prepared request."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
        )
        return int(head.split(b" ", 2)[1]), await self._reader.readexactly(length)

    async def ask_json(self, method: str, path: str, body: object = None) -> Any:
        """The answer to a request that must succeed."""
        status, answer = await self.ask(request(method, path, b"" if body is None else json.dumps(body).encode()))
        if status != 200:
            raise RuntimeError(f"{method} {path}: {status} {answer[:200]!r}")
        return json.loads(answer)


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[Connection]:
    """A connection for the duration of a block."""
    reader, writer = await asyncio.open_connection(HOST, server.port, limit=2**26)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()


def request(method: str, path: str, body: bytes = b"", *, packed: bool = False) -> bytes:
    """A request as stock clients send it; without compression of the answer."""
    encoding = "Content-Encoding: gzip\r\n" if packed else ""
    head = f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n{encoding}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def post(num_sequences: int, num_tokens: int, num_prompt: int, seed: int, env_id: int | None) -> bytes:
    """A whole request that posts one group."""
    rng = random.Random(seed)
    rows = [[rng.randrange(128_000) for _ in range(num_tokens)] for _ in range(num_sequences)]
    num_sampled = num_tokens - num_prompt
    group = {
        "tokens": rows,
        "masks": [[-100] * num_prompt + row[num_prompt:] for row in rows],
        "scores": [rng.random() for _ in rows],
        "inference_logprobs": [[1.0] * num_prompt + [-rng.expovariate(1) for _ in range(num_sampled)] for _ in rows],
        "advantages": [], "ref_logprobs": [], "messages": [], "overrides": [], "images": [], "group_overrides": {},
        "generation_params": {"temperature": 1.0}, "env_id": env_id,
    }  # fmt: skip
    body = json.dumps(group).encode()
    packed = gzip.compress(body) if len(body) >= 1024 else body
    return request("POST", "/scored_data", packed, packed=packed is not body)


async def register(trainer: Connection, batch_size: int) -> None:
    """Register as a trainer and start the run."""
    run = {"wandb_group": "", "wandb_project": "", "batch_size": batch_size, "max_token_len": 4096}
    run |= {"checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 10**6}
    await trainer.ask_json("POST", "/register", run)
    await trainer.ask_json("GET", "/batch")


async def post_all(server: Server, posts: Iterator[bytes]) -> None:
    """Post them over several connections."""

    async def work() -> None:
        async with connected(server) as connection:
            for each in posts:
                status, answer = await connection.ask(each)
                if status != 200:
                    raise RuntimeError(f"{server.name}: {status} {answer[:200]!r}")

    await asyncio.gather(*(work() for _ in range(POSTERS)))


async def fetch(trainer: Connection, num_batches: int) -> None:
    """Fetch batches until enough arrived."""
    question = request("GET", "/batch")
    while num_batches:
        _, answer = await trainer.ask(question)
        if answer.startswith(b'{"batch":null'):
            await asyncio.sleep(0.01)
        else:
            num_batches -= 1


async def through(server: Server) -> dict[str, float]:
    """Large groups, posted and fetched at the same time."""
    posts = [post(NUM_SEQUENCES, NUM_TOKENS, NUM_PROMPT, seed, None) for seed in range(16)]
    async with connected(server) as trainer:
        await register(trainer, BATCH_SIZE)
        began, cpu = time.perf_counter(), server.cpu_s()
        await asyncio.gather(
            post_all(server, (posts[number % len(posts)] for number in range(NUM_GROUPS))),
            fetch(trainer, NUM_GROUPS * NUM_SEQUENCES // BATCH_SIZE),
        )
        seconds = time.perf_counter() - began
    return {"groups_per_s": NUM_GROUPS / seconds, "cpu_ms_a_group": 1e3 * (server.cpu_s() - cpu) / NUM_GROUPS}


async def waiting(server: Server, *, with_shares: bool) -> dict[str, float]:
    """Many environments poll while many groups are queued; then one batch."""
    async with connected(server) as trainer:
        await register(trainer, ENVIRONMENTS * 4)
        for number in range(ENVIRONMENTS):
            environment = {"max_token_length": 4096, "desired_name": f"e{number}", "weight": 1.0, "group_size": 4}
            environment |= {"min_batch_allocation": 1 / ENVIRONMENTS} if with_shares else {}
            await trainer.ask_json("POST", "/register-env", environment)
        posts = [post(4, 24, 8, seed, seed) for seed in range(ENVIRONMENTS)]
        await post_all(server, (posts[number % ENVIRONMENTS] for number in range(WAITING)))
        took: list[float] = []

        async def poll(env_id: int) -> None:
            question = request("GET", "/status-env", json.dumps({"env_id": env_id}).encode())
            async with connected(server) as connection:
                await asyncio.sleep(POLL_S * env_id / ENVIRONMENTS)
                due = time.perf_counter()
                for _ in range(POLLS):
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                    began = time.perf_counter()
                    await connection.ask(question)
                    took.append(1e3 * (time.perf_counter() - began))
                    due = max(due + POLL_S, began)

        await asyncio.gather(*(poll(number) for number in range(ENVIRONMENTS)))
    async with connected(server) as trainer:  # new connection: servers close idle ones after some seconds
        began = time.perf_counter()
        await fetch(trainer, 1)
        batch_s = time.perf_counter() - began
    took.sort()
    return {
        "status_p50_ms": statistics.median(took),
        "status_p99_ms": took[int(0.99 * len(took))],
        "batch_ms": 1e3 * batch_s,
    }


async def memory(server: Server) -> dict[str, float]:
    """Resident memory while groups are queued and delivered."""
    posts = [post(4, 24, 8, seed, None) for seed in range(16)]
    marks: list[float] = []
    async with connected(server) as trainer:
        await register(trainer, BATCH_SIZE)
        step = MEMORY_GROUPS // MEMORY_MARKS
        for _ in range(MEMORY_MARKS):
            await asyncio.gather(
                post_all(server, (posts[number % len(posts)] for number in range(step))),
                fetch(trainer, step * 4 // BATCH_SIZE),
            )
            marks.append(server.rss_mb())
    return {"rss_first_tenth_mb": marks[0], "rss_last_mb": marks[-1], "growth_mb": marks[-1] - marks[0]}


@contextmanager
def running(name: str, argv: list[str], port: int, folder: Path) -> Iterator[Server]:
    """A server for the duration of a block, in a separate folder."""
    with open(folder / f"{name}.log", "w") as log:
        process = subprocess.Popen(argv, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    try:
        server = Server(name, port, psutil.Process(process.pid))
        asyncio.run(_is_up(server, process))
        yield server
    finally:
        process.terminate()
        process.wait(20)


async def _is_up(server: Server, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            async with connected(server) as connection:
                await connection.ask_json("GET", "/info")
                return
        except OSError:
            await asyncio.sleep(0.05)
    raise SystemExit(f"{server.name} ended: {process.returncode}")


CASES: dict[str, Callable[[Server], Coroutine[Any, Any, dict[str, float]]]] = {
    "through": through,
    "waiting": partial(waiting, with_shares=False),
    "shares": partial(waiting, with_shares=True),
    "memory": memory,
}


def measured(case: str, name: str, argv: list[str], port: int) -> dict[str, float]:
    """One case with one server."""
    with tempfile.TemporaryDirectory() as folder, running(name, argv, port, Path(folder)) as server:
        return asyncio.run(CASES[case](server))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", type=Path, default=Path(sys.prefix) / "atropos" / "bin" / "run-api")
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--json", action="store_true", help="print one object instead of the table")
    options = parser.parse_args()
    if not options.stock.exists():
        parser.error(f"{options.stock}: no such file: `make test` installs it there, or name one with --stock")
    figures: dict[str, dict[str, list[dict[str, float]]]] = {}
    for case in [options.only] if options.only else list(CASES):
        ours = [sys.executable, "-m", "grpo_engine", "api"]
        stock = [str(options.stock), "--host", HOST]
        for name, argv in {"ours": ours, **({} if case == "memory" else {"stock": stock})}.items():
            for _ in range(REPEATS if case == "through" else 1):
                port = free_port()
                figures.setdefault(case, {}).setdefault(name, []).append(
                    measured(case, name, [*argv, "--port", str(port)], port)
                )
    if options.json:
        print(json.dumps(figures, indent=1))
        return
    for case, by_server in figures.items():
        print(case)
        for figure in by_server["ours"][0]:
            values = {name: statistics.median(run[figure] for run in runs) for name, runs in by_server.items()}
            shown = "  ".join(f"{name} {value:10.2f}" for name, value in values.items())
            ratio = f"  {values['ours'] / values['stock']:8.4f} ×" if values.get("stock") else ""
            target = TARGETS.get((case, figure), "")
            print(f"  {figure:<20} {shown}{ratio}  {target}")


def free_port() -> int:
    """A free port."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
