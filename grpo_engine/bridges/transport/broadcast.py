"""Transport broadcast: the trainer sends its weights into the memory of all servers at once, by NCCL or Gloo.

Servers stop between two batches, take the weights, and go on. All of them and the trainer are one group; a server that
exits in the middle breaks it, and those that are left get the version again in a new group. A server that comes back is
brought up to date at once. Now and then the servers prove by a checksum that they serve what was trained.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from grpo_engine.bridges.protocol import BridgeContext, BridgeModel, SavedPlacement, Update
from grpo_engine.bridges.transport.sender_file import SenderFile
from grpo_engine.bridges.transport.servers import Server, Servers, require_same_model, unshared_model
from grpo_engine.errors import BridgeError, PeerError
from grpo_engine.wire.inference import (
    BridgeInfo,
    GroupMeeting,
    JoinRequest,
    ReceiveAnswer,
    ReceiveRequest,
    TensorShape,
)
from grpo_engine.wire.log_lines import WEIGHT_GROUP_CREATED
from grpo_engine.wire.run_folder import HANDOVER_FOLDER
from grpo_engine.wire.tcp_sockets import is_of_cluster

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from grpo_engine.bridges.transport.weight_group import WeightGroup

_ATTEMPTS = 3
"""Of one update, each with the servers that are left."""
_MEETINGS = "grpo-weight-groups-"

logger = logging.getLogger(__name__)


class StreamedPlacement(SavedPlacement, Protocol):
    """Where the trained parameters live, for transports that send tensors."""

    def load(self) -> PreTrainedModel:
        """See `SavedPlacement`; no adapter."""

    def layers(self) -> list[dict[str, tuple[int, ...]]]:
        """Names and shapes of the parameters in the order of `stream`."""

    def stream(self, receive: Callable[[dict[str, Tensor]], None]) -> None:
        """Call `receive` with the whole parameters of each layer by name; it does not raise."""


class BroadcastBridge:
    """See `grpo_engine.bridges.protocol.Bridge`."""

    def __init__(
        self,
        context: BridgeContext,
        placement: StreamedPlacement,
        *,
        handover: Path | None,
        timeout_s: float,
        check_every: int,
    ) -> None:
        self._context = context
        self._placement = placement
        self._sender_file = SenderFile((handover or context.folder / HANDOVER_FOLDER).absolute())
        self._timeout_s = timeout_s
        self._check_every = check_every
        self._servers = Servers(context)
        self._meetings = _meetings(self._sender_file.path.parent)
        self._epoch = 0
        self._members: list[Server] = []
        """Of the present group, which is None where they have to meet again."""
        self._group: WeightGroup | None = None
        self._version = 0
        """Of the weights in this process."""
        self._served: int | None = None
        """What servers have; where steps are repeated from the journal it may be a later one."""
        self._num_updates = 0
        self._device: torch.device
        self._dtype = ""
        """Of the servers' weights."""

    def attach(self) -> BridgeModel:
        """Find the servers, and load the model.

        Raises:
            BridgeError: a server does not receive weights.
        """
        infos = self._servers.find(
            lambda port: (
                f"start it (grpo-engine server --model {self._context.model_name} --port {port} --receives-weights)"
            )
        )
        for server, info in zip(self._servers.all, infos, strict=True):
            self._check_server(server, info)
        model = self._placement.load()
        self._device = model.device
        for server, info in zip(self._servers.all, infos, strict=True):
            if not info.device.startswith(self._device.type):
                raise BridgeError(
                    f"{server.url}: its weights are on {info.device}, and the trained ones on {self._device}: put both "
                    "on GPUs (without cpu_offload), or both on the CPU"
                )
        self._sender_file.announce()
        return unshared_model(model, self._placement, infos, self._servers.repeat)

    def publish(self, version: int, write: Callable[[], None]) -> Update | None:
        """Write the new values, and send them to all servers that answer, unless these have later ones."""
        write()
        self._version = version
        if self._served is None:
            self._served = self._servers.kept_version()
        if self._servers.may_stay(self._served, version):
            return None
        self._servers.look_for_lost()
        return self._send()

    def poll_server(self) -> None:
        """Bring a server that has come back up to date: it answers no request before, so no batch would come."""
        if self._served is not None and (self._servers.look_for_lost() or self._servers.has_restarted_one()):
            self._send()

    def prepare_step(self) -> None:
        """Wait until a server serves what it was sent; if one that answers does not, send the weights to all."""
        if self._served is None:
            return
        if any(not server.is_current(info, self._served) for server, info in self._servers.infos().items()):
            self._send()

    def close(self) -> None:
        """Leave the group."""
        self._leave()
        self._servers.close()
        self._sender_file.close()
        self._meetings.cleanup()

    def _check_server(self, server: Server, info: BridgeInfo) -> None:
        if not info.receives_weights:
            raise BridgeError(
                f"{server.url}: does not receive weights: start it with --receives-weights (in a profile: bridge.mode "
                'is "broadcast" for all services)'
            )
        require_same_model(server.url, info.model_name, self._context.model_name)
        if self._dtype not in ("", info.dtype):
            raise BridgeError(
                f"{server.url}: serves {info.dtype}, and another server {self._dtype}: give all one dtype"
            )
        self._dtype = info.dtype

    # --- one update --------------------------------------------------------------------------------------------------

    def _send(self) -> Update:
        """Send the current version to all servers that answer, again to those that are left where one exits meanwhile.

        Raises:
            PeerError: it fails although the servers answer.
        """
        why = ""
        for _ in range(_ATTEMPTS):
            try:
                with self._servers.noting(self._version):
                    update = self._transfer(self._met())
            except BridgeError as error:  # a member has exited
                why = str(error)
            else:
                self._num_updates += 1
                self._served = self._version
                return update
            logger.warning("version %d did not reach every server: %s", self._version, why)
            self._leave()
        raise PeerError(f"version {self._version} does not reach the inference servers: {why}")

    def _met(self) -> WeightGroup:
        """The group of all servers that answer, in a new one where they are others than before."""
        from grpo_engine.bridges.transport.weight_group import WeightGroup

        if self._group is not None and self._members == self._servers.asked:
            return self._group
        self._leave()
        infos = self._servers.infos()
        self._epoch += 1
        store = Path(self._meetings.name) / str(self._epoch)
        store.touch(mode=0o600)
        meeting = GroupMeeting(
            epoch=self._epoch,
            store=store,
            size=1 + sum(info.num_ranks for info in infos.values()),
            timeout_s=self._timeout_s,
        )
        layers = [
            [TensorShape(name=name, shape=shape) for name, shape in layer.items()] for layer in self._placement.layers()
        ]
        requests: dict[Server, JoinRequest] = {}
        first_rank = 1
        for server, info in infos.items():
            requests[server] = JoinRequest(
                meeting=meeting,
                first_rank=first_rank,
                sender_pid=os.getpid(),
                sender_file=self._sender_file.path if is_of_cluster() else None,
                dtype=self._dtype,
                layers=layers,
            )
            first_rank += info.num_ranks
        patience_s, within_s = self._servers.patience_s, self._servers.within_s
        answers = self._servers.ask(
            requests,
            lambda server: server.client.join(requests[server], patience_s=patience_s, within_s=within_s),
        )
        for server, answer in answers.items():
            if answer.problem is not None:
                raise PeerError(f"{server.url}: {answer.problem}")
        self._group = WeightGroup(meeting, rank=0, device=self._device)
        self._members = list(infos)
        kind = "NCCL" if self._device.type == "cuda" else "Gloo"
        logger.info(WEIGHT_GROUP_CREATED.text, kind, len(infos), meeting.size)
        return self._group

    def _transfer(self, group: WeightGroup) -> Update:
        """Send the current version.

        Raises:
            BridgeError: it did not reach all members.
        """
        from grpo_engine.bridges.memory.shared_tensors import dtype_from_text
        from grpo_engine.bridges.transport.weight_group import Checksum

        version = self._version
        dtype = dtype_from_text(self._dtype)
        checksum = Checksum() if self._num_updates % self._check_every == 0 else None
        request = ReceiveRequest(epoch=self._epoch, policy_version=version, with_checksum=checksum is not None)
        broken: list[str] = []
        num_bytes = 0

        def end_if_failed(answer: Future[ReceiveAnswer]) -> None:
            if answer.exception() is not None or answer.result().problem is not None:
                group.abort()

        def send(layer: dict[str, Tensor]) -> None:
            nonlocal num_bytes
            tensors = [tensor.to(dtype).contiguous() for tensor in layer.values()]
            num_bytes += sum(tensor.nbytes for tensor in tensors)
            if checksum is not None:
                checksum.add(tensors)
            if not broken:
                try:
                    group.broadcast(tensors)
                except RuntimeError as error:
                    broken.append(str(error))

        with self._servers.asking(
            self._members,
            lambda server: server.client.receive(request, within_s=2 * self._timeout_s),
            end_if_failed,
        ) as answers:
            self._placement.stream(send)
        problems = [f"{server.url}: {answer.problem}" for server, answer in answers.items() if answer.problem]
        problems += [f"{server.url}: does not answer" for server in self._members if server not in answers]
        for server, answer in answers.items():
            if answer.problem is None and not broken:
                server.served(answer.instance, answer.policy_version)
        if problems or broken:
            raise BridgeError("; ".join(problems or broken))
        if checksum is not None:
            self._compare(checksum.value(), answers)
        pause_s = max(answer.paused_s for answer in answers.values())
        return Update(pause_s=pause_s, num_bytes=num_bytes, num_servers=len(answers))

    def _compare(self, sent: int, answers: dict[Server, ReceiveAnswer]) -> None:
        for server, answer in answers.items():
            for rank, received in enumerate(answer.checksums):
                if received != sent:
                    raise PeerError(
                        f"{server.url}, process {rank}: serves other weights than were sent as version {self._version} "
                        f"(checksum {received}, not {sent}): restart that server; if it happens again, the transfer "
                        "between these devices is faulty (NCCL_DEBUG=WARN)"
                    )

    def _leave(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None


def _meetings(handover: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder that only this user may write, for the files by which members meet; in a cluster all machines see it."""
    if not is_of_cluster():
        return tempfile.TemporaryDirectory(prefix=_MEETINGS)
    handover.mkdir(parents=True, exist_ok=True)
    for left in handover.glob(f"{_MEETINGS}*"):  # by a trainer that was killed
        shutil.rmtree(left, ignore_errors=True)
    return tempfile.TemporaryDirectory(prefix=_MEETINGS, dir=handover)
