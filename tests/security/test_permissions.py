"""What other users may do with the files of a run: nothing, whatever the umask of whoever starts it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from workplace import IDLE, open_workplace, service

from grpo_engine.errors import GrpoError
from grpo_tui import paths
from grpo_tui.client import launch

WRITES = "import os; open(os.environ['GRPO_TUI_RUN_FOLDER'] + '/written', 'w')\n" + IDLE


def open_to_others(folder: Path) -> list[str]:
    found = []
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # the run replaces files meanwhile
            mode = path.lstat().st_mode
            if stat.S_IMODE(mode) & 0o077 and not stat.S_ISLNK(mode):
                found.append(str(path.relative_to(folder.parent)))
    return found


@pytest.mark.slow
def test_nothing_of_a_run_is_open_to_others_even_without_a_umask(tmp_path: Path) -> None:
    with open_workplace(tmp_path) as place:
        place.profile(service("a", WRITES, ready='{ log = "up" }'), '[[hooks]]\non = ["ready"]\nargv = ["true"]\n')
        before = os.umask(0)
        try:
            with place.start("up", "--profile", "p", "--detach", "--wait", "ready") as up:
                up.communicate(timeout=60)
        finally:
            os.umask(before)
        folder = place.run_folder()
        assert (folder / "written").exists()
        assert (folder / "keepers" / "a.1.spec.json").exists()
        assert open_to_others(folder) == []
        assert stat.S_IMODE((folder.parent / ".start.lock").stat().st_mode) == 0o600
        assert place.grpo("down").returncode == 0
        assert open_to_others(folder) == []


def test_a_start_does_not_wait_for_ever_for_a_lock_and_names_who_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ".start.lock"
    path.touch(mode=0o644)
    holds = (
        "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
    )
    holder = subprocess.Popen([sys.executable, "-c", holds, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        monkeypatch.setattr(launch, "START_WITHIN_S", 0.0)
        with (
            pytest.raises(GrpoError, match=rf"locked .* by pid {holder.pid} \(user \w+\): .*fcntl"),
            launch.starting(tmp_path),
        ):
            pass
    finally:
        holder.communicate(b"\n")
    with launch.starting(tmp_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with path.open() as again, pytest.raises(BlockingIOError):
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_lock_file_of_another_user_is_replaced_or_refused_with_its_owner(tmp_path: Path) -> None:
    path = tmp_path / ".start.lock"
    path.touch()
    path.chmod(0o666)
    os.chown(path, 65534, 65534)
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with launch.starting(tmp_path):
            assert (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (0, 0o600)
    path.chmod(0o666)
    tmp_path.chmod(0o1777)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.chdir(tmp_path)  # the folders above are root's
        os.setuid(65534)
        try:
            with launch.starting(Path()):
                os._exit(1)
        except GrpoError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    assert os.waitpid(child, 0)[1] == 0
    with open(read) as pipe:
        assert f"{path} belongs to user root" in pipe.read()


def test_the_folder_of_the_socket_is_ours_also_where_the_path_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, short = tmp_path / ("r" * 90), tmp_path / "s"
    runtime.mkdir()
    short.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(paths, "ALWAYS_SHORT", short)
    path = paths.socket_path(tmp_path)
    assert (path.parent, stat.S_IMODE(path.parent.stat().st_mode)) == (short / f"grpo-{os.getuid()}", 0o700)
    path.parent.chmod(0o777)
    with pytest.raises(GrpoError, match="has mode 0777"):
        paths.socket_path(tmp_path)
    path.parent.rmdir()
    (short / "elsewhere").mkdir(mode=0o700)
    path.parent.symlink_to(short / "elsewhere")
    with pytest.raises(GrpoError, match="it must be yours"):
        paths.socket_path(tmp_path)


def test_a_folder_for_sockets_that_another_user_made_is_named_with_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = os.getuid() + 54321
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(paths.os, "getuid", lambda: other)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    (tmp_path / f"grpo-{other}").mkdir(mode=0o700)
    with pytest.raises(GrpoError, match=r"belongs to user .*who made it before you could: set XDG_RUNTIME_DIR to"):
        paths.host_folder()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(paths.os, "getuid", lambda: tmp_path.stat().st_uid)
    (tmp_path / f"grpo-{tmp_path.stat().st_uid}").touch()
    assert paths.host_folder() == paths.runtime_folder() == tmp_path / "grpo-tui"


def test_a_full_disk_leads_to_no_other_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands ended with a traceback where all were full, and saw none of the runs where only this one was."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        folder = paths.host_folder()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert folder.parent == tmp_path
