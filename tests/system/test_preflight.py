"""Before a start: stale processes that hold GPU memory are killed, and foreign ones are named.

Holders are real processes with real environments. The card is a fake of the driver that does what matters here: it
lists processes with their memory, and frees the memory of one that has exited some readings later.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stage import HOLDER, Stage, free_ports, is_open, python, until

from grpo_engine.wire.supervisor import Refusal
from grpo_tui.supervisor import preflight, teardown
from grpo_tui.supervisor.keeper.owners import Owner
from grpo_tui.supervisor.keeper.proc import (
    Marker,
    Stat,
    all_processes,
    command_line,
    identify,
    uid_of,
    user_name,
)
from grpo_tui.supervisor.lock import take_lock
from grpo_tui.supervisor.preflight import free_resources, look_at_gpus
from grpo_tui.supervisor.usage.gpus import GpuReader

GB = 10**9
WAITING = "import signal\nsignal.pause()"
ORPHAN = {"GRPO_TUI_RUN": "tiny-1121", "GRPO_TUI_SERVICE": "vllm", "GRPO_TUI_RUN_FOLDER": "/no/more"}
INVISIBLE_PID = 2**22 + 1
"""Beyond what Linux gives to any process."""


class NvmlError(Exception):
    pass


class NoDriver(NvmlError):
    pass


@dataclass
class Card:
    """GPU 0 with 140 GB for programs, and the processes that hold some of it; GPU 1 is empty."""

    held: dict[int, int | None] = field(default_factory=dict)
    """By pid."""
    unlisted: int = 0
    """Held by no listed process."""
    lag: int = 0
    """Readings for which the driver keeps the memory of a process that has exited."""
    has_driver: bool = True
    answers: threading.Event = field(default_factory=threading.Event)
    num_readings: int = 0

    NVMLError: type[Exception] = NvmlError
    NVMLError_LibraryNotFound = NVMLError_DriverNotLoaded = NoDriver
    NVMLError_NotSupported = NVMLError_FunctionNotFound = NVMLError_NoPermission = NvmlError
    NVML_TEMPERATURE_GPU: int = 0
    NVML_DEVICE_MIG_ENABLE: int = 1
    nvmlMemory_v2: int = 2

    def __post_init__(self) -> None:
        self.answers.set()

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise NoDriver

    def nvmlDeviceGetCount(self) -> int:
        self.answers.wait()
        self.num_readings += 1
        gone = [pid for pid in self.held if pid < INVISIBLE_PID and identify(pid) is None]
        if (gone or self.unlisted) and self.lag == 0:
            self.held = {pid: share for pid, share in self.held.items() if pid not in gone}
            self.unlisted = 0
        elif gone or self.unlisted:
            self.lag -= 1
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return index

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any:
        used = self.unlisted + sum(share or 60 * GB for share in self.held.values()) if handle == 0 else 0
        return SimpleNamespace(used=used, free=140 * GB - used, total=141 * GB)

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        return SimpleNamespace(gpu=0)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        listed = self.held.items() if handle == 0 else ()
        return [SimpleNamespace(pid=pid, usedGpuMemory=share) for pid, share in listed]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> list[Any]:
        return []

    def not_supported(self, *_asked: Any) -> Any:
        raise NvmlError

    nvmlDeviceGetPowerUsage = nvmlDeviceGetEnforcedPowerLimit = nvmlDeviceGetTemperature = not_supported
    nvmlDeviceGetMigMode = nvmlDeviceGetMaxMigDeviceCount = not_supported
    nvmlDeviceGetMigDeviceHandleByIndex = nvmlDeviceGetGpuInstanceId = not_supported


@pytest.fixture(autouse=True)
def _short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teardown, "GPU_ROUND_S", 0.002)


@asynccontextmanager
async def process(
    stage: Stage, program: str = WAITING, *arguments: object, **marks: str
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A process that no keeper started; its environment can be read."""
    argv = python(program, *arguments, stage.token)
    started = subprocess.Popen(argv, env={**os.environ, **marks}, start_new_session=True)  # noqa: ASYNC220 - it is short
    try:
        await until(lambda: shows_environment(started.pid))
        yield started
    finally:
        started.kill()
        started.wait()


