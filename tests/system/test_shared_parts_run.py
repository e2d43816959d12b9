"""A run with one copy of the weights over two processes of a real vLLM, to its end, whatever is killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from vllm_serving import HAS_GPU, segments_now
from workplace import Workplace, until

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.extended("test_train_parts.py: the same training and the next server, without vLLM"),
    pytest.mark.skipif(HAS_GPU, reason="the server and the trainer of this test would need two GPUs"),
]

STEPS = 24
LIMIT_S = 300.0
PROFILE = """
[model]
name = "local/tiny"
dtype = "float32"
device = "cpu"
max_model_len = 64
[bridge]
mode = "shared_vllm"
[services.api]
kind = "rollout_api"
port = {api}
[services.vllm]
kind = "inference"
engine = "vllm"
port = {vllm}
tensor_parallel_size = 2
logprobs_mode = "processed"
gpu_memory_utilization = 0.05
threads = 1
needs = {{ api = "ready" }}
[services.env]
kind = "environment"
task = "sort6"
group_size = 4
max_tokens = 8
needs = {{ api = "ready", vllm = "ready" }}
[services.trainer]
kind = "trainer"
processes = 2
training_steps = {steps}
batch_size = 8
gradient_accumulation_steps = 1
lr = 1e-4
checkpoint_interval = 4
max_staleness = 0
threads = 1
restart = "on-failure"
needs = {{ api = "ready", vllm = "ready", env = "ready" }}
"""


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    complete, _, _ = path.read_bytes().rpartition(b"\n") if path.exists() else (b"", b"", b"")
    return [json.loads(line) for line in complete.splitlines()]


def until_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not (seen := lines(folder)) or seen[-1]["step"] < step:
        assert time.monotonic() < deadline, f"step {step} was not reached: {len(seen)} lines"
        time.sleep(0.05)


def services(place: Workplace, run: str) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in json.loads(place.succeed("status", run, "--json"))["services"]}


def shared_memory_of(place: Workplace) -> set[str]:
    """Names below /dev/shm that processes of the run have mapped."""
    maps = "".join(Path(f"/proc/{each.pid}/maps").read_text() for each in place.survivors())
    return {line.partition("/dev/shm/")[2] for line in maps.splitlines() if "/dev/shm/" in line}


def test_a_killed_rank_and_a_killed_server_cost_nothing_but_time(place: Workplace) -> None:
    place.profile(PROFILE.format(api=free_port(), vllm=free_port(), steps=STEPS))
    run = place.succeed("up", "--profile", "p", "--detach", "--wait", "ready", limit_s=LIMIT_S).strip()
    folder = place.folder / "logs" / run
    until_step(folder, 5)
    os.kill(services(place, run)["trainer"]["ranks"][1]["pid"], signal.SIGKILL)
    until_step(folder, 10)
    os.kill(services(place, run)["vllm"]["pid"], signal.SIGKILL)
    until_step(folder, STEPS)
    measured = lines(folder)
    assert [line["step"] for line in measured] == list(range(1, STEPS + 1))
    assert [line["policy_version"] for line in measured] == list(range(1, STEPS + 1))
    # Both compute with the same memory: in fp32 they differ by the order of sums.
    assert max(line["metrics"]["alignment/diff_max"] for line in measured) < 1e-4
    after = services(place, run)
    assert [after[name]["restarts"] for name in ("trainer", "vllm")] == [1, 1]
    mapped = shared_memory_of(place)
    place.grpo("down", run)
    assert not [name for name in segments_now() if run in name]  # others are of tests beside this one
    assert not mapped & set(os.listdir("/dev/shm"))


def test_down_removes_all_that_vllm_has_in_shared_memory_after_everything_was_killed_at_once(place: Workplace) -> None:
    """700 MB stayed: names of vLLM's queues, process groups and semaphores did not say of which run they are.

    Without a fork server, so that engine core and workers are spawned, which inherit nothing.
    """
    profile = PROFILE.replace("tensor_parallel_size = 2", "tensor_parallel_size = 2\nstandby = false")
    place.profile(profile.format(api=free_port(), vllm=free_port(), steps=10_000))
    run = place.succeed("up", "--profile", "p", "--detach", "--wait", "ready", limit_s=LIMIT_S).strip()
    mapped = shared_memory_of(place)
    for process in (place.supervisor(), *place.survivors()):
        with suppress(ProcessLookupError):  # a keeper exits with its service
            os.kill(process.pid, signal.SIGKILL)
    until(lambda: not place.survivors() and not place.supervisors())
    left = mapped & set(os.listdir("/dev/shm"))
    assert any("psm_" in name for name in left)
    assert "removed from shared memory" in place.succeed("down", run)
    assert not mapped & set(os.listdir("/dev/shm"))
