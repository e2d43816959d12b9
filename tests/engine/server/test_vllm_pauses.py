"""Pauses of the vLLM engine that fail halfway, with vLLM replaced by a fake."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_fakes import Letters, flat

from grpo_engine.bridges.memory.weight_lock import WeightLock
from grpo_engine.errors import BridgeError, DataError, HalfWritten
from grpo_engine.processes import ProcessIdentity
from grpo_engine.server import prompts
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import Adapter, EngineStalled, EngineUnavailable, WeightsBusy
from grpo_engine.server.pausing import Pause
from grpo_engine.server.vllm import engine as vllm_engine
from grpo_engine.server.vllm import generations
from grpo_engine.server.vllm.engine import VllmEngine
from grpo_engine.server.vllm.generations import _VALUES
from grpo_engine.server.vllm.stock import _POSTED
from grpo_engine.serving.access import Caller, Token
from grpo_engine.wire.inference import GenerateRequest

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of what vLLM imports

LOADER = {"load_format": "auto", "model_loader_extra_config": {}}
READ_LATE = [
    "keep",
    f"update_config ({{'load_config': {LOADER}}},)",
    "reload_weights {'weights_path': 'm'}",
    "grpo_check_read ({}, {}, 'm')",
    "resume",
]
"""Commands to the core by which a server that has no weights reads the model `m`."""


class Llm:
    """`AsyncLLM` as far as the engine uses it; a test decides what its core answers, and when."""

    errored = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fault: Exception | None = None
        """Result of the next command to the core."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.may_end = asyncio.Event()
        """Requests finish once it is set."""
        self.num_generated = 0
        self.engine_core = self
        self.output_processor = SimpleNamespace(request_states={}, tokenizer=Letters())
        self.model_config = SimpleNamespace(
            max_model_len=64, max_logprobs=20, hf_text_config=SimpleNamespace(vocab_size=50)
        )

    async def answer(self, call: str) -> None:
        self.calls.append(call)
        await self.may_answer.wait()
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        await self.answer(mode)

    async def resume_generation(self) -> None:
        await self.answer("resume")

    async def collective_rpc(self, method: str, args: Any = (), kwargs: Any = None) -> list[None]:
        await self.answer(f"{method} {args or kwargs or ()}")
        return [None]

    async def remove_lora(self, number: int) -> None:
        await self.answer(f"remove {number}")

    async def generate(self, *_args: Any, **_others: Any) -> AsyncIterator[Any]:
        self.num_generated += 1
        try:
            yield SimpleNamespace(outputs=[])
            await self.may_end.wait()
            completion = SimpleNamespace(index=0, token_ids=[7], logprobs=flat({7: -1.0}), finish_reason="length")
            yield SimpleNamespace(outputs=[completion], prompt_logprobs=None)
        finally:
            self.calls.append("end of a request")


@pytest.fixture
async def llm() -> Llm:
    return Llm()


@pytest.fixture
async def engine(llm: Llm) -> VllmEngine:
    engine = VllmEngine(ServerConfig(model_name="m"), instance="i", environment={})

    async def drained() -> None:
        pass

    engine._llm, engine._generations.outputs = llm, SimpleNamespace(drained=drained)
    return engine


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def send_request(engine: VllmEngine) -> asyncio.Task[Any]:
    return asyncio.create_task(engine.generate([1], GenerateRequest(prompt="", max_tokens=1)))


def pausing(engine: VllmEngine, timeout_s: float = 60) -> asyncio.Task[None]:
    return asyncio.create_task(engine.pause(os.getpid(), timeout_s))