def shows_environment(pid: int) -> bool:
    """Whether the environment can be read, which for a moment after `exec` it cannot; or never again."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes() != b"" or identify(pid) is None
    except ProcessLookupError:
        return True


async def cleared(stage: Stage, card: Card, **changes: Any) -> tuple[str | None, list[str]]:
    """A pre-flight for a service `vllm` on GPU 0 that wants 45 % of it: why it cannot start, and what was reported."""
    lines: list[str] = []
    wanted = {"name": "vllm", "kind": "inference", "gpus": (0,), "gpu_memory_share": 0.45, **changes}
    launch = stage.launch("true", **wanted)
    reader = GpuReader(lambda: card)
    refusals = await free_resources(launch, run=stage.run, report=lines.append, gpu_reader=reader)
    return "; ".join(each.text for each in refusals) or None, lines


async def refused(stage: Stage, card: Card, **changes: Any) -> tuple[str, list[str]]:
    """A pre-flight after which the service cannot start: why, and what was reported."""
    refusal, lines = await cleared(stage, card, **changes)
    assert refusal is not None
    return refusal, lines


async def test_a_stale_process_is_killed_and_named_and_its_gpu_memory_awaited(stage: Stage) -> None:
    async with process(stage, **ORPHAN) as left:
        card = Card(held={left.pid: 66_100_000_000}, lag=3)
        refusal, [line] = await cleared(stage, card)
        assert refusal is None
        assert left.wait() == -9
        assert card.held == {}
        start = f"GPU 0: 66.1 GB held by pid {left.pid}, left by run tiny-1121 of this project: ended, freed after "
        assert line.startswith(start)


async def test_an_earlier_attempt_of_the_service_is_killed_and_another_service_of_the_run_is_not(stage: Stage) -> None:
    marks = {"GRPO_TUI_RUN": stage.run, "GRPO_TUI_RUN_FOLDER": str(stage.folder)}
    async with (
        process(stage, GRPO_TUI_SERVICE="vllm", **marks) as earlier,
        process(stage, GRPO_TUI_SERVICE="trainer", **marks) as trainer,
    ):
        refusal, [line] = await cleared(stage, Card(held={earlier.pid: 60 * GB, trainer.pid: 64 * GB}))
        assert refusal is None
        assert line.startswith(f"GPU 0: 60.0 GB held by pid {earlier.pid}, left by an earlier attempt: ended, ")
        assert trainer.poll() is None
        refusal, lines = await refused(stage, Card(held={trainer.pid: 90 * GB}))
        assert f"90.0 GB held by pid {trainer.pid}, service trainer of this run: " in refusal
        assert trainer.poll() is None
        assert lines == []


async def test_stale_processes_are_killed_even_if_the_memory_that_the_service_needs_is_unknown(stage: Stage) -> None:
    async with process(stage, **ORPHAN) as left, process(stage) as foreign:
        refusal, lines = await cleared(
            stage, Card(held={left.pid: GB, foreign.pid: 130 * GB}), name="trainer", gpu_memory_share=None
        )
        assert (refusal, len(lines)) == (None, 1)
        assert left.wait() == -9
        assert foreign.poll() is None


async def test_a_supervised_run_keeps_its_memory_and_the_refusal_says_how_to_end_it(stage: Stage) -> None:
    lock = take_lock(stage.folder)
    assert lock is not None
    marks = {"GRPO_TUI_RUN": "other", "GRPO_TUI_SERVICE": "vllm", "GRPO_TUI_RUN_FOLDER": str(stage.folder)}
    async with process(stage, **marks) as theirs:
        refusal, _ = await refused(stage, Card(held={theirs.pid: 100 * GB}))
        assert "service vllm of run other, which is still supervised (`grpo-tui down other` ends it)" in refusal
        assert theirs.poll() is None
        os.close(lock)
        refusal, _ = await cleared(stage, Card(held={theirs.pid: 100 * GB}))
        assert refusal is None
        assert theirs.wait() == -9


async def test_a_foreign_process_is_named_with_what_is_free_and_needed_and_what_to_do(stage: Stage) -> None:
    async with process(stage) as foreign:
        refusal, lines = await refused(stage, Card(held={foreign.pid: 100 * GB}))
        assert refusal.startswith(
            "GPU 0 has 40.0 GB free, and vllm needs 63.0 GB (45% of 140.0 GB); "
            f"100.0 GB held by pid {foreign.pid} (user {user_name(os.getuid())}): {sys.executable} -I -S -c "
        )
        assert stage.token in refusal
        assert refusal.endswith(
            f"; to do: end pid {foreign.pid}, "
            "or request less: `--set services.vllm.gpu_memory_utilization=0.28`, "
            "or use another GPU: `--set services.vllm.gpus=[…]`"
        )
        assert foreign.poll() is None
        assert lines == []


async def test_a_process_that_changed_its_title_is_shown_by_it(stage: Stage) -> None:
    setproctitle = pytest.importorskip("setproctitle")
    folder = str(Path(setproctitle.__file__).parents[1])
    program = "import sys; sys.path.append(sys.argv[1])\nimport setproctitle, signal\n" + (
        "setproctitle.setproctitle('VLLM::EngineCore'); signal.pause()"
    )
    async with process(stage, program, folder) as engine:
        await until(lambda: command_line(engine.pid).startswith("VLLM::"))
        refusal, _ = await refused(stage, Card(held={engine.pid: 100 * GB}))
        assert "): VLLM::EngineCore; to do: end pid" in refusal


async def test_the_refusal_names_the_setting_that_this_kind_of_service_has(stage: Stage) -> None:
    async with process(stage) as foreign:
        refusal, _ = await refused(stage, Card(held={foreign.pid: 100 * GB}), name="job", kind="command")
        assert "`--set services.job.gpu_memory_share=0.28`" in refusal


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
async def test_a_process_of_another_user_is_named_and_never_killed(stage: Stage) -> None:
    async with process(stage, "import os, signal; os.setuid(65534); signal.pause()", **ORPHAN) as theirs:
        await until(lambda: uid_of(theirs.pid) == 65534)
        refusal, lines = await refused(stage, Card(held={theirs.pid: 100 * GB}))
        assert f"pid {theirs.pid} (user {user_name(65534)}): " in refusal
        assert f"end pid {theirs.pid}" not in refusal
        assert theirs.poll() is None
        assert lines == []


async def test_a_process_in_another_container_is_named_by_its_pid(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "FREEING_LIMIT_S", 0.0)
    refusal, _ = await refused(stage, Card(held={INVISIBLE_PID: 100 * GB}))
    assert f"100.0 GB held by pid {INVISIBLE_PID}, which cannot be seen from here (in another container, " in refusal


async def test_memory_that_the_driver_does_not_report_is_unknown_and_not_0(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "FREEING_LIMIT_S", 0.0)
    async with process(stage) as first, process(stage) as second:
        refusal, _ = await refused(stage, Card(held={first.pid: None, second.pid: None}))
        assert f"an unknown amount held by pid {first.pid} " in refusal
        assert "0.0 GB held" not in refusal


async def test_memory_of_no_listed_process_is_awaited_and_named_if_it_stays(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal, [line] = await cleared(stage, Card(unlisted=100 * GB, lag=4))
    assert refusal is None
    assert re.fullmatch(r"vllm: waited [\d.]+ s until GPU memory was free", line)
    monkeypatch.setattr(preflight, "FREEING_LIMIT_S", 0.0)
    refusal, lines = await refused(stage, Card(unlisted=100 * GB, lag=1000))
    assert "; 100.0 GB held by no process that the driver lists here (in another container?); " in refusal
    assert lines == []


async def test_memory_that_would_not_suffice_if_it_became_free_is_not_awaited(stage: Stage) -> None:
    async with process(stage) as foreign:
        card = Card(held={foreign.pid: 100 * GB}, unlisted=20 * GB, lag=1000)
        await refused(stage, card)
        assert card.num_readings == 2


async def test_a_stale_process_that_hangs_in_the_kernel_is_named_and_its_memory_not_awaited(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with process(stage, **ORPHAN) as stuck:
        monkeypatch.setattr("grpo_tui.supervisor.keeper.proc.send_signal", lambda *_: None)  # as in a driver
        monkeypatch.setattr(teardown, "UNKILLABLE_AFTER_S", 0.0)
        monkeypatch.setattr(preflight, "FREEING_LIMIT_S", 1e9)
        refusal, [line] = await refused(stage, Card(held={stuck.pid: 100 * GB}))
        assert line.endswith("still alive after SIGKILL: it hangs in the kernel, often in a driver")
        assert f"100.0 GB held by pid {stuck.pid}, left by run tiny-1121 of this project: " in refusal


FORKS_AND_WAITS = "import os, signal; os.fork() or os._exit(0); signal.pause()"


@pytest.mark.parametrize("program", ["pass", FORKS_AND_WAITS], ids=["itself", "a child of a running one"])
async def test_an_exited_stale_process_that_still_holds_memory_is_named(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    def exited(parent: int) -> list[int]:
        return [each.pid for each in all_processes() if parent in (each.pid, each.parent) and each.is_dead]

    async with process(stage, program, **ORPHAN) as stale:  # the one that exited is not reaped
        await until(lambda: bool(exited(stale.pid)))
        monkeypatch.setattr(preflight, "FREEING_LIMIT_S", 0.0)
        [pid] = exited(stale.pid)
        refusal, lines = await refused(stage, Card(held={pid: 100 * GB}, lag=1000))
        assert f"100.0 GB held by pid {pid} (python" in refusal
        assert "), which has exited and hangs in the driver; to do: request less" in refusal
        assert lines == []


async def test_a_killed_process_that_keeps_its_memory_ends_the_wait(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teardown, "GPU_LIMIT_S", 1e9)
    monkeypatch.setattr(teardown, "UNKILLABLE_AFTER_S", 0.1)
    monkeypatch.setattr(preflight, "FREEING_LIMIT_S", 1e9)
    async with process(stage, **ORPHAN) as left:  # a zombie once it is killed, since it is not reaped
        refusal, [line] = await refused(stage, Card(held={left.pid: 100 * GB}, lag=1_000_000))
        assert "it hangs in the kernel" in line
        assert f"pid {left.pid} (python" in refusal


async def test_a_missing_or_hanging_driver_does_not_prevent_a_start(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await cleared(stage, Card(has_driver=False)) == (None, [])
    monkeypatch.setattr(preflight, "ANSWER_LIMIT_S", 0.02)
    hanging = Card(unlisted=140 * GB)
    hanging.answers.clear()
    assert await cleared(stage, hanging) == (None, [])
    hanging.answers.set()


@pytest.mark.parametrize(
    ("held", "changes", "num_readings"),
    [(77, {}, 2), (140, {"gpus": (1,)}, 2), (140, {"gpus": (), "gpu_memory_share": None}, 0)],
    ids=["enough memory is left", "on another GPU", "no GPU"],
)
async def test_a_process_that_is_not_in_the_way_is_neither_killed_nor_reported(
    stage: Stage, held: int, changes: dict[str, Any], num_readings: int
) -> None:
    async with process(stage, **({} if held == 77 else ORPHAN)) as other:
        card = Card(held={other.pid: held * GB})
        assert await cleared(stage, card, **changes) == (None, [])
        assert card.num_readings == num_readings
        assert other.poll() is None


async def test_ports_and_gpus_are_checked_and_refused_together(stage: Stage) -> None:
    [port] = free_ports(1)
    async with process(stage, HOLDER, port) as foreign:
        await until(lambda: is_open(port))
        lines: list[str] = []
        launch = stage.launch("true", name="vllm", ports=(port,), gpus=(0,), gpu_memory_share=0.45)
        reader = GpuReader(lambda: Card(held={foreign.pid: 100 * GB}))
        on_port, on_gpu = await free_resources(launch, run=stage.run, report=lines.append, gpu_reader=reader)
        [holder] = on_port.holders
        assert (on_port.resource, on_port.port, on_gpu.resource, on_gpu.gpu) == ("port", port, "gpu", 0)
        assert (holder.pid, holder.user, holder.is_ours) == (foreign.pid, user_name(os.getuid()), False)
        assert on_port.foreign_holder() == holder
        assert on_gpu.holders == [holder]
        assert on_gpu.foreign_holder() is None
        assert on_port.text.startswith(f"port {port} is held by pid {foreign.pid} (user ")
        assert on_gpu.text.startswith("GPU 0 has 40.0 GB free, ")
        assert [line.rpartition("; ")[2] for line in lines] == ["it is left alone"]
        launch = stage.launch("true", name="vllm", ports=(port,))
        taken = await free_resources(
            launch, run=stage.run, report=lambda _: None, gpu_reader=GpuReader(Card), take_ports=True
        )
        assert taken == []
        assert foreign.wait() == -9


@pytest.mark.parametrize(
    ("mark", "is_visible", "offered"),
    [
        (None, True, 4242),
        (Marker(run="hermes", service="vllm", run_folder="/logs/hermes"), True, None),
        (Marker(run="tiny", service="vllm", run_folder=None), True, None),
        (Marker(run="hermes", service="vllm", run_folder=None), True, 4242),
        (None, False, None),
    ],
)
def test_only_a_visible_foreign_process_on_a_port_can_be_killed_on_request(
    mark: Marker | None, is_visible: bool, offered: int | None
) -> None:
    process = Stat(pid=4242, comm="x", state="S", parent=1, group=1, session=1, cpu_ticks=0, start_ticks=1, rss_pages=1)
    owner = Owner(
        process=process if is_visible else None, uid=0, command="python  app.py", mark=mark, is_supervised=True
    )
    refusal = Refusal(resource="port", port=9001, holders=[owner.holder("tiny")], text="taken")
    holder = refusal.foreign_holder()
    assert (holder.pid if holder else None) == offered
    assert refusal.holders[0].command == "python app.py"


async def test_a_look_at_the_gpus_kills_no_process(stage: Stage) -> None:
    async with process(stage, **ORPHAN) as left:
        launch = stage.launch("true", gpus=(0,))
        [gpu] = await look_at_gpus([launch], GpuReader(lambda: Card(held={left.pid: 66 * GB})))
        assert len(gpu.in_words(None)) == 1
        assert gpu.in_words(None)[0].startswith(
            f"66.0 GB held by pid {left.pid}, left by run tiny-1121 of this project"
        )
        assert left.poll() is None
