"""What services print and leave in files, and what others put in their place: nothing ends by it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import threading
from itertools import islice
from pathlib import Path

import pytest
from stage import Stage, open_stage, python, until
from workplace import IDLE

from grpo_engine.config import read_table, validated
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.items import source
from grpo_engine.environments.items.source import ItemSource
from grpo_engine.errors import CheckpointError, ConfigError, GrpoError
from grpo_engine.train.recording.line_file import LineFile
from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.run_folder import service_log
from grpo_engine.wire.supervisor import RunState
from grpo_tui.client.lives import copy_checkpoint, copy_item_state
from grpo_tui.client.local import StartRefused
from grpo_tui.profile.plan_file import Plan
from grpo_tui.run_files import log_file
from grpo_tui.run_files.log_file import Part, last_lines, read_part, searched_lines, written_so_far
from grpo_tui.run_files.metrics import all_steps
from grpo_tui.services.base import ConsoleMetric, Probe
from grpo_tui.supervisor import probes
from grpo_tui.supervisor.core import Supervisor
from grpo_tui.supervisor.daemon import started_threads
from grpo_tui.supervisor.keeper.client import ExitReport
from grpo_tui.supervisor.placement import agent, wire
from grpo_tui.supervisor.probes import LogSearch, Prober
from grpo_tui.supervisor.progress import Progress
from grpo_tui.supervisor.report import console_metrics
from grpo_tui.supervisor.report.console_metrics import ConsoleMetrics, StepReader, WrittenSteps
from grpo_tui.supervisor.state_file import read_state
from grpo_tui.view.comparison import ComparedRun, compare
from grpo_tui.view.comparison_page import to_html, to_svg

STEP_AND_LOSS = {"step": r"step (\S+)", "loss": r"loss (\S+)", "policy_version": r"version (\S+)"}


def test_a_step_or_version_out_of_range_in_the_output_is_reported_and_not_kept() -> None:
    messages: list[str] = []
    console = {name: ConsoleMetric(pattern=pattern) for name, pattern in STEP_AND_LOSS.items()}
    reader = StepReader(console, report=messages.append)
    lines = ["step 1e19 loss 3", "step 1 version 1e300 loss 4", "step -1", "step 9223372036854775807", "step 2 loss 5"]
    read = [step for line in lines for step in reader.read(line)] + reader.end()
    assert [(each.step, each.policy_version, dict(each.metrics)) for each in read] == [
        (1, 0, {"loss": 4.0}),
        (2, 0, {"loss": 5.0}),
    ]
    assert [message.split(":")[0] for message in messages] == [
        "step is 1e19, not between 0 and 2^63-1",
        "policy_version is 1e300, not between 0 and 2^63-1 at step 1",
    ]


async def test_a_step_out_of_range_in_the_output_does_not_end_the_supervisor(tmp_path: Path) -> None:
    program = f"print('step 1e19 loss 3', flush=True)\n{IDLE}"
    console = {"step": ConsoleMetric(pattern=r"step (\S+)"), "loss": ConsoleMetric(pattern=r"loss (\S+)")}
    with open_stage(tmp_path) as stage:
        notices = await notices_of(stage, "step is 1e19", program, console=console)
        assert not any("crashed" in notice for notice in notices)


async def notices_of(stage: Stage, awaited: str, program: str = IDLE, **settings: object) -> list[str]:
    """The notices of a supervisor of one service, which is ended once it has sent the awaited one."""
    plan = Plan(
        profile_name="p",
        profile_folder=stage.folder,
        launches=(stage.launch(*python(program, stage.token), **settings),),  # type: ignore[arg-type]
    )
    supervisor = Supervisor(plan, run_folder=stage.folder, predecessor=None)
    notices: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(supervisor, "notice", lambda _severity, text, _service: notices.append(text))
        running = asyncio.create_task(supervisor.run())
        await until(lambda: running.done() or any(awaited in notice for notice in notices))
        assert not running.done(), running.exception()
        supervisor.end(RunState.STOPPED)
        assert await running is RunState.STOPPED
    return notices


async def test_half_a_character_in_the_reason_of_a_probe_does_not_end_the_supervisor(tmp_path: Path) -> None:
    """The state could not be written with it; nor is anything kept that a terminal would obey."""
    reason = rb'{"detail": "out of\n memory\ud800\u001b[2J\u202e"}'

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Unavailable\r\n\r\n" + reason)
        writer.close()

    # Not the service itself, which may start late: its limit has begun by then.
    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/health"
        with open_stage(tmp_path) as stage:
            ready = Probe(http=url, interval_s=0.01, within_s=0.5)
            launch = stage.launch(*python("import signal; signal.pause()", stage.token), ready=ready)
            supervisor = Supervisor(
                Plan(profile_name="p", profile_folder=stage.folder, launches=(launch,)),
                run_folder=stage.folder,
                predecessor=None,
            )
            assert await supervisor.run() is RunState.FAILED
    stored = read_state(tmp_path)
    assert stored is not None
    assert stored.services[0].why == "not ready within 0.5 s: /health answers 503: out of memory[2J"
    assert "503: out of memory[2J" in (tmp_path / "crash-a-1.txt").read_text()


def test_the_search_of_a_log_ends_though_its_service_prints_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each probe takes another thread of the supervisor, and none is left to cap the log or write the state."""
    log = tmp_path / "a.log"
    log.write_bytes(b"a line\n")
    search, parts, seen = LogSearch(log, 0, "never"), [], []

    def grown(descriptor: int, offset: int, *_: object, **__: object) -> Part:
        assert len(parts) < 9
        part = read_part(descriptor, offset, 7, with_header=False)
        parts.append(part)
        seen.append(search.search())  # by the next probe, meanwhile
        with log.open("ab") as file:
            file.write(b"a line\n")
        return part

    monkeypatch.setattr(probes, "MAX_LOG_PART_BYTES", 7)
    monkeypatch.setattr(probes, "read_part", grown)
    assert not search.search().passed
    assert [part.offset for part in parts] == [0]
    assert not search.search().passed
    assert [part.offset for part in parts] == [0, 7]
    assert not any(answer.passed for answer in seen)


