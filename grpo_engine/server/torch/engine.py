"""The engine on plain torch: one worker thread owns the model and decodes waiting requests in batches.

Weights change on the same thread between two batches, or in a trainer that holds the weight lock; a batch during which
the lock moved is discarded and decoded again. For throughput on large models use vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from grpo_engine.errors import GrpoError, HalfWritten
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import (
    Adapter,
    Completion,
    EngineInfo,
    EngineUnavailable,
    Generation,
)
from grpo_engine.server.pausing import Pause
from grpo_engine.server.prompts import PromptCodec, max_new_tokens
from grpo_engine.server.sleeping import LoadingTurn, Sleep, require, require_awake, require_possible
from grpo_engine.server.stall_detector import StallDetector
from grpo_engine.server.torch.batching import Job, next_batch
from grpo_engine.server.torch.decoding import Decoded, Decoder, Work
from grpo_engine.server.torch.weights import ServedWeights, open_weights, tokenizer_for_another_thread
from grpo_engine.serving.access import Token, caller
from grpo_engine.wire.inference import (
    GenerateRequest,
    JoinRequest,
    ReceiveRequest,
    TakeRequest,
    WakeRequest,
    WokenRequest,
)

_QUIET_S = 0.002
"""A batch begins when no request arrived for so long: requests of one step arrive together and share a batch."""
_LONGEST_GATHERING_S = 0.02
_POLL_S = 0.25
"""Interval at which a pause's owner is checked."""
_LOCK_POLL_S = 0.002
_YIELD_AFTER_S = 1.0
"""A batch of requests without the token that has run for so long is cut for requests with it, and for commands."""
_LEAVE_LOADING_AFTER_S = 0.5
"""How long a shutdown waits for a model that is still loading; its thread then ends with the process."""

ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)


