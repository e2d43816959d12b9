"""The engine on vLLM: its `AsyncLLM` in this process, its engine core and workers beside it.

Its life, and everything that changes weights: while vLLM's scheduler is paused between two steps (`generations.py`).

Adapters need no pause: a new one gets a new name, new requests use it, and running ones finish on the old one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_engine.bridges.transport.checkpoint_folder import newest_checkpoint
from grpo_engine.errors import BridgeError, DataError, GrpoError, HalfWritten, ModelError
from grpo_engine.models.loading import resolve_model
from grpo_engine.models.stored_weights import checkpoint_folder
from grpo_engine.processes import AnyProcess
from grpo_engine.server.adapter_files import check_adapter, resuming_newest_adapter
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import Adapter, EngineInfo, EngineUnavailable, Generation, WeightsBusy
from grpo_engine.server.pausing import Pause
from grpo_engine.server.prompts import PromptCodec
from grpo_engine.server.receiving import awaited_sender
from grpo_engine.server.sleeping import LoadingTurn, Sleep, require, require_awake, require_possible
from grpo_engine.server.vllm.arguments import (
    check_platform,
    engine_arguments,
    prepare_environment,
    store_cache_bytes,
)
from grpo_engine.server.vllm.checkpoint import Parameters, can_reload_below_adapters, check_fits
from grpo_engine.server.vllm.ending import END_WITHIN_S, end_engine_processes, shut_down
from grpo_engine.server.vllm.generations import CLOSING, DEAD, Generations
from grpo_engine.server.vllm.loader import INSTANT_TENSOR, reads_with_instant_tensor
from grpo_engine.server.vllm.patches import Patch, check_patches, name_shared_memory, needed_patches
from grpo_engine.server.vllm.read_ahead import read_model
from grpo_engine.server.vllm.requests import sampling_params
from grpo_engine.server.vllm.requirements import check_room, installed_vllm, visible_gpus
from grpo_engine.server.vllm.sharing import Sharing, reads_no_checkpoint, share
from grpo_engine.server.vllm.stock import StockApp, stock_app
from grpo_engine.wire.environment_variables import SPEEDS_VARIABLE
from grpo_engine.wire.inference import (
    GenerateRequest,
    JoinRequest,
    ReceiveRequest,
    TakeRequest,
    WakeRequest,
    WokenRequest,
)
from grpo_engine.wire.server_speed import ServerSpeeds, write_speeds

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

_POLL_S = 0.25
"""Interval at which a pause's owner and vLLM's health are checked."""
_SPEEDS_EVERY = 40
"""Of these intervals, the speed of the server is written once."""
_LEAVE_LOADING_AFTER_S = 0.5

logger = logging.getLogger(__name__)


class VllmEngine:
    """See `grpo_engine.server.engine.Engine`. Runs on one event loop; a separate thread starts and stops vLLM."""

    def __init__(self, config: ServerConfig, *, instance: str, environment: Mapping[str, str]) -> None:
        self.logprobs_mode = config.logprobs_mode
        self._config = config
        self._instance = instance
        self._environment = environment
        self._generations = Generations(config, instance)
        speeds = environment.get(SPEEDS_VARIABLE)
        self._speeds_file = Path(speeds) if speeds else None
        self._written_speeds = ServerSpeeds()
        self._changing = asyncio.Lock()
        """Held while weights change or a pause begins or ends."""
        self._pause: Pause | None = None
        self._sleep: Sleep | None = None
        """None while it is awake."""
        self._turn = LoadingTurn(config)
        self._is_pausing = False
        """A pause waits for running requests; it can be cancelled."""
        self._llm: AsyncLLM | None = None
        self._stock_app: StockApp | None = None
        self._patches: Mapping[str, bool] = {}
        self._arguments: AsyncEngineArgs
        self._prompts: PromptCodec
        self._parameters: Parameters
        self._has_read_weights = True
        """At the start; else they come from the previous server's memory or its trainer."""
        self._has_start_loader = False
        """vLLM would read files by the loader of its start, which is not for files that are read beside a trainer."""
        self._sharing: Sharing | None = None
        self._awaited: AnyProcess | None = None
        """The trainer that has newer weights, since this server started."""
        self._epoch: int | None = None
        """Weight group that the workers joined last."""
        self._failure: BaseException | None = None
        self._is_closing = threading.Event()
        self._is_started = threading.Event()
        """Processes of vLLM exist, or are about to start."""
        self._is_loaded: Future[None] = Future()
        self._watch: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run_vllm, name="vllm-runner", daemon=True)

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start to load the model; called on the event loop that will serve."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def wait_loaded(self) -> None:
        """Return once requests can be served; raises the error that prevented it."""
        self._is_loaded.result()

    async def wait_failed(self) -> None:
        """Return when the engine was closed; raises when vLLM has exited."""
        assert self._watch is not None
        await asyncio.wait({self._watch})
        if not self._watch.cancelled():
            self._watch.result()

    def _write_speeds(self) -> None:
        """Only what is new: an idle server writes nothing, and one that starts leaves what the previous one wrote."""
        if self._speeds_file is not None and (speeds := self._generations.meter.speeds()) != self._written_speeds:
            write_speeds(self._speeds_file, speeds)
            self._written_speeds = speeds

    async def close(self) -> None:
        if self._llm is not None and not self._llm.errored:
            with suppress(TimeoutError, EngineUnavailable):
                async with asyncio.timeout(END_WITHIN_S):
                    await self._generations.end(self._llm)
        self._is_closing.set()
        self._write_speeds()
        if self._watch is not None:
            self._watch.cancel()
        if self._thread.is_alive():
            await asyncio.to_thread(self._stop_thread)

    def _stop_thread(self) -> None:
        until = time.monotonic() + _LEAVE_LOADING_AFTER_S
        while self._thread.is_alive():
            if not self._is_loaded.done():
                if not self._is_started.is_set() and time.monotonic() > until:
                    self._is_loaded.set_exception(EngineUnavailable(CLOSING))
                    return  # still importing: the thread ends with the process
                end_engine_processes()  # the thread waits for them, and so ends
            self._thread.join(_POLL_S)

    def _run_vllm(self) -> None:
        """Start vLLM, wait for `close`, stop it: in one thread, because vLLM's processes are tied to their parent's."""
        llm = None
        try:
            llm = self._load()
            asyncio.run_coroutine_threadsafe(self._prepare(llm), self._loop).result()
            with suppress(InvalidStateError):  # the server was closed meanwhile
                self._is_loaded.set_result(None)
        except BaseException as error:  # any error must reach /health and end the process
            self._failure = error
            with suppress(InvalidStateError):
                self._is_loaded.set_exception(_as_engine_error(error))
        self._turn.give_back()
        self._is_closing.wait()
        if llm is not None:
            shut_down(llm)
        end_engine_processes()
        if self._sharing is not None:
            self._sharing.withdraw()

    def _load(self) -> AsyncLLM:
        prepare_environment(self._config, os.environ)
        name_shared_memory()
        self._turn.take(self._is_closing.is_set)
        self._check_room()
        read = read_model(self._config.model_name)
        self._parameters = read.parameters
        self._prompts = PromptCodec(self._config.model_name, read.tokenizer, max_model_len=self._config.max_model_len)
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        check_platform(self._config)
        self._arguments = engine_arguments(self._config)
        self._is_started.set()
        if self._is_closing.is_set():
            raise EngineUnavailable(CLOSING)
        arguments = self._arguments
        has_draft = arguments.speculative_config is not None  # which no trainer writes
        if not has_draft and reads_no_checkpoint(self._config, self._instance, self._environment):
            self._has_read_weights = False
            arguments = replace(arguments, load_format="dummy", model_loader_extra_config={})
            logger.info("The model's files are not read: its weights are in memory, or a trainer has newer ones")
        elif reads_with_instant_tensor(self._config, arguments):
            arguments = replace(arguments, load_format=INSTANT_TENSOR)
        self._has_start_loader = arguments is not self._arguments
        # As stock's server: else a prefill takes 2,048 tokens a step on every GPU, in place of 8,192 on an H100.
        return AsyncLLM.from_engine_args(arguments, usage_context=UsageContext.OPENAI_API_SERVER)

    def _check_room(self) -> None:
        folder = checkpoint_folder(self._config.model_name)
        if folder is not None and self._config.device != "cpu" and not installed_vllm().is_for_cpu:
            check_room(self._config, folder, lambda: visible_gpus(os.environ))

    async def _prepare(self, llm: AsyncLLM) -> None:
        """Share or update the weights of a started vLLM, check it, and let requests in."""
        await llm.collective_rpc("grpo_loaded")
        if self._config.shared_weights:
            self._sharing = await share(
                llm,
                self._parameters,
                config=self._config,
                instance=self._instance,
                environment=self._environment,
                has_weights=self._has_read_weights,
            )
            self._generations.lock = self._sharing.lock
        if not self._has_read_weights:
            await self._read_if_abandoned(llm)
        if self._config.enable_sleep_mode:
            await self._find_weights(llm)
        await self._load_newest_handover(llm)
        self._generations.listen_to(llm)
        self._stock_app, _ = await asyncio.gather(
            stock_app(llm, self.guarded, self._config, self._arguments), self._answer_first(llm)
        )
        self._patches = await self._checked_patches(llm)
        if measured := [size for size in await llm.collective_rpc("grpo_cache_bytes") if size]:
            store_cache_bytes(min(measured))
        with resuming_newest_adapter(self._config, self._environment) as newest:
            if newest is not None:
                await self._load_adapter(llm, newest.path, newest.path.name, newest.policy_version)
        await self._wait_for_trainer(llm)
        self._llm = llm
        self._watch = asyncio.create_task(self._watching(llm))

    async def _answer_first(self, llm: AsyncLLM) -> None:
        """Have vLLM compile what is not compiled yet; a client's request might time out over it."""
        first = GenerateRequest(prompt="", max_tokens=1, logprobs=0, prompt_logprobs=0)
        async for _ in self._generations.outputs_of(
            llm, {"prompt_token_ids": [0, 0]}, sampling_params(first, 1), "first"
        ):
            pass

    async def _load_newest_handover(self, llm: AsyncLLM) -> None:
        """Load the newest checkpoint that a trainer handed over.

        It is read in place, because vLLM's cache of compiled code is keyed by the model's path.
        """
        folder = self._config.handover
        newest = newest_checkpoint(folder, resolve_model(self._config.model_name)) if folder is not None else None
        if newest is None or (self._config.enable_lora and not can_reload_below_adapters()):
            return
        try:
            await asyncio.to_thread(check_fits, newest.path, self._parameters)
        except ModelError as error:
            logger.warning("%s; the model's own weights are served", error)
            return
        await self._read_checkpoint(llm, newest.path, newest.policy_version)
        logger.info("Loaded version %d from %s", newest.policy_version, newest.path)

    async def _wait_for_trainer(self, llm: AsyncLLM) -> None:
        """Pause until the trainer whose weights were lost with the previous server publishes them again."""
        self._awaited = awaited_sender(self._config) if self._sharing is None else self._sharing.awaits
        if self._awaited is None:
            return
        if self._config.enable_sleep_mode:
            await self._free(llm)
            self._sleep = Sleep(owner=self._awaited)
            logger.info("Requests wait until process %d has handed its weights over", self._awaited.pid)
            return
        self._pause = Pause.until_published(self._awaited, time.monotonic())
        await self._generations.halt(llm)
        logger.info("Requests wait until %s has published its weights", self._pause.owner_text)

    async def _find_weights(self, llm: AsyncLLM) -> None:
        """Find where a trainer's weights belong, while they are those of the checkpoint.

        Raises:
            BridgeError: they are not those of the model in transformers.
        """
        folder = checkpoint_folder(self._config.model_name)
        expected = {name: list(shape) for name, shape in self._parameters.shapes.items()}
        problems = await llm.collective_rpc(
            "grpo_find_weights", args=(expected, self._parameters.aliases, None if folder is None else str(folder))
        )
        if problem := next(filter(None, problems), None):
            raise BridgeError(problem)

    async def _checked_patches(self, llm: AsyncLLM) -> Mapping[str, bool]:
        import vllm
        from vllm.platforms import current_platform

        return check_patches(
            needed_patches(self._config, is_cpu=bool(current_platform.is_cpu())),
            {Patch.HEAR_OUTPUTS: self._generations.outputs.has_output},
            await llm.collective_rpc("grpo_patches"),
            vllm.__version__,
        )

    async def _watching(self, llm: AsyncLLM) -> None:
        ending: asyncio.Task[None] | None = None
        for number in itertools.count():
            await asyncio.sleep(_POLL_S)
            if number % _SPEEDS_EVERY == 0:
                self._write_speeds()
            if llm.errored:
                raise EngineUnavailable(DEAD)
            self._generations.ping_if_stalled(llm)
            if ending is not None and ending.done():
                ending.result()
                ending = None
            if ending is not None or self._generations.is_being_written():
                continue
            why = self._pause.why_over(time.monotonic()) if self._pause is not None else None
            if why is not None:
                logger.warning("Resuming without a request: %s", why)
            if why is not None or (self._pause is None and self._is_abandoned()):
                # Not awaited here: a core that exits before it answers is reported by `errored` only.
                ending = asyncio.create_task(self._end_late_pause(self._pause))

    # --- called by the routes ----------------------------------------------------------------------------------------

    def check_health(self) -> None:
        self._running()
        self._generations.stalls.check(time.monotonic())
        self._generations.lock.check()

    def info(self) -> EngineInfo:
        import vllm

        llm = self._running()
        state = self._generations.lock.read()
        return EngineInfo(
            engine=f"vllm {vllm.__version__}",
            device=str(llm.vllm_config.device_config.device_type),
            dtype=str(llm.model_config.dtype).removeprefix("torch."),
            policy_version=state.policy_version,
            update_count=state.update_count,
            last_update_time=state.updated_at,
            is_paused=self._pause is not None,
            is_sharing=self._sharing is not None,
            num_ranks=int(llm.vllm_config.parallel_config.tensor_parallel_size),
            patches=self._patches,
            sleep_state="awake" if self._sleep is None else self._sleep.state,
            sleep_words=None if self._sleep is None else self._sleep.words,
            sleeps_since=None if self._sleep is None else self._sleep.since,
        )

    async def encode(self, text: str) -> list[int]:
        self._running()
        return await self._prompts.encode(text)

    def decode(self, token_ids: list[int]) -> str:
        self._running()
        return self._prompts.decode(token_ids)

    async def render_chat(self, messages: list[dict[str, str]]) -> list[int]:
        self._running()
        return await self._prompts.render_chat(messages)

    async def generate(self, prompt_token_ids: list[int], params: GenerateRequest) -> Generation:
        return await self._generations.generate(self._running(), prompt_token_ids, params)

    def guarded(
        self, prompt: Any, sampling_params: Any, request_id: str, *, lora_request: Any = None, **others: Any
    ) -> AsyncIterator[Any]:
        """`AsyncLLM.generate` for vLLM's own routes: see `Generations.guarded`."""
        return self._generations.guarded(self._running, prompt, sampling_params, request_id, lora_request, **others)

    async def pause(self, owner_pid: int | None, timeout_s: float) -> None:
        llm = self._running()
        pause = Pause.requested(owner_pid, timeout_s, time.monotonic())
        pause.check_may_follow(self._pause, time.monotonic())
        async with self._changing:
            require_awake(self._sleep)
            pause.check_may_follow(self._pause, time.monotonic())
            self._pause, self._is_pausing = pause, True
            try:
                await self._generations.close_gate()
                self._is_pausing = False
                if self._pause is pause:
                    await self._generations.halt(llm)
            except Exception:
                self._pause = None
                await self._generations.go_on(llm)
                raise
            finally:
                self._is_pausing = False
            if self._pause is None:
                await self._generations.go_on(llm)
                raise WeightsBusy("the pause ended before the engine had stopped: give it a longer timeout_s")

    async def resume(self, policy_version: int | None) -> None:
        self._running()
        require_awake(self._sleep)
        if policy_version is not None and self._generations.lock.check().policy_version != policy_version:
            with self._generations.lock.writing(policy_version):
                pass
        await self._end_pause(self._pause)

    async def reload(self, path: Path, policy_version: int) -> None:
        llm = self._running()
        if self._config.enable_lora and not can_reload_below_adapters():
            raise DataError(
                "this vLLM's engine crashes when it reloads a model with adapters: "
                "start the server without --enable-lora, or install vLLM 0.32 or newer"
            )
        await asyncio.to_thread(check_fits, path, self._parameters)
        async with self._changing:
            require_awake(self._sleep)
            try:
                await self._generations.halt(llm)
                await self._read_checkpoint(llm, path, policy_version)
            finally:
                if self._pause is None:
                    await self._generations.go_on(llm)

    async def join(self, request: JoinRequest) -> None:
        llm = self._running()
        if not self._config.receives_weights:
            raise BridgeError("this server does not receive weights: start it with --receives-weights")
        folder = (
            checkpoint_folder(self._config.model_name) if self._generations.lock.read().policy_version == 0 else None
        )
        expected = {name: list(shape) for name, shape in self._parameters.shapes.items()}
        with self._generations.awaiting_core():
            problems = await llm.collective_rpc(
                "grpo_join",
                args=(
                    request.model_dump(mode="json"),
                    expected,
                    self._parameters.aliases,
                    None if folder is None else str(folder),
                ),
            )
        if problem := next(filter(None, problems), None):
            raise BridgeError(problem)
        self._epoch = request.meeting.epoch

    async def receive(self, request: ReceiveRequest) -> list[int]:
        llm = self._running()
        if request.epoch != self._epoch:
            raise BridgeError(f"weight group {request.epoch}: not joined by this server, whose group is {self._epoch}")
        async with self._changing:
            require_awake(self._sleep)
            try:
                await self._generations.halt(llm)
                with self._generations.lock.writing(request.policy_version), self._generations.awaiting_core():
                    answers = await llm.collective_rpc("grpo_receive", args=(request.with_checksum,))
                    if problem := next((answer["problem"] for answer in answers if "problem" in answer), None):
                        raise BridgeError(problem)
                if self._pause is not None and self._pause.owner == self._awaited:
                    self._pause = None
            finally:
                if self._pause is None:
                    await self._generations.go_on(llm)
        return [answer["checksum"] for answer in answers if answer["checksum"] is not None]

    async def sleep(self, owner_pid: int) -> None:
        llm = self._running()
        require_possible(self._config.enable_sleep_mode)
        async with self._changing:
            sleep = Sleep.asked(owner_pid, self._sleep, self._pause)
            if self._sleep is None or self._sleep.state != "asleep":
                await self._free(llm)
            self._sleep, self._pause = sleep, None

    async def wake_up(self, request: WakeRequest) -> None:
        llm = self._running()
        async with self._changing:
            sleep = require(self._sleep, "asleep", "wake_up")
            self._sleep = replace(sleep, state="weights")
            await self._asked_of_workers(llm, "grpo_wake_weights", request.model_dump(mode="json"))

    async def take(self, request: TakeRequest) -> None:
        llm = self._running()
        async with self._changing:
            require(self._sleep, "weights", "take")
            await self._asked_of_workers(llm, "grpo_take", request.number)

    async def woken(self, request: WokenRequest) -> int | None:
        llm = self._running()
        async with self._changing:
            require(self._sleep, "weights", "woken")
            with self._generations.lock.writing(request.policy_version), self._generations.awaiting_core():
                [answer] = await llm.collective_rpc("grpo_wake_cache", args=(request.with_checksum,))
                if "problem" in answer:
                    raise BridgeError(answer["problem"])
            self._sleep = None
            await self._generations.go_on(llm)
        return None if answer["checksum"] is None else int(answer["checksum"])

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
            version = self._generations.lock.check().policy_version + 1 if policy_version is None else policy_version
            lora = await self._generations.adapters.load(llm, path, modules)
            adapter = self._generations.adapters.described(lora, name or path.name)
            previous = self._generations.adapters.lora
            try:
                self._generations.serve_adapter(llm, version, lora, adapter)
            except GrpoError:  # the base weights are being written, or half-written
                await self._generations.adapters.drop_if_unused(llm, lora)
                raise
            await self._generations.interrupt(llm)
            await self._generations.adapters.drop_if_unused(llm, previous)
        return adapter

    async def unload_adapter(self) -> Adapter | None:
        llm = self._running()
        async with self._changing:
            previous, lora = self._generations.adapters.served, self._generations.adapters.lora
            if previous is not None:
                self._generations.serve_adapter(llm, self._generations.lock.check().policy_version + 1, None, None)
                await self._generations.adapters.drop_if_unused(llm, lora)
        return previous

    def adapter(self) -> Adapter | None:
        self._running()
        return self._generations.adapters.served

    def stock_app(self) -> StockApp | None:
        self._running()
        return self._stock_app

    # --- within ------------------------------------------------------------------------------------------------------

    def _running(self) -> AsyncLLM:
        if self._is_closing.is_set():
            raise EngineUnavailable(CLOSING)
        if self._failure is not None:
            raise EngineUnavailable(_sentence(self._failure))
        if self._llm is None:
            raise EngineUnavailable("the model is loading")
        if self._llm.errored:
            raise EngineUnavailable(DEAD)
        return self._llm

    async def _read_checkpoint(self, llm: AsyncLLM, path: Path, policy_version: int, *, is_first: bool = False) -> None:
        with self._generations.lock.writing(policy_version), self._generations.awaiting_core():
            if self._has_start_loader:
                loader = {name: getattr(self._arguments, name) for name in ("load_format", "model_loader_extra_config")}
                await llm.collective_rpc("update_config", args=({"load_config": loader},))
                self._has_start_loader = False
            # In place, tensor by tensor: the GPU has no memory left for a second copy.
            await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
            if is_first:
                expected = {name: list(shape) for name, shape in self._parameters.shapes.items()}
                problems = await llm.collective_rpc(
                    "grpo_check_read", args=(expected, self._parameters.aliases, str(path))
                )
                if problem := next(filter(None, problems), None):
                    raise BridgeError(problem)

    def _is_abandoned(self) -> bool:
        """Whether there are no weights yet, neither read nor written, and the trainer that was to write them has gone.

        Half-written weights of a later version are left to the next trainer: the model's files are version 0.
        """
        if self._has_read_weights or self._generations.lock.read().policy_version > 0:
            return False
        try:
            self._generations.lock.check()
        except HalfWritten:
            return True
        return False

    async def _read_if_abandoned(self, llm: AsyncLLM) -> None:
        """Read the model's files after all, where nobody is left who was to write all weights."""
        if not self._is_abandoned():
            return
        folder = checkpoint_folder(self._config.model_name)
        if folder is None:
            raise ModelError(f"{self._config.model_name}: its files were removed; download it again")
        logger.warning("No trainer has written the weights; loading %s", folder)
        await self._read_checkpoint(llm, folder, 0, is_first=True)

    async def _asked_of_workers(self, llm: AsyncLLM, method: str, argument: Any) -> None:
        """Call a method that answers why it could not, or None.

        Raises:
            BridgeError: it could not.
        """
        with self._generations.awaiting_core():
            problems = await llm.collective_rpc(method, args=(argument,))
        if problem := next(filter(None, problems), None):
            raise BridgeError(problem)

    async def _free(self, llm: AsyncLLM) -> None:
        """Free weights and cache; running requests are preempted, and computed again by the next weights."""
        await self._generations.halt(llm)
        with self._generations.awaiting_core():
            await llm.collective_rpc("grpo_sleep")

    async def _end_late_pause(self, pause: Pause | None) -> None:
        with suppress(EngineUnavailable):  # who watches it sees that, and may not wait for this task any more
            if self._generations.lock.is_expected() or self._is_abandoned():
                await self._read_late(self._running(), pause)
            if pause is not None:
                await self._end_pause(pause)

    async def _read_late(self, llm: AsyncLLM, pause: Pause | None) -> None:
        """Await the weights no longer, and read the model's files, unless another pause has begun: for their write."""
        lock = self._generations.lock
        async with self._changing:
            if self._pause is not pause:
                return
            if lock.is_expected():
                lock.expect(None)
            try:
                await self._generations.halt(llm)
                await self._read_if_abandoned(llm)
            finally:
                if self._pause is None:
                    await self._generations.go_on(llm)

    async def _end_pause(self, pause: Pause | None) -> None:
        if self._pause is not pause:  # another pause has begun
            return
        self._pause = None
        if self._is_pausing:  # `pause` continues once it sees that
            await self._generations.gate.open()
            return
        async with self._changing:
            if self._pause is None:
                await self._generations.go_on(self._running())


def _as_engine_error(error: BaseException) -> BaseException:
    """The error itself, or an `EngineUnavailable` that names vLLM as its source."""
    return error if isinstance(error, GrpoError) else EngineUnavailable(_sentence(error))


def _sentence(error: BaseException) -> str:
    return str(error) if isinstance(error, GrpoError) else f"vLLM cannot serve: {type(error).__name__}: {error}"
