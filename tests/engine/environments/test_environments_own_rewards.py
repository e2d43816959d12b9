"""Reward functions of a user: import, arguments, errors, items, functions of TRL, settings."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from pydantic import TypeAdapter

from grpo_engine.config import validated
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.items.source import held_out_items
from grpo_engine.environments.tasks import AnyTask, spell_out
from grpo_engine.environments.tasks.base import Item
from grpo_engine.environments.tasks.python import reward_functions
from grpo_engine.environments.tasks.python.reading import check_attribute
from grpo_engine.environments.tasks.python.reward_functions import RewardFailed
from grpo_engine.environments.tasks.python.task import Python
from grpo_engine.errors import ConfigError
from grpo_engine.flags import parse_flags, to_flags

needs_trl = pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="the `peers` extra")

SUM = {"question": "What is 2 + 2?", "answer": "4"}
ITEM = Item(question="What is 2 + 2?", answer="4", entry=SUM)

Write = Callable[..., str]


@pytest.fixture(autouse=True)
def _restores_sys_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of tests, one of which has a `json.py`, are not for the processes of later tests."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a module with some items and more; returns the path of its file."""

    def of(code: str, name: str = "mine.py") -> str:
        items = f"items = [dict({SUM!r}, number=n, question=f'{{n}}?', answer=str(n)) for n in range(40)]\n"
        (tmp_path / name).write_text(items + dedent(code))
        return str(tmp_path / name)

    return of


def own(module: str, *functions: str, **settings: Any) -> Python:
    return Python(module=module, functions=functions or ("score",), **settings)


def scored(task: AnyTask, *completions: str, item: Item = ITEM) -> list[float]:
    return asyncio.run(task.rewards(item, completions))


# --- import ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_module_in_the_current_folder_is_found_by_the_command_itself(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text("def score(completion, answer): return completion == answer\nitems = []\n")
    flags = ["env", "--task", "python:my_rewards:score", "--model-name", "none"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "grpo_engine", *flags], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert "my_rewards:items" in done.stderr  # the module is there; that it gives no items is what is wrong
    assert done.returncode == 2


def test_a_package_of_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "rewards.py").write_text("def score(completion): return len(completion)\n")
    assert scored(own("own_package.rewards"), "abc") == [3.0]
    assert own("own_package.rewards").label() == "rewards"


def test_a_file_named_like_a_standard_module_is_imported_by_its_path_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("def score(completion): return 1\n")
    with pytest.raises(
        ConfigError,
        match=r"'json' is a standard module of Python and hides .*/json\.py: write .*json\.py, or rename the file",
    ):
        own("json").check()
    assert scored(own("json.py"), "x") == [1.0]
    assert json.loads("[1]") == [1]


def test_a_misspelt_module_is_named_with_the_nearest_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").touch()
    with pytest.raises(ConfigError, match=r"no module 'my_reward' \(did you mean 'my_rewards'\?\), neither in .* nor"):
        own("my_reward").check()


def test_a_name_that_a_file_lacks_is_refused_with_the_path_once(tmp_path: Path) -> None:
    (file := tmp_path / "mine.py").write_text("def right(completion): return 1\n")
    with pytest.raises(ConfigError) as refused:
        check_attribute(str(file), "rihgt", [tmp_path], where="task.functions")
    assert str(refused.value).startswith(f"task.functions: {file} has no 'rihgt' (did you mean 'right'?): ")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def scores(completion): return 1", r"has no 'score' \(did you mean 'scores'\?\)"),
        ("import nothing_like_it", r"cannot be imported: ModuleNotFoundError: .* \(.*mine\.py:2, in <module>\)"),
        ("import sys\nsys.exit(3)", r"cannot be imported: SystemExit: 3 \(.*mine\.py:3, in <module>\)"),
        ("1 / 0", r"cannot be imported: ZeroDivisionError: division by zero \(.*mine\.py:2, in <module>\)"),
        ("def score(:", r"cannot be imported: SyntaxError: .* \(.*mine\.py:2\)"),
        ("score = 5", "mine.py:score is a int, not a function with named parameters"),
        ("def score(completion, gold, more): return 1", "has an unknown parameter 'more': available are"),
        ("def score(completion, numbre): return 1", r"has an unknown parameter 'numbre' \(did you mean 'number'\?\)"),
        (
            "def score(completions, trainer_state, **kwargs): return 1",
            "'trainer_state' of TRL, which is not passed here: use question",
        ),
        ("del items\ndef score(completion): return 1", "has no 'items': define it .* or a file as task.path"),
        ("def score(answer): return 1", "has no parameter for the completion: add `completion`"),
        ("def score(completion): return undefined", r"failed: NameError: .*undefined.* \(.*mine\.py:2, in score\)"),
        ("def score(completion): return float(completion)", "ValueError: .*float.*, completion 'I do not know.'"),
        ("def score(completions): return [1.0]", "returned 1 rewards for 2 completions"),
        ("items = []\ndef score(completion): return 1", "mine.py:items has no train record"),
        (
            "def items(): 1 / 0\ndef score(completion): return 1",
            r"items failed: ZeroDivisionError.*mine\.py:2, in items",
        ),
        (
            "async def items(): yield\ndef score(completion): return 1",
            "must be items, or a function that returns or yields them, and not async",
        ),
        (
            "items = [{'quest': 'x'}]\ndef score(completion): return 1",
            r"items\[0\]: no field 'question' \(did you mean",
        ),
    ],
)
def test_errors_of_a_module_are_reported_before_any_server_is_contacted(write: Write, code: str, words: str) -> None:
    file = write(code)
    with pytest.raises(ConfigError, match=words):
        own(file).check()


