"""Full disks and removed files: posts get 503, no accepted group is lost, and when there is room again the rollout API
continues without a restart.

With a file size limit, set and lifted from outside while the process runs, and with a real file system of a few
megabytes in its own mount namespace. A post that was answered 503 is not in the file, and is never delivered.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollout_fakes import ENVIRONMENT, REGISTRATION, group, tags
from rollout_processes import ApiProcess, api_process

pytestmark = pytest.mark.slow

NO_LIMIT = resource.RLIM_INFINITY


def limit_files(api: ApiProcess, num_bytes: int) -> None:
    """Limit the size of the process's files, which acts like a full disk."""
    resource.prlimit(api.process.pid, resource.RLIMIT_FSIZE, (num_bytes, NO_LIMIT))


def heavy(tag: int, **more: Any) -> dict[str, Any]:
    """A group of a hundred kilobytes."""
    return group(4, tag=tag, generation_params={"text": "x" * 100_000}, **more)


def posts_until_refused(http: httpx.Client, first_tag: int) -> tuple[list[int], httpx.Response]:
    """Post until the disk is full: the tags that were accepted, and the answer that was not 200."""
    accepted: list[int] = []
    for tag in range(first_tag, first_tag + 500):
        answer = http.post("/scored_data", json=heavy(tag))
        if answer.status_code != 200:
            return accepted, answer
        accepted.append(tag)
    raise AssertionError("the disk was never full")


def all_batches(http: httpx.Client) -> list[int]:
    """Tags of all batches, each acknowledged by the next request."""
    delivered: list[int] = []
    lease = ""
    while True:
        answer = http.get("/batch", params={"ack": lease})
        assert answer.status_code == 200, answer.text
        if answer.json()["batch"] is None:
            return delivered
        lease = answer.json()["lease"]
        delivered += tags(answer.json()["batch"])


def assert_refused_because_the_disk_is_full(answer: httpx.Response) -> None:
    assert answer.status_code == 503
    assert "disk" in answer.json()["detail"]
    assert "retry-after" in answer.headers


def test_on_a_full_disk_posts_get_503_and_accepted_groups_are_delivered(tmp_path: Path) -> None:
    with api_process(tmp_path) as api, api.client() as http:
        http.post("/register", json=REGISTRATION)
        http.get("/batch")
        limit_files(api, 2 * 1024**2)
        accepted, refusal = posts_until_refused(http, 10)
        assert len(accepted) > 5
        assert_refused_because_the_disk_is_full(refusal)
        refused = 10 + len(accepted)
        for tag in range(refused + 1, refused + 4):
            assert http.post("/scored_data", json=heavy(tag)).status_code == 503
        # Requests that write nothing are answered.
        assert http.get("/info").json()["batch_size"] == 4
        assert http.get("/status").json()["queue_size"] == len(accepted)
        assert http.get("/metrics").status_code == 200
        # A lease is written too.
        assert http.get("/batch", params={"ack": ""}).status_code in (200, 503)
        limit_files(api, NO_LIMIT)
        assert http.post("/scored_data", json=heavy(1000)).status_code == 200
        assert all_batches(http) == [*accepted, 1000]


