"""Cases in which the reference trajectory API (`run-api` of atroposlib 0.4.0) loses groups, hangs, answers 500 or
reports no error; numbered 1 to 23 in the order of its code: trainer, memory, batches, posts, environments.

Black box tests over HTTP: with `TRAJECTORY_API=/path/to/run-api` in the environment they run against that program,
started for each case with only `--port`.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from rollout_fakes import ENVIRONMENT, REGISTRATION, group, served_api, tags
from serving import end_all, free_port

OTHER_PROGRAM = os.environ.get("TRAJECTORY_API")


Api = Callable[..., httpx.Client]


@pytest.fixture(scope="module")
def ours() -> Iterator[Callable[..., str]]:
    """URLs of our servers, one per set of settings."""
    urls: dict[tuple[tuple[str, Any], ...], str] = {}
    with contextlib.ExitStack() as stack:

        def url_of(**settings: Any) -> str:
            key = tuple(sorted(settings.items()))
            urls[key] = urls.get(key) or stack.enter_context(served_api(**settings))
            return urls[key]

        yield url_of


@pytest.fixture
def api(ours: Callable[..., str]) -> Iterator[Api]:
    """Makes clients of an empty API; another program ignores `settings`."""
    with contextlib.ExitStack() as stack:

        def client(**settings: Any) -> httpx.Client:
            url = stack.enter_context(_other_program()) if OTHER_PROGRAM else ours(**settings)
            server = stack.enter_context(httpx.Client(base_url=url, timeout=30, trust_env=False))
            bearer = {"Authorization": f"Bearer {settings.get('token')}"}
            assert server.get("/reset_data", params={"force": "true"}, headers=bearer).status_code == 200
            return server

        yield client


@pytest.fixture
def server(api: Api) -> httpx.Client:
    """A client of an API with a run that waits for batches of four."""
    server = api()
    start_run(server)
    return server


@contextlib.contextmanager
def _other_program() -> Iterator[str]:
    assert OTHER_PROGRAM
    port = free_port()
    process = subprocess.Popen(
        [OTHER_PROGRAM, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/info", trust_env=False).status_code == 200
        return False

    try:
        eventually(answers)
        yield url
    finally:
        end_all([process])


def eventually(is_true: Callable[[], bool], *, within_s: float = 60.0) -> None:
    """Poll until it is true."""
    deadline = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < deadline, f"not true within {within_s} s"
        time.sleep(0.02)  # the interval of a probe


def start_run(server: httpx.Client, **changes: Any) -> dict[str, Any]:
    """Register and ask for a batch: environments may register from then on."""
    answer = server.post("/register", json={**REGISTRATION, **changes})
    assert answer.status_code == 200
    batch_of(server)
    return dict(answer.json())


def join(server: httpx.Client, **changes: Any) -> int:
    """Register an environment."""
    return int(server.post("/register-env", json={**ENVIRONMENT, **changes}).json()["env_id"])


def post(server: httpx.Client, *groups: dict[str, Any]) -> list[dict[str, Any]]:
    """Post groups, which must be accepted."""
    answers = [server.post("/scored_data", json=each) for each in groups]
    assert [answer.status_code for answer in answers] == [200] * len(groups)
    return [answer.json() for answer in answers]


def batch_of(server: httpx.Client) -> list[int] | None:
    """The tags of the next batch, as a stock trainer asks for it."""
    answer = server.get("/batch")
    assert answer.status_code == 200
    assert answer.json().get("status") != "error", answer.json()
    batch = answer.json()["batch"]
    return None if batch is None else tags(batch)


def status_of(server: httpx.Client, env_id: int) -> dict[str, Any]:
    answer = server.request("GET", "/status-env", json={"env_id": env_id})
    assert answer.status_code == 200
    return dict(answer.json())


# --- trainer ---------------------------------------------------------------------------------------------------------


def test_groups_posted_before_a_registration_are_delivered(api: Api) -> None:
    """1. The stock API took their queue for a registration, and then always answered "Trainer not registered"."""
    server = api()
    assert post(server, group(4, tag=42)) == [{"status": "received"}]
    server.post("/register", json=REGISTRATION)
    assert batch_of(server) == [42]


def test_a_second_registration_takes_effect_and_keeps_queue_and_step_of_its_run(server: httpx.Client) -> None:
    """2. The stock API ignored a restarted trainer, also with another batch size, without an error."""
    post(server, *(group(2, tag=10 + tag) for tag in range(5)))
    assert batch_of(server) == [10, 11]
    assert batch_of(server) == [12, 13]
    answer = server.post("/register", json={**REGISTRATION, "batch_size": 2, "wandb_group": "again"}).json()
    assert "batch_size 4 → 2" in answer["changes"]
    assert server.get("/info").json()["batch_size"] == 2
    assert server.get("/wandb_info").json()["group"] == "again"
    assert server.get("/status").json()["current_step"] == 2
    # The second batch was never acknowledged, and no longer has the right size: its groups go back in order.
    assert [batch_of(server) for _ in range(3)] == [[12], [13], [14]]
    server.post("/register", json={**REGISTRATION, "starting_step": 20})
    assert server.get("/status").json()["current_step"] == 20


@pytest.mark.skipif(OTHER_PROGRAM is not None, reason="it has no option for a store")
def test_queue_buffer_leases_step_and_environments_survive_a_restart(tmp_path: Path) -> None:
    """3. The stock API kept everything in memory, and environments with an unknown id exit."""
    database = tmp_path / "rollouts.sqlite"
    with served_api(database) as url, httpx.Client(base_url=url, trust_env=False) as server:
        start_run(server)
        env_id = join(server, group_size=4)
        post(server, *(group(4, tag=tag, env_id=env_id) for tag in (10, 11, 12)), group(3, tag=13, env_id=env_id))
        lent = server.get("/batch", params={"ack": ""}).json()
        del lent["idle"]  # said once, when it was delivered first
    with served_api(database) as url, httpx.Client(base_url=url, trust_env=False) as server:
        assert server.get("/info").json() == {"batch_size": 4, "max_token_len": 64}
        status = status_of(server, env_id)
        assert (status["current_step"], status["self_queue_size"]) == (1, 2)
        assert tags([server.get("/latest_example").json()]) == [13]
        assert post(server, group(1, tag=14, env_id=env_id)) == [{"status": "buffered", "buffer_size": 0}]
        assert server.get("/batch", params={"ack": ""}).json() == lent
        assert tags(server.get("/batch", params={"ack": lent["lease"]}).json()["batch"]) == [11]
        assert join(server) == env_id + 1


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "batch_size", "expected"),
    [
        ([6, 4, 3], 10, [10, 11]),
        ([3, 5, 2, 6], 8, [10, 11]),
        ([4, 4, 2], 6, [10, 12]),
        ([8, 8, 4], 12, [10, 12]),
    ],
    ids=["sizes that do not divide the largest", "odd sizes", "in the order of arrival not hit", "one too large"],
)
def test_any_whole_groups_that_add_up_make_a_batch(
    sizes: list[int], batch_size: int, expected: list[int], api: Api
) -> None:
    """4. In the stock API only runs of equal packs of the largest group's size did; else no batch ever formed."""
    server = api()
    start_run(server, batch_size=batch_size)
    post(server, *(group(size, tag=10 + index) for index, size in enumerate(sizes)))
    assert batch_of(server) == expected