SEVERAL = """
talk = [dict(role=role, content=role[0]) for role in ("system", "user", "assistant", "user")]
items = [{"prompt": talk, "n": n} for n in range(40)]
odd = [{"prompt": [*talk, dict(role="tool", content="9")]}]
def score(completions, prompts, **kwargs): return [len(prompts[0]) == 4 == len(prompts[1])] * len(completions)
"""


def test_a_prompt_of_several_messages_is_asked_as_it_is(write: Write) -> None:
    task = own(write(SEVERAL))
    task.check()
    item = next(task.items(0))
    assert (item.question, item.before) == ("u", (("system", "s"), ("user", "u"), ("assistant", "a")))
    with pytest.raises(ConfigError, match=r"odd\[0\]: a prompt of the messages .*, 'tool'\) is not supported"):
        own(write(SEVERAL), items_from="odd").check()


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def score(completion, answer): return completion == answer", [1.0, 0.0]),
        ("def score(completion): return len(completion) / 2", [0.5, 1.0]),
        ("def score(text, gold): return text == gold", [1.0, 0.0]),
        ("def score(text, *, answer): return text == answer", [1.0, 0.0]),
        ("async def score(completion, answer): return completion == answer", [1.0, 0.0]),
        ("def score(completion, question, entry, item): return question == entry['question'] == item.question", [1, 1]),
        ("def score(completion, **fields): return fields['answer'] == completion", [1.0, 0.0]),
        ("def score(completion, tolerance=0.5): return tolerance", [0.5, 0.5]),
        ("class Judge:\n  def __call__(self, completion): return 2\nscore = Judge()", [2.0, 2.0]),
        ("class Judge:\n  async def __call__(self, completion): return 2\nscore = Judge()", [2.0, 2.0]),
        ("score = lambda completion, answer: completion == answer", [1.0, 0.0]),
        ("import numpy\ndef score(completions): return numpy.array([len(c) for c in completions])", [1.0, 2.0]),
        ("import torch\ndef score(completions, **kwargs): return torch.tensor([1, 0])", [1.0, 0.0]),
        ("def score(completions, answer): return [c == a for c, a in zip(completions, answer)]", [1.0, 0.0]),
        ("def score(prompts, completions, question, **k): return [p == q for p, q in zip(prompts, question)]", [1, 1]),
        ("def score(completion_ids): return [len(ids) for ids in completion_ids]", [1.0, 2.0]),
        ("def score(completions, log_metric, log_extra=None, **k): log_metric('a', 1); return [1, 2]", [1.0, 2.0]),
    ],
)
def test_a_function_gets_arguments_by_parameter_name(write: Write, code: str, expected: list[float]) -> None:
    assert scored(own(write(code)), "4", "17") == expected


def test_several_functions_are_added_with_their_weights_and_none_does_not_count(write: Write) -> None:
    file = write("""
        def right(completion, answer): return completion == answer
        def brief(completions, **kwargs): return [None if c == "4" else -len(c) for c in completions]
    """)
    task = own(file, "right", "brief", weights=(2.0, 0.5))
    assert scored(task, "4", "four") == [2.0, -2.0]
    with pytest.raises(ValueError, match="1 entries for 2 functions"):
        own(file, "right", "brief", weights=(2.0,))


