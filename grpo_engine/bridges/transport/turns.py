"""Transport in turns: an inference server on the trainer's device, which sleeps while a step is computed.

    the server:   awake ── sleep ──► asleep ── wake_up ──► weights ── woken ──► awake
                  samples a batch    a step is computed    is handed the new weights

The memory of a server that sleeps is free, its weights are lost, and requests wait. It is woken with all weights of the
trainer, through a small memory that both map. A server that is restarted loads while no step is computed, sleeps at
once, and is woken like any other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_engine.bridges.memory.shared_tensors import dtype_from_text
from grpo_engine.bridges.memory.staging import Staging
from grpo_engine.bridges.memory.turn_lock import TurnLock
from grpo_engine.bridges.protocol import BridgeContext, BridgeModel, Update
from grpo_engine.bridges.transport.broadcast import StreamedPlacement
from grpo_engine.bridges.transport.in_process import EngineState, PhaseClock, SleepMeter
from grpo_engine.bridges.transport.sender_file import SenderFile
from grpo_engine.bridges.transport.served_file import Repetition
from grpo_engine.bridges.transport.server_control import is_listening
from grpo_engine.bridges.transport.servers import Servers, require_same_model, unshared_model
from grpo_engine.errors import BridgeError, GrpoError, PeerError, PeerUnavailable
from grpo_engine.wire.inference import BridgeInfo, SleepAnswer
from grpo_engine.wire.run_folder import HANDOVER_FOLDER

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_POLL_S = 0.25
_TRY_EVERY_S = 0.5
"""To wake a server that did not answer."""

logger = logging.getLogger(__name__)


class _Restarted(PeerUnavailable):
    """Another server answers than the one that was asked before."""


def dtype_of_weights(url: str, info: BridgeInfo) -> torch.dtype:
    """The type of the weights of a server, in which they are handed over.

    Raises:
        BridgeError: it names none in which a trainer has weights.
    """
    dtype = dtype_from_text(info.dtype)
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise BridgeError(
            f"{url}: its weights are {info.dtype}, and a trainer has none: start it with --dtype bfloat16"
        )
    return dtype


class TurnsBridge:
    """See `grpo_engine.bridges.protocol.Bridge`."""

    def __init__(
        self,
        context: BridgeContext,
        placement: StreamedPlacement,
        *,
        handover: Path | None,
        staging_bytes: int,
        check_every: int,
    ) -> None:
        self._context = context
        self._placement = placement
        self._folder = (handover or context.folder / HANDOVER_FOLDER).absolute()
        self._turn = TurnLock(self._folder)
        self._sender_file = SenderFile(self._folder)
        self._staging_bytes = staging_bytes
        self._check_every = check_every
        self._servers = Servers(context)
        [self._server] = self._servers.all
        self._staging: Staging | None = None
        """None before the model is loaded."""
        self._device: torch.device
        self._version = 0
        """Of the weights in this process."""
        self._are_whole = False
        """Whether these weights may be served: not before they are loaded, and not while they are written."""
        self._is_awake = False
        """Whether the server was woken with them."""
        self._num_updates = 0
        self._repetition = Repetition()
        self._tried_at = -_TRY_EVERY_S
        self._phases, self._meter = PhaseClock(), SleepMeter()

    def attach(self) -> BridgeModel:
        """Find the server, put it to sleep, and load the model.

        Raises:
            BridgeError: it cannot sleep, or serves another model.
        """
        [info] = self._servers.find(self._advice)
        self._check_server(info)
        dtype = dtype_of_weights(self._server.url, info)
        self._sender_file.announce()
        self.prepare_step()
        model = self._placement.load()
        self._device = model.device
        if not info.device.startswith(self._device.type):
            raise BridgeError(
                f"{self._server.url}: its weights are on {info.device}, and the trained ones on {self._device}: with "
                "bridge mode turns both are on one device (without cpu_offload)"
            )
        self._staging = Staging(
            self._placement.layers(),
            dtype=dtype,
            device=self._device,
            num_bytes=self._staging_bytes,
        )
        self._version, self._are_whole = info.policy_version, True
        return unshared_model(model, self._placement, [info], self._repetition.begin)

    def publish(self, version: int, write: Callable[[], None]) -> Update | None:
        """Write the new values, and wake the server with them; one that does not answer gets them once it does.

        While steps are repeated the server sleeps; one that is restarted loads between two of them, as ever.
        """
        self._are_whole = self._is_awake = False
        write()
        self._version, self._are_whole = version, True
        if self._repetition.goes_on_after(version):
            self._give_turn()
            return None
        return self._try_to_wake()

    def poll_server(self) -> None:
        """Wake a server that sleeps after a step without an update, or was restarted: no batch would come before."""
        if self._is_awake and not self._servers.has_restarted_one():
            return
        now = time.monotonic()
        if self._are_whole and now - self._tried_at >= _TRY_EVERY_S and is_listening(self._server.url):
            self._tried_at = now
            self._try_to_wake()

    def prepare_step(self) -> None:
        """Put the server to sleep, so that the step finds its memory free; wait for one that loads."""

        def log_waiting() -> None:
            logger.info("the step waits for the inference server, which loads")

        if not self._turn.take(is_stopping=self._context.is_stopping, when_held=log_waiting):
            raise PeerUnavailable("not waiting for the inference server to load, since training is stopping")
        self._phases.ending()
        with self._meter.measuring():
            self._put_to_sleep()
        self._phases.enter(EngineState.ASLEEP)

    def close(self) -> None:
        """Wake a server that sleeps, so that it answers requests; and remove what was made for it."""
        if self._are_whole and not self._is_awake and is_listening(self._server.url):
            try:
                self._wake()
            except (GrpoError, RuntimeError) as error:
                logger.warning("%s: not woken at the end of training: %s", self._server.url, error)
        self._turn.give_back()
        self._servers.close()
        self._sender_file.close()

    # --- the server --------------------------------------------------------------------------------------------------

    def _put_to_sleep(self) -> None:
        """Have a server that answers free its memory; one that has exited has none.

        Raises:
            PeerUnavailable: it listens, but has not fallen asleep within the context's `patience_s`.
        """
        self._is_awake = False
        until = time.monotonic() + self._context.patience_s
        while is_listening(self._server.url):
            try:
                self._fall_asleep()
            except PeerUnavailable as error:  # it exits at this moment
                if self._context.is_stopping():
                    raise PeerUnavailable(f"{error}; training is stopping") from None
                if time.monotonic() >= until:
                    raise PeerUnavailable(
                        f"{error}; it has not fallen asleep within {self._context.patience_s:g} s, and the step needs "
                        "its memory: restart the server"
                    ) from None
                time.sleep(_POLL_S)
            else:
                return

    def _fall_asleep(self) -> None:
        answer = self._server.client.sleep(patience_s=0.0)
        if answer.problem is not None:
            raise BridgeError(f"{self._server.url}: {answer.problem}")
        self._server.instance = answer.instance

    def _try_to_wake(self) -> Update | None:
        try:
            return self._wake()
        except PeerUnavailable as error:
            logger.warning("the inference server gets version %d once it answers: %s", self._version, error)
            return None

    def _wake(self) -> Update:
        """Hand the weights over, and have the server answer requests.

        Raises:
            PeerUnavailable: no server answers, or it was restarted meanwhile.
            BridgeError, PeerError: it does not take them.
        """
        from grpo_engine.bridges.transport.weight_group import Checksum

        assert self._staging is not None
        self._phases.ending()
        self._give_turn()
        began = time.perf_counter()
        client = self._server.client
        checksum = Checksum() if self._num_updates % self._check_every == 0 else None
        self._fall_asleep()  # one that was restarted may be awake
        self._phases.enter(EngineState.WEIGHTS)
        try:
            self._done(client.wake_up(self._staging.open()))
            filler = self._staging.filler(lambda number: self._done(client.take(number)), checksum)
            failures: list[GrpoError] = []

            def add(layer: dict[str, Tensor]) -> None:
                if not failures:
                    try:
                        filler.add(layer)
                    except GrpoError as error:  # raised below: a placement hands out all of its layers
                        failures.append(error)

            self._placement.stream(add)
            for failure in failures:
                raise failure
            filler.end()
            self._phases.ending()
            answer = client.woken(self._version, with_checksum=checksum is not None)
            self._done(answer)
        finally:
            self._staging.close()
        if checksum is not None and answer.checksum != checksum.value():
            raise PeerError(
                f"{self._server.url}: serves other weights than were handed over as version {self._version} (checksum "
                f"{answer.checksum}, not {checksum.value()}): restart the server; if it happens again, please report it"
            )
        self._num_updates += 1
        self._is_awake, self._tried_at = True, -_TRY_EVERY_S  # only a failure is tried again later
        self._phases.enter(EngineState.AWAKE)
        return Update(
            pause_s=time.perf_counter() - began,
            num_bytes=filler.num_bytes,
            num_servers=1,
            phase_times={**self._phases.take(), **self._meter.take()},
        )

    def _give_turn(self) -> None:
        """Free what torch keeps of the step's memory: the server allocates beside it."""
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        self._turn.give_back()

    def _done(self, answer: SleepAnswer) -> None:
        """Require that the server has done what was asked.

        Raises:
            PeerUnavailable: it was restarted since the last request.
            BridgeError: it could not.
        """
        if answer.problem is None:
            return
        if answer.instance != self._server.instance:
            raise _Restarted(f"{self._server.url}: was restarted meanwhile")
        raise BridgeError(f"{self._server.url}: {answer.problem}")

    def _check_server(self, info: BridgeInfo) -> None:
        if not info.can_sleep:
            raise BridgeError(
                f"{self._server.url}: cannot sleep: start it with --enable-sleep-mode (in a profile: bridge.mode is "
                '"turns" for all services)'
            )
        require_same_model(self._server.url, info.model_name, self._context.model_name)

    def _advice(self, port: int) -> str:
        return (
            f"start it (grpo-engine server --model {self._context.model_name} --port {port} --enable-sleep-mode "
            f"--handover {self._folder})"
        )
