"""The rollout API as a process: kills, signals, and exclusive use of its store and port."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from forked import Forked
from rollout_fakes import ENVIRONMENT, REGISTRATION, group, tags
from rollout_processes import ApiProcess
from serving import python_path

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
        with api.client(timeout=10) as client:
            yield api.process, client
    finally:
        api.kill()


def test_a_killed_api_comes_back_with_queue_step_and_environment_ids(tmp_path: Path) -> None:
    database = tmp_path / "rollouts.sqlite"
    with api_process(database) as (process, api):
        api.post("/register", json=REGISTRATION)
        api.get("/batch")
        env_id = api.post("/register-env", json={**ENVIRONMENT, "group_size": 4}).json()["env_id"]
        for tag in (10, 11, 12):
            api.post("/scored_data", json=group(4, tag=tag, env_id=env_id))
        assert tags(api.get("/batch").json()["batch"]) == [10]
        process.send_signal(signal.SIGKILL)
        process.wait()
    with api_process(database) as (_, api):
        status = api.request("GET", "/status-env", json={"env_id": env_id}).json()
        assert (status["current_step"], status["self_queue_size"]) == (1, 2)
        # The kill may have come before the first batch was known to have arrived: then it comes again.
        offered = [tags(api.get("/batch").json()["batch"]) for _ in range(2)]
        assert offered in ([[11], [12]], [[10], [11]])


def test_a_post_whose_answer_was_lost_in_a_kill_counts_once(tmp_path: Path) -> None:
    database, name = tmp_path / "rollouts.sqlite", {"Idempotency-Key": "somebody:1"}
    with api_process(database) as (process, api):
        api.post("/scored_data", json=group(4), headers=name)
        api.post("/scored_data_list", json=[group(4), group(4)], headers={"Idempotency-Key": "another:7"})
        process.kill()
        process.wait()
    with api_process(database) as (_, api):
        assert api.post("/scored_data", json=group(4), headers=name).json() == {"status": "received"}
        again = api.post("/scored_data_list", json=[group(4), group(4)], headers={"Idempotency-Key": "another:7"})
        assert again.json() == {"status": "received", "groups_processed": 2}
        assert api.get("/status").json()["queue_size"] == 3
        api.post("/scored_data", json=group(4), headers={"Idempotency-Key": "somebody:2"})
        api.post("/scored_data", json=group(4))  # as stock environments do
        assert api.get("/status").json()["queue_size"] == 5


def test_fresh_forgets_what_the_database_holds(tmp_path: Path) -> None:
    database = tmp_path / "rollouts.sqlite"
    with api_process(database) as (_, api):
        api.post("/scored_data", json=group(4))
    with api_process(database, "--fresh") as (_, api):
        assert api.get("/status").json()["queue_size"] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_exit_code_0_although_a_post_waits(tmp_path: Path, number: signal.Signals) -> None:
    with api_process(tmp_path / "db.sqlite", "--max-queued-sequences", "1", "--hold-s", "60", is_forked=False) as (
        process,
        api,
    ):
        api.post("/scored_data", json=group(4))
        held = socket.create_connection((api.base_url.host, api.base_url.port))
        body = httpx.Request("POST", "http://api/scored_data", json=group(4)).content
        held.sendall(b"POST /scored_data HTTP/1.1\r\nHost: api\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        while "grpo_api_held 1" not in api.get("/metrics").text:
            assert process.poll() is None
        process.send_signal(number)
        assert process.wait(10) == 0
        answer = held.recv(4096)
        held.close()
        assert b" 503 " in answer.splitlines()[0]


def test_a_client_that_hangs_up_loses_no_batch(tmp_path: Path) -> None:
    with api_process(tmp_path / "db.sqlite") as (_, api):
        api.post("/register", json=REGISTRATION)
        with socket.create_connection((api.base_url.host, api.base_url.port)) as gone:
            gone.sendall(b"GET /batch?wait_s=5 HTTP/1.1\r\nHost: api\r\nUser-Agent: other\r\n\r\n")
            # It is being waited for once the run has started, which lets environments in.
            while api.post("/register-env", json=ENVIRONMENT).json()["status"] != "success":
                continue
        api.post("/scored_data", json=group(4, tag=42))
        assert tags(api.get("/batch", params={"wait_s": 10}).json()["batch"]) == [42]


def test_without_store_each_start_creates_and_logs_a_new_one(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": python_path()}
    for name in ("rollouts.sqlite", "rollouts-2.sqlite"):
        command = [sys.executable, "-m", "grpo_engine", "api", "--port", "0"]
        with subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            try:
                assert f'"store": "{tmp_path / name}"' in process.stderr.readline()
            finally:
                process.kill()
        assert (tmp_path / name).exists()


def test_a_token_comes_from_a_file_and_none_is_no_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a secret\n")
    with api_process(tmp_path / "store.sqlite", "--token-file", str(token)) as (_, api):
        assert api.get("/status").status_code == 401
        assert api.get("/status", headers={"Authorization": "Bearer a secret"}).status_code == 200
    token.write_text("\n")
    command = [sys.executable, "-m", "grpo_engine", "api", "--port", "0", "--token-file", str(token)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert f"--token-file {token}: the first line is empty" in refused.stderr


def test_a_taken_port_and_a_locked_store_are_reported(tmp_path: Path) -> None:
    database = tmp_path / "db.sqlite"
    with api_process(database) as (_, api):
        command = [sys.executable, "-m", "grpo_engine", "api"]
        port = str(api.base_url.port)
        taken = subprocess.run([*command, "--port", port], capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert taken.returncode == 2
        assert f"--port {port}: cannot listen: Address already in use" in taken.stderr
        used = subprocess.run(
            [*command, "--port", "0", "--database", str(database)], capture_output=True, text=True, timeout=60
        )
        assert used.returncode == 2
        assert "another rollout API uses it" in used.stderr


def test_a_file_of_another_program_is_not_changed(tmp_path: Path) -> None:
    database = tmp_path / "notes.sqlite"
    database.write_text("not a database, and longer than a header of sixteen bytes")
    command = [sys.executable, "-m", "grpo_engine", "api", "--port", "0", "--database", str(database)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert "file is not a database" in refused.stderr
    assert database.read_text().startswith("not a database")


def startup_error(database: Path) -> str:
    """The error of an API that exits at once with code 2."""
    argv = [sys.executable, "-m", "grpo_engine", "api", "--port", "0", "--database", str(database)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    return ended.stderr


def test_a_damaged_database_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.sqlite"
    Store(path).close()
    database = sqlite3.connect(path)
    database.execute("INSERT INTO environments VALUES (0, '{}')")
    database.commit()
    database.close()
    said = startup_error(path)
    assert said.startswith(f"grpo-engine api: --store {path}: damaged: ")
    assert "--fresh" in said


def test_a_database_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "Not a directory: name another file" in startup_error(tmp_path / "file" / "deep" / "rollouts.sqlite")