def test_a_line_of_megabytes_is_searched_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`adapter.*: step_` takes 150 s in a line of 1 MiB of the word adapter, and nothing else runs meanwhile."""
    monkeypatch.setattr(log_file, "MAX_SEARCHED_CHARS", 16)
    assert list(searched_lines(b"a\r\n" + b"b" * 20)) == ["a", "", "b" * 16, "b" * 4]
    log = tmp_path / "a.log"
    log.write_bytes(b"a" * 100)
    assert LogSearch(log, 0, "a{16}").search().passed
    assert not LogSearch(log, 0, "a{17}").search().passed


async def test_a_flood_of_steps_in_the_output_holds_up_no_end_of_a_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[str] = []
    (tmp_path / "keepers").mkdir()
    with open_stage(tmp_path) as stage:
        launch = stage.launch("true", console={"step": ConsoleMetric(pattern="(x)")})
        reader = ConsoleMetrics(launch, attempt=1, log_offset=0, run_folder=tmp_path, notice=notices.append)
    monkeypatch.setattr(console_metrics, "new_part", lambda log, offset: (offset, b"a line\n"))
    for name in ("POLL_S", "REST_WITHIN_S"):
        monkeypatch.setattr(console_metrics, name, 0.01)
    ended = asyncio.Event()
    ended.set()
    await reader.run(ended)
    assert notices == ["it printed faster than its output is read: metrics of its last steps are left out"]


async def test_steps_that_are_printed_without_end_do_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[str] = []
    (tmp_path / "keepers").mkdir()
    (tmp_path / "a.log").write_text("".join(f"step {step} loss 1\n" for step in range(100)))
    monkeypatch.setattr(console_metrics, "MAX_STEPS", 10)
    ended = asyncio.Event()
    ended.set()
    console = {"step": ConsoleMetric(pattern=r"step (\d+)"), "loss": ConsoleMetric(pattern=r"loss (\d+)")}
    with open_stage(tmp_path) as stage:
        launch = stage.launch("true", console=console)
        for _ in range(2):  # the second as a supervisor that takes over
            reader = ConsoleMetrics(launch, attempt=1, log_offset=0, run_folder=tmp_path, notice=notices.append)
            reader._log = tmp_path / "a.log"
            await reader.run(ended)
            assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 10
    assert notices == ["it printed 10 steps: metrics of further ones are left out"] * 2


def test_steps_that_were_not_written_are_read_again_in_linear_time() -> None:
    """A supervisor that takes over looked for each of them among all that were: 25 ms a line beside a million."""

    class Steps(tuple[int, ...]):
        __slots__ = ()

        def index(self, *_: object) -> int:  # type: ignore[override]
            raise AssertionError("searched")

    last = MetricsLine(time=1.0, step=9, policy_version=9, metrics={"loss": 1.0})
    console = {"step": ConsoleMetric(pattern=r"step (\d+)"), "loss": ConsoleMetric(pattern=r"loss (\d+)")}
    reader = StepReader(console, report=pytest.fail, written=WrittenSteps(steps=Steps(range(10)), last=last))
    assert reader.read("step 20 loss 1") == []
    assert [record.step for record in reader.read("step 21 loss 1")] == [20]


async def test_a_supervisor_goes_on_where_processes_have_used_up_the_threads_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asyncio.get_running_loop().set_default_executor(started_threads())

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        reading = (asyncio.to_thread(os.getpid) for _ in range(100))
        assert await asyncio.gather(*reading) == [os.getpid()] * 100
        with pytest.raises(GrpoError, match="the limit of processes is reached"):
            started_threads()


READ_PARTS = [
    (ConsoleMetrics, "run", "metrics from its output"),
    (Progress, "look", "progress check"),
    (Prober, "ask", "probe failed"),
]


@pytest.mark.parametrize(("kind", "method", "part"), READ_PARTS, ids=["console", "progress", "probe"])
async def test_a_failure_in_what_reads_a_service_is_reported_and_supervision_goes_on(
    kind: type, method: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is made up: no input is known to cause one, and the next that is found must end no supervisor."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("damaged")

    async def fail_later(*_: object) -> None:
        fail()

    monkeypatch.setattr(kind, method, fail if kind is Progress else fail_later)
    with open_stage(tmp_path) as stage:
        console = {"step": ConsoleMetric(pattern="(x)")}
        notices = await notices_of(stage, part, ready=Probe(log="never", interval_s=0.01), console=console)
        assert sum("damaged" in notice for notice in notices) == 1


@pytest.mark.parametrize(
    "header",
    [
        "dropped 5 bytes · header 99999 bytes",
        "dropped 1 bytes · header 9999999999999999999999999 bytes",
        "dropped 99999999999999999999999999 bytes · header 10 bytes",
        "dropped 0 bytes · header 10 bytes · dropped 99999999999999999999999 from 1 bytes on",
    ],
)
def test_a_log_header_that_claims_more_than_the_file_has_is_read_as_text(header: str, tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(f"=== capped · {header}\nfirst\nlast\n")
    assert written_so_far(log) == log.stat().st_size
    with log.open("rb") as file:
        part = read_part(file.fileno(), 0, 1000, with_header=False)
    assert part.data == log.read_bytes()
    assert last_lines(log, 0)[-2:] == ("first", "last")


def test_metrics_of_extreme_values_steps_and_versions_are_compared_and_drawn(tmp_path: Path) -> None:
    lines = [(1, 1, 1.0), (2, 2, 1e308), (3, 3, -1.7e308), (4, 4, 1e100), (5, 5, -1e100), (2**63 - 1, 6, 1.0)]
    lines += [(6, 2**63 - 1, 2.0), (10**12, 10**12, 3.0)]
    records = [
        {"time": 1.7e9, "step": step, "policy_version": version, "metrics": {"reward/mean": x, "eval/avg@4": x}}
        for step, version, x in lines
    ]
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    read = {name: all_steps(tmp_path / name) for name in "ab"}
    assert [(line.step, line.policy_version) for line in read["a"]][-2:] == [(5, 5), (10**12, 10**12)]
    runs = [
        ComparedRun(run=name, profile="p", state="finished", lines=steps, resolved={"services": {"t": {"seed": name}}})
        for name, steps in read.items()
    ]
    assert compare(runs).rewards[0] is not None
    for page in (to_html(runs), to_svg(runs)):
        assert "nan" not in page
        assert "inf" not in page


@pytest.mark.parametrize("value", ["!!int ''", "!!float ''", "!!bool x", "!!timestamp x", "!!int abc", "!!binary é"])
def test_a_yaml_value_that_does_not_fit_its_tag_is_an_error_of_the_file(value: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(f"a: {value}\n")
    with pytest.raises(ConfigError, match=r"settings.yaml: not valid YAML: \S"):
        read_table(path)


def test_the_state_file_of_items_is_not_written_through_a_planted_link(tmp_path: Path) -> None:
    victim, state = tmp_path / "victim", tmp_path / "items.json"
    victim.write_text("mine")
    for name in (f".items.json.{os.getpid()}", f".items.json.{os.getpid()}.tmp"):
        (tmp_path / name).symlink_to(victim)
    ItemSource(_arithmetic(state)).close()
    assert victim.read_text() == "mine"
    assert json.loads(state.read_text())["num_starts"] == 1


@pytest.mark.parametrize(
    "damage",
    [
        *({"num_starts": value} for value in (-1, 1e400, "x", None)),
        *({"drawn": value} for value in (-5, 10**30, [])),
        *({"rates": value} for value in (5, {"a": 5}, {"a": ["x"]})),
        *({"curriculum": value} for value in (None, [], {"level": -9, "means": ["x"]}, {"level": 10**400})),
    ],
    ids=str,
)
def test_a_damaged_state_file_of_items_is_named_and_replaced(
    damage: dict[str, object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "items.json"
    first = ItemSource(_arithmetic(state))
    first.close()
    state.write_text(json.dumps({**json.loads(state.read_text()), **damage}))
    assert ItemSource(_arithmetic(state)).next().question
    assert "state_file: " in caplog.text


def test_a_state_file_that_claims_a_trillion_items_delays_a_start_for_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "items.json"
    settings = _arithmetic(state, curriculum=None)
    ItemSource(settings).close()
    state.write_text(json.dumps({**json.loads(state.read_text()), "drawn": 2**40 - 1}))
    monkeypatch.setattr(source, "_PASS_WITHIN_S", 0.01)
    again = ItemSource(settings)
    assert "passing over the 1099511627775 items that were drawn takes longer than 0.01 s" in caplog.text
    assert again.next().question
    again.close()
    num_drawn = json.loads(state.read_text())["drawn"]
    assert 0 < num_drawn < 10**6
    after = islice(settings.task.items(settings.seed), num_drawn, None)
    monkeypatch.undo()
    assert ItemSource(settings).next() == next(after)


def test_a_pipe_in_place_of_the_state_file_of_items_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "items.json")
    ItemSource(_arithmetic(tmp_path / "items.json")).close()
    assert (tmp_path / "items.json").is_file()


def test_a_branch_copies_no_state_file_that_is_a_link_and_opens_none_to_others(tmp_path: Path) -> None:
    secret, source, target = tmp_path / "secret", tmp_path / "items.json", tmp_path / "new.json"
    secret.write_text("mine")
    source.symlink_to(secret)
    with pytest.raises(StartRefused, match="is a link"):
        copy_item_state(source, target)
    assert not target.exists()
    source.unlink()
    source.write_text("{}")
    source.chmod(0o666)
    copy_item_state(source, target)
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("{}", 0o600)


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_branch_copies_nothing_that_a_link_in_a_checkpoint_names(is_folder: bool, tmp_path: Path) -> None:
    private, checkpoint, save_path = tmp_path / "private", tmp_path / "run" / "step_3", tmp_path / "branch"
    for folder in (private, checkpoint / "optimizer", save_path):
        folder.mkdir(parents=True)
    (private / "secret").write_text("mine")
    (checkpoint / "model.safetensors").write_text("weights")
    link = checkpoint / "optimizer" / "link"
    link.symlink_to(private if is_folder else private / "secret")
    with pytest.raises(CheckpointError, match=r"step_3/optimizer/link is a link"):
        copy_checkpoint(checkpoint, save_path)
    assert list(save_path.iterdir()) == []
    link.unlink()
    copy_checkpoint(checkpoint, save_path)
    assert (save_path / "step_3" / "model.safetensors").read_text() == "weights"


def test_thinning_a_file_of_records_writes_through_no_planted_link(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "rollouts.jsonl"
    victim.write_text("mine")
    (tmp_path / f".rollouts.jsonl.{os.getpid()}.tmp").symlink_to(victim)
    records = LineFile(path, max_bytes=100)
    for step in range(1, 9):
        records.append(b'{"time":1.0,"step":%d,"x":"%s"}\n' % (step, b"x" * 20))
    records.close()
    assert victim.read_text() == "mine"
    assert not path.is_symlink()
    assert path.read_bytes().count(b"\n") < 8


def _arithmetic(state: Path, curriculum: str | None = "rising") -> EnvironmentConfig:
    table = {"task": {"name": "arithmetic"}, "curriculum": curriculum, "model_name": "m", "state_file": str(state)}
    return validated(EnvironmentConfig, table, where="test")


async def test_the_log_of_a_service_on_another_machine_is_capped_and_nothing_of_it_is_passed_on_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "CHECK_S", 0.01)
    machine = agent.Agent(tmp_path / "run", tmp_path, None, node="left")
    path, limit_bytes = service_log(tmp_path, "a"), 1_000_000
    path.write_text("".join(f"{number}\n" for number in range(200_000)))
    machine._attempts["a", 1] = agent.Attempt(keeper=None, log_offset=0, report=ExitReport(code=0, ended_at=0.0))
    machine._limits[path] = limit_bytes
    running = asyncio.create_task(machine.run())
    await until(lambda: path.stat().st_size <= limit_bytes)
    running.cancel()
    got, has_exited = b"", False
    while not has_exited:
        asked = wire.Follow(service="a", attempt=1, num_copied=len(got), wait_s=0.0)
        answer = wire.Followed.model_validate_json(await machine.answer(asked.model_dump_json().encode()))
        got, has_exited = got + base64.b64decode(answer.data), answer.has_exited
    numbers = got.decode().split()[1:]
    assert numbers == [str(number) for number in range(int(numbers[0]), 200_000)]
