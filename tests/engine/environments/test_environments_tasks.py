"""Tasks: equal seeds give equal items, held-out items are never trained on, and rewards have the documented values."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.config import validated
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.items.source import held_out_items
from grpo_engine.environments.tasks import AnyTask, expressions, reasoning_gym, records
from grpo_engine.environments.tasks.answers import final_answer, is_same_answer
from grpo_engine.environments.tasks.base import Item, Split, belongs_to, plain
from grpo_engine.environments.tasks.gsm8k import AnswerFormat, Gsm8k, has_format
from grpo_engine.environments.tasks.ifeval.task import IFEval
from grpo_engine.environments.tasks.jsonl import Jsonl
from grpo_engine.environments.tasks.math_zero import MathZero
from grpo_engine.environments.tasks.puzzles import Arithmetic, Copy6, Reverse6, Sort6
from grpo_engine.environments.tasks.reasoning_gym import ReasoningGym
from grpo_engine.errors import ConfigError
from grpo_engine.flags import parse_flags, to_flags

needs_reasoning_gym = pytest.mark.skipif(not importlib.util.find_spec("reasoning_gym"), reason="the `data` extra")
needs_math_verify = pytest.mark.skipif(not importlib.util.find_spec("math_verify"), reason="the `data` extra")


@pytest.fixture(scope="module", autouse=True)
def _ended_processes() -> Iterator[None]:
    yield
    expressions.verifier().end()
    reasoning_gym.scorers(must_confine=True).end()


PROCEDURAL: list[AnyTask] = [Sort6(), Copy6(), Reverse6(), Arithmetic(difficulty=2)]
SPLIT_BY_QUESTION: list[AnyTask] = [*PROCEDURAL, IFEval()]


@pytest.mark.parametrize("task", PROCEDURAL, ids=lambda task: task.label())
def test_a_seed_decides_the_items_and_right_answers_get_the_full_reward(task: AnyTask) -> None:
    items = list(itertools.islice(task.items(3), 50))
    assert items == list(itertools.islice(task.items(3), 50))
    assert items != list(itertools.islice(task.items(4), 50))
    assert [task.score(item, item.answer) for item in items] == [1.0] * 50


def test_partial_credit_is_the_share_of_right_positions() -> None:
    item = Item(question="sort 660487", answer="046678")
    assert Sort6().score(item, "046687") == pytest.approx(4 / 6)
    assert Sort6().score(item, "") == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{1} no, \boxed{72}", "72"),
        ("48 + 24 = 72\n#### 72", "72"),
        ("She sold 48, then 24, in all $1,072.", "$1,072"),
        ("nothing", None),
        (r"\boxed{1 and never closed", "1"),
        ("#### Step 1: add\n48 + 24\n#### Step 2: done\nIt is 72.", "72"),
        ("#### Step 1\n72\n#### 72 clips\n\nQuestion: what is 5?", "72 clips"),
        ("#### Answer\n", "Answer"),
        (r"#### \frac{1}{2}", r"\frac{1}{2}"),
    ],
)
def test_the_final_answer_is_boxed_or_after_the_hashes_or_the_last_number(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("left", "right", "is_same"),
    [
        ("72", "72.0", True),
        ("1072", "$1,072", True),
        ("72", "71", False),
        ("-3", "−3", True),
        ("5.", "5", True),
        ("1234", "1{,}234", True),
        ("1234", r"1\,234", True),
        ("5", r"\$5", True),
        ("72", "**72**", True),
    ],
)
def test_numbers_are_compared_as_numbers(left: str, right: str, is_same: bool) -> None:
    assert is_same_answer(left, right) is is_same


@needs_math_verify
@pytest.mark.slow
def test_expressions_are_compared_by_their_value() -> None:
    assert is_same_answer(r"\frac{1}{2}", "0.5")
    assert not is_same_answer(r"\frac{1}{2}", r"\frac{1}{3}")
    assert is_same_answer("0.5", r"\frac12")
    assert is_same_answer("72", r"72\%")
    assert not is_same_answer("1", "x" * 1000)


def test_an_expression_is_parsed_before_any_answer_has_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one takes a tenth of a second of CPU: on a busy machine a right answer was over its 2 s, and wrong."""
    parsed: list[str] = []
    fake = SimpleNamespace(parse=lambda text, **_: parsed.append(text), verify=lambda *_, **__: True)
    monkeypatch.setitem(sys.modules, "math_verify", fake)
    expressions.load_scorer("")
    assert len(parsed) == 1


