"""The note of a trainer that sends weights: who takes it for alive, on its machine and on another."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from grpo_engine.bridges.transport import sender_file
from grpo_engine.bridges.transport.sender_file import DistantSender, SenderFile, sender_of
from grpo_engine.processes import ProcessIdentity
from grpo_engine.wire.environment_variables import MACHINE_ADDRESS_VARIABLE
from grpo_engine.wire.handover import HandoverSender
from grpo_engine.wire.tcp_sockets import connected_stranger


def test_on_one_machine_the_process_is_looked_at(tmp_path: Path) -> None:
    note = SenderFile(tmp_path / "handover")
    note.announce()
    assert sender_of(note.path) == ProcessIdentity.of_this_process()
    note.close()
    assert sender_of(note.path) is None


def test_a_trainer_on_another_machine_lives_while_it_touches_its_own_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_file, "_TOUCH_S", 0.01)
    monkeypatch.setenv(MACHINE_ADDRESS_VARIABLE, "10.77.0.2")
    note = SenderFile(tmp_path)
    note.announce()
    monkeypatch.setenv(MACHINE_ADDRESS_VARIABLE, "10.77.0.3")  # as a server there
    sender = sender_of(note.path)
    assert isinstance(sender, DistantSender)
    assert sender.pid == os.getpid()
    now_s = time.monotonic()
    before_ns = note.path.stat().st_mtime_ns
    while note.path.stat().st_mtime_ns == before_ns:
        time.sleep(0.005)
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 100)
    assert sender.is_alive()  # it was touched since
    note._is_closed.set()
    text = note.path.read_text()
    for thread in threading.enumerate():
        if thread.name == "sender-file":
            thread.join()
    sender.is_alive()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 100 + sender_file._GONE_AFTER_S - 0.1)
    assert sender.is_alive()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 100 + sender_file._GONE_AFTER_S + 0.1)
    assert not sender.is_alive()
    other = HandoverSender.model_validate_json(text).model_copy(update={"pid": 1})
    note.path.write_text(other.model_dump_json())
    assert not sender.is_alive()  # of another trainer
    note.path.unlink()
    assert not sender.is_alive()


def test_a_connection_to_another_address_of_this_machine_is_one_within_it(tmp_path: Path) -> None:
    own = f"{os.getpid() + (1 << 22)}"  # no inode of ours
    with socket.socket() as mine:
        inode = os.fstat(mine.fileno()).st_ino
        head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        rest = "00000000:00000000 00:00000000 00000000"
        here, there = "02004D0A:1000", "02004D0A:2000"  # 10.77.0.2
        row = "   {n}: {own} {peer} 01 {rest} {uid:>5} 0 {inode} 1 0 20 4 30 10 -1\n"
        rows = row.format(n=0, own=here, peer=there, rest=rest, uid=os.geteuid(), inode=inode)
        rows += row.format(n=1, own=there, peer=here, rest=rest, uid=65534, inode=own)
        (tmp_path / "tcp").write_text(head + rows)
        stranger = connected_stranger(tables=tmp_path)
        assert stranger is not None
        assert stranger.uid == 65534
