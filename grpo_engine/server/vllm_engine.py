"""The engine on vLLM: its `AsyncLLM` in this process, its engine core and workers beside it.

Weights change with vLLM's scheduler paused between two steps and its caches cleared: what runs is frozen, and goes on
under the new weights with its keys and values computed anew, so that each token comes from one version, which is told,
and no cached prefix outlives its weights. Where whole completions of one version are wanted (`finish_before_update`), a
gate first lets what runs come to its end. Requests are salted with the version as well, for writers that do not ask for
a pause: what they overlapped is generated again.

Adapters need no pause: a new one gets a new name, new requests take it, and running ones end on the old.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_engine.bridges.fence import Fence, FenceState
from grpo_engine.bridges.handover import newest_handover
from grpo_engine.bridges.process_identity import ProcessIdentity
from grpo_engine.bridges.shared_names import newest_adapter, run_of
from grpo_engine.errors import DataError, GrpoError, HalfWritten, ModelError
from grpo_engine.models.loading import load_tokenizer, resolve_model
from grpo_engine.models.stored_weights import checkpoint_folder
from grpo_engine.server.adapter_files import check_adapter
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import Adapter, EngineInfo, EngineUnavailable, Generation, WeightsBusy
from grpo_engine.server.gate import Gate
from grpo_engine.server.pausing import Pause
from grpo_engine.server.pulse import Pulse
from grpo_engine.server.remembered import remember_cache_bytes
from grpo_engine.server.vllm_adapters import VllmAdapters
from grpo_engine.server.vllm_arguments import check_platform, engine_arguments, prepare_environment
from grpo_engine.server.vllm_checkpoint import Parameters, can_reload_below_adapters, check_fits, parameters_of
from grpo_engine.server.vllm_outputs import Outputs
from grpo_engine.server.vllm_patches import Patch, check_patches, needed_patches
from grpo_engine.server.vllm_processes import end_engine_processes
from grpo_engine.server.vllm_requests import checked_length, generation, refusals, sampling_params
from grpo_engine.server.vllm_requirements import check_room, installed_vllm, visible_gpus
from grpo_engine.server.vllm_sharing import Sharing, share
from grpo_engine.server.vllm_stock import StockApp, stock_app
from grpo_engine.server.vllm_versions import RunningVersions, lengths_so_far
from grpo_engine.wire.inference import GenerateRequest

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

_POLL_S = 0.25
"""How often a pause's owner and vLLM's health are looked at."""
_FENCE_POLL_S = 0.002
_LEAVE_LOADING_AFTER_S = 0.5
_CLOSING = "the server is shutting down"
_DEAD = "vLLM's engine has died: the server's log says why; restart the server"

logger = logging.getLogger(__name__)


class VllmEngine:
    """See `grpo_engine.server.engine.Engine`. Lives on one event loop; a thread of its own starts and ends vLLM."""

    def __init__(self, config: ServerConfig, *, instance: str, environment: Mapping[str, str]) -> None:
        self.logprobs_mode = config.logprobs_mode
        self._config = config
        self._instance = instance
        self._environment = environment
        self._gate = Gate()
        self._changing = asyncio.Lock()
        """Held by whoever pauses, resumes or changes weights."""
        self._pause: Pause | None = None
        self._is_pausing = False
        """A pause waits for what runs; it can be given up."""
        self._pulse = Pulse(config.stalled_after_s)
        self._question: asyncio.Task[None] | None = None
        """Put to a stalled engine core; its answer shows that it lives again."""
        self._num_requests = 0
        self._request_numbers = itertools.count()
        self._adapters = VllmAdapters(config.model_name, self._awaiting_core)
        self._num_known_moves = 0
        """Changes of the fence that no running request needs to mind: adapters, and writes while all were frozen."""
        self._frozen_at: FenceState | None = None
        """What the fence said when the scheduler was paused; None while it is not."""
        self._versions = RunningVersions()
        self._llm: AsyncLLM | None = None
        self._stock_app: StockApp | None = None
        self._patches: Mapping[str, bool] = {}
        self._arguments: AsyncEngineArgs
        self._tokenizer: Any = None
        self._parameters: Parameters
        self._fence = Fence.private()
        self._sharing: Sharing | None = None
        self._failure: BaseException | None = None
        self._is_closing = threading.Event()
        self._is_started = threading.Event()
        """Processes of vLLM exist, or are about to."""
        self._is_loaded: Future[None] = Future()
        self._watch: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._keep, name="vllm-keeper", daemon=True)

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to load the model; called on the event loop that will serve."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def wait_loaded(self) -> None:
        """Return once requests can be served; raises what kept vLLM from starting."""
        self._is_loaded.result()

    async def wait_failed(self) -> None:
        """Return when the engine has been closed; raises when vLLM has died."""
        assert self._watch is not None
        await asyncio.wait({self._watch})
        if not self._watch.cancelled():
            self._watch.result()

    async def close(self) -> None:
        self._is_closing.set()
        if self._watch is not None:
            self._watch.cancel()
        if self._thread.is_alive():
            await asyncio.to_thread(self._end_thread)

    def _end_thread(self) -> None:
        until = time.monotonic() + _LEAVE_LOADING_AFTER_S
        while self._thread.is_alive():
            if not self._is_loaded.done():
                if not self._is_started.is_set() and time.monotonic() > until:
                    self._is_loaded.set_exception(EngineUnavailable(_CLOSING))
                    return  # it imports still: the process takes the thread along
                end_engine_processes()  # the thread, which waits for them, learns of it and ends
            self._thread.join(_POLL_S)

    def _keep(self) -> None:
        """Start vLLM, wait for the end, end it. One thread for its whole life, since it is its processes' parent."""
        llm = None
        try:
            llm = self._load()
            # After vLLM has forked: torch may start threads of its own here.
            self._parameters = parameters_of(self._config.model_name)
            asyncio.run_coroutine_threadsafe(self._take(llm), self._loop).result()
            with suppress(InvalidStateError):  # the server closed in the meantime
                self._is_loaded.set_result(None)
        except BaseException as error:  # whatever it is, health must tell and the process must end
            self._failure = error
            with suppress(InvalidStateError):
                self._is_loaded.set_exception(_told(error))
        self._is_closing.wait()
        if llm is not None:
            llm.shutdown(timeout=_shutdown_within_s(llm))
        end_engine_processes()
        if self._sharing is not None:
            self._sharing.withdraw()

    def _load(self) -> AsyncLLM:
        prepare_environment(self._config, os.environ)
        self._check_room()
        self._tokenizer = load_tokenizer(self._config.model_name)
        from vllm.v1.engine.async_llm import AsyncLLM

        check_platform(self._config)
        self._arguments = engine_arguments(self._config)
        self._is_started.set()
        if self._is_closing.is_set():
            raise EngineUnavailable(_CLOSING)
        return AsyncLLM.from_engine_args(self._arguments)

    def _check_room(self) -> None:
        folder = checkpoint_folder(self._config.model_name)
        if folder is not None and self._config.device != "cpu" and not installed_vllm().is_for_cpu:
            check_room(self._config, folder, lambda: visible_gpus(os.environ))

    async def _take(self, llm: AsyncLLM) -> None:
        """Make a started vLLM the one that serves."""
        if self._config.shared_weights:
            self._sharing = await share(
                llm, self._parameters, config=self._config, instance=self._instance, environment=self._environment
            )
            self._fence = self._sharing.fence
        await self._read_newest_handover(llm)
        self._outputs = Outputs(llm, lambda: self._pulse.beat(time.monotonic()))
        # The first request of all compiles what is left to compile; seconds later than the start it would time out.
        first = GenerateRequest(prompt="", max_tokens=1, logprobs=0, prompt_logprobs=0)
        async for _ in self._generated(llm, {"prompt_token_ids": [0, 0]}, sampling_params(first, 1), "first"):
            pass
        self._patches = await self._checked_patches(llm)
        if measured := [size for size in await llm.collective_rpc("grpo_cache_bytes") if size]:
            remember_cache_bytes(min(measured))
        self._stock_app = await stock_app(llm, self.guarded, self._config, self._arguments)
        await self._take_newest_adapter(llm)
        await self._wait_for_trainer(llm)
        self._llm = llm
        self._watch = asyncio.create_task(self._watching(llm))

    async def _read_newest_handover(self, llm: AsyncLLM) -> None:
        """Go on with what a trainer has left. Read in place, since vLLM finds its compiled code by the model's path."""
        folder = self._config.handover
        newest = newest_handover(folder, resolve_model(self._config.model_name)) if folder is not None else None
        if newest is None or (self._config.enable_lora and not can_reload_below_adapters()):
            return
        try:
            await asyncio.to_thread(check_fits, newest.path, self._parameters)
        except ModelError as error:
            logger.warning("%s; the model's own weights are served", error)
            return
        await self._read_checkpoint(llm, newest.path, newest.policy_version)
        logger.info("Took over version %d from %s", newest.policy_version, newest.path)

    async def _take_newest_adapter(self, llm: AsyncLLM) -> None:
        """Go on with what a trainer of this run handed to the server before this one."""
        newest = newest_adapter(run_of(self._environment)) if self._config.enable_lora else None
        if newest is None:
            return
        try:
            await self._load_adapter(llm, newest.path, newest.path.name, newest.policy_version)
        except GrpoError as error:
            logger.warning("%s; the bare model is served until the trainer brings another", error)
        else:
            logger.info("Took over version %d from %s", newest.policy_version, newest.path)

    async def _wait_for_trainer(self, llm: AsyncLLM) -> None:
        """Pause for the trainer whose weights went with the server before this one."""
        if self._sharing is None or self._sharing.awaits is None:
            return
        self._pause = Pause.until_it_comes(self._sharing.awaits, time.monotonic())
        await self._halt(llm)
        logger.info("Requests wait until %s has brought its weights", self._pause.owner_text)

    async def _checked_patches(self, llm: AsyncLLM) -> Mapping[str, bool]:
        import vllm
        from vllm.platforms import current_platform

        return check_patches(
            needed_patches(self._config, is_cpu=bool(current_platform.is_cpu())),
            {Patch.HEAR_OUTPUTS: self._outputs.are_heard},
            await llm.collective_rpc("grpo_patches"),
            vllm.__version__,
        )

    async def _watching(self, llm: AsyncLLM) -> None:
        ending: asyncio.Task[None] | None = None
        while True:
            await asyncio.sleep(_POLL_S)
            if llm.errored:
                raise EngineUnavailable(_DEAD)
            if self._pulse.is_stalled(time.monotonic()) and not self._pulse.num_inside and self._question is None:
                self._question = asyncio.create_task(self._ask_core(llm))
            if ending is not None and ending.done():
                ending.result()
                ending = None
            if ending is not None or self._pause is None or self._is_being_written():
                continue
            if (why := self._pause.is_over(time.monotonic())) is not None:
                logger.warning("Resuming without being asked: %s", why)
                # Not awaited here: of a core that dies before it has answered, vLLM tells by `errored` alone.
                ending = asyncio.create_task(self._end_pause(self._pause))

    async def _ask_core(self, llm: AsyncLLM) -> None:
        """Ask the engine core anything: it answers between two steps."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            with suppress(EngineDeadError):
                await llm.is_sleeping()
                self._pulse.beat(time.monotonic())
        finally:
            self._question = None

    # --- asked by the routes -----------------------------------------------------------------------------------------

    def check_health(self) -> None:
        self._running()
        self._pulse.check(time.monotonic())
        self._fence.check()

    def info(self) -> EngineInfo:
        import vllm

        llm = self._running()
        state = self._fence.read()
        return EngineInfo(
            engine=f"vllm {vllm.__version__}",
            device=str(llm.vllm_config.device_config.device_type),
            dtype=str(llm.model_config.dtype).removeprefix("torch."),
            policy_version=state.policy_version,
            update_count=state.update_count,
            last_update_time=state.updated_at,
            is_paused=self._pause is not None,
            is_sharing=self._sharing is not None,
            patches=self._patches,
        )

    def encode(self, text: str) -> list[int]:
        self._running()
        return list(self._tokenizer.encode(text))

    def decode(self, token_ids: list[int]) -> str:
        self._running()
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def render_chat(self, messages: list[dict[str, str]]) -> list[int]:
        self._running()
        if not getattr(self._tokenizer, "chat_template", None):
            raise DataError(f"{self._config.model_name} has no chat template: use /v1/completions or /generate")
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    async def generate(self, prompt_token_ids: list[int], params: GenerateRequest) -> Generation:
        llm = self._running()
        max_tokens = checked_length(
            prompt_token_ids,
            params,
            max_model_len=int(llm.model_config.max_model_len),
            vocabulary=int(llm.model_config.hf_text_config.vocab_size),
        )
        sampling = sampling_params(params, max_tokens)
        prompt = {"prompt_token_ids": prompt_token_ids}
        while True:
            request_id = f"{self._instance}-{next(self._request_numbers)}"
            async with self._admitted() as before:
                num_moves = before.sequence - self._num_known_moves
                with self._versions.request(request_id, before.policy_version) as versions:
                    async for last in self._generated(llm, prompt, sampling, request_id):
                        output = last
                self._fence.check()  # a writer that died, and took what was frozen along
                is_of_two_prompts = versions.changes and params.prompt_logprobs is not None
                if self._num_unknown_moves() == num_moves and not is_of_two_prompts:
                    return generation(output, prompt_token_ids, params, versions)
            logger.warning("The weights changed under a running request; it is generated again")

    async def guarded(
        self, prompt: Any, sampling_params: Any, request_id: str, *, lora_request: Any = None, **others: Any
    ) -> AsyncIterator[Any]:
        """What `AsyncLLM.generate` gives, for vLLM's own routes: whoever asks, weights change between its steps only.

        Raises:
            EngineUnavailable, HalfWritten: not now.
        """
        llm = self._running()
        outputs = self._generated(llm, prompt, sampling_params, request_id, lora_request, **others)
        async with self._admitted(), aclosing(outputs):
            async for output in outputs:
                yield output

    async def pause(self, owner_pid: int | None, timeout_s: float) -> None:
        llm = self._running()
        owner = None if owner_pid is None else ProcessIdentity.of(owner_pid)
        if owner_pid is not None and owner is None:
            raise DataError(f"owner_pid {owner_pid}: no such process on this machine")
        pause = Pause(owner=owner, until=time.monotonic() + timeout_s)
        self._check_free(pause)
        async with self._changing:
            self._check_free(pause)
            self._pause, self._is_pausing = pause, True
            try:
                await self._close_gate()
                self._is_pausing = False
                if self._pause is pause:
                    await self._halt(llm)
            except Exception:
                self._pause = None
                await self._go_on(llm)
                raise
            finally:
                self._is_pausing = False
            if self._pause is None:
                await self._go_on(llm)
                raise WeightsBusy("the pause ended before the engine had halted: give it a longer timeout_s")

    async def resume(self, policy_version: int | None) -> None:
        self._running()
        if policy_version is not None and self._fence.check().policy_version != policy_version:
            with self._fence.writing(policy_version):
                pass
        await self._end_pause(self._pause)

    async def reload(self, path: Path, policy_version: int) -> None:
        llm = self._running()
        if self._config.enable_lora and not can_reload_below_adapters():
            raise DataError(
                "this vLLM's engine dies of reloading a model that is wrapped for adapters: "
                "start the server without --enable-lora, or install vLLM 0.32 or newer"
            )
        await asyncio.to_thread(check_fits, path, self._parameters)
        async with self._changing:
            try:
                await self._halt(llm)
                await self._read_checkpoint(llm, path, policy_version)
            finally:
                if self._pause is None:
                    await self._go_on(llm)

    async def load_adapter(self, path: Path, name: str | None, policy_version: int | None) -> Adapter:
        return await self._load_adapter(self._running(), path, name, policy_version)

    async def _load_adapter(self, llm: AsyncLLM, path: Path, name: str | None, policy_version: int | None) -> Adapter:
        modules = await asyncio.to_thread(
            check_adapter,
            path,
            model_name=self._config.model_name,
            shapes=self._parameters.shapes,
            aliases=self._parameters.aliases,
            max_rank=self._config.max_lora_rank,
        )
        async with self._changing:
            version = self._fence.check().policy_version + 1 if policy_version is None else policy_version
            lora = await self._adapters.bring_in(llm, path, modules)
            adapter = self._adapters.described(lora, name or path.name)
            previous = self._adapters.lora
            try:
                self._serve_adapter(llm, version, lora, adapter)
            except GrpoError:  # the weights below are being written, or half-written
                await self._adapters.drop_if_unused(llm, lora)
                raise
            await self._adapters.drop_if_unused(llm, previous)
        return adapter

    async def unload_adapter(self) -> Adapter | None:
        llm = self._running()
        async with self._changing:
            previous, lora = self._adapters.served, self._adapters.lora
            if previous is not None:
                self._serve_adapter(llm, self._fence.check().policy_version + 1, None, None)
                await self._adapters.drop_if_unused(llm, lora)
        return previous

    def adapter(self) -> Adapter | None:
        self._running()
        return self._adapters.served

    def stock_app(self) -> StockApp | None:
        self._running()
        return self._stock_app

    # --- within ------------------------------------------------------------------------------------------------------

    def _running(self) -> AsyncLLM:
        if self._is_closing.is_set():
            raise EngineUnavailable(_CLOSING)
        if self._failure is not None:
            raise EngineUnavailable(_sentence(self._failure))
        if self._llm is None:
            raise EngineUnavailable("the model is loading")
        if self._llm.errored:
            raise EngineUnavailable(_DEAD)
        return self._llm

    @asynccontextmanager
    async def _admitted(self) -> AsyncIterator[FenceState]:
        """Wait until requests may run and no writer is at work; gives what the fence says then."""
        if self._num_requests >= self._config.max_waiting:
            raise EngineUnavailable(f"{self._num_requests} requests wait already: send fewer at once, or later")
        self._num_requests += 1
        try:
            while True:
                async with self._gate.passing():
                    state = self._fence.check()
                    if not state.is_writing:
                        yield state
                        return
                await asyncio.sleep(_FENCE_POLL_S)  # a writer that did not pause us
        finally:
            self._num_requests -= 1

    async def _generated(
        self, llm: AsyncLLM, prompt: Any, sampling: Any, request_id: str, lora: LoRARequest | None = None, **others: Any
    ) -> AsyncGenerator[Any, None]:
        """What vLLM gives for one request, by the adapter that is served where none is named."""
        from vllm.v1.engine.exceptions import EngineDeadError

        lora = lora or self._adapters.lora
        if isinstance(prompt, dict):
            prompt = _salted(prompt, f"{self._instance}-{self._fence.read().sequence}")
        outputs = llm.generate(prompt, sampling, request_id, lora_request=lora, **others)
        async with self._adapters.using(llm, lora), aclosing(outputs):
            self._pulse.enter(time.monotonic())
            try:
                async for output in outputs:
                    self._pulse.leave(time.monotonic())  # vLLM owes nothing to a client that does not read on
                    try:
                        yield output
                    finally:
                        self._pulse.enter(time.monotonic())
            except EngineDeadError as error:
                raise EngineUnavailable(_DEAD) from error
            except refusals() as error:
                raise DataError(f"vLLM refuses the request: {error}") from None
            finally:
                self._pulse.leave(time.monotonic())

    def _serve_adapter(self, llm: AsyncLLM, version: int, lora: LoRARequest | None, adapter: Adapter | None) -> None:
        before = self._fence.check().sequence  # an adapter does not mend what lies below it
        self._take_note(llm)
        with self._fence.writing(version):
            self._adapters.serve(lora, adapter)
        now = self._fence.read()
        self._num_known_moves += now.sequence - before
        if self._frozen_at is not None:
            self._frozen_at = now

    def _num_unknown_moves(self) -> int:
        """Grows when somebody writes weights without having paused the engine."""
        now = self._frozen_at or self._fence.read()
        return now.sequence - self._num_known_moves

    def _take_note(self, llm: AsyncLLM) -> None:
        """What is frozen, if anything is, goes on under what was written meanwhile."""
        if self._frozen_at is None:
            return
        now = self._fence.read()
        if now.policy_version != self._frozen_at.policy_version:
            self._versions.change(now.policy_version, lengths_so_far(llm.output_processor))
        # Not of a write that has not ended: who goes on before it has, has overlapped it.
        self._num_known_moves += now.sequence - self._frozen_at.sequence - now.is_writing
        self._frozen_at = now

    def _is_being_written(self) -> bool:
        """Whether a living writer is in the middle; then nothing could go on in any case."""
        try:
            return self._fence.check().is_writing
        except HalfWritten:
            return False

    def _check_free(self, pause: Pause) -> None:
        current = self._pause
        if current is not None and current.is_over(time.monotonic()) is None and current.owner != pause.owner:
            raise WeightsBusy(f"paused already by {current.owner_text}; wait until it resumes")

    async def _read_checkpoint(self, llm: AsyncLLM, path: Path, policy_version: int) -> None:
        with self._fence.writing(policy_version), self._awaiting_core():
            await llm.collective_rpc("grpo_reload", kwargs={"path": str(path)})

    async def _close_gate(self) -> None:
        """Let nobody in; where completions are to end first, wait for them."""
        if self._config.finish_before_update:
            await self._gate.close()
        else:
            await self._gate.shut()

    async def _halt(self, llm: AsyncLLM) -> None:
        """Return with vLLM between two steps, nothing cached, and all that it has made so far taken in."""
        await self._close_gate()
        with self._awaiting_core():
            # Not `llm.pause_generation`, which sleeps for 20 ms where `drained` knows.
            await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
        await self._outputs.drained()
        self._pulse.rest()
        if self._frozen_at is None:
            self._frozen_at = self._fence.read()

    async def _go_on(self, llm: AsyncLLM) -> None:
        self._take_note(llm)
        self._frozen_at = None
        self._pulse.go_on(time.monotonic())
        try:
            with self._awaiting_core():
                try:
                    self._fence.check()
                except HalfWritten:  # nothing may be sampled from such weights: what is frozen ends here
                    await llm.engine_core.pause_scheduler_async(mode="abort", clear_cache=True)
                await llm.resume_generation()
        finally:
            await self._gate.open()  # behind it, a core that does not go on is seen to hang

    @contextmanager
    def _awaiting_core(self) -> Iterator[None]:
        """A question to the engine core is work like a request, and its answer a sign of life like a token."""
        from vllm.v1.engine.exceptions import EngineDeadError

        self._pulse.ask(time.monotonic())
        try:
            yield
            self._pulse.beat(time.monotonic())
        except EngineDeadError as error:
            raise EngineUnavailable(_DEAD) from error
        finally:
            self._pulse.answer(time.monotonic())

    async def _end_pause(self, pause: Pause | None) -> None:
        if self._pause is not pause:  # another one has begun
            return
        self._pause = None
        if self._is_pausing:  # who pauses goes on as soon as it sees that
            await self._gate.open()
            return
        async with self._changing:
            if self._pause is None:
                await self._go_on(self._running())


def _shutdown_within_s(llm: AsyncLLM) -> float:
    """How long its processes get to end by themselves: workers remove the shared memory that they talk through.

    An engine core without workers has none; it would spend a second on freeing memory that the kernel frees at once.
    """
    return 0.0 if llm.vllm_config.parallel_config.distributed_executor_backend == "uni" else 2.0


def _salted(prompt: dict[str, Any], salt: str) -> dict[str, Any]:
    """vLLM keys cached prefixes by the salt, so one that was computed with other weights is never found."""
    from vllm.inputs import tokens_input

    if "type" not in prompt:  # ours; those of vLLM's own routes have been rendered
        return dict(tokens_input(prompt["prompt_token_ids"], cache_salt=salt))
    own = prompt.get("cache_salt")
    return {**prompt, "cache_salt": salt if own is None else f"{salt}-{own}"}


def _told(error: BaseException) -> BaseException:
    """The error in our words: vLLM's own says where to look, but not who speaks."""
    return error if isinstance(error, GrpoError) else EngineUnavailable(_sentence(error))


def _sentence(error: BaseException) -> str:
    return str(error) if isinstance(error, GrpoError) else f"vLLM cannot serve: {type(error).__name__}: {error}"
