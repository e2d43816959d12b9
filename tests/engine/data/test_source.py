"""The trainer's client against the real rollout API, on a real socket."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ports import free_port
from rollout_fakes import RUN, group, served_api

from grpo_engine.data.source import RolloutApiSource
from grpo_engine.errors import PeerError, PeerUnavailable
from grpo_engine.wire.rollouts import ScoredGroup


@pytest.fixture
def api() -> Iterator[str]:
    with served_api() as url:
        yield url


@pytest.fixture
def source(api: str) -> Iterator[RolloutApiSource]:
    with RolloutApiSource(api) as source:
        source.register(**RUN)
        yield source


def post(url: str, tag: int, **more: Any) -> None:
    assert httpx.post(f"{url}/scored_data", json=group(4, tag=tag, **more)).status_code == 200


def tag_of(batch: list[ScoredGroup] | None) -> int:
    assert batch is not None
    return batch[0].tokens[0][2]


def metrics_of(url: str) -> str:
    return httpx.get(f"{url}/metrics").text


def test_batches_come_one_at_a_time_and_each_is_acknowledged_by_asking_for_the_next(
    api: str, source: RolloutApiSource
) -> None:
    assert source.poll() is None
    post(api, 10)
    post(api, 11)
    first = source.next_batch(timeout_s=10)
    assert first is not None
    assert [g.tokens for g in first] == [[[1, 2, 10, 3]] * 4]
    assert first[0].inference_logprobs == [[1.0, 1.0, -0.5, -0.25]] * 4
    assert httpx.get(f"{api}/status").json()["queue_size"] == 1
    assert "grpo_api_leases 1" in metrics_of(api)
    assert tag_of(source.next_batch(timeout_s=10)) == 11
    source.acknowledge()
    assert "grpo_api_leases 0" in metrics_of(api)


def test_the_speed_of_sampling_is_that_of_what_was_posted_since_the_batch_before(
    api: str, source: RolloutApiSource
) -> None:
    times = [time.monotonic()]
    for tag in (10, 11):
        post(api, tag)  # eight trained tokens
        source.next_batch(timeout_s=10)
        times.append(time.monotonic())
        assert ("inference/tokens_per_second" in source.time_metrics()) == (tag == 11)
    speed = source.time_metrics()["inference/tokens_per_second"]
    assert speed > 8 / (times[2] - times[0])
    post(api, 12)
    post(api, 13)
    source.next_batch(timeout_s=10)
    assert 16 / (time.monotonic() - times[1]) < source.time_metrics()["inference/tokens_per_second"]
    source.next_batch(timeout_s=10)  # posted before the last one
    assert source.time_metrics()["inference/tokens_per_second"] == 0.0


def test_the_batch_of_a_trainer_that_failed_comes_again(api: str, source: RolloutApiSource) -> None:
    post(api, 42)
    with pytest.raises(ZeroDivisionError), RolloutApiSource(api) as failing:  # noqa: PT012
        failing.register(**RUN)
        failing.next_batch(timeout_s=10)
        _ = 1 / 0
    assert "grpo_api_leases 1" in metrics_of(api)
    source.register(**RUN)
    assert tag_of(source.next_batch(timeout_s=10)) == 42


def test_a_batch_that_was_fetched_and_not_trained_on_comes_again_also_after_a_clean_exit(api: str) -> None:
    post(api, 10)
    post(api, 11)
    with RolloutApiSource(api) as source:
        source.register(**RUN)
        source.next_batch(timeout_s=10)
        source.mark_used()
        source.next_batch(timeout_s=10)
    with pytest.raises(PeerUnavailable), RolloutApiSource(api) as source:  # noqa: PT012
        source.register(**RUN)
        again = source.next_batch(timeout_s=10)
        source.mark_used()
        raise PeerUnavailable("the loop has saved the step")
    assert tag_of(again) == 11
    assert "grpo_api_leases 0" in metrics_of(api)


def test_a_trainer_that_another_one_replaced_gets_an_error_and_no_batch(api: str, source: RolloutApiSource) -> None:
    with RolloutApiSource(api) as second:
        second.register(**{**RUN, "checkpoint_dir": "elsewhere"})
        post(api, 10)
        with pytest.raises(PeerError, match="another trainer has registered since"):
            source.next_batch(timeout_s=10)
        assert second.next_batch(timeout_s=10) is not None


def test_groups_that_are_too_old_for_the_trainer_stay_at_the_api(api: str, source: RolloutApiSource) -> None:
    source.register(**RUN, max_staleness=2)
    for tag, version in ((10, 4), (11, 7), (12, 5)):
        post(api, tag, policy_versions=[[0, 0, version, version + 1]] * 4)
    assert [tag_of(source.next_batch(timeout_s=10, policy_version=7)) for _ in range(2)] == [12, 11]
    assert "grpo_api_stale_groups_total 1" in metrics_of(api)


@pytest.mark.slow
def test_waiting_for_a_batch_ends_when_training_stops(source: RolloutApiSource) -> None:
    answers = iter([False, True])
    assert source.next_batch(timeout_s=60, stop=lambda: next(answers)) is None


def test_no_batch_in_time_is_an_error_that_says_where_to_look(source: RolloutApiSource) -> None:
    with pytest.raises(PeerUnavailable, match=r"no batch from .* within 0\.05 s.*/status"):
        source.next_batch(timeout_s=0.05)


@pytest.mark.parametrize("answer", [{"batch": None}, {"batch": None, "message": "no environment is live"}])
def test_a_wait_for_a_batch_is_logged_once_a_minute(
    answer: dict[str, str | None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = itertools.count()
    fake = SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda _: None, strftime=time.strftime)
    monkeypatch.setattr("grpo_engine.data.source.time", fake)
    monkeypatch.setattr("grpo_engine.retrying.time", fake)
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=answer))
    with RolloutApiSource("http://api", transport=transport) as source, pytest.raises(PeerUnavailable):
        source.next_batch(timeout_s=1000)
    assert 10 <= len(caplog.messages) <= 1 + 1000 / 60
    assert len(set(caplog.messages)) == 1


def test_a_reset_api_is_registered_with_again(api: str, source: RolloutApiSource) -> None:
    httpx.get(f"{api}/reset_data", params={"force": "true"})
    post(api, 10)
    assert source.next_batch(timeout_s=10) is not None
    assert httpx.get(f"{api}/info").json()["batch_size"] == 4


@pytest.mark.slow
def test_an_api_that_restarts_is_awaited(tmp_path: Path) -> None:
    database = tmp_path / "rollouts.sqlite"
    port = free_port()  # that no connection has while the API is away
    with served_api(database, port=port) as url:
        source = RolloutApiSource(url)
        source.register(**RUN)
        post(url, 10)
    with pytest.raises(PeerUnavailable):
        source.poll()
    with served_api(database, port=port):
        assert tag_of(source.next_batch(timeout_s=10)) == 10
    source.close()


def test_a_lost_api_is_awaited_as_long_as_a_batch_while_the_bridge_is_polled() -> None:
    answers = iter([httpx.ConnectError("refused")] * 3)
    polls: list[None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        for error in answers:
            raise error
        return httpx.Response(200, json={"batch": [group(1)], "lease": "a"})

    source = RolloutApiSource("http://api.test", reach_timeout_s=0.01, transport=httpx.MockTransport(answer))
    assert source.next_batch(timeout_s=60, meanwhile=lambda: polls.append(None)) is not None
    assert len(polls) == 4
    answers = iter([httpx.ConnectError("refused")] * 1000)
    with pytest.raises(PeerUnavailable, match=r"http://api\.test/batch: refused"):
        source.next_batch(timeout_s=0.05)
    source.close()


def test_an_api_that_is_not_there_is_named_with_what_to_do() -> None:
    port = free_port()
    source = RolloutApiSource(f"http://127.0.0.1:{port}", reach_timeout_s=0.05)
    with pytest.raises(
        PeerUnavailable, match=rf"not reachable at http://127.0.0.1:{port} within 0\.05 s.*grpo-engine api"
    ):
        source.register(**RUN)
    source.close()


def test_another_program_on_the_port_is_not_taken_for_an_api() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json={"batch": [{"tokens": 1}]}))
    source = RolloutApiSource("http://api.test", transport=transport)
    with pytest.raises(PeerError, match=r"/batch: not a batch: batch\.0\.tokens"):
        source.poll()
    with pytest.raises(PeerError, match="answers without a uuid"):
        source.register(**RUN)
    source.close()


def test_a_refused_request_is_an_error_and_not_retried_as_an_absent_api() -> None:
    source = RolloutApiSource("http://api.test", transport=httpx.MockTransport(lambda request: httpx.Response(401)))
    with pytest.raises(PeerError, match="refused with 401") as caught:
        source.poll()
    assert not isinstance(caught.value, PeerUnavailable)
    source.close()


def test_a_registration_that_the_api_cannot_store_is_repeated_until_it_can() -> None:
    """A disk that was full as the trainer registered ended the run; posts and batches wait for space."""
    answers = iter([503, 503, 503, 200])

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/info":
            return httpx.Response(200, json={})
        return httpx.Response(next(answers), json={"uuid": 7})

    with RolloutApiSource("http://api.test", transport=httpx.MockTransport(answer)) as source:
        source.register(**RUN)
        assert next(answers, None) is None
        answers = iter([503])
        with pytest.raises(PeerUnavailable, match=r"503.*not repeated, since training is stopping"):
            source.register(**RUN, stop=lambda: True)


def test_the_token_of_the_environment_variable_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_API_TOKEN", "secret")
    with served_api(token="secret") as url, RolloutApiSource(url) as source:
        source.register(**RUN)
        assert source.poll() is None