@needs_math_verify
@pytest.mark.slow
def test_a_comparison_that_times_out_is_a_wrong_answer_also_in_a_thread() -> None:
    answers: list[bool] = []
    endless = r"\sum_{n=1}^{10^9} n^{0.5}"
    thread = threading.Thread(target=lambda: answers.append(is_same_answer("72", endless)))
    thread.start()
    thread.join()
    assert answers == [False]
    assert is_same_answer(r"\frac{1}{2}", "1/2")  # the next comparison does not wait for it


@needs_math_verify
@pytest.mark.slow
def test_the_process_for_comparisons_is_restarted_after_a_crash() -> None:
    assert is_same_answer("1/2", r"\frac{1}{2}")
    process = expressions.verifier()._template
    assert process is not None
    process.kill()
    process.wait()
    assert is_same_answer("1/2", r"\frac{1}{2}")


def write_jsonl(path: Path, records: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def questions(task: AnyTask, split: Split, count: int, *, seed: int = 0) -> set[str]:
    """Those of the first items of a split."""
    return {plain(item.question) for item in itertools.islice(task.items(seed, split), count)}


def test_gsm8k_reads_the_datasets_own_files(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"question": "How many?", "answer": "48/2 = <<48/2=24>>24\n#### 1,072"}])
    write_jsonl(tmp_path / "test.jsonl", [{"question": "And now?", "answer": "#### 5"}])
    task = Gsm8k(path=tmp_path)
    task.check()
    item = next(task.items(0))
    assert (item.question, item.answer) == ("How many?", "1,072")
    assert next(task.items(0, "held_out")).answer == "5"
    assert task.score(item, r"First 48, then \boxed{1072}.") == 1.0
    assert task.score(item, "It is 1072 of 1073") == 0.0
    assert task.score(item, "no idea") == 0.0


@needs_math_verify
@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("#### 1,234", "#### 1234", 1.0),
        ("#### -5", "She owes 5, so -5.\n#### -5", 1.0),
        ("#### 18", "Janet makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18", 1.0),
        ("#### 72", "In all <<48+24=72>>72 clips.\n#### 72 clips", 1.0),
        ("#### 72", "#### $72.00", 1.0),
        ("#### 0.5", r"\boxed{\frac12}", 1.0),
        ("#### 72", r"\boxed{72\%}", 1.0),
        ("#### 72", r"\boxed{72\text{ clips}}", 1.0),
        ("#### 72", r"\boxed{\sqrt{72}}", 0.0),
        ("#### 72", "#### 72 clips and 3 pins", 0.0),
        ("#### 72", "#### 27", 0.0),
        ("#### 72", "", 0.0),
    ],
)
def test_gsm8k_knows_the_ways_in_which_its_answers_are_written(
    tmp_path: Path, answer: str, completion: str, reward: float
) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", [{"question": "How many?", "answer": f"Some steps.\n{answer}"}] * 2)
    task = Gsm8k(path=path)
    assert task.score(next(task.items(0)), completion) == reward


@pytest.mark.parametrize(
    ("wanted", "well_formed", "not_well_formed"),
    [
        ("boxed", [r"So \boxed{72}.", r"\boxed{7} or \boxed{\frac{1}{2}}"], ["72", r"\boxed{}", r"\boxed{72"]),
        ("hashes", ["72\n#### 72", "#### $1,072.50\n", "#### -3"], ["72", "#### 72\nindeed", "#### 72 clips", "###72"]),
        (
            "think",
            ["<think>so</think>72", "\n<think>\na\nb</think>\n\n72"],
            [
                "72",
                "<think>72",
                "<think>a</think>",
                "Hm <think>a</think>72",
                "<think>a<think>b</think>72",
                "a</think>72",
            ],
        ),
    ],
)
def test_the_format_of_an_answer_is_recognised(
    wanted: AnswerFormat, well_formed: list[str], not_well_formed: list[str]
) -> None:
    assert [has_format(text, wanted) for text in well_formed] == [True] * len(well_formed)
    assert [has_format(text, wanted) for text in not_well_formed] == [False] * len(not_well_formed)


