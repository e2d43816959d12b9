"""What the run folder holds about a service: attempts, probe answers, and what a start waits for."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from screen_fakes import NOW, changed, run_status, service
from usual_plan import four_launches

from grpo_engine.wire.codec import to_line
from grpo_engine.wire.supervisor import RunState, Snapshot
from grpo_tui.services.base import RestartPolicy
from grpo_tui.ui.pages import service_page
from grpo_tui.view import service_details
from grpo_tui.view.service_details import Attempt, ProbeAnswer, ServiceHistory, read_history
from grpo_tui.view.starting import awaited_services
from grpo_tui.view.state import LaunchesRead, ViewState, reduce


def test_attempts_have_their_exit_codes_and_equal_answers_in_a_row_are_one(tmp_path: Path) -> None:
    events = [
        changed(1, 10.0, service("vllm", state="starting", attempt=1, started_at=10.0, health="closed")),
        changed(2, 11.0, service("vllm", state="starting", attempt=1, started_at=10.0, health="closed")),
        changed(3, 12.0, service("env", state="starting", attempt=1, started_at=12.0, health="of another")),
        changed(4, 20.0, service("vllm", state="failed", attempt=1, exit_code=-9, why="killed\nlast lines")),
        changed(5, 30.0, service("vllm", state="starting", attempt=2, started_at=30.0, exit_code=-9, health="200")),
    ]
    (tmp_path / "events.jsonl").write_bytes(b"".join(map(to_line, events)) + b'{"type":"service"')
    history = read_history(tmp_path, "vllm")
    assert history.attempts == (
        Attempt(number=1, started_at=10.0, ended_at=20.0, exit_code=-9, why="killed"),
        Attempt(number=2, started_at=30.0),
    )
    assert history.answers[0] == ProbeAnswer(time=10.0, words="closed")
    assert history.answers[-1] == ProbeAnswer(time=30.0, words="200")
    assert read_history(tmp_path, "vllm", until=15.0).attempts == (Attempt(number=1, started_at=10.0),)


def test_an_attempt_that_prepares_before_its_turn_has_not_ended(tmp_path: Path) -> None:
    """Its number is known a moment before its process is, while the service still waits."""
    numbered = service("vllm", state="waiting", attempt=1, pid=None, started_at=None, health=None)
    preparing = service("vllm", state="waiting", attempt=1, pid=7, started_at=10.5, health=None)
    ended = service("vllm", state="finished", attempt=1, pid=None, started_at=10.5, exit_code=0, why="exit code 0")
    events = [changed(1, 10.0, numbered), changed(2, 11.0, preparing), changed(3, 40.0, ended)]
    (tmp_path / "events.jsonl").write_bytes(b"".join(map(to_line, events)))
    assert read_history(tmp_path, "vllm", until=10.0).attempts == ()
    assert read_history(tmp_path, "vllm", until=11.0).attempts == (Attempt(number=1, started_at=10.5),)
    [attempt] = read_history(tmp_path, "vllm").attempts
    assert (attempt.started_at, attempt.ended_at, attempt.exit_code) == (10.5, 40.0, 0)


def test_attempts_of_a_resumed_run_follow_those_of_its_earlier_life(tmp_path: Path) -> None:
    waiting = service("vllm", state="waiting", attempt=0, pid=None, started_at=None, health=None)
    events = [
        changed(1, 10.0, service("vllm", state="ready", attempt=1, started_at=10.0)),
        changed(2, 20.0, service("vllm", state="failed", attempt=1, exit_code=1, why="failed")),
        Snapshot(number=0, time=50.0, status=run_status(services=[waiting])),
        changed(1, 51.0, service("vllm", state="ready", attempt=1, started_at=51.0)),
    ]
    (tmp_path / "events.jsonl").write_bytes(b"".join(map(to_line, events)))
    attempts = read_history(tmp_path, "vllm").attempts
    assert [(each.number, each.started_at, each.ended_at) for each in attempts] == [(1, 10.0, 20.0), (1, 51.0, None)]


def test_no_line_of_a_timeline_is_read_beyond_the_limit_of_a_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = to_line(changed(1, 10.0, service("vllm", state="starting", attempt=1, started_at=10.0)))
    (tmp_path / "events.jsonl").write_bytes(line)
    monkeypatch.setattr(service_details, "MAX_BYTES", len(line) - 2)
    assert read_history(tmp_path, "vllm").attempts == ()


def test_a_run_without_a_timeline_has_no_history(tmp_path: Path) -> None:
    assert read_history(tmp_path, "vllm").attempts == ()


def test_what_most_services_wait_for_stands_first_and_only_while_the_run_starts() -> None:
    late = {"state": "waiting", "pid": None, "started_at": None}
    services = [
        service("env", state="starting", started_at=NOW - 3),
        service("api"),
        service("vllm", state="starting", started_at=NOW - 9),
        service("trainer", **late),
    ]
    status = run_status(state=RunState.STARTING, services=services)
    launches = {launch.name: launch for launch in four_launches()}
    del launches["env"]
    state = ViewState(run_folder=Path("logs/x"), now=NOW)
    state = reduce(reduce(state, Snapshot(number=0, status=status)), LaunchesRead(launches=launches))
    assert [
        (each.service.name, each.waited_s, [one.name for one in each.waiting]) for each in awaited_services(state)
    ] == [
        ("env", 3.0, ["trainer"]),
        ("vllm", 9.0, ["trainer"]),
    ]
    assert state.status is not None
    up = replace(state, status=state.status.model_copy(update={"state": RunState.RUNNING}))
    assert awaited_services(up) == ()


@pytest.mark.parametrize(("num_folders", "indent"), [(11, 10), (14, 2)], ids=["with room", "with less"])
def test_a_value_that_does_not_fit_beside_its_flag_stands_below_it_as_a_shell_reads_it(
    num_folders: int, indent: int
) -> None:
    (plan,) = (each for each in four_launches() if each.name == "vllm")
    path = f"/{'long/' * num_folders}cfg"
    plan = replace(plan, argv=("engine", "train", "--steps", "7", "--config-path", path, "--lr", "1e-5"))
    state = ViewState(run_folder=Path("logs/x"), now=NOW)
    page = service_page(service("vllm"), plan, ServiceHistory(), state, 80).plain
    command = page.partition("command\n")[2].partition("\n\n")[0]
    assert max(map(len, command.splitlines())) <= 80
    assert f"        --config-path \\\n{' ' * indent}{path} \\\n        --lr 1e-5" in command
    assert shlex.split(command.replace("\\\n", " ")) == list(plan.argv)


@pytest.mark.parametrize(
    ("restart", "words"),
    [
        (RestartPolicy.NEVER, "restart     never\n"),
        (RestartPolicy.ALWAYS, "restart     always, at most 5 times in 10m00s\n"),
    ],
)
def test_the_page_of_a_service_that_has_ended_has_no_load_and_its_limit_of_restarts_only_where_one_counts(
    restart: RestartPolicy, words: str
) -> None:
    (plan,) = (each for each in four_launches() if each.name == "vllm")
    plan = replace(plan, restart=restart, max_restarts=5, restart_window_s=600)
    state = ViewState(run_folder=Path("logs/x"), now=NOW)
    ended = service("vllm", state="finished", pid=None, exit_code=0)
    page = service_page(ended, plan, ServiceHistory(), state, 80).plain
    assert words in page
    assert "uses" not in page
    assert (
        "uses        CPU 3% of one core, memory 180M\n"
        in service_page(service("vllm"), plan, ServiceHistory(), state, 80).plain
    )
