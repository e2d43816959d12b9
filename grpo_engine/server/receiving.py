"""A server process's side of a weight group: which memory takes which tensor, and the transfer into it."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import torch
from torch import Tensor

from grpo_engine.bridges.transport.sender_file import sender_of
from grpo_engine.bridges.transport.weight_group import Checksum, WeightGroup
from grpo_engine.errors import BridgeError, first_of
from grpo_engine.processes import AnyProcess, ProcessIdentity
from grpo_engine.server.config import ServerConfig
from grpo_engine.wire.inference import JoinRequest, ReceiveRequest
from grpo_engine.wire.run_folder import HANDOVER_SENDER


@dataclass(frozen=True, slots=True)
class Part:
    """Where a tensor of the model, or this process's part of it, is kept."""

    memory: Tensor
    """What requests are served from."""
    place: tuple[slice, ...] | None = None
    """Which part of the whole tensor it is; None: all of it."""

    @property
    def start(self) -> list[int]:
        """Where the part begins in the whole tensor."""
        first = [] if self.place is None else [each.start for each in self.place]
        return first + [0] * (self.memory.ndim - len(first))


class WeightReceiver:
    """A place in one weight group; the meeting runs in a thread, so that requests are served meanwhile."""

    def __init__(self, request: JoinRequest, parts: Mapping[str, Part], *, local_rank: int = 0) -> None:
        """Begin to meet the sender.

        Args:
            parts: of the served weights, by names in transformers; a tied parameter under its first name.
            local_rank: of this process among those of the server.

        Raises:
            BridgeError: other tensors are served than those that will be sent.
        """
        self.epoch = request.meeting.epoch
        sent = {tensor.name: tuple(tensor.shape) for layer in request.layers for tensor in layer}
        check_same(sent, parts, request.dtype)
        self._layers = [[(parts[tensor.name], tuple(tensor.shape)) for tensor in layer] for layer in request.layers]
        self._device = next(iter(parts.values())).memory.device
        self._timeout_s = request.meeting.timeout_s
        _check_own(request.meeting.store)
        sender = _sender(request)
        self._group: Future[WeightGroup] = Future()

        def meet() -> None:
            try:
                group = WeightGroup(request.meeting, rank=request.first_rank + local_rank, device=self._device)
                group.abort_when_gone(sender)
                self._group.set_result(group)
            except Exception as error:  # raised where the group is used
                self._group.set_exception(error)

        Thread(target=meet, name="weight-group-meeting", daemon=True).start()

    @torch.no_grad()
    def receive(self, *, with_checksum: bool = False) -> int | None:
        """Take all tensors into the served memory, which must not be read meanwhile; the checksum if it is asked for.

        Raises:
            BridgeError: the transfer failed; the memory may hold parts of both versions.
        """
        try:
            group, checksum = self._group.result(timeout=self._timeout_s), Checksum()
            for layer in self._layers:
                whole = [_buffer(part, shape) for part, shape in layer]
                group.broadcast(whole)
                for (part, _), tensor in zip(layer, whole, strict=True):
                    if tensor is not part.memory:
                        part.memory.copy_(tensor if part.place is None else tensor[part.place])
                if with_checksum:
                    checksum.add(whole)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except (RuntimeError, TimeoutError) as error:
            raise BridgeError(f"weight group {self.epoch}: the transfer failed: {error}") from error
        return checksum.value() if with_checksum else None

    def close(self) -> None:
        """Leave the group."""
        if self._group.done() and self._group.exception() is None:
            self._group.result().abort()


def _sender(request: JoinRequest) -> AnyProcess:
    """The trainer of a group.

    Raises:
        BridgeError: it does not run.
    """
    if request.sender_file is None:
        sender: AnyProcess | None = ProcessIdentity.of(request.sender_pid)
        if sender is None:
            raise BridgeError(f"sender_pid {request.sender_pid}: no such process on this machine")
        return sender
    sender = sender_of(request.sender_file)
    if sender is None or sender.pid != request.sender_pid:
        raise BridgeError(f"{request.sender_file}: does not name a running trainer with pid {request.sender_pid}")
    return sender


def _check_own(store: Path) -> None:
    """Refuse a store that others could have made or could write: whoever writes it chooses the members.

    Raises:
        BridgeError: it is not an empty file of this user in a folder that no one else may write.
    """
    try:
        found, folder = store.lstat(), store.parent.stat()
    except OSError as error:
        raise BridgeError(
            f"{store}: cannot be read: {error.strerror}; it must be in a folder that trainer and server share"
        ) from None
    is_own = stat.S_ISREG(found.st_mode) and {found.st_uid, folder.st_uid} == {os.geteuid()}
    if not is_own or folder.st_mode & 0o022:
        raise BridgeError(f"{store}: not a file of this user in a folder that only this user may write")


def joined(receiver: WeightReceiver | None, request: ReceiveRequest) -> WeightReceiver:
    """The receiver of the group that a request names.

    Raises:
        BridgeError: it was not joined.
    """
    if receiver is None or receiver.epoch != request.epoch:
        now = "none" if receiver is None else str(receiver.epoch)
        raise BridgeError(f"weight group {request.epoch}: not joined by this server, whose group is {now}")
    return receiver


def awaited_sender(config: ServerConfig) -> AnyProcess | None:
    """The running trainer that will send its weights to this server, which has older ones."""
    if not (config.receives_weights or config.enable_sleep_mode) or config.handover is None:
        return None
    return sender_of(config.handover / HANDOVER_SENDER)


def _buffer(part: Part, shape: tuple[int, ...]) -> Tensor:
    """What a whole tensor is received into: the served memory itself, where that holds all of it in its order."""
    if part.place is None and part.memory.is_contiguous():
        return part.memory
    return torch.empty(shape, dtype=part.memory.dtype, device=part.memory.device)


def check_same(sent: Mapping[str, tuple[int, ...]], parts: Mapping[str, Part], dtype: str) -> None:
    """Require that what is sent is what is served.

    Raises:
        BridgeError: names, shapes or types differ.
    """
    faults = []
    if missing := sorted(parts.keys() - sent.keys()):
        faults.append(f"only in the server: {first_of(missing)}")
    if foreign := sorted(sent.keys() - parts.keys()):
        faults.append(f"only in the trainer: {first_of(foreign)}")
    for name, part in parts.items():
        if name in sent and part.place is None and tuple(part.memory.shape) != sent[name]:
            faults.append(f"{name} is {sent[name]} in the trainer and {tuple(part.memory.shape)} in the server")
        if str(part.memory.dtype).removeprefix("torch.") != dtype:
            faults.append(f"{name} is {part.memory.dtype}, and {dtype} is sent")
    if faults:
        raise BridgeError(f"the weights of the trainer do not fit the served ones: {first_of(faults, 3)}")
