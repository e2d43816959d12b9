"""What every stage of `gpu.py` works with: servers to start, figures to print, a trainer in its own process."""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _gpu_servers import GENERATE, HAS_ITS_MEMORY, Failed, Fleet, Gpu, Route, Server, random_prompts

from grpo_tui.supervisor.keeper import proc

HERE = Path(__file__).parent
PROMPT_TOKENS = 32
PUBLISHES_UNDER_LOAD = 5
LOAD_REQUESTS, LOAD_TOKENS = 64, 512
ANSWER_WITHIN_S = 120.0

Lanes = dict[str, tuple[Server, Route]]
"""What is compared: name → the server and the route that is requested."""


@dataclass(kw_only=True)
class Bench:
    """State of one stage: options, model, servers, GPU."""

    stage: str
    options: argparse.Namespace
    model: str
    vocabulary: int
    fleet: Fleet
    gpu: Gpu = field(default_factory=Gpu)
    seeds: Iterator[int] = field(default_factory=itertools.count)

    def tell(self, figure: str, who: str, value: Any = None, **more: Any) -> None:
        """Print a figure."""
        print(json.dumps({"stage": self.stage, "figure": figure, "who": who, "value": value, **more}), flush=True)

    @contextmanager
    def part(self, name: str, *, is_quiet: bool = False) -> Iterator[None]:
        """Run a part of a stage; its failure is printed and the stage continues."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:  # any failure: the other parts still give figures
            self.tell("failed", name, reason=f"{type(error).__name__}: {error}"[-4000:])
        if not is_quiet:
            self.tell("took", name, round(time.monotonic() - began, 1), unit="s")

    @property
    def is_cpu(self) -> bool:
        return bool(self.options.device == "cpu")

    # --- servers ---------------------------------------------------------------------------------------------------

    def stock(self, name: str, *flags: str, share: float, **environment: str) -> Server:
        """Start stock vLLM with the flags that our server passes to it."""
        argv = ["vllm.entrypoints.openai.api_server", "--model", self.model, "--served-model-name", "m"]
        argv += ["--dtype", self.options.dtype, "--max-model-len", str(self.options.max_model_len)]
        argv += ["--max-num-seqs", "256", "--generation-config", "vllm", "--disable-log-stats"]
        argv += ["--disable-uvicorn-access-log"]
        if not self.is_cpu:
            argv += ["--gpu-memory-utilization", str(share)]
        environment |= {"VLLM_WORKER_MULTIPROC_METHOD": "fork", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        return self.fleet.start(name, [*argv, *flags], **environment)

    def ours(self, name: str, *flags: str, share: float, **environment: str) -> Server:
        """Start our server on vLLM."""
        argv = [
            "grpo_engine",
            "server",
            "--engine",
            "vllm",
            "--model-name",
            self.model,
            "--device",
            self.options.device,
        ]
        argv += ["--dtype", self.options.dtype, "--max-model-len", str(self.options.max_model_len)]
        argv += ["--gpu-memory-utilization", str(share), "--logprobs-mode", self.options.logprobs_mode]
        argv += ["--served-model-name", "m"]
        return self.fleet.start(name, [*argv, *flags, *self.options.server_flag], **environment)

    def up(self, servers: list[Server]) -> list[Server]:
        """The servers that became healthy."""
        healthy = []
        for server in servers:
            with self.part(f"start of {server.name}"):
                server.wait(within_s=self.fleet.within_s)
                self.tell("start_s", server.name, round(server.loaded_s, 1), gpu_used_mb=self.gpu.used_mb())
                healthy.append(server)
        return healthy

    def measured(self, server: Server) -> Server:
        """The server, once it has allocated its memory: the next one measures what is free at its start."""
        with self.part(f"memory of {server.name}"):
            server.wait(within_s=self.fleet.within_s, line=HAS_ITS_MEMORY)
        return server

    # --- figures ---------------------------------------------------------------------------------------------------

    def speeds(self, lanes: Lanes, *, num_new: int | None = None, repeats: int | None = None) -> None:
        """Tokens per second of every lane, measured in turns."""
        num_new, repeats = num_new or self.options.new_tokens, repeats or self.options.repeats
        counts = self.options.requests

        def prompts(count: int) -> list[list[int]]:
            return random_prompts(count, PROMPT_TOKENS, self.vocabulary, next(self.seeds))

        good = dict(lanes)
        for lane, (server, route) in lanes.items():
            with self.part(f"first requests of {lane}", is_quiet=True):
                del good[lane]
                server.tokens_per_s(route, prompts(max(counts)), min(16, num_new))
                good[lane] = (server, route)
        values: dict[tuple[str, int], list[float]] = {}
        for _ in range(repeats):
            for count in counts:
                for lane, (server, route) in good.items():
                    speed = server.tokens_per_s(route, prompts(count), num_new)
                    values.setdefault((lane, count), []).append(round(speed, 1))
        for (lane, count), each in values.items():
            self.tell("tokens_per_s", lane, round(statistics.median(each), 1), requests=count, values=each)

    def publishes(self, who: str, trainer: Trainer, times: int, write: str, every_s: float = 0.0) -> None:
        """Milliseconds of weight updates."""
        spans = trainer.ask(do="publish", times=times, write=write, every_s=every_s)["publishes"]
        for name in ("total_ms", "pause_ms", "before_ms", "write_ms", "after_ms"):
            each = [span[name] for span in spans if name in span]
            if not each:
                continue
            worst = {"first": round(each[0], 2), "max": round(max(each), 2)}
            self.tell(f"publish_{name}", who, round(statistics.median(each), 2), **worst)

    def publishes_under_load(
        self, who: str, server: Server, trainer: Trainer, write: str, route: Route = GENERATE
    ) -> None:
        """The same while many requests run."""
        with self.under_load(who, server, route):
            # Closer together, a pause would wait until preempted requests have been recomputed.
            self.publishes(who, trainer, PUBLISHES_UNDER_LOAD, write, every_s=0.0 if self.is_cpu else 0.6)

    def turns(self, who: str, trainer: Trainer, times: int) -> None:
        """Milliseconds in which a server falls asleep and wakes with new weights; memory of the card in between."""
        spans = trainer.ask(do="turns", times=times, write="nothing")["turns"]
        for name in spans[0]:
            each = [span[name] for span in spans]
            self.tell(name, who, round(statistics.median(each), 1), first=round(each[0], 1), max=round(max(each), 1))

    @contextmanager
    def under_load(self, who: str, server: Server, route: Route = GENERATE) -> Iterator[None]:
        """Within, many requests run."""
        num_new = 8 if self.is_cpu else LOAD_TOKENS
        prompts = random_prompts(LOAD_REQUESTS, PROMPT_TOKENS, self.vocabulary, next(self.seeds))
        faults: list[Exception] = []

        def load() -> None:
            try:
                server.tokens_per_s(route, prompts, num_new)
            except Exception as error:
                faults.append(error)

        thread = threading.Thread(target=load)
        thread.start()
        time.sleep(0.0 if self.is_cpu else 0.5)  # until all of them generate
        yield
        self.tell("load_outlasted_publishes", who, thread.is_alive())
        thread.join()
        if faults:
            raise faults[0]

    def end(self, server: Server, number: signal.Signals) -> None:
        """End a server and print what it left."""
        ending = server.end(number, self.gpu)
        self.tell("end", f"{server.name}, {number.name}", ending["memory_free_s"], **ending)


class Trainer:
    """`_gpu_trainer.py` in a separate process."""

    def __init__(self, bench: Bench, mode: str, server: Server, folder: Path, **more: str) -> None:
        mark, environment = bench.fleet.marked(mode)
        environment |= more
        self._log = bench.fleet.folder / f"trainer-{mode}.log"
        argv = [sys.executable, str(HERE / "_gpu_trainer.py"), "--mode", mode, "--server", server.url]
        argv += ["--model", bench.model, "--folder", str(folder), "--device", bench.options.device]
        argv += ["--dtype", bench.options.dtype]
        if mode in ("shared_vllm", "lora_merged"):
            argv += ["--bridge-file", str(bridge_file(bench))]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        bench.fleet.ended_with_me(self.kill)
        self._mark = mark
        try:
            self.attached = self._answer()
        except Failed:
            self.kill()
            raise

    def ask(self, **question: Any) -> dict[str, Any]:
        """Send a request and return the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Close its bridge and wait for its exit."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        finally:
            self.kill()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def kill(self) -> None:
        """Kill its remaining processes."""
        for process in proc.processes_of_run(self._mark):
            proc.send_signal(process, signal.SIGKILL)
        self._process.wait(10)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        limit = threading.Timer(ANSWER_WITHIN_S, self.kill)
        limit.start()
        line = self._process.stdout.readline()
        limit.cancel()
        if not line:
            raise Failed(f"the trainer's side ended:\n{self._log.read_text(errors='replace')[-3000:]}")
        return dict(json.loads(line))


def bridge_file(bench: Bench) -> Path:
    """The bridge file of the server with shared weights."""
    return bench.fleet.folder / "bridge.json"


# --- stages -------------------------------------------------------------------------------------------------------