async def test_requests_continue_after_a_failed_pause_and_a_failed_reload(
    engine: VllmEngine, llm: Llm, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine._parameters = SimpleNamespace()
    monkeypatch.setattr(vllm_engine, "check_fits", lambda *_: None)
    for change in (engine.pause(os.getpid(), 60), engine.reload("somewhere", 4)):
        llm.fault = RuntimeError("the cache cannot be reset")
        with pytest.raises(RuntimeError, match="cannot be reset"):
            await change
        assert engine._generations.gate.is_open
        assert llm.calls[-1] == "resume"
        assert engine._pause is None


async def test_a_pause_that_ends_while_the_core_stops_is_refused(engine: VllmEngine, llm: Llm) -> None:
    llm.may_answer.clear()
    pause = pausing(engine)
    await turns()
    ending = asyncio.create_task(engine.resume(None))
    await turns()
    llm.may_answer.set()
    with pytest.raises(WeightsBusy, match="the pause ended"):
        await pause
    await ending
    assert engine._generations.gate.is_open


async def test_a_core_that_exits_while_a_pause_waits_for_it_is_detected(
    engine: VllmEngine, llm: Llm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "_POLL_S", 0)
    llm.may_answer.clear()
    pause = pausing(engine, timeout_s=0)
    await turns()
    watch = asyncio.create_task(engine._watching(llm))
    await turns()
    llm.errored = True  # vLLM never answers a command that was in progress
    await turns()
    assert watch.done()
    with pytest.raises(EngineUnavailable, match="has exited"):
        watch.result()
    pause.cancel()
    await asyncio.wait({pause})


async def test_vllm_is_killed_when_all_requests_have_ended_and_the_gpu_is_idle(engine: VllmEngine, llm: Llm) -> None:
    """It was killed within a kernel, which under MPS was a fault of the trainer in 4 of 7 restarts."""
    running = send_request(engine)
    await turns()
    await engine._generations.gate.close()  # by a pause
    waiting = send_request(engine)
    await turns()
    llm.may_answer.clear()
    closing = asyncio.create_task(engine.close())
    await turns()
    assert llm.calls == ["abort"]
    assert not engine._is_closing.is_set()  # at which the thread kills vLLM
    llm.may_end.set()
    for each in (running, waiting, send_request(engine)):
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await each
    llm.may_answer.set()
    await closing
    assert llm.calls == ["abort", "end of a request", "grpo_synchronize ()"]
    assert engine._is_closing.is_set()


@pytest.mark.parametrize("has_exited", [False, True], ids=["hangs", "has exited"])
async def test_a_core_that_does_not_answer_holds_no_end(
    engine: VllmEngine, llm: Llm, monkeypatch: pytest.MonkeyPatch, has_exited: bool
) -> None:
    monkeypatch.setattr(vllm_engine, "END_WITHIN_S", 0.01)
    llm.errored = has_exited
    llm.may_answer.clear()
    await engine.close()
    assert engine._is_closing.is_set()
    assert llm.calls == ([] if has_exited else ["abort"])


async def test_a_core_that_exits_during_the_late_end_of_a_pause_is_no_error_of_that_end(
    engine: VllmEngine, llm: Llm
) -> None:
    """Its task is not awaited: asyncio logged the error at some later garbage collection, in any test."""
    await engine.pause(os.getpid(), 60)
    llm.errored = True
    with pytest.raises(EngineUnavailable):
        await engine.resume(None)
    await engine._end_late_pause(engine._pause)


@pytest.fixture
async def unread(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    """An engine that has read no weights, since it expects them from this process."""
    monkeypatch.setattr(vllm_engine, "_POLL_S", 0)
    monkeypatch.setattr(vllm_engine, "checkpoint_folder", Path)
    engine._has_read_weights, engine._has_start_loader = False, True
    engine._arguments = SimpleNamespace(**LOADER)
    engine._parameters = SimpleNamespace(shapes={}, aliases={})
    engine._generations.lock.expect(ProcessIdentity.of_this_process())
    engine._pause = Pause.until_published(ProcessIdentity.of_this_process(), time.monotonic())
    return engine


@asynccontextmanager
async def watched(engine: VllmEngine, llm: Llm) -> AsyncIterator[None]:
    watch = asyncio.create_task(engine._watching(llm))
    await turns()
    yield
    await turns()
    assert not watch.done()
    watch.cancel()


async def test_weights_that_a_living_process_never_writes_are_read_at_the_time_limit_of_its_pause(
    unread: VllmEngine, llm: Llm
) -> None:
    """A trainer may be stopped, or finished within a process that goes on."""
    async with watched(unread, llm):
        assert llm.calls == []
        unread._pause = replace(unread._pause, until=0.0)
    assert llm.calls == READ_LATE
    assert unread._pause is None
    assert unread._generations.lock.check().policy_version == 0
    unread.check_health()


async def test_no_file_is_read_over_the_weights_for_which_a_trainer_has_paused(unread: VllmEngine, llm: Llm) -> None:
    late = unread._pause
    await unread.pause(os.getpid(), 60)
    await unread._end_late_pause(late)
    assert llm.calls == ["keep"]
    with unread._generations.lock.writing(4, has_all=True):
        pass
    await unread.resume(None)
    assert unread._generations.lock.check().policy_version == 4


async def test_weights_are_read_though_somebody_has_ended_the_pause_of_the_trainer_that_exits(
    unread: VllmEngine, llm: Llm
) -> None:
    """They stayed half-written for good: only the end of the pause had them read."""
    async with watched(unread, llm):
        await unread.resume(None)
        await turns()
        assert llm.calls == ["resume"]
        unread._generations.lock.expect(None)  # as if it had exited
    assert llm.calls == ["resume", *READ_LATE]
    unread.check_health()


async def test_a_core_that_produces_nothing_is_stalled_until_its_next_output(engine: VllmEngine, llm: Llm) -> None:
    request = send_request(engine)
    await turns()
    with pytest.raises(EngineStalled, match="produced nothing"):
        engine._generations.stalls.check(time.monotonic() + 1e6)
    llm.may_end.set()
    await request
    engine._generations.stalls.check(time.monotonic() + 1e6)


async def test_a_pause_of_an_exited_core_is_answered_with_an_error(engine: VllmEngine, llm: Llm) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    llm.fault = EngineDeadError()
    with pytest.raises(EngineUnavailable, match="has exited"):
        await engine.pause(os.getpid(), 60)


async def test_a_request_that_ran_during_a_write_is_generated_again(engine: VllmEngine, llm: Llm) -> None:
    request = send_request(engine)
    await turns()
    await engine.pause(os.getpid(), 60)
    with engine._generations.lock.writing(1):
        await engine.resume(None)  # too early
        llm.may_end.set()
        await turns()
        assert not request.done()
    generation = await request
    assert llm.num_generated == 2
    assert generation.completions[0].policy_versions == [1]


async def test_a_pause_outlasts_its_limit_while_its_owner_writes(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "_POLL_S", 0)
    await engine.pause(os.getpid(), 0)
    watch = None
    try:
        with engine._generations.lock.writing(1):
            watch = asyncio.create_task(engine._watching(engine._llm))
            await turns()
            assert not engine._generations.gate.is_open
        await turns()
        assert engine._generations.gate.is_open
    finally:
        watch.cancel()


@pytest.mark.parametrize("written", ["nowhere", "here", "into the memory that was adopted"])
async def test_files_are_read_for_a_trainer_that_exits_before_its_first_write_and_never_in_place_of_a_later_version(
    unread: VllmEngine, llm: Llm, written: str
) -> None:
    """They were served as the version before: base weights with the number of trained ones."""
    if written != "nowhere":
        unread._generations.lock = WeightLock.private(policy_version=50 if written != "here" else 0)
    lock = unread._generations.lock
    if written == "here":
        with lock.writing(50):
            pass
    await unread.pause(os.getpid(), 60)
    with suppress(RuntimeError), lock.writing(51):
        raise RuntimeError("the trainer exits")
    llm.calls.clear()
    await unread._end_late_pause(unread._pause)
    if written != "nowhere":
        with pytest.raises(HalfWritten, match="after version 50"):
            unread.check_health()
        assert llm.calls == ["abort", "resume"]
    else:
        unread.check_health()
        assert llm.calls == READ_LATE
        assert lock.read().policy_version == 0


async def test_an_adapter_loaded_during_a_pause_does_not_invalidate_frozen_requests(
    engine: VllmEngine, llm: Llm
) -> None:
    request = send_request(engine)
    await turns()
    (request_id,) = engine._generations._versions._running
    llm.output_processor.request_states["r"] = SimpleNamespace(
        external_req_id=request_id, request_index=0, detokenizer=SimpleNamespace(num_output_tokens=lambda: 0)
    )
    await engine.pause(os.getpid(), 60)
    with engine._generations.lock.writing(3):
        pass
    engine._generations.serve_adapter(llm, 4, None, Adapter(name="a", path="p", number=1))
    await engine.resume(None)
    llm.may_end.set()
    generation = await request
    assert llm.num_generated == 1
    assert generation.completions[0].policy_versions == [3]


@pytest.mark.parametrize(
    ("is_trainer_alive", "error", "message"),
    [(False, HalfWritten, "the writer failed"), (True, BridgeError, "is writing another one")],
    ids=["half-written weights", "during a write"],
)
async def test_an_adapter_on_weights_that_are_not_complete_is_refused_and_unloaded(
    engine: VllmEngine,
    llm: Llm,
    monkeypatch: pytest.MonkeyPatch,
    is_trainer_alive: bool,
    error: type[Exception],
    message: str,
) -> None:
    from vllm.lora.request import LoRARequest

    engine._parameters = SimpleNamespace(shapes={}, aliases={})
    monkeypatch.setattr(vllm_engine, "check_adapter", lambda *_args, **_others: [])

    async def load(*_args: Any) -> LoRARequest:
        if not is_trainer_alive:
            with suppress(RuntimeError), engine._generations.lock.writing(1):
                raise RuntimeError("the trainer fails meanwhile")
        return LoRARequest(lora_name="adapter-1", lora_int_id=1, lora_path="somewhere")

    monkeypatch.setattr(engine._generations.adapters, "load", load)
    with (
        engine._generations.lock.writing(1) if is_trainer_alive else nullcontext(),
        pytest.raises(error, match=message),
    ):
        await engine.load_adapter("somewhere", "a", 5)
    assert llm.calls == ["remove 1"]
    assert engine._generations.lock.read().is_writing is not is_trainer_alive


async def test_vllms_routes_refuse_millions_of_log_probabilities_and_long_lists_without_the_token(
    engine: VllmEngine, llm: Llm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "caller", lambda: Caller(token=Token.WRONG))
    for asked, most in (
        ({"max_tokens": 60, "logprobs": 20}, 524288),
        ({"max_tokens": None, "logprobs": -1}, 524288),
        # Of 64 completions of 300 tokens in a chat: 169 MB of answer, and /health waited for 29 s.
        ({"max_tokens": 1, "bad_words": ["a" * 65537]}, 1024),
        ({"max_tokens": 1, "bad_words": ["a"] * 1025}, 1024),
        ({"max_tokens": 1, "stop_token_ids": [7] * 500_000}, 1024),
        ({"max_tokens": 1, "logit_bias": dict.fromkeys(range(1025), 1.0)}, 1024),
    ):
        with pytest.raises(DataError, match=f"without the token of the run may have {most}"):
            await anext(engine.guarded({"prompt_token_ids": [1]}, SimpleNamespace(n=4096, **asked), "r"))
    assert llm.num_generated == 0
    stream = engine.guarded({"prompt_token_ids": [1]}, SimpleNamespace(n=8, max_tokens=60, logprobs=20), "r")
    await anext(stream)
    await stream.aclose()


def test_every_list_of_vllms_sampling_parameters_is_bounded_without_the_token() -> None:
    from vllm import SamplingParams

    kinds = {name: str(kind) for name, kind in SamplingParams.__annotations__.items() if not name.startswith("_")}
    lists = {name for name, kind in kinds.items() if any(word in kind for word in ("list", "dict", "set", "array"))}
    assert lists & frozenset().union(*_POSTED.values()) == {*_VALUES}


@pytest.mark.parametrize(("token", "priority"), [(Token.WRONG, 1), (Token.RIGHT, -5)])
async def test_requests_without_the_token_have_a_lower_priority_whatever_they_ask_for(
    engine: VllmEngine, llm: Llm, monkeypatch: pytest.MonkeyPatch, token: Token, priority: int
) -> None:
    """One of 64 completions of 2,000 tokens filled the KV cache, and a request of the run waited for 300 s."""
    monkeypatch.setattr(generations, "caller", lambda: Caller(token=token))
    given: list[Any] = []
    run = llm.generate

    def generate(*args: Any, **others: Any) -> Any:
        given.append(others.pop("priority"))
        return run(*args, **others)

    monkeypatch.setattr(llm, "generate", generate)
    stream = engine.guarded({"prompt_token_ids": [1]}, SimpleNamespace(n=1, max_tokens=1), "r", priority=-5)
    await anext(stream)
    await stream.aclose()
    assert given == [priority]


@pytest.mark.parametrize("token", [Token.WRONG, Token.RIGHT])
async def test_no_update_waits_for_requests_without_the_token_to_finish(
    llm: Llm, monkeypatch: pytest.MonkeyPatch, token: Token
) -> None:
    """Four streams of another user that nobody read stopped a run; so they did once they were closed, until Python
    collected garbage."""
    monkeypatch.setattr(generations, "caller", lambda: Caller(token=token))
    running = generations.Generations(ServerConfig(model_name="m", finish_before_update=True), "i")
    stream = running.guarded(lambda: llm, {"prompt_token_ids": [1]}, SimpleNamespace(n=1, max_tokens=1), "r", None)
    await anext(stream)
    closing = asyncio.create_task(running.close_gate())
    await turns()
    assert closing.done() is (token is Token.WRONG)
    await stream.aclose()
    await closing


async def test_a_client_that_disconnects_from_a_stream_releases_everything(engine: VllmEngine, llm: Llm) -> None:
    stream = engine.guarded({"prompt_token_ids": [1]}, None, "r")
    await anext(stream)
    engine._generations.stalls.check(1e12)  # a client that stops reading is no stall
    await stream.aclose()
    assert llm.calls == ["end of a request"]
    running = engine._generations
    assert (running._num_requests, running.gate._num_inside, running.stalls.num_pending) == (0, 0, 0)
