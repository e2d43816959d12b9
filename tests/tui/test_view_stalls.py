"""Warnings about full disks, and about runs that make no steps: which service waits for which, and what helps."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hint_flags import named_flags, service_flags
from screen_fakes import STARTED, metrics_line, run_status, service

from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.supervisor import DiskSpace, RunStatus, ServiceStatus, UsageSampled, WaitsFor, Warning, WriteFault
from grpo_tui.run_files.timeline import after_event
from grpo_tui.ui.widgets.main.services_table import explanation
from grpo_tui.view import disk_rules, stall_rules
from grpo_tui.view.diagnosis import diagnose
from grpo_tui.view.state import ViewState

MB = 1 << 20
STEPS = [metrics_line(step) for step in range(1, 21)]
LAST = STEPS[-1].time


def disk(folder: str = "/runs/r", *, free: int = 0, total: int = 60 * MB, device: int = 7) -> DiskSpace:
    return DiskSpace(folder=folder, device=device, free_bytes=free, total_bytes=total, is_full=free < MB)


def fault(name: str, *, effect: str = "it waits", space: DiskSpace | None = None) -> WriteFault:
    error = "No space left on device"
    return WriteFault(path=f"/runs/r/{name}", error=error, effect=effect, since=STARTED, disk=space)


def warnings_of(*services: ServiceStatus, **changes: Any) -> list[Warning]:
    return diagnose([], run_status(services=list(services), **changes))


# --- disks -----------------------------------------------------------------------------------------------------------


def test_a_disk_with_little_space_is_a_warning_before_it_is_full() -> None:
    [warning] = warnings_of(low_disks=[disk(free=900 * MB, total=500_000 * MB)])
    assert (warning.id, warning.severity) == ("disk:/runs/r", "warning")
    assert warning.text == "little space is left: the disk of /runs/r is nearly full, 900M of 488.3G are free"
    assert "make room there" in (warning.hint or "")


def test_a_full_disk_is_one_error_that_says_what_each_service_cannot_write() -> None:
    full = disk()
    api = service("api", write_faults=[fault("rollouts.sqlite", effect="groups are refused", space=full)])
    names = ("metrics.jsonl", "rollouts.jsonl")
    trainer = service("trainer", write_faults=[fault(name, space=full) for name in names])
    state = [fault("state.json", effect="written later", space=full)]
    [warning] = warnings_of(api, trainer, low_disks=[full], write_faults=state)
    assert (warning.id, warning.severity) == ("disk:/runs/r", "error")
    assert warning.text == (
        "the disk of /runs/r is full, 0B of 60.0M are free: supervisor cannot write state.json (written later); "
        "api cannot write rollouts.sqlite (groups are refused); "
        "trainer cannot write metrics.jsonl, rollouts.jsonl (it waits)"
    )


def test_a_full_disk_that_only_a_service_writes_to_is_named_by_its_folder() -> None:
    other = disk("/models", device=8)
    trainer = service("trainer", write_faults=[fault("checkpoints", space=other)])
    [full, low] = warnings_of(trainer, low_disks=[disk(free=5 * MB)])
    assert (low.id, low.severity, full.id, full.severity) == ("disk:/runs/r", "warning", "disk:/models", "error")


def test_full_shared_memory_has_a_hint_of_its_own() -> None:
    [warning] = warnings_of(low_disks=[disk("/dev/shm", total=64 * MB)])
    assert warning.text.startswith("shared memory (/dev/shm) is full")
    assert "shm-size" in (warning.hint or "")


def test_what_cannot_be_written_though_there_is_space_is_named_with_the_error_of_the_system() -> None:
    space = disk(free=5000 * MB, total=9000 * MB)
    [warning] = warnings_of(service("trainer", write_faults=[fault("checkpoints", space=space)]))
    assert warning.id == "unwritten:trainer:/runs/r/checkpoints"
    assert warning.text == (
        "trainer cannot write /runs/r/checkpoints: No space left on device (it waits); 4.9G are free there"
    )


def test_a_sample_tells_the_screen_of_a_disk_that_fills_up_and_of_one_that_has_room_again() -> None:
    sample = UsageSampled(number=1, time=STARTED, cpu_percent={}, rss_bytes={}, gpu_memory_bytes={}, gpus=[])
    full = sample.model_copy(update={"low_disks": [disk()], "write_faults": [fault("state.json", space=disk())]})
    status = after_event(run_status(gpus=[]), full)
    assert [warning.id for warning in diagnose([], status)] == ["disk:/runs/r"]
    assert diagnose([], after_event(status, sample)) == []


# --- no step ---------------------------------------------------------------------------------------------------------


def stalled(
    *services: ServiceStatus, idle_s: float = 75, lines: list[MetricsLine] = STEPS, **changes: Any
) -> list[str]:
    """Ids of the warnings so many seconds after the last step."""
    return [warning.id for warning in told(*services, idle_s=idle_s, lines=lines, **changes)]


def told(
    *services: ServiceStatus, idle_s: float = 75, lines: list[MetricsLine] = STEPS, **changes: Any
) -> list[Warning]:
    status: RunStatus = run_status(services=list(services), **changes)
    return diagnose(lines, status, now=(lines[-1].time if lines else STARTED + 5) + idle_s)


def waiting(name: str, what: WaitsFor | None, *, s: float = 70, idle_s: float = 75, **changes: Any) -> ServiceStatus:
    since = {} if what is None else {"waits_for": what, "waits_since": LAST + idle_s - s}
    return service(name, **since, **changes)


TRAINER, ENV, VLLM = service("trainer"), service("env"), service("vllm")


def test_it_is_a_warning_after_a_minute_or_five_times_a_usual_step() -> None:
    assert stalled(TRAINER, ENV, idle_s=59) == []
    assert stalled(TRAINER, ENV, idle_s=61) == ["no-step"]
    slow = [line.model_copy(update={"time": STARTED + 100 * line.step}) for line in STEPS]
    assert stalled(TRAINER, ENV, lines=slow, idle_s=490) == []
    assert stalled(TRAINER, ENV, lines=slow, idle_s=510) == ["no-step"]


def test_lines_that_were_thinned_do_not_make_a_step_look_long() -> None:
    assert stalled(TRAINER, ENV, lines=STEPS[::8], idle_s=61) == ["no-step"]


def test_the_first_step_of_a_start_may_take_five_minutes() -> None:
    assert stalled(TRAINER, lines=[], idle_s=299) == []
    assert stalled(TRAINER, lines=[], idle_s=301) == ["no-step"]
    restarted = service("trainer", ready_at=LAST + 200)
    assert stalled(restarted, idle_s=490) == []
    assert stalled(restarted, idle_s=510) == ["no-step"]


def test_an_evaluation_may_take_five_times_as_long_as_the_one_before() -> None:
    evaluated = [*STEPS[:-1], metrics_line(20, eval__time=40.0, eval__num_prompts=64.0)]
    trainer = waiting("trainer", WaitsFor.EVALUATION)
    assert stalled(trainer, lines=evaluated, idle_s=190) == []
    assert stalled(trainer, lines=evaluated, idle_s=210) == ["no-step"]
    assert stalled(trainer, idle_s=299) == []


@pytest.mark.parametrize(
    ("services", "changes"),
    [
        pytest.param((service("trainer", state="finished"), ENV), {}, id="trainer finished"),
        pytest.param((TRAINER, ENV, service("vllm", state="starting")), {}, id="vllm starts"),
        pytest.param((TRAINER, ENV), {"is_ending": True}, id="run is being ended"),
        pytest.param((TRAINER, ENV), {"state": "stopped"}, id="run is over"),
        pytest.param((ENV,), {}, id="no trainer"),
    ],
)
def test_where_no_step_can_be_expected_nothing_is_said(services: tuple[ServiceStatus, ...], changes: Any) -> None:
    assert "no-step" not in stalled(*services, **changes)


@pytest.mark.parametrize(
    ("trainer", "env", "text", "hint"),
    [
        (WaitsFor.BATCH, WaitsFor.INFERENCE, "env waits for completions (1m10s)", "`grpo-tui restart vllm`"),
        (WaitsFor.BATCH, WaitsFor.REWARDS, "env waits for its reward function", "`grpo-tui logs env`"),
        (WaitsFor.BATCH, WaitsFor.ROLLOUT_API, "env waits for the rollout API", "`grpo-tui logs env`"),
        (WaitsFor.BATCH, WaitsFor.TRAINER, "env waits for the trainer", "--group-size"),
        (WaitsFor.BATCH, None, "trainer waits for groups (1m10s)", "`grpo-tui logs env`"),
        (WaitsFor.UPDATE, WaitsFor.INFERENCE, "waits for the inference server to take new weights", "restart vllm"),
        (None, None, "no step for 1m15s (usually one takes 2.4s)", "`grpo-tui logs trainer`"),
    ],
)
def test_it_says_who_waits_for_whom_and_what_to_look_at(
    trainer: WaitsFor | None, env: WaitsFor | None, text: str, hint: str
) -> None:
    api = service("api", note="24 of 128 sequences of a batch are queued")
    [warning] = told(api, VLLM, waiting("env", env), waiting("trainer", trainer))
    assert text in warning.text
    assert warning.text.endswith("api: 24 of 128 sequences of a batch are queued")
    assert hint in (warning.hint or "")


def test_a_server_that_sleeps_during_a_step_says_so_in_the_table_and_where_no_step_ends() -> None:
    asleep = waiting("vllm", WaitsFor.STEP)
    state = ViewState(run_folder=Path("/runs/r"), now=STARTED)
    assert explanation(asleep, state) == ("asleep while the trainer steps", ".muted")
    assert explanation(VLLM, state)[0] != "asleep while the trainer steps"
    [warning] = told(asleep, waiting("env", WaitsFor.INFERENCE), TRAINER)
    assert "vllm is asleep while the trainer steps (1m10s)" in warning.text
    assert warning.hint == "`grpo-tui logs trainer` shows what it does"


def test_a_trainer_that_rehearses_while_groups_are_sampled_says_so_in_the_table_and_where_no_step_ends() -> None:
    rehearsing = waiting("trainer", WaitsFor.REHEARSAL)
    state = ViewState(run_folder=Path("/runs/r"), now=STARTED)
    assert explanation(rehearsing, state) == ("rehearsing a step, kernels are compiled the first time", ".muted")
    [warning] = told(VLLM, rehearsing)
    assert "trainer rehearses a step, for which kernels are compiled (1m10s)" in warning.text


def test_with_a_full_disk_the_hint_is_to_make_room() -> None:
    api = service("api", write_faults=[fault("rollouts.sqlite", space=disk())])
    _, warning = told(api, waiting("trainer", WaitsFor.BATCH))
    assert "first see to what cannot be written" in (warning.hint or "")


@pytest.mark.parametrize("rules", [disk_rules, stall_rules])
def test_every_flag_in_a_hint_is_one_of_a_service(rules: ModuleType) -> None:
    assert named_flags(rules) <= service_flags()
