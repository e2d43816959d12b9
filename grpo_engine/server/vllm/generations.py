"""Requests that run on vLLM, and how they stop between two steps while weights change.

Running requests are frozen and continue under the new weights, with their keys and values recomputed. So each token
comes from one version, which is reported with it, and no cached prefix outlives its weights. With `keep_kv_cache` they
continue on what they have (PipelineRL, arXiv 2509.19128), and those that wait read none of it (`scheduling.py`). With
`finish_before_update`, a gate first lets running completions finish. Cache keys are salted with the version as well,
for writers that do not request a pause: generations that such a write overlapped are repeated.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from grpo_engine.bridges.memory.weight_lock import LockState, WeightLock
from grpo_engine.errors import DataError, HalfWritten
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import Adapter, EngineUnavailable, Generation
from grpo_engine.server.gate import Gate
from grpo_engine.server.prompts import check_num_completions, check_num_logprobs, check_values, max_new_tokens
from grpo_engine.server.speed_meter import SpeedMeter
from grpo_engine.server.stall_detector import StallDetector
from grpo_engine.server.vllm.adapters import VllmAdapters
from grpo_engine.server.vllm.requests import check_worker_limits, generation, refusals, sampling_params
from grpo_engine.server.vllm.running import CoreOutputs, RunningVersions, lengths_so_far
from grpo_engine.server.vllm.slots import Slots
from grpo_engine.serving.access import Token, caller
from grpo_engine.wire.inference import GenerateRequest

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

DEAD = "vLLM's engine has exited; read the server's log and restart the server"
CLOSING = "the server is shutting down"
_LOCK_POLL_S = 0.002
_PRIORITY_WITHOUT_TOKEN = 1
"""Those with the token have 0, and vLLM serves lower numbers first. Where both have the same, sequences of others fill
the KV cache, and requests of the run wait behind those that were preempted: 64 of 2,000 tokens held one for 300 s."""
_VALUES = ("bad_words", "stop", "stop_token_ids", "logit_bias", "allowed_token_ids")
"""Lists in `SamplingParams` that need no token. The engine core has them for each of `n` sequences, and reads them at
each token or change of the batch: 500,000 stop tokens held the run for 33 s."""

logger = logging.getLogger(__name__)


class Generations:
    """Those of one server, on one event loop."""

    def __init__(self, config: ServerConfig, instance: str) -> None:
        """None runs yet."""
        self._config = config
        self._instance = instance
        self.lock = WeightLock.private()
        """Of the weights; another one where they are shared."""
        self.gate = Gate()
        self._slots = Slots(config.max_batch_size)
        self.stalls = StallDetector(config.stalled_after_s)
        self.meter = SpeedMeter()
        self.adapters = VllmAdapters(config.model_name, self.awaiting_core)
        self.outputs: CoreOutputs
        self._is_second_runner = False
        """Whether vLLM's workers use its second model runner."""
        self._ping: asyncio.Task[None] | None = None
        """Sent to a stalled engine core; its answer shows that it works again."""
        self._num_requests = 0
        self._request_numbers = itertools.count()
        self._num_known_moves = 0
        """Changes of the weight lock that invalidate no running request: adapters, and writes while all were frozen."""
        self._frozen_at: LockState | None = None
        """State of the weight lock when the scheduler was paused; None while it is not paused."""
        self._versions = RunningVersions()
        self._interruptible: set[str] = set()
        """Running requests that end where the weights change."""
        self._is_over = False

    def listen_to(self, llm: AsyncLLM) -> None:
        """See every message of the engine core from now on."""
        cache = llm.vllm_config.cache_config
        self._is_second_runner = llm.vllm_config.use_v2_model_runner
        num_cacheable = (cache.num_gpu_blocks or 0) * cache.block_size

        def arrived(output: Any) -> None:
            self.stalls.record_output(time.monotonic())
            if (stats := output.scheduler_stats) is not None:
                self.meter.stepped(
                    sum(bool(each.new_token_ids) for each in output.outputs),
                    num_running=stats.num_running_reqs,
                    num_cached=round(stats.kv_cache_usage * num_cacheable),
                    now=output.timestamp,
                )

        self.outputs = CoreOutputs(llm, arrived)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, llm: AsyncLLM, prompt_token_ids: list[int], params: GenerateRequest) -> Generation:
        """See `grpo_engine.server.engine.Engine.generate`."""
        max_tokens = max_new_tokens(
            prompt_token_ids,
            params,
            max_model_len=int(llm.model_config.max_model_len),
            vocabulary=int(llm.model_config.hf_text_config.vocab_size),
            max_logprobs=int(llm.model_config.max_logprobs),
        )
        sampling = sampling_params(params, max_tokens)
        prompt = {"prompt_token_ids": prompt_token_ids}
        while True:
            request_id = f"{self._instance}-{next(self._request_numbers)}"
            async with self._admitted(params.n) as before:
                num_moves = before.sequence - self._num_known_moves
                with (
                    self._versions.request(request_id, before.policy_version) as versions,
                    self._marked(request_id, params),
                ):
                    async for last in self.outputs_of(llm, prompt, sampling, request_id):
                        output = last
                self.lock.check()  # a writer that exited in the middle invalidates frozen requests
                is_of_two_prompts = versions.changes and params.prompt_logprobs is not None
                if self._num_unknown_moves() == num_moves and not is_of_two_prompts:
                    return generation(output, prompt_token_ids, params, versions, llm.output_processor.tokenizer)
            logger.warning("The weights changed during a request without a pause; generating it again")

    async def guarded(
        self,
        running: Callable[[], AsyncLLM],
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        lora: LoRARequest | None,
        **others: Any,
    ) -> AsyncIterator[Any]:
        """`AsyncLLM.generate` for vLLM's own routes, admitted like every other generation.

        Args:
            running: the engine, or its error.

        Raises:
            DataError: too many completions, log-probabilities or values.
            EngineUnavailable, HalfWritten: not now.
        """
        llm = running()
        n = getattr(sampling_params, "n", 1)
        check_num_completions(n)
        _check_num_logprobs(llm, prompt, sampling_params)
        for name in _VALUES:
            if (values := getattr(sampling_params, name, None)) is not None:
                check_values(name, values)
        outputs = self.outputs_of(llm, prompt, sampling_params, request_id, lora, **others)
        async with self._admitted(n), aclosing(outputs):
            async for output in outputs:
                yield output

    async def outputs_of(
        self, llm: AsyncLLM, prompt: Any, sampling: Any, request_id: str, lora: LoRARequest | None = None, **others: Any
    ) -> AsyncGenerator[Any, None]:
        """vLLM's outputs for one request, with the served adapter unless another one is named.

        Raises:
            DataError: vLLM refuses the request, or would end at it.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        check_worker_limits(
            sampling,
            int(llm.model_config.hf_text_config.vocab_size),
            tokenizer=llm.output_processor.tokenizer,
            is_second_runner=self._is_second_runner,
        )
        lora = lora or self.adapters.lora
        if isinstance(prompt, dict):
            prompt = _salted(prompt, f"{self._instance}-{self.lock.read().sequence}")
        if caller().token is Token.WRONG:
            others["priority"] = _PRIORITY_WITHOUT_TOKEN
        outputs = llm.generate(prompt, sampling, request_id, lora_request=lora, **others)
        async with self.adapters.using(llm, lora), aclosing(outputs):
            self.stalls.add_request(time.monotonic())
            try:
                async for output in outputs:
                    self._check_open()
                    self.stalls.remove_request(time.monotonic())  # a client that reads slowly is no stall
                    try:
                        yield output
                    finally:
                        self.stalls.add_request(time.monotonic())
            except EngineDeadError as error:
                raise EngineUnavailable(DEAD) from error
            except refusals() as error:
                raise DataError(f"vLLM refuses the request: {error}") from None
            finally:
                self.stalls.remove_request(time.monotonic())

    async def interrupt(self, llm: AsyncLLM) -> None:
        """End the requests with `interrupt` that have tokens of the weights before."""
        begun = {request for (request, _), length in lengths_so_far(llm.output_processor).items() if length}
        if cut := sorted(begun & self._interruptible):
            logger.info("%d requests end, because the weights have changed", len(cut))
            await llm.abort(cut)

    async def end(self, llm: AsyncLLM) -> None:
        """End all requests as unavailable, and return when the engine computes nothing more: it may be killed then.

        Under MPS, a process that is killed within a kernel can be a fault of all that share the GPU (on an H200, 4 of 7
        restarts beside a trainer).
        """
        self._is_over = True
        await self.gate.open()
        with self.awaiting_core():
            await llm.engine_core.pause_scheduler_async(mode="abort", clear_cache=False)
            await llm.collective_rpc("grpo_synchronize")

    # --- between two steps -------------------------------------------------------------------------------------------

    async def close_gate(self) -> None:
        """Admit no request; with `finish_before_update`, wait for running ones."""
        if self._config.finish_before_update:
            await self.gate.drain()
        else:
            await self.gate.close()

    async def halt(self, llm: AsyncLLM) -> None:
        """Return with vLLM between two steps, its caches cleared unless they are kept, and all outputs processed."""
        await self.close_gate()
        with self.awaiting_core():
            # Not `llm.pause_generation`, which sleeps for 20 ms instead of waiting for the outputs.
            await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=not self._config.keep_kv_cache)
            if self._config.keep_kv_cache:  # those that wait have the cache keys of the weights before
                await llm.engine_core.reset_prefix_cache_async()
        await self.outputs.drained()
        self.stalls.pause()
        if self._frozen_at is None:
            self._frozen_at = self.lock.read()

    async def go_on(self, llm: AsyncLLM) -> None:
        """Continue frozen requests under the present weights, and admit others."""
        if self._record_version_change(llm):
            await self.interrupt(llm)
        self._frozen_at = None
        self.stalls.resume(time.monotonic())
        try:
            with self.awaiting_core():
                try:
                    self.lock.check()
                except HalfWritten:  # nothing may be sampled from such weights: abort what is frozen
                    await llm.engine_core.pause_scheduler_async(mode="abort", clear_cache=True)
                self.meter.updated(time.monotonic())
                await llm.resume_generation()
        finally:
            await self.gate.open()  # requests behind it reveal a core that does not continue

    def serve_adapter(self, llm: AsyncLLM, version: int, lora: LoRARequest | None, adapter: Adapter | None) -> None:
        """Have new requests use another adapter, or none, which is a version of its own.

        Raises:
            HalfWritten: the base weights are.
        """
        before = self.lock.check().sequence  # a half-written base model stays half-written
        self._record_version_change(llm)
        with self.lock.writing(version):
            self.adapters.serve(lora, adapter)
        now = self.lock.read()
        self._num_known_moves += now.sequence - before
        if self._frozen_at is not None:
            self._frozen_at = now

    def is_being_written(self) -> bool:
        """Whether a living writer is in the middle of a write; requests could not continue then.

        One that is expected to write has not begun.
        """
        try:
            return self.lock.check().is_writing and not self.lock.is_expected()
        except HalfWritten:
            return False

    # --- whether the engine core works -------------------------------------------------------------------------------

    @contextmanager
    def awaiting_core(self) -> Iterator[None]:
        """Count a command to the engine core as work, and its answer as output, for the stall detector."""
        from vllm.v1.engine.exceptions import EngineDeadError

        self.stalls.add_command(time.monotonic())
        try:
            yield
            self.stalls.record_output(time.monotonic())
        except EngineDeadError as error:
            raise EngineUnavailable(DEAD) from error
        finally:
            self.stalls.remove_command(time.monotonic())

    def ping_if_stalled(self, llm: AsyncLLM) -> None:
        """Send a core that produces nothing, although it has no work left, a command that shows whether it works."""
        if self.stalls.is_stalled(time.monotonic()) and not self.stalls.num_pending and self._ping is None:
            self._ping = asyncio.create_task(self._ping_core(llm))

    async def _ping_core(self, llm: AsyncLLM) -> None:
        """Send the engine core a cheap command, which it answers between two steps."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            with suppress(EngineDeadError):
                await llm.is_sleeping()
                self.stalls.record_output(time.monotonic())
        finally:
            self._ping = None

    # --- within ------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_over:
            raise EngineUnavailable(CLOSING)

    @contextmanager
    def _marked(self, request_id: str, params: GenerateRequest) -> Iterator[None]:
        """Within, a request with `interrupt` ends where the weights change."""
        if params.interrupt:
            self._interruptible.add(request_id)
        try:
            yield
        finally:
            self._interruptible.discard(request_id)

    @asynccontextmanager
    async def _admitted(self, n: int) -> AsyncIterator[LockState]:
        """Wait until a request of `n` sequences may run and no write is in progress; yields the weight lock's state."""
        token = caller().token
        if self._num_requests >= self._config.max_waiting // (2 if token is Token.WRONG else 1):
            raise EngineUnavailable(f"{self._num_requests} requests are waiting: send fewer at once, or retry later")
        self._num_requests += 1
        try:
            while True:
                # No update waits for others: they may sample for minutes, and read no answer.
                inside = self.gate.passing(is_awaited=token is not Token.WRONG)
                async with self._slots.taken(token, n), inside:
                    self._check_open()
                    state = self.lock.check()
                    if not state.is_writing:
                        yield state
                        return
                await asyncio.sleep(_LOCK_POLL_S)  # a writer that did not pause this server
        finally:
            self._num_requests -= 1

    def _num_unknown_moves(self) -> int:
        """Grows when a writer changes weights without having paused the engine."""
        now = self._frozen_at or self.lock.read()
        return now.sequence - self._num_known_moves

    def _record_version_change(self, llm: AsyncLLM) -> bool:
        """Record that frozen requests, if any, continue under the weights that were written meanwhile, if they were."""
        if self._frozen_at is None:
            return False
        now = self.lock.read()
        is_other = now.policy_version != self._frozen_at.policy_version
        if is_other:
            self._versions.change(now.policy_version, lengths_so_far(llm.output_processor))
        # Without a write in progress: a request that continues before its end has overlapped it.
        self._num_known_moves += now.sequence - self._frozen_at.sequence - now.is_writing
        self._frozen_at = now
        return is_other


