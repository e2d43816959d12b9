"""Settings of any service: cores, priority, environment, stop signal and memory limit, observed in its process."""

from __future__ import annotations

import json
import os
import pickle
import re
import stat as modes
import subprocess
import sys
from pathlib import Path

import pytest
from stage import Stage, python, until
from workplace import IDLE, UP, Workplace, service

from grpo_engine.errors import ConfigError
from grpo_engine.wire.environment_variables import SERVICE_VARIABLE
from grpo_tui.profile.loading import load
from grpo_tui.profile.plan import make_plan
from grpo_tui.services.base import read_env_file
from grpo_tui.supervisor.usage.cpu_memory import MemoryLimits, UsageReader

WRITES_ENVIRONMENT = """
import json, os, sys
with open(sys.argv[1], "w") as file: json.dump({name: os.environ.get(name) for name in sys.argv[2:]}, file)
"""
SHOW_STATUS = "import os; print('cores', sorted(os.sched_getaffinity(0)), 'nice', os.nice(0), flush=True)"
AUTOGROUP = Path("/proc/self/autogroup")
GROWS = """
import signal, sys
held = bytearray(b"1") * int(sys.argv[1])
print("grown", flush=True)
signal.pause()
"""
SHARES = """
import os, signal, sys
held = bytearray(b"1") * int(sys.argv[1])
for _ in range(4):
    if os.fork() == 0: signal.pause()
print("grown", flush=True)
signal.pause()
"""
"""Five processes that share memory, as the workers of a data loader do."""
PRINTS_SIGNAL = """
import signal, sys
def print_and_exit(number, _):
    print("got", signal.Signals(number).name, flush=True)
    sys.exit(0)
for name in ("SIGTERM", "SIGINT", "SIGUSR2"): signal.signal(getattr(signal, name), print_and_exit)
print("up", flush=True)
while True: signal.pause()
"""
UNPRIVILEGED = """
import asyncio, ctypes, pickle, sys
from pathlib import Path
from grpo_tui.supervisor.keeper.client import start_keeper
PR_CAPBSET_DROP, CAP_SYS_NICE = 24, 23
ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_NICE, 0, 0, 0)
async def main():
    launch = pickle.loads(sys.stdin.buffer.read())
    keeper = await start_keeper(launch, run=sys.argv[2], attempt=1, run_folder=Path(sys.argv[1]))
    print((await keeper.exited()).error)
asyncio.run(main())
"""
"""Starts a service without the privilege to raise priorities, even as root."""


def profile(folder: Path, settings: str) -> Path:
    """A profile with one service `a`."""
    path = folder / "p.toml"
    path.write_text(f'[services.a]\nkind = "command"\nargv = ["true"]\n{settings}\n')
    return path


def contents(pid: int | None, name: str) -> str:
    """A file of a process."""
    return Path(f"/proc/{pid}/{name}").read_text()


def planned_env(folder: Path, settings: str) -> dict[str, str]:
    """The variables that a service with these settings gets."""
    loaded = load(str(profile(folder, settings)))
    (launch,) = make_plan(loaded, run_folder=folder / "run", python=sys.executable).launches
    return dict(launch.env)


# --- cores and priority ----------------------------------------------------------------------------------------------


async def test_a_service_and_its_children_run_on_its_cores_at_its_priority(stage: Stage) -> None:
    core = max(os.sched_getaffinity(0))
    starts_child = f"import subprocess; subprocess.run({python(SHOW_STATUS)!r}); import signal; signal.pause()"
    keeper = await stage.start(*python(starts_child, stage.token), cpus=(core,), nice=7)
    await stage.says(f"cores [{core}] nice 7")
    assert keeper.main_pid is not None
    assert os.sched_getaffinity(keeper.main_pid) == {core}
    assert os.getpriority(os.PRIO_PROCESS, keeper.main_pid) == 7
    assert os.sched_getaffinity(keeper.identity.pid) == os.sched_getaffinity(0)
    assert os.getpriority(os.PRIO_PROCESS, keeper.identity.pid) == os.getpriority(os.PRIO_PROCESS, 0)
    keeper.kill()
    await keeper.exited()


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel has no autogroups")
async def test_a_priority_is_that_of_the_autogroup_too(stage: Stage) -> None:
    keeper = await stage.start(*python(IDLE, stage.token), nice=7)
    assert contents(keeper.main_pid, "autogroup").endswith(" nice 7\n")
    keeper.kill()
    await keeper.exited()


