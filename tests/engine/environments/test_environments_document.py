"""docs/environments.md: its examples run, and its names are settings."""

from __future__ import annotations

import asyncio
import itertools
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

from grpo_engine.config import validated
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.items.source import ItemSource, held_out_items
from grpo_engine.environments.tasks import AnyTask
from grpo_engine.flags import parse_flags

DOCUMENT = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
OF_THE_SERVICE = {"kind", "opponent"}
"""Settings in a profile that are not the environment's own."""
MODULES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", DOCUMENT, re.DOTALL))


@pytest.fixture(autouse=True)
def _in_a_folder_with_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, code in MODULES.items():
        (tmp_path / name).write_text(code)


def flags(*argv: str) -> EnvironmentConfig:
    return parse_flags(EnvironmentConfig, [*argv, "--model-name", "unused"], prog="env", description="")


def test_the_reward_of_ten_lines_has_ten_lines_and_works() -> None:
    assert len([line for line in MODULES["my_rewards.py"].splitlines() if line.strip()]) <= 10
    task = flags("--task", "python:my_rewards.py:score").task
    task.check()
    items = list(itertools.islice(task.items(0), 50))
    assert items == list(itertools.islice(task.items(0), 50))
    assert not {item.question for item in items} & {item.question for item in held_out_items(task, 64)}
    item = items[0]
    assert asyncio.run(task.rewards(item, [f"It is {item.answer} .", "7"])) == [1.0, 0.0]


def test_the_functions_for_trl_are_added_with_their_weights() -> None:
    task = flags("--task", "python:trl_rewards.py:says_it,brief", "--task.weights", "1", "0.5").task
    task.check()
    item = next(task.items(0))
    said = (item.entry or {})["word"]
    assert item.question == f"Say {said}."
    rewards = asyncio.run(task.rewards(item, [said, "?" * 10]))
    assert rewards == [pytest.approx(1 - len(said) / 200), pytest.approx(-0.05)]


def test_the_curriculum_of_ones_own_goes_on_to_the_next_level() -> None:
    config = flags("--task", "arithmetic", "--task.difficulty", "2", "--curriculum", "python:my_order.py:EasiestFirst")
    source = ItemSource(config)
    for number in range(30):
        item = source.next()
        assert item.level == (number >= 20)
        source.result(item, [1.0, 1.0])


def test_the_tables_of_profiles_are_valid() -> None:
    for table in re.findall(r"```toml\n(.*?)```", DOCUMENT, re.DOTALL):
        services = tomllib.loads(table)["services"]
        settings = {name: value for name, value in services["env"].items() if name not in OF_THE_SERVICE}
        validated(EnvironmentConfig, {**settings, "model_name": "unused"}, where="profile")
        for task in re.findall(r"^# task = (.*)", table, re.MULTILINE):
            validated(EnvironmentConfig, {**tomllib.loads(f"task = {task}"), "model_name": "unused"}, where="profile")


def test_an_error_looks_as_the_document_shows() -> None:
    Path("failing.py").write_text("items = ['a'] * 2\ndef score(completion): return float(completion)\n")
    task = flags("--task", "python:failing.py:score").task
    with pytest.raises(ValueError) as caught:  # noqa: PT011  its words are compared below
        asyncio.run(task.rewards(next(task.items(0)), ["many"]))
    shown = DOCUMENT.partition("task.functions: my_rewards:score failed: ")[2].partition("```")[0].replace("\n", " ")
    for part in ("ValueError: could not convert string to float: 'many' (", "in score), question", "completion 'many'"):
        assert part in shown
        assert part in str(caught.value)
    assert str(caught.value).endswith(shown.partition("completion 'many'")[2].strip())


def test_every_task_and_setting_that_is_named_is_there() -> None:
    tasks: tuple[Any, ...] = get_args(get_args(AnyTask)[0])
    names = {task.model_fields["name"].default for task in tasks}
    table = DOCUMENT.partition("|---|")[2].partition("\n\n")[0]
    listed = {name for line in table.splitlines()[1:] for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert listed <= names
    settings = {"help", "config", *EnvironmentConfig.model_fields}
    of_our_environments = DOCUMENT.partition("## Atropos environments")[0]
    of_our_environments = re.sub(r"`grpo-tui [^`]*`|^grpo-tui .*", "", of_our_environments, flags=re.MULTILINE)
    own = {setting for task in tasks for setting in task.model_fields}
    for flag in re.findall(r"--([a-z][\w.-]*)", of_our_environments):
        name = flag.replace("-", "_")
        assert name in settings | {f"task.{setting}" for setting in own}, flag
