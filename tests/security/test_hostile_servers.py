"""Answers of a server with values that none of ours sends: they are errors that say what is wrong, or are left out."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from bridging import bridge_context
from environment_runs import served_run, settings
from fastapi import FastAPI
from fastapi.responses import Response
from pydantic import ValidationError
from rollout_fakes import FakeTokenizer, fake_inference
from training import settings as train_settings

from grpo_engine.bridges.placement.own import OwnModel
from grpo_engine.bridges.transport import server_client
from grpo_engine.bridges.transport.adapter import AdapterBridge
from grpo_engine.bridges.transport.server_client import ServerClient
from grpo_engine.bridges.transport.server_control import SupervisedServer
from grpo_engine.bridges.transport.turns import TurnsBridge, dtype_of_weights
from grpo_engine.check.sampling import CheckedServer, ServerKind
from grpo_engine.data.source import RolloutApiSource
from grpo_engine.environments import generating
from grpo_engine.environments.main import work
from grpo_engine.environments.measuring import HeldOutMeasure
from grpo_engine.environments.sampling.groups import Completions, NotFinite, check_completions
from grpo_engine.environments.status_requests import BatchLimits
from grpo_engine.errors import BridgeError, PeerError, PeerUnavailable
from grpo_engine.models.same_model import is_same_model
from grpo_engine.train import reference_client
from grpo_engine.train.evaluation import Evaluator, answer_problems, evaluation_metrics
from grpo_engine.train.reference_client import RemoteReference
from grpo_engine.wire import bounded_answers
from grpo_engine.wire.bounded_answers import AnswerTooLong
from grpo_engine.wire.codec import Message
from grpo_engine.wire.inference import BridgeInfo, JoinAnswer, ReceiveAnswer, SleepAnswer
from grpo_engine.wire.rollouts import (
    EnvironmentStatus,
    EvaluationOrder,
    EvaluationState,
    NamedAnswer,
    RegisterEnvironmentResponse,
)
from grpo_engine.wire.run_folder import ADDRESS_FILE
from grpo_engine.wire.token_clients import open_client

ONE = {"text": ["ab"], "prompt": "", "finish_reasons": ["stop"], "logprobs": [[[{"7": -0.5}], [{"0": -0.5}]]]}
ANSWERED = {"rewards": [[1.0, 0.0]], "lengths": [[1, 1]], "truncated": [[False, False]]}
STATUS = {
    "current_step": 0,
    "queue_size": 0,
    "unallocated_fraction": 1.0,
    "self_queue_size": 0,
    "max_group_size": 2,
    "env_weight": 1.0,
}


def with_nan(fake: FastAPI, is_wrong: Iterator[bool]) -> FastAPI:
    """The same server, of whose answers some have a log-probability that is not a number."""

    @fake.middleware("http")
    async def spoil(request: Any, call_next: Any) -> Response:
        answer = await call_next(request)
        body = b"".join([part async for part in answer.body_iterator])
        if request.url.path == "/generate" and next(is_wrong):
            body = body.replace(b"-0.5", b"NaN")
        return Response(body, answer.status_code, media_type="application/json")

    return fake


async def test_an_item_whose_log_probabilities_are_not_finite_is_left_out_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    spoiled = with_nan(fake_inference(lambda prompt, index: "ab"[index % 2]), (number < 3 for number in range(10**6)))
    with served_run(spoiled) as (api, inference, source):
        working = asyncio.create_task(work(settings(api, inference, max_workers=1), FakeTokenizer()))
        batch = await asyncio.to_thread(source.next_batch, 60)
        assert batch
        working.cancel()
        assert await working == 0
    said = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(said) == 2  # of the first and the second
    assert "completion 0, token 0: its log-probability is nan, so the model overflows" in said[0]


async def test_a_model_without_finite_log_probabilities_ends_the_environment_with_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generating, "_MAX_SKIPPED_ITEMS", 5)
    spoiled = with_nan(fake_inference(lambda prompt, index: "ab"), iter([True] * 10**4))
    with served_run(spoiled) as (api, inference, _):
        async with asyncio.timeout(60):
            with pytest.raises(NotFinite, match="its log-probability is nan, so the model overflows"):
                await work(settings(api, inference), FakeTokenizer())


@pytest.mark.parametrize("logprob", [1e39, -1e39, -1e300])
def test_a_log_probability_that_no_float32_holds_is_not_finite(logprob: float) -> None:
    """The rollout API refused its group, which ended the environment."""
    answer = Completions.model_validate({**ONE, "logprobs": [[[{"7": logprob}], [{"0": -0.5}]]]})
    with pytest.raises(NotFinite, match="so the model overflows"):
        check_completions(answer, 1, "inference server")


@pytest.mark.parametrize("version", [2**53 + 1, 2**63, -1])
def test_a_policy_version_that_no_json_keeps_is_the_fault_of_the_server(version: int) -> None:
    answer = Completions.model_validate({**ONE, "policy_versions": [[version, version]]})
    with pytest.raises(PeerError, match="need a policy version each, from 0 up"):
        check_completions(answer, 1, "inference server")
    with pytest.raises(ValueError, match="policy_version"):
        Completions.model_validate({**ONE, "policy_version": version})


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        (RegisterEnvironmentResponse, {"status": "success", "env_id": 10**400}),
        (BatchLimits, {"batch_size": 10**400, "max_token_len": 64}),
        (EnvironmentStatus, {**STATUS, "env_weight": -1e308}),
    ],
)
def test_numbers_of_a_rollout_api_that_an_environment_cannot_reckon_with_are_refused(
    kind: type[Message], answer: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"env_id|batch_size|env_weight"):
        kind.model_validate(answer)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rewards": [[1.0]]},
        {"rewards": [[]]},
        {"rewards": [[1.0, 2.0], [3.0]]},
        {"lengths": []},
        {"truncated": []},
        {"policy_versions": []},
        {"order": {"id": "other", "step": 0, "policy_version": 0, "num_prompts": 1, "num_samples": 2**20}},
    ],
    ids=str,
)
def test_an_evaluation_that_does_not_match_its_order_is_skipped(
    wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(404, request=request)
        ordered = json.loads(request.content) if request.content else {}
        state = {
            "order": {**ordered, **wrong.get("order", {})},
            "is_over": True,
            "answers": [
                {"environment": "a_0", "desired_name": "a", "answer": {"env_id": 0, **ANSWERED, **wrong}},
            ],
            "waiting_for": [],
            "missing": [],
            "unable": [],
        }
        return httpx.Response(200, json=state, request=request)

    config = train_settings(eval_every=1, eval_prompts=1, eval_samples=2)
    with RolloutApiSource("http://api", transport=httpx.MockTransport(answer)) as source:
        assert Evaluator(config, source).measure_if_due(0, 0) == {}
    assert "evaluation of step 0: the rollout API has another answer" in caplog.text


def test_an_evaluation_of_environments_and_texts_without_end_gives_bounded_metrics_and_log_lines() -> None:
    def named(number: int, **changes: Any) -> NamedAnswer:
        answer = {"env_id": number, **ANSWERED, **changes}
        return NamedAnswer.model_validate(
            {"environment": f"a_{number}", "desired_name": f"a{number}", "answer": answer}
        )

    def over(answers: list[NamedAnswer], **changes: Any) -> EvaluationState:
        order = EvaluationOrder(id="a", step=0, policy_version=0, num_prompts=1, num_samples=2)
        lists = {"waiting_for": [], "missing": [], "unable": [], **changes}
        return EvaluationState(order=order, is_over=True, answers=answers, **lists)

    names = {name.split("/")[1] for name in evaluation_metrics(over([named(number) for number in range(1500)]))}
    assert len(names) < 1100  # 30,000 of them, 7 MB, took 9 s of CPU and 270,000 metrics
    many = ["x" * 100] * 100_000
    versions = [[list(range(100_000)), [0]]]
    problems = answer_problems(over([named(0, problem="y" * 10**7), named(1, policy_versions=versions)], missing=many))
    assert sum(map(len, problems)) < 10_000
    assert sum(map(len, answer_problems(over([], unable=many)))) < 10_000
    with pytest.raises(ValidationError, match="environment"):
        NamedAnswer.model_validate({**named(0).model_dump(), "environment": "x" * 10**6})


async def test_an_order_of_more_completions_than_fit_in_memory_is_answered_with_the_reason() -> None:
    config = settings("http://api", "http://inference", eval_temperature=0.0)
    measure = HeldOutMeasure(config, FakeTokenizer(), None)  # type: ignore[arg-type]
    order = EvaluationOrder(id="a", step=0, policy_version=0, num_prompts=100, num_samples=2**20)
    answer = await measure.answer(order, longest=64, env_id=0)
    assert answer.problem is not None
    assert "lower it, or eval_prompts" in answer.problem


@pytest.mark.parametrize("name", ["x" * 5000, "\0", "~nobody-of-this-name/model", "/dev/\0"])
def test_a_server_whose_model_has_no_name_of_a_file_serves_another_model(name: str, tmp_path: Path) -> None:
    assert not is_same_model(str(tmp_path), name)


def test_a_pipe_in_the_folder_that_a_server_calls_its_model_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
    assert is_same_model(str(tmp_path / "own"), str(tmp_path / "other"))
    os.mkfifo(tmp_path / "other" / "pipe.safetensors")
    assert not is_same_model(str(tmp_path / "own"), str(tmp_path / "other"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_ranks": -5},
        {"num_ranks": 10**9},
        {"policy_version": 2**63 - 1},
        {"policy_version": -1},
        {"model_name": "m" * 5000},
        {"device": "c" * 300},
        {"instance": "i" * 300},
        {"dtype": "d" * 300},
    ],
)
def test_a_server_of_no_processes_or_with_endless_versions_or_names_is_none_of_ours(
    wrong: dict[str, int | str],
) -> None:
    state = {
        "enabled": True,
        "shared_weights": False,
        "update_count": 0,
        "last_update_time": 0,
        "model_name": "m",
        "device": "cpu",
        "policy_version": 0,
        "logprobs_mode": "raw",
        "paused": False,
        "instance": "i",
    }
    BridgeInfo.model_validate(state)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        BridgeInfo.model_validate({**state, **wrong})


@pytest.mark.parametrize("name", ["load", "__class__", "no_such", "int8", "complex128", "float4_e2m1fn_x2"])
def test_a_server_whose_weights_are_of_no_type_ends_a_trainer_that_takes_turns_with_words(name: str) -> None:
    info = BridgeInfo.model_construct(dtype=name)
    with pytest.raises(BridgeError, match=name):
        dtype_of_weights("http://server", info)
    assert dtype_of_weights("http://server", BridgeInfo.model_construct(dtype="bfloat16")) is torch.bfloat16


@contextmanager
def refusing_server() -> Iterator[str]:
    """The URL of a server that listens, and answers each request with 503."""

    class Refusal(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusal) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.timeout(30)
def test_a_server_that_never_falls_asleep_holds_a_trainer_no_longer_than_one_that_is_away(tmp_path: Path) -> None:
    with refusing_server() as url:
        context = bridge_context(tmp_path, url, tmp_path, patience_s=0.0)
        bridge = TurnsBridge(context, OwnModel(context), handover=None, staging_bytes=4000, check_every=1)
        with closing(bridge), pytest.raises(PeerUnavailable, match="has not fallen asleep within 0 s"):
            bridge.prepare_step()


def test_a_server_that_accepts_and_is_silent_holds_a_question_for_its_state_no_ten_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`grpo-engine check` said nothing meanwhile."""
    monkeypatch.setattr(server_client, "_STATE_WITHIN_S", 0.1)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        client = ServerClient(f"http://127.0.0.1:{silent.getsockname()[1]}", patience_s=0.0)
        with closing(client), pytest.raises(PeerUnavailable, match="ReadTimeout"):
            client.info()


