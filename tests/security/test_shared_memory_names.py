"""Names below /dev/shm that another user has made, who knows the run and its processes: nothing is loaded by them."""

from __future__ import annotations

import os
import secrets
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_engine.bridges.memory import shared_names
from grpo_engine.bridges.memory.shared_names import (
    adapters_name,
    make_own_folder,
    newest_adapter,
    own_or_free,
    remove_stale_staging,
    staging_name,
    stem_of,
)
from grpo_engine.bridges.memory.weight_lock import SHARED_MEMORY, attach_segment
from grpo_engine.bridges.transport.checkpoint_folder import CheckpointFolder, choose_storage
from grpo_engine.errors import BridgeError
from grpo_engine.wire.environment_variables import RUN_VARIABLE
from grpo_tui.supervisor import teardown

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
NOBODY = 65534


@pytest.fixture
def run() -> Iterator[str]:
    name = f"names-{secrets.token_hex(4)}"
    yield name
    for path in SHARED_MEMORY.glob(f"{stem_of(name)}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def of_nobody(path: Path) -> Path:
    """It, made by another user."""
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    return path


def test_a_restarted_server_takes_no_adapter_that_another_user_has_put_beside_that_of_the_trainer(run: str) -> None:
    own = SHARED_MEMORY / adapters_name(run)
    make_own_folder(own)
    (own / "policy@000003").mkdir()
    planted = SHARED_MEMORY / own.name.replace("adapters-", "adapters-x-")
    (planted / "policy@999999").mkdir(parents=True)
    of_nobody(planted)
    link = SHARED_MEMORY / own.name.replace("adapters-", "adapters-y-")
    link.symlink_to(planted)
    newest = newest_adapter(run)
    assert newest is not None
    assert newest.path == own / "policy@000003"
    (own / "policy@\u00b2").mkdir()
    assert newest_adapter(run) == newest
    shutil.rmtree(own)
    assert newest_adapter(run) is None


def test_memory_of_another_user_is_not_removed_as_that_of_a_trainer_which_has_ended(run: str) -> None:
    """That raises in /dev/shm, where only who made a file may remove it, and would end the start of every trainer."""
    planted = SHARED_MEMORY / f"{stem_of(run)}staging0-1-1"
    planted.write_bytes(b"")
    of_nobody(planted)
    remove_stale_staging(run)
    assert planted.exists()


def test_memory_that_another_user_has_made_or_linked_is_not_mapped_for_weights(run: str) -> None:
    planted = SHARED_MEMORY / f"{stem_of(run)}weights"
    planted.write_bytes(b"x" * 4096)
    attach_segment(planted.name).close()
    of_nobody(planted)
    with pytest.raises(BridgeError, match="owned by another user"):
        attach_segment(planted.name)
    link = SHARED_MEMORY / f"{stem_of(run)}link"
    link.symlink_to(planted)
    with pytest.raises(BridgeError, match="cannot be mapped"):
        attach_segment(link.name)


@pytest.mark.parametrize("name_of", [adapters_name, staging_name])
def test_another_user_cannot_take_the_name_of_memory_before_the_trainer_makes_it(
    run: str, name_of: Callable[[str], str]
) -> None:
    """By the pid of the trainer and its start time, which are public; the trainer would end."""
    assert name_of(run) != name_of(run)
    own = SHARED_MEMORY / name_of(run)
    own.touch()
    remove_stale_staging(run)
    assert own.exists()  # of a process that lives


def test_a_trainer_writes_checkpoints_beside_a_folder_that_another_user_has_made_of_their_name(
    run: str, tmp_path: Path
) -> None:
    """Its name is known to who knows the run and its folder; no trainer of the run could have been started."""

    def chosen() -> Path:
        return choose_storage(tmp_path, None, num_bytes=1, on_gpu=True, environment={RUN_VARIABLE: run})

    usual = chosen()
    assert usual.is_relative_to(SHARED_MEMORY)
    usual.mkdir()
    assert chosen() == usual
    of_nobody(usual)
    beside = chosen()
    assert beside != usual
    folder = CheckpointFolder(tmp_path, beside, model="model")
    assert chosen() == beside  # that of a trainer which was killed is found again
    folder.close()
    planted = SHARED_MEMORY / f"{usual.name}.0"
    planted.mkdir()
    of_nobody(planted)
    assert own_or_free(usual) not in (usual, planted)


def _is_taken(run: str) -> bool:
    """Whether a folder of checkpoints gets a name that another user has made."""
    return os.path.lexists(own_or_free(Path.cwd() / f"{stem_of(run)}adapters-0-1-1"))


@pytest.mark.parametrize(
    "look",
    [newest_adapter, _is_taken, lambda run: teardown.remove_shared_memory(run, frozenset())],
    ids=["server", "trainer", "supervisor"],
)
def test_names_that_another_user_has_made_take_no_memory_of_who_looks_at_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[[str], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shared_names, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(teardown, "SHARED_MEMORY", str(tmp_path))
    seed = tmp_path / "seed"
    seed.touch()
    of_nobody(seed)
    for number in range(1000):
        os.link(seed, tmp_path / f"grpo-r-adapters-{number}-1-1")
        os.link(seed, tmp_path / f"grpo-r-adapters-0-1-1.{number}")
    tracemalloc.start()
    assert not look("r")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200_000  # of 2000 entries at once, 0.7 MB
