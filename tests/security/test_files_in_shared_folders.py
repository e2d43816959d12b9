"""Files of ours in a folder that others may write to: nothing that they lay there is written into."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest
from stage import Stage

from grpo_engine.bridges.memory.turn_lock import TurnLock
from grpo_engine.errors import BridgeError, CheckpointError, ConfigError, GrpoError
from grpo_engine.export.main import _new_folder
from grpo_engine.own_file import foreign_owner, open_own_file
from grpo_engine.rollouts.storage.store import Store
from grpo_engine.serving.reporting import send_to_supervisor
from grpo_engine.train.checkpointing import checkpoints
from grpo_engine.train.checkpointing.checkpoints import locked
from grpo_engine.wire.codec import write_atomically, write_json_atomically
from grpo_engine.wire.run_folder import ADDRESS_FILE, CHECKPOINT_MARKER, checkpoint_steps
from grpo_engine.wire.supervisor import Address, ServiceReport
from grpo_tui.client import launch
from grpo_tui.client.local import runs
from grpo_tui.paths import ForeignFolder, require_own
from grpo_tui.supervisor.keeper import proc


@pytest.mark.parametrize("laid", ["a link", "a hard link", "an open file"])
def test_a_secret_is_not_written_into_what_others_laid_beside_its_file(laid: str, tmp_path: Path) -> None:
    theirs, beside = tmp_path / "theirs", tmp_path / f".token.yaml.{os.getpid()}.tmp"
    theirs.write_text("before")
    match laid:
        case "a link":
            beside.symlink_to(theirs)
        case "a hard link":
            beside.hardlink_to(theirs)
        case _:
            beside.write_text("theirs")
            beside.chmod(0o666)
    reader = os.open(beside, os.O_RDONLY)
    write_atomically(tmp_path / "token.yaml", b"token: SECRET", mode=0o600)
    assert (tmp_path / "token.yaml").read_bytes() == b"token: SECRET"
    assert stat.S_IMODE((tmp_path / "token.yaml").stat().st_mode) == 0o600
    assert theirs.read_text() == "before"
    assert b"SECRET" not in os.read(reader, 100)
    os.close(reader)
    assert not beside.exists()


def test_the_log_of_an_inference_server_goes_through_no_link(tmp_path: Path) -> None:
    """As `grpo-engine launch --log-dir` opens it, and `--redirect-output`."""
    victim = tmp_path / "victim"
    victim.touch(mode=0o600)
    (tmp_path / "vllm.log").symlink_to(victim)
    with pytest.raises(ConfigError, match="the log: cannot be opened: it is a link"):
        open_own_file(tmp_path / "vllm.log", "the log")
    victim.chmod(0o644)
    with pytest.raises(ConfigError, match="has mode 0644"):
        open_own_file(victim, "the log")
    descriptor = open_own_file(tmp_path / "logs" / "vllm.log", "the log")
    assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o600
    os.close(descriptor)


@pytest.mark.parametrize("laid", ["a link", "a hard link", "a pipe"])
def test_the_lock_of_checkpoints_writes_into_nothing_that_others_laid_in_its_place(laid: str, tmp_path: Path) -> None:
    victim, lock = tmp_path / "victim", tmp_path / ".checkpoints.lock"
    victim.write_text("precious")
    match laid:
        case "a link":
            lock.symlink_to(victim)
        case "a hard link":
            lock.hardlink_to(victim)
        case _:
            os.mkfifo(lock)
    with pytest.raises(CheckpointError, match="keeps a second trainer out"), locked(tmp_path / "checkpoints"):
        pass
    assert victim.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
@pytest.mark.parametrize("theirs", ["checkpoints", "checkpoints/step_9", "checkpoints/journal", "store"])
def test_training_goes_on_from_nothing_that_another_user_made_first(theirs: str, tmp_path: Path) -> None:
    """Before, it resumed from their checkpoint, where `save_path` did not exist yet in a folder like `/scratch`."""
    path = tmp_path / theirs
    path.parent.mkdir(exist_ok=True)
    path.parent.chmod(0o1777)
    opened = {"checkpoints": checkpoints.require_folder, "store": Store}.get(theirs, checkpoints.require_own)
    path.touch() if theirs == "store" else path.mkdir()
    opened(path)
    os.chown(path, 65534, 65534)
    with pytest.raises((CheckpointError, ConfigError), match=f"{theirs}: .*belongs to user 65534"):
        opened(path)
    path.parent.chmod(0o755)  # as of a folder that a container is given
    assert foreign_owner(path) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
@pytest.mark.parametrize("laid", ["a folder", "a link"])
def test_training_goes_on_from_nothing_below_what_another_user_made_first(laid: str, tmp_path: Path) -> None:
    (shared := tmp_path / "scratch").mkdir()
    shared.chmod(0o1777)
    (tmp_path / "own").mkdir()
    if laid == "a link":
        (shared / "theirs").symlink_to(tmp_path / "own")
    else:
        (shared / "theirs").mkdir()
    os.chown(shared / "theirs", 65534, 65534, follow_symlinks=False)
    with pytest.raises(CheckpointError, match=r"scratch/theirs belongs to user 65534"):
        checkpoints.require_folder(shared / "theirs" / "checkpoints")


def test_a_folder_whose_marker_cannot_be_looked_at_is_no_checkpoint(tmp_path: Path) -> None:
    """Before, `step_9` of another user, with mode 0700, ended the trainer with a traceback."""
    (tmp_path / "step_9").mkdir()
    (tmp_path / "step_9" / CHECKPOINT_MARKER).symlink_to("x" * 300)  # an error of `stat` for root, too
    assert checkpoint_steps(tmp_path) == []


@pytest.mark.parametrize("laid", ["a link", "a hard link", "a pipe", "a file"])
def test_no_step_waits_for_a_lock_of_turns_that_others_laid_in_its_place(laid: str, tmp_path: Path) -> None:
    victim, lock = tmp_path / "victim", tmp_path / "turn.lock"
    victim.touch()
    match laid:
        case "a link":
            lock.symlink_to(victim)
        case "a hard link":
            lock.hardlink_to(victim)
        case "a pipe":
            os.mkfifo(lock)
        case _ if os.geteuid() == 0:
            lock.touch()
            os.chown(lock, 65534, 65534)
        case _:
            pytest.skip("only root can make a file of another user")
    with pytest.raises(BridgeError, match=r"turn\.lock: (cannot be opened|no file of this user alone)"):
        TurnLock(tmp_path).take(is_stopping=lambda: True, when_held=lambda: None)


def test_a_lock_of_checkpoints_that_others_could_open_is_closed_to_them(tmp_path: Path) -> None:
    """As versions before made it, with the umask of the shell."""
    lock = tmp_path / ".checkpoints.lock"
    lock.write_text("4711 and more text")
    lock.chmod(0o666)
    with locked(tmp_path / "checkpoints"):
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600
        assert lock.read_text() == str(os.getpid())


@pytest.mark.parametrize("name", ["plan.json", "settings.json", "profile.toml", "chosen.json"])
def test_a_folder_is_only_read_where_others_may_write_to_a_file_that_says_what_it_runs(
    name: str, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / name).write_text("{}")
    (tmp_path / "a.log").touch()
    (tmp_path / "a.log").chmod(0o666)
    (tmp_path / name).chmod(0o644)
    require_own(tmp_path)
    (tmp_path / name).chmod(0o664)
    with pytest.raises(ForeignFolder, match=f"{name} belongs to another user, or others may write to it"):
        require_own(tmp_path)


def test_folders_that_others_put_beside_the_runs_cost_no_look_at_all_processes_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, 3000 folders with a plan of two bytes held `ps` and `up` for 55 s."""
    for number in range(20):
        (tmp_path / f"theirs-{number}").mkdir()
        (tmp_path / f"theirs-{number}" / "plan.json").write_text("{}")
    looks: list[int] = []
    living = proc.living
    monkeypatch.setattr(proc, "living", lambda: [looks.append(1), *living()][1:])
    found = runs(tmp_path)
    assert (len(found), any(run.is_live for run in found), len(looks)) == (20, False, 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
@pytest.mark.parametrize("taken", [".", "keepers"])
def test_no_service_is_started_in_a_folder_that_another_user_put_in_the_place_of_the_run(
    taken: str, tmp_path: Path
) -> None:
    """Who may write to the folder of runs can rename that of a run; the keeper then ran the command of his choice."""
    stage = Stage(folder=tmp_path / "run", run="replaced", token="none")
    spec = stage.folder / "keepers" / "a.1.spec.json"
    spec.parent.mkdir(mode=0o700, parents=True)
    spec.touch()
    spec.chmod(0o666)
    stage.folder.chmod(0o700)
    os.chown(stage.folder / taken, 65534, 65534)
    with pytest.raises(GrpoError, match="is another user's now"):
        asyncio.run(stage.start("true", "--api-token", "SECRET"))
    assert spec.read_text() == ""


@pytest.mark.parametrize("umask", [0o000, 0o002])
def test_other_users_may_not_rename_runs_in_a_folder_that_a_start_made(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        with launch.starting(tmp_path / "logs"):
            assert stat.S_IMODE((tmp_path / "logs").stat().st_mode) == 0o755
    finally:
        os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can listen as another user")
def test_a_service_reports_nothing_to_another_user_in_place_of_its_supervisor(tmp_path: Path) -> None:
    path = tmp_path / "s"
    write_json_atomically(tmp_path / ADDRESS_FILE, Address(pid=1, socket=str(path)))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        os.seteuid(65534)
        listener.listen()
        os.seteuid(0)
        with pytest.raises(PermissionError, match="user 65534 listens in place of the supervisor"):
            send_to_supervisor(tmp_path, ServiceReport(service="a", attempt=1))
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(1) == b""


def test_an_export_writes_into_no_folder_that_others_put_in_the_place_of_its_own(tmp_path: Path) -> None:
    shared, victim = tmp_path / "shared", tmp_path / "victim"
    shared.mkdir()
    shared.chmod(0o2775)  # a group's, without a sticky bit
    victim.write_text("precious")
    partial = shared / ".out.partial"

    def export() -> None:
        with _new_folder(shared / "out") as own:
            assert not partial.stat().st_mode & 0o077
            partial.rename(shared / "theirs")
            partial.mkdir()
            (partial / "README.md").symlink_to(victim)
            (own / "README.md").write_text("# A model")
            assert (shared / "theirs" / "README.md").read_text() == "# A model"

    with pytest.raises(CheckpointError, match="another user put something in its place"):
        export()
    assert victim.read_text() == "precious"
    assert not (shared / "out").exists()


def test_an_export_empties_no_folder_of_ours_that_others_called_one_of_a_killed_export(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / ".out.partial").mkdir(parents=True)
    (shared / ".out.partial" / "thesis.tex").write_text("precious")  # renamed by another user
    shared.chmod(0o775)
    with pytest.raises(ConfigError, match="look at them, and remove it"), _new_folder(shared / "out"):
        pass
    assert (shared / ".out.partial" / "thesis.tex").read_text() == "precious"


def test_an_exported_folder_has_the_permissions_of_the_umask_once_it_is_whole(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with _new_folder(tmp_path / "out") as own:
            assert stat.S_IMODE(own.stat().st_mode) == 0o700
            (own / "file").touch()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
