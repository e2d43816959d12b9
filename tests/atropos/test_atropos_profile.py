"""A profile with a stock environment, through the command line: the run finishes, and no process is left."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml
from stack import ENVIRONMENT
from stage import free_ports
from workplace import Workplace, open_workplace

from grpo_engine.wire.supervisor import RunState, ServiceState

pytestmark = [pytest.mark.slow, pytest.mark.atropos, pytest.mark.timeout(300)]
STEPS = 40
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
engine = "torch"
port = {vllm}
threads = 1

[services.env]
kind = "atropos_environment"
file = "{file}"
python = "{python}"
group_size = 4
settings = {{ task = "copy" }}
needs = {{ api = "ready", vllm = "ready" }}

[services.trainer]
kind = "trainer"
training_steps = {steps}
batch_size = 16
gradient_accumulation_steps = 1
lr = 3e-4
optimizer = "adamw"
checkpoint_interval = 0
threads = 1
needs = {{ api = "ready", vllm = "ready" }}
"""


def num_steps(place: Workplace) -> int:
    path = place.run_folder() / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


@pytest.mark.extended("test_atropos_stack.py kills the API under a stock environment")
def test_a_run_with_a_stock_environment_survives_its_api_and_leaves_nothing(
    tmp_path: Path, stock: Path, tiny_model_dir: Path
) -> None:
    with open_workplace(tmp_path) as place:
        api, vllm = place.ports = free_ports(2)
        place.up(PROFILE.format(api=api, vllm=vllm, file=ENVIRONMENT, python=stock / "python", steps=STEPS))
        while num_steps(place) < 3:
            time.sleep(0.05)  # the limit is that of the test
        os.kill(place.pid("api"), signal.SIGKILL)
        place.succeed("up", "--profile", "p", "--wait", "finished", limit_s=120)
        assert place.status().state is RunState.FINISHED
        assert (place.service("api").restarts, place.service("trainer").restarts) == (1, 0)
        assert place.service("trainer").state is ServiceState.FINISHED
        assert place.service("env").state is ServiceState.STOPPED
        steps = [json.loads(line)["step"] for line in (place.run_folder() / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(1, STEPS + 1))
        written = yaml.safe_load((place.run_folder() / "env.yaml").read_text())
        assert written["env"]["tokenizer_name"] == str(tiny_model_dir)
        assert [server["base_url"] for server in written["openai"]] == [f"http://127.0.0.1:{vllm}/v1"] * 2
        assert place.survivors() == []
