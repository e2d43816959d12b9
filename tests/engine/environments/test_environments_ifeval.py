"""Verifiable instructions: each verifier on texts that follow and texts that do not, and both sources of prompts."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.environments.items.source import held_out_items
from grpo_engine.environments.tasks.base import Item, belongs_to
from grpo_engine.environments.tasks.ifeval.instructions import (
    INSTRUCTIONS,
    checked_arguments,
    follows,
    num_sentences_of,
)
from grpo_engine.environments.tasks.ifeval.prompts import draw_prompt
from grpo_engine.environments.tasks.ifeval.task import IFEval
from grpo_engine.errors import ConfigError

CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    (
        "keywords:existence",
        {"keywords": ["river", "a+b"]},
        ["A River of a+b", "rivers, A+B"],
        ["river", "a+b", "aab river"],
    ),
    (
        "keywords:frequency",
        {"keyword": "sun", "frequency": 2, "relation": "at least"},
        ["sun and Sun", "sunsun sun"],
        ["sun", "none"],
    ),
    (
        "keywords:frequency",
        {"keyword": "sun", "frequency": 2, "relation": "less than"},
        ["sun", "none"],
        ["the sun, the SUN"],
    ),
    ("keywords:forbidden_words", {"forbidden_words": ["car", "bus"]}, ["A carpet", "business"], ["A car.", "by BUS"]),
    (
        "keywords:letter_frequency",
        {"letter": "e", "let_frequency": 3, "let_relation": "at least"},
        ["three e", "EeE"],
        ["the", "axe e"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "!", "let_frequency": 2, "let_relation": "less than"},
        ["Hey!"],
        ["Hey! Ho!"],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
        ["One. Two! Three?", "One. Two. And three"],
        ["Dr. J. Smith paid 3.50 vs. 4.", "One... Two."],
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, ["One."], ["One. Two."]),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "***\na\n***\nb\n***"],
        ["a", "a\n\nb", "a\n***\n\n***\nb", "a***b***c"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "at least"},
        ["one two-three"],
        ["one two", "..."],
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["one two"], ["one two three"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Well"},
        ["One\n\nwell, two", 'One\n\n"Well" two'],
        ["Well\n\nOne", "One\n\nTwo", "One\n\nWell\n\nTwo", "One\nwell", "One\n\nWellness"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] at [place]"],
        ["[name]", "name, place"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["Bye\nP.S. More", "p. s. x"], ["Bye", "PS x"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["P.P.S. More", "p. p. s x"], ["P.S. More"]),
    ("detectable_content:postscript", {"postscript_marker": "N.B."}, ["n.b. this"], ["nobby"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "- a\n  - b", "Now:\n* a\n- b"],
        ["* a", "* a\n* b\n* c", "**a**\n**b**"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is yes.", " My answer is maybe. "],
        ["Yes.", "my answer is no", "My answer is perhaps."],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*one* and *two*", "**one** and *two*"],
        ["*one*", "**one**", "** **\n* *"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb"],
        ["Section 1\na", "section 1 section 2", "Section one Section two"],
    ),
    ("detectable_format:json_format", {}, ['{"a": 1}', '```json\n{"a": [1]}\n```'], ["{a: 1}", 'Here: {"a": 1}']),
    ("detectable_format:title", {}, ["<<Spring>>\ntext", "text <<A b>>"], ["<Spring>", "<<>>", "<< >>", "<<a\nb>>"]),
    ("combination:two_responses", {}, ["a\n******\nb", "******a******b"], ["a", "a******a", "a******b******c"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, ["say hi. Hi!"], ["Hi! Say hi.", "Say hi"]),
    (
        "startend:end_checker",
        {"end_phrase": "The end."},
        ["So. the end.", 'So. "The end." '],
        ["The end. So.", "The end"],
    ),
    ("startend:quotation", {}, ['"All of it."', ' "a" '], ['"', '"a', "'a'", 'He said "a".']),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["I SAY.", "NO-ONE, NOT me"],
        ["No One", "ONE"],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        ["ONE two"],
        ["ONE TWO"],
    ),
    ("change_case:english_capital", {}, ["ALL OF IT, 1."], ["All", "ALL b"]),
    ("change_case:english_lowercase", {}, ["all of it, 1."], ["All", "aLL"]),
    ("punctuation:no_comma", {}, ["a b"], ["a, b"]),
]


@pytest.mark.parametrize(("instruction", "arguments", "good", "bad"), CASES, ids=[case[0] for case in CASES])
def test_a_verifier_accepts_texts_that_follow_and_no_others(
    instruction: str, arguments: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    checked = checked_arguments(instruction, arguments, where="here")
    assert [follows(instruction, checked, text) for text in good] == [True] * len(good)
    assert [follows(instruction, checked, text) for text in [*bad, "", " \n"]] == [False] * (len(bad) + 2)


def test_every_instruction_but_the_language_is_verified_above() -> None:
    assert {case[0] for case in CASES} == INSTRUCTIONS.keys() - {"language:response_language"}


def test_sentences_are_counted_by_their_punctuation() -> None:
    text = 'Mr. Poe went home. "Why?" he asked, e.g. at 3.5 p.m.!\n1. One thing...\n2. Another thing'
    assert num_sentences_of(text) == 5
    assert num_sentences_of("no punctuation at all") == 1
    assert num_sentences_of("...") == 0


@given(st.integers(0, 10**6), st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_the_reward_of_any_text_is_a_share_of_the_instructions(seed: int, completion: str) -> None:
    task = IFEval(num_instructions=5)
    item = next(task.items(seed))
    count = len((item.entry or {})["instruction_id_list"])
    assert 0 <= task.score(item, completion) * count == round(task.score(item, completion) * count) <= count
    assert IFEval(all_or_nothing=True).score(item, completion) == (task.score(item, completion) == 1)


@given(st.integers(0, 10**6), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_instructions_that_are_drawn_together_are_about_different_things_and_well_formed(seed: int, count: int) -> None:
    prompt = draw_prompt(random.Random(seed), count)
    assert 1 <= len(prompt.instructions) <= count
    assert len(set(prompt.instructions)) == len(prompt.instructions)
    for instruction, arguments in zip(prompt.instructions, prompt.arguments, strict=True):
        assert checked_arguments(instruction, arguments, where="here") == arguments
    assert "{" not in prompt.text


def test_every_kind_of_instruction_is_drawn() -> None:
    drawn = {kind for seed in range(400) for kind in draw_prompt(random.Random(seed), 3).instructions}
    assert drawn == INSTRUCTIONS.keys() - {"language:response_language"}


def test_drawn_prompts_have_levels_and_nothing_held_out_is_trained_on_in_any() -> None:
    task = IFEval(num_instructions=3)
    held_out = {item.question for item in held_out_items(task, 64)}
    assert len(held_out) == 64
    assert [level.num_instructions for level in task.levels()] == [1, 2, 3]  # type: ignore[attr-defined]
    for level in task.levels():
        items = list(itertools.islice(level.items(0), 300))
        assert all(belongs_to("train", item.question) for item in items)
        assert not {item.question for item in items} & held_out


RECORD: dict[str, Any] = {
    "key": 1000,
    "prompt": "Write a poem about trees. Use no commas and at least 5 words.",
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{"num_words": None, "relation": None}, {"num_words": 5.0, "relation": "at least", "keyword": None}],
}


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_records_of_the_benchmark_are_asked_as_they_are_and_scored_by_share_or_wholly(tmp_path: Path) -> None:
    other = {**RECORD, "prompt": "Another one."}
    task = IFEval(path=write(tmp_path / "a.jsonl", RECORD), held_out_path=write(tmp_path / "b.jsonl", other))
    task.check()
    assert task.levels() == [task]
    item = next(task.items(0))
    assert item.question == RECORD["prompt"]
    assert next(task.items(0, "held_out")).question == "Another one."
    texts = ("trees are tall and green", "trees are tall", "trees, trees", "")
    assert [task.score(item, text) for text in texts] == [1.0, 0.5, 0.0, 0.0]
    wholly = task.model_copy(update={"all_or_nothing": True})
    assert [wholly.score(item, text) for text in texts] == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"instruction_id_list": ["punctuation:no_commas"], "kwargs": [{}]},
            r"a\.jsonl:2: 'punctuation:no_commas' is not a known instruction \(did you mean 'punctuation:",
        ),
        ({"instruction_id_list": ["punctuation:no_comma"]}, r"a\.jsonl:2: .* must be lists of the same length"),
        ({"instruction_id_list": [], "kwargs": []}, "instruction_id_list is empty"),
        ({"kwargs": [{}, {"num_words": 5}]}, r"number_words takes num_words, relation, but has num_words"),
        ({"kwargs": [{"keyword": "x"}, {}]}, r"no_comma takes no arguments, but has keyword"),
        (
            {"kwargs": [{}, {"num_words": 5, "relation": "more"}]},
            "relation: 'more' is neither 'at least' nor",
        ),
        ({"kwargs": [{}, {"num_words": "5", "relation": "at least"}]}, r"num_words: '5' is not a whole number"),
        ({"kwargs": [{}, {"num_words": 5.5, "relation": "at least"}]}, r"num_words: 5\.5 is not a whole number"),
        ({"kwargs": [{}, {"num_words": 5, "relation": True}]}, r"relation: True is not a text"),
        ({"kwargs": [{}, {"num_words": math.inf, "relation": "at least"}]}, r"num_words: inf is not a whole number"),
        ({"kwargs": [{}, {"num_words": math.nan, "relation": "at least"}]}, r"num_words: nan is not a whole number"),
        ({"kwargs": [{}, "five"]}, "kwargs must be objects"),
        ({"instruction_id_list": ["punctuation:no_comma"] * 101, "kwargs": [{}] * 101}, "has more than 100 entries"),
        *(  # 100,000 in 100 instructions took 60 s for each completion of 16,000 characters
            (
                {"instruction_id_list": ["keywords:forbidden_words"] * 2, "kwargs": [{"forbidden_words": words}] * 2},
                r"at most 1,000",
            )
            for words in (["a"] * 501, ["a" * 40_000])
        ),
        ({"instruction_ids": 1, "instruction_id_list": ...}, r"no field 'instruction_id_list' \(did you mean"),
    ],
)
def test_a_record_that_cannot_be_verified_is_named_with_its_line(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    wrong = {key: value for key, value in {**RECORD, **changes}.items() if value is not ...}
    with pytest.raises(ConfigError, match=words):
        IFEval(path=write(tmp_path / "a.jsonl", RECORD, wrong)).check()


def test_records_with_unknown_instructions_are_left_out_where_that_is_wanted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    odd = {"prompt": "?", "instruction_id_list": ["new:one"], "kwargs": [{}]}
    foreign = {**odd, "instruction_id_list": ["language:response_language"], "kwargs": [{"language": "de"}]}
    path = write(tmp_path / "a.jsonl", odd, RECORD, foreign)
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: 'new:one' is not a known instruction"):
        IFEval(path=path).check()
    assert next(IFEval(path=path, skip_unknown=True).items(0)).question == RECORD["prompt"]
    assert "2 of 3 records skipped" in caplog.text
    with pytest.raises(ConfigError, match="needs the package langdetect: install it"):
        IFEval(path=write(tmp_path / "a.jsonl", RECORD, foreign)).check()
    with pytest.raises(ConfigError, match="has no record whose instructions can be verified"):
        IFEval(path=write(tmp_path / "a.jsonl", odd), skip_unknown=True).check()


def test_the_language_is_verified_where_langdetect_is_installed() -> None:
    pytest.importorskip("langdetect")
    item = Item(
        question="",
        answer="",
        entry={"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "de"}]},
    )
    assert IFEval().score(item, "Der Baum steht seit vielen Jahren am Ufer des Flusses.") == 1.0
    assert IFEval().score(item, "The tree has stood by the river for many years.") == 0.0
