"""Which items are sampled: curriculum, filter by solve rate, and the state that a restart keeps."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import environment_runs
import pytest
from environment_runs import served_run
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_fakes import REGISTRATION, FakeTokenizer, fake_inference, served, served_api

from grpo_engine.config import validated
from grpo_engine.data.source import RolloutApiSource
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.items.curriculum import Climb, OwnCurriculum, Rising
from grpo_engine.environments.items.difficulty import DifficultyFilter, SolveRates
from grpo_engine.environments.items.source import ItemSource, held_out_items
from grpo_engine.environments.main import work
from grpo_engine.environments.tasks import AnyTask
from grpo_engine.environments.tasks.base import Item, Task, belongs_to
from grpo_engine.environments.tasks.puzzles import Arithmetic
from grpo_engine.environments.tasks.python.reward_functions import RewardFailed
from grpo_engine.errors import ConfigError
from grpo_engine.flags import parse_flags, to_flags
from grpo_engine.wire.rollouts import ScoredGroup


def config(**settings: Any) -> EnvironmentConfig:
    table = {"task": {"name": "arithmetic", "difficulty": 3}, "model_name": "unused", **settings}
    return validated(EnvironmentConfig, table, where="profile")


def few_items(tmp_path: Path, count: int = 3) -> dict[str, Any]:
    """A task with so few items that each comes again and again."""
    path, other = tmp_path / "train.jsonl", tmp_path / "other.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}?", "answer": "1"}) + "\n" for n in range(count)))
    other.write_text(json.dumps({"question": "held out", "answer": "1"}))
    return {"name": "jsonl", "path": str(path), "held_out_path": str(other)}


def level(number: int) -> Iterator[Item]:
    return (Item(question=f"{number}.{count}", answer="", level=number) for count in itertools.count())


def climb(**settings: Any) -> Climb:
    return Rising(**settings).make([level(0), level(1), level(2)], seed=0)


# --- curriculum ------------------------------------------------------------------------------------------------------


def test_the_next_level_begins_when_a_full_window_is_good_enough() -> None:
    rising = climb(threshold=0.5, window=3, review=0)
    for score in (1.0, 1.0):
        rising.result(rising.next(), [score])
        assert rising.level == 0
    rising.result(rising.next(), [0.0, 0.0])
    assert rising.level == 1  # 2/3
    assert rising.next().level == 1
    assert rising.told() == "level 2 of 3"


def test_only_the_newest_groups_of_the_level_itself_count() -> None:
    rising = climb(threshold=1.0, window=2, review=0)
    easy = rising.next()
    for score in (0.0, 1.0):
        rising.result(easy, [score])
    assert rising.level == 0
    rising.result(easy, [1.0])
    assert rising.level == 1
    for _ in range(5):
        rising.result(easy, [1.0])  # groups of the level before that were not finished
    assert rising.level == 1


def test_the_last_level_is_not_left() -> None:
    rising = climb(threshold=0.0, window=1, review=0)
    for _ in range(9):
        rising.result(rising.next(), [1.0])
    assert rising.level == 2


def test_lower_levels_are_reviewed_at_the_given_rate() -> None:
    rising = climb(threshold=0.0, window=1, review=0.25)
    for _ in range(2):
        rising.result(Item(question="", answer="", level=rising.level), [1.0])
    levels = [rising.next().level for _ in range(2000)]
    assert 0.2 < sum(number < 2 for number in levels) / 2000 < 0.3
    assert set(levels) == {0, 1, 2}


@given(st.lists(st.floats(-1, 1), max_size=60), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_the_same_results_give_the_same_items(scores: list[float], seed: int) -> None:
    def asked() -> list[str]:
        source = ItemSource(config(curriculum={"name": "rising", "window": 4, "threshold": 0.2}, seed=seed))
        questions = []
        for score in scores:
            item = source.next()
            questions.append(item.question)
            source.result(item, [score, score])
        return questions

    assert asked() == asked()


def digits(item: Item) -> int:
    return len(item.question.split()[2])


def test_sums_grow_with_the_policy_up_to_the_tasks_difficulty_and_evaluations_stay() -> None:
    settings = config(curriculum={"name": "rising", "threshold": 0.9, "window": 2, "review": 0.2})
    before = held_out_items(settings.task, 64)
    source = ItemSource(settings)
    seen = []
    for _ in range(300):
        item = source.next()
        seen.append(digits(item))
        assert belongs_to("train", item.question)  # whatever its level
        source.result(item, [1.0, 1.0])
    assert seen[:2] == [1, 1]
    assert max(seen) == 3
    assert seen[-50:].count(3) > 25
    assert held_out_items(settings.task, 64) == before
    assert {digits(item) for item in before} == {3}
    assert source.progress() == "level 3 of 3"


def test_rising_on_a_task_of_one_level_logs_which_tasks_have_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = ItemSource(config(task="sort6", curriculum="rising"))
    assert "curriculum: no effect: task sort6 has one level" in caplog.text
    for kind in typing.get_args(typing.get_args(AnyTask)[0]):
        if kind.levels is not Task.levels:
            assert kind.model_fields["name"].default in caplog.text
    assert source.next().question.startswith("sort")


OWN = """
class HardestFirst:
    def __init__(self, levels, seed):
        self.levels, self.level = levels, len(levels) - 1
    def next(self):
        return next(self.levels[self.level])
    def result(self, item, scores):
        if max(scores) == 0 and self.level: self.level -= 1
    def state(self):
        return self.level
    def restore(self, state):
        self.level = state