def test_a_batch_size_that_no_groups_can_make_is_reported_by_batch_and_status(api: Api) -> None:
    """4. The stock API did not report it."""
    server = api()
    start_run(server, batch_size=5)
    join(server, group_size=2)
    problem = "batch_size 5 can never be made of whole groups (sums_0 sends groups of 2): reachable sizes are 4 and 6"
    assert server.get("/batch").json() == {"batch": None, "message": problem}
    assert server.get("/status").json()["problem"] == problem


def test_a_killed_environment_with_a_share_blocks_no_batches(api: Api) -> None:
    """5. The stock API waited for its `min_batch_allocation` without end."""
    server = api(liveness_s=0.2)
    start_run(server)
    join(server, min_batch_allocation=0.5)
    survivor = join(server)
    post(server, *(group(2, tag=10 + tag, env_id=survivor) for tag in range(2)))
    batches: list[list[int]] = []

    def has_come() -> bool:
        batch = batch_of(server)
        batches.extend([batch] if batch else [])
        return bool(batches)

    eventually(has_come)
    assert batches == [[10, 11]]


def large(tag: int) -> dict[str, Any]:
    """A group of some megabytes: more than fits into the buffers between two processes."""
    return group(4, tag=tag, messages=[[{"role": "user", "content": "x" * 4_000_000}]] * 4)