BLOCKING = """
    import threading
    may_go_on, has_begun = threading.Event(), threading.Event()
    def score(completion):
        has_begun.set()
        return may_go_on.wait(20)
"""


def loaded_module(task: Python, file: str) -> Any:
    next(task.items(0))
    return next(module for module in list(sys.modules.values()) if getattr(module, "__file__", None) == file)


async def until_set(event: threading.Event) -> None:
    while not event.is_set():  # noqa: ASYNC110  an event of threads, which must not block this event loop
        await asyncio.sleep(0)


@pytest.mark.parametrize("definition", ["def score", "async def score"])
async def test_a_function_that_blocks_does_not_block_the_event_loop(write: Write, definition: str) -> None:
    file = write(BLOCKING.replace("def score", definition))
    task = own(file)
    module = loaded_module(task, file)
    scoring = asyncio.create_task(task.rewards(ITEM, ["x"]))
    await until_set(module.has_begun)
    module.may_go_on.set()
    assert await scoring == [1.0]


async def test_a_cancelled_scoring_does_not_affect_the_next_one(write: Write) -> None:
    file = write(BLOCKING)
    task = own(file)
    module = loaded_module(task, file)
    cancelled = [asyncio.create_task(task.rewards(ITEM, ["x"])) for _ in range(3)]  # one runs, two wait
    await until_set(module.has_begun)
    for scoring in cancelled:
        scoring.cancel()
    await asyncio.wait(cancelled)
    module.may_go_on.set()
    assert await task.rewards(ITEM, ["x"]) == [1.0]


def test_plain_functions_are_called_one_at_a_time_unless_threads_are_given(write: Write) -> None:
    code = """
        import threading
        both = threading.Barrier(2)
        def score(completion): return both.wait(60) >= 0
    """
    assert scored(own(write(code), threads=2), "a", "b") == [1.0, 1.0]
    alone = """
        import threading
        only = threading.Lock()
        def score(completion):
            with_it = only.acquire(blocking=False)
            only.release()
            return with_it
    """
    assert scored(own(write(alone, "alone.py")), *"abcdefgh") == [1.0] * 8


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "def score(completion): return int(completion)",
            r"failed: ValueError: invalid literal.*mine\.py:2, in score\)",
        ),
        ("def score(completion): return float('nan')", r"score returned nan, question .*: a reward must be finite"),
        ("def score(completion): return '1.0'", r"score returned '1\.0', .*: a reward must be a number"),
        ("def score(completion): return [1.0]", r"score returned \[1\.0\], .*: a reward must be a number"),
        (
            "def score(completion): return None",
            r"score returned None, so there is no reward, question 'What is 2 \+ 2\?'",
        ),
        ("def score(completion): pass", "returned None"),
        ("def score(completions): return 1.0", r"returned 1\.0 instead of a list of 2 rewards"),
        ("def score(completions): return [1.0]", "returned 1 rewards for 2 completions"),
        (
            "def score(completions): return [1.0, None]",
            "returned None, so there is no reward, .*completion 'seventeen'",
        ),
        ("async def score(completion): raise KeyError('x')", r"failed: KeyError: 'x' \(.*mine\.py:2, in score\)"),
        ("import json\ndef score(completion): return json.loads('{')", r"JSONDecodeError.*mine\.py:3, in score\)"),
        (
            "import threading\ndef score(completion): threading.Event().wait(60)",
            r"not returned within 0\.1 s: raise task\.timeout_s",
        ),
        ("import asyncio\nasync def score(completion): await asyncio.sleep(9)", r"not returned within 0\.1 s"),
    ],
)
def test_errors_of_a_function_name_line_and_item_or_get_the_error_reward(write: Write, code: str, words: str) -> None:
    file = write(code)
    limit = {"timeout_s": 0.1} if "not returned" in words else {}  # a thread may begin later than that
    with pytest.raises(RewardFailed, match=words) as caught:
        scored(own(file, **limit), "x", "seventeen")
    assert "What is 2 + 2?" in str(caught.value) or "not returned" in str(caught.value)
    assert "set task.error_reward" in str(caught.value)
    instead = scored(own(file, **limit, error_reward=-1.0), "x", "seventeen")
    assert instead == ([1.0, -1.0] if code.endswith("[1.0, None]") else [-1.0, -1.0])


