"""A server process's side of a hand-over through staging memory: where its contents belong, and the copy into there."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from grpo_engine.bridges.memory.staging import Piece, pieces_by_content
from grpo_engine.bridges.transport.weight_group import Checksum
from grpo_engine.errors import BridgeError
from grpo_engine.processes import ProcessIdentity
from grpo_engine.server.receiving import Part, check_same
from grpo_engine.wire.bridge_file import PosixHandle, SharedTensor
from grpo_engine.wire.inference import WakeRequest

_NAME = "staging"
_WATCH_S = 0.25
_MOST_CONTENTS = 1 << 20
"""Of one weight update: a trainer's memory has a megabyte at least."""


class StagedReceiver:
    """Takes weights from one trainer after another; its memory stays mapped between two weight updates."""

    def __init__(self) -> None:
        self._mapping = threading.Lock()
        """Held while the memory is read, or unmapped."""
        self._memory: Tensor | None = None
        self._described: SharedTensor | None = None
        self._sender: ProcessIdentity | None = None
        self._parts: Mapping[str, Part] = {}
        self._contents: list[list[Piece]] = []
        self._next = 0
        """Content that must come next."""

    def begin(self, request: WakeRequest, parts: Mapping[str, Part]) -> None:
        """Make ready for all contents of one weight update.

        Args:
            parts: of the served weights, by names in transformers; a tied parameter under its first name.

        Raises:
            BridgeError: other tensors are served than those that will come, or the memory cannot be mapped.
        """
        staged = request.staged
        sent = {tensor.name: tuple(tensor.shape) for layer in staged.layers for tensor in layer}
        check_same(sent, parts, staged.memory.dtype.removeprefix("torch."))
        for name, part in parts.items():
            if part.place is not None or not part.memory.is_contiguous():
                raise BridgeError(
                    f"{name}: this process serves a part of it ({tuple(part.memory.shape)}), and staging memory is for "
                    "models on one GPU: set tensor_parallel_size to 1, or choose bridge mode broadcast or none"
                )
        sender = ProcessIdentity.of(request.owner_pid)
        if sender is None:
            raise BridgeError(f"owner_pid {request.owner_pid}: no such process on this machine")
        with self._mapping:
            if self._memory is None or self._described != staged.memory:
                self._memory = None  # unmapped before the next is mapped
                self._memory, self._described = _mapped(staged.memory), staged.memory
            capacity = self._memory.numel()
            if sum(part.memory.numel() for part in parts.values()) > capacity * _MOST_CONTENTS:
                raise BridgeError(f"staging memory of {capacity} elements: too small for these weights")
            is_new_sender, self._sender = sender != self._sender, sender
        if is_new_sender:
            threading.Thread(target=self._unmap_after, args=(sender,), name="staging-watch", daemon=True).start()
        self._parts = {name: parts[name] for name in sent}  # in the order of the layers, as for the checksum
        self._contents, self._next = pieces_by_content(staged.layers, capacity), 0

    @torch.no_grad()
    def take(self, number: int) -> None:
        """Copy a content of the memory to where it belongs.

        Raises:
            BridgeError: it is not the next one, or the memory was unmapped.
        """
        if number != self._next or number >= len(self._contents):
            raise BridgeError(
                f"content {number} of the staging memory: {self._next} of {len(self._contents)} were taken, and that "
                "is not the next one"
            )
        with self._mapping:
            if self._memory is None:
                raise BridgeError("the trainer whose staging memory was mapped has exited")
            for piece in self._contents[number]:
                flat = self._parts[piece.name].memory.view(-1)
                flat[piece.start : piece.start + piece.count].copy_(
                    self._memory[piece.offset : piece.offset + piece.count]
                )
            if self._memory.is_cuda:
                torch.cuda.synchronize(self._memory.device)
        self._next += 1

    def end(self, *, with_checksum: bool) -> int | None:
        """Require that all weights have come; their checksum, if it is asked for.

        Raises:
            BridgeError: some are missing, so the server would sample garbage.
        """
        if self._next < len(self._contents):
            raise BridgeError(f"only {self._next} of {len(self._contents)} contents of the staging memory were taken")
        if not with_checksum:
            return None
        checksum = Checksum()
        checksum.add(part.memory for part in self._parts.values())
        return checksum.value()

    def close(self) -> None:
        """Unmap the memory."""
        with self._mapping:
            self._memory = self._described = self._sender = None

    def _unmap_after(self, sender: ProcessIdentity) -> None:
        """Unmap the memory of a trainer that has exited: it would not be free before."""
        while sender.is_alive():
            time.sleep(_WATCH_S)
            with self._mapping:
                if self._sender != sender:
                    return
        with self._mapping:
            if self._sender == sender:
                self._memory = self._described = self._sender = None


def _mapped(described: SharedTensor) -> Tensor:
    if isinstance(described.handle, PosixHandle):
        from grpo_engine.bridges.memory.shared_tensors import map_tensors

        return map_tensors({_NAME: described})[_NAME]
    from grpo_engine.bridges.memory.cuda_tensors import map_cuda_tensors

    return map_cuda_tensors({_NAME: described})[_NAME]
