"""The fence page: what readers see before, during and after an update, and when a writer dies in one."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from grpo_engine.bridges.fence import PAGE_BYTES, SHARED_MEMORY, Fence
from grpo_engine.bridges.process_identity import ProcessIdentity
from grpo_engine.errors import BridgeError, HalfWritten


@pytest.fixture
def segment() -> Iterator[str]:
    name = f"grpo-test-{os.getpid()}-fence"
    yield name
    (SHARED_MEMORY / name).unlink(missing_ok=True)


def run_python(code: str, *arguments: str) -> int:
    return subprocess.run([sys.executable, "-c", code, *arguments], check=False, timeout=60).returncode


def test_readers_see_the_version_once_the_update_is_whole(segment: str) -> None:
    writer = Fence.create(segment, policy_version=3)
    reader = Fence.attach(segment)
    before = reader.check()
    assert (before.policy_version, before.update_count, before.updated_at, before.is_writing) == (3, 0, 0, False)
    with writer.writing(4):
        during = reader.check()
        assert (during.policy_version, during.is_writing) == (3, True)
    after = reader.check()
    assert (after.policy_version, after.update_count, after.is_writing) == (4, 1, False)
    assert after.sequence == before.sequence + 2
    assert after.updated_at > 1.7e9


def test_a_failed_update_is_half_written_until_a_whole_one(segment: str) -> None:
    writer, reader = Fence.create(segment), Fence.attach(segment)
    with pytest.raises(ZeroDivisionError), writer.writing(1):
        raise ZeroDivisionError
    with pytest.raises(HalfWritten, match=r"after version 0.*the writer failed"):
        reader.check()
    with writer.writing(2):
        assert reader.check().is_writing
    state = reader.check()
    assert (state.policy_version, state.update_count, state.is_writing) == (2, 1, False)


def test_a_version_that_the_page_cannot_hold_leaves_the_update_given_up_and_not_under_way_for_ever() -> None:
    fence = Fence.private()
    with pytest.raises(ValueError, match="memoryview"), fence.writing(2**63):
        pass
    with pytest.raises(HalfWritten):
        fence.check()


@pytest.mark.slow
def test_a_writer_that_dies_in_an_update_is_found_out(segment: str) -> None:
    fence = Fence.create(segment)
    dies = (
        "import os, sys; from grpo_engine.bridges.fence import Fence\n"
        "with Fence.attach(sys.argv[1]).writing(1): os._exit(9)"
    )
    assert run_python(dies, segment) == 9
    with pytest.raises(HalfWritten, match=r"process \d+ died"):
        fence.check()
    with fence.writing(2):
        pass
    assert fence.check().policy_version == 2


@pytest.mark.slow
def test_two_living_writers_are_refused(segment: str) -> None:
    fence = Fence.create(segment)
    tries = (
        "import sys; from grpo_engine.bridges.fence import Fence; from grpo_engine.errors import BridgeError\n"
        "try:\n  with Fence.attach(sys.argv[1]).writing(2): pass\n"
        "except BridgeError as error: sys.exit(7 if 'in the middle of an update' in str(error) else 1)"
    )
    with fence.writing(1):
        assert run_python(tries, segment) == 7
    assert fence.check().policy_version == 1


def test_a_page_is_made_once_and_read_only_as_what_it_is(segment: str) -> None:
    with pytest.raises(BridgeError, match="cannot be mapped"):
        Fence.attach(segment)
    Fence.create(segment)
    with pytest.raises(BridgeError, match="exists already"):
        Fence.create(segment)
    (SHARED_MEMORY / segment).write_bytes(bytes(PAGE_BYTES))
    with pytest.raises(BridgeError, match="layout 1"):
        Fence.attach(segment)
    (SHARED_MEMORY / segment).write_bytes(b"short")
    with pytest.raises(BridgeError, match="5 bytes"):
        Fence.attach(segment)


def test_a_page_for_which_there_is_no_room_is_said_and_leaves_nothing(
    segment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(BridgeError, match=r"No space left on device; make room below /dev/shm"):
        Fence.create(segment)
    assert not (SHARED_MEMORY / segment).exists()


def test_an_identity_is_more_than_an_id() -> None:
    me = ProcessIdentity.of_this_process()
    assert me.is_alive()
    assert not ProcessIdentity(me.pid, me.start_ticks + 1).is_alive()


def test_a_zombie_is_gone() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert ProcessIdentity.of(child) is None
    os.waitpid(child, 0)