def _check_num_logprobs(llm: AsyncLLM, prompt: Any, sampling_params: Any) -> None:
    """Raises DataError: of all tokens together too many; see `check_num_logprobs`."""

    def asked(name: str) -> int | None:
        value: int | None = getattr(sampling_params, name, None)
        return int(llm.model_config.hf_text_config.vocab_size) if value == -1 else value

    tokens = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    most = int(llm.model_config.max_model_len)
    num_prompt = most if tokens is None else len(tokens)
    max_tokens = getattr(sampling_params, "max_tokens", None)
    check_num_logprobs(
        n=getattr(sampling_params, "n", 1),
        max_tokens=most - len(tokens or ()) if max_tokens is None else max_tokens,
        logprobs=asked("logprobs"),
        num_prompt=num_prompt,
        prompt_logprobs=asked("prompt_logprobs"),
    )


def _salted(prompt: dict[str, Any], salt: str) -> dict[str, Any]:
    """The prompt with a salt, by which vLLM keys cached prefixes: one computed with other weights is never reused."""
    from vllm.inputs import tokens_input

    if "type" not in prompt:  # from our routes; prompts of vLLM's own routes are rendered already
        return dict(tokens_input(prompt["prompt_token_ids"], cache_salt=salt))
    own = prompt.get("cache_salt")
    return {**prompt, "cache_salt": salt if own is None else f"{salt}-{own}"}