def test_a_kill_on_a_full_disk_loses_no_accepted_group(tmp_path: Path) -> None:
    with api_process(tmp_path) as api, api.client() as http:
        http.post("/register", json=REGISTRATION)
        limit_files(api, 2 * 1024**2)
        accepted, _ = posts_until_refused(http, 10)
        api.restart()
        assert all_batches(http) == accepted


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/register", {**REGISTRATION, "batch_size": 8}),
        ("POST", "/register", {**REGISTRATION, "checkpoint_dir": "elsewhere"}),
        ("POST", "/register-env", ENVIRONMENT),
        ("POST", "/disconnect-env", {"env_id": 0}),
        ("POST", "/scored_data_list", [heavy(1), heavy(2)]),
        ("POST", "/evaluations", {"id": "a", "step": 1, "policy_version": 1, "num_prompts": 1, "num_samples": 1}),
        ("GET", "/batch?ack=", None),
        ("GET", "/reset_data?force=true", None),
    ],
)
def test_a_post_refused_by_a_full_disk_changes_nothing(
    full: tuple[ApiProcess, httpx.Client], method: str, path: str, body: Any
) -> None:
    api, http = full
    before = http.get("/status").json()
    limit_files(api, 1)
    answer = http.request(method, path, json=body)
    assert_refused_because_the_disk_is_full(answer)
    assert http.get("/status").json() == before
    assert http.get("/info").json()["batch_size"] == 4
    limit_files(api, NO_LIMIT)
    assert http.get("/status").json() == before


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An API with a run, an environment and two groups, whose disk tests fill."""
    with api_process(tmp_path_factory.mktemp("full"), "--liveness-s", "600") as api, api.client() as http:
        http.post("/register", json=REGISTRATION)
        http.get("/batch")
        http.post("/register-env", json=ENVIRONMENT)
        accepted = [10, 11]
        for tag in accepted:
            http.post("/scored_data", json=heavy(tag))
        yield api, http
        assert all_batches(http) == accepted


def test_a_batch_whose_lease_could_not_be_written_is_offered_again_to_a_stock_trainer(tmp_path: Path) -> None:
    with api_process(tmp_path) as api, api.client() as http:
        http.post("/register", json=REGISTRATION)
        for tag in range(10, 13):
            http.post("/scored_data", json=heavy(tag))
        assert tags(http.get("/batch").json()["batch"]) == [10]
        limit_files(api, 1)
        for _ in range(3):
            assert http.get("/batch").status_code == 503
        limit_files(api, NO_LIMIT)
        # Its acknowledgement was not written, so the first batch may be offered again.
        delivered: list[int] = []
        while (batch := http.get("/batch").json()["batch"]) is not None:
            delivered += tags(batch)
        assert delivered in ([11, 12], [10, 11, 12])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[httpx.Client, Path]]:
    """An API whose store is on a disk of 16 MB, ten of which a file takes up that tests remove."""
    disk = tmp_path / "disk"
    disk.mkdir()
    namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=16m tmpfs {disk}"
    if shutil.which("unshare") is None or subprocess.run([*namespace, mount], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    wrapper = [*namespace, f'{mount} && exec "$0" "$@"']
    with api_process(tmp_path, store=disk / "rollouts.sqlite", wrapper=wrapper) as api, api.client() as http:
        ballast = Path(f"/proc/{api.process.pid}/root{disk}/ballast")
        ballast.write_bytes(b"x" * 10 * 1024**2)
        http.post("/register", json=REGISTRATION)
        yield http, ballast


@pytest.mark.extended("test_on_a_full_disk_posts_get_503_and_accepted_groups_are_delivered, with a file size limit")
def test_posts_are_accepted_again_once_the_disk_has_room(small_disk: tuple[httpx.Client, Path]) -> None:
    http, ballast = small_disk
    accepted, refusal = posts_until_refused(http, 10)
    assert_refused_because_the_disk_is_full(refusal)
    ballast.unlink()
    assert http.post("/scored_data", json=heavy(1000)).status_code == 200
    assert http.get("/status").json()["queue_size"] == len(accepted) + 1
    assert tags(http.get("/batch").json()["batch"]) == accepted[:1]


@pytest.mark.parametrize("is_folder", [False, True], ids=["file", "folder"])
def test_a_removed_store_is_reported_and_works_again_when_restored(tmp_path: Path, is_folder: bool) -> None:
    store, aside = tmp_path / "folder" / "rollouts.sqlite", tmp_path / "aside"
    with api_process(tmp_path, store=store) as api, api.client() as http:
        http.post("/register", json=REGISTRATION)
        http.post("/scored_data", json=group(4, tag=10))
        removed = store.parent if is_folder else store
        removed.rename(aside)
        for answer in (http.post("/scored_data", json=group(4, tag=11)), http.get("/health")):
            assert answer.status_code == 503
            assert str(store) in answer.json()["detail"]
        assert http.get("/status").status_code == 200
        aside.rename(removed)
        assert http.get("/health").status_code == 200
        assert http.post("/scored_data", json=group(4, tag=12)).status_code == 200
        assert all_batches(http) == [10, 12]


def test_a_read_only_store_is_used_or_refused_with_the_reason(tmp_path: Path) -> None:
    with api_process(tmp_path) as api, api.client() as http:
        http.post("/register", json=REGISTRATION)
        http.post("/scored_data", json=group(4, tag=10))
        # An open file stays writable; the next start is what meets it (and root may write anyway).
        api.store.chmod(0o400)
        assert http.post("/scored_data", json=group(4, tag=11)).status_code == 200
        api.kill()
        if os.geteuid() != 0:
            api.start()
            assert api.process.wait(60) == 2
            assert f"--store {api.store}" in api.said()
        api.store.chmod(0o600)
        api.start()
        api.wait_until_ready()
        assert all_batches(http) == [10, 11]