def test_the_format_of_an_answer_adds_to_its_reward_where_that_is_set() -> None:
    item = Item(question="", answer="72")
    thought = r"<think>71 or 73</think>\boxed{72}"
    plain_task = Gsm8k()
    assert [plain_task.score(item, text) for text in (thought, "72", "71")] == [1.0, 1.0, 0.0]
    task = Gsm8k(formats=("think", "boxed"), format_weight=0.2)
    rewards = [task.score(item, text) for text in (thought, "72", r"\boxed{71}", "<think>72</think>So 71", "71")]
    assert rewards == pytest.approx([1.2, 1.0, 0.1, 0.1, 0.0])
    assert task.score(item, "<think>72</think>") == 0.0  # it never says so


def test_a_records_file_alone_holds_one_question_in_sixteen_out(tmp_path: Path) -> None:
    records = [{"question": f"How many is {n}?", "answer": f"#### {n}"} for n in range(160)]
    path = write_jsonl(tmp_path / "mine.jsonl", records)
    for task in (Gsm8k(path=path), Jsonl(path=path)):
        train, held_out = questions(task, "train", 160), questions(task, "held_out", 160)
        assert not train & held_out
        assert len(train | held_out) == 160
        assert 4 <= len(held_out) <= 20


def test_a_records_file_may_name_its_fields_and_ask_for_exact_answers(tmp_path: Path) -> None:
    records = [{"q": f"question {n}", "a": f"the answer {n}"} for n in range(64)]
    task = Jsonl(
        path=write_jsonl(tmp_path / "facts.jsonl", records), question_field="q", answer_field="a", reward="exact"
    )
    assert task.label() == "facts"
    item = next(task.items(0))
    assert item.question.replace("question", "the answer") == item.answer
    assert task.score(item, f"  {item.answer}\n") == 1.0
    assert task.score(item, item.answer + "!") == 0.0


def test_a_file_without_held_out_items_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "mine.jsonl", [{"question": "How many?", "answer": "#### 2"}])
    with pytest.raises(ConfigError, match=r"task\.path: .*mine\.jsonl has no held_out record: give a folder with"):
        next(Gsm8k(path=path).items(0, "held_out"))


def test_a_question_of_the_held_out_file_is_not_trained_on(tmp_path: Path) -> None:
    records = [{"question": f"How many is {n}?", "answer": f"#### {n}"} for n in range(8)]
    held_out = [{"question": f"How  many is {n}? ", "answer": f"#### {n}"} for n in (2, 5)]  # spaced another way
    write_jsonl(tmp_path / "train.jsonl", records)
    write_jsonl(tmp_path / "test.jsonl", held_out)
    both: list[AnyTask] = [
        Gsm8k(path=tmp_path),
        Jsonl(path=tmp_path / "train.jsonl", held_out_path=tmp_path / "test.jsonl"),
    ]
    for task in both:
        assert questions(task, "train", 30) == {f"How many is {n}?" for n in (0, 1, 3, 4, 6, 7)}
        assert questions(task, "held_out", 30) == {"How many is 2?", "How many is 5?"}


@pytest.mark.parametrize("task", SPLIT_BY_QUESTION, ids=lambda task: task.label())
@given(train_seed=st.integers(), held_out_seed=st.integers())
@settings(max_examples=10, deadline=None)
def test_no_question_of_an_evaluation_is_trained_on_for_any_seeds(
    task: AnyTask, train_seed: int, held_out_seed: int
) -> None:
    held_out = questions(task, "held_out", 50, seed=held_out_seed) | questions(task, "held_out", 50)
    assert not questions(task, "train", 500, seed=train_seed) & held_out