@contextlib.contextmanager
def half_read_batch(server: httpx.Client) -> Iterator[None]:
    """Ask for a batch as a stock trainer does, and hang up after the first bytes of the answer."""
    with socket.socket() as trainer:
        trainer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        trainer.connect((server.base_url.host, server.base_url.port))
        agent = server.headers["user-agent"].encode()
        trainer.sendall(b"GET /batch HTTP/1.1\r\nHost: localhost\r\nUser-Agent: " + agent + b"\r\n\r\n")
        assert trainer.recv(100).startswith(b"HTTP/1.1 200 ")
        yield


@pytest.mark.parametrize("registers_again", [True, False])
def test_a_batch_whose_connection_was_cut_is_offered_again(server: httpx.Client, registers_again: bool) -> None:
    """6. The stock API deleted a batch on delivery. The stock trainer closes its connection after 10 s and repeats."""
    post(server, large(42))
    with half_read_batch(server):
        pass
    if registers_again:
        server.post("/register", json=REGISTRATION)
        assert batch_of(server) == [42]
    else:
        eventually(lambda: batch_of(server) == [42])
    assert server.get("/status").json()["current_step"] == 1


def test_batches_are_delivered_oldest_first(server: httpx.Client) -> None:
    """7. The stock API delivered the newest formed batch first, and the oldest became stale."""
    post(server, *(group(2, tag=10 + tag) for tag in range(6)))
    assert [batch_of(server) for _ in range(4)] == [[10, 11], [12, 13], [14, 15], None]


def test_the_step_counts_delivered_batches(server: httpx.Client) -> None:
    """8. The stock API counted formed batches, so environments saw it jump and exited early."""
    post(server, *(group(2) for _ in range(6)))
    steps = [server.get("/status").json()["current_step"]]
    for _ in range(4):
        batch_of(server)
        steps.append(server.get("/status").json()["current_step"])
    assert steps == [0, 1, 2, 3, 3]


@pytest.mark.parametrize("size", [2, 1])
def test_queue_sizes_count_all_queued_groups_of_all_environments(size: int, api: Api) -> None:
    """9. The stock API did not count groups in formed batches, nor groups of size 1 of other environments."""
    server = api()
    start_run(server)
    first, second = join(server, group_size=size), join(server, group_size=size)
    post(server, *(group(size, env_id=first) for _ in range(6)), *(group(size, env_id=second) for _ in range(5)))
    batch_of(server)
    num_left = 6 - 4 // size
    statuses = [status_of(server, env_id) for env_id in (first, second)]
    assert [(each["queue_size"], each["self_queue_size"]) for each in statuses] == [
        (num_left + 5, num_left),
        (num_left + 5, 5),
    ]


def test_posts_beyond_the_queue_limit_get_503_and_no_group_is_lost(api: Api) -> None:
    """10. The stock queue has no limit. (503 and not 429: stock environments drop a group on any 4xx.)"""
    server = api(max_queued_sequences=16, hold_s=0.0)
    start_run(server)
    answers = [server.post("/scored_data", json=group(4, tag=10 + tag)) for tag in range(8)]
    assert [answer.status_code for answer in answers] == [200] * 4 + [503] * 4
    assert "16 sequences wait" in answers[-1].json()["detail"]
    assert answers[-1].headers["retry-after"] == "5"
    assert [batch_of(server) for _ in range(5)] == [[10], [11], [12], [13], None]
    post(server, group(4, tag=14))
    assert batch_of(server) == [14]


