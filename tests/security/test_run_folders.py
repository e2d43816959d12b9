"""Run folders that somebody else made: shown, never run, and nothing in them reaches the terminal as a command."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import screen_fakes
from launches import launch
from recorded_runs import RECORDED, unpacked
from shown_screen import open_app
from terminal import Terminal
from workplace import IDLE, Workplace, service

from grpo_engine.errors import CheckpointError, ConfigError, GrpoError, PeerError
from grpo_engine.export.config import ExportConfig
from grpo_engine.export.main import run
from grpo_engine.ranks.launching import launch_ranks
from grpo_engine.wire.codec import from_line
from grpo_engine.wire.run_folder import (
    KEEPERS,
    LOCK_FILE,
    METRICS_FILE,
    PLAN_FILE,
    RESOLVED_FILE,
    ROLLOUTS_FILE,
    STATE_FILE,
    TIMELINE_FILE,
)
from grpo_engine.wire.supervisor import ServiceStatus, Snapshot, read_from_daemon
from grpo_engine.wire.tcp_sockets import connected_stranger, own_listening_ports, own_sockets
from grpo_tui.cli.arguments import folder_of_policy
from grpo_tui.cli.export import _pin, _run_engine
from grpo_tui.cli.follow import logs_command, tail
from grpo_tui.client import local
from grpo_tui.client.api import look_at, run_status
from grpo_tui.client.local import Run, runs_and_left_out, unreadable_file
from grpo_tui.run_files.log_file import last_lines
from grpo_tui.run_files.metrics import MAX_NAMES, MetricsChunk, MetricsTail, all_steps, newest_lines
from grpo_tui.run_files.opening import open_file
from grpo_tui.run_files.resolved import read_resolved
from grpo_tui.run_files.whole_file import read_whole
from grpo_tui.supervisor.keeper.proc import identify
from grpo_tui.supervisor.probes import _explained
from grpo_tui.supervisor.state_file import boot_id
from grpo_tui.ui.widgets.log_page import LogPage
from grpo_tui.ui.widgets.main.log_panel import LogLines
from grpo_tui.view.logs.reader import LogFile, LogReader
from grpo_tui.view.logs.search import Level, line_tests
from grpo_tui.view.logs.structured import readable
from grpo_tui.view.logs.tail import LogTail

TOUCH = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch(); print('up', flush=True)"
TITLE, CLIPBOARD, C1, REVERSED, INVISIBLE = "\x1b]0;owned\x07", "\x1b]52;c;b3duZWQ=\x07", "\x9b2J", "\u202e", "\u200b"
HOSTILE = f"a{TITLE}{CLIPBOARD}{C1}{REVERSED}{INVISIBLE}b"


def sent_run(place: Workplace) -> tuple[Path, Path]:
    """A run folder as somebody sends it, whose service makes a file when it is run; and that file."""
    made = place.folder / "made"
    place.profile(service("trainer", TOUCH, made, restart='"never"'))
    place.grpo("up", "--profile", "p", "--wait", "finished", "--detach")
    made.unlink()
    folder = place.run_folder()
    (folder / STATE_FILE).unlink()
    shutil.rmtree(folder / KEEPERS)
    return folder, made


def attach(place: Workplace) -> Terminal:
    return Terminal(place.argv("attach"), cwd=place.folder, environment=place.environment)


def leave(opened: Terminal) -> str:
    """Press q; what the program wrote in all."""
    opened.press("q")
    opened.ends()
    opened.close()
    return bytes(opened.written).decode()


@pytest.mark.slow
def test_attach_runs_nothing_of_a_folder_that_was_sent(workplace: Workplace) -> None:
    folder, made = sent_run(workplace)
    opened = attach(workplace)
    opened.shows(folder.name)
    leave(opened)
    for command in (("start", "trainer"), ("down",), ("upgrade",), ("status",), ("logs", "trainer"), ("metrics",)):
        workplace.grpo(*command)
    assert not made.exists()
    assert not workplace.survivors()


@pytest.mark.slow
def test_a_state_file_that_names_a_living_process_starts_no_supervisor(workplace: Workplace) -> None:
    folder, made = sent_run(workplace)
    living = identify(os.getpid())
    assert living is not None
    entry = {"pid": living.pid, "start_ticks": living.start_ticks}
    (folder / KEEPERS).mkdir()
    state = {
        "service": "trainer", "attempt": 1, "state": "running", "keeper": entry, "main": entry, "started_at": 1.0,
        "ended_at": None, "exit_code": None, "error": None, "log_offset": 0, "ended": [], "unkillable": [],
    }  # fmt: skip
    (folder / KEEPERS / "trainer.1.json").write_text(json.dumps(state))
    assert workplace.grpo("start", folder.name, "trainer").returncode != 0
    assert not made.exists()
    assert not workplace.survivors()


@pytest.mark.slow
def test_a_ledger_that_names_a_living_process_starts_no_supervisor(workplace: Workplace) -> None:
    made = workplace.folder / "made"
    workplace.profile(service("trainer", TOUCH, made, restart='"never"'))
    workplace.grpo("up", "--profile", "p", "--wait", "finished", "--detach")
    made.unlink()
    folder = workplace.run_folder()
    shutil.rmtree(folder / KEEPERS)
    state = json.loads((folder / STATE_FILE).read_text())
    init = identify(1)
    assert init is not None
    state |= {"state": "running", "ended_at": None}
    state["ledger"] |= {"boot_id": boot_id(), "ending": None}
    state["ledger"]["services"]["trainer"] |= {"state": "starting", "processes": [[init.pid, init.start_ticks]]}
    (folder / STATE_FILE).write_text(json.dumps(state))
    for command in (("start", "trainer"), ("restart", "trainer"), ("down",), ("upgrade",)):
        assert workplace.grpo(command[0], folder.name, *command[1:]).returncode != 0
    assert not made.exists()
    assert not workplace.survivors()


@pytest.mark.slow
@pytest.mark.parametrize("is_linked", [True, False], ids=["a link", "a file that others may open"])
def test_a_lock_that_another_program_holds_starts_no_supervisor(workplace: Workplace, is_linked: bool) -> None:
    folder, made = sent_run(workplace)
    lock = workplace.folder / "lock" if is_linked else folder / LOCK_FILE
    (folder / LOCK_FILE).unlink()
    lock.touch()
    lock.chmod(0o666)
    if is_linked:
        (folder / LOCK_FILE).symlink_to(lock)
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        refused = workplace.grpo("start", folder.name, "trainer")
    assert refused.returncode == 5
    assert not made.exists()
    assert not workplace.survivors()


def test_links_are_read_through_only_in_a_folder_that_nobody_else_may_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("secret\n")
    folder = tmp_path / "logs" / "sent"
    folder.mkdir(parents=True)
    (folder / PLAN_FILE).write_text("{}")
    (folder / "trainer.log").symlink_to(tmp_path / "mine")
    logs_command(["sent", "trainer"])
    assert capsys.readouterr().out == "secret\n"
    folder.chmod(0o777)
    with pytest.raises(GrpoError, match=r"trainer\.log: cannot be read: it is a link, .*folder of your own"):
        logs_command(["sent", "trainer"])
    shown = LogTail(folder / "trainer.log")
    (words,) = shown.read().lines
    assert "trainer.log cannot be read: it is a link" in words
    assert not shown.read().has_changed
    folder.chmod(0o700)
    assert (shown.read().lines, shown.read().lines) == (("secret",), ())
    assert "secret" not in capsys.readouterr().out


@pytest.mark.slow
async def test_the_screen_reads_no_log_outside_the_run_folder(tmp_path: Path) -> None:
    """Whatever path the state of a run from elsewhere names."""
    (tmp_path / "trainer.log").write_text("secret\n")
    folder = tmp_path / "sent"
    folder.mkdir()
    (folder / "trainer.log").write_text("of the run\n")
    connection = screen_fakes.FakeConnection()
    trainer = screen_fakes.service("trainer", log=str(tmp_path / "trainer.log"))
    connection.send(Snapshot(number=1, status=screen_fakes.run_status(services=[trainer])))
    async with open_app(folder, connection) as screen:
        await screen.until_text(LogLines, "of the run")
        await screen.go_to("logs")
        await screen.until_text(LogPage, "of the run")
        assert "secret" not in screen.text(LogPage)


@pytest.mark.parametrize("link", ["policies", "policies/wolves"])
def test_a_policy_is_no_folder_elsewhere(tmp_path: Path, link: str) -> None:
    folder = tmp_path / "logs" / "sent"
    mine = tmp_path / "mine"
    (mine / "wolves").mkdir(parents=True)
    (folder / link).parent.mkdir(parents=True)
    (folder / link).symlink_to(mine if link == "policies" else mine / "wolves")
    sent = Run(folder=folder, has_daemon=False, has_services=False)
    assert folder_of_policy(sent, "wolves") == folder / "policies" / "wolves"
    for path in ("..", "../..", "../../../mine", str(mine), ".", ""):
        with pytest.raises(ConfigError, match="has no such policy"):
            folder_of_policy(sent, path)
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="has no such policy"):
        folder_of_policy(sent, "wolves")


def test_a_file_that_became_a_pipe_after_the_run_was_found_hangs_no_reader(tmp_path: Path) -> None:
    for name in (METRICS_FILE, RESOLVED_FILE, "trainer.log"):
        os.mkfifo(tmp_path / name)
    assert MetricsTail(tmp_path / METRICS_FILE).read() == MetricsChunk()
    assert last_lines(tmp_path / "trainer.log", 0) == ()
    with pytest.raises(OSError, match="not a regular file"):
        newest_lines(tmp_path)
    with pytest.raises(ValueError, match="cannot be read: not a regular file"):
        read_resolved(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        STATE_FILE,
        "trainer.log",
        *(
            pytest.param(name, marks=pytest.mark.extended("the same with its state and a log"))
            for name in (METRICS_FILE, f"{KEEPERS}/a.1.json")
        ),
    ],
)
def test_a_folder_with_a_pipe_or_a_device_is_left_out_and_hangs_no_command(workplace: Workplace, name: str) -> None:
    folder, _ = sent_run(workplace)
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    if name == STATE_FILE:
        file.symlink_to("/dev/zero")
    else:
        os.mkfifo(file)
    listed = workplace.grpo("ps")
    assert listed.returncode == 0
    assert folder.name not in listed.stdout
    assert f"{file.name}: the run is left out: not a regular file" in listed.stderr
    assert workplace.grpo("status", folder.name).returncode == 5


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can read as another user")
def test_a_folder_that_another_user_closed_is_left_out_and_so_is_one_with_closed_files(tmp_path: Path) -> None:
    for name, folder_mode, file_mode in (("closed", 0o711, 0o644), ("files", 0o755, 0o600), ("open", 0o755, 0o644)):
        (tmp_path / name).mkdir()
        (tmp_path / name / PLAN_FILE).touch()
        (tmp_path / name / PLAN_FILE).chmod(file_mode)
        (tmp_path / name).chmod(folder_mode)
    tmp_path.chmod(0o755)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.chdir(tmp_path)  # the folders above are root's
        os.setuid(65534)
        found, left_out = runs_and_left_out(Path())
        os.write(write, repr((sorted(run.id for run in found), sorted(map(str, left_out)))).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with open(read) as pipe:
        told = pipe.read()
    left_out = [f"{name}: the run is left out: Permission denied" for name in ("closed", f"files/{PLAN_FILE}")]
    assert told == repr((["open"], left_out))


@pytest.mark.parametrize("name", [STATE_FILE, PLAN_FILE, f"{KEEPERS}/a.1.json"])
def test_a_file_longer_than_any_of_a_run_is_left_out_and_not_read(tmp_path: Path, name: str) -> None:
    file = tmp_path / "a" / name
    file.parent.mkdir(parents=True)
    (tmp_path / "a" / PLAN_FILE).touch()
    with file.open("wb") as sparse:
        sparse.truncate(40 << 30)
    found, left_out = runs_and_left_out(tmp_path)
    assert (found, [each.path for each in left_out]) == ([], [file])
    assert "longer than" in left_out[0].why
    with pytest.raises(OSError, match="longer than"):
        read_whole(file)


def test_a_folder_whose_name_is_not_utf_8_is_left_out_and_ends_neither_the_screen_nor_a_resume(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"sent\xff-0101-120000-abcd")
    folder.mkdir()
    (folder / PLAN_FILE).write_text("{}")
    found, left_out = runs_and_left_out(tmp_path)
    assert (found, [each.path for each in left_out]) == ([], [folder])
    assert str(left_out[0]).endswith(r"its name is not UTF-8: b'sent\xff-0101-120000-abcd': rename it")


@pytest.mark.parametrize("crowded", ["a", f"a/{KEEPERS}"])
def test_a_folder_of_more_files_than_any_run_has_is_left_out_and_not_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crowded: str
) -> None:
    monkeypatch.setattr(local, "MAX_FILES", 5)
    (tmp_path / crowded).mkdir(parents=True)
    for name in (*(f"{crowded}/{number}.json" for number in range(5)), f"a/{PLAN_FILE}"):
        (tmp_path / name).write_text("{}")
    (tmp_path / crowded / "sixth.json").touch()
    found, left_out = runs_and_left_out(tmp_path)
    assert (found, [str(each.path) for each in left_out]) == ([], [str(tmp_path / crowded)])
    assert "more than 5 files" in left_out[0].why


@pytest.mark.parametrize("name", [METRICS_FILE, ROLLOUTS_FILE, TIMELINE_FILE, "trainer.log"])
def test_a_file_that_is_all_hole_is_left_out_and_not_read_to_its_end(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "sent-0101-120000-abcd"
    folder.mkdir()
    (folder / PLAN_FILE).write_text("{}")
    (folder / name).write_text("a line\n")
    assert unreadable_file(folder) is None
    os.truncate(folder / name, 100 << 30)
    found = unreadable_file(folder)
    assert found is not None
    assert (found.path.name, "longer than what was written" in found.why) == (name, True)
    with pytest.raises(GrpoError, match="longer than what was written"):  # it became so while it was read
        tail(folder / name, sys.maxsize, lambda line: True, with_unfinished=True)
    assert all_steps(folder) == []


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        read_whole(tmp_path / "pipe")


@pytest.mark.slow
def test_a_state_file_of_nested_brackets_is_one_row_of_the_list(workplace: Workplace) -> None:
    folder, _ = sent_run(workplace)
    (folder / STATE_FILE).write_text('{"ledger":' + "[" * 200_000)
    listed = workplace.grpo("ps")
    assert listed.returncode == 0
    assert f"{folder.name}  unknown" in listed.stdout


@pytest.mark.slow
def test_a_folder_that_others_may_write_to_is_only_read(workplace: Workplace) -> None:
    workplace.profile(service("trainer", IDLE))
    workplace.up()
    folder = workplace.run_folder()
    folder.chmod(0o777)
    refused = workplace.grpo("stop", "trainer")
    assert refused.returncode == 1
    assert "chmod -R go-w" in refused.stderr
    assert workplace.status().state == "running"
    opened = attach(workplace)
    opened.shows("trainer", "read-only")
    assert "chmod -R go-w" in leave(opened)
    folder.chmod(0o755)
    assert workplace.grpo("down").returncode == 0


@pytest.mark.slow
def test_control_characters_in_a_run_folder_do_not_reach_the_terminal(workplace: Workplace) -> None:
    workplace.profile(service("trainer", "print('up', flush=True)", restart='"never"'))
    workplace.grpo("up", "--profile", "p", "--wait", "finished", "--detach")
    folder = workplace.run_folder()
    state = json.loads((folder / STATE_FILE).read_text())
    state["services"][0] |= {"why": HOSTILE, "health": HOSTILE}
    state["warnings"] = [{"id": "x", "severity": "error", "text": HOSTILE, "hint": HOSTILE}]
    state["gpu_note"] = HOSTILE
    (folder / STATE_FILE).write_text(json.dumps(state))
    line = {"step": 1, "time": 1.0, "metrics": {"reward/mean": 0.5, f"reward/{HOSTILE}/mean": 0.5}}
    (folder / METRICS_FILE).write_text(json.dumps(line) + "\n")
    (folder / TIMELINE_FILE).unlink()  # so that the screen shows the state file
    for command in ("status", "ps", "metrics"):
        printed = workplace.grpo(command)
        assert not [each for each in (printed.stdout + printed.stderr) if each in "\x1b\x07\x9b\u202e\u200b"], command
    opened = attach(workplace)
    opened.shows("a]0;owned")
    written = leave(opened)
    assert not [each for each in (TITLE, CLIPBOARD, C1, REVERSED, INVISIBLE) if each in written]


def test_a_metrics_line_of_nested_brackets_is_skipped(workplace: Workplace) -> None:
    workplace.profile(service("trainer", "print('up', flush=True)", restart='"never"'))
    workplace.grpo("up", "--profile", "p", "--wait", "finished", "--detach")
    (workplace.run_folder() / METRICS_FILE).write_text("[" * 20_000 + "\n")
    for command in ("status", "metrics", "ps"):
        done = workplace.grpo(command)
        assert done.returncode == 0, done.stderr


def test_an_export_runs_no_module_that_the_plan_of_a_run_names(tmp_path: Path) -> None:
    made = tmp_path / "made"
    for module in ("path/sitecustomize.py", "folder/grpo_engine/__init__.py"):
        (tmp_path / module).parent.mkdir(parents=True)
        (tmp_path / module).write_text(f"import pathlib; pathlib.Path({str(made)!r}).touch()")
    trainer = launch("trainer", env={"PYTHONPATH": str(tmp_path / "path")}, cwd=tmp_path / "folder")
    config = ExportConfig(checkpoint=tmp_path / "step_1", folder=tmp_path / "out")
    assert _run_engine(config, trainer, str(tmp_path), files=[]) != 0  # there is no such checkpoint
    assert not made.exists()


def test_a_rank_that_another_user_has_taken_the_place_of_is_noticed_before_anything_is_sent(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            assert connected_stranger() is None
            rows = Path("/proc/net/tcp").read_text().splitlines()
            there = f"{client.getsockname()[1]:04X}"
            forged = [
                re.sub(r"^((?:\s*\S+){7}\s+)\d+", r"\g<1>65534", row) if row.split()[1].endswith(there) else row
                for row in rows
            ]
            (tmp_path / "tcp").write_text("\n".join(forged) + "\n")
            found = connected_stranger(tables=tmp_path)
            port = server.getsockname()[1]
            assert port in own_listening_ports()
            assert connected_stranger(services=[port], tables=tmp_path) is None  # a client of this process
            client.close()
            closed = connected_stranger()  # what it sent before can still be read
            assert connected_stranger(older=own_sockets()) is None  # as a connection to a server that was killed
    assert found is not None
    assert found.uid == 65534
    assert closed is not None
    assert not closed.inode


def test_ranks_of_one_machine_meet_in_a_folder_of_their_user(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys; store = pathlib.Path(os.environ['GRPO_RANKS_STORE_FILE']);"
        "bad = 'MASTER_PORT' in os.environ or store.parent.stat().st_mode & 0o077;"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(str(store)); sys.exit(bool(bad))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}
    argv = [sys.executable, "-c", code, str(tmp_path)]
    assert launch_ranks(argv, num_local=2, environment=environment).code == 0
    stores = {(tmp_path / str(rank)).read_text() for rank in range(2)}
    assert len(stores) == 1
    assert not Path(stores.pop()).parent.exists()


@pytest.mark.parametrize("made", ["link", "link_of_a_folder", "pipe"])
def test_an_export_copies_nothing_from_outside_a_checkpoint_and_waits_for_no_pipe(made: str, tmp_path: Path) -> None:
    outside, checkpoint, links = tmp_path / "outside", tmp_path / "step_3", tmp_path / "links"
    for folder in (outside, checkpoint, links):
        folder.mkdir()
    (outside / "secret").write_text("secret")
    match made:
        case "link":
            (checkpoint / "notes.txt").symlink_to(outside / "secret")
        case "link_of_a_folder":
            (checkpoint / "notes").symlink_to(outside)
        case _:
            os.mkfifo(checkpoint / "notes")
    with ExitStack() as opened, pytest.raises(CheckpointError, match="notes"):
        _pin(checkpoint, links, opened)
    with pytest.raises(CheckpointError, match="notes"):
        run(ExportConfig(checkpoint=checkpoint, folder=tmp_path / "model"))
    assert not (tmp_path / "model").exists()


def test_figures_beyond_any_that_a_program_writes_are_damage_and_end_no_reader(tmp_path: Path) -> None:
    huge = "1" + "0" * 400
    line = '{"time": %s, "step": %s, "policy_version": %s, "metrics": {}}'
    bad = [("1e308", "1", "1"), ("1", f"-{huge}", "1"), ("1", huge, "1"), ("1", "1", huge), ("1", str(-(10**13)), "1")]
    (tmp_path / METRICS_FILE).write_text("".join(f"{line % each}\n" for each in [*bad, ("1", "2", "3")]))
    assert [each.step for each in newest_lines(tmp_path)] == [2]
    for event in (
        b'{"type": "run", "number": 1, "time": 1e308, "state": "running"}',
        b'{"type": "usage", "number": 1, "time": 1, "cpu_percent": {}, "rss_bytes": {"a": %s}, "gpu_memory_bytes": {}, '
        b'"gpus": []}' % huge.encode(),
    ):
        with pytest.raises(PeerError):
            read_from_daemon(event)
    status = f'{{"name": "a", "kind": "command", "state": "ready", "log": "a.log", "rss_bytes": {huge}}}'
    with pytest.raises(PeerError, match="rss_bytes"):
        from_line(ServiceStatus, status.encode(), peer="a file")


def test_nested_brackets_end_no_reader_of_settings_logs_or_probes(tmp_path: Path) -> None:
    nested = '{"a":' * 100_000 + "1" + "}" * 100_000
    (tmp_path / RESOLVED_FILE).write_text(nested)
    with pytest.raises(ValueError, match="is damaged"):
        read_resolved(tmp_path)
    assert readable(nested) == nested
    assert _explained(nested.encode()) == ("", False)


def test_values_nested_as_deep_as_json_is_read_end_no_reader_of_logs() -> None:
    """Less deep than what the parser refuses, and deeper than Python calls itself."""
    for depth in (100, 300, 450, 900):
        line = '{"event": "x", "a": ' + depth * '{"a": ' + "1" + (depth + 1) * "}"
        assert "event" in readable(line) or "a:a:a" in readable(line)


def test_half_a_character_in_json_ends_no_search_in_a_log(tmp_path: Path) -> None:
    path = tmp_path / "env.log"
    path.write_text('{"event": "\\ud800 found", "a": "\\udfff"}\n')
    reader = LogReader([LogFile(name="env", path=path)])
    found = reader.before(reader.extent().ends, 10, line_tests(Level.ALL, "found"))
    assert [line.text for line in found.lines] == [" found  a="]


def test_a_folder_in_place_of_the_metrics_leaves_the_status_without_them(tmp_path: Path) -> None:
    folder = unpacked(RECORDED[-1], tmp_path)
    before = run_status(look_at(folder))
    assert before.metrics
    (folder / METRICS_FILE).unlink()
    (folder / METRICS_FILE).mkdir()
    assert run_status(look_at(folder)) == before.model_copy(update={"metrics": {}})
    with pytest.raises(OSError, match="not a regular file"):
        open_file(folder / METRICS_FILE)


def test_a_million_names_of_metrics_are_not_kept_or_listed(tmp_path: Path) -> None:
    """A screen would take minutes for each; the first names of a file are those of its run."""
    path = tmp_path / METRICS_FILE
    with path.open("w") as file:
        for step in range(1, 14):
            metrics = {"reward/mean": 0.5, "_num" * 10_000: 1.0} | {f"m{step}/{number}": 1.0 for number in range(1000)}
            file.write(json.dumps({"time": 1.0, "step": step, "policy_version": step, "metrics": metrics}) + "\n")
    tail = MetricsTail(path)
    lines = tail.read().lines
    assert len(set().union(*(line.metrics for line in lines))) == MAX_NAMES
    assert [line.metrics["reward/mean"] for line in lines] == [0.5] * 13
    assert max(len(name) for line in lines for name in line.metrics) < 20
    path.write_text(json.dumps({"time": 2.0, "step": 1, "policy_version": 1, "metrics": {"other": 1.0}}) + "\n")
    again = tail.read()
    assert again.is_restarted
    assert again.lines[0].metrics == {"other": 1.0}
