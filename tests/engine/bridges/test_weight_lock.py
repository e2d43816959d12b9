"""The weight lock: what readers see before, during and after an update, and after a writer is killed."""

from __future__ import annotations

import errno
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.synchronize import Event

import pytest
from forked import run_forked, start_forked
from workplace import until

from grpo_engine.bridges.memory.weight_lock import PAGE_BYTES, SHARED_MEMORY, WeightLock
from grpo_engine.errors import BridgeError, HalfWritten
from grpo_engine.processes import ProcessIdentity


@pytest.fixture
def segment() -> Iterator[str]:
    name = f"grpo-test-{os.getpid()}-fence"
    yield name
    (SHARED_MEMORY / name).unlink(missing_ok=True)


def test_readers_see_the_version_once_the_update_is_whole(segment: str) -> None:
    writer = WeightLock.create(segment, policy_version=3)
    reader = WeightLock.attach(segment)
    before = reader.check()
    assert (before.policy_version, before.update_count, before.updated_at, before.is_writing) == (3, 0, 0, False)
    with writer.writing(4):
        during = reader.check()
        assert (during.policy_version, during.is_writing) == (3, True)
    after = reader.check()
    assert (after.policy_version, after.update_count, after.is_writing) == (4, 1, False)
    assert after.sequence == before.sequence + 2
    assert after.updated_at > 1.7e9


def test_a_failed_update_is_half_written_until_a_complete_one(segment: str) -> None:
    writer, reader = WeightLock.create(segment), WeightLock.attach(segment)
    with pytest.raises(ZeroDivisionError), writer.writing(1):
        raise ZeroDivisionError
    with pytest.raises(HalfWritten, match=r"after version 0.*the writer failed"):
        reader.check()
    with writer.writing(2):
        assert reader.check().is_writing
    state = reader.check()
    assert (state.policy_version, state.update_count, state.is_writing) == (2, 1, False)


def test_a_version_that_the_page_cannot_hold_leaves_the_update_given_up_and_not_under_way_for_ever() -> None:
    lock = WeightLock.private()
    with pytest.raises(ValueError, match="memoryview"), lock.writing(2**63):
        pass
    with pytest.raises(HalfWritten):
        lock.check()


def write_and_exit(segment: str) -> None:
    with WeightLock.attach(segment).writing(1):
        os._exit(9)


@pytest.mark.slow
def test_a_writer_that_exits_during_an_update_is_detected(segment: str) -> None:
    lock = WeightLock.create(segment)
    assert run_forked(write_and_exit, segment) == 9
    with pytest.raises(HalfWritten, match=r"process \d+ exited"):
        lock.check()
    with lock.writing(2):
        pass
    assert lock.check().policy_version == 2


def write_as_second(segment: str) -> None:
    with pytest.raises(BridgeError, match="is writing another one"), WeightLock.attach(segment).writing(2):
        pass


@pytest.mark.slow
def test_two_running_writers_are_refused(segment: str) -> None:
    lock = WeightLock.create(segment)
    with lock.writing(1):
        assert run_forked(write_as_second, segment) == 0
    assert lock.check().policy_version == 1


def test_a_page_is_made_once_and_read_only_as_what_it_is(segment: str) -> None:
    with pytest.raises(BridgeError, match="cannot be mapped"):
        WeightLock.attach(segment)
    WeightLock.create(segment)
    with pytest.raises(BridgeError, match="already exists"):
        WeightLock.create(segment)
    (SHARED_MEMORY / segment).write_bytes(bytes(PAGE_BYTES))
    with pytest.raises(BridgeError, match="layout 1"):
        WeightLock.attach(segment)
    (SHARED_MEMORY / segment).write_bytes(b"short")
    with pytest.raises(BridgeError, match="5 bytes"):
        WeightLock.attach(segment)


def test_a_page_without_free_memory_is_an_error_and_leaves_no_file(
    segment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(BridgeError, match=r"No space left on device; free space in /dev/shm"):
        WeightLock.create(segment)
    assert not (SHARED_MEMORY / segment).exists()


def write_all_after(segment: str, go: Event) -> None:
    lock = WeightLock.attach(segment)
    with lock.writing(1, has_all=True):
        pass
    go.wait()
    with lock.writing(2, has_all=True):
        pass


@pytest.mark.slow
def test_weights_that_are_expected_from_a_trainer_are_half_written_until_it_writes_them_or_exits(segment: str) -> None:
    go = multiprocessing.get_context("forkserver").Event()
    lock = WeightLock.create(segment)
    trainer = start_forked(write_all_after, segment, go)
    until(lambda: lock.read().sequence == 2)
    assert lock.has_all()
    lock.expect(lock.writer())
    assert lock.check().is_writing
    with pytest.raises(BridgeError, match="is writing another one"), lock.writing(3):
        pass
    go.set()
    trainer.join()
    assert (lock.check().policy_version, lock.check().is_writing) == (2, False)
    lock.expect(lock.writer())
    with pytest.raises(HalfWritten, match=r"process \d+ exited"):
        lock.check()
    with lock.writing(3):
        pass
    assert not lock.has_all()


def test_a_process_can_say_that_it_will_not_write_what_is_expected_from_it(segment: str) -> None:
    lock = WeightLock.create(segment)
    lock.expect(ProcessIdentity.of_this_process())
    assert lock.has_all()
    assert lock.is_expected()
    lock.clear_writer()
    with pytest.raises(HalfWritten):
        lock.check()
    with lock.writing(1):
        lock.clear_writer()
        assert not lock.is_expected()
        assert lock.check().is_writing
