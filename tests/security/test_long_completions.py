"""A completion may be any text: checks of tasks take time and memory in proportion to its length."""

from __future__ import annotations

import signal
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from grpo_engine.environments.tasks.ifeval.instructions import follows
from grpo_engine.environments.tasks.mafia.grammar import PASS, Action, Verb, parse
from grpo_engine.environments.tasks.reasoning_gym import answer_of

CPU_S = 2.0
"""Of this process; the checks need milliseconds, and needed 5 to 500 s when they were quadratic."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fail once the body has used that much CPU time."""

    def fail(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"still busy after {seconds:g} s of CPU time")

    before = signal.signal(signal.SIGPROF, fail)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def followed(instruction: str, **arguments: object) -> Callable[[str], bool]:
    return lambda text: follows(instruction, arguments, text)


SENTENCES = followed("length_constraints:number_sentences", num_sentences=3, relation="at least")
BULLETS = followed("detectable_format:number_bullet_lists", num_bullets=2)
PLACEHOLDERS = followed("detectable_content:number_placeholders", num_placeholders=2)
TITLE = followed("detectable_format:title")


@pytest.mark.parametrize(
    ("check", "repeated", "end"),
    [
        (SENTENCES, "\n", "a"),
        (SENTENCES, "!", "a"),
        (BULLETS, "\n", "a"),
        (PLACEHOLDERS, "[", "a"),
        (TITLE, "<<", "a"),
        (answer_of, "<answer>", ""),
        (parse, "<think>", ""),
    ],
    ids=lambda value: repr(value) if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_a_completion_of_one_text_200_000_times_is_checked_in_linear_time(
    check: Callable[[str], object], repeated: str, end: str
) -> None:
    with at_most(CPU_S):
        check("x\n" + repeated * 200_000 + end)


@pytest.mark.parametrize(
    ("check", "text", "expected"),
    [
        (SENTENCES, "One...  Two?!) \n\n  3. Three", True),
        (SENTENCES, "One. Mr. Two\n\n 2. three", False),
        (BULLETS, "\n\n  * one\n\n\t- two", True),
        (BULLETS, "* one\n** two", False),
        (PLACEHOLDERS, "[a] b] [[c]", True),
        (PLACEHOLDERS, "[a\n] [b]", False),
        (TITLE, "a << > >> <<\n>>", True),
        (TITLE, "<<>> << >>", True),
        (TITLE, "<<>>\n>>a<<", False),
    ],
)
def test_the_rules_find_what_they_found(check: Callable[[str], bool], text: str, expected: bool) -> None:
    assert check(text) is expected


def test_an_answer_is_the_last_one_between_tags_that_are_closed() -> None:
    assert answer_of("<answer>1</answer> no, <answer> 2 </answer> <answer>3") == "2"
    assert answer_of("<answer>1<answer>2</answer></answer>") == "1<answer>2"
    assert answer_of(" 4 ") == "4" == answer_of("<answer>4</answer>")


def test_a_long_thought_of_a_player_takes_no_memory_beside_it() -> None:
    thought = "<think>" + "a" * 1_000_000 + "</think>\n"
    tracemalloc.start()
    try:
        assert parse(f"{thought}<vote>Bob</vote>") == Action(Verb.VOTE, "Bob")
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    assert parse("<think></think> <pass/> ") == PASS
    assert parse("<think>a</think><think>b</think><pass/>") is None
    assert parse("<think><pass/>") is None