async def test_a_service_without_settings_has_the_cores_and_the_priority_of_its_supervisor(stage: Stage) -> None:
    keeper = await stage.start(*python(SHOW_STATUS, stage.token))
    await keeper.exited()
    assert f"cores {sorted(os.sched_getaffinity(0))} nice {os.nice(0)}" in stage.log().splitlines()


@pytest.mark.parametrize("others", [(), (0,)], ids=["none exists", "one exists"])
async def test_a_core_that_does_not_exist_fails_the_start(stage: Stage, others: tuple[int, ...]) -> None:
    keeper = await stage.start(*python(SHOW_STATUS, stage.token), cpus=(*others, 8000))
    report = await keeper.exited()
    assert report.code == 126
    assert report.error is not None
    assert re.fullmatch(r"cannot run on cores \[8000\]: available are 0[\d,-]*; correct `cpus`", report.error)
    assert f"grpo-tui: {report.error}" in stage.log()
    assert keeper.main_pid is None


def test_a_priority_without_the_privilege_fails_the_start(stage: Stage) -> None:
    launch = stage.launch(*python(IDLE, stage.token), nice=-5)
    done = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED, str(stage.folder), stage.run],
        input=pickle.dumps(launch),
        capture_output=True,
        timeout=60,
        check=True,
    )
    why = f"Permission denied, the supervisor has {os.nice(0)}"
    words = f"cannot run at nice -5: {why}; correct `nice`, or raise `ulimit -e`"
    assert done.stdout.decode().strip() == words


# --- the environment -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_values_of_env_files_reach_the_service_and_are_in_no_readable_file_or_shown_plan(place: Workplace) -> None:
    names, written = ("FIRST", "LATER", "OWN", "SPACED", "BARE"), place.folder / "environment"
    files = {"env_files": ["one.env", "more/two.env"], "env": "{ OWN = 'mine' }"}
    place.profile(service("a", WRITES_ENVIRONMENT, written, *names, **files))
    folder = place.folder / "profiles"
    (folder / "more").mkdir()
    (folder / "one.env").write_text("# 1\nexport FIRST=pa$s${HOME}w#rd\nLATER=one-s3cret\nOWN=not-mine\n\nBARE\n")
    (folder / "more/two.env").write_text("LATER='two s3cret' # later wins\nSPACED=\"a\\nb\"\n")
    place.succeed("up", "--profile", "p", "--wait", "finished")
    assert json.loads(written.read_text()) == {
        "FIRST": "pa$s${HOME}w#rd", "LATER": "two s3cret", "OWN": "mine", "SPACED": "a\nb", "BARE": None,
    }  # fmt: skip
    kept = [path for path in place.run_folder().rglob("*") if path.is_file()]
    holders = [path for path in kept if b"s3cret" in path.read_bytes()]
    assert [(path.name, modes.S_IMODE(path.stat().st_mode)) for path in holders] == [("plan.json", 0o600)]
    shown = place.grpo("plan", "--profile", "p", "--json").stdout
    (described,) = json.loads(shown)["services"]
    assert described["env"] == {"FIRST": "***", "LATER": "***", "OWN": "mine", "SPACED": "***"}
    assert "s3cret" not in shown
    assert "s3cret" not in place.grpo("plan", "--profile", "p").stdout


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, r"/a\.env: cannot be read: No such file or directory; correct the path"),
        (b"A=1\n\n\nB='open\n", r"/a\.env, line 4: not a NAME=value line; correct it, or put a # before it"),
        (b"A=1\nB=x\0y\n", r"/a\.env, line 2: a NUL character, which no variable can hold: take it out"),
        (b"A=\xff\n", r"/a\.env: not UTF-8 text: invalid start byte at byte 2"),
    ],
    ids=["missing", "an open quote", "a NUL character", "not text"],
)
def test_an_env_file_that_cannot_be_read_is_an_error_without_its_content(
    tmp_path: Path, content: bytes | None, fault: str
) -> None:
    if content is not None:
        (tmp_path / "a.env").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^services\.a\.env_files: {tmp_path}{fault}$"):
        planned_env(tmp_path, 'env_files = ["a.env"]')