def test_a_state_that_trickles_does_not_hold_a_trainer_for_the_length_that_other_answers_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each 64 KiB have a second: one server of several held the trainer for a quarter of an hour."""
    stub = httpx.MockTransport(lambda request: httpx.Response(200, content=b" " * (1 << 17)))
    monkeypatch.setattr(server_client, "open_client", partial(open_client, transport=stub))
    client = ServerClient("http://127.0.0.1:1", patience_s=0.0)
    with closing(client), pytest.raises(AnswerTooLong, match="longer than 65,536 bytes"):
        client.info()


@pytest.mark.parametrize("status", [200, 400])
def test_lists_in_an_answer_of_a_reference_service_are_not_parsed(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB of them took 1.7 GB and 13 s, of a description of its model or a refusal."""
    monkeypatch.setattr(bounded_answers, "MAX_ANSWER_MARKS", 1000)
    lists = b"[" + b"[]," * 1001 + b"0]"
    stub = httpx.MockTransport(lambda request: httpx.Response(status, stream=httpx.ByteStream(lists)))
    monkeypatch.setattr(reference_client, "open_client", partial(open_client, transport=stub))
    with pytest.raises(AnswerTooLong, match="more than 1,000 brackets"):
        RemoteReference(["http://127.0.0.1:1"], model_name="m", vocabulary="v", num_tokens=1, seq_len=1, patience_s=0.0)


