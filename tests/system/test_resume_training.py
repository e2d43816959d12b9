"""A training run that is killed at random moments and resumed has the curve and the weights of one that was not.

The groups are the same in both, posted by a program in a fixed order: what an environment samples depends on timing.
The commands of the README go from the first step to a model, with fewer steps.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from curves import curve
from ports import free_ports
from workplace import PYTHON, Workplace

from grpo_engine.wire.run_folder import checkpoint_steps
from grpo_engine.wire.supervisor import ENDED_RUN_STATES, RunStatus, ServiceState
from grpo_tui.client.local import look_at
from grpo_tui.supervisor.keeper.proc import below, send_signal
from grpo_tui.supervisor.keeper.proc import living as all_processes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.extended("test_resume.py: lives of a folder; test_train_resume.py: the trainer, at every moment"),
]

STEPS, SHORT, BACK, GROUPS_A_STEP = 40, 30, 20, 2
LIMIT_S = 180.0

POSTER = """
import json, os, pathlib, random, sys, time, urllib.error, urllib.request
url, noted, allowed = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
token = pathlib.Path(os.environ["GRPO_API_TOKEN_FILE"]).read_text().strip()
def post(number):
    rng = random.Random(number)
    prompt = [rng.randrange(3, 99) for _ in range(4)]
    completions = [[rng.randrange(3, 99) for _ in range(rng.randrange(2, 8))] for _ in range(4)]
    group = {
        "tokens": [prompt + each for each in completions],
        "masks": [[-100] * 4 + each for each in completions],
        "scores": [rng.random() for _ in completions],
        "inference_logprobs": [[1.0] * 4 + [-4.5 - rng.random() for _ in each] for each in completions],
        "generation_params": {"temperature": 1.0, "logprobs_mode": "processed"},
    }
    headers = {
        "Content-Type": "application/json", "Authorization": f"Bearer {token}", "Idempotency-Key": f"poster:{number}"
    }
    urllib.request.urlopen(urllib.request.Request(f"{url}/scored_data", json.dumps(group).encode(), headers)).read()
print("up", flush=True)
number = int(noted.read_text()) if noted.exists() else 0
while True:
    while number >= int(allowed.read_text()):
        time.sleep(0.02)
    try:
        post(number)
    except OSError:
        time.sleep(0.05)
        continue
    number += 1
    draft = noted.with_suffix(".draft")
    draft.write_text(str(number))
    draft.replace(noted)
"""
"""Posts as many groups as are allowed, each once; started again it goes on after the last one."""


def until_within(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.005)


def write_profile(place: Workplace, name: str, noted: Path, allowed: Path) -> None:
    api, vllm = free_ports(2)
    place.ports += [api, vllm]
    argv = json.dumps([PYTHON, "-I", "-S", "-c", POSTER, f"http://127.0.0.1:{api}", str(noted), str(allowed)])
    place.profile(
        f"""
        model = {{ name = "local/tiny", dtype = "float32", device = "cpu", max_model_len = 64 }}
        bridge = {{ mode = "shared_vllm" }}
        [services.api]
        kind = "rollout_api"
        port = {api}
        [services.vllm]
        kind = "inference"
        engine = "torch"
        port = {vllm}
        logprobs_mode = "processed"
        threads = 1
        [services.poster]
        kind = "command"
        argv = {argv}
        needs = ["api"]
        ends_run = false
        [services.trainer]
        kind = "trainer"
        optimizer = "adamw"
        lr = 1e-3
        batch_size = {4 * GROUPS_A_STEP}
        gradient_accumulation_steps = 1
        checkpoint_interval = 10
        keep_checkpoints = 9
        threads = 1
        needs = ["api", "vllm"]
        """,
        name=name,
    )


def metrics_of_steps(run_folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Without policy versions, which are not given a second time after a way back."""
    return [(step, metrics) for step, _, metrics in curve(run_folder)]


def last_step(run_folder: Path) -> int:
    path = run_folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def weights(run_folder: Path, step: int) -> bytes:
    return (run_folder / "checkpoints" / f"step_{step}" / "model.safetensors").read_bytes()


def allow(allowed: Path, num_groups: int) -> None:
    draft = allowed.with_suffix(".draft")
    draft.write_text(str(num_groups))
    draft.replace(allowed)


def is_ending(place: Workplace, run: str) -> bool:
    status = json.loads(place.succeed("status", run, "--json"))
    return status["is_ending"] or status["state"] in ENDED_RUN_STATES


