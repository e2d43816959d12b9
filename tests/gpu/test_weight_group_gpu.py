"""A weight group of two GPUs talks NCCL: what is received is what was sent, and a member that has gone is told."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from grpo_engine.bridges.transport.weight_group import Checksum, WeightGroup
from grpo_engine.errors import BridgeError
from grpo_engine.processes import ProcessIdentity
from grpo_engine.wire.inference import GroupMeeting

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")]

LAYERS = (
    {torch.bfloat16: [(128, 64), (3,)]},
    {torch.float32: [(70, 50)], torch.bfloat16: [(1,)]},
    {torch.bfloat16: [(4096, 4096)] * 9},
)


def layers(device: str, *, seed: int | None) -> list[list[Tensor]]:
    """Random tensors; zeros without a seed."""
    made = torch.Generator(device="cpu").manual_seed(seed or 0)
    return [
        [
            torch.zeros(shape, dtype=dtype, device=device)
            if seed is None
            else torch.randn(shape, generator=made).to(device, dtype)
            for dtype, shapes in layer.items()
            for shape in shapes
        ]
        for layer in LAYERS
    ]


def receive(meeting: GroupMeeting, sender: ProcessIdentity, answers: Connection) -> None:
    """A server's side, on the second GPU, until it is told to end."""
    torch.cuda.set_device(1)
    device = torch.device("cuda:1")
    try:
        group = WeightGroup(meeting, rank=1, device=device)
    except BridgeError as error:
        answers.send(str(error))
        return
    group.abort_when_gone(sender)
    memory = layers("cuda:1", seed=None)
    while (seed := answers.recv()) is not None:
        try:
            for layer in memory:
                group.broadcast(layer)
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            answers.send(f"failed: {type(error).__name__}")
            return
        wanted = layers("cuda:1", seed=seed)
        checksum = Checksum()
        for layer in memory:
            checksum.add(layer)
        answers.send((_are_same(memory, wanted), checksum.value()))
    group.abort()


def _are_same(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(one, other) for layer in pairs for one, other in zip(*layer, strict=True))


class Member:
    """The other process of a group of two."""

    def __init__(self, folder: Path, *, timeout_s: float) -> None:
        store = folder / "store"
        store.touch(mode=0o600)
        self.meeting = GroupMeeting(epoch=1, store=store, size=2, timeout_s=timeout_s)
        self.answers, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(
            target=receive, args=(self.meeting, ProcessIdentity.of_this_process(), theirs), daemon=True
        )
        self.process.start()

    def answer(self) -> object:
        assert self.answers.poll(60), "the member does not answer"
        return self.answers.recv()

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(20)


def test_what_is_received_over_nccl_is_what_was_sent(tmp_path: Path) -> None:
    member = Member(tmp_path, timeout_s=60)
    try:
        group = WeightGroup(member.meeting, rank=0, device=torch.device("cuda:0"))
        for seed in (1, 2, 3):
            sent, checksum = layers("cuda:0", seed=seed), Checksum()
            member.answers.send(seed)
            for layer in sent:
                checksum.add(layer)
                group.broadcast(layer)
            assert member.answer() == (True, checksum.value())
        member.answers.send(None)
        group.abort()
        member.process.join(30)
        assert member.process.exitcode == 0
    finally:
        member.end()


def test_a_sender_without_members_has_an_error_after_the_time_limit(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.touch(mode=0o600)
    with pytest.raises(BridgeError, match="member 0 of 2"):
        WeightGroup(GroupMeeting(epoch=1, store=store, size=2, timeout_s=2), rank=0, device=torch.device("cuda:0"))


def test_after_a_killed_member_a_new_group_meets_and_sends(tmp_path: Path) -> None:
    """The bridge aborts a group when a server's HTTP answer fails, and makes a new one with those that are left."""
    member = Member(tmp_path, timeout_s=20)
    try:
        group = WeightGroup(member.meeting, rank=0, device=torch.device("cuda:0"))
        os.kill(member.process.pid or 0, signal.SIGKILL)
        member.process.join(10)
        group.abort()
        with pytest.raises(RuntimeError, match="left"):
            group.broadcast(layers("cuda:0", seed=1)[0])
        (tmp_path / "again").mkdir()
        again = Member(tmp_path / "again", timeout_s=60)
        try:
            anew = WeightGroup(again.meeting, rank=0, device=torch.device("cuda:0"))
            again.answers.send(7)
            for layer in layers("cuda:0", seed=7):
                anew.broadcast(layer)
            assert again.answer()[0] is True  # type: ignore[index]
            anew.abort()
        finally:
            again.end()
    finally:
        member.end()