def test_a_long_refusal_of_scores_is_shown_and_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_client.ReferenceRefusal, "model_validate_json", None)
    words = reference_client._detail(httpx.Response(400, content=b"[" * (2 << 20)))
    assert words == "[" * 500 + "…"


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a listener of another user")
def test_a_trainer_asks_no_other_user_in_place_of_the_supervisor_to_restart_a_server(tmp_path: Path) -> None:
    """Who had taken the socket's place could say that it was restarted, or hold the trainer without end."""
    path = tmp_path / "s"
    (tmp_path / ADDRESS_FILE).write_text(json.dumps({"pid": 1, "socket": str(path)}))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        os.seteuid(65534)  # SO_PEERCRED has who listened
        try:
            listener.listen()
        finally:
            os.seteuid(0)
        with pytest.raises(PeerUnavailable, match="user 65534 listens in place of the supervisor"):
            SupervisedServer(tmp_path, "vllm", patience_s=0.0)._ask("status")


def test_a_trainer_keeps_no_more_adapters_than_a_server_can_use_whatever_it_says(tmp_path: Path) -> None:
    """They are in shared memory."""
    bridge = AdapterBridge.__new__(AdapterBridge)
    bridge._kept = [tmp_path / str(number) for number in range(300)]
    for path in bridge._kept:
        path.mkdir()
    bridge._remove_all_but(2, in_use=list(map(str, bridge._kept)))
    assert bridge._kept == [tmp_path / str(number) for number in range(42, 300)]
    assert sum(1 for _ in tmp_path.iterdir()) == 258