def kill(place: Workplace, run: str, *, everything: bool) -> None:
    """SIGTERM to the trainer from outside, or SIGKILL to the supervisor with all that is below it."""
    status = json.loads(place.succeed("status", run, "--json"))
    if not everything:
        os.kill(next(each["pid"] for each in status["services"] if each["name"] == "trainer"), signal.SIGTERM)
        # Until the supervisor knows, a `resume` joins the run, as it does any live one.
        until_within(lambda: is_ending(place, run))
        status = RunStatus.model_validate_json(place.succeed("status", run, "--json"))
        ended = {each.name: (each.state, each.exit_code) for each in status.services}
        assert ended["trainer"] == (ServiceState.FAILED, 0)  # it was finished, and the run as well
        return
    keepers = below(status["supervisor"]["pid"], all_processes())
    os.kill(status["supervisor"]["pid"], signal.SIGKILL)
    for each in keepers:
        send_signal(each, signal.SIGKILL)
    # Not by markers alone: that of a process that is being killed cannot be read, and it still has its locks.
    until_within(lambda: not place.survivors() and not look_at(place.folder / "logs" / run).is_live)


def test_neither_kills_nor_a_way_back_change_the_curve_or_the_weights(place: Workplace) -> None:
    waiting = ("--detach", "--wait", "finished")
    noted, allowed = place.folder / "posted", place.folder / "allowed"
    allow(allowed, 2 * STEPS * GROUPS_A_STEP)
    write_profile(place, "whole", place.folder / "posted-whole", allowed)
    steps = f"services.trainer.training_steps={STEPS}"
    whole = place.succeed("up", "-p", "whole", "--set", steps, *waiting, limit_s=LIMIT_S).strip()
    unhurt = place.folder / "logs" / whole

    rng = random.Random(1)
    moments = sorted(rng.sample(range(1, SHORT - 1), 2))
    allow(allowed, moments[0] * GROUPS_A_STEP + 1)  # and half of the next batch
    write_profile(place, "killed", noted, allowed)
    steps = f"services.trainer.training_steps={SHORT}"
    run = place.succeed("up", "-p", "killed", "--set", steps, "--detach", "--wait", "ready", limit_s=LIMIT_S).strip()
    folder = place.folder / "logs" / run
    until_within(lambda: last_step(folder) == moments[0])
    kill(place, run, everything=False)
    allow(allowed, moments[1] * GROUPS_A_STEP + 1)
    place.succeed("resume", run, "--detach", "--wait", "ready", limit_s=LIMIT_S)
    until_within(lambda: last_step(folder) == moments[1])
    kill(place, run, everything=True)
    allow(allowed, 2 * STEPS * GROUPS_A_STEP)
    place.succeed("resume", run, *waiting, limit_s=LIMIT_S)
    assert metrics_of_steps(folder) == metrics_of_steps(unhurt)[:SHORT]
    assert weights(folder, SHORT) == weights(unhurt, SHORT)

    noted.write_text(str(BACK * GROUPS_A_STEP))  # the groups of the set-aside steps once more, and more of them
    more = ("--steps", f"+{STEPS - BACK}")
    place.succeed("resume", run, "--from", f"step_{BACK}", *more, *waiting, limit_s=LIMIT_S)
    assert metrics_of_steps(folder) == metrics_of_steps(unhurt)
    assert weights(folder, STEPS) == weights(unhurt, STEPS)
    lines = [*map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]
    versions = [line["policy_version"] for line in lines]  # none names two weights
    assert versions == [
        *range(1, BACK + 1),
        *range(SHORT + 2, SHORT + 2 + STEPS - BACK),
    ]
    aside = [json.loads(line)["step"] for line in (folder / "metrics-set-aside.jsonl").read_text().splitlines()]
    assert aside == list(range(BACK + 1, SHORT + 1))
    assert checkpoint_steps(folder / "checkpoints" / "set-aside" / "3") == [SHORT]


FEWER_STEPS = {"training_steps=50": "training_steps=4", "=25": "=2", "+100": "+4", "step_75": "step_6"}
README = Path(__file__).parents[2] / "README.md"


def test_the_commands_of_the_readme_train_stop_go_on_branch_compare_and_export(place: Workplace) -> None:
    text = README.read_text()
    beginning = text.index("grpo-tui up --profile tiny-cpu --set services.trainer.training_steps=50")
    block, _, rest = text[beginning:].partition("```\n")
    for number, fewer in FEWER_STEPS.items():
        assert number in block
        block = block.replace(number, fewer)
    named: dict[str, str] = {}
    for line in block.replace("\\\n", " ").splitlines():
        words = [named.get(word, word) for word in shlex.split(line)[1:]]
        if words[0] in ("up", "resume", "branch"):
            moved = ["--new"] if words[0] == "up" else []  # other tests may have the ports of the profile
            run = place.succeed(*words, *moved, "--detach", "--wait", "finished", limit_s=LIMIT_S).strip()
            named["RUN" if words[0] != "branch" else "BRANCH"] = run
        else:
            shown = place.succeed(*words, limit_s=LIMIT_S)
            assert words[0] != "compare" or "services.trainer.lr" in shown
    last = [
        json.loads((place.folder / "logs" / run / "metrics.jsonl").read_text().splitlines()[-1])
        for run in named.values()
    ]
    assert [line["step"] for line in last] == [8, 8]
    program = rest[rest.index("```python\n") :].removeprefix("```python\n").partition("```")[0]
    done = place.python(f"import tempfile\ntempfile.tempdir = '.'\n{program}")
    assert "usort 531642" in done.stdout, done.stderr
