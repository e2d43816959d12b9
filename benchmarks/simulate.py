"""Whether `grpo-tui simulate` predicts real runs: records one setting, simulates the others, and runs them too.

    .venv/bin/python benchmarks/simulate.py                    # paced: about six minutes
    .venv/bin/python benchmarks/simulate.py --stack tiny-cpu   # profile tiny-cpu as it is
    .venv/bin/python benchmarks/simulate.py --runs logs/A logs/B   # runs that exist, as of a GPU machine

`paced` is the real rollout API, real environments and the trainer's real client, in processes of their own. Only the
two computations are clocks: a server that advances its requests every 20 ms, and a trainer that sleeps, so that neither
takes a core from the other, as on GPUs of their own. `tiny-cpu` computes on the same cores as everything else. All
are predicted from the recording of the first one alone, bound or run. Target: throughput within 15 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import uvicorn
from fastapi import FastAPI

from grpo_engine.data.source import RolloutApiSource
from grpo_engine.simulate.figures import Lengths, ServerSpeed
from grpo_engine.simulate.layout import Layout
from grpo_engine.simulate.recording import Recording, figures_of, read_recording
from grpo_engine.simulate.result import calibrated, run
from grpo_engine.wire.inference import GenerateRequest, GenerateResponse
from grpo_engine.wire.run_folder import METRICS_FILE, ROLLOUTS_FILE
from grpo_tui.profile.simulated import recorded_figures, recorded_layout

TARGET = 0.15
TICK_S = 0.02
SPEED = ServerSpeed(points=((1, 60.0), (8, 400.0), (32, 1000.0), (128, 1600.0)))
LENGTHS = Lengths(mean=80, spread=0.6, longest=200)
TRAINED_PER_S = 2_000.0
PAUSE_S = 0.1
PACED = Layout(
    num_servers=1, num_ranks=1, num_environments=2, batch_size=32, group_size=4, max_staleness=None, num_steps=200
)
ENGINE = (sys.executable, "-m", "grpo_engine")


class PacedServer:
    """Answers `/generate` after the time that its tokens take, with random tokens."""

    def __init__(self) -> None:
        self.version = 0
        self._is_paused = False
        self._running: list[dict[str, Any]] = []
        self._random = Random(0)
        self.app = FastAPI()
        self.app.get("/health")(lambda: {})
        self.app.post("/generate")(self.generate)

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Wait for every completion."""
        rows = [{"length": length, "versions": [], "done": 0.0} for length in LENGTHS.draw(request.n, self._random)]
        ends = [asyncio.get_running_loop().create_future() for _ in rows]
        for row, end in zip(rows, ends, strict=True):
            row["end"] = end
        self._running += rows
        await asyncio.gather(*ends)
        tokens = [[self._random.randrange(5, 15) for _ in range(row["length"])] for row in rows]
        prompt = request.prompt if isinstance(request.prompt, str) else request.prompt.prompt_token_ids
        return GenerateResponse(
            text=["1"] * request.n,
            prompt="",
            prompt_token_ids=list(prompt) if isinstance(prompt, list) else [1],
            finish_reasons=["stop"] * request.n,
            logprobs=[[[{str(token): -1.0}] for token in row] for row in tokens],
            token_ids=tokens,
            policy_version=self.version,
            policy_versions=[row["versions"] for row in rows],
            logprobs_mode="processed",
        )

    async def advance(self) -> None:
        """Give running completions their tokens, for good."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            passed, before = now - before, now
            if self._is_paused or not self._running:
                continue
            each = SPEED.tokens_per_s(len(self._running)) / len(self._running)
            for row in self._running:
                row["done"] += passed * each
                while len(row["versions"]) < min(row["done"], row["length"]):
                    row["versions"].append(self.version)
            ended = [row for row in self._running if len(row["versions"]) == row["length"]]
            self._running = [row for row in self._running if len(row["versions"]) < row["length"]]
            for row in ended:
                row["end"].set_result(None)

    def update(self, version: int) -> None:
        """Stand still, and go on with the new version."""
        self._is_paused = True
        time.sleep(PAUSE_S)
        self.version, self._is_paused = version, False


def record_paced(folder: Path, bound: int | None, num_steps: int) -> None:
    """Run for real, and write what a run folder has."""
    server = PacedServer()
    ports = [_free_port(), _free_port()]
    config = uvicorn.Config(server.app, host="127.0.0.1", port=ports[1], log_level="warning")
    web = uvicorn.Server(config)

    async def serve() -> None:
        ticking = asyncio.create_task(server.advance())
        await web.serve()
        ticking.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    api_url = f"http://127.0.0.1:{ports[0]}"
    log = (folder / "processes.log").open("wb")
    argvs: list[Sequence[str]] = [("api", "--port", str(ports[0]), "--store", ":memory:")]
    argvs += [
        (
            *("env", "--model-name", "local/tiny", "--task", "sort6", "--group-size", str(PACED.group_size)),
            *("--max-tokens", str(LENGTHS.longest), "--max-token-length", "512", "--name", f"paced-{number}"),
            *("--rollout-server-url", api_url, "--inference-url", f"http://127.0.0.1:{ports[1]}"),
        )
        for number in range(PACED.num_environments)
    ]
    processes = [subprocess.Popen([*ENGINE, *argv], stdout=log, stderr=log) for argv in argvs]
    try:
        with RolloutApiSource(api_url, reach_timeout_s=120) as source:
            _train(source, server, folder, bound, num_steps)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
        web.should_exit = True
        thread.join()
        log.close()


def _train(source: RolloutApiSource, server: PacedServer, folder: Path, bound: int | None, num_steps: int) -> None:
    """The loop of `grpo_engine.train.loop`, with a sleep for the gradient."""
    source.register(
        batch_size=PACED.batch_size,
        max_token_len=512,
        checkpoint_dir=str(folder),
        save_checkpoint_interval=0,
        starting_step=0,
        num_steps=num_steps,
        max_staleness=bound,
    )
    with (folder / METRICS_FILE).open("w") as metrics, (folder / ROLLOUTS_FILE).open("w") as rollouts:
        for version in range(num_steps):
            began = time.perf_counter()
            groups = source.next_batch(120.0, policy_version=version)
            assert groups is not None
            fetched = time.perf_counter()
            sampled = [
                [v for v, label in zip(versions, labels, strict=True) if label != -100]
                for group in groups
                for versions, labels in zip(group.policy_versions or [], group.masks, strict=True)
            ]
            num_inputs = sum(len(tokens) for group in groups for tokens in group.tokens)
            time.sleep(num_inputs / TRAINED_PER_S)
            source.mark_used()
            stepped = time.perf_counter()
            server.update(version + 1)
            source.report_served(source.lease, version + 1)
            published = time.perf_counter()
            ages = [version - each for row in sampled for each in row]
            measured = {
                "train/data_fetch_time": fetched - began,
                "train/sync_time": published - stepped,
                "train/step_time": published - began,
                "train/tokens_per_second": num_inputs / (published - began),
                "train/busy_fraction": (published - fetched) / (published - began),
                "rollout/length_mean": len(ages) / len(sampled),
                "rollout/staleness_mean": sum(ages) / len(ages),
                "rollout/staleness_max": float(max(ages)),
                **source.time_metrics(),
            }
            line = {"time": time.time(), "step": version + 1, "policy_version": version + 1, "metrics": measured}
            print(json.dumps(line), file=metrics)
            for group in groups:
                lengths = [sum(label != -100 for label in labels) for labels in group.masks]
                print(json.dumps({"completions": [{"token_ids": [0] * length} for length in lengths]}), file=rollouts)


def record_tiny(folder: Path, bound: int | None, num_steps: int) -> Path:
    """A run of profile tiny-cpu; returns its folder."""
    settings = [f"training_steps={num_steps}", "eval_every=0", "rollouts_groups=16"]
    settings += [] if bound is None else [f"max_staleness={bound}"]
    command = [sys.executable, "-m", "grpo_tui", "up", "--profile", "tiny-cpu", "--new", "--wait", "finished"]
    command += [word for setting in settings for word in ("--set", f"services.trainer.{setting}")]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    [path] = folder.glob("logs/*/" + METRICS_FILE)
    return path.parent


def _free_port() -> int:
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        port: int = each.getsockname()[1]
        return port


def compare(bounds: Sequence[int | None], folders: Sequence[Path], stack: str) -> bool:
    """Print measured beside predicted; whether every throughput is within the target."""
    recordings = [read_recording(folder) for folder in folders]
    if stack == "paced":
        layouts = [replace(PACED, max_staleness=bound) for bound in bounds]
        shape = SPEED.scaled(0.5)  # the form of the curve is known, as of vLLM; its height is not
        figures = figures_of(recordings[0], shape, num_ranks=1, batch_size=PACED.batch_size)
        figures = calibrated(recordings[0], layouts[0], figures)
        print(f"server: {figures.server.points[-1][1]:,.0f} tokens/s found, {SPEED.points[-1][1]:,.0f} are true")
    else:
        layouts = [recorded_layout(folder) for folder in folders]
        figures = recorded_figures(folders[0])
    print("max_staleness   sequences/s                trainer waits   sampling waits   staleness      oldest")
    is_met = True
    for number, (bound, layout, measured) in enumerate(zip(bounds, layouts, recordings, strict=True)):
        is_met &= _print_row(bound, layout, measured, run(replace(layout, num_steps=200), figures), is_known=not number)
    return is_met


def _print_row(bound: int | None, layout: Layout, measured: Recording, predicted: Any, *, is_known: bool) -> bool:
    speed = layout.batch_size / measured.interval_s
    ratio = predicted.sequences_per_s / speed
    waits = 1 - (1.0 if measured.generation_busy is None else measured.generation_busy)
    print(
        f"{'unset' if bound is None else bound!s:<14}  {speed:6.2f} → {predicted.sequences_per_s:6.2f}  × {ratio:.3f}"
        f"   {1 - measured.trainer_busy:4.0%} → {predicted.trainer_waits:4.0%}    {waits:4.0%} → "
        f"{predicted.generation_waits:4.0%}    {measured.staleness_mean:.2f} → {predicted.staleness_mean:.2f}"
        f"    {measured.staleness_max:.2f} → {predicted.staleness_max:.2f}{'   (recorded)' if is_known else ''}",
        flush=True,
    )
    return abs(ratio - 1) <= TARGET


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stack", choices=("paced", "tiny-cpu"), default="paced")
    parser.add_argument("--bounds", default="4,0,1", help="max_staleness; the first one is recorded")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--runs", nargs="+", type=Path, metavar="FOLDER", help="of runs that exist; the first is recorded"
    )
    arguments = parser.parse_args()
    if arguments.runs:
        bounds = [recorded_layout(folder).max_staleness for folder in arguments.runs]
        _print_verdict(compare(bounds, arguments.runs, "runs"))
        return
    bounds = [None if word == "unset" else int(word) for word in arguments.bounds.split(",")]
    subprocess.run(
        [sys.executable, "-c", "from grpo_engine.models.loading import resolve_model; resolve_model('local/tiny')"],
        check=True,
    )
    with tempfile.TemporaryDirectory() as name:
        folders = []
        for number, bound in enumerate(bounds):
            folder = Path(name) / str(number)
            folder.mkdir()
            if arguments.stack == "paced":
                record_paced(folder, bound, arguments.steps)
            else:
                folder = record_tiny(folder, bound, arguments.steps)
            folders.append(folder)
        is_met = compare(bounds, folders, arguments.stack)
    _print_verdict(is_met)


def _print_verdict(is_met: bool) -> None:
    print(f"throughput within {TARGET:.0%}: {'met' if is_met else 'missed'}")


if __name__ == "__main__":
    main()
