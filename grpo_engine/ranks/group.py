"""The ranks of one trainer: rank 0 leads, the others do what it announces, and sums are taken over all.

Rank 0 alone talks to the rollout API, the inference servers and the disk. Before work that all ranks do together it
announces the work; they wait for announcements all the time. A trainer of one process is a group of one, which
announces nothing and sums nothing.

Announcements and small sums go by Gloo, so that a waiting GPU stays idle; parameters and gradients by NCCL on GPUs.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from grpo_engine.errors import GrpoError
from grpo_engine.processes import raise_descriptor_limit
from grpo_engine.ranks.collective_clock import CollectiveClock
from grpo_engine.ranks.leaving import Leaving, wait_for_gpu
from grpo_engine.ranks.listeners import close_ports_of_gloo
from grpo_engine.ranks.place import RankPlace
from grpo_engine.ranks.positions import OwnPosition
from grpo_engine.wire.tcp_sockets import connected_stranger, who_has

log = logging.getLogger(__name__)

ACCEPTED_WITHIN_S = 10.0
"""Longest time between a connection and its acceptance by the other rank, which may be importing."""
WAITING_LIMIT = timedelta(days=30)
"""Of a wait for the next announcement: rank 0 may wait for rollouts as long as it likes. The end of its process closes
the connection, and ends the wait."""


class RanksFailed(GrpoError):
    """Another rank has exited, or did not reach a collective operation in time."""


class RankGroup:
    """The ranks of a trainer, seen from one of them."""

    def __init__(
        self,
        place: RankPlace | None = None,
        *,
        device: str = "cpu",
        timeout_s: float = 600.0,
        num_replicas: int = 1,
    ) -> None:
        """Meet the other ranks; returns when all are there.

        Args:
            place: None for the one process of a trainer without ranks.
            device: `cpu` or `cuda:n`, of this rank.
            timeout_s: longest time for a collective operation, and for the meeting.
            num_replicas: copies of the sharded model, each on consecutive ranks.

        Raises:
            RanksFailed: not all ranks came within the time.
        """
        self.rank, self.size = (place.rank, place.world_size) if place else (0, 1)
        self.device = device
        self.position = OwnPosition.from_environment(os.environ if place else {}, place.local_rank if place else 0)
        self.clock = CollectiveClock()
        self._num_replicas = num_replicas
        self._is_announced = False
        self.announcements: dist.ProcessGroup | None = None
        """All ranks by Gloo, without a time limit worth the name."""
        self._background: dist.ProcessGroup | None = None
        self._leaving: Leaving | None = None
        if place is None:
            return
        self._leaving = Leaving(device)
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        raise_descriptor_limit()  # Gloo aborts the process when it is out of them
        close_ports_of_gloo()
        self._limit = limit = timedelta(seconds=timeout_s)
        try:
            with self.position.waiting("the meeting of all ranks"):
                store = _store(place, limit)
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo",
                    store=store,
                    rank=place.rank,
                    world_size=place.world_size,
                    timeout=limit,
                    device_id=torch.device(device) if device.startswith("cuda") else None,
                )
        except (RuntimeError, ValueError) as error:
            where = place.store_file or f"{place.master_addr}:{place.master_port}"
            raise RanksFailed(
                f"rank {place.rank} of {place.world_size}: the ranks did not meet at {where} within {timeout_s:g} s: "
                f"{error}; look at the logs of the other ranks"
            ) from error
        self.announcements = dist.new_group(backend="gloo", timeout=WAITING_LIMIT)
        self._refuse_strangers()
        log.info("rank %d of %d on %s", self.rank, self.size, device)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def mesh(self) -> DeviceMesh:
        """All ranks: of the shards, in one dimension; with replicas, of those in another before it."""
        kind, num_shards = torch.device(self.device).type, self.size // self._num_replicas
        if self._num_replicas == 1:
            return init_device_mesh(kind, (num_shards,), mesh_dim_names=("shard",))
        mesh = init_device_mesh(kind, (self._num_replicas, num_shards), mesh_dim_names=("replicate", "shard"))
        self._refuse_strangers()  # its groups have connections of their own
        return mesh

    def _refuse_strangers(self) -> None:
        refuse_strangers(f"rank {self.rank} of {self.size}")

    @contextmanager
    def together(self, work: object) -> Iterator[None]:
        """Within, all ranks do `work`: rank 0 announces it, and the others are here since they received it.

        Work that is announced inside other work is part of that, and not announced.
        """
        is_outermost = not self._is_announced
        if is_outermost:
            self.position.begin(str(work))
        if self.size > 1 and is_outermost and self.leads:
            with self.position.waiting("the announcement"), self._limited():
                self._broadcast(work)
        self._is_announced = True
        try:
            yield
        finally:
            if is_outermost:
                self._is_announced = False
        if self._leaving is not None and self._leaving.is_asked:
            raise RanksFailed(f"rank {self.rank}: another rank has failed, so {self.position.place} has no result")
        if is_outermost:  # after an error it says where that was
            self.position.end("work of rank 0 alone")

    def next_work(self) -> object:
        """The next announcement of rank 0; called by the other ranks.

        Raises:
            RanksFailed: rank 0 has exited.
        """
        self.position.end("the wait for an announcement")
        return self._broadcast(None)

    @contextmanager
    def collective(self, operation: str, device: str, *, then: str = "", then_backward: str = "") -> Iterator[None]:
        """Around a collective operation, for the position of this rank and the time that it waits.

        Args:
            operation, then, then_backward: as `OwnPosition.waiting` takes them.
            device: the type of the tensors' device.

        Raises:
            RanksFailed: another rank has exited, or did not take part in time.
        """
        with self.position.waiting(operation, then=then, then_backward=then_backward), self.clock.timed(device):
            try:
                yield
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise RanksFailed(
                    f"rank {self.rank}: another rank has exited, or did not take part within rank_timeout_s; this one "
                    f"was in {self.position.place}: {error}"
                ) from error

    def sum(self, values: Tensor, what: str = "a sum") -> Tensor:
        """The sum over all ranks, on every rank; of a tensor on any device, which may be changed."""
        if self.size > 1:
            with self.collective(f"the all-reduce of {what}", values.device.type):
                dist.all_reduce(values)
        return values

    def largest(self, values: Tensor, what: str) -> Tensor:
        """The largest of each number over all ranks, on every rank; may change the tensor."""
        if self.size > 1:
            with self.collective(f"the all-reduce of {what}", values.device.type):
                dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    @torch.no_grad()
    def sum_each(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one dtype by their sums over all ranks, which have the same bits on every rank."""
        if self.size > 1 and tensors:
            sums = self.sum(torch.cat([tensor.flatten() for tensor in tensors]), "the gradients")
            self._spread(sums, tensors)

    @torch.no_grad()
    def copy_from_leader(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one dtype by those of rank 0."""
        if self.size > 1 and tensors:
            values = torch.cat([tensor.flatten() for tensor in tensors])
            with self.collective("the broadcast of rank 0's values", values.device.type):
                dist.broadcast(values, src=0)
            self._spread(values, tensors)

    def in_background(self) -> BackgroundRanks:
        """The same ranks for another thread of each, beside all that is announced; called on all ranks."""
        if self.size > 1 and self._background is None:
            self._background = dist.new_group(backend="gloo", timeout=WAITING_LIMIT)
            self._refuse_strangers()
        return BackgroundRanks(rank=self.rank, size=self.size, device=self.device, announcements=self._background)

    def norm(self, local: Tensor) -> Tensor:
        """The 2-norm over all ranks of what each holds, of the norms of their parts."""
        if self.size == 1:
            return local
        return (self.sum(local.square(), "the gradient norm") / self._num_replicas).sqrt()

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks by rank, on every rank; any picklable objects."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.collective("the all-gather of results", "cpu"):
            dist.all_gather_object(values, value, group=self.announcements)
        return values

    def abandon(self) -> None:
        """Instead of `close`, where another rank has failed: wait for none but the GPU of this one."""
        wait_for_gpu(self.device)

    def close(self) -> None:
        """Leave the group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    @staticmethod
    def _spread(flat: Tensor, tensors: Sequence[Tensor]) -> None:
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        torch._foreach_copy_(list(tensors), [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Within, announcements have the limit of other operations: every rank should take one at once."""
        _set_pg_timeout(self._limit, self.announcements)
        yield
        _set_pg_timeout(WAITING_LIMIT, self.announcements)

    def _broadcast(self, work: object) -> object:
        box = [work]
        try:
            dist.broadcast_object_list(box, src=0, group=self.announcements)
        except RuntimeError as error:
            raise RanksFailed(
                f"rank {self.rank}: another rank has exited, and its own message is the cause, or did not take the "
                f"announcement within rank_timeout_s: {error}"
            ) from error
        return box[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundRanks:
    """The ranks of a trainer, seen from a thread that has its own connections to theirs: their collective operations
    do not interleave with those of training."""

    rank: int
    size: int
    device: str
    announcements: dist.ProcessGroup | None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """See `RankGroup`."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self.announcements)
        except RuntimeError as error:
            raise RanksFailed(f"rank {self.rank}: another rank has exited: {error}") from error
        return values


def refuse_strangers(member: str, *, services: Collection[int] = (), older: Collection[int] = ()) -> None:
    """Check who has connected to this process, since Gloo accepts whoever comes first; before anything is sent.

    Args:
        member: this process, for the message.
        services: ports of this process to which every user may connect.
        older: inodes of sockets from before the group, as of clients of services that have exited since.

    Raises:
        RanksFailed: a process of another user, or one that cannot be identified.
    """
    deadline = time.monotonic() + ACCEPTED_WITHIN_S
    while (
        (stranger := connected_stranger(services=services, older=older)) is not None
        and not stranger.inode
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)  # the other end is not accepted yet
    if stranger is not None:
        who = who_has(stranger) if stranger.inode else "an unknown user that has exited"
        raise RanksFailed(
            f"{member}: a process of {who} has connected in the place of another; nothing was sent to it. End that "
            "process, and start again"
        )


def _store(place: RankPlace, limit: timedelta) -> Store:
    """Where the ranks leave their addresses for each other."""
    if place.store_file is not None:
        store = FileStore(str(place.store_file), place.world_size)
        store.set_timeout(limit)
        return store
    return TCPStore(
        place.master_addr,
        place.master_port,
        is_master=place.rank == 0,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=place.listening_fd,
    )