def test_a_pipe_or_a_file_without_end_in_place_of_an_env_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.env")  # held `plan` without end, and /dev/zero filled its memory
    (tmp_path / "b.env").touch()
    os.truncate(tmp_path / "b.env", 1 << 40)
    for name, why in (("a.env", "not a regular file"), ("b.env", "longer than 1,048,576 bytes")):
        with pytest.raises(ConfigError, match=rf"{name}: cannot be read: {why}; correct the path"):
            planned_env(tmp_path, f'env_files = ["{name}"]')


def test_a_byte_order_mark_and_carriage_returns_are_not_part_of_a_name_or_value(tmp_path: Path) -> None:
    (tmp_path / "a.env").write_bytes(b"\xef\xbb\xbfA=1\r\nB=\r\n")
    assert read_env_file(tmp_path / "a.env", where="here") == {"A": "1", "B": ""}


@pytest.mark.parametrize(
    ("settings", "devices", "order"),
    [
        ("gpus = [3, 1]", "3,1", "PCI_BUS_ID"),
        ("gpus = []", "", "PCI_BUS_ID"),
        ('gpus = [0]\nenv = { CUDA_DEVICE_ORDER = "FASTEST_FIRST" }', "0", "FASTEST_FIRST"),
        ('gpus = [0]\nenv_files = ["a.env"]', "0", "FASTEST_FIRST"),
        ("", None, None),
    ],
)
def test_gpus_have_the_numbers_of_nvidia_smi_unless_the_profile_sets_another_order(
    tmp_path: Path, settings: str, devices: str | None, order: str | None
) -> None:
    (tmp_path / "a.env").write_text("CUDA_DEVICE_ORDER=FASTEST_FIRST\nCUDA_VISIBLE_DEVICES=7\n")
    env = planned_env(tmp_path, settings)
    assert (env.get("CUDA_VISIBLE_DEVICES"), env.get("CUDA_DEVICE_ORDER")) == (devices, order)


# --- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("SIGINT", marks=pytest.mark.extended("SIGUSR2 here")), "SIGUSR2"])
def test_a_service_is_stopped_with_its_stop_signal(place: Workplace, name: str) -> None:
    place.up(service("a", PRINTS_SIGNAL, stop_signal=json.dumps(name), ready=UP))
    assert place.grpo("stop", "a", "--wait").returncode == 0
    assert place.log("a").splitlines()[-1] == f"got {name}"


# --- memory ----------------------------------------------------------------------------------------------------------


async def test_a_memory_limit_is_reported_once_in_each_attempt(stage: Stage) -> None:
    reported: list[tuple[str, int]] = []
    limits = MemoryLimits({"a": 60_000_000}, lambda *over: reported.append(over))
    for attempt in (1, 2):
        (stage.folder / "a.log").unlink(missing_ok=True)
        keeper = await stage.start(*python(GROWS, 100_000_000, stage.token), attempt=attempt)
        await stage.says("grown")
        for _ in range(3):
            usage = UsageReader().sample({"a": keeper.identity.pid})
            await limits.check(usage, {"a": keeper.identity.pid})
        keeper.kill()
        await keeper.exited()
        assert [service for service, _ in reported] == ["a"] * attempt
    assert all(100_000_000 < held_bytes < 130_000_000 for _, held_bytes in reported)