# --- entry -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [group(2, masks=[[-100, -100, 7, 3], [-100, 7]]), group(2, scores=[1.0]), group(0)],
    ids=["masks", "scores", "empty"],
)
def test_a_group_whose_parts_do_not_fit_is_refused_with_the_reason(bad: dict[str, Any], server: httpx.Client) -> None:
    """11. The stock API delivered it, and the trainer crashed."""
    answer = server.post("/scored_data", json=bad)
    assert answer.status_code == 422
    assert answer.json()["detail"]
    post(server, group(4, tag=42))
    assert batch_of(server) == [42]


@pytest.mark.parametrize("field", ["scores", "inference_logprobs", "advantages"])
def test_a_number_outside_of_json_is_refused(field: str, server: httpx.Client) -> None:
    """12. The stock API accepted it, and then `/batch` answered 500 and the batch was lost."""
    good = json.dumps({**group(2), field: [0.75] * 2 if field == "scores" else [[0.75] * 4] * 2})
    for number in ("NaN", "Infinity", "-Infinity", "1e999"):
        headers = {"Content-Type": "application/json"}
        assert server.post("/scored_data", content=good.replace("0.75", number), headers=headers).status_code == 422
    post(server, group(4, tag=42))
    assert batch_of(server) == [42]


@pytest.mark.parametrize(
    ("sizes", "buffered", "batch_size", "expected"),
    [
        ([8], [None], 8, [10]),
        ([1, 3], [1, 0], 4, [10, 11]),
        ([3, 2, 1], [3, 5, 2], 4, [10, 12]),
        ([3] * 7, [3, 6, 9, 12, 15, 15, 15], 6, [10, 11]),
    ],
    ids=["larger than a group size", "two fill one", "some fill one", "none ever fill one"],
)
def test_groups_of_another_size_than_registered_are_delivered(
    sizes: list[int], buffered: list[int | None], batch_size: int, expected: list[int], api: Api
) -> None:
    """13. The stock API buffered larger and odd ones without end, and formed no batch of those that it joined."""
    server = api()
    start_run(server, batch_size=batch_size)
    env_id = join(server, group_size=4)
    answers = post(server, *(group(size, tag=10 + index, env_id=env_id) for index, size in enumerate(sizes)))
    assert [answer["status"] for answer in answers] == ["received" if held is None else "buffered" for held in buffered]
    assert [answer.get("buffer_size") for answer in answers] == buffered
    assert batch_of(server) == expected


# --- environments ----------------------------------------------------------------------------------------------------


def test_a_restarted_environment_gets_back_its_whole_weight(api: Api) -> None:
    """14. In the stock API each restart halved the weight, because earlier registrations kept theirs."""
    server = api(liveness_s=0.2)
    start_run(server)
    for _ in range(3):
        newest = join(server)
    eventually(lambda: status_of(server, newest)["env_weight"] == 1.0)


@pytest.mark.parametrize("env_id", [-1, 7, 2**40])
def test_an_unknown_environment_is_refused_and_disconnects_no_other(env_id: int, server: httpx.Client) -> None:
    """15. The stock API answered 500, and -1 disconnected the latest environment."""
    last = join(server)
    answer = server.request("GET", "/status-env", json={"env_id": env_id})
    assert 400 <= answer.status_code < 500
    assert "POST /register-env" in answer.text
    assert server.post("/disconnect-env", json={"env_id": env_id}).json()["status"] == "failure"
    assert status_of(server, last)["env_weight"] == 1.0
    join(server)
    assert status_of(server, last)["env_weight"] == 0.5


