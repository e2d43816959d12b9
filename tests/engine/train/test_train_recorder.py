"""The recorder on disks that refuse: none ends a run, and a run that could keep no records does not start."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from grpo_engine.errors import CheckpointError, ConfigError
from grpo_engine.serving.reporting import Reporter
from grpo_engine.train.checkpointing.checkpoints import locked, move_away, require_folder
from grpo_engine.train.checkpointing.journal import Journal
from grpo_engine.train.recording.recorder import Recorder
from grpo_engine.wire.metrics import RolloutLine


@contextmanager
def no_file_beyond(num_bytes: int) -> Iterator[None]:
    """As on a full disk: files grow up to so many bytes, and the last write to them may be taken in half."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("capsys")  # pytest's own file is as full
def test_records_that_a_full_disk_refused_are_written_once_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = Reporter()
    with Recorder(tmp_path, total_steps=4, show_times=False, reporter=reporter) as recorder:
        recorder.step(1, 1, {"reward/mean": 0.5})
        with no_file_beyond((tmp_path / "metrics.jsonl").stat().st_size + 10):
            recorder.step(2, 2, {"reward/mean": 0.5})
            recorder.step(3, 3, {"reward/mean": 0.5})
            [fault] = reporter.report().write_faults
            assert (Path(fault.path).name, fault.error) == ("metrics.jsonl", "File too large")
        recorder.step(4, 4, {"reward/mean": 0.5})
        assert reporter.report().write_faults == []
    assert steps_in(tmp_path) == [1, 2, 3, 4]
    assert caplog.text.count("metrics.jsonl: not writable: File too large") == 1


def test_a_file_that_is_deleted_during_a_run_is_created_again_with_the_next_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Recorder(folder, total_steps=4, show_times=False) as recorder:
        recorder.step(1, 1, {"reward/mean": 0.5})
        shutil.rmtree(folder)
        recorder.step(2, 2, {"reward/mean": 0.5})
        folder.mkdir()
        recorder.step(3, 3, {"reward/mean": 0.5})
    assert steps_in(folder) == [2, 3]


def test_records_that_were_never_written_are_reported_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with Recorder(tmp_path, total_steps=1, show_times=False) as recorder:
        recorder.step(1, 1, {"reward/mean": 0.5})
    assert "metrics.jsonl: not writable: No space left on device" in caplog.text
    assert "bytes are lost" in caplog.text


@pytest.mark.parametrize(
    ("outlet", "has_stderr"), [("full", True), ("closed", False)], ids=["stdout is full", "both have no reader"]
)
def test_a_console_that_cannot_be_written_neither_ends_nor_holds_a_trainer(
    tmp_path: Path, outlet: str, has_stderr: bool
) -> None:
    """A progress bar of tqdm, whose first line raised within its lock, waited for that lock without end."""
    code = f"""
import sys
from pathlib import Path
from tqdm.auto import tqdm
from grpo_engine import cli
from grpo_engine.train.recording.recorder import Recorder

def train(argv):
    with Recorder(Path({str(tmp_path)!r}), total_steps=2, show_times=False) as recorder:
        for step in (1, 2):
            recorder.step(step, step, {{}})
            list(tqdm([step], disable=False))
            print("done", file=sys.stderr)
    return 0

cli.COMMANDS["train"] = train
raise SystemExit(cli.main())
"""
    if outlet == "full":
        stdout = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, stdout = os.pipe()
        os.close(reader)
    command = [sys.executable, "-c", code, "train"]
    done = subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE if has_stderr else stdout, text=True, timeout=60
    )
    os.close(stdout)
    assert done.returncode == 0
    assert steps_in(tmp_path) == [1, 2]
    if has_stderr:
        assert done.stderr.count("done") == 2
        assert done.stderr.count("stdout is not writable") == 1


