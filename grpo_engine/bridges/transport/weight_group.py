"""The process group over which a trainer sends its weights into the memory of inference servers.

Rank 0 is the trainer's, the others are the processes of servers that hold weights. NCCL between GPUs, Gloo elsewhere;
beside the default group of `torch.distributed`, which vLLM and a trainer of several ranks have for themselves. Gloo
listens on the address of the machine in a cluster, else on loopback. A group
has one set of members (an *epoch*): when one joins or leaves, the trainer makes a new group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, FileStore
from torch.distributed import ProcessGroupGloo

from grpo_engine.errors import BridgeError
from grpo_engine.processes import AnyProcess, raise_descriptor_limit
from grpo_engine.ranks.group import RanksFailed, refuse_strangers
from grpo_engine.ranks.listeners import closed_to_others
from grpo_engine.wire.inference import GroupMeeting
from grpo_engine.wire.tcp_sockets import machine_address, own_listening_ports, own_sockets

_WATCH_S = 0.25
_WORD = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PRIME = 2**61 - 1
_FACTOR = 1_000_003


class WeightGroup:
    """One member's place in a group."""

    def __init__(self, meeting: GroupMeeting, *, rank: int, device: torch.device) -> None:
        """Meet the other members; returns when all are connected.

        Args:
            rank: of this process; 0 sends.
            device: of the tensors; all members have the same kind.

        Raises:
            BridgeError: not all came within the meeting's time limit, or a process of another user came.
        """
        self._rank, self._device = rank, device
        self._group: Any = None
        limit = timedelta(seconds=meeting.timeout_s)
        services = own_listening_ports()  # as of an inference server, whose clients may be of any user
        older = own_sockets()  # the other end may be a server that was killed
        try:
            store = FileStore(str(meeting.store), meeting.size)
            store.set_timeout(limit)
            if device.type == "cuda":
                self._group = _nccl(store, rank, meeting.size, limit)
            else:
                raise_descriptor_limit()  # Gloo aborts the process when it is out of them
                options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._timeout = limit
                with closed_to_others():
                    options._devices = [ProcessGroupGloo.create_device(hostname=machine_address())]
                    self._group = ProcessGroupGloo(store, rank, meeting.size, options)
            self._connect(store, meeting)
            refuse_strangers(f"member {rank} of {meeting.size} of the weight group", services=services, older=older)
        except (RuntimeError, RanksFailed) as error:
            self.abort()  # the others have an error at once too
            raise BridgeError(f"weight group {meeting.epoch}: member {rank} of {meeting.size}: {error}") from error

    def _connect(self, store: FileStore, meeting: GroupMeeting) -> None:
        """Send a first tensor, in which NCCL connects: it waits for the others forever, and cannot be interrupted.

        Raises:
            RuntimeError: not all connected within the time limit.
        """
        store.set(f"member {self._rank}", "is here")
        store.wait([f"member {rank}" for rank in range(meeting.size)])
        connected: Future[None] = Future()

        def connect() -> None:
            try:
                self.broadcast([torch.zeros(1, device=self._device)])
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                connected.set_result(None)
            except Exception as error:  # raised where it is waited for
                connected.set_exception(error)

        threading.Thread(target=connect, name="weight-group-connecting", daemon=True).start()
        try:
            connected.result(timeout=meeting.timeout_s)
        except TimeoutError:
            raise RuntimeError(f"not all members connected within {meeting.timeout_s:g} s") from None

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Send contiguous tensors as rank 0, or receive into them; every member calls it with the same shapes.

        On a GPU the current stream waits for the transfer, and the host does not.

        Raises:
            RuntimeError: a member has exited or did not take part within the time limit, or the group was aborted.
        """
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        group = self._group  # until it returns: another thread may abort it
        if group is None:
            raise RuntimeError("the weight group was left")
        if self._device.type == "cuda":
            group._start_coalescing()
            for tensor in tensors:
                group.broadcast([tensor], options)
            group._end_coalescing().wait()
            return
        for work in [group.broadcast([tensor], options) for tensor in tensors]:
            work.wait()

    def abort(self) -> None:
        """Leave: transfers end with an error here and at the other members, also those that threads wait for."""
        group, self._group = self._group, None  # Gloo closes its connections with the object only
        if group is not None:
            group.abort()

    def abort_when_gone(self, sender: AnyProcess) -> None:
        """Abort when the sender's process has exited: NCCL would wait for it forever."""

        def watch() -> None:
            while sender.is_alive():
                time.sleep(_WATCH_S)
            self.abort()

        threading.Thread(target=watch, name="weight-group-watch", daemon=True).start()


def _nccl(store: FileStore, rank: int, size: int, limit: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = limit
    return ProcessGroupNCCL(store, rank, size, options)


class Checksum:
    """A number that depends on every bit of tensors, on the order of the tensors, and on that of their rows."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Take tensors into account; they may change afterwards."""
        self._sums += [_sum_of_bits(tensor) for tensor in tensors]

    def value(self) -> int:
        """Of all tensors until now."""
        total = 0
        for part in torch.stack(self._sums).tolist() if self._sums else []:
            total = (total * _FACTOR + int(part)) % _PRIME
        return total


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Scalar int64; wraps around."""
    words = tensor.detach().contiguous().view(_WORD[tensor.element_size()])
    rows = words.sum(dim=-1, dtype=torch.int64).flatten() if words.ndim > 1 else words.to(torch.int64)
    return (rows * torch.arange(1, rows.numel() + 1, device=rows.device)).sum()
