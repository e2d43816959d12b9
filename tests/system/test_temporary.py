"""Temporary files of services are removed with their run, however they and the supervisor ended."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from workplace import OF_HOST, Workplace, service, until

from grpo_tui.paths import MAX_SOCKET_PATH_BYTES
from grpo_tui.supervisor import temporary

LEAVES_A_SOCKET = """
import os, signal, socket, tempfile
path = tempfile.mkdtemp() + "/s"
socket.socket(socket.AF_UNIX).bind(path)
print("left", path, flush=True)
signal.pause()
"""
LEAVES_MEMORY = """
import os, pathlib, signal
memory = pathlib.Path(f"/dev/shm/torch_{os.getpid()}_2613122617_0")
memory.touch()
print("left", memory, flush=True)
signal.pause()
"""
PRINTS_TMPDIR = "import os, signal; print('left', os.environ['TMPDIR'], flush=True); signal.pause()"
PRINTS_TMPDIR_AGAIN = """
import os, signal
received, write_end = os.pipe()
signal.signal(signal.SIGHUP, lambda *_: os.write(write_end, b"x"))
print("left", os.environ["TMPDIR"], flush=True)
while os.read(received, 1):
    print("left", os.environ["TMPDIR"], flush=True)
"""
READY = "{ log = '^left ', interval_s = 0.02 }"
SOCKET_OF_VLLM = "v-12345678/123e4567-e89b-12d3-a456-426614174000"
RUN = "tiny-cpu-1122-130216-c584"


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The temporary folder of this process; caches are below `tmp_path`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.delenv(temporary.COMPILED_CODE, raising=False)
    with tempfile.TemporaryDirectory(prefix="g") as name:
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


def left(place: Workplace, name: str) -> list[Path]:
    """The paths that a service printed."""
    return [Path(line.split()[1]) for line in place.log(name).splitlines() if line.startswith("left ")]


@pytest.mark.slow
def test_temporary_files_are_removed_with_the_run_after_services_and_supervisor_were_killed(place: Workplace) -> None:
    place.up(
        service("server", LEAVES_A_SOCKET, ready=READY, restart="'on-failure'", backoff_s=0.05),
        service("other", LEAVES_A_SOCKET, ready=READY),
    )
    os.kill(place.pid("server"), signal.SIGKILL)
    until(lambda: len(left(place, "server")) == 2)
    place.kill_supervisor()
    place.succeed("restart", "other", "--wait")
    sockets = left(place, "server") + left(place, "other")
    (folder,) = place.temporary.glob("grpo-*-*")
    assert [path.parents[1] for path in sockets] == [folder] * 4  # also after the supervisor was replaced
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.is_socket() for path in sockets)
    assert f"removed files that its services left in {folder}" in place.succeed("down")
    assert set(os.listdir(place.temporary)) <= OF_HOST


@pytest.mark.slow
def test_memory_named_by_a_process_is_removed_after_everything_was_killed_at_once(place: Workplace) -> None:
    """`down` then knew no process of the run, so 400 MB of each server with vLLM stayed in /dev/shm."""
    run = place.up(service("a", LEAVES_MEMORY, ready=READY))
    memory = left(place, "a")[0]
    recorded = place.run_folder() / "state.json"
    until(lambda: f"[{place.pid()}," in recorded.read_text().replace(" ", "").replace("\n", ""))
    everything = [place.supervisor(), *place.survivors()]
    for process in everything:
        with suppress(ProcessLookupError):  # a keeper exits with its service
            os.kill(process.pid, signal.SIGKILL)
    until(lambda: not place.survivors() and not place.supervisors())
    assert memory.exists()
    assert f"removed from shared memory: {memory}" in place.succeed("down", run)
    assert not memory.exists()


@pytest.mark.slow
def test_a_temporary_folder_that_the_profile_names_is_used_and_kept(place: Workplace) -> None:
    own = place.folder / "own"
    own.mkdir()
    place.up(service("a", LEAVES_A_SOCKET, ready=READY, env=f'{{ TMPDIR = "{own}" }}'))
    place.succeed("down")
    (socket,) = left(place, "a")
    assert socket.parents[1] == own
    assert socket.is_socket()


@pytest.mark.slow
def test_a_temporary_folder_that_was_removed_is_made_again_for_the_next_start(place: Workplace) -> None:
    place.up(service("a", PRINTS_TMPDIR, ready=READY))
    (folder,) = left(place, "a")
    temporary.remove_folders(place.run_folder().name, folder)
    assert place.grpo("restart", "a", "--wait").returncode == 0
    assert left(place, "a") == [folder, folder]
    assert folder.is_dir()

    temporary.remove_folders(place.run_folder().name, folder)
    folder.symlink_to(place.folder)  # as another user may, who can then read and write what services put there
    assert place.grpo("restart", "a", "--wait").returncode != 0
    assert "is not a folder of this user now" in str(place.service("a").why)
    assert len(left(place, "a")) == 2
    folder.unlink()


@pytest.mark.slow
def test_no_service_is_restarted_in_place_where_another_user_took_its_temporary_folder(place: Workplace) -> None:
    """A launcher of ranks made the file by which they meet there, and the other user put a link to any file of ours."""
    in_place = "{ signal = 'SIGHUP', log = '^left ' }"
    place.up(service("a", PRINTS_TMPDIR_AGAIN, ready=READY, restart_in_place=in_place))
    (folder,) = left(place, "a")
    temporary.remove_folders(place.run_folder().name, folder)
    assert place.grpo("restart", "a", "--wait").returncode == 0
    assert left(place, "a") == [folder, folder]
    assert folder.is_dir()

    temporary.remove_folders(place.run_folder().name, folder)
    folder.symlink_to(place.folder)
    assert place.grpo("restart", "a", "--wait").returncode != 0
    assert "is not a folder of this user now" in str(place.service("a").why)
    assert len(left(place, "a")) == 2
    folder.unlink()


@pytest.mark.parametrize(
    "run", [RUN, "odd[1]*-1122-130216-c584", f"{'a-profile-with-a-long-name' * 4}-1122-130216-c584"]
)
def test_sockets_of_vllm_fit_below_the_folder_of_any_run(outside: Path, run: str) -> None:
    folder = temporary.make_folder(run)
    assert folder.parent == outside
    assert len(os.fsencode(folder / SOCKET_OF_VLLM)) <= MAX_SOCKET_PATH_BYTES
    assert temporary.remove_folders(run, None) == ([], [])
    assert os.listdir(outside) == []


def test_below_a_temporary_folder_too_deep_for_sockets_the_folder_is_in_tmp(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = outside / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
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


def test_the_folder_of_a_run_whose_longer_name_begins_with_this_one_is_left_alone(outside: Path) -> None:
    longer = temporary.make_folder("zz-1123-041503-7f3a")
    (longer / "used").touch()
    assert temporary.remove_folders("zz", None) == ([], [])
    assert list(outside.iterdir()) == [longer]


def test_of_files_with_the_name_of_a_runs_folder_nothing_is_asked(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user made a million of them: to ask each for its owner held the end of a run for two minutes."""
    folder = temporary.make_folder(RUN)
    for number in range(3):
        (outside / f"grpo-{RUN}-0000000{number}").touch()
    asked = []
    monkeypatch.setattr(temporary, "_is_ours", lambda path: asked.append(path) or True)
    assert temporary.remove_folders(RUN, None)[1] == []
    assert {path for path in asked if path.parent == outside and path.name.startswith("grpo-")} == {folder}
    assert len(os.listdir(outside)) == 3


def test_a_path_that_cannot_be_removed_is_named(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_folder_for_compiled_code_that_the_user_sets_is_kept(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(temporary.COMPILED_CODE, "/elsewhere")
    assert temporary.variables(outside) == {"TMPDIR": str(outside)}


@pytest.mark.parametrize("change", ["made", "removed"])
def test_the_folder_is_removed_while_a_process_that_ends_still_changes_it(
    change: str, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed, with a line that asked for its removal by hand."""
    folder = temporary.make_folder(RUN)
    (folder / "kept").touch()
    (folder / "sockets").mkdir()
    rmdir = os.rmdir
    num_calls = 0

    def rmdir_after_a_change(path: str, **at: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1 and change == "made":
            (folder / "late").touch()
        elif num_calls == 1:
            rmdir(folder / "sockets")
        rmdir(path, **at)

    monkeypatch.setattr(os, "rmdir", rmdir_after_a_change)
    assert temporary.remove_folders(RUN, folder) == ([str(folder)], [])
    assert os.listdir(outside) == []