class TorchEngine:
    """See `grpo_engine.server.engine.Engine`."""

    def __init__(self, config: ServerConfig, *, instance: str, environment: Mapping[str, str]) -> None:
        self.logprobs_mode = config.logprobs_mode
        self._config = config
        self._instance = instance
        self._environment = environment
        self._changed = threading.Condition()
        """Guards all fields below; notified when one of them changes."""
        self._waiting: deque[Job] = deque()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._running: list[Job] = []
        self._batch_began_at = 0.0
        self._has_yielded = False
        """A batch that was gathered has let a command go first, and the next one will not."""
        self._pause: Pause | None = None
        self._sleep: Sleep | None = None
        """None while it is awake."""
        self._stalls = StallDetector(config.stalled_after_s)
        """Updated by the worker thread: a running batch is work, and every forward pass is output."""
        self._is_closing = False
        self._is_exporting = False
        """Shared memory is being created: a shutdown must wait for the thread, or the memory would be left."""
        self._weights: ServedWeights | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="decoder", daemon=True)

    def start(self) -> None:
        """Start to load the model."""
        self._thread.start()

    def wait_loaded(self) -> None:
        """Return once the model is loaded; raises the error that prevented it."""
        with self._changed:
            self._changed.wait_for(lambda: self._weights is not None or self._failure is not None)
        if self._failure is not None:
            raise self._failure

    async def wait_failed(self) -> None:
        """Return when the engine was closed; raises the error that stopped it otherwise."""
        await asyncio.to_thread(self._thread.join)
        if self._failure is not None:
            raise EngineUnavailable(f"the engine has stopped: {type(self._failure).__name__}: {self._failure}")

    # --- on the event loop -----------------------------------------------------------------------------------------

    def check_health(self) -> None:
        weights = self._loaded()
        self._stalls.check(time.monotonic())
        weights.lock.check()

    def info(self) -> EngineInfo:
        weights = self._loaded()
        state = weights.lock.read()
        return EngineInfo(
            engine=f"torch {torch.__version__}",
            device=str(weights.model.device),
            dtype=str(weights.model.dtype).removeprefix("torch."),
            policy_version=state.policy_version,
            update_count=state.update_count,
            last_update_time=state.updated_at,
            is_paused=self._pause is not None,
            is_sharing=weights.is_sharing,
            sleep_state="awake" if self._sleep is None else self._sleep.state,
            sleep_words=None if self._sleep is None else self._sleep.words,
            sleeps_since=None if self._sleep is None else self._sleep.since,
        )

    async def encode(self, text: str) -> list[int]:
        self._loaded()
        return await self._prompts.encode(text)

    def decode(self, token_ids: list[int]) -> str:
        self._loaded()
        return self._prompts.decode(token_ids)

    async def render_chat(self, messages: list[dict[str, str]]) -> list[int]:
        self._loaded()
        return await self._prompts.render_chat(messages)

    async def generate(self, prompt_token_ids: list[int], params: GenerateRequest) -> Generation:
        weights = self._loaded()
        job = Job(
            prompt=prompt_token_ids,
            params=params,
            max_new_tokens=max_new_tokens(
                prompt_token_ids,
                params,
                max_model_len=self._config.max_model_len,
                vocabulary=int(weights.model.config.get_text_config().vocab_size),
            ),
            is_without_token=caller().token is Token.WRONG,
        )
        with self._changed:
            max_waiting = self._config.max_waiting // (2 if job.is_without_token else 1)
            if len(self._waiting) >= max_waiting:
                num_waiting = len(self._waiting)
                raise EngineUnavailable(f"{num_waiting} requests are waiting: send fewer at once, or retry later")
            self._waiting.append(job)
            self._changed.notify_all()
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            with self._changed:
                job.is_cancelled = True
                if job not in self._running and job in self._waiting:
                    self._waiting.remove(job)
            raise

    async def pause(self, owner_pid: int | None, timeout_s: float) -> None:
        pause = Pause.requested(owner_pid, timeout_s, time.monotonic())
        await self._between_batches(lambda: self._begin_pause(pause), is_update=True)

    async def resume(self, policy_version: int | None) -> None:
        await self._between_batches(lambda: self._end_pause(policy_version))

    async def reload(self, path: Path, policy_version: int) -> None:
        weights = self._loaded()
        await self._while_awake(lambda: weights.reload(path, policy_version), is_update=True)

    async def join(self, request: JoinRequest) -> None:
        weights = self._loaded()
        await self._while_awake(lambda: weights.join(request))

    async def receive(self, request: ReceiveRequest) -> list[int]:
        weights = self._loaded()

        def take() -> list[int]:
            checksums = weights.receive(request)
            if self._pause is not None and self._pause.owner == weights.awaits:
                self._pause = None
            return checksums

        return await self._while_awake(take, is_update=True)

    async def sleep(self, owner_pid: int) -> None:
        await self._between_batches(lambda: self._fall_asleep(owner_pid), is_update=True)

    async def wake_up(self, request: WakeRequest) -> None:
        weights = self._loaded()

        def allocate() -> None:
            sleep = require(self._sleep, "asleep", "wake_up")
            weights.allocate()
            self._sleep = replace(sleep, state="weights")
            weights.begin_staged(request)

        await self._between_batches(allocate)

    async def take(self, request: TakeRequest) -> None:
        weights = self._loaded()

        def take() -> None:
            require(self._sleep, "weights", "take")
            weights.take_staged(request.number)

        await self._between_batches(take)

    async def woken(self, request: WokenRequest) -> int | None:
        weights = self._loaded()

        def end() -> int | None:
            require(self._sleep, "weights", "woken")
            checksum = weights.end_staged(request.policy_version, with_checksum=request.with_checksum)
            self._sleep = None
            return checksum

        return await self._between_batches(end)

    async def load_adapter(self, path: Path, name: str | None, policy_version: int | None) -> Adapter:
        weights, rank = self._loaded(), self._config.max_lora_rank
        return await self._while_awake(lambda: weights.load_adapter(path, name, policy_version, rank), is_update=True)

    async def unload_adapter(self) -> Adapter | None:
        return await self._while_awake(self._loaded().unload_adapter)

    def adapter(self) -> Adapter | None:
        return self._loaded().adapter

    def stock_app(self) -> None:
        return None

    async def close(self) -> None:
        with self._changed:
            self._is_closing = True
            must_wait = self._weights is not None or self._is_exporting
            for job in (*self._running, *self._waiting):
                job.is_cancelled = True
            self._changed.notify_all()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, None if must_wait else _LEAVE_LOADING_AFTER_S)

    def _loaded(self) -> ServedWeights:
        if self._failure is not None:
            raise EngineUnavailable(f"the engine has stopped: {type(self._failure).__name__}: {self._failure}")
        if self._is_closing:
            raise EngineUnavailable("the server is shutting down")
        if self._weights is None:
            raise EngineUnavailable("the model is loading")
        if not self._thread.is_alive():
            raise EngineUnavailable("the engine's thread has ended: restart the server")
        return self._weights

    async def _between_batches(self, action: Callable[[], ResultT], *, is_update: bool = False) -> ResultT:
        """Have the worker thread do something after its batch, which ends sooner for requests with `interrupt`."""
        self._loaded()
        future: Future[ResultT] = Future()
        with self._changed:
            self._commands.append((action, future))
            for job in self._running if is_update else ():
                job.is_cut = job.params.interrupt
            self._changed.notify_all()
        return await asyncio.wrap_future(future)

    async def _while_awake(self, action: Callable[[], ResultT], *, is_update: bool = False) -> ResultT:
        def act() -> ResultT:
            require_awake(self._sleep)
            return action()

        return await self._between_batches(act, is_update=is_update)

    # --- on the worker thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._config.threads is not None:
            torch.set_num_threads(self._config.threads)
        weights = None
        turn = LoadingTurn(self._config)
        try:
            turn.take(lambda: self._is_closing)
            weights = open_weights(
                self._config,
                instance=self._instance,
                environment=self._environment,
                before_export=self._before_export,
            )
            self._decoder = self._make_decoder(weights)
            tokenizer = tokenizer_for_another_thread(weights.tokenizer)
            self._prompts = PromptCodec(self._config.model_name, tokenizer, max_model_len=self._config.max_model_len)
            if weights.awaits is not None and self._config.enable_sleep_mode:
                weights.free()
                self._sleep = Sleep(owner=weights.awaits)
            elif weights.awaits is not None:
                self._pause = Pause.until_published(weights.awaits, time.monotonic())
                logger.info("Requests wait until %s has published its weights", self._pause.owner_text)
            turn.give_back()
            self._set(weights=weights)
            while self._turn(weights):
                pass
        except BaseException as error:  # any error must reach waiting requests and /health
            logger.error("The engine has stopped", exc_info=None if isinstance(error, GrpoError) else error)
            self._set(failure=error)
        finally:
            turn.give_back()
            if weights is not None:
                weights.close()
            self._refuse_all()

    def _before_export(self) -> None:
        with self._changed:
            if self._is_closing:
                raise EngineUnavailable("the server is shutting down")
            self._is_exporting = True

    def _turn(self, weights: ServedWeights) -> bool:
        """Run one command or one batch; False once the engine is closing."""
        with self._changed:
            self._changed.wait_for(self._has_work, timeout=_POLL_S if self._pause else None)
            if self._is_closing:
                return False
            command = self._commands.popleft() if self._commands else None
        if command is not None:
            _set_result(*command)
        elif self._pause is not None:
            if (why := self._pause.why_over(time.monotonic())) is not None:
                logger.warning("Resumed without a request: %s", why)
                self._pause = None
        elif self._sleep is None:
            self._decode_next(weights)
        return True

    def _has_work(self) -> bool:
        may_decode = self._pause is None and self._sleep is None
        return self._is_closing or bool(self._commands) or (may_decode and bool(self._waiting))

    def _decode_next(self, weights: ServedWeights) -> None:
        self._gather()
        try:
            before = weights.lock.check()
        except HalfWritten as error:
            self._refuse_waiting(error)
            return
        if before.is_writing:
            time.sleep(_LOCK_POLL_S)  # a writer that did not pause this server
            return
        with self._changed:
            # A command that arrived meanwhile found no running batch to cut. Only one in a row goes first: updates that
            # follow each other would leave no time for a batch.
            self._has_yielded = bool(self._commands) and not self._has_yielded
            if self._has_yielded:
                return
            self._waiting = deque(job for job in self._waiting if not job.is_cancelled)
            batch = next_batch(
                self._waiting, max_rows=self._config.max_batch_size, max_tokens=self._config.max_batch_tokens
            )
            self._running, self._batch_began_at = [job for job, _ in batch], time.monotonic()
            for job in self._running:
                job.is_cut = False
        if not batch:
            return
        try:
            with self._working():
                decoded = self._decode(batch)
        except Exception as error:  # one batch that fails, e.g. for lack of memory, must not end the server
            logger.exception("A batch of %d requests failed", len(batch))
            self._drop(self._running, error)
            return
        if weights.lock.read().sequence != before.sequence:
            logger.warning("The weights changed during a batch; decoding it again")
            for job in self._running:
                job.prompt_logprobs = None
            return
        for (job, _), rows in zip(batch, decoded, strict=True):
            job.finished += [(row, before.policy_version) for row in rows]
        self._answer([job for job, _ in batch if not job.num_left])

    def _gather(self) -> None:
        """Wait for the requests that arrive together with the first."""
        until = time.monotonic() + _LONGEST_GATHERING_S
        with self._changed:
            while time.monotonic() < until and self._changed.wait(_QUIET_S):
                pass

    @contextmanager
    def _working(self) -> Iterator[None]:
        self._stalls.add_request(time.monotonic())
        try:
            yield
        finally:
            self._stalls.remove_request(time.monotonic())
            self._stalls.record_output(time.monotonic())

    def _decode(self, batch: list[tuple[Job, int]]) -> list[list[Decoded]]:
        works: list[Work] = []
        for job, copies in batch:
            if job.params.prompt_logprobs is not None and job.prompt_logprobs is None:
                job.prompt_logprobs = self._decoder.prompt_logprobs(job.prompt, job.params.prompt_logprobs)
            works.append(job.work(copies))
        return self._decoder.decode(works)

    def _answer(self, jobs: list[Job]) -> None:
        assert self._weights is not None
        for job in jobs:
            _set_result(partial(generation_of, job, self._weights.tokenizer), job.future)
        with self._changed:
            done = set(map(id, jobs))
            self._waiting = deque(job for job in self._waiting if id(job) not in done)
            self._running = []

    def _fall_asleep(self, owner_pid: int) -> None:
        """Free all weights; requests that were begun are kept with the completions that they have."""
        require_possible(self._config.enable_sleep_mode)
        sleep = Sleep.asked(owner_pid, self._sleep, self._pause)
        if self._sleep is None or self._sleep.state != "asleep":
            assert self._weights is not None
            self._weights.free()
        self._sleep, self._pause = sleep, None

    def _begin_pause(self, pause: Pause) -> None:
        require_awake(self._sleep)
        pause.check_may_follow(self._pause, time.monotonic())
        self._pause = pause

    def _end_pause(self, policy_version: int | None) -> None:
        require_awake(self._sleep)
        assert self._weights is not None
        lock = self._weights.lock
        if policy_version is not None and lock.check().policy_version != policy_version:
            with lock.writing(policy_version):
                pass
        self._pause = None

    def _make_decoder(self, weights: ServedWeights) -> Decoder:
        weights.model.register_forward_hook(lambda *_: self._passed())
        generator = torch.Generator()
        if self._config.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self._config.seed)
        return Decoder(
            weights.model,
            weights.tokenizer,
            eos_ids=eos_ids(weights.model, weights.tokenizer),
            logprobs_mode=self.logprobs_mode,
            generator=generator,
        )

    def _passed(self) -> None:
        """After each forward pass: cut a batch of requests without the token that others have to wait for."""
        now = time.monotonic()
        self._stalls.record_output(now)
        with self._changed:
            if self._running and self._running[0].is_without_token and now > self._batch_began_at + _YIELD_AFTER_S:
                is_awaited = bool(self._commands) or any(not job.is_without_token for job in self._waiting)
                for job in self._running:
                    job.is_cut = job.is_cut or is_awaited

    def _set(self, *, weights: ServedWeights | None = None, failure: BaseException | None = None) -> None:
        with self._changed:
            self._weights, self._failure = weights or self._weights, failure
            self._changed.notify_all()

    def _refuse_waiting(self, error: Exception) -> None:
        with self._changed:
            jobs, self._waiting = list(self._waiting), deque()
        self._drop(jobs, error)

    def _refuse_all(self) -> None:
        failure = self._failure
        error = EngineUnavailable(f"the engine has stopped: {failure}" if failure else "the server is shutting down")
        self._refuse_waiting(error)
        with self._changed:
            commands, self._commands = list(self._commands), deque()
        for _, future in commands:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _drop(self, jobs: list[Job], error: Exception) -> None:
        with self._changed:
            gone = set(map(id, jobs))
            self._waiting = deque(job for job in self._waiting if id(job) not in gone)
        for job in jobs:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(error)


def _set_result(action: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(action())
    except Exception as error:  # raised where the result is awaited
        future.set_exception(error)


def generation_of(job: Job, tokenizer: Any) -> Generation:
    """The answer to a job that is done."""
    return Generation(
        prompt_token_ids=job.prompt,
        prompt_logprobs=job.prompt_logprobs,
        completions=[_completion(row, version, job, tokenizer) for row, version in job.finished],
    )


def _completion(row: Decoded, version: int, job: Job, tokenizer: Any) -> Completion:
    text = row.text
    if text is None:
        text = tokenizer.decode(row.token_ids, skip_special_tokens=job.params.skip_special_tokens)
    return Completion(
        token_ids=row.token_ids,
        logprobs=row.logprobs,
        top_logprobs=row.top_logprobs,
        finish_reason=row.finish_reason,
        policy_versions=[version] * len(row.token_ids),
        text=text,
    )


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends a turn, according to the model's generation settings and its tokenizer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list | tuple) else [configured]
    return frozenset(int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None)