def test_a_run_folder_that_cannot_be_created_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"file/run: not writable: Not a directory; choose another --run-folder"):
        Recorder(tmp_path / "file" / "run", total_steps=1, show_times=False)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: not writable: Is a directory"):
        Recorder(tmp_path / "run", total_steps=1, show_times=False)


def test_lines_that_no_recorder_wrote_are_kept_and_a_cut_off_one_is_dropped(tmp_path: Path) -> None:
    foreign = b'\xff\xfe\n{"step": 1e999}\n[1]\n{"step": "x"}\n{}\n'
    (tmp_path / "metrics.jsonl").write_bytes(foreign + b'{"step":1}\n{"step":2}\n{"st')
    with Recorder(tmp_path, total_steps=1, show_times=False) as recorder:
        recorder.resume_after(1)
        assert recorder.has(1)
        assert not recorder.has(2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == foreign + b'{"step":1}\n'
    assert (tmp_path / "metrics-set-aside.jsonl").read_bytes() == b'{"step":2}\n'


def test_a_bounded_file_of_groups_is_thinned_out_where_it_is_old(tmp_path: Path) -> None:
    def line(step: int, part: int) -> RolloutLine:
        return RolloutLine(time=float(step), step=step, environment="sort6", prompt=str(part) * 400, completions=[])

    with Recorder(tmp_path, total_steps=90, show_times=False, max_rollout_bytes=20_000) as recorder:
        for step in range(1, 91):
            recorder.rollouts([line(step, 0), line(step, 1)])
    written = (tmp_path / "rollouts.jsonl").read_bytes()
    steps = [json.loads(text)["step"] for text in written.splitlines()]
    assert 5_000 < len(written) <= 20_000
    assert steps[::2] == steps[1::2] == sorted(set(steps))  # of a step both groups or none
    assert steps[-4:] == [89, 89, 90, 90]
    assert steps[2] - steps[0] > steps[-1] - steps[-3] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "rollouts.jsonl"]


def test_a_file_that_cannot_be_thinned_out_keeps_growing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / f".rollouts.jsonl.{os.getpid()}.tmp").mkdir()
    line = RolloutLine(time=1.0, step=1, environment=None, prompt="p" * 400, completions=[])
    with Recorder(tmp_path, total_steps=9, show_times=False, max_rollout_bytes=1000) as recorder:
        for _ in range(4):
            recorder.rollouts([line])
    assert len((tmp_path / "rollouts.jsonl").read_bytes().splitlines()) == 4
    assert caplog.text.count("rollouts.jsonl: not thinned out: Is a directory; the file keeps growing") == 1


def test_a_journal_removes_what_it_wrote_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    (folder / "kept").mkdir(parents=True)
    for name in ("notes.txt", "step_1.jsonl", "step_2.jsonl", ".step_2.jsonl.77.tmp"):
        (folder / name).touch()
    Journal(tmp_path).forget(through=1)
    assert sorted(path.name for path in folder.iterdir()) == ["kept", "notes.txt", "step_2.jsonl"]


def test_a_folder_that_cannot_be_moved_out_of_the_way_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mounted" / "step_1").mkdir(parents=True)

    def busy(source: Path, target: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), source)

    monkeypatch.setattr(Path, "rename", busy)
    with pytest.raises(CheckpointError, match=r"mounted: the earlier run's folder cannot be moved .*busy"):
        move_away(tmp_path / "mounted")


def test_a_second_trainer_on_the_same_save_path_is_refused_with_the_first_ones_process(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "checkpoints"),
        pytest.raises(CheckpointError, match=rf"another trainer uses it \(process {os.getpid()}\)"),
        locked(tmp_path / "checkpoints"),
    ):
        pass
    with locked(tmp_path / "checkpoints"):  # the first has ended
        pass


def test_a_save_path_that_cannot_be_created_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "deep"):
        with pytest.raises(CheckpointError, match=r"no checkpoints can be saved: .*; choose another --save-path"):
            require_folder(path)
    require_folder(tmp_path / "new" / "deep")
    assert (tmp_path / "new" / "deep").is_dir()
