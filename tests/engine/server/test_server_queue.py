"""Batch forming, stop strings, and the end of a pause."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from grpo_engine.processes import ProcessIdentity
from grpo_engine.server.pausing import Pause
from grpo_engine.server.torch.batching import Job, next_batch
from grpo_engine.server.torch.stop_strings import StopDetector
from grpo_engine.wire.inference import GenerateRequest


def job(n: int, *, prompt: int = 4, new: int = 4) -> Job:
    return Job(prompt=[1] * prompt, params=GenerateRequest(prompt="", n=n), max_new_tokens=new)


def sizes(jobs: list[Job], *, rows: int, tokens: int = 10**9) -> list[int]:
    return [copies for _, copies in next_batch(jobs, max_rows=rows, max_tokens=tokens)]


def test_requests_are_served_in_order_and_split_where_they_do_not_fit() -> None:
    assert sizes([job(4), job(4), job(4)], rows=10) == [4, 4, 2]
    assert sizes([job(300)], rows=256) == [256]
    assert sizes([], rows=8) == []


def test_the_cache_is_bounded_but_one_sequence_always_fits() -> None:
    assert sizes([job(4), job(4)], rows=100, tokens=48) == [4, 2]
    assert sizes([job(3, prompt=1000)], rows=100, tokens=10) == [1]
    assert sizes([job(2), job(2, prompt=1000)], rows=100, tokens=1000) == [2]


def test_requests_without_the_token_wait_for_all_others_and_share_no_batch_with_them() -> None:
    stranger, own = job(300, new=40), job(2)
    stranger.is_without_token = True
    assert next_batch([stranger, own], max_rows=256, max_tokens=10**9) == [(own, 2)]
    assert next_batch([stranger], max_rows=256, max_tokens=10**9) == [(stranger, 256)]


def test_a_batch_without_the_token_is_short() -> None:
    """Its prompts are computed without a break."""
    stranger, own = job(300, prompt=4000, new=96), job(300, prompt=4000, new=96)
    stranger.is_without_token = True
    assert next_batch([stranger], max_rows=256, max_tokens=131072) == [(stranger, 4)]
    assert next_batch([own], max_rows=256, max_tokens=131072) == [(own, 32)]


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 50)), min_size=1), st.integers(1, 30), st.integers(1, 500))
def test_every_queue_makes_progress_within_its_bounds(queue: list[tuple[int, int]], rows: int, tokens: int) -> None:
    jobs = [job(n, prompt=prompt) for n, prompt in queue]
    batch = next_batch(jobs, max_rows=rows, max_tokens=tokens)
    total = sum(copies for _, copies in batch)
    assert [chosen for chosen, _ in batch] == jobs[: len(batch)]
    assert 1 <= total <= rows
    longest = max(len(chosen.prompt) + chosen.max_new_tokens for chosen, _ in batch)
    assert total * longest <= tokens or total == 1


class Letters:
    """A tokenizer of pieces; token 9 is half a character, and token -1 is special."""

    pieces = ("ab", "c", "d", "éf", "", " ")

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        text = ""
        for token in token_ids:
            text += "�" if token == 9 else self.pieces[token]
        return text.replace("��", "ö")


def fed(stops: list[str], tokens: list[int], *, may_end_from: int = 0) -> tuple[int | None, str]:
    detector = StopDetector(Letters(), stops, skip_special_tokens=True)
    for index, token in enumerate(tokens):
        if detector.add(token, may_end=index >= may_end_from):
            return index, detector.text
    return None, detector.text


def test_a_stop_string_is_found_across_tokens_and_cut() -> None:
    assert fed(["bc"], [2, 0, 1, 2]) == (2, "da")
    assert fed(["cd", "b"], [2, 0, 1, 2]) == (1, "da")
    assert fed(["zz"], [2, 0, 1]) == (None, "dabc")


def test_an_incomplete_character_is_not_searched() -> None:
    assert fed(["ö"], [0, 9, 9, 1]) == (2, "ab")
    assert fed(["�"], [0, 9, 9, 1]) == (None, "aböc")


def test_a_stop_string_before_min_tokens_is_ignored() -> None:
    assert fed(["d"], [2, 1, 1, 2], may_end_from=2) == (3, "dcc")


def test_a_pause_ends_with_its_time_or_its_owner() -> None:
    me = ProcessIdentity.of_this_process()
    assert Pause(owner=me, until=10).why_over(9.9) is None
    assert "time limit" in str(Pause(owner=None, until=10).why_over(10))
    gone = ProcessIdentity(os.getpid(), me.start_ticks + 1)
    assert "paused and exited" in str(Pause(owner=gone, until=10).why_over(0))
