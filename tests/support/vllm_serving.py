"""A real vLLM behind our routes, for tests: its process, its files and segments, its log-probabilities."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import torch
from bridging import make_bridge
from serving import RunningServer, free_port, python_path
from transformers import AutoModelForCausalLM

from grpo_engine.bridges import ON_SHARED_MEMORY, Bridge
from grpo_engine.bridges.memory.shared_tensors import SEGMENT_PREFIX
from grpo_engine.bridges.memory.weight_lock import SHARED_MEMORY
from grpo_engine.processes import ProcessIdentity
from grpo_engine.wire.inference import GenerateResponse

PROMPT = [10, 20, 30]
LONG_PROMPT = [4 + i % 90 for i in range(200)]
"""Longer than a block of the prefix cache."""
VERSION_HEADER = "X-Policy-Version"
HAS_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", "bfloat16") if HAS_GPU else ("cpu", "float32")
NUM_PROCESSES = 1 if HAS_GPU else 2
"""Descendants of the server: vLLM's engine core, and on a CPU its worker."""
TOLERANCE = 1e-3
"""Of each log-probability in float32."""
MEAN_TOLERANCE = 0.25
"""Of a completion's mean in bfloat16: up to 0.158 on an H200 with these large random weights, whose logits bfloat16
rounds to tenths; other weights differ by more than 0.5."""


@dataclass(slots=True)
class Stack:
    """A server with its files, and the health statuses during its start."""

    server: RunningServer
    model: Path
    folder: Path
    statuses: list[int] = field(default_factory=list)

    @property
    def bridge_file(self) -> Path:
        return self.folder / "bridge.json"

    def bridge(self, settings: dict[str, object]) -> Bridge:
        if settings["mode"] in ON_SHARED_MEMORY:
            settings = {**settings, "config_path": self.bridge_file}
        return make_bridge(settings, self.model, self.server.url, self.folder, dtype=DTYPE, device=DEVICE)


@contextmanager
def serving_vllm(
    model: Path,
    folder: Path,
    *flags: str,
    environment: dict[str, str] | None = None,
    port: int | None = None,
    is_sharing: bool = True,
) -> Iterator[Stack]:
    """A healthy vLLM server, by default with shared weights; stopped by SIGTERM or, if that fails, SIGKILL."""
    port, log = port or free_port(), folder / f"server-{time.monotonic_ns()}.log"
    if is_sharing:
        flags = ("--bridge-file", str(folder / "bridge.json"), "--shared-weights", *flags)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "grpo_engine", "server", "--engine", "vllm", "--device", DEVICE),
                *("--model-name", str(model), "--dtype", DTYPE, "--port", str(port), "--threads", "1"),
                *("--gpu-memory-utilization", "0.1", "--max-model-len", "256", *flags),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env={
                **os.environ,
                **{"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1"},
                **(environment or {}),
            },
        )
    stack = Stack(RunningServer(process, f"http://127.0.0.1:{port}", log), model, folder)
    try:
        while not stack.statuses or stack.statuses[-1] != 200:
            assert process.poll() is None, log.read_text(errors="replace")
            with suppress(httpx.TransportError):
                stack.statuses.append(httpx.get(f"{stack.server.url}/health", trust_env=False).status_code)
            time.sleep(0.1)  # the interval of a probe, whose limit is the test's own
        yield stack
    finally:
        with suppress(subprocess.TimeoutExpired):
            stack.server.stop()
        process.kill()
        process.wait()


def processes_below(pid: int) -> list[ProcessIdentity]:
    identities = [ProcessIdentity.of(child.pid) for child in psutil.Process(pid).children(recursive=True)]
    return [identity for identity in identities if identity is not None]


def wait_gone(identities: list[ProcessIdentity], within_s: float) -> None:
    until = time.monotonic() + within_s
    while any(identity.is_alive() for identity in identities) and time.monotonic() < until:
        time.sleep(0.05)  # the interval of a probe
    assert [identity for identity in identities if identity.is_alive()] == []


def segments_now() -> set[str]:
    return {path.name for path in SHARED_MEMORY.glob(f"{SEGMENT_PREFIX}*")}


def named_sockets(pid: int) -> set[Path]:
    """Sockets in the file system that a process listens on."""
    names = (Path(each.laddr) for each in psutil.Process(pid).net_connections("unix"))
    return {name for name in names if name.is_socket()}


def load(folder: Path) -> torch.nn.Module:
    """The checkpoint in the served dtype."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, DTYPE)).to(DEVICE).eval()


def logits_of(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens], device=DEVICE)).logits[0].float().cpu()


def assert_close(values: torch.Tensor, expected: torch.Tensor, temperature: float = 1.0) -> None:
    if HAS_GPU:
        assert (values - expected).abs().mean() < MEAN_TOLERANCE / temperature  # which divides the logits' rounding too
    else:
        torch.testing.assert_close(values, expected, atol=TOLERANCE, rtol=0)


def counter_of(stack: Stack, name: str) -> float:
    """Values of vLLM's counters."""
    with stack.server.client as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


def logprobs_of(model: torch.nn.Module, prompt: list[int], completion: list[int], temperature: float) -> torch.Tensor:
    logits = logits_of(model, prompt + completion) / temperature
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return rows.gather(-1, torch.tensor(completion)[:, None])[:, 0]


def assert_agreement(
    stack: Stack,
    model: torch.nn.Module,
    *,
    version: int,
    prompt: list[int] = PROMPT,
    temperature: float = 1.0,
    divided_by: float | None = None,
    **body: object,
) -> GenerateResponse:
    """The server returns the model's log-probabilities at this temperature."""
    body = {"max_tokens": 12, "logprobs": 0, "temperature": temperature, **body}
    raw = stack.server.generate(prompt={"prompt_token_ids": prompt}, **body)
    answer = GenerateResponse.model_validate(raw)
    assert answer.token_ids is not None
    assert answer.logprobs is not None
    for tokens, entries in zip(answer.token_ids, answer.logprobs, strict=True):
        assert [next(iter(position[0])) for position in entries] == [str(token) for token in tokens]
        values = torch.tensor([next(iter(position[0].values())) for position in entries])
        divisor = temperature if divided_by is None else divided_by
        assert_close(values, logprobs_of(model, prompt, tokens, divisor), divisor)
    assert answer.policy_version == version
    assert answer.policy_versions == [[version] * len(tokens) for tokens in answer.token_ids]
    return answer