def test_a_status_request_before_any_registration_is_a_client_error(api: Api) -> None:
    """15. The stock API answered 500."""
    server = api()
    assert 400 <= server.request("GET", "/status-env", json={"env_id": 0}).status_code < 500
    start_run(server)
    assert 400 <= server.request("GET", "/status-env", json={"env_id": 0}).status_code < 500


def test_environments_of_weight_zero_or_less_share_equally(server: httpx.Client) -> None:
    """15. The stock API answered 500."""
    first, second = join(server, weight=0.0), join(server, weight=-1.0)
    assert [status_of(server, env_id)["env_weight"] for env_id in (first, second)] == [0.5, 0.5]


def test_after_a_reset_a_batch_request_is_not_a_server_error(api: Api) -> None:
    """16. The stock API answered 500 until a trainer registered."""
    server = api()
    server.post("/register", json=REGISTRATION)
    post(server, group(4))
    reset = server.get("/reset_data")
    assert (reset.status_code, reset.text) == (200, "Reset successful")
    assert reset.headers["content-type"].startswith("text/plain")
    assert server.get("/info").json() == {"batch_size": -1, "max_token_len": -1}
    assert server.get("/wandb_info").json() == {"group": None, "project": None}
    assert server.get("/latest_example").json()["tokens"] == []
    answer = server.get("/batch")
    assert (answer.status_code, answer.json()["batch"]) == (200, [])
    assert answer.json()["status"] == "error"
    start_run(server)
    assert join(server) == 0


def test_an_active_run_is_not_reset_without_force(server: httpx.Client) -> None:
    """16. The stock API did so without a check, and three tools of the library do it at their start."""
    post(server, group(4, tag=42))
    refusal = server.get("/reset_data")
    assert refusal.status_code == 409
    assert "step 0 of 30" in refusal.text
    assert batch_of(server) == [42]


def test_ten_thousand_groups_of_environments_with_shares_are_delivered_in_order(api: Api) -> None:
    """17. Each request to the stock API scanned all groups per environment: 4 s for 10,000, blocking all others.

    `benchmarks/rollouts.py` measures the time, and `test_rollouts_forming.py` covers the complexity. Here: they can be
    queued, are counted, and are delivered oldest first.
    """
    server = api(max_queued_sequences=10_000)
    start_run(server, batch_size=100)
    shared, other = join(server, group_size=1, min_batch_allocation=0.25), join(server, group_size=1)
    for first in range(0, 10_000, 500):
        groups = [group(1, tag=tag, env_id=(shared, other)[tag % 2]) for tag in range(first, first + 500)]
        assert server.post("/scored_data_list", json=groups).status_code == 200
    assert status_of(server, shared)["self_queue_size"] == 5_000
    assert [batch_of(server) for _ in range(3)] == [list(range(n, n + 100)) for n in (0, 100, 200)]


def test_groups_without_a_sender_are_used_beside_environments_with_shares(server: httpx.Client) -> None:
    """18. The stock API never used them."""
    env_id = join(server, min_batch_allocation=0.5)
    post(server, group(2, tag=10), group(2, tag=11, env_id=env_id))
    assert batch_of(server) == [10, 11]


# --- HTTP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "encoding", "status"),
    [
        (gzip.compress(json.dumps(group()).encode())[:-20], "gzip", 400),
        (b"no gzip at all", "gzip", 400),
        (gzip.compress(b" " * 2_000_000), "gzip", 413),
        (b" " * 2_000_000, "identity", 413),
        (b"{}", "br", 415),
    ],
    ids=["cut off", "not gzip", "bomb", "too long", "other encoding"],
)
def test_a_body_that_cannot_be_decompressed_gets_a_4xx(body: bytes, encoding: str, status: int, api: Api) -> None:
    """19. The stock API answered 500 to a truncated one, and decompressed bombs completely."""
    server = api(max_body_bytes=1_000_000)
    start_run(server)
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    answer = server.post("/scored_data", content=body, headers=headers)
    assert answer.status_code == status
    post(server, group(4, tag=42))
    assert batch_of(server) == [42]


