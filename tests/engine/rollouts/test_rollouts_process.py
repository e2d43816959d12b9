"""The rollout API as a process: signals, settings of its command line, and starts that are refused."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from forked import Forked
from rollout_fakes import group
from rollout_processes import ApiProcess

from grpo_engine.rollouts.storage.store import Store

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def api_process(
    database: Path, *flags: str, is_forked: bool = True
) -> Iterator[tuple[subprocess.Popen[bytes] | Forked, httpx.Client]]:
    """An API on a free port; killed at the end if it still runs."""
    api = ApiProcess(database.parent, *flags, store=database, is_forked=is_forked)
    try:
        api.wait_until_ready()
        with api.client() as client:
            yield api.process, client
    finally:
        api.kill()


def test_fresh_deletes_what_the_store_holds(tmp_path: Path) -> None:
    database = tmp_path / "rollouts.sqlite"
    with api_process(database) as (_, api):
        api.post("/scored_data", json=group(4))
    with api_process(database, "--fresh") as (_, api):
        assert api.get("/status").json()["queue_size"] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_exit_code_0_while_a_post_is_held(tmp_path: Path, number: signal.Signals) -> None:
    with api_process(tmp_path / "db.sqlite", "--max-queued-sequences", "1", "--hold-s", "60", is_forked=False) as (
        process,
        api,
    ):
        api.post("/scored_data", json=group(4))
        held = socket.create_connection((api.base_url.host, api.base_url.port))
        body = httpx.Request("POST", "http://api/scored_data", json=group(4)).content
        held.sendall(b"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        while "grpo_api_held 1" not in api.get("/metrics").text:
            assert process.poll() is None
        process.send_signal(number)
        assert process.wait(30) == 0
        answer = held.recv(4096)
        held.close()
        assert b" 503 " in answer.splitlines()[0]


def test_without_store_each_start_creates_and_logs_a_new_one(tmp_path: Path) -> None:
    log = tmp_path / "api.log"
    for name in ("rollouts.sqlite", "rollouts-2.sqlite"):
        process = Forked("api", "--port", "0", log=log, folder=tmp_path, environment=os.environ)
        try:
            while f'"store": "{tmp_path / name}"' not in log.read_text():
                assert process.poll() is None, log.read_text()
        finally:
            process.kill()
            process.wait()
        assert (tmp_path / name).exists()


def test_a_token_comes_from_a_file(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a secret\n")
    with api_process(tmp_path / "store.sqlite", "--token-file", str(token)) as (_, api):
        assert api.get("/wandb_info").status_code == 401
        assert api.get("/wandb_info", headers={"Authorization": "Bearer a secret"}).status_code == 200


def startup_error(folder: Path, *flags: str) -> str:
    """The output of an API that exits at once with code 2."""
    log = folder / "refused.log"
    process = Forked("api", "--port", "0", *flags, log=log, folder=folder, environment=os.environ)
    assert process.wait(60) == 2
    return log.read_text()


def test_a_taken_port_and_a_locked_store_are_reported(tmp_path: Path) -> None:
    database = tmp_path / "db.sqlite"
    with api_process(database) as (_, api):
        port = str(api.base_url.port)
        assert f"--port {port}: cannot listen: Address already in use" in startup_error(tmp_path, "--port", port)
        assert "another rollout API uses it" in startup_error(tmp_path, "--database", str(database))


def test_a_damaged_store_is_reported_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.sqlite"
    Store(path).close()
    database = sqlite3.connect(path)
    database.execute("INSERT INTO environments VALUES (0, '{}')")
    database.commit()
    database.close()
    error = startup_error(tmp_path, "--store", str(path))
    assert error.startswith(f"grpo-engine api: --store {path}: damaged: ")
    assert "--fresh" in error


@pytest.mark.parametrize(
    ("flag", "file", "reason"),
    [
        ("--token-file", "empty", "the first line is empty"),
        ("--store", "notes", "file is not a database"),
        ("--store", "notes/deep/rollouts.sqlite", "Not a directory: name another file"),
        *(("--store", path, "") for path in ("/dev/full", "/dev/null", "/proc/rollouts.sqlite", "/")),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_and_not_changed(
    tmp_path: Path, flag: str, file: str, reason: str
) -> None:
    texts = {"empty": "\n", "notes": "not a database, and longer than a header of sixteen bytes"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    error = startup_error(tmp_path, flag, str(tmp_path / file))
    assert f"{flag} {tmp_path / file}: " in error
    assert reason in error
    assert "Traceback" not in error
    assert {name: (tmp_path / name).read_text() for name in texts} == texts
