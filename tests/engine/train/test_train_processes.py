"""The four services as real processes, with a peer of the trainer killed: the others go on."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_processes import EngineProcesses, flags_of_services
from pydantic import TypeAdapter
from serving import save_tiny_model
from training import weights_of

from grpo_engine.environments.tasks import AnyTask, spell_out
from grpo_engine.models.loading import load_tokenizer
from grpo_engine.train.checkpointing import checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEPS, GROUP_SIZE, GROUPS_A_BATCH, BATCHES_AHEAD = 24, 4, 2, 2


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model", seed=1)


@pytest.fixture
def services(tmp_path: Path, model: Path, request: pytest.FixtureRequest) -> Iterator[EngineProcesses]:
    flags = flags_of_services(
        tmp_path,
        str(model),
        steps=STEPS,
        server=["--dtype", "bfloat16", "--max-model-len", "256"],
        env=[
            *("--task", "sort6", "--group-size", str(GROUP_SIZE), "--max-tokens", "6"),
            *("--max-batches-offpolicy", str(BATCHES_AHEAD)),
        ],
        train=[
            *("--batch-size", "4", "--gradient-accumulation-steps", "2", "--seq-len", "64", "--lr", "1e-3"),
            *("--rollouts-groups", str(GROUPS_A_BATCH)),
        ],
    )
    services = EngineProcesses(tmp_path, flags, is_forked=request.param == "forked")
    try:
        services.start("api", "server", "env", "train")
        services.wait_until(lambda: services.num_steps() >= 3)
        yield services
    finally:
        services.end_all()


@pytest.mark.extended("test_rollouts_kills, and test_atropos_stack: a restarted API")
@pytest.mark.parametrize("services", ["command line"], indirect=True)
def test_a_killed_api_ends_no_other_service_and_no_group_is_lost_or_trained_twice(
    services: EngineProcesses, model: Path
) -> None:
    for time_killed in (1, 2):
        services.kill("api")
        so_far = services.num_steps()
        services.wait_until(lambda n=time_killed: services.log("train").count("waiting for the rollout API") >= n)
        services.start("api")
        services.wait_until(lambda n=so_far: services.num_steps() >= n + 4)
    services.end("train")
    services.end("env", 30)
    services.end_all()
    assert [line["step"] for line in services.lines()] == list(range(1, STEPS + 1))

    items = TypeAdapter(AnyTask).validate_python(spell_out("sort6")).items(0)
    number_of = {next(items).question: number for number in range(1000)}
    trained = [json.loads(line)["prompt"] for line in (services.run_folder / "rollouts.jsonl").read_text().splitlines()]
    decode = load_tokenizer(str(model)).decode
    with sqlite3.connect(services.folder / "rollouts.sqlite") as database:
        waiting = [decode(json.loads(body)["tokens"][0]) for (body,) in database.execute("SELECT body FROM bodies")]
    numbers = [number_of["sort " + re.search(r"sort (\d{6})", text)[1]] for text in trained + waiting]
    assert len(trained) == STEPS * GROUPS_A_BATCH
    assert len(set(numbers)) == len(numbers)
    unfinished = set(range(max(numbers))) - set(numbers)  # when the environment ended
    assert len(unfinished) <= BATCHES_AHEAD * GROUPS_A_BATCH


@pytest.mark.parametrize("services", ["forked"], indirect=True)
def test_a_trainer_whose_server_was_killed_still_saves_its_steps_and_exits_with_0(
    services: EngineProcesses, model: Path
) -> None:
    services.kill("server")
    services.wait_until(lambda: "has exited; its memory is unmapped" in services.log("train"))
    trainer = services.processes["train"]
    assert "/dev/shm/grpo-" not in Path(f"/proc/{trainer.pid}/maps").read_text()
    trainer.send_signal(signal.SIGTERM)
    services.end("train", 60)
    folder = checkpoints.newest(services.run_folder / "checkpoints")
    assert folder is not None
    state, saved = checkpoints.load(folder, model_name=str(model)), weights_of(folder)
    assert state.marker.step == services.num_steps()
    assert saved.keys() == state.masters.keys()
    assert all(torch.equal(values, state.masters[name].to(torch.bfloat16)) for name, values in saved.items())
    services.start("server", "train")  # the server clears away what the killed one left
    services.wait_until(lambda: services.num_steps() >= state.marker.step + 2)
    steps = [line["step"] for line in services.lines()]
    assert steps == list(range(1, len(steps) + 1))