class Forgetful:
    def __init__(self, levels, seed): self.item = next(levels[0])
    def next(self): return self.item
    def result(self, item, scores): pass

class Wrong(Forgetful):
    def next(self): return "what is 3 + 4?"

class Unsaveable(Forgetful):
    def state(self): return object()

class Failing(Forgetful):
    def next(self): return self.missing

def nothing(levels, seed): return 5
def broken(levels): pass
"""


@pytest.fixture
def module(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def test_a_users_curriculum_gets_the_results_and_its_state_survives_a_restart(module: str, tmp_path: Path) -> None:
    settings = config(curriculum=f"python:{module}:HardestFirst", state_file=str(tmp_path / "state.json"))
    source = ItemSource(settings)
    assert digits(source.next()) == 3
    source.result(source.next(), [0.0, 0.0])
    assert digits(source.next()) == 2
    source.save()
    assert digits(ItemSource(settings).next()) == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Hardest", r"has no 'Hardest' \(did you mean 'HardestFirst'\?\)"),
        ("nothing", r"own\.py:nothing returned a int without a method next\(\)"),
        ("broken", r"own\.py:broken failed: TypeError: .* takes 1 positional argument but 2 were given"),
        ("Failing", r"next\(\) failed: AttributeError: .*missing.* \(.*own\.py:\d+, in next\)"),
        ("Wrong", r"next\(\) returned 'what is 3 \+ 4\?', which is not an Item: draw it from"),
    ],
)
def test_an_object_that_is_no_curriculum_is_refused(module: str, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ItemSource(config(curriculum=f"python:{module}:{name}")).next()


def test_a_state_that_cannot_be_written_is_reported_at_the_start(module: str, tmp_path: Path) -> None:
    settings = config(curriculum=f"python:{module}:Unsaveable", state_file=str(tmp_path / "state.json"))
    with pytest.raises(ConfigError, match=r"curriculum: state\(\) returned a value that is not JSON: .*object"):
        ItemSource(settings)


# --- difficulty ------------------------------------------------------------------------------------------------------


def test_items_too_easy_or_too_hard_are_skipped_and_counted(tmp_path: Path) -> None:
    source = ItemSource(config(task=few_items(tmp_path), easy_threshold=1, hard_threshold=0, revisit_rate=0.1))
    mean = {"0?": [1.0, 1.0], "1?": [1.0, 0.0], "2?": [0.0, 0.0]}
    asked = []
    for _ in range(1500):
        item = source.next()
        asked.append(item.question)
        source.result(item, mean[item.question])
    share = {question: asked.count(question) / 1500 for question in mean}
    assert share["1?"] > 0.75  # 1 / 1.2
    assert 0.04 < share["0?"] < 0.13
    assert 0.04 < share["2?"] < 0.13
    counts = [int(word) for word in source.progress().split() if word.isdigit()]
    assert len(counts) == 2
    assert all(count > 500 for count in counts)
    assert source.progress().endswith("skipped as too hard")


def test_without_thresholds_all_items_are_sampled_equally(tmp_path: Path) -> None:
    source = ItemSource(config(task=few_items(tmp_path)))
    asked = []
    for _ in range(30):
        item = source.next()
        asked.append(item.question)
        source.result(item, [0.0, 0.0])
    assert {asked.count(question) for question in ("0?", "1?", "2?")} == {10}
    assert source.progress() == ""


def test_an_item_that_is_solved_again_is_admitted_again() -> None:
    rates = SolveRates()
    chosen = DifficultyFilter(rates, easy=1.0, hard=0.0, revisit_rate=0.0, seed=0)
    item = Item(question="x", answer="")
    assert chosen.admits(item)
    rates.add(item, [0.0] * 8)
    assert not chosen.admits(item)
    rates.add(item, [1.0] + [0.0] * 7)  # when it was sampled for a revisit
    assert chosen.admits(item)
    for _ in range(3):
        rates.add(item, [0.0] * 8)
        assert chosen.admits(item)
    rates.add(item, [0.0] * 8)
    assert not chosen.admits(item)
    assert (chosen.num_easy, chosen.num_hard) == (0, 2)


def test_if_every_item_is_filtered_one_is_sampled_anyway(tmp_path: Path) -> None:
    source = ItemSource(config(task=few_items(tmp_path), hard_threshold=0, revisit_rate=0))
    for _ in range(20):
        source.result(source.next(), [0.0])
    assert source.progress() != ""


def test_of_a_state_with_more_items_than_are_kept_the_newest_are_taken() -> None:
    """Else each save, every 30 s, would write the millions of items of a file from elsewhere again."""
    rates = SolveRates(max_items=3)
    rates.restore({str(number): [number / 10] for number in range(9)})
    assert rates.state() == {"6": [0.6], "7": [0.7], "8": [0.8]}


@given(st.lists(st.tuples(st.integers(0, 20), st.floats(0, 1)), max_size=200), st.integers(1, 10))
@settings(max_examples=50, deadline=None)
def test_solve_rates_are_kept_for_the_newest_items_only(results: list[tuple[int, float]], bound: int) -> None:
    rates = SolveRates(max_items=bound)
    newest: list[int] = []
    for number, score in results:
        rates.add(Item(question=str(number), answer=""), [score])
        newest = [*[other for other in newest if other != number], number][-bound:]
    assert len(rates) == len(newest)
    for number in range(21):
        rate = rates.of(Item(question=str(number), answer=""))
        if number not in newest:
            assert rate is None
    if results:
        last, score = results[-1]
        rate = rates.of(Item(question=str(last), answer=""))
        assert rate is not None
        assert 0 <= rate <= 1


# --- over restarts ---------------------------------------------------------------------------------------------------


def test_level_and_solve_rates_survive_a_restart_with_another_order_of_items(tmp_path: Path) -> None:
    settings = config(
        curriculum={"name": "rising", "threshold": 1, "window": 1, "review": 0},
        easy_threshold=1,
        state_file=str(tmp_path / "new" / "state.json"),
    )
    first = ItemSource(settings)
    first.result(first.next(), [1.0])
    second_level = [first.next().question for _ in range(9)]
    first.result(Item(question="x", answer="", level=1), [0.5])
    first.save()
    again = ItemSource(settings)
    assert again.progress() == "level 2 of 3"
    assert again._rates.of(Item(question="x", answer="", level=1)) == 0.5
    assert [again.next().question for _ in range(9)] != second_level


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
def test_items_go_on_after_those_that_were_used(tmp_path: Path, is_killed: bool) -> None:
    settings = config(task="arithmetic", state_file=str(tmp_path / "state.json"))
    undisturbed = ItemSource(settings.model_copy(update={"state_file": None}))
    expected = [undisturbed.next().question for _ in range(300)]
    first = ItemSource(settings)
    assert [first.next().question for _ in range(100)] == expected[:100]
    first.save()  # as it is done every half minute
    if not is_killed:
        first.close()
    goes_on_at = 128 if is_killed else 100  # two reservations of 64
    again = ItemSource(settings)
    assert [again.next().question for _ in range(50)] == expected[goes_on_at : goes_on_at + 50]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ("{}", "cannot be read"),
        ('{"owner": "x"}', "belongs to another"),
    ],
)
def test_a_foreign_state_file_is_reported_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str, words: str
) -> None:
    path = tmp_path / "state.json"
    path.write_text(content)
    source = ItemSource(config(state_file=str(path)))
    assert words in caplog.text
    assert "starting without it" in caplog.text
    assert digits(source.next()) == 3
    assert json.loads(path.read_text())["owner"] != "x"


# --- settings --------------------------------------------------------------------------------------------------------


def test_a_curriculum_has_a_short_form_and_survives_the_conversion_to_flags() -> None:
    assert config(curriculum="rising").curriculum == Rising()
    assert config(curriculum="python:my.order:Own").curriculum == OwnCurriculum(module="my.order", object="Own")
    for each in (config(), config(curriculum={"name": "rising", "window": 5}), config(curriculum="python:a:b")):
        assert parse_flags(EnvironmentConfig, to_flags(each), prog="env", description="") == each
    with pytest.raises(ConfigError, match=r"curriculum\.name: 'raising' is not one of .*did you mean 'rising'"):
        config(curriculum="raising")
    with pytest.raises(ConfigError, match=r"easy_threshold 0\.0 must be above hard_threshold 0\.0"):
        config(easy_threshold=0, hard_threshold=0)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_is_that_of_the_items_of_the_task_for_the_seed(seed: int) -> None:
    source = ItemSource(config(seed=seed))
    expected = [item.question for item in itertools.islice(Arithmetic(difficulty=3).items(seed), 20)]
    assert [source.next().question for _ in range(20)] == expected


def test_the_global_random_state_is_not_used() -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    source = ItemSource(config(curriculum="rising", easy_threshold=1))
    source.result(source.next(), [1.0])
    assert random.random() == expected


def test_an_error_of_the_items_is_raised_at_every_later_call(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def items():\n  yield 'a', 'b'\n  1 / 0\ndef score(completion): return 1")
    source = ItemSource(config(task=f"python:{tmp_path}/mine.py:score"))
    source.next()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"items failed: ZeroDivisionError.*mine\.py:3"):
            source.next()


# --- in a running environment ----------------------------------------------------------------------------------------


async def worked(tmp_path: Path, num_batches: int, **changes: Any) -> list[ScoredGroup]:
    """The groups of an environment whose model adds correctly."""
    fake = fake_inference(lambda prompt, index: str(sum(int(word) for word in re.findall(r"\d+", prompt))))
    with served_api() as api, served(fake) as inference:
        table = {"group_size": 2, "max_tokens": 8, "rollout_server_url": api, "inference_url": inference}
        fetching = asyncio.create_task(asyncio.to_thread(fetched, api, num_batches))
        async with asyncio.timeout(60):
            assert await work(config(**table, total_steps=num_batches, **changes), FakeTokenizer()) == 0
            return await fetching


def fetched(url: str, num_batches: int) -> list[ScoredGroup]:
    """The groups of some batches, as a trainer fetches them."""
    with RolloutApiSource(url) as source:
        source.register(**{**REGISTRATION, "num_steps": num_batches})
        batches = [source.next_batch(timeout_s=50) for _ in range(num_batches)]
    return [group for batch in batches for group in batch or ()]


@pytest.mark.slow
async def test_an_environment_follows_its_curriculum_and_saves_its_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    rising = {"name": "rising", "threshold": 1.0, "window": 2, "review": 0}
    # One batch of two groups ahead: more of them, begun together, might all be of a level that they leave behind.
    ahead = {"max_batches_offpolicy": 1, "state_file": str(tmp_path / "state.json")}
    groups = await worked(tmp_path, 12, curriculum=rising, **ahead)
    operands = ["".join(map(chr, group.tokens[0])).split()[2] for group in groups]
    assert len(operands[0]) == 1
    assert max(map(len, operands)) == 3
    assert "curriculum: level 3 of 3" in caplog.text
    assert json.loads((tmp_path / "state.json").read_text())["curriculum"]["level"] == 2


@pytest.mark.slow
async def test_an_environment_trains_on_a_users_reward_function(tmp_path: Path) -> None:
    code = "items = ['What is 3 + 4?'] * 3\nasync def twice(completion): return 2 * int(completion)"
    (tmp_path / "sums.py").write_text(code)
    groups = await worked(tmp_path, 1, task=f"python:{tmp_path}/sums.py:twice")
    assert [group.scores for group in groups] == [[14.0, 14.0]] * 2


@pytest.mark.slow
async def test_a_reward_function_that_fails_ends_the_environment_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("items = ['What is 3 + 4?'] * 3\ndef score(completion): return {}[completion]")
    task = f"python:{tmp_path}/broken.py:score"
    with served_run(fake_inference(lambda prompt, index: "7")) as (api, inference, _):
        async with asyncio.timeout(60):
            with pytest.raises(RewardFailed, match=r"score failed: KeyError: '7' \(.*broken\.py:2, in score\)"):
                await work(environment_runs.settings(api, inference, task=task), FakeTokenizer())