def test_failing_completions_are_logged_at_growing_intervals(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    task = own(write("def score(completion): return int(completion)"), error_reward=0.0)
    assert sum(scored(task, *["x"] * 99)) == 0
    assert [f"(time {count})" in record.getMessage() for record, count in zip(caplog.records, (1, 10), strict=True)]
    assert "in score), question 'What is 2 + 2?', answer '4', completion 'x'" in caplog.records[0].getMessage()


def test_a_slow_function_is_named_with_its_seconds(
    write: Write, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_functions, "_SLOW_S", -1.0)
    file = write("def score(completion): return 1\nasync def judge(completion): return 1")
    scored(own(file, "score", "judge"), *["x"] * 5)
    first, tenth = caplog.messages
    assert re.search(r"mine\.py:(score|judge) took \d+\.\d s \(slow call 1\)", first)
    assert "(slow call 10)" in tenth


async def test_a_function_that_hangs_is_named_before_its_time_limit(
    write: Write, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_functions, "_HANGING_S", 0.01)
    file = write(BLOCKING)
    task = own(file)
    module = loaded_module(task, file)
    scoring = asyncio.create_task(task.rewards(ITEM, ["x"]))
    while not caplog.messages:  # noqa: ASYNC110
        await asyncio.sleep(0)
    module.may_go_on.set()
    await scoring
    assert "mine.py:score has not returned for 0.01 s" in caplog.messages[0]
    assert "after 60 s (task.timeout_s) it has failed" in caplog.messages[0]


# --- items -----------------------------------------------------------------------------------------------------------

SCORE = "\ndef score(completion): return 1\n"


def questions(task: AnyTask, split: Any, count: int, seed: int = 0) -> list[str]:
    return [item.question for item in itertools.islice(task.items(seed, split), count)]


@pytest.mark.parametrize(
    "code",
    [
        "items = [{'question': str(n), 'answer': 'a'} for n in range(64)]",
        "items = [(str(n), 'a') for n in range(64)]",
        "items = [str(n) for n in range(64)]",
        "def items(): return [{'prompt': str(n)} for n in range(64)]",
        "def items(seed): return [{'prompt': [{'role': 'user', 'content': str(n)}]} for n in range(64)]",
        "def items():\n  for n in range(64): yield str(n), 'a'",
        "from grpo_engine.environments.tasks.base import Item\n"
        "items = [Item(question=f'{n}', answer='') for n in range(64)]",
    ],
)
def test_one_question_in_sixteen_is_held_out_of_what_a_module_gives(write: Write, code: str) -> None:
    task = own(write(code + SCORE))
    train, held_out = set(questions(task, "train", 200)), set(questions(task, "held_out", 60))
    assert train | held_out == {str(n) for n in range(64)}
    assert not train & held_out
    assert {item.question for item in held_out_items(task, 64)} == held_out


@pytest.mark.parametrize(
    "code",
    [
        "def items(split): return ['a', 'b', 'c'] if split == 'train' else ['c', 'd']",
        "items = {'train': ['a', 'b', 'c'], 'test': ['c', 'd']}",
        "def items(): return {'train': ['a', 'b', 'c'], 'held_out': ['c', 'd']}",
        "def items(split):\n  if split == 'held_out': return ['c', 'd']\n  return iter(['a', 'b', 'c'])",
    ],
)
def test_held_out_items_of_a_module_are_not_trained_on(write: Write, code: str) -> None:
    task = own(write(code + SCORE))
    assert set(questions(task, "train", 9)) == {"a", "b"}
    assert set(questions(task, "held_out", 9)) == {"c", "d"}


def test_a_generator_gets_seed_and_split_and_keeps_its_order(write: Write) -> None:
    code = (
        "import itertools\ndef items(seed, split):\n  for n in itertools.count(): yield f'{split} {seed} {n}'" + SCORE
    )
    task = own(write(code))
    assert questions(task, "train", 3, seed=5) == ["train 5 0", "train 5 1", "train 5 2"]
    assert questions(task, "held_out", 2, seed=7) == ["held_out 7 0", "held_out 7 1"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def items():\n  yield 'a'", "has no held_out item"),
        ("items = (q for q in ['a'])", "has no held_out item, or can be iterated only once"),
        ("def items():\n  while True: yield 'a'", "has no held_out item"),
        ("items = {'validation': ['a']}", "has the splits validation: one of them must be called train"),
        ("items = 5", "returned 5: it must be items"),
        ("items = [5]", r"items\[0\]: 5 is not an item: give a dict with 'question'"),
        ("items = [{'prompt': [{'role': 'assistant', 'content': 'a'}]}]", r"messages \('assistant'\) is not supported"),
    ],
)
def test_unusable_items_are_refused_with_the_reason(write: Write, code: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        next(own(write(code + SCORE)).items(0, "held_out"))


def test_items_come_from_files_with_any_fields(write: Write, tmp_path: Path) -> None:
    records = [{"problem": f"{n}?", "solution": n, "unit": "m"} for n in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "test.jsonl").write_text(json.dumps(records[3]))
    task = own(
        write("def score(completion, solution, unit): return completion == f'{solution} {unit}'"),
        path=tmp_path / "train.jsonl",
        held_out_path=tmp_path / "test.jsonl",
        question_field="problem",
        answer_field="solution",
    )
    task.check()
    assert set(questions(task, "train", 20)) == {f"{n}?" for n in range(8) if n != 3}
    item = next(task.items(0, "held_out"))
    assert (item.question, item.answer) == ("3?", "3")
    assert scored(task, "3 m", "3 s", item=item) == [1.0, 0.0]


# --- of TRL ----------------------------------------------------------------------------------------------------------


@needs_trl
@pytest.mark.slow
def test_a_reward_function_of_trl_is_used_as_it_is(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "What is 1/2 + 1/4?"}]
    records = [{"prompt": prompt, "solution": r"$\frac{3}{4}$"}] * 2
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    task = own("trl.rewards", "accuracy_reward", "think_format_reward", weights=(1.0, 0.5), path=tmp_path / "a.jsonl")
    assert TypeAdapter(AnyTask).validate_python(
        spell_out({"name": "python:trl.rewards:accuracy_reward,think_format_reward", "weights": [1, 0.5]})
    ) == own("trl.rewards", "accuracy_reward", "think_format_reward", weights=(1.0, 0.5))
    item = next(iter(task._read(tmp_path / "a.jsonl", "")))
    assert item.question == "What is 1/2 + 1/4?"
    right, thought = r"It is \boxed{\frac{3}{4}}", r"<think>So</think>It is \boxed{0.5}"
    assert scored(task, right, thought, f"<think>So</think>{right}", item=item) == [1.0, 0.5, 1.5]