@pytest.mark.parametrize("kind", [SleepAnswer, ReceiveAnswer, JoinAnswer])
def test_of_the_reason_that_a_server_gives_the_beginning_is_kept(kind: type[Message]) -> None:
    answer = {"instance": "i", "policy_version": 1, "state": "asleep", "problem": "x" * 1_000_000}
    assert kind.model_validate(answer).problem == "x" * 1000 + "…"  # type: ignore[attr-defined]


def test_a_checksum_of_a_server_that_no_weights_have_is_refused() -> None:
    answer = {"instance": "i", "policy_version": 1, "state": "awake"}
    with pytest.raises(ValueError, match="checksum"):
        SleepAnswer.model_validate({**answer, "checksum": 10**4000})
    with pytest.raises(ValueError, match="checksums"):
        ReceiveAnswer.model_validate({**answer, "checksums": [10**4000]})


ANSWER: dict[str, Any] = {
    "text": ["a"], "prompt": "", "finish_reasons": ["length"], "logprobs": [[[{"5": -1.0}]]], "token_ids": [[5]],
    "policy_version": 0,
}  # fmt: skip
CHOICE: dict[str, Any] = {
    "index": 0, "finish_reason": "length", "logprobs": {"tokens": ["token_id:5"], "token_logprobs": [-1.0]},
}  # fmt: skip


@pytest.mark.parametrize("token", [-1, 2**31, 2**70])
@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("is_vllm", [False, True])
def test_tokens_of_a_text_that_no_tokenizer_decodes_end_no_check_with_a_traceback(
    token: int, is_chat: bool, is_vllm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"prompt_token_ids": [5, token], "tokens": [5, token]}

    def ask(method: str, path: str, body: object, kind: type[Message]) -> Message:
        models = {"data": [{"id": "m"}]} if path == "/v1/models" else {}
        return kind.model_validate_json(json.dumps({**ANSWER, "version": "1", **models, **wrong}))

    server = CheckedServer("http://127.0.0.1:9", patience_s=1, vocab_size=300)
    monkeypatch.setattr(server._client, "ask", ask)
    server._kind = ServerKind.VLLM if is_vllm else ServerKind.OURS
    with pytest.raises(ValidationError, match=r"(prompt_token_ids|tokens)\.1"):
        _ = server.encode_chat([{"role": "user", "content": "a"}]) if is_chat else server.encode("a")


@pytest.mark.parametrize("wrong", [
    {"finish_reasons": ["length"] * 2}, {"token_ids": []}, {"logprobs": [[[{"300": -1.0}]]], "token_ids": [[300]]},
    {"logprobs": [[[{"5": -1.0}]] * 9], "token_ids": [[5] * 9]}, {"prompt_logprobs": [None, {"6": -1.0}, {"6": -1.0}]},
    {"choices": [CHOICE] * 2},
    *({"choices": [{**CHOICE, "logprobs": {"tokens": tokens, "token_logprobs": [-1.0]}}]}
      for tokens in (["token_id:-7"], ["token_id:x"], ["token_id:" + "9" * 5000], [])),
], ids=lambda wrong: str(wrong)[:60])  # fmt: skip
def test_no_answer_of_a_server_ends_a_check_with_a_traceback(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(method: str, path: str, body: object, kind: type[Message]) -> Message:
        models = {"data": [{"id": "m"}]} if path == "/v1/models" else {}
        return kind.model_validate_json(json.dumps({**ANSWER, "choices": [CHOICE], "version": "1", **models, **wrong}))

    server = CheckedServer("http://127.0.0.1:9", patience_s=1, vocab_size=300)
    monkeypatch.setattr(server._client, "ask", ask)
    if "choices" in wrong:
        server._stock_vllm()
    with pytest.raises(PeerError):
        _ = server.sample([5], n=1, max_tokens=4, temperature=1.0), server.prompt_logprobs([5, 6, 5])