@pytest.mark.parametrize("headers", [{"Origin": "https://elsewhere.example"}, {"Sec-Fetch-Site": "cross-site"}])
def test_requests_of_a_web_page_from_another_origin_are_refused(headers: dict[str, str], api: Api) -> None:
    """20. The stock API sends `Access-Control-Allow-Origin: *`, with credentials."""
    server = api()
    post(server, group(4))
    for method, path in (("GET", "/reset_data"), ("POST", "/scored_data"), ("GET", "/latest_example")):
        answer = server.request(method, path, headers=headers, json=group(4))
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
    assert server.get("/status").json()["queue_size"] == 1


def test_with_a_token_requests_without_it_are_refused(api: Api) -> None:
    """20. The stock API has no token."""
    server = api(token="secret")
    assert server.get("/info").status_code == 200  # everybody's probe for readiness
    for path in ("/batch", "/latest_example", "/wandb_info", "/reset_data", "/openapi.json", "/docs"):
        assert server.get(path).status_code == 401
        assert server.get(path, headers={"Authorization": "Bearer other"}).status_code == 401
    assert server.post("/scored_data", json=group(4)).status_code == 401
    bearer = {"Authorization": "Bearer secret"}
    assert server.post("/scored_data", json=group(4), headers=bearer).status_code == 200
    assert server.get("/status", headers=bearer).json()["queue_size"] == 1


@pytest.mark.slow
def test_by_default_it_listens_on_loopback_only(tmp_path: Path) -> None:
    """20. The stock API listens on 0.0.0.0."""
    port = str(free_port())
    ours = [sys.executable, "-m", "grpo_engine", "api"]
    command = [*([OTHER_PROGRAM] if OTHER_PROGRAM else ours), "--port", port]
    assert shutil.which(command[0])
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
    try:
        seen = psutil.Process(process.pid)

        def addresses() -> set[str]:
            return {c.laddr.ip for c in seen.net_connections("tcp") if c.status == psutil.CONN_LISTEN}

        eventually(lambda: bool(addresses()))
        assert addresses() == {"127.0.0.1"}
    finally:
        end_all([process])


def test_the_uuid_of_a_run_is_exact_in_double_precision(api: Api) -> None:
    """21. The stock number has 128 bits."""
    server = api()
    for _ in range(4):
        assert 0 <= server.post("/register", json=REGISTRATION).json()["uuid"] < 2**53


def test_metrics_count_groups_batches_and_refusals(server: httpx.Client) -> None:
    """22. The stock API has no metrics, and no log."""
    env_id = join(server, desired_name="counted")
    before = counts_of(server)
    post(server, group(2, env_id=env_id), group(2), group(2))
    server.post("/scored_data", json={})
    batch_of(server)
    after = counts_of(server)
    assert after['grpo_api_sequences_total{environment="counted_0"}'] == 2
    assert after["grpo_api_queued_groups"] == 1
    for name, risen in {
        'grpo_api_groups_total{environment="none"}': 2,
        'grpo_api_refused_total{reason="malformed"}': 1,
        "grpo_api_batches_total": 1,
    }.items():
        assert after[name] - before.get(name, 0) == risen


def counts_of(server: httpx.Client) -> dict[str, float]:
    """What `/metrics` says, by name and label, in the text format of Prometheus."""
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
    assert lines
    assert all(re.fullmatch(r'\w+(\{\w+="[^"]*"\})? \S+', line) for line in lines)
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_asking_for_the_status_changes_nothing(api: Api) -> None:
    """23. The stock API replaced the registered group size by the largest seen, and then buffered complete groups."""
    server = api()
    start_run(server, batch_size=12)
    env_id = join(server, group_size=4)
    post(server, group(8, tag=10, env_id=env_id))
    assert status_of(server, env_id)["max_group_size"] == 8
    assert post(server, group(4, tag=11, env_id=env_id)) == [{"status": "received"}]
    assert batch_of(server) == [10, 11]
