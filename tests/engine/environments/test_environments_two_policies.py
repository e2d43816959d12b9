"""One environment in which two policies play one game, each trained by a trainer of its own with its own objective."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from environment_runs import RUN, at_work, served_run, settings
from rollout_fakes import fake_inference, served_api

from grpo_engine.config import validated
from grpo_engine.data.source import RolloutApiSource
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.tasks.base import Item
from grpo_engine.environments.tasks.mafia.task import Mafia
from grpo_engine.errors import ConfigError
from grpo_engine.models.tiny_tokenizer import tiny_tokenizer
from grpo_engine.wire.rollouts import ScoredGroup

GAME = {"name": "mafia", "policy_plays": "town", "max_days": 1, "explain": False}
OBJECTIVES = """
def talks(seat):
    return 0.5 * sum("hello" in turn.answer for turn in seat.turns) if seat.side == "mafia" else 9.0


def breaks(seat):
    return 1 / 0
"""


def sampled_text(group: ScoredGroup) -> bytes:
    """What was sampled in the first sequence."""
    return bytes(label for label in group.masks[0] if label != -100)


@pytest.mark.slow
async def test_two_trainers_take_their_batches_from_the_same_games_by_their_own_objectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_objectives.py").write_text(OBJECTIVES)
    monkeypatch.chdir(tmp_path)
    town = fake_inference(lambda prompt, index: "<pass/>")
    mafia = fake_inference(lambda prompt, index: "<say>hello</say>")
    task = {**GAME, "pass_counts": 0.25, "other_pass_counts": 1, "other_objective": "my_objectives:talks"}
    with (
        served_run(town, batch_size=16, max_token_len=512) as (town_api, town_url, of_town),
        served_run(mafia, batch_size=4, max_token_len=512) as (mafia_api, mafia_url, of_mafia),
    ):
        config = settings(
            town_api,
            town_url,
            task=task,
            opponent_urls=[mafia_url],
            opponent_rollout_server_url=mafia_api,
            max_tokens=32,
            max_token_length=512,
        )
        async with at_work(config, tiny_tokenizer()):
            own = await asyncio.to_thread(of_town.next_batch, 50)
            other = await asyncio.to_thread(of_mafia.next_batch, 50)
    assert own is not None
    assert other is not None
    assert (len(own), len(other)) == (4, 1)
    assert all(b", mafia" not in bytes(group.tokens[0]) for group in own)
    assert b", mafia" in bytes(other[0].tokens[0])
    assert all(sampled_text(group).startswith(b"<pass/>\0<pass/>\0") for group in own)
    assert sampled_text(other[0]) == b"<say>hello</say>\0" * 3
    assert [group.scores for group in own] == [[0.25] * 4] * 4
    # A statement is legal in the talk, and neither in the vote nor at night; 0.5 more for each.
    assert other[0].scores == [pytest.approx(1 / 3 + 1.5)] * 4


@pytest.mark.slow
@pytest.mark.extended("the first game of two trainers here")
async def test_games_go_on_for_one_trainer_when_the_other_has_its_last_batch() -> None:
    passing = fake_inference(lambda prompt, index: "<pass/>")
    with (
        served_run(passing, batch_size=16, max_token_len=512, num_steps=1) as (api, url, of_town),
        served_api() as other_api,
        RolloutApiSource(other_api) as of_mafia,
    ):
        of_mafia.register(**{**RUN, "batch_size": 4, "max_token_len": 512, "num_steps": 30})
        of_mafia.poll()
        config = settings(
            api,
            url,
            task=GAME,
            opponent_urls=[url],
            opponent_rollout_server_url=other_api,
            max_token_length=512,
            max_batches_offpolicy=1,
        )
        async with at_work(config, tiny_tokenizer()):
            assert await asyncio.to_thread(of_town.next_batch, 50) is not None
            batches = [await asyncio.to_thread(of_mafia.next_batch, 50) for _ in range(8)]
    assert all(batch is not None and len(batch) == 1 for batch in batches)


class Answering:
    """A seat that always gives the same answer."""

    has_room = True

    def __init__(self, answer: str) -> None:
        self._answer = answer

    async def ask(self, text: str) -> str:
        return self._answer


def rewards_of_both(task: Mafia) -> tuple[Sequence[float], Sequence[float]]:
    """Of a game in which the town votes for the mafioso, who passes."""
    item = Item(question="game 0", answer="")
    deal = task.deal(item)
    mafioso = deal.names[[*deal.roles].index("mafia")]  # type: ignore[arg-type]
    town = [Answering(f"<vote>{mafioso}</vote>") for _ in range(4)]
    return asyncio.run(task.play_both(item, town, [Answering("<pass/>")]))


def test_each_side_has_a_reward_of_its_own_from_one_game() -> None:
    task = Mafia(policy_plays="town", max_days=1, win_bonus=2, other_pass_counts=-0.5)
    own, other = rewards_of_both(task)
    assert own == [0.5 + 2] * 4  # a vote in the talk is illegal; then the town wins
    assert other == [-0.5]
    quiet = Mafia(policy_plays="town", max_days=1, objective="talk_little", other_objective="survive")
    assert rewards_of_both(quiet) == (
        [pytest.approx(1.5 - 0.16)] * 4,
        [1.0],
    )  # 16 characters a vote; the mafioso is out
    seen = task.as_others_play()
    assert (seen.policy_plays, seen.win_bonus, seen.pass_counts) == ("mafia", 2, -0.5)
    assert rewards_of_both(Mafia(policy_plays="town", max_days=1))[1] == [1.0]


def test_an_objective_that_fails_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "failing_objectives.py"
    file.write_text(OBJECTIVES)
    task = Mafia(policy_plays="town", max_days=1, objective=f"{file}:breaks")
    with pytest.raises(ConfigError, match=r"breaks failed: ZeroDivisionError: .*failing_objectives.py:7"):
        rewards_of_both(task)
    with pytest.raises(ConfigError, match=r"task.objective: .* has no 'breakz' .did you mean 'breaks'"):
        Mafia(objective=f"{file}:breakz").check_files(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"opponent_urls": ()}, "opponent_rollout_server_url has no effect without opponent_urls"),
        ({"rollout_server_url": "http://h:2"}, "each policy has a trainer and a rollout API of its own"),
        ({"task": {**GAME, "objective": "talks"}}, "objective: 'talks' is none of survive, talk_much, talk_little"),
        ({"task": {"name": "mafia", "other_win_bonus": 2}}, "other_win_bonus has no effect with policy_plays all"),
    ],
)
def test_settings_that_train_no_second_policy_are_refused(changes: dict[str, object], said: str) -> None:
    urls = {"opponent_urls": ["http://h:1"], "opponent_rollout_server_url": "http://h:2"}
    with pytest.raises(ConfigError, match=re.escape(said)):
        validated(EnvironmentConfig, {"model_name": "m", "task": GAME, **urls, **changes}, where="env")
