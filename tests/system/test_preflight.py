"""Before a start: who holds a GPU's memory is ended when ours and left over, and named when anybody else.

Holders are real processes with real environments. The card is a fake of the driver that is true to it in what matters
here: it lists processes with their memory, and takes the memory of an ended one back some readings later.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stage import HOLDER, Stage, free_ports, is_open, open_stage, python, until

from grpo_engine.wire.supervisor import Refusal
from grpo_tui.supervisor import preflight, teardown
from grpo_tui.supervisor.keeper.owners import Owner
from grpo_tui.supervisor.keeper.proc import (
    Marker,
    Stat,
    all_processes,
    command_line,
    identify,
    read_stat,
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
    """GPU 0 with 140 GB for programs, and who holds how much of it; GPU 1 is empty."""

    held: dict[int, int | None] = field(default_factory=dict)
    """By pid."""
    unlisted: int = 0
    """Held by nobody who is listed."""
    lag: int = 0
    """Readings for which the driver keeps the memory of a process that has ended."""
    has_driver: bool = True
    answers: threading.Event = field(default_factory=threading.Event)
    num_readings: int = 0

    NVMLError: type[Exception] = NvmlError
    NVMLError_LibraryNotFound: type[Exception] = NoDriver
    NVMLError_DriverNotLoaded: type[Exception] = NoDriver
    NVMLError_NotSupported: type[Exception] = NvmlError
    NVMLError_FunctionNotFound: type[Exception] = NvmlError
    NVMLError_NoPermission: type[Exception] = NvmlError
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


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with open_stage(tmp_path) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _rounds_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_what_an_earlier_run_left_on_the_gpu_is_ended_and_named_and_its_memory_waited_for(stage: Stage) -> None:
    async with process(stage, **ORPHAN) as left:
        card = Card(held={left.pid: 66_100_000_000}, lag=3)
        refusal, [line] = await cleared(stage, card)
        assert refusal is None
        assert left.wait() == -9
        assert card.held == {}
        start = f"GPU 0: 66.1 GB held by pid {left.pid}, left by run tiny-1121 of this project: ended, freed after "
        assert line.startswith(start)


async def test_an_earlier_attempt_of_the_service_goes_and_another_service_of_the_run_stays(stage: Stage) -> None:
    marks = {"GRPO_TUI_RUN": stage.run, "GRPO_TUI_RUN_FOLDER": str(stage.folder)}
    async with (
        process(stage, GRPO_TUI_SERVICE="vllm", **marks) as earlier,
        process(stage, GRPO_TUI_SERVICE="trainer", **marks) as trainer,
    ):
        refusal, [line] = await cleared(stage, Card(held={earlier.pid: 60 * GB, trainer.pid: 64 * GB}))
        assert refusal is None
        assert line.startswith(f"GPU 0: 60.0 GB held by pid {earlier.pid}, left by an earlier attempt: ended, ")
        assert trainer.poll() is None
        refusal, lines = await cleared(stage, Card(held={trainer.pid: 90 * GB}))
        assert refusal is not None
        assert f"90.0 GB held by pid {trainer.pid}, service trainer of this run: " in refusal
        assert trainer.poll() is None
        assert lines == []


async def test_leftovers_go_also_where_it_is_unknown_how_much_memory_the_service_needs(stage: Stage) -> None:
    async with process(stage, **ORPHAN) as left, process(stage) as stranger:
        refusal, lines = await cleared(
            stage, Card(held={left.pid: GB, stranger.pid: 130 * GB}), name="trainer", gpu_memory_share=None
        )
        assert (refusal, len(lines)) == (None, 1)
        assert left.wait() == -9
        assert stranger.poll() is None


async def test_a_run_that_is_still_supervised_keeps_its_memory_and_the_refusal_says_how_to_end_it(stage: Stage) -> None:
    lock = take_lock(stage.folder)
    assert lock is not None
    marks = {"GRPO_TUI_RUN": "other", "GRPO_TUI_SERVICE": "vllm", "GRPO_TUI_RUN_FOLDER": str(stage.folder)}
    async with process(stage, **marks) as theirs:
        refusal, _ = await cleared(stage, Card(held={theirs.pid: 100 * GB}))
        assert refusal is not None
        assert "service vllm of run other, which is still supervised (`grpo-tui down other` ends it)" in refusal
        assert theirs.poll() is None
        os.close(lock)
        refusal, _ = await cleared(stage, Card(held={theirs.pid: 100 * GB}))
        assert refusal is None
        assert theirs.wait() == -9


async def test_a_stranger_is_named_with_what_is_free_and_needed_and_what_to_do(stage: Stage) -> None:
    async with process(stage) as stranger:
        refusal, lines = await cleared(stage, Card(held={stranger.pid: 100 * GB}))
        assert refusal is not None
        assert refusal.startswith(
            "GPU 0 has 40.0 GB free, and vllm needs 63.0 GB (45% of 140.0 GB); "
            f"100.0 GB held by pid {stranger.pid} (user {user_name(os.getuid())}): {sys.executable} -I -S -c "
        )
        assert stage.token in refusal
        assert refusal.endswith(
            f"; to do: end pid {stranger.pid}, "
            "or request less: `--set services.vllm.gpu_memory_utilization=0.28`, "
            "or use another GPU: `--set services.vllm.gpus=[…]`"
        )
        assert stranger.poll() is None
        assert lines == []


async def test_a_process_that_named_itself_anew_is_shown_by_that_name_alone(stage: Stage) -> None:
    setproctitle = pytest.importorskip("setproctitle")
    folder = str(Path(setproctitle.__file__).parents[1])
    program = "import sys; sys.path.append(sys.argv[1])\nimport setproctitle, signal\n" + (
        "setproctitle.setproctitle('VLLM::EngineCore'); signal.pause()"
    )
    async with process(stage, program, folder) as engine:
        await until(lambda: command_line(engine.pid).startswith("VLLM::"))
        refusal, _ = await cleared(stage, Card(held={engine.pid: 100 * GB}))
        assert refusal is not None
        assert "): VLLM::EngineCore; to do: end pid" in refusal


async def test_a_service_of_another_kind_is_told_the_setting_that_it_has(stage: Stage) -> None:
    async with process(stage) as stranger:
        refusal, _ = await cleared(stage, Card(held={stranger.pid: 100 * GB}), name="job", kind="command")
        assert refusal is not None
        assert "`--set services.job.gpu_memory_share=0.28`" in refusal


async def test_memory_that_leaves_enough_is_nobodys_business(stage: Stage) -> None:
    async with process(stage) as stranger:
        assert await cleared(stage, Card(held={stranger.pid: 77 * GB})) == (None, [])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
async def test_another_users_process_is_named_and_never_ended(stage: Stage) -> None:
    async with process(stage, "import os, signal; os.setuid(65534); signal.pause()", **ORPHAN) as theirs:
        await until(lambda: uid_of(theirs.pid) == 65534)
        refusal, lines = await cleared(stage, Card(held={theirs.pid: 100 * GB}))
        assert refusal is not None
        assert f"pid {theirs.pid} (user {user_name(65534)}): " in refusal
        assert f"end pid {theirs.pid}" not in refusal
        assert theirs.poll() is None
        assert lines == []


async def test_a_process_that_cannot_be_seen_is_named_as_what_can_be_said(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "FREEING_LIMIT_S", 0.0)
    refusal, _ = await cleared(stage, Card(held={INVISIBLE_PID: 100 * GB}))
    assert refusal is not None
    assert f"100.0 GB held by pid {INVISIBLE_PID}, which cannot be seen from here (in another container, " in refusal


async def test_a_share_that_the_driver_does_not_tell_is_unknown_and_not_0(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "FREEING_LIMIT_S", 0.0)
    async with process(stage) as first, process(stage) as second:
        refusal, _ = await cleared(stage, Card(held={first.pid: None, second.pid: None}))
        assert refusal is not None
        assert f"an unknown amount held by pid {first.pid} " in refusal
        assert "0.0 GB held" not in refusal


async def test_memory_that_nobody_listed_holds_is_waited_for_and_named_when_it_stays(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal, [line] = await cleared(stage, Card(unlisted=100 * GB, lag=4))
    assert refusal is None
    assert re.fullmatch(r"vllm: waited [\d.]+ s until GPU memory was free", line)
    monkeypatch.setattr(preflight, "FREEING_LIMIT_S", 0.0)
    refusal, lines = await cleared(stage, Card(unlisted=100 * GB, lag=1000))
    assert refusal is not None
    assert "; 100.0 GB held by no process that the driver lists here (in another container?); " in refusal
    assert lines == []


async def test_memory_that_would_not_be_enough_when_it_came_back_is_not_waited_for(stage: Stage) -> None:
    async with process(stage) as stranger:
        card = Card(held={stranger.pid: 100 * GB}, unlisted=20 * GB, lag=1000)
        refusal, _ = await cleared(stage, card)
        assert refusal is not None
        assert card.num_readings == 2


async def test_a_leftover_that_hangs_in_the_kernel_is_named_and_its_memory_not_waited_for(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with process(stage, **ORPHAN) as stuck:
        monkeypatch.setattr(
            "grpo_tui.supervisor.keeper.proc.send_signal", lambda *_: None
        )  # as deaf as one in a driver
        monkeypatch.setattr(teardown, "UNKILLABLE_AFTER_S", 0.0)
        monkeypatch.setattr(preflight, "FREEING_LIMIT_S", 1e9)
        refusal, [line] = await cleared(stage, Card(held={stuck.pid: 100 * GB}))
        assert line.endswith("still alive after SIGKILL: it hangs in the kernel, often in a driver")
        assert refusal is not None
        assert f"100.0 GB held by pid {stuck.pid}, left by run tiny-1121 of this project: " in refusal


async def test_a_dead_process_that_still_holds_memory_is_named_as_hanging(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with process(stage, "pass", **ORPHAN) as zombie:  # nobody waits for it
        await until(lambda: (stat := read_stat(zombie.pid)) is not None and stat.is_dead)
        monkeypatch.setattr(preflight, "FREEING_LIMIT_S", 0.0)
        refusal, lines = await cleared(stage, Card(held={zombie.pid: 100 * GB}, lag=1000))
        assert refusal is not None
        assert f"100.0 GB held by pid {zombie.pid} (python" in refusal
        assert "), which has exited and hangs in the driver; to do: request less" in refusal
        assert lines == []


async def test_a_dead_process_below_a_marked_one_is_not_taken_for_one_that_can_be_ended(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead_children(pid: int) -> list[int]:
        return [each.pid for each in all_processes() if each.parent == pid and each.is_dead]

    async with process(stage, "import os, signal; os.fork() or os._exit(0); signal.pause()", **ORPHAN) as parent:
        await until(lambda: bool(dead_children(parent.pid)))
        monkeypatch.setattr(preflight, "FREEING_LIMIT_S", 0.0)
        refusal, lines = await cleared(stage, Card(held={dead_children(parent.pid)[0]: 100 * GB}, lag=1000))
        assert refusal is not None
        assert "which has exited and hangs in the driver" in refusal
        assert lines == []


async def test_a_leftover_that_dies_but_keeps_its_memory_hangs_and_ends_the_wait_for_all(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teardown, "GPU_LIMIT_S", 1e9)
    monkeypatch.setattr(teardown, "UNKILLABLE_AFTER_S", 0.1)
    monkeypatch.setattr(preflight, "FREEING_LIMIT_S", 1e9)
    async with process(stage, **ORPHAN) as left:  # a zombie once it is ended, since nobody waits for it
        refusal, [line] = await cleared(stage, Card(held={left.pid: 100 * GB}, lag=1_000_000))
        assert "it hangs in the kernel" in line
        assert refusal is not None
        assert f"pid {left.pid} (python" in refusal


async def test_a_card_without_driver_or_with_one_that_hangs_holds_nothing_against_a_start(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await cleared(stage, Card(has_driver=False)) == (None, [])
    monkeypatch.setattr(preflight, "ANSWER_LIMIT_S", 0.02)
    hanging = Card(unlisted=140 * GB)
    hanging.answers.clear()
    assert await cleared(stage, hanging) == (None, [])
    hanging.answers.set()


async def test_a_service_that_takes_no_gpu_never_asks_the_driver(stage: Stage) -> None:
    card = Card(unlisted=140 * GB)
    assert await cleared(stage, card, gpus=(), gpu_memory_share=None) == (None, [])
    assert card.num_readings == 0


async def test_only_the_gpus_of_the_service_are_looked_at(stage: Stage) -> None:
    async with process(stage, **ORPHAN) as left:
        assert await cleared(stage, Card(held={left.pid: 140 * GB}), gpus=(1,)) == (None, [])
        assert left.poll() is None


async def test_ports_and_gpus_are_cleared_together_and_refused_together(stage: Stage) -> None:
    [port] = free_ports(1)
    async with process(stage, HOLDER, port) as stranger:
        await until(lambda: is_open(port))
        lines: list[str] = []
        launch = stage.launch("true", name="vllm", ports=(port,), gpus=(0,), gpu_memory_share=0.45)
        reader = GpuReader(lambda: Card(held={stranger.pid: 100 * GB}))
        on_port, on_gpu = await free_resources(launch, run=stage.run, report=lines.append, gpu_reader=reader)
        [holder] = on_port.holders
        assert (on_port.resource, on_port.port, on_gpu.resource, on_gpu.gpu) == ("port", port, "gpu", 0)
        assert (holder.pid, holder.user, holder.is_ours) == (stranger.pid, user_name(os.getuid()), False)
        assert on_port.foreign_holder() == holder
        assert on_gpu.holders == [holder]
        assert on_gpu.foreign_holder() is None
        assert on_port.text.startswith(f"port {port} is held by pid {stranger.pid} (user ")
        assert on_gpu.text.startswith("GPU 0 has 40.0 GB free, ")
        assert [line.rpartition("; ")[2] for line in lines] == ["it is left alone"]
        launch = stage.launch("true", name="vllm", ports=(port,))
        taken = await free_resources(
            launch, run=stage.run, report=lambda _: None, gpu_reader=GpuReader(Card), take_ports=True
        )
        assert taken == []
        assert stranger.wait() == -9


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
def test_only_a_visible_foreign_process_on_a_port_is_offered_to_be_ended(
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


async def test_looking_ends_nobody(stage: Stage) -> None:
    async with process(stage, **ORPHAN) as left:
        launch = stage.launch("true", gpus=(0,))
        [gpu] = await look_at_gpus([launch], GpuReader(lambda: Card(held={left.pid: 66 * GB})))
        assert len(gpu.in_words(None)) == 1
        assert gpu.in_words(None)[0].startswith(
            f"66.0 GB held by pid {left.pid}, left by run tiny-1121 of this project"
        )
        assert left.poll() is None