@needs_trl
@pytest.mark.slow
def test_the_penalty_of_trl_for_long_completions_counts_the_tokens_that_were_sampled(write: Write) -> None:
    file = write("from trl.rewards import get_soft_overlong_punishment\nscore = get_soft_overlong_punishment(100, 20)")
    task = own(file)
    task.check()
    assert asyncio.run(task.rewards(ITEM, ["", "", ""], [[1] * 80, [1] * 90, [1] * 101])) == [0.0, -0.5, -1.0]


def test_messages_are_given_where_asked_for(write: Write) -> None:
    code = "def score(completions, **k): return [len(c['content']) for [c] in completions if c['role'] == 'assistant']"
    assert scored(own(write(code), completion_format="messages"), "abc") == [3.0]


# --- settings --------------------------------------------------------------------------------------------------------


def test_the_short_form_names_module_and_functions() -> None:
    config = validated(EnvironmentConfig, {"task": "python:my.rewards:a,b", "model_name": "m"}, where="profile")
    assert config.task == own("my.rewards", "a", "b")
    assert parse_flags(EnvironmentConfig, to_flags(config), prog="env", description="") == config
    of_file = validated(EnvironmentConfig, {"task": "python:./r.py:a", "model_name": "m"}, where="profile")
    assert of_file.task == own("./r.py", "a")
    with pytest.raises(ConfigError, match=r"functions: no function of my_rewards is named: write python:my_rewards:"):
        validated(EnvironmentConfig, {"task": "python:my_rewards", "model_name": "m"}, where="profile")


@pytest.mark.parametrize(
    "table",
    [
        {"name": "python:mine:a,b"},
        {"name": "python", "functions": "mine:a,b"},
        {"name": "python", "functions": ["mine:a", "mine:b"]},
        {"name": "python", "module": "mine", "functions": "a, b"},
        {"name": "python", "module": "mine", "functions": ["a", "mine:b"]},
    ],
)
def test_functions_are_named_with_their_module_or_without_beside_other_settings(table: dict[str, Any]) -> None:
    given = {"task": {**table, "path": "train.jsonl"}, "model_name": "m"}
    assert validated(EnvironmentConfig, given, where="profile").task == own("mine", "a", "b", path=Path("train.jsonl"))


def test_functions_of_two_modules_are_refused() -> None:
    table = {"name": "python", "functions": ["mine:a", "other:b"]}
    with pytest.raises(ConfigError, match=r"functions: mine:a, other:b with module None: all are of one module"):
        validated(EnvironmentConfig, {"task": table, "model_name": "m"}, where="profile")