async def test_shared_memory_of_a_service_counts_once(stage: Stage) -> None:
    reported: list[tuple[str, int]] = []
    keeper = await stage.start(*python(SHARES, 100_000_000, stage.token))
    await stage.says("grown")
    keepers = {"a": keeper.identity.pid}
    await until(lambda: len(UsageReader().sample(keepers)["a"].processes) == 5)
    usage = UsageReader().sample(keepers)
    await MemoryLimits({"a": 200_000_000}, lambda *over: reported.append(over)).check(usage, keepers)
    assert usage["a"].rss_bytes > 500_000_000
    assert reported == []
    await MemoryLimits({"a": 90_000_000}, lambda *over: reported.append(over)).check(usage, keepers)
    [(_, held_bytes)] = reported
    assert 100_000_000 < held_bytes < 150_000_000
    keeper.kill()
    await keeper.exited()


async def test_what_a_private_cluster_has_started_for_other_services_is_not_counted_as_its_own(stage: Stage) -> None:
    gate = stage.folder / "gate"
    os.mkfifo(gate)
    started = f'(read _ < {gate}; exec env {SERVICE_VARIABLE}=vllm sh -c "env -i sleep 99 & wait") & wait'
    keeper = await stage.start("sh", "-c", started)
    keepers = {"ray": keeper.identity.pid}
    reader = UsageReader(placed={"vllm"})
    await until(lambda: len(reader.sample(keepers)["ray"].own) > 1)
    gate.write_text("\n")  # the mark is there from now on
    await until(lambda: len(reader.sample(keepers)["ray"].placed.get("vllm", ())) == 2)
    usage = reader.sample(keepers)["ray"]
    assert usage.pids == {keeper.main_pid}
    assert len(usage.processes) == 3
    assert UsageReader(placed={"ray", "vllm"}).sample(keepers)["ray"].placed == {}
    keeper.kill()
    await keeper.exited()


# --- invalid values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ("cpus = []", "services.a.cpus: tuple should have at least 1 item"),
        ("cpus = [-1]", "services.a.cpus.0: input should be greater than or equal to 0, but this is -1"),
        ("cpus = [1000000]", "services.a.cpus.0: input should be less than 8192, but this is 1000000"),
        ("nice = 20", "services.a.nice: input should be less than or equal to 19, but this is 20"),
        ("memory_limit_gb = 0", "services.a.memory_limit_gb: input should be greater than 0, but this is 0"),
        ('stop_signal = "TERM"', "services.a: stop_signal 'TERM' is not a signal: write it as in SIGTERM or SIGINT"),
        ("gpus = [-1]", "services.a.gpus.0: input should be greater than or equal to 0, but this is -1"),
        ("gpus = [1, 1]", "services.a: gpus = [1, 1] names a GPU twice: name each once"),
        (
            'gpus = [1]\nenv = { CUDA_VISIBLE_DEVICES = "0" }',
            "services.a: gpus = [1] and env.CUDA_VISIBLE_DEVICES = '0' contradict each other: keep one of them",
        ),
    ],
)
def test_an_invalid_value_is_refused(tmp_path: Path, settings: str, fault: str) -> None:
    path = profile(tmp_path, settings)
    with pytest.raises(ConfigError) as refused:
        load(str(path))
    assert str(refused.value).startswith(f"{path}: {fault}")


def test_what_the_machine_lacks_is_refused_by_plan_up_and_doctor_alike(place: Workplace) -> None:
    place.profile('[services.env]\nkind = "environment"\nmodel_name = "local/tiny"\ntask = "jsonl:none.jsonl"\n')
    words = f"services.env.task.path: {place.folder / 'profiles' / 'none.jsonl'} cannot be read: No such file"
    planned = place.grpo("plan", "--profile", "p")
    assert (planned.returncode, planned.stdout.startswith("p")) == (2, True), "the plan is printed all the same"
    started = place.grpo("up", "--profile", "p")
    assert (started.returncode, started.stdout) == (2, "")
    for done in (planned, started):
        assert done.stderr.startswith(f"{Path('profiles') / 'p.toml'}: {words}")
        assert len(done.stderr.splitlines()) == 1
    assert not [path for path in (place.folder / "logs").iterdir() if path.is_dir()]
    examined = place.grpo("doctor", "--profile", "p")
    assert examined.returncode == 1
    assert words in examined.stdout
