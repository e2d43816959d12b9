"""vLLM does not remove the sockets of its processes: they are in a folder that is removed after the server."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from serving import python_path

from grpo_engine.errors import GrpoError
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.vllm.patches import unlink_group_memory
from grpo_engine.server.vllm.sockets import FOLDER_VARIABLE, socket_folder
from grpo_engine.wire.environment_variables import RUN_VARIABLE
from grpo_engine.wire.supervisor import MAX_TEMPORARY_FOLDER_BYTES

SOCKET = "123e4567-e89b-12d3-a456-426614174000"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="g", dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def bind(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / SOCKET))


def config(engine: str = "vllm") -> ServerConfig:
    return ServerConfig.model_validate({"model_name": "m", "engine": engine})


def test_a_server_has_a_folder_for_its_sockets_which_is_removed_after_it(
    short: Path,
) -> None:
    environment: dict[str, str] = {}
    with socket_folder(config(), environment):
        folder = Path(environment[FOLDER_VARIABLE])
        assert (folder.parent, folder.stat().st_mode & 0o777) == (short, 0o700)
        bind(folder)
    assert os.listdir(short) == []
    assert environment == {}


def test_the_next_server_removes_the_folder_of_a_killed_one_and_nothing_else(short: Path) -> None:
    (left, others, another) = (short / f"v-{name * 8}" for name in "abc")
    for folder in (left, others):
        folder.mkdir()
        bind(folder)
    (others / "notes").touch()
    another.touch()
    first: dict[str, str] = {}
    second: dict[str, str] = {}
    with socket_folder(config(), first):
        bind(Path(first[FOLDER_VARIABLE]))
        with socket_folder(config(), second):
            assert (Path(first[FOLDER_VARIABLE]) / SOCKET).is_socket()
            assert first != second
    assert sorted(short.iterdir()) == [others, another]


def test_paths_of_sockets_are_short_enough_in_a_deep_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    environment: dict[str, str] = {}
    with socket_folder(config(), environment):
        assert len(os.fsencode(Path(environment[FOLDER_VARIABLE]) / SOCKET)) <= 107


@pytest.mark.parametrize("num_bytes_too_many", [0, 1])
def test_the_longest_temporary_folder_that_a_run_may_have_is_just_short_enough_for_sockets(
    short: Path, monkeypatch: pytest.MonkeyPatch, num_bytes_too_many: int
) -> None:
    room = MAX_TEMPORARY_FOLDER_BYTES + num_bytes_too_many - len(os.fsencode(short)) - 1
    longest = short / ("d" * room)
    longest.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(longest))
    environment: dict[str, str] = {}
    with socket_folder(config(), environment):
        bind(Path(environment[FOLDER_VARIABLE]))
        assert Path(environment[FOLDER_VARIABLE]).parent == (Path("/tmp") if num_bytes_too_many else longest)


@pytest.mark.parametrize(("engine", "environment"), [("vllm", {FOLDER_VARIABLE: "/of/mine"}), ("torch", {})])
def test_a_folder_set_by_the_user_is_kept_and_a_server_without_sockets_has_none(
    engine: str, environment: dict[str, str]
) -> None:
    before = dict(environment)
    with socket_folder(config(engine), environment):
        assert environment == before
    assert environment == before


def test_a_temporary_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    with (
        pytest.raises(GrpoError, match="cannot create a folder for vLLM's sockets"),
        socket_folder(config(), {}),
    ):
        pass


USES_SHARED_MEMORY = """
import json, multiprocessing, os, sys
from multiprocessing.shared_memory import SharedMemory

from grpo_engine.server.vllm.patches import name_shared_memory

def names(queue, num_below):
    memory = SharedMemory(create=True, size=16)
    queue.put([memory.name, os.getpid(), multiprocessing.Lock()._semlock.name])
    if num_below:
        spawn(queue, num_below - 1)
    memory.close()
    memory.unlink()

def spawn(queue, num_below):
    below = multiprocessing.Process(target=names, args=(queue, num_below))
    below.start()
    below.join()

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    name_shared_memory()
    queue = multiprocessing.SimpleQueue()
    names(queue, 2)
    print(json.dumps([queue.get() for _ in range(3)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "stem", "semaphores"), [(None, "", "/mp-"), ("tiny-1", "grpo-tiny-1-", "/grpo-tiny-1-")]
)
def test_shared_memory_of_vllm_is_named_by_its_run_and_process(
    run: str | None, stem: str, semaphores: str, tmp_path: Path
) -> None:
    """Queues of 250 MB stayed in /dev/shm: after kill -9 of a server their names did not say whose they were, and
    after that of everything only the name of the run is known. The server, its engine core and a worker."""
    program = tmp_path / "program.py"
    program.write_text(USES_SHARED_MEMORY)
    environment = {name: value for name, value in os.environ.items() if name != RUN_VARIABLE}
    environment |= {"PYTHONPATH": python_path(), **({} if run is None else {RUN_VARIABLE: run})}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for memory, pid, semaphore in json.loads(done.stdout):
        assert memory.startswith(f"{stem}psm_{pid}_")
        assert semaphore.startswith(semaphores)


def test_the_memory_of_a_process_group_of_vllm_has_the_name_of_its_run_until_all_ranks_have_mapped_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two files of 4 MB stayed in /dev/shm after each server of two processes; `test_vllm_tensor_parallel.py` has the
    real class."""
    seen = []

    class Group:
        group_name = f"{secrets.token_hex(8)}-tp:0-[0-1]-cpushm"
        communicator = SimpleNamespace(world_size=2)

        def _init_cpu_shm(self) -> int:
            for rank in range(2):
                file = Path(f"/dev/shm/{self.group_name}_{rank}")
                file.touch()
                seen.append(file)
            return 7

    name = "vllm.distributed.device_communicators.cpu_communicator"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(_CPUSHMDistributed=Group))
    monkeypatch.setenv(RUN_VARIABLE, "tiny-1")
    unlink_group_memory()
    try:
        assert Group()._init_cpu_shm() == 7
        assert [file.name for file in seen] == [f"grpo-tiny-1-{Group.group_name}_{rank}" for rank in range(2)]
        assert not any(file.exists() for file in seen)
    finally:
        for file in seen:
            file.unlink(missing_ok=True)
