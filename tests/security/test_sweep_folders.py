"""Sweep folders that somebody else made or may change: shown, never run, and their files end no other process."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_engine.errors import ConfigError, GrpoError
from grpo_engine.wire.file_locks import lock_holder
from grpo_engine.wire.run_folder import SWEEP_FILE
from grpo_tui.cli.sweep import resume_command, status_command, stop_command
from grpo_tui.keeper_process import Stat
from grpo_tui.paths import ForeignFolder
from grpo_tui.profile.loaded import LoadedProfile
from grpo_tui.profile.loading import load_table
from grpo_tui.run_files.metrics import read_line
from grpo_tui.sweeps import files
from grpo_tui.sweeps.asked import Asked
from grpo_tui.sweeps.files import SWEEP_LOCK_FILE, ask_to_stop, read_mark
from grpo_tui.sweeps.folder import Sweep, begin, find_sweep, holder, holding, names, runs_of, write_reasons
from grpo_tui.sweeps.grid import Point
from grpo_tui.sweeps.results import PointResult, by_settings, measured, to_csv
from grpo_tui.sweeps.table import document
from grpo_tui.ui.board.curves import _rank
from grpo_tui.ui.board.reading import _label


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """A sweep of two points that nothing works on; its folder of runs is the one of the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "p.toml"
    path.write_text('[services.t]\nkind = "command"\nargv = ["true"]\n')
    return begin(Asked(profile=str(path), settings={"services.t.env.V": ["x", "y"]}), "s")


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pids to which signals would have been sent."""
    sent: list[int] = []

    def record(process: Stat, number: signal.Signals) -> None:
        sent.append(process.pid)

    monkeypatch.setattr(files, "send_signal", record)
    return sent


def locked(path: Path) -> int:
    """A descriptor of a file, locked by this process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def test_a_sweep_that_others_may_write_to_is_shown_and_neither_run_nor_ended(
    sweep: Sweep, signals: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo-tui", "sweep", "resume"])
    sweep.folder.chmod(0o777)
    for act in (resume_command, stop_command, lambda name: resume_command(name, detach=True)):
        with pytest.raises(ForeignFolder, match="mode 0777, so that other users may change what it runs"):
            act("s")
    assert not (sweep.folder / SWEEP_LOCK_FILE).exists()
    assert not (sweep.folder / "sweep.log").exists()
    assert ask_to_stop(sweep.folder) is None
    assert signals == []
    status_command("s")
    assert "services" not in capsys.readouterr().err


def test_the_folder_of_runs_that_a_sweep_makes_is_written_by_its_owner_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.toml").write_text('[services.t]\nkind = "command"\nargv = ["true"]\n')
    before = os.umask(0)
    try:
        made = begin(Asked(profile="p.toml", settings={"services.t.env.V": ["x", "y"]}), "s")
    finally:
        os.umask(before)
    assert [oct(each.stat().st_mode & 0o777) for each in (made.logs, made.folder.parent)] == ["0o755"] * 2


def test_a_sweep_that_has_points_left_is_stopped_and_goes_on_by_resume(
    sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_command("s")
    assert "sweep s is stopped; `grpo-tui sweep resume s` goes on with it" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_a_sweep_of_another_user_is_not_run_and_the_message_says_what_shows_it(sweep: Sweep) -> None:
    os.chown(sweep.folder, 65534, 65534)
    with pytest.raises(ForeignFolder, match=r"belongs to user 65534.*`grpo-tui sweep status`"):
        resume_command(None)


def test_a_lock_on_a_file_of_the_same_inode_elsewhere_is_another_lock(tmp_path: Path) -> None:
    descriptor = locked(tmp_path / "lock")
    try:
        status = os.fstat(descriptor)
        elsewhere = os.stat_result((status.st_mode, status.st_ino, status.st_dev + 1, *status[3:]))
        assert lock_holder(status) == os.getpid()
        assert lock_holder(elsewhere) is None
    finally:
        os.close(descriptor)


def test_a_lock_that_a_process_has_from_its_parent_is_not_its_own(tmp_path: Path) -> None:
    descriptor = locked(tmp_path / "lock")
    child = subprocess.Popen(["sleep", "60"], pass_fds=[descriptor])
    try:
        assert lock_holder(os.fstat(descriptor)) == os.getpid()
        assert lock_holder(os.fstat(descriptor), lambda pid: pid == child.pid) is None
    finally:
        child.kill()
        child.wait()
        os.close(descriptor)


def test_who_holds_a_lock_is_told_without_the_list_of_all_locks_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300,000 locks of another user, made within 3 s, take that list more than a minute to read."""
    opened, plain = [], open
    monkeypatch.setattr("builtins.open", lambda path, *rest, **more: opened.append(path) or plain(path, *rest, **more))
    descriptor = locked(tmp_path / "lock")
    try:
        assert lock_holder(os.fstat(descriptor)) == os.getpid()
        assert not [path for path in opened if str(path) == "/proc/locks"]
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_lock_that_is_a_link_to_that_of_another_command_ends_nothing(
    sweep: Sweep, signals: list[int], tmp_path: Path, link: object
) -> None:
    descriptor = locked(tmp_path / "of-another")
    try:
        link(tmp_path / "of-another", sweep.folder / SWEEP_LOCK_FILE)  # type: ignore[operator]
        assert holder(sweep) is None
        assert ask_to_stop(sweep.folder) is None
        assert signals == []
        fault = "is a link: remove it" if link is os.symlink else "is running by a process that is not visible here"
        with pytest.raises(GrpoError, match=fault), holding(sweep):
            pass
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("name", ["a\0b", "..", "a\nb", "../../etc"])
def test_a_run_that_names_an_impossible_sweep_is_of_none(tmp_path: Path, name: str) -> None:
    (tmp_path / SWEEP_FILE).write_text(json.dumps({"sweep": name, "id": "x", "point": 1}))
    assert read_mark(tmp_path) is None


def test_a_lock_of_a_sweep_that_another_user_may_hold_is_named(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was unpacked with mode 0644: `sweep resume` and `sweep stop` said that `sweep stop` would end who holds it."""
    path = sweep.folder / SWEEP_LOCK_FILE
    descriptor = locked(path)
    path.chmod(0o644)
    monkeypatch.setattr("grpo_tui.sweeps.folder.holder_of", lambda folder: None)  # as of a process of another user
    with pytest.raises(GrpoError, match=r"sweep.lock has mode 0644, and a process of another user may hold it: remove"):
        resume_command("s")
    os.close(descriptor)
    with holding(sweep):
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_sweep_of_thousands_of_points_is_read_without_loading_the_profile_for_each(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = ", ".join(f'"{number}"' for number in range(9999))  # 100 kB, of which `sweep status` took a minute
    settings = f'profile = "{sweep.profile_path}"\n[settings]\n"services.t.env.V" = [{values}]\n'
    (sweep.folder / "sweep.toml").write_text(settings)
    loads: list[object] = []

    def load(*settings: object, **options: object) -> LoadedProfile:
        loads.append(settings)
        return load_table(*settings, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("grpo_tui.sweeps.asked.load_table", load)
    assert find_sweep("s").num_points == 9999
    assert len(loads) == 1


def test_a_long_value_of_a_sweep_takes_its_length_once_and_not_for_each_point(
    sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    """400 kB among 10,000 points took `sweep status` more than 8 GB: each row was as wide as the widest."""
    values = ", ".join(f'"{number}"' for number in range(300))
    head = f'profile = "{sweep.profile_path}"\n[settings]\n"services.t.env.V" = [{values}, '
    (sweep.folder / "sweep.toml").write_text(f'{head}"{"w" * 400_000}"]\n')
    status_command("s")
    assert len(capsys.readouterr().out) < 400_000
    (sweep.folder / "sweep.toml").write_text(f'{head}"w"]\n"services.t.env.W" = ["{"w" * 400_000}"]\n')
    with pytest.raises(ConfigError, match="settings of all points have more than"):  # was 400 kB for each of them
        find_sweep("s")
    (sweep.folder / "sweep.toml").write_text(head + " " * (4 << 20) + '"w"]\n')
    with pytest.raises(ConfigError, match=r"sweep.toml: cannot be read: longer than"):
        find_sweep("s")


@pytest.mark.parametrize("name", ["sweep.toml", "profile.toml", "pruned.json", "chosen.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_device_among_the_files_of_a_sweep_hangs_no_reader(sweep: Sweep, name: str, kind: str) -> None:
    (sweep.folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(sweep.folder / name)
    else:
        (sweep.folder / name).symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=rf"{name}: cannot be read: not a regular file"):
        runs_of(find_sweep("s"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chosen.json", "{}"),
        ("chosen.json", '{"combinations": [{}]}'),
        ("not-started.json", '{"x": "y"}'),
        ("pruned.json", '{"1\\n": "y"}'),
        ("pruned.json", "[" * 100_000),
    ],
)
def test_a_damaged_file_of_a_sweep_is_an_error_that_names_it(sweep: Sweep, name: str, content: str) -> None:
    (sweep.folder / name).write_text(content)
    with pytest.raises(ConfigError, match=rf"{name}: "):
        runs_of(find_sweep("s"))


def test_a_line_feed_in_the_name_of_a_sweep_or_in_a_reason_begins_no_line(
    sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = sweep.folder.parent / "x\npoint 9: failed"
    shutil.copytree(sweep.folder, copied)
    assert names() == ["s"]
    write_reasons(sweep, "not-started.json", {1: "no such file\npoint 9: finished"})
    status_command("s")
    assert "point 1: failed: no such file\n  point 9: finished\n" in capsys.readouterr().err


def test_metrics_beyond_any_number_of_a_trainer_end_no_table() -> None:
    huge = b'{"time":1,"step":1,"policy_version":1,"metrics":{"train/tokens_per_second":1e300,"train/step_time":1e300}}'
    line = read_line(huge)
    assert line is not None
    assert measured([line, line])["tokens"] is None


def test_an_integer_of_400_digits_in_the_settings_of_a_run_has_a_place_among_the_others() -> None:
    assert sorted([10**400, 0.5, "x", 1], key=_rank) == [0.5, 1, 10**400, "x"]


def test_a_secret_among_swept_settings_is_in_no_table_and_no_label() -> None:
    secret = "sk-0123456789abcdef"
    settings = {"services.x.env.OPENAI_API_KEY": secret, "services.x.env": {"TOKEN": secret}, "services.t.lr": 0.1}
    assert Point(number=1, settings=settings).label.startswith("services.x.env.OPENAI_API_KEY=*** ")
    results = [PointResult(point=1, settings=settings, seed=None, state="finished")]
    shown = [Point(number=1, settings=settings).label, to_csv(results), to_csv(by_settings(results))]
    swept = Sweep(folder=Path(), asked=Asked(profile="p"), profile_path=Path(), table={}, points=[])
    shown += [json.dumps(document(swept, results)), _label(settings, None)]
    assert [text for text in shown if secret in text] == []
    assert all("0.1" in text for text in shown)
