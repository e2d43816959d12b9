"""A trainer that samples itself has the groups that an environment would have sent it: same seed, task and weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from environment_runs import at_work
from rollout_fakes import served_api
from serving import RunningServer, running_server

from grpo_engine.bridges.transport.in_process import InProcessBridge
from grpo_engine.colocate.config import TrainerConfig
from grpo_engine.colocate.main import engine_of
from grpo_engine.colocate.rounds import RoundInference
from grpo_engine.colocate.source import OwnSource
from grpo_engine.data.rollout_source import RolloutSource
from grpo_engine.data.source import RolloutApiSource
from grpo_engine.flags import parse_flags
from grpo_engine.models.loading import load_tokenizer
from grpo_engine.wire.rollouts import ScoredGroup

GROUP_SIZE, NUM_GROUPS, LENGTH = 4, 5, 512


@pytest.fixture(scope="module")
def server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    flags = ("--max-model-len", str(LENGTH), "--logprobs-mode", "processed")
    with running_server(tiny_model_dir, *flags, folder=tmp_path_factory.mktemp("server")) as running:
        yield running


def trainer(model: Path, *task: str) -> TrainerConfig:
    flags = (
        *("--model", str(model), "--weight-bridge-mode", "colocate", "--group-size", str(GROUP_SIZE)),
        *("--max-tokens", "8", "--batch-size", str(GROUP_SIZE * NUM_GROUPS), "--gradient-accumulation-steps", "1"),
        *("--seq-len", str(LENGTH), "--dtype", "float32", "--device", "cpu", "--threads", "1", "--seed", "7"),
    )
    return parse_flags(TrainerConfig, [*flags, *task], prog="grpo-engine train", description="")


class AwakeBridge(InProcessBridge):
    """One whose engine is awake; nothing is trained here."""

    def __init__(self) -> None: ...

    def wake(self) -> None: ...


def sampled_here(config: TrainerConfig) -> list[ScoredGroup]:
    engine = engine_of(config.own_server)
    engine.start()
    rounds = RoundInference(lambda requests: engine.generate(requests, 0))
    with OwnSource(config.own_environment, load_tokenizer(config.model_name), rounds, AwakeBridge()) as source:
        register(source, config)
        batch = source.next_batch(60.0)
    assert batch is not None
    return batch


def register(source: RolloutSource, config: TrainerConfig) -> None:
    source.register(
        batch_size=config.sequences_per_batch,
        max_token_len=config.seq_len,
        checkpoint_dir="checkpoints",
        save_checkpoint_interval=0,
        starting_step=0,
        num_steps=100,
    )


async def sent_by_an_environment(
    config: TrainerConfig, server: RunningServer, wanted: Sequence[ScoredGroup]
) -> list[ScoredGroup]:
    """The batches of the rollout API until these groups were in them; the first ones, though not in order."""
    with served_api() as api, RolloutApiSource(api) as source:
        register(source, config)
        urls: dict[str, Any] = {"rollout_server_url": api, "inference_urls": (server.url,)}
        environment = config.own_environment.model_copy(update={**urls, "max_workers": 8})
        received: list[ScoredGroup] = []
        async with at_work(environment, load_tokenizer(config.model_name)):
            for _ in range(4):
                batch = await asyncio.to_thread(source.next_batch, 60.0, policy_version=0)
                assert batch is not None
                received += batch
                source.mark_used()
                if all(any(each.tokens == group.tokens for each in received) for group in wanted):
                    break
    return received


@pytest.mark.parametrize(
    "task",
    [
        ("--task", "sort6"),
        ("--task", "guess_number"),
        ("--task", "mafia", "--no-task.explain", "--task.max-days", "1", "--task.max-statement", "12"),
        ("--task", "arithmetic", "--task.difficulty", "2", "--easy-threshold", "1"),
    ],
    ids=["a question", "several turns", "a game", "a difficulty filter"],
)
def test_the_rollout_api_delivers_the_groups_that_are_sampled_in_the_trainer(
    task: tuple[str, ...], server: RunningServer, tiny_model_dir: Path
) -> None:
    config = trainer(tiny_model_dir, *task)
    own = sampled_here(config)
    assert len(own) == NUM_GROUPS
    sent = asyncio.run(sent_by_an_environment(config, server, own))
    for group in own:
        [same] = [each for each in sent if each.tokens == group.tokens]
        assert same.masks == group.masks
        assert same.scores == group.scores
        for ours, theirs in zip(group.inference_logprobs or [], same.inference_logprobs or [], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)


def test_another_seed_samples_other_completions_and_the_same_one_the_same(tiny_model_dir: Path) -> None:
    config = trainer(tiny_model_dir, "--task", "sort6")
    own, again = sampled_here(config), sampled_here(config)
    other = sampled_here(config.model_copy(update={"seed": 8}))
    assert [group.tokens for group in own] == [group.tokens for group in again]
    assert all(group.tokens not in [each.tokens for each in own] for group in other)


def test_rewards_of_processes_beside_the_trainer_are_its_own(tiny_model_dir: Path) -> None:
    config = trainer(tiny_model_dir, "--task", "arithmetic")
    beside = trainer(tiny_model_dir, "--task", "arithmetic", "--scoring-processes", "2")
    assert [(each.tokens, each.scores) for each in sampled_here(beside)] == [
        (each.tokens, each.scores) for each in sampled_here(config)
    ]