@needs_reasoning_gym
@pytest.mark.slow
@given(train_seed=st.integers(0, 2**31), held_out_seed=st.integers(0, 2**31))
@settings(max_examples=5, deadline=None)
def test_the_splits_of_reasoning_gym_share_no_question_for_any_seeds(train_seed: int, held_out_seed: int) -> None:
    # Sums of two one-digit numbers: so few that both splits would share nearly all, were it left to chance.
    task = ReasoningGym(dataset="chain_sum", options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    held_out = questions(task, "held_out", 30, seed=held_out_seed)
    assert held_out
    assert not questions(task, "train", 300, seed=train_seed) & held_out


@given(st.lists(st.text(min_size=1), max_size=20, unique=True))
@settings(max_examples=20, deadline=None)
def test_every_record_is_in_one_of_the_two_splits(texts: list[str]) -> None:
    records = [Item(question=text, answer="") for text in texts]
    train = {plain(item.question) for item in records if belongs_to("train", item.question)}
    held_out = {plain(item.question) for item in records if belongs_to("held_out", item.question)}
    assert not train & held_out
    assert train | held_out == {plain(text) for text in texts}


@pytest.mark.parametrize("task", SPLIT_BY_QUESTION, ids=lambda task: task.label())
def test_evaluations_use_the_same_prompts_and_larger_ones_add_to_them(task: AnyTask) -> None:
    few, many = held_out_items(task, 8), held_out_items(task, 64)
    assert many[:8] == few
    assert len({plain(item.question) for item in many}) == len(many) == 64
    assert all(belongs_to("held_out", item.question) for item in many)


def test_an_evaluation_of_a_small_task_uses_all_held_out_items(tmp_path: Path) -> None:
    assert len(held_out_items(Arithmetic(), 64)) == 5
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": f"{n}?", "answer": "1"} for n in range(9)])
    assert len(held_out_items(Jsonl(path=path, held_out_path=path), 64)) == 9


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no record"),
        ("[1]\n", r"data\.jsonl:1: must be an object, not list"),
        ('{"question": "x"\n', r"data\.jsonl:1: not JSON"),
        ("[" * 100_000 + "\n", r"data\.jsonl:1: not JSON"),
        ('{"question": "x", "answer": null}\n', r"data\.jsonl:1: field 'answer' is null: set it"),
        ('{"question": "x", "anwser": "y"}\n', r"no field 'answer' \(did you mean 'anwser'\?\)"),
        (None, r"task\.path: .*data\.jsonl cannot be read: No such file"),
    ],
)
def test_a_bad_records_file_is_named_with_its_line(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        Jsonl(path=path).check()


def test_an_answer_that_takes_seconds_to_compare_with_each_completion_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [{"question": "x", "answer": "\\boxed{" + "x" * (1 << 20)}])
    for task in (Jsonl(path=path), Jsonl(path=path, reward="exact"), Gsm8k(path=path), MathZero(path=path)):
        with pytest.raises(ConfigError, match=r"data\.jsonl:1: .*1,048,583 characters; an answer has at most"):
            task.items(0)


def test_a_records_file_without_line_ends_is_refused_before_all_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_LINE_CHARS", 100)
    good = b'{"question": "x", "answer": "y"}\n'
    (tmp_path / "data.jsonl").write_bytes(good + b"x" * 100_000 + b"\xff")  # the rest is not even text
    with pytest.raises(ConfigError, match=r"data\.jsonl:2: longer than 100 characters"):
        Jsonl(path=tmp_path / "data.jsonl").check()


