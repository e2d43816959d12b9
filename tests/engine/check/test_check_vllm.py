"""`grpo-engine check` against a real vLLM, on a GPU where there is one: one start a bridge, and all is green."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import torch
from serving import free_port, python_path

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
SHARED = pytest.mark.extended("test_vllm_engine.py publishes shared weights; test_check.py is green for the bridge")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("mode", "flags"),
    [
        pytest.param("shared_vllm", ["--shared-weights"], marks=SHARED),
        ("lora_only", ["--enable-lora", "--max-lora-rank", "16"]),
    ],
)
def test_a_real_vllm_is_green(tiny_model_dir: Path, tmp_path: Path, mode: str, flags: list[str]) -> None:
    port, log = free_port(), tmp_path / "server.log"
    common = ["--model-name", str(tiny_model_dir), "--dtype", "bfloat16", "--device", DEVICE, "--threads", "1"]
    environment = {
        **os.environ,
        **{"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1"},
        "VLLM_BRIDGE_CONFIG_PATH": str(tmp_path / "bridge.json"),
    }
    serve = [
        "server",
        "--engine",
        "vllm",
        "--port",
        str(port),
        "--max-model-len",
        "256",
        "--logprobs-mode",
        "processed",
    ]
    size = ["--max-model-len", "256", "--gpu-memory-utilization", "0.1"]
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "grpo_engine", *serve, *size, *common, *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=tmp_path,
        )
    try:
        is_healthy = False
        while not is_healthy:
            assert server.poll() is None, log.read_text(errors="replace")
            with suppress(httpx.TransportError):
                is_healthy = httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
            time.sleep(0.2)  # the interval of a probe, whose limit is the test's own
        check = ["check", "--weight-bridge-mode", mode, "--vllm-port", str(port), "--optimizer", "adamw", "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "grpo_engine", *check, "--seq-len", "200", "--check-tokens", "24", *common],
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path,
        )
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    assert done.returncode == 0, done.stdout + done.stderr
    findings = {finding["id"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert {finding["level"] for finding in findings.values()} == {"ok"}
    assert findings["server"]["seen"].startswith("our server, vllm")
    assert findings["canary"]["numbers"]["moved"] > 0.1
