"""Locks and code of libraries of ours in folders that other users may enter: none of theirs is waited for or loaded."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from grpo_engine.environments.tasks.hub import _close_locks
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.vllm.environment import settle_environment

LOAD = """
import os, sys
os.umask(int(sys.argv[1], 8))
if sys.argv[2] == "as any program":
    import datasets
    print(len(datasets.load_dataset("owner/name", split="train")))
else:
    from grpo_engine.environments.tasks.hub import hub_rows
    print(len(hub_rows("owner/name", split="train", task="gsm8k", instead="")))
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder as `/tmp` is."""
    (folder := tmp_path / "shared").mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.mark.parametrize("laid", ["nothing", "a link", "an open folder"])
def test_vllm_has_a_temporary_folder_that_no_other_user_may_enter(laid: str, shared: Path, tmp_path: Path) -> None:
    """Before, vLLM by hand waited without end for `/tmp/<model>.lock`, which any user could make first, and hold."""
    theirs = shared / f"grpo-vllm-{os.geteuid()}"
    match laid:
        case "a link":
            (tmp_path / "theirs").mkdir(mode=0o700)
            theirs.symlink_to(tmp_path / "theirs")
        case "an open folder":
            theirs.mkdir()
            theirs.chmod(0o777)
    config = ServerConfig.model_validate({"model_name": "owner/name", "engine": "vllm", "device": "cpu"})
    environment: dict[str, str] = {}
    settle_environment(config, environment)
    folder = Path(environment["TMPDIR"])
    assert (folder.parent, folder.lstat().st_mode & 0o7777) == (shared, 0o700)
    assert folder.is_dir()
    assert not folder.is_symlink()
    assert (folder == theirs) == (laid == "nothing")


def test_vllm_has_a_temporary_folder_though_another_user_removes_the_one_of_its_name_meanwhile(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who made and removed it in a loop had some starts refused."""
    theirs = shared / f"grpo-vllm-{os.geteuid()}"
    theirs.mkdir()
    mkdir = os.mkdir

    def mkdir_before_it_is_removed(path: Path | str, mode: int = 0o777) -> None:
        try:
            mkdir(path, mode)
        except FileExistsError:
            theirs.rmdir()
            raise

    monkeypatch.setattr(os, "mkdir", mkdir_before_it_is_removed)
    environment: dict[str, str] = {}
    settle_environment(ServerConfig.model_validate({"model_name": "m", "engine": "vllm", "device": "cpu"}), environment)
    folder = Path(environment["TMPDIR"])
    assert (folder.parent, folder.lstat().st_mode & 0o7777) == (shared, 0o700)


def test_vllm_keeps_a_temporary_folder_of_a_run(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (of_run := shared / "grpo-run-12345678").mkdir(mode=0o700)
    monkeypatch.setenv("TMPDIR", str(of_run))
    monkeypatch.setattr(tempfile, "tempdir", None)
    environment = dict(os.environ)
    settle_environment(ServerConfig.model_validate({"model_name": "m", "engine": "vllm", "device": "cpu"}), environment)
    assert environment["TMPDIR"] == str(of_run)
    assert list(of_run.iterdir()) == []


@pytest.mark.skipif(not importlib.util.find_spec("datasets"), reason="the `data` extra")
@pytest.mark.slow
def test_a_data_set_is_loaded_while_another_user_holds_a_lock_that_another_program_left_open_to_all(
    tmp_path: Path,
) -> None:
    records = tmp_path / "owner" / "name" / "train.jsonl"
    records.parent.mkdir(parents=True)
    records.write_text("".join(json.dumps({"question": str(number), "answer": "1"}) + "\n" for number in range(3)))
    cache = tmp_path / "hf" / "datasets"

    def loaded(umask: str, how: str, cwd: Path) -> str:
        environment = {**os.environ, "HF_HOME": str(cache.parent), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", LOAD, umask, how]
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.strip()

    assert loaded("022", "as any program", tmp_path) == "3"
    (cache / "name").rename(cache / "owner___name")  # as one from the hub is called
    (elsewhere := tmp_path / "elsewhere").mkdir()
    assert loaded("022", "as any program", elsewhere) == "3"
    (open_to_all,) = cache.glob("*owner___name*.lock")
    with open_to_all.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert loaded("077", "as we do", elsewhere) == "3"
    (ours,) = cache.glob("*owner___name*.lock")
    assert ours.stat().st_mode & 0o777 == 0o600


def test_a_lock_that_a_group_shares_or_no_one_else_can_open_stays(tmp_path: Path) -> None:
    modes = {"closed": 0o600, "shared": 0o664, "open": 0o644}
    for name, mode in modes.items():
        for lock in (tmp_path / f"{name}.lock", tmp_path / "owner___name" / "main" / f"{name}.lock"):
            lock.parent.mkdir(parents=True, exist_ok=True)
            lock.touch()
            lock.chmod(mode)
    _close_locks(tmp_path, "owner/name")
    assert {lock.name for lock in tmp_path.rglob("*.lock")} == {"closed.lock", "shared.lock"}
