"""Files of a run folder with values that no program writes: damaged, and no reader ends or signals by them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from screen_fakes import FakeConnection, run_status

from grpo_engine.errors import PeerError, PeerUnavailable
from grpo_engine.wire.codec import MAX_LINE_BYTES, to_line
from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.run_folder import METRICS_FILE, STATE_FILE
from grpo_engine.wire.supervisor import MAX_SERVICES, Hello, RunStatus, Snapshot
from grpo_tui.client.socket import Daemon
from grpo_tui.run_files.metrics import all_steps
from grpo_tui.supervisor.keeper.client import KeeperState
from grpo_tui.supervisor.lock import has_daemon, take_lock, write_address
from grpo_tui.supervisor.state_file import ServiceLedger, read_state
from grpo_tui.ui import messages
from grpo_tui.ui.news import RunNews
from grpo_tui.view.csv_text import csv_rows
from grpo_tui.view.diagnosis import diagnose
from grpo_tui.view.gpus import reader
from grpo_tui.view.gpus.reader import read_samples
from grpo_tui.view.rollouts.reader import RolloutReader
from grpo_tui.view.rollouts.state import GroupFilter
from grpo_tui.view.run_settings import settings_of
from grpo_tui.view.state import ViewState
from grpo_tui.view.timeline import file
from grpo_tui.view.timeline.file import TimelineFile

COMPLETION: dict[str, Any] = {
    "text": "a word", "reward": 0.5, "advantage": 0.0, "token_ids": [1], "inference_logprobs": [0.0],
    "training_logprobs": [], "policy_versions": [3],
}  # fmt: skip
GROUP: dict[str, Any] = {
    "time": 1.7e9,
    "step": 3,
    "environment": None,
    "prompt": "say a word",
    "completions": [COMPLETION],
}
HUGE = 10**400


@pytest.mark.parametrize(
    "damage",
    [
        *({"step": value} for value in (float("inf"), float("nan"), HUGE, None)),
        *({"time": value} for value in (float("inf"), HUGE, [])),
        *({"prompt": value} for value in (None, 5, ["say a word"])),
        *({"completions": value} for value in (None, 5, [None], {"0": COMPLETION})),
        *({"completions": [{**COMPLETION, "policy_versions": value}]} for value in ([float("inf")], [HUGE], ["x"], 5)),
        *({"completions": [{**COMPLETION, "text": value}]} for value in (5, None, ["a word"])),
    ],
    ids=str,
)
def test_a_damaged_line_of_rollouts_is_no_group_and_ends_no_search(damage: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(f"{json.dumps(group)}\n" for group in ({**GROUP, **damage}, GROUP)))
    found = RolloutReader(path).look(GroupFilter(text="word"), None)
    assert list(found.found) == [1]
    everything = RolloutReader(path).look(GroupFilter(), 0)
    assert (everything.heads[0], everything.group) == (None, None)


@pytest.mark.parametrize("moment", ["1.2.3", "e", "1e999", "1e300", "9" * 12, "-1"])
def test_a_usage_line_of_a_time_that_no_clock_has_ends_no_reader_of_a_timeline(moment: str, tmp_path: Path) -> None:
    line = '{"type":"usage","number":1,"time":%s,"cpu_percent":{},"rss_bytes":{},"gpu_memory_bytes":{},"gpus":[]}\n'
    (tmp_path / "events.jsonl").write_text("".join(line % each for each in (10.5, moment, 20)))
    timeline = TimelineFile(tmp_path)
    assert not timeline.read()
    assert (timeline.begins, timeline.ends, timeline.num_lines) == (10.5, 20.0, 2)


def test_events_of_thousands_of_services_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = {"kind": "command", "attempt": 1, "restarts": 0, "ports": [], "gpus": [], "log": "a.log"}
    services = [{**service, "name": name, "state": "waiting"} for name in "abc"]
    status = {"run": "r", "profile": "p", "state": "running", "supervisor": None, "services": services}
    ready = {"type": "service", "time": 1.0, "service": {**service, "name": "a", "state": "ready"}}
    lines = [
        {"type": "snapshot", "number": 0, "time": 0.0, "status": status},
        *({**ready, "number": n} for n in range(1, 6)),
    ]
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    monkeypatch.setattr(file, "MAX_STATUSES_A_READ", 5)
    timeline = TimelineFile(tmp_path)
    assert [(timeline.read(), timeline.num_lines) for _ in range(4)] == [(True, 2), (True, 4), (True, 6), (False, 6)]
    replay = timeline.past(1.0, None).status
    assert replay is not None
    assert [each.state for each in replay.services] == ["ready", "waiting", "waiting"]


def test_of_samples_of_thousands_of_gpus_fewer_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = '{"type":"usage","number":1,"time":%d,"cpu_percent":{},"rss_bytes":{},"gpu_memory_bytes":{},"gpus":[]}\n'
    (tmp_path / "events.jsonl").write_text("".join(line % each for each in range(10, 18)))
    assert [sample.time for sample in read_samples(tmp_path)] == list(range(10, 18))
    monkeypatch.setattr(reader, "PARSED_BYTES", 3 * len(line))
    assert [sample.time for sample in read_samples(tmp_path)] == [10, 13, 16]


@pytest.mark.parametrize("reward", [None, HUGE, -HUGE, "high"], ids=["none", "huge", "low", "word"])
def test_a_reward_that_is_no_number_leaves_the_rest_of_its_group(reward: object, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps({**GROUP, "completions": [{**COMPLETION, "reward": reward}, COMPLETION]}) + "\n")
    read = RolloutReader(path).look(GroupFilter(text="word"), None)
    head = read.heads[0]
    assert head is not None
    assert (head.known_rewards, head.num_completions) == ([0.5], 2)
    assert read.group is not None
    assert [one.text for one in read.group.completions] == ["a word", "a word"]


@pytest.mark.parametrize("name", ["reward", "advantage"])
def test_a_completion_without_reward_or_advantage_ends_no_screen(name: str, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    damaged = {key: value for key, value in COMPLETION.items() if key != name}
    path.write_text("".join(f"{json.dumps({**GROUP, 'completions': [each]})}\n" for each in (damaged, COMPLETION)))
    groups = [RolloutReader(path).look(GroupFilter(), index).group for index in range(2)]
    assert [group is None for group in groups] == [True, False]


@pytest.mark.parametrize("pid", [-1, 0, 2**31, HUGE])
def test_a_ledger_or_keeper_names_only_pids_that_a_kernel_gives(pid: int) -> None:
    keeper = {"service": "a", "attempt": 1, "state": "running", "main": None, "started_at": 0, "ended_at": None,
              "exit_code": None, "error": None, "log_offset": 0, "ended": [], "unkillable": []}  # fmt: skip
    good = {**keeper, "keeper": {"pid": 7, "start_ticks": 9}}
    assert KeeperState.model_validate_json(json.dumps(good)).keeper.pid == 7
    with pytest.raises(ValidationError):
        KeeperState.model_validate_json(json.dumps({**good, "keeper": {"pid": pid, "start_ticks": 9}}))
    with pytest.raises(ValidationError):
        TypeAdapter(ServiceLedger.model_fields["processes"].annotation).validate_python([[pid, 9]])


def test_a_lock_with_another_name_elsewhere_is_no_supervisor(tmp_path: Path) -> None:
    live, copied = tmp_path / "live", tmp_path / "copied"
    live.mkdir()
    copied.mkdir()
    lock = take_lock(live)
    assert lock is not None
    assert has_daemon(live)
    os.link(live / "daemon.lock", copied / "daemon.lock")
    assert not has_daemon(copied)
    os.close(lock)


async def test_the_kernel_says_which_process_listens_as_supervisor(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(to_line(Hello(run="r", pid=1)))
        await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        is_closed.set()

    is_closed = asyncio.Event()
    async with await asyncio.start_unix_server(answer, tmp_path / "s"):
        write_address(tmp_path, tmp_path / "s")
        assert (await Daemon(tmp_path).hello()).pid == os.getpid()
        await asyncio.wait_for(is_closed.wait(), 60)


async def test_a_line_of_a_supervisor_that_is_longer_than_any_ends_no_screen_with_a_traceback(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x" * (MAX_LINE_BYTES + 1))  # the owner of a folder may be its supervisor
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(answer, tmp_path / "s"):
        write_address(tmp_path, tmp_path / "s")
        with pytest.raises(PeerUnavailable, match="sent a line above 8,388,608 bytes"):
            await Daemon(tmp_path).hello()


async def test_events_are_read_no_faster_than_the_screen_takes_them(tmp_path: Path) -> None:
    """Samples of 3000 GPUs without pause were queued before the keys: `q` was answered after more than 40 s."""
    connection, posted = FakeConnection(), list[messages.StateChanged]()
    news = RunNews(connection, state=lambda: ViewState(run_folder=tmp_path, now=1.0), post=posted.append)
    connection.send(*(Snapshot(number=number, status=run_status()) for number in range(3)))
    listening = asyncio.create_task(news._listen())
    for number in (1, 2, 3):
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(posted) == number
        (latest,) = posted[number - 1 :]
        assert isinstance(latest, messages.EventReceived)
        latest.applied.set()
    listening.cancel()


def test_a_process_of_another_user_is_not_taken_for_the_supervisor(tmp_path: Path) -> None:
    class Foreign:
        def get_extra_info(self, name: str) -> Foreign:
            return self

        def getsockopt(self, level: int, option: int, size: int) -> bytes:
            assert (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
            return struct.pack("iII", 17, os.geteuid() + 1, 0)

    with pytest.raises(PeerError, match=r"\(pid 17\) listens in place of its supervisor"):
        Daemon(tmp_path)._listener(Foreign())  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0.0, 0.5, -1.0, -1e100])
def test_an_evaluation_of_no_prompts_ends_no_status_and_no_board(count: float) -> None:
    metrics = {"eval/time": 1.0, "eval/num_prompts": count, "eval/arithmetic/num_prompts": 4.0}
    warnings = diagnose([MetricsLine(time=1.7e9, step=3, policy_version=3, metrics=metrics)], None)
    assert ["evaluations of arithmetic have 4 held-out" in each.text for each in warnings] == [True]


def test_a_state_of_millions_of_values_or_bytes_is_damaged(tmp_path: Path) -> None:
    """`ps` reads that of every run: ten million ports of one held it for 70 s, and took 1.6 GB."""
    state = tmp_path / STATE_FILE
    for wrong in ('{"ports": [' + "9," * 1_100_000 + "9]}", f'{{"run": "{"x" * (17 << 20)}"}}'):
        state.write_text(wrong)
        with pytest.raises(PeerError, match=r"more than 1,048,576 values|longer than 16,777,216 bytes"):
            read_state(tmp_path)


def test_a_service_of_more_ports_than_a_run_has_services_is_damaged() -> None:
    status = run_status()
    service = status.services[0]
    for ports in ([9] * MAX_SERVICES, [9] * (MAX_SERVICES + 1)):
        wrong = status.model_copy(update={"services": [service.model_copy(update={"ports": ports})]})
        is_read = contextlib.nullcontext() if len(ports) == MAX_SERVICES else pytest.raises(ValidationError)
        with is_read:
            assert RunStatus.model_validate_json(wrong.model_dump_json()) == wrong


def test_steps_share_the_names_of_their_metrics(tmp_path: Path) -> None:
    """JSON gives each line an own copy of each name: with 10,000 in 129 MB of metrics the commands took 1.2 GB."""
    metrics = {f"a metric with a long name/{number}": 1.5 for number in range(100)}
    step = MetricsLine(time=1.0, step=1, policy_version=1, metrics=metrics)
    text = "".join(f"{step.model_copy(update={'step': number}).model_dump_json()}\n" for number in range(200))
    (tmp_path / METRICS_FILE).write_text(text)
    steps = all_steps(tmp_path)
    assert [line.metrics for line in steps] == [metrics] * 200
    assert len({id(name) for line in steps for name in line.metrics}) == 100


def test_a_table_of_metrics_is_not_made_before_its_first_row_is_written() -> None:
    rows = iter([{"a": 1}, {"a": 2}])
    lines = csv_rows(["a"], rows)
    assert [next(lines), next(lines), next(rows)] == ["a\n", "1\n", {"a": 2}]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *((name, value) for name in ("eval_prompts", "training_steps", "model_name") for value in ([1], {}, HUGE)),
        *((name, value) for name in ("clip_low", "clip_high", "clip_eps") for value in (-2, HUGE, float("nan"), [1])),
    ],
)  # fmt: skip
def test_a_setting_of_another_type_or_beyond_any_run_is_unknown_and_ends_no_screen(setting: str, value: object) -> None:
    usual = settings_of({"services": {"trainer": {"kind": "trainer"}}})
    assert hash(settings_of({"services": {"trainer": {"kind": "trainer", setting: value}}})) == hash(usual)
