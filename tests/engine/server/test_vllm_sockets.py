"""vLLM does not remove the sockets of its processes: they are in a folder that is removed after the server."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from grpo_engine.errors import GrpoError
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.vllm.patches import name_shared_memory
from grpo_engine.server.vllm.sockets import FOLDER_VARIABLE, socket_folder
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


def test_shared_memory_of_vllm_is_named_by_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queues of 250 MB stayed in /dev/shm after kill -9: their names did not say whose they were."""
    monkeypatch.setattr(shared_memory, "_make_filename", shared_memory._make_filename)  # type: ignore[attr-defined]
    name_shared_memory()
    memory = shared_memory.SharedMemory(create=True, size=16)
    try:
        assert memory.name.startswith(f"psm_{os.getpid()}_")
    finally:
        memory.close()
        memory.unlink()