@pytest.mark.parametrize(
    ("content", "encoding", "question"),
    [
        ('{"question": "one\u2028line", "answer": "x\u0085y"}\r\n\n', "utf-8", "one\u2028line"),
        ('{"question": "x", "answer": "y"}\n', "utf-8-sig", "x"),
    ],
    ids=["line separators within a text", "byte order mark"],
)
def test_a_records_file_is_split_at_line_feeds_after_its_byte_order_mark(
    tmp_path: Path, content: str, encoding: str, question: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(content, encoding=encoding)
    assert next(Jsonl(path=path).items(0)).question == question


@needs_reasoning_gym
@pytest.mark.slow
def test_reasoning_gym_scores_with_its_own_rules() -> None:
    task = ReasoningGym(dataset="chain_sum", options={"min_terms": 2, "max_terms": 2})
    items = list(itertools.islice(task.items(1), 20))
    assert items == list(itertools.islice(task.items(1), 20))
    assert [task.score(item, f"I think <answer>{item.answer}</answer>") for item in items] == [1.0] * 20
    assert task.score(items[0], "certainly not") < 0.5


@needs_reasoning_gym
@pytest.mark.slow
def test_levels_of_reasoning_gym_are_those_of_its_curricula_and_share_nothing_that_is_held_out() -> None:
    task = ReasoningGym(dataset="chain_sum", level=2, size=64)
    task.check()
    levels = task.levels()
    terms = [max(item.question.count(" ") for item in itertools.islice(each.items(0), 50)) for each in levels]
    assert terms == sorted(set(terms))
    held_out = {plain(item.question) for item in held_out_items(task, 64)}
    for level in levels:
        items = list(itertools.islice(level.items(0), 80))
        assert not {plain(item.question) for item in items} & held_out
        assert [task.score(item, item.answer) for item in items[:5]] == [1.0] * 5
    assert ReasoningGym(dataset="chain_sum").levels() == [ReasoningGym(dataset="chain_sum")]
    fixed = ReasoningGym(dataset="chain_sum", level=0, options={"min_terms": 3, "max_terms": 3})
    assert next(fixed.items(0)).question.count(" + ") + next(fixed.items(0)).question.count(" - ") == 2


@needs_reasoning_gym
@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"level": 99}, r"task\.level: 99 is beyond the last level of 'chain_sum', 10"),
        ({"dataset": "chain_sun"}, r"'chain_sun' is not a dataset of reasoning-gym \(did you mean 'chain_sum'\?\)"),
        ({"options": {"terms": 2}}, r"task\.options: \{'terms': 2\} do not fit chain_sum"),
    ],
)
def test_a_setting_that_reasoning_gym_does_not_have_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ReasoningGym.model_validate({"dataset": "chain_sum", **settings}).check()


@pytest.mark.parametrize(
    ("short", "task"),
    [
        ("sort6", Sort6()),
        ("reasoning_gym:chain_sum", ReasoningGym(dataset="chain_sum")),
        ("gsm8k", Gsm8k()),
        ("jsonl:facts.jsonl", Jsonl(path=Path("facts.jsonl"))),
        ("ifeval", IFEval()),
        ("ifeval:records.jsonl", IFEval(path=Path("records.jsonl"))),
        ({"name": "arithmetic", "difficulty": 3}, Arithmetic(difficulty=3)),
    ],
)
def test_a_task_has_a_short_form(short: object, task: AnyTask) -> None:
    config = validated(EnvironmentConfig, {"task": short, "model_name": "local/tiny"}, where="profile")
    assert config.task == task


def test_flags_make_settings_that_survive_the_conversion_to_flags() -> None:
    argv = ["--task", "arithmetic", "--task.difficulty", "2", "--model", "local/tiny", "--group-size", "8"]
    config = parse_flags(EnvironmentConfig, [*argv, "--base-url", "http://h:1/v1/"], prog="env", description="")
    assert config.task == Arithmetic(difficulty=2)
    assert config.inference_urls == ("http://h:1",)
    assert parse_flags(EnvironmentConfig, to_flags(config), prog="env", description="") == config


