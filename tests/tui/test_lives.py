"""What `resume` and `branch` do to run folders, and what they refuse: without processes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from grpo_engine.errors import CheckpointError, ConfigError
from grpo_engine.wire.checkpoints import CheckpointMarker, JournalHead
from grpo_engine.wire.run_folder import checkpoint_folder, journal_file
from grpo_engine.wire.start_queue import QueuedStart
from grpo_tui.client import gpu_leases, lives, second_run
from grpo_tui.client import resume as client_resume
from grpo_tui.client.gpu_leases import Crowd
from grpo_tui.client.launch import OpenedRun, make_folder
from grpo_tui.client.local import StartRefused
from grpo_tui.client.resume import branch_run, resume_run
from grpo_tui.client.start_queue import StartQueue
from grpo_tui.profile.loading import load
from grpo_tui.profile.plan_file import Plan
from grpo_tui.supervisor.keeper import ports
from grpo_tui.supervisor.lock import has_daemon, take_lock


class Supervisors:
    """Takes run folders to supervise and starts nothing: what a supervisor does is tested in `tests/system`."""

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this object
        self._end = weakref.finalize(self, self._file.close)
        self.host_lock = self._file.fileno()

    def release_host_lock(self) -> None:
        fcntl.flock(self.host_lock, fcntl.LOCK_UN)

    def supervise(self, folder: Path) -> bool:
        self.folders.append(folder)
        return True


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Below the folder of the shell, in which a run of tiny-cpu was killed in step 93 of 400."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(second_run, "run_folders_anywhere", set)  # runs and servers of other tests are none of ours
    for module in (second_run, ports):
        monkeypatch.setattr(module, "listening_sockets", lambda ports: [])
    logs = tmp_path / "logs"
    logs.mkdir()
    folder = make_folder(load("tiny-cpu", ["services.trainer.training_steps=400"]), logs, take_ports=False)
    for step in (50, 75, 90):
        saved = checkpoint_folder(folder / "checkpoints", step)
        saved.mkdir(parents=True)
        (saved / "model.safetensors").write_bytes(bytes(100))
        marker = CheckpointMarker(step=step, policy_version=step, model_name="local/tiny", bridge="shared_vllm")
        (saved / "checkpoint.json").write_text(marker.model_dump_json())
    (folder / "checkpoints" / "journal").mkdir()
    for step in (91, 92, 93):
        head = JournalHead(step=step, policy_version=step - 1, lease="a", settings={})
        journal_file(folder / "checkpoints", step).write_text(head.model_dump_json() + "\n[]\n")
    (folder / "rollouts.sqlite").write_text("groups")
    (folder / "env.items.json").write_text("{}")
    return logs


def run_of(logs: Path) -> Path:
    return min((path for path in logs.iterdir() if path.is_dir()), key=lambda path: path.stat().st_ctime)


def resume(logs: Path, *overrides: str, **options: str) -> OpenedRun:
    return resume_run("tiny-cpu", overrides, daemon=Supervisors(), logs=logs, **options)  # type: ignore[arg-type]


def branch(logs: Path, *overrides: str, **options: str) -> OpenedRun:
    return branch_run("tiny-cpu", overrides, daemon=Supervisors(), logs=logs, **options)  # type: ignore[arg-type]


def argument(folder: Path, flag: str, service: str = "trainer") -> str | None:
    """The value of a flag in the command line of a service, as the supervisor starts it."""
    (launch,) = [each for each in Plan.from_json((folder / "plan.json").read_text()).launches if each.name == service]
    return launch.argv[launch.argv.index(flag) + 1] if flag in launch.argv else None


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("step_"))


@pytest.mark.parametrize(("steps", "total"), [("+100", "193"), ("120", "120"), (None, "400")])
def test_a_run_gets_more_steps_or_so_many_in_all(logs: Path, steps: str | None, total: str) -> None:
    opened = resume(logs, **({} if steps is None else {"steps": steps}))
    assert argument(opened.folder, "--training-steps") == total
    assert opened.note == f"goes on from step_90, the batches of steps 91 to 93 from the journal, to step {total}"
    assert checkpoints(opened.folder / "checkpoints") == ["step_50", "step_75", "step_90"]
    assert (opened.folder / "rollouts.sqlite").exists()


def test_going_back_sets_everything_later_aside_and_notes_the_versions_that_it_used(logs: Path) -> None:
    folder = resume(logs, back_to="step_50").folder
    saved = folder / "checkpoints"
    assert checkpoints(saved) == ["step_50"]
    assert not (saved / "journal").exists()
    assert checkpoints(saved / "set-aside" / "1") == ["step_75", "step_90"]
    assert len(list((saved / "set-aside" / "1" / "journal").iterdir())) == 3
    assert (folder / "lives" / "1" / "rollouts.sqlite").read_text() == "groups"
    assert json.loads((saved / "used_versions.json").read_text()) == {"through": 93}  # of the weights after step 93
    resume(logs, back_to="50")
    assert json.loads((saved / "used_versions.json").read_text()) == {"through": 93}
    assert [path.name for path in sorted((folder / "lives").iterdir())] == ["1", "2"]


@pytest.mark.parametrize("step", ["new_life", "set_store_aside", "go_back", "write_files", "end_life", "supervise"])
def test_a_command_that_is_killed_at_any_step_leaves_a_run_that_can_be_resumed(
    logs: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_of(logs)
    (folder / "state.json").write_text("{}")
    (folder / "crash-trainer-1.txt").write_text("report")
    with monkeypatch.context() as killing:
        killing.setattr(Supervisors if step == "supervise" else client_resume, step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            resume(logs, back_to="step_75")
    opened = resume(logs, back_to="step_75")
    assert opened.note == "goes on from step_75, to step 400"
    assert checkpoints(folder / "checkpoints") == ["step_50", "step_75"]
    assert [path.name for path in folder.rglob("step_90")] == ["step_90"]
    assert len(list(folder.rglob("step_9?.jsonl"))) == 3
    assert json.loads((folder / "checkpoints" / "used_versions.json").read_text()) == {"through": 93}
    for kept in ("rollouts.sqlite", "crash-trainer-1.txt", "state.json"):
        assert [path.parent.parent.name for path in folder.rglob(kept)] == ["lives"]


def interrupt(*arguments: object, **options: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "place", ["trainer.log", "checkpoints/step_75", "checkpoints/journal", "keepers", "lives/1", ".plan.json.tmp"]
)
def test_a_run_with_a_link_out_of_it_where_it_writes_is_not_resumed_and_nothing_is_changed(
    logs: Path, place: str
) -> None:
    link, mine = run_of(logs) / place, logs.parent / "mine"
    mine.mkdir()
    link.parent.mkdir(exist_ok=True)
    if link.is_dir():
        shutil.rmtree(link)
    link.symlink_to(mine / "not-there-yet" if place == "trainer.log" else mine)
    before = [sorted(each.rglob("*")) for each in (run_of(logs), mine)]
    with pytest.raises(StartRefused, match=rf"{re.escape(str(link))} is a link to .*mine.*, outside of the run"):
        resume(logs, back_to="step_50")
    assert [sorted(each.rglob("*")) for each in (run_of(logs), mine)] == before


@pytest.mark.parametrize("place", ["checkpoints/journal", "supervisor.log", "daemon.lock"])
def test_a_run_with_a_pipe_or_a_folder_in_place_of_a_file_is_not_resumed(logs: Path, place: str) -> None:
    path = run_of(logs) / place
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.mkdir() if place in ("supervisor.log", "daemon.lock") else os.mkfifo(path)
    with pytest.raises(StartRefused, match=rf"{re.escape(str(path))} is no regular file"):
        resume(logs)


def test_links_that_a_run_makes_itself_do_not_prevent_its_resume(logs: Path) -> None:
    folder = run_of(logs)
    for name in ("handover", "wandb", "wandb/run-1"):
        (folder / name).mkdir()
    (folder / "handover" / "current").symlink_to(f"/dev/shm/grpo-{folder.name}-handover-1/version-000001")
    (folder / "wandb" / "latest-run").symlink_to("run-1")
    (folder / "wandb" / "run-1" / "debug-core.log").symlink_to(logs.parent / "core.log")
    (folder / "newest.log").symlink_to("trainer.log")
    assert resume(logs).is_resumed


def test_a_copy_of_the_folder_of_a_live_run_is_not_resumed_and_the_live_one_is_named(
    logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = run_of(logs)
    live = logs.parent / "other" / copied.name
    shutil.copytree(copied, live)
    monkeypatch.setattr(second_run, "run_folders_anywhere", lambda: {live, copied})
    assert resume(logs).is_resumed  # while none is live
    lock = take_lock(live)
    assert lock is not None
    before = sorted(copied.rglob("*"))
    with pytest.raises(StartRefused, match=rf"is live in {re.escape(str(live))}.*rename this folder.*grpo-tui branch"):
        resume(logs)
    assert sorted(copied.rglob("*")) == before
    os.close(lock)


def test_a_folder_that_was_unpacked_with_open_modes_is_closed_and_has_a_new_token_when_it_is_resumed(
    logs: Path,
) -> None:
    folder, elsewhere = run_of(logs), logs.parent / "elsewhere"
    elsewhere.touch(mode=0o644)
    (folder / "access.token").write_text("known before\n")
    (folder / "wandb").mkdir()
    (folder / "wandb" / "core.log").symlink_to(elsewhere)
    (folder / "lives" / "\u00b2").mkdir(parents=True)  # a digit that is no number
    (folder / "handover").mkdir(exist_ok=True)
    locks = [folder / name for name in ("daemon.lock", "handover/turn.lock", ".checkpoints.lock")]
    for path in locks:
        path.touch()
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
    with ExitStack() as opened:
        for path in locks:
            fcntl.flock(opened.enter_context(path.open()), fcntl.LOCK_EX)  # as another user could
        resume(logs)
        assert take_lock(folder) is not None
        assert not any(path.exists() for path in locks[1:])  # a trainer or a server would wait for them, or end
    modes = {path.lstat().st_mode & 0o777 for path in (folder, *folder.rglob("*")) if not path.is_symlink()}
    assert modes == {0o700, 0o600}
    assert elsewhere.stat().st_mode & 0o777 == 0o644
    assert len((folder / "access.token").read_text()) > 40


def test_a_lock_file_that_others_can_open_is_closed_when_it_is_taken(tmp_path: Path) -> None:
    (tmp_path / "daemon.lock").touch(mode=0o644)
    descriptor = take_lock(tmp_path)
    assert descriptor is not None
    assert has_daemon(tmp_path)
    os.close(descriptor)


def test_overrides_last_and_reach_every_service_that_needs_them(logs: Path) -> None:
    resume(logs, "services.api.port=8123", "services.trainer.lr=2e-6")
    folder = resume(logs).folder
    assert (argument(folder, "--port", "api"), argument(folder, "--lr")) == ("8123", "2e-06")
    assert argument(folder, "--rollout-server-url", "env") == "http://127.0.0.1:8123"


def test_settings_for_the_first_start_alone_are_left_out_and_a_schedule_that_changes_is_said(logs: Path) -> None:
    first = ["services.trainer.resume=false", "services.api.fresh=true", "services.trainer.lr_schedule=cosine"]
    started = make_folder(load("tiny-cpu", first), logs, take_ports=False)
    shutil.copytree(run_of(logs) / "checkpoints", started / "checkpoints")
    assert "--no-resume" in (started / "plan.json").read_text()
    opened = resume_run(started.name, daemon=Supervisors(), steps="+10", logs=logs)  # type: ignore[arg-type]
    commands = (opened.folder / "plan.json").read_text()
    assert "--no-resume" not in commands
    assert "--fresh" not in commands
    assert opened.note is not None
    assert opened.note.endswith("to step 103; lr_schedule 'cosine' over 103 steps, not 150, changes lr")


def test_a_branch_is_a_run_of_its_own_that_begins_at_a_checkpoint_of_its_parent(logs: Path) -> None:
    parent = run_of(logs)
    resume(logs, "services.trainer.save_path=elsewhere")  # relative to the folder of the shell
    (parent / "checkpoints").rename(logs.parent / "elsewhere")
    before = {path: path.stat().st_mtime_ns for path in parent.rglob("*")}
    folder = branch(logs, "services.trainer.lr=2e-6", back_to="step_75").folder
    assert {path: path.stat().st_mtime_ns for path in parent.rglob("*")} == before
    assert folder.parent == logs
    assert json.loads((folder / "parent.json").read_text()) == {"run": parent.name, "step": 75}
    assert (argument(folder, "--lr"), argument(folder, "--save-path")) == ("2e-06", None)
    assert checkpoints(folder / "checkpoints") == ["step_75"]
    assert not (folder / "rollouts.sqlite").exists()
    assert (folder / "env.items.json").exists()
    assert (folder / "access.token").read_text() != (parent / "access.token").read_text()


@pytest.mark.parametrize(("steps", "total"), [("+30", "105"), ("80", "80")])
def test_a_branch_gets_more_steps_than_its_checkpoint_has_or_so_many_in_all(logs: Path, steps: str, total: str) -> None:
    opened = branch(logs, back_to="step_75", steps=steps)
    assert argument(opened.folder, "--training-steps") == total
    assert f"to step {total}" in (opened.note or "")


def test_a_branch_of_a_live_run_gets_free_ports_in_every_service(logs: Path) -> None:
    lock = take_lock(run_of(logs))
    assert lock is not None
    opened = branch(logs, back_to="step_75")
    os.close(lock)
    assert "ports in use were replaced: 8000 → 8010, 9001 → 9011" in (opened.note or "")
    assert argument(opened.folder, "--port", "vllm") == "9011"
    assert argument(opened.folder, "--vllm-port") == "9011"
    assert (argument(opened.folder, "--atropos-url") or "").endswith(":8010")


@pytest.mark.parametrize(
    ("overrides", "options", "said"),
    [
        (
            [],
            {"back_to": "step_60"},
            r"--from step_60: .* are: step_50, step_75, step_90 \(written every 50 steps, the newest 3 kept",
        ),
        ([], {"steps": "90"}, r"has done 90 of 90 steps: --steps \+N adds some, --from step_N goes back"),
        ([], {"steps": "-1"}, r"--steps -1: write a number of steps, or \+N for so many more"),
        (
            ["services.trainer.optimizer=adafactor", "services.trainer.train_layer_indices=0-1"],
            {},
            r"services.trainer: cannot change .*: optimizer 'adamw' → 'adafactor', train_layer_indices None → '0-1'",
        ),
        (
            ["model.name=local/llama-1b-random"],
            {},
            r"goes on: model_name 'local/tiny' → 'local/llama-1b-random'",
        ),
        (["bridge.mode=lora_only"], {}, r"trains 'the model' → 'an adapter'"),
        (["services.trainer.lrr=1"], {}, r"--set services.trainer.lrr=1: unknown setting \(did you mean 'lr'\?\)"),
    ],
)
def test_what_cannot_be_resumed_is_refused_by_name_and_changes_nothing(
    logs: Path, overrides: list[str], options: dict[str, str], said: str
) -> None:
    folder = run_of(logs)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(ConfigError, match=said):
        resume(logs, *overrides, **options)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_branch_is_refused_without_steps_left_or_with_a_place_that_has_checkpoints(logs: Path) -> None:
    folder = run_of(logs)
    with pytest.raises(
        ConfigError, match=r"step_90 is the last of 90 steps: .*--steps \+N \(services.trainer.training_steps"
    ):
        branch(logs, "services.trainer.training_steps=90", back_to="step_90")
    with pytest.raises(ConfigError, match="has checkpoints of another run: choose another save_path"):
        branch(logs, f"services.trainer.save_path={folder}/checkpoints", back_to="step_90")
    assert [path for path in logs.iterdir() if path.is_dir()] == [folder]


def test_a_branch_that_failed_is_repeated_and_leaves_no_part_of_a_checkpoint(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = f"services.trainer.save_path={tmp_path}/own"
    with monkeypatch.context() as full:
        full.setattr(lives, "_link_or_copy", fail_on("model.safetensors"))
        with pytest.raises(CheckpointError, match=r"step_75: cannot be copied to .*own: .*No space left"):
            branch(logs, own, back_to="step_75")
    assert list((tmp_path / "own").iterdir()) == []
    assert [path.name for path in logs.iterdir() if path.is_dir()] == [run_of(logs).name]
    (tmp_path / "own" / ".step_75.partial").mkdir()  # the command was killed
    branch(logs, own, back_to="step_75")
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["step_75"]


def fail_on(name: str) -> Callable[[str, str], None]:
    def copy(source: str, target: str) -> None:
        if source.endswith(name):
            raise OSError(errno.ENOSPC, "No space left on device")
        shutil.copy(source, target)

    return copy


def test_a_branch_begins_where_the_environments_of_its_parent_were_also_with_a_state_file(logs: Path) -> None:
    elsewhere = logs.parent / "elsewhere.json"
    elsewhere.write_text('{"next": 7}')
    resume(logs, f"services.env.state_file={elsewhere}")
    folder = branch(logs, back_to="step_75").folder
    assert (folder / "env.items.json").read_text() == '{"next": 7}'


@pytest.mark.parametrize("settings", ["{}", "[]", "3", '{"services": 3}', '{"services": {}}', '{"services": {"a": 3}}'])
def test_settings_that_are_damaged_are_refused_by_name(logs: Path, settings: str) -> None:
    (run_of(logs) / "settings.json").write_text(settings)
    with pytest.raises(ConfigError):
        resume(logs)
    with pytest.raises(ConfigError):
        branch(logs, back_to="step_75")


def test_settings_of_more_values_than_any_run_has_are_refused_before_they_are_judged(
    logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_engine.config.MAX_VALUES", 10)
    with pytest.raises(ConfigError, match=r"settings\.json: more than 10 names and values.* may have an earlier one"):
        resume(logs)


@pytest.mark.parametrize(
    "damaged",
    ["checkpoints/step_90/checkpoint.json", "checkpoints/journal/step_93.jsonl", "checkpoints/used_versions.json"],
)
def test_what_is_damaged_stops_a_way_back_before_anything_moves(logs: Path, damaged: str) -> None:
    folder = run_of(logs)
    (folder / damaged).write_text("")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(CheckpointError, match=f"{damaged}: damaged"):
        resume(logs, back_to="step_50")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_what_another_run_has_set_aside_among_the_same_checkpoints_stays(logs: Path) -> None:
    saved = run_of(logs) / "checkpoints"
    (saved / "set-aside" / "1" / "journal").mkdir(parents=True)
    (saved / "set-aside" / "1" / "journal" / "step_3.jsonl").write_text("of another")
    resume(logs, back_to="step_75")
    assert checkpoints(saved / "set-aside" / "1.2") == ["step_90"]
    assert [path.name for path in (saved / "set-aside" / "1" / "journal").iterdir()] == ["step_3.jsonl"]


def test_a_run_is_not_resumed_on_the_ports_or_gpus_of_a_live_one(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_of(logs)
    other = make_folder(load("tiny-cpu"), logs, take_ports=False)
    lock = take_lock(other)
    assert lock is not None

    def resumed(*overrides: str, **options: bool) -> OpenedRun:
        return resume_run(folder.name, overrides, daemon=Supervisors(), logs=logs, **options)  # type: ignore[arg-type]

    with pytest.raises(
        StartRefused, match=f"port 8000 is that of api of run {other.name}, which is live\n(.|\n)*--set"
    ):
        resumed()
    own_ports = ["services.api.port=8100", "services.vllm.port=9100"]
    monkeypatch.setattr(gpu_leases, "crowded_gpus", lambda *_: [Crowd(words="GPU 0 is used by run a")])
    with pytest.raises(StartRefused, match="GPU 0 is used by run a\n--share-gpus starts this run beside it"):
        resumed(*own_ports)
    with StartQueue(print) as queue:
        queue.join(QueuedStart(pid=7, profile="p", since=0.0, ports=[9100]))
        with pytest.raises(
            StartRefused, match=r"the start of p \(pid 7\) came first and waits for port 9100\n.*`grpo-tui"
        ):
            resumed(*own_ports, shares_gpus=True)
    assert not (folder / "lives").exists()
    opened = resumed(*own_ports, shares_gpus=True)
    os.close(lock)
    assert (opened.note or "").endswith("to step 400\nGPU 0 is used by run a")
