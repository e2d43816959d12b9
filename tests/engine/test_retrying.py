"""Repeating a call: what is retried, when the attempts end, and how long the pauses are."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from grpo_engine import retrying
from grpo_engine.errors import PeerUnavailable
from grpo_engine.retrying import RetryPolicy, Stopped, retry, retry_async


def policy(**settings: object) -> RetryPolicy:
    return RetryPolicy(**{"retried": PeerUnavailable, "first_pause_s": 0.0, "longest_pause_s": 0.0} | settings)  # type: ignore[arg-type]


def failing(times: float, error: Exception) -> Callable[[], int]:
    """Fails so many times, then returns how many attempts there were."""
    attempts = count(1)

    def attempt() -> int:
        number = next(attempts)
        if number <= times:
            raise error
        return number

    return attempt


async def test_an_attempt_is_repeated_until_it_succeeds_and_each_failure_is_reported() -> None:
    failures: list[Exception] = []
    away = PeerUnavailable("refused")
    assert retry(failing(2, away), policy(on_failure=failures.append)) == 3
    attempt = failing(2, away)

    async def attempt_async() -> int:
        return attempt()

    assert await retry_async(attempt_async, policy(on_failure=failures.append)) == 3
    assert failures == [away] * 4


def test_the_last_error_is_raised_after_the_limit_and_another_error_at_once() -> None:
    with pytest.raises(PeerUnavailable, match="refused"):
        retry(failing(10, PeerUnavailable("refused")), policy(limit_s=0))
    with pytest.raises(ZeroDivisionError):
        retry(failing(1, ZeroDivisionError()), policy())


def test_a_stop_ends_the_attempts_with_the_reason_of_the_last_failure() -> None:
    answers = iter([False, True])
    with pytest.raises(Stopped, match="refused"):
        retry(failing(10, PeerUnavailable("refused")), policy(is_stopping=lambda: next(answers)))


def test_pauses_grow_to_the_longest_and_count_from_the_start_of_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        pauses.append(seconds)

    def attempt_of_half_a_second() -> None:
        nonlocal now
        now += 0.5
        if len(pauses) < 4:
            raise PeerUnavailable("refused")

    monkeypatch.setattr(retrying.time, "monotonic", lambda: now)
    monkeypatch.setattr(retrying.time, "sleep", sleep)
    retry(attempt_of_half_a_second, policy(first_pause_s=1.0, longest_pause_s=2.0))
    assert pauses == [0.5, 1.0, 1.5, 1.5]
