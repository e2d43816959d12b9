"""What services leave in the temporary folder goes with their run, however they and the supervisor ended."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from workplace import Workplace, open_workplace, service, until

from grpo_tui.paths import MAX_SOCKET_PATH_BYTES
from grpo_tui.supervisor import temporary

LEAVES_A_SOCKET = """
import os, signal, socket, tempfile
path = tempfile.mkdtemp() + "/s"
socket.socket(socket.AF_UNIX).bind(path)
print("left", path, flush=True)
signal.pause()
"""
SAYS_WHERE = "import os, signal; print('left', os.environ['TMPDIR'], flush=True); signal.pause()"
READY = "{ log = '^left ', interval_s = 0.02 }"
SOCKET_OF_VLLM = "v-12345678/123e4567-e89b-12d3-a456-426614174000"
RUN = "tiny-cpu-1122-130216-c584"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    with open_workplace(tmp_path) as workplace:
        yield workplace


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """What is temporary for us, and a home."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.delenv(temporary.COMPILED_CODE, raising=False)
    with tempfile.TemporaryDirectory(prefix="g") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def left(place: Workplace, name: str) -> list[Path]:
    """The sockets that a service says it has left."""
    log = (place.run_folder() / f"{name}.log").read_text()
    return [Path(line.split()[1]) for line in log.splitlines() if line.startswith("left ")]


@pytest.mark.slow
def test_what_services_leave_goes_with_the_run_though_they_and_the_supervisor_were_killed(place: Workplace) -> None:
    place.profile(
        service("server", LEAVES_A_SOCKET, ready=READY, restart="'on-failure'", backoff_s=0.05),
        service("other", LEAVES_A_SOCKET, ready=READY),
    )
    place.up()
    os.kill(place.pid("server"), signal.SIGKILL)
    until(lambda: len(left(place, "server")) == 2)
    place.lose_daemon()
    assert place.grpo("restart", "other", "--wait").returncode == 0
    sockets = left(place, "server") + left(place, "other")
    (folder,) = place.temporary.glob("grpo-*-*")
    assert [path.parents[1] for path in sockets] == [folder] * 4  # also of the supervisor that took over
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.is_socket() for path in sockets)
    done = place.grpo("down")
    assert done.returncode == 0, done.stderr
    assert f"removed files that its services left in {folder}" in done.stdout
    assert os.listdir(place.temporary) == []


@pytest.mark.slow
def test_a_temporary_folder_that_the_profile_names_is_used_and_left(place: Workplace) -> None:
    own = place.folder / "own"
    own.mkdir()
    place.profile(service("a", LEAVES_A_SOCKET, ready=READY, env=f'{{ TMPDIR = "{own}" }}'))
    place.up()
    assert place.grpo("down").returncode == 0
    (socket,) = left(place, "a")
    assert socket.parents[1] == own
    assert socket.is_socket()


@pytest.mark.slow
def test_a_temporary_folder_that_a_cleaner_removed_is_there_again_for_the_next_start(place: Workplace) -> None:
    place.profile(service("a", SAYS_WHERE, ready=READY))
    place.up()
    (folder,) = left(place, "a")
    temporary.remove_folders(place.run_folder().name, folder)
    assert place.grpo("restart", "a", "--wait").returncode == 0
    assert left(place, "a") == [folder, folder]
    assert folder.is_dir()
    assert place.grpo("down").returncode == 0


@pytest.mark.parametrize(
    "run", [RUN, "odd[1]*-1122-130216-c584", f"{'a-profile-with-a-long-name' * 4}-1122-130216-c584"]
)
def test_sockets_of_vllm_fit_below_the_folder_of_any_run(outside: Path, run: str) -> None:
    folder = temporary.make_folder(run)
    assert folder.parent == outside
    assert len(os.fsencode(folder / SOCKET_OF_VLLM)) <= MAX_SOCKET_PATH_BYTES
    assert temporary.remove_folders(run, None) == ([], [])
    assert os.listdir(outside) == []


def test_where_what_is_temporary_lies_too_deep_for_sockets_the_folder_lies_in_tmp(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = outside / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = temporary.make_folder(RUN)
    assert (folder.parent, folder.stat().st_mode & 0o777) == (Path("/tmp"), 0o700)
    (folder / "left").touch()
    assert temporary.remove_folders(RUN, None) == ([str(folder)], [])


def test_only_the_folders_of_this_run_are_removed(outside: Path) -> None:
    ours, others = temporary.make_folder(RUN), temporary.make_folder("other-run")
    (ours / "left").touch()
    (ours / "out").symlink_to(others)
    assert temporary.remove_folders(RUN, ours) == ([str(ours)], [])
    assert list(outside.iterdir()) == [others]


def test_what_cannot_be_removed_is_named(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = temporary.make_folder(RUN)

    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", f"{path}/by-root")

    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", refuse)
        assert temporary.remove_folders(RUN, folder) == ([], [f"{folder}/by-root: Operation not permitted"])


def test_compiled_code_and_vocabularies_are_kept_from_run_to_run(outside: Path, tmp_path: Path) -> None:
    of_torch = temporary.OF_TORCH.format(user=temporary._user())
    compiled = tmp_path / "caches" / "grpo-engine" / "inductor"
    for run in ("first", "second"):
        folder = temporary.make_folder(run)
        assert temporary.variables(folder) == {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(compiled)}
        (folder / "data-gym-cache").mkdir(exist_ok=True)
        (folder / "data-gym-cache" / run).touch()
        (folder / of_torch / run).touch()
        assert temporary.remove_folders(run, folder) == ([], [])
    assert sorted(os.listdir(compiled)) == ["first", "second"]
    assert sorted(os.listdir(outside / "data-gym-cache")) == ["first", "second"]
    assert os.listdir(outside) == ["data-gym-cache"]


def test_where_compiled_code_is_kept_by_hand_it_stays(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(temporary.COMPILED_CODE, "/elsewhere")
    assert temporary.variables(outside) == {"TMPDIR": str(outside)}
