"""Rewards from processes beside an environment, or beside a trainer that samples itself."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError
from workplace import until

from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.sampling.scoring import end_scoring, rewards_of
from grpo_engine.environments.tasks.base import Item
from grpo_engine.errors import ConfigError, PeerError

ITEM = Item(question="How many?", answer="4")

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    end_scoring()


def environment(code: str, folder: Path, count: int = 2, **changes: Any) -> EnvironmentConfig:
    file = folder / "mine.py"
    file.write_text(f"items = [{{'question': 'How many?', 'answer': '4'}}]\n{code}\n")
    task = {"name": "python", "module": str(file), "functions": ["score"], **changes}
    return EnvironmentConfig.model_validate({"task": task, "model_name": "unused", "scoring_processes": count})


async def all_rewards(config: EnvironmentConfig, *groups: list[str]) -> list[list[float]]:
    return await asyncio.gather(*(rewards_of(config, ITEM, group) for group in groups))


def test_groups_are_scored_by_several_processes_and_none_of_them_is_this_one(tmp_path: Path) -> None:
    scores = tmp_path / "scores"
    scores.mkdir()
    code = f"""
import os, pathlib, time
scores = pathlib.Path({str(scores)!r})
def score(completion):
    (scores / str(os.getpid())).touch()
    while len(os.listdir(scores)) < 2:  # the second process has not begun
        time.sleep(0.01)
    return os.getpid()
"""
    pids = asyncio.run(all_rewards(environment(code, tmp_path), ["a", "b"], ["c", "d"], ["e"]))
    assert all(len(set(of_group)) == 1 for of_group in pids)
    assert len({of_group[0] for of_group in pids}) == 2
    assert os.getpid() not in {of_group[0] for of_group in pids}


def test_rewards_are_those_of_threads(tmp_path: Path) -> None:
    code = "def score(completion, answer): return len(completion) + (completion == answer)"
    groups = (["4", "five", ""], ["", "4"])
    expected = [[2.0, 4.0, 0.0], [0.0, 2.0]]
    assert asyncio.run(all_rewards(environment(code, tmp_path), *groups)) == expected
    assert asyncio.run(all_rewards(environment(code, tmp_path, count=0), *groups)) == expected


def test_the_tokens_of_completions_are_known_there(tmp_path: Path) -> None:
    config = environment("def score(completion_ids): return map(sum, completion_ids)", tmp_path)
    assert asyncio.run(rewards_of(config, ITEM, ["a", "b"], [[5, 6], [7]])) == [11.0, 7.0]


def test_a_reward_that_fails_there_says_where(tmp_path: Path) -> None:
    config = environment("def score(completion):\n    return float(completion)", tmp_path)
    with pytest.raises(ConfigError, match=r"mine\.py:score failed: ValueError: .*mine\.py:3, in score.*'many'"):
        asyncio.run(rewards_of(config, ITEM, ["many"]))


def test_a_process_that_ends_while_it_scores_is_named(tmp_path: Path) -> None:
    config = environment("import os\ndef score(completion): os._exit(1)", tmp_path)
    with pytest.raises(PeerError, match="task mine: one of 2 processes that score ended: it was killed, by the kernel"):
        asyncio.run(rewards_of(config, ITEM, ["4"]))


def test_games_have_no_use_for_them() -> None:
    table = {"task": "guess_number", "model_name": "unused", "scoring_processes": 2}
    with pytest.raises(ValidationError, match="scoring_processes has no effect on guess_number, which is played"):
        EnvironmentConfig.model_validate(table)


PROGRAM = """
import asyncio, sys
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.sampling.scoring import end_scoring, rewards_of
from grpo_engine.environments.tasks.base import Item

task = {"name": "python", "module": sys.argv[1], "functions": ["score"]}
config = EnvironmentConfig.model_validate({"task": task, "model_name": "unused", "scoring_processes": 2})

async def main():
    scoring = asyncio.create_task(rewards_of(config, Item(question="", answer=""), ["4"]))
    await asyncio.to_thread(sys.stdin.readline)
    print(await scoring if scoring.done() or sys.argv[2] == "awaits" else "hangs")

asyncio.run(main())
end_scoring()
"""


@pytest.mark.parametrize("how", [pytest.param("ends", marks=pytest.mark.extended("the same when killed")), "is killed"])
def test_nothing_is_left_of_a_reward_that_never_returns(tmp_path: Path, how: str) -> None:
    file, begun = tmp_path / "mine.py", tmp_path / "begun"
    file.write_text(
        f"import pathlib\nitems = ['How many?']\ndef score(completion):\n    pathlib.Path({str(begun)!r}).touch()\n"
        "    while True: pass"
    )
    argv = [sys.executable, "-P", "-c", PROGRAM, str(file), "ends"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        until(begun.exists)
        children = psutil.Process(process.pid).children()
        if how == "is killed":
            process.send_signal(signal.SIGKILL)
        said, _ = process.communicate("end\n", timeout=120)
    _, alive = psutil.wait_procs(children, timeout=120)
    assert len(children) >= 2
    assert not alive
    assert said == ("hangs\n" if how == "ends" else "")
    assert process.returncode == (0 if how == "ends" else -signal.SIGKILL)


def test_processes_that_score_load_no_module_of_the_working_directory(tmp_path: Path) -> None:
    """They begin as `python -c`, which looks there first; a shared folder may have a module of another user."""
    file, loaded = tmp_path / "mine.py", tmp_path / "loaded"
    file.write_text("items = ['How many?']\ndef score(completion): return 1")
    (tmp_path / "multiprocessing.py").write_text(f"import pathlib\npathlib.Path({str(loaded)!r}).touch()")
    argv = [sys.executable, "-c", f"import sys; sys.path.pop(0)\n{PROGRAM}", str(file), "awaits"]
    done = subprocess.run(argv, cwd=tmp_path, input="end\n", capture_output=True, text=True, timeout=60)
    assert done.stdout == "[1.0]\n", done.stderr
    assert not loaded.exists()