def test_settings_of_one_name_have_one_default_so_that_a_command_line_may_leave_them_out() -> None:
    defaults: dict[str, set[object]] = {}
    for task in get_args(get_args(AnyTask)[0]):
        for name, field in task.model_fields.items():
            if name != "name" and not field.is_required():
                defaults.setdefault(name, set()).add(str(field.get_default(call_default_factory=True)))
    assert {name: values for name, values in defaults.items() if len(values) > 1} == {}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"task": "sort7"}, r"task\.name: 'sort7' is not one of .*did you mean 'sort6'"),
        ({"task": {"name": "sort6", "difficulty": 2}}, r"task\.difficulty: unknown setting"),
        ({"task": "sort6", "inference_url": "localhost:9001"}, "is not a URL: write it like http://"),
        ({"task": "sort6", "max_tokens": 64, "max_token_length": 64}, "leaves no room for a prompt"),
    ],
)
def test_a_wrong_setting_is_named_by_its_key(table: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        validated(EnvironmentConfig, {"model_name": "local/tiny", **table}, where="profile")


@pytest.mark.skipif(not importlib.util.find_spec("datasets"), reason="the `data` extra")
@pytest.mark.slow
def test_an_unreachable_hub_is_requested_once(tmp_path: Path) -> None:
    with socket.socket() as unlistened:  # bound and not listening: connections are refused
        unlistened.bind(("127.0.0.1", 0))
        hub = f"http://127.0.0.1:{unlistened.getsockname()[1]}"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        done = subprocess.run(
            [sys.executable, "-m", "grpo_engine", "env", "--task", "gsm8k", "--model-name", "unused"],
            env={**environment, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    assert done.returncode == 2
    assert done.stderr.count(f"{hub} cannot be reached") == 1
    assert "give task.path = a folder with train.jsonl" in done.stderr
    assert "Retry" not in done.stderr


@needs_math_verify
@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (r"so 0.5 </think> <answer> \boxed{\frac{1}{2}} </answer>", 1.0),
        (r"so </think> <answer> It is \boxed{0.5}", 1.0),  # stopped at </answer>
        (r"<answer>\boxed{3}</answer> no <answer>\boxed{1/2}</answer>", 1.0),
        (r"<answer>\boxed{1/2}</answer> no <answer>\boxed{3}</answer>", 0.0),
        (r"\boxed{1/2}", 0.0),
        ("<answer> 1/2 </answer>", 0.0),
        ("", 0.0),
    ],
)
def test_math_zero_rewards_an_equal_boxed_answer_between_the_tags(completion: str, reward: float) -> None:
    assert MathZero().score(Item(question="", answer=r"\frac{1}{2}"), completion) == reward


@needs_math_verify
def test_math_zero_reads_files_of_either_field_names_and_asks_in_its_prompt(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(
        '{"question": "What is 1 + 1?", "final_answer": "2", "difficulty": 1}\n'
        '{"problem": "And in words?", "answer": "It is so\\n#### 2"}\n'
        '{"problem": "x", "solution": 1, "answer": "$x^2$"}\n'
    )
    (tmp_path / "test.jsonl").write_text('{"problem": "What is 1 + 2?", "answer": "3"}\n')
    task = MathZero(path=tmp_path)
    task.check()
    answers = {item.question.partition("problem:\n")[2]: item.answer for item in itertools.islice(task.items(0), 3)}
    assert answers == {
        f"{asked}\n\nAssistant: <think>": answer
        for asked, answer in {"What is 1 + 1?": "2", "And in words?": "2", "x": "x^2"}.items()
    }
    assert next(MathZero(path=tmp_path, prompt="plain").items(0, "held_out")).question == "What is 1 + 2?"
    (tmp_path / "train.jsonl").write_text('{"problem": "x", "anwser": "1"}\n')
    with pytest.raises(ConfigError, match=r"train\.jsonl:1: no field 'final_answer' or 'answer'"):
        task.check_files(Path("/"))


@needs_math_verify
@needs_reasoning_gym
def test_math_zero_needs_no_hub_with_generated_problems() -> None:
    task = MathZero(source="generated", prompt="plain")
    items = list(itertools.islice(task.items(1), 60))
    assert items == list(itertools.islice(task.items(1), 60))
    assert [task.score(item, rf"<answer>\boxed{{{item.answer}}}") for item in items] == [1.0] * 60
    assert not {item.question for item in items} & {item.question for item in held_out_items(task, 64)}


def test_math_zero_without_math_verify_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_engine.environments.tasks.math_zero.is_installed", lambda module: False)
    with pytest.raises(ConfigError, match=r"math-verify, which is not installed: pip install 'grpo-tui\[data\]'"):
        MathZero(source="generated").check()


@pytest.mark.parametrize("name", ["shared", "lora"])
def test_the_configurations_of_math_zero_are_valid(name: str) -> None:
    file = Path(__file__).parents[3] / "configs" / f"math_zero_{name}.yaml"
    config = parse_flags(
        EnvironmentConfig, ["--config", str(file), "--task.source", "generated"], prog="env", description=""
    )
    assert isinstance(config.task, MathZero)
    assert (config.task.source, config.group_size, config.steps_per_eval) == ("generated", 8, 20)
    assert (config.name, config.chat_template) == (f"math-zero-{name}-env", False)
    assert "</answer>" in config.stop
