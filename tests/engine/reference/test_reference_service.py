"""A reference service: the log-probabilities of the trainer's own reference, and nothing else whatever happens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from forked import Forked
from ports import free_port
from rank_training import Training, make_model, train_on_ranks
from serving import end_all, python_path, save_tiny_model
from torch import Tensor
from training import VOCABULARY, attached, made_up_groups, settings, small_model
from workplace import until

from grpo_engine.data.batching import Batch, make_batch
from grpo_engine.data.scoring_rows import decode_rows, decode_scores, encode_rows, encode_scores
from grpo_engine.errors import ConfigError, DataError, PeerError, PeerUnavailable
from grpo_engine.train.reference import FrozenCopy, load_reference
from grpo_engine.train.reference_client import RemoteReference
from grpo_engine.train.step import gradient_step
from grpo_engine.train.trainee import Trainee

TOKEN = "the token of these tests"


class Service:
    """A reference service in a process of its own."""

    def __init__(self, folder: Path, model: Path, *flags: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._words = ("reference", "--model", str(model), "--port", str(self.port), "--dtype", "float32")
        self._words += ("--device", "cpu", "--threads", "1", "--max-model-len", "64", *flags)
        self._folder = folder
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": python_path(), "GRPO_API_TOKEN": TOKEN}
        log = self._folder / f"{self.port}.log"
        self.process = Forked(*self._words, log=log, folder=self._folder, environment=environment)

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            try:
                return httpx.get(f"{self.url}/health").status_code == 200
            except httpx.ConnectError:
                return False

        until(is_ready)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def post(self, body: bytes, token: str = TOKEN) -> httpx.Response:
        return httpx.post(f"{self.url}/logprobs", content=body, headers={"Authorization": f"Bearer {token}"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy that training starts from."""
    return make_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference."""
    return make_model(tmp_path_factory.mktemp("other"), hidden_size=64)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, other: Path) -> Iterator[Service]:
    started = Service(tmp_path_factory.mktemp("service"), other)
    started.wait_until_ready()
    yield started
    end_all([started.process])


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_API_TOKEN", TOKEN)


def of_policy(model: Path, **changes: Any) -> Trainee:
    config = settings(model_name=str(model), kl_coef=0.1, **changes)
    return Trainee(attached(small_model()), config)


@contextmanager
def remote_reference(**changes: Any) -> Iterator[RemoteReference]:
    found = load_reference(settings(**changes), small_model())
    assert isinstance(found, RemoteReference)
    with closing(found):
        yield found


def a_batch(seed: int = 0, temperature: float = 1.0) -> Batch:
    params = {"temperature": temperature, "logprobs_mode": "processed"}
    groups = [each.model_copy(update={"generation_params": params}) for each in made_up_groups(seed, groups=4)]
    return make_batch(groups, seq_len=32)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_service_gives_the_log_probabilities_of_the_trainers_own_reference(
    temperature: float, model: Path, other: Path, service: Service
) -> None:
    own = load_reference(settings(model_name=str(model), reference_model=str(other)), small_model())
    assert isinstance(own, FrozenCopy)
    batches = [a_batch(seed, temperature) for seed in range(3)]
    with remote_reference(model_name=str(model), reference_model=str(other), reference_urls=[service.url]) as remote:
        answers = [wait() for wait in remote.start(batches)]
    for batch, of_service in zip(batches, answers, strict=True):
        torch.testing.assert_close(of_service, own.logprobs(batch), rtol=0, atol=2e-6)


@pytest.mark.slow
def test_a_step_with_a_service_has_the_divergence_and_weights_of_one_with_its_own_reference(
    model: Path, other: Path, service: Service
) -> None:
    own = of_policy(model, reference_model=str(other))
    remote = of_policy(model, reference_model=str(other), reference_urls=[service.url])
    for step in range(2):
        first, second = (
            gradient_step(each, a_batch(step), step=step, policy_version=step).metrics for each in (own, remote)
        )
        assert second["grpo/kl"] == pytest.approx(first["grpo/kl"], abs=1e-6)
        assert first["grpo/kl"] > 0.01
        for each in (own, remote):
            each.write_weights()
    assert isinstance(remote.reference, RemoteReference)
    remote.reference.close()
    for one, two in zip(own._masters.parameters, remote._masters.parameters, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_two_ranks_with_a_service_train_the_parameters_of_one_with_its_own_reference(
    model: Path, other: Path, tmp_path: Path
) -> None:
    service = Service(tmp_path, other, "--allow-without-token")  # ranks are forked before this test has a token
    shared = {"kl_coef": 0.1, "reference_model": str(other)}
    one = train_on_ranks(Training(model=model, folder=tmp_path / "1", num_ranks=1, steps=range(2), settings=shared))
    urls = {**shared, "reference_urls": [service.url]}
    try:
        two = train_on_ranks(Training(model=model, folder=tmp_path / "2", num_ranks=2, steps=range(2), settings=urls))
    finally:
        end_all([service.process])
    for name, value in one.parameters.items():
        torch.testing.assert_close(two.parameters[name], value, rtol=0, atol=1e-5)
    assert [each["grpo/kl"] for each in two.metrics] == pytest.approx(
        [each["grpo/kl"] for each in one.metrics], abs=1e-5
    )


@pytest.mark.slow
def test_a_service_that_was_killed_is_asked_again_and_another_one_meanwhile(
    other: Path, model: Path, tmp_path: Path
) -> None:
    services = [Service(tmp_path, other) for _ in range(2)]
    try:
        expected = [FrozenCopy(small_model(hidden_size=64)).logprobs(a_batch(seed)) for seed in range(4)]

        def assert_right(answers: Any) -> None:
            for wanted, answer in zip(expected, answers, strict=True):
                torch.testing.assert_close(answer(), wanted, rtol=0, atol=2e-6)

        batches = [a_batch(seed) for seed in range(4)]
        urls = [each.url for each in services]
        with remote_reference(model_name=str(model), reference_model=str(other), reference_urls=urls) as remote:
            assert_right(remote.start(batches))
            services[0].kill()
            assert_right(remote.start(batches))
            services[1].kill()
            waiting = remote.start(batches)
            services[0].start()
            assert_right(waiting)
    finally:
        end_all([each.process for each in services])


@pytest.mark.slow
def test_what_is_no_request_is_refused_with_the_reason_and_the_service_goes_on(service: Service) -> None:
    good = encode_rows(a_batch())
    head, _, rest = good.partition(b"\n")
    cases = {
        b"{}\n": "lengths: Field required",
        b"": "in the first line",
        good[:-1]: "bytes after the first line",
        head + b"\n" + b"\xff" * 4 + rest[4:]: "token ids from -1",
        head + b"\n" + b"\0" * len(rest): "a row without a token to score",
        head.replace(b'"groups":[0,', b'"groups":[') + b"\n" + rest: "15 groups",
    }
    for body, why in cases.items():
        answer = service.post(body)
        assert (answer.status_code, why in answer.json()["detail"]) == (422, True), answer.text
    assert service.post(good, token="another").status_code == 401
    assert httpx.get(f"{service.url}/health").status_code == 200
    assert service.post(good).status_code == 200


@pytest.mark.slow
def test_another_model_or_vocabulary_and_too_short_sequences_are_refused_at_the_start(
    model: Path, other: Path, service: Service, tmp_path: Path
) -> None:
    urls = {"reference_urls": [service.url], "model_name": str(model)}
    with pytest.raises(ConfigError, match=r"holds .* and the reference of this trainer is .*: give both the same"):
        load_reference(settings(**urls), small_model())
    same = {**urls, "reference_model": str(other)}
    with pytest.raises(ConfigError, match="sequences of up to 64 tokens, and seq_len is 65"):
        load_reference(settings(**same, seq_len=65), small_model())
    with pytest.raises(ConfigError, match=rf"knows {VOCABULARY} tokens and the trained model {VOCABULARY + 8}"):
        load_reference(settings(**same), small_model(vocab_size=VOCABULARY + 8))
    letters = save_tiny_model(tmp_path / "letters", seed=0)
    with pytest.raises(ConfigError, match=r"the vocabulary of .* is not that of the trained model"):
        load_reference(settings(**{**same, "model_name": str(letters)}), small_model())


def test_without_a_service_training_fails_after_the_time_limit_with_what_to_look_at(model: Path) -> None:
    urls = [f"http://127.0.0.1:{free_port()}"]
    config = settings(model_name=str(model), reference_urls=urls, reference_timeout_s=0.01)
    with pytest.raises(PeerUnavailable, match=r"no reference service answered for 0\.01 s: .*refused.*; look at"):
        load_reference(config, small_model())


def test_a_request_holds_what_scoring_reads_of_a_batch() -> None:
    batch = a_batch(temperature=0.7)
    ((numbers, read),) = decode_rows(encode_rows(batch), num_tokens=VOCABULARY, max_tokens=32).batches()
    sent = batch.rows(torch.tensor(numbers))
    for name in ("inputs", "mask", "lengths", "temperatures", "group_ids"):
        assert torch.equal(getattr(read, name), getattr(sent, name)), name
    assert torch.equal(read.labels[sent.mask], sent.labels[sent.mask])


def answer_to(request: bytes, values: Tensor) -> bytes:
    return encode_scores(values, request, model_name="m", vocabulary="v")


def test_values_that_are_not_the_answer_to_the_request_are_errors() -> None:
    batch = a_batch()
    request, others = encode_rows(batch), encode_rows(a_batch(seed=1))
    values = -torch.rand(int(batch.mask.sum()))
    _, read = decode_scores(answer_to(request, values), request, batch.mask)
    assert torch.equal(read[batch.mask], values)
    assert not read[~batch.mask].any()
    wrong = [
        answer_to(others, values),
        answer_to(request, values[1:]),
        answer_to(request, values)[:-4],
        answer_to(request, values.where(values < values.max(), torch.nan)),
        answer_to(request, values + 2),
        b"<html>",
    ]
    for answer in wrong:
        with pytest.raises(DataError):
            decode_scores(answer, request, batch.mask)


def test_an_answer_of_another_service_on_the_port_is_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*_: object, **__: object) -> httpx.Response:
        return httpx.Response(200, json={"status": "ok"})

    monkeypatch.setattr(httpx.Client, "request", answer)
    with pytest.raises(PeerError, match="is this a reference service"):
        load_reference(settings(model_name=str(model), reference_urls=["http://127.0.0.1:9"]), small_model())
