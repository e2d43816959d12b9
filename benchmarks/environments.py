"""1,000 environments as coroutines in a few processes, against the real rollout API and over kills.

    .venv/bin/python benchmarks/environments.py [--environments 1000] [--processes 4] [--seconds 60] [--delay 8] …

The environments are those of `grpo-engine env --copies 250`, with a name and a registration each. Their inference
server is a fake, which answers after `--delay` seconds on average with random tokens, so that every group is another
one; a trainer of this script fetches batches of 128 groups as fast as they form. Measured: groups a second that reach
the trainer, the time from the start of a post to its answer, and the CPU time of each process. Then the API is killed
(SIGKILL) and started again, and so is a process of environments; at the end every group whose post was answered must
have been delivered, and none twice.

Targets on two cores, on which all of this runs: 100 groups a second, 99 of 100 posts answered within 250 ms, none lost.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

HOST = "127.0.0.1"
GROUP_SIZE, MAX_TOKENS, BATCH_GROUPS = 4, 8, 128
FIRST_TOKEN, VOCABULARY = 4, 16
"""Of the tokens that the fake server answers with."""
AFTER_KILL_S = 15.0
POSTS, ACCEPTED = "posts.txt", "accepted.txt"


@dataclass(frozen=True)
class Place:
    """Ports and folder of a run."""

    folder: Path
    api_port: int
    inference_port: int

    @property
    def api_url(self) -> str:
        return f"http://{HOST}:{self.api_port}"


def digest(tokens: Sequence[Sequence[int]]) -> str:
    """By which a group is known: no two have the same tokens."""
    return hashlib.sha256(repr([list(each) for each in tokens]).encode()).hexdigest()[:24]


# --- the fake inference server ---------------------------------------------------------------------------------------


def serve_inference(port: int, delay_s: float) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    rng = random.Random(0)

    async def health(_: Request) -> Response:
        return Response()

    async def generate(request: Request) -> Response:
        count = json.loads(await request.body()).get("n", 1)
        await asyncio.sleep(rng.uniform(0.5, 1.5) * delay_s)
        tokens = [[rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(MAX_TOKENS)] for _ in range(count)]
        answer = {
            "text": ["123456"] * count,
            "prompt": "",
            "finish_reasons": ["length"] * count,
            "logprobs": [[[{str(token): -1.0}] for token in each] for each in tokens],
            "token_ids": tokens,
            "policy_version": 0,
            "policy_versions": [[0] * MAX_TOKENS] * count,
            "logprobs_mode": "raw",
        }
        return Response(json.dumps(answer), media_type="application/json")

    app = Starlette(routes=[Route("/health", health), Route("/generate", generate, methods=["POST"])])
    uvicorn.run(app, host=HOST, port=port, log_level="warning")


# --- a process of environments ---------------------------------------------------------------------------------------


def run_environments(place: Place, number: int, copies: int) -> None:
    """`grpo-engine env --copies`, with the time and the groups of each post written to files."""
    from grpo_engine.environments.clients import RolloutApi
    from grpo_engine.environments.config import EnvironmentConfig
    from grpo_engine.environments.main import run
    from grpo_engine.wire.rollouts import ScoredGroup

    times = os.open(place.folder / POSTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    accepted = os.open(place.folder / ACCEPTED, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    post = RolloutApi.post

    async def timed_post(self: RolloutApi, groups: Sequence[ScoredGroup]) -> None:
        began = time.time()
        await post(self, groups)
        ended = time.time()
        os.write(accepted, "".join(f"{digest(group.tokens)}\n" for group in groups).encode())
        os.write(times, f"{began} {ended - began}\n".encode())

    RolloutApi.post = timed_post  # type: ignore[method-assign]
    run(
        EnvironmentConfig(
            task="sort6",  # type: ignore[arg-type]
            model_name="local/tiny",
            name=f"p{number}",
            seed=1000 * number,
            copies=copies,
            group_size=GROUP_SIZE,
            max_tokens=MAX_TOKENS,
            max_batches_offpolicy=64,
            rollout_server_url=place.api_url,
            inference_urls=(f"http://{HOST}:{place.inference_port}",),
            log_level="warning",
        )
    )


# --- the run ---------------------------------------------------------------------------------------------------------


class Run:
    """The processes of a run, and what its trainer has received."""

    def __init__(self, place: Place, options: argparse.Namespace) -> None:
        from grpo_engine.data.source import RolloutApiSource

        self.place, self.options = place, options
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.delivered: list[str] = []
        self.source = RolloutApiSource(place.api_url, reach_timeout_s=60)

    def start(self, name: str, *words: str) -> None:
        log = (self.place.folder / f"{name}.log").open("ab")
        self.processes[name] = subprocess.Popen(
            [sys.executable, *words], stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.place.folder
        )

    def start_api(self) -> None:
        words = ("-m", "grpo_engine", "api", "--port", str(self.place.api_port), "--store", "rollouts.sqlite")
        self.start("api", *words, "--allow-without-token", "--log-level", "warning")

    def start_worker(self, number: int) -> None:
        copies = self.options.environments // self.options.processes
        part = json.dumps([str(self.place.folder), self.place.api_port, self.place.inference_port, number, copies])
        self.start(f"worker-{number}", __file__, "--worker", part)

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of each process, and of this one, which is the trainer."""
        own = {"trainer": os.getpid()}
        pids = {name: process.pid for name, process in self.processes.items()} | own
        return {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items()}

    def register(self, batch_size: int, step: int) -> None:
        self.source.register(
            wandb_group="",
            wandb_project="",
            batch_size=batch_size,
            max_token_len=64,
            checkpoint_dir=str(self.place.folder / "checkpoints"),
            save_checkpoint_interval=0,
            starting_step=step,
            num_steps=10**6,
            max_staleness=self.options.max_staleness,
        )

    def fetch(self, timeout_s: float) -> int:
        """Receive one batch, if one forms within the time; how many groups it has."""
        from grpo_engine.errors import PeerUnavailable

        until = time.monotonic() + timeout_s
        try:
            groups = self.source.next_batch(
                timeout_s=timeout_s, policy_version=0, stop=lambda: time.monotonic() > until
            )
        except PeerUnavailable:
            return 0
        if groups is None:
            return 0
        self.delivered += [digest(group.tokens) for group in groups]
        self.source.mark_used()
        return len(groups)

    def fetch_for(self, seconds: float) -> tuple[int, float]:
        """Groups that arrived in a time, and that time."""
        began = time.monotonic()
        num_groups = 0
        while time.monotonic() - began < seconds:
            num_groups += self.fetch(seconds - (time.monotonic() - began) + 0.01)
        return num_groups, time.monotonic() - began

    def end(self) -> None:
        self.source.close()
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def accepted_groups(folder: Path) -> list[str]:
    return (folder / ACCEPTED).read_text().split() if (folder / ACCEPTED).exists() else []


def post_times(folder: Path, since: float, until: float) -> list[float]:
    """Seconds of the posts that began in a time."""
    lines = (line.split() for line in (folder / POSTS).read_text().splitlines())
    return [float(seconds) for began, seconds in lines if since <= float(began) <= until]


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    place = Place(folder, *free_ports(2))
    run = Run(place, options)
    try:
        run.start_api()
        run.start("inference", __file__, "--inference", json.dumps([place.inference_port, options.delay]))
        run.register(BATCH_GROUPS * GROUP_SIZE, 0)
        for number in range(options.processes):
            run.start_worker(number)
        print("waiting until all environments are registered and post groups", file=sys.stderr)
        while (num_known := num_environments(place)) < options.environments:
            run.fetch(0.5)
            print(f"\r{num_known} registered ", end="", file=sys.stderr)
        run.fetch_for(2 * options.delay)

        since, cpu_before = time.time(), run.cpu_s()
        num_groups, seconds = run.fetch_for(options.seconds)
        times = post_times(folder, since, time.time())
        cores = {name: (used - cpu_before[name]) / seconds for name, used in run.cpu_s().items()}
        print(f"{num_groups / seconds:.0f} groups/s; killing the API", file=sys.stderr)
        run.kill("api")
        run.start_api()
        run.fetch_for(AFTER_KILL_S)
        print("killing a process of environments", file=sys.stderr)
        run.kill("worker-1")
        run.start_worker(1)
        run.fetch_for(AFTER_KILL_S + 2 * options.delay)
        for number in range(options.processes):
            run.processes[f"worker-{number}"].send_signal(signal.SIGTERM)
        for number in range(options.processes):
            run.processes.pop(f"worker-{number}").wait(60)
        while run.fetch(2.0):
            pass
        run.register(GROUP_SIZE, 10**5)  # what is left is less than a batch
        while run.fetch(2.0):
            pass
        run.source.acknowledge()
    finally:
        run.end()
    accepted = accepted_groups(folder)
    return {
        "environments": options.environments,
        "processes": options.processes,
        "groups_per_s": num_groups / seconds,
        "post_p50_ms": 1000 * statistics.median(times),
        "post_p99_ms": 1000 * statistics.quantiles(times, n=100)[98],
        "posts": len(times),
        **{f"cores_{name}": value for name, value in cores.items()},
        "accepted": len(accepted),
        "delivered": len(run.delivered),
        "lost": len(set(accepted) - set(run.delivered)),
        "delivered_twice": len(run.delivered) - len(set(run.delivered)),
    }


def num_environments(place: Place) -> int:
    status = httpx.get(f"{place.api_url}/status", timeout=30).json()
    return len(status["environments"]) + int(status.get("environments_left_out", 0))


def free_ports(count: int) -> Iterable[int]:
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environments", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--delay", type=float, default=8.0)
    parser.add_argument("--max-staleness", type=int, help="bound of the trainer, so that environments wait for slots")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--inference", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        folder, api_port, inference_port, number, copies = json.loads(options.worker)
        run_environments(Place(Path(folder), api_port, inference_port), number, copies)
        return 0
    if options.inference:
        serve_inference(*json.loads(options.inference))
        return 0
    with tempfile.TemporaryDirectory(prefix="grpo-environments-") as folder:
        result = measure(options, Path(folder))
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:<18}{value:>12,.2f}" if isinstance(value, float) else f"{name:<18}{value:>12,}")
    is_met = result["groups_per_s"] >= 100 and result["post_p99_ms"] <= 250
    return 0 if is_met and not result["lost"] and not result["delivered_twice"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
