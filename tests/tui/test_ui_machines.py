"""The screen and `status` of a run on several machines: rows of machines, folding, a loss, GPUs of all machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from machine_fakes import LOST_AT, gpu_of, lost, machine, on_machines, placed
from screen_fakes import GIB, NOW, changed, drawn, service, state_after
from shown_screen import shown
from textual.widgets import Static

from grpo_engine.wire.codec import to_line, write_json_atomically
from grpo_engine.wire.supervisor import (
    RunState,
    RunStatus,
    ServiceState,
    UsageSampled,
    Warning,
    read_from_daemon,
)
from grpo_tui.cli.look import status_command
from grpo_tui.ui.pages import service_page
from grpo_tui.ui.screens.reading import ReadingScreen
from grpo_tui.ui.widgets.frame.activity_line import ActivityLine
from grpo_tui.ui.widgets.gpu_report import report
from grpo_tui.ui.widgets.main.gpu_panel import GpuPanel
from grpo_tui.ui.widgets.main.services_table import ServicesTable
from grpo_tui.ui.widgets.main.warnings_bar import WarningsBar
from grpo_tui.view.diagnosis import diagnose
from grpo_tui.view.gpus.state import moments_of
from grpo_tui.view.machine_selection import MachineFolded, MachineSelected
from grpo_tui.view.machines import all_gpus, machine_rows, ready_words
from grpo_tui.view.service_details import ServiceHistory
from grpo_tui.view.state import SelectionMoved, ServiceSelected, ViewState, reduce
from grpo_tui.view.timeline.state import clock_at


def table(state: ViewState, width: int = 78) -> list[str]:
    return drawn(ServicesTable(), state, width)[1:]


def names(state: ViewState) -> list[str]:
    """The first word of each row, after marks and signs."""
    return [next(word for word in row.split() if word.strip("▌−+◆")) for row in table(state)]


def sampled(status: RunStatus, number: int = 2) -> UsageSampled:
    """The sample that a supervisor sends with these machines."""
    return UsageSampled(
        number=number, time=NOW, cpu_percent={}, rss_bytes={}, gpu_memory_bytes={}, gpus=[], machines=status.machines
    )


# --- rows ------------------------------------------------------------------------------------------------------------


def test_services_stand_below_their_machines_and_those_without_devices_below_the_supervisor() -> None:
    assert names(state_after(status=on_machines())) == [
        "supervisor", "ray", "machines", "api", "env", "machine-1", "trainer", "machine-2", "vllm", "machine-3",
        "vllm-2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("width", "words"),
    [(78, "1/1 · 93% busy"), (110, "1 of 1 ready · 2 GPUs 84.0G of 160.0G, 93% busy")],
)
def test_a_machine_shows_its_state_its_figures_and_how_many_services_are_ready(width: int, words: str) -> None:
    row = next(row for row in table(state_after(status=on_machines()), width) if "machine-2" in row)
    assert row.split()[:4] == ["−", "machine-2", "●", "ready"]
    assert row.split()[4:7] == ["800%", "44.0G", "84.0G"]
    assert words in row


def test_a_run_on_one_machine_has_rows_of_services_alone() -> None:
    state = state_after()
    assert state.rows == state.services
    assert names(state) == ["api", "vllm", "env", "trainer"]
    assert reduce(state, MachineFolded(name=None)).rows == state.services


def test_the_row_of_a_lost_machine_says_since_when_what_ran_there_and_what_happens_next() -> None:
    state = state_after(status=lost())
    row = next(row for row in table(state, 110) if "machine-2" in row)
    assert "✗ lost 12s" in row
    assert f"since {clock_at(LOST_AT)} · ran vllm · vllm waits up to 60 s for a machine" in row
    assert names(state)[7:9] == ["machine-2", "vllm"]  # until it has another place


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": "silent", "since": NOW - 5, "next": "wait"}, "◌ silent 5s"),
        ({"state": "silent", "since": NOW - 5, "is_joining": True}, "◐ joining 5s"),
    ],
)
def test_machines_that_do_not_answer_and_those_that_join_are_told_apart(changes: dict[str, object], words: str) -> None:
    status = on_machines(machines=[machine(1, "trainer"), machine(2, "vllm", **changes)])
    assert any(words in row for row in table(state_after(status=status), 110))


def test_machines_of_a_run_that_has_ended_are_released_and_have_no_figures() -> None:
    gone = {"state": ServiceState.STOPPED, "pid": None}
    services = [each.model_copy(update=gone) for each in on_machines().services]
    rows = table(state_after(status=on_machines(services=services, state=RunState.FINISHED, ended_at=NOW)), 110)
    shown_machines = [" ".join(row.split()) for row in rows if "machine-" in row]
    assert shown_machines == [f"− machine-{number} ■ released 1 service" for number in (1, 2, 3)]
    assert " ".join(rows[0].split()) == "− supervisor ■ ended 4 services"


# --- keys ------------------------------------------------------------------------------------------------------------


def test_machines_fold_one_by_one_and_all_together_and_what_is_selected_is_never_hidden() -> None:
    state = state_after(status=on_machines())
    assert state.selected == "trainer"
    state = reduce(state, MachineFolded(name="machine-2", is_folded=True))
    assert "vllm" not in names(state)
    state = reduce(state, MachineFolded(name=None))
    assert names(state) == ["supervisor", "machine-1", "machine-2", "machine-3"]
    assert (state.viewer.machine, state.chosen) == ("machine-1", ())  # its service is hidden, and keys act on none
    state = reduce(state, SelectionMoved(by=1))
    assert state.viewer.machine == "machine-2"
    state = reduce(state, ServiceSelected(name="vllm-2"))
    assert (state.viewer.machine, names(state)[-1]) == (None, "vllm-2")
    state = reduce(reduce(state, MachineFolded(name=None)), MachineFolded(name=None))
    assert len(state.rows) == 11


def test_a_machine_that_leaves_is_no_longer_selected() -> None:
    state = reduce(state_after(status=on_machines()), MachineSelected(name="machine-3"))
    assert state.viewer.machine == "machine-3"
    after = on_machines(machines=[machine(1, "trainer"), machine(2, "vllm")])
    state = reduce(state, sampled(after))
    assert state.viewer.machine is None
    assert [service.name for service in state.chosen] == ["trainer"]


@pytest.mark.slow
async def test_keys_fold_machines_and_a_loss_is_named_in_the_row_and_in_a_warning(tmp_path: Path) -> None:
    async with shown(tmp_path, (120, 36), on_machines(run=tmp_path.name)) as screen:
        await screen.press("up", "left")
        await screen.until(lambda: "trainer" not in screen.text(ServicesTable))
        await screen.press("r")
        await screen.until_text(ActivityLine, "machine-1 is a machine: select a service of it")
        await screen.press("right")
        await screen.until_text(ServicesTable, "trainer")
        await screen.press("d")
        await screen.until_screen(ReadingScreen)
        page = str(screen.app.screen.query_one(Static).visual)
        assert "10.0.0.1" in page
        assert "trainer ready" in page
        await screen.press("escape")
        await screen.press("F")
        await screen.until(lambda: "vllm" not in screen.text(ServicesTable))
        screen.connection.send(sampled(lost()))
        await screen.until_text(ServicesTable, "✗ lost 12s")
        await screen.until_text(WarningsBar, f"machine-2 (10.0.0.2) is lost since {clock_at(LOST_AT)}: vllm ran there")
        await screen.check_widths()
        assert screen.connection.commands == []


# --- warnings --------------------------------------------------------------------------------------------------------


def warnings(status: RunStatus) -> list[Warning]:
    return [each for each in diagnose((), status, now=NOW) if each.id.startswith("machine")]


def test_a_loss_is_an_error_until_what_ran_there_is_ready_and_no_more_than_a_warning_then() -> None:
    (warning,) = warnings(lost())
    assert (warning.severity, warning.hint) == ("error", lost().machines[1].next)
    again = lost().model_copy(update={"services": on_machines().services})
    assert [each.severity for each in warnings(again)] == ["warning"]


def test_a_machine_that_is_back_is_told_of_until_what_ran_there_is_ready() -> None:
    back = {"state": "ready", "next": None, "num_free": 2}
    (warning,) = warnings(lost(**back))
    assert warning.text.endswith("vllm ran there; it is back")
    assert warning.hint == "vllm is backoff on machine-2"
    assert warnings(on_machines(machines=lost(**back).machines)) == []


def test_a_machine_that_does_not_answer_is_told_of_with_what_it_runs() -> None:
    silent = machine(2, "vllm", state="silent", since=LOST_AT, next="nothing is restarted yet")
    (warning,) = warnings(on_machines(machines=[machine(1, "trainer"), silent]))
    assert warning.text == f"machine-2 (10.0.0.2), silent since {clock_at(LOST_AT)}, runs vllm"
    joins = silent.model_copy(update={"is_joining": True})
    assert warnings(on_machines(machines=[machine(1, "trainer"), joins])) == []


def test_a_broker_that_reports_nothing_makes_what_is_shown_old() -> None:
    old = [machine(1, "trainer", answered_at=NOW - 60), machine(2, "vllm", answered_at=NOW - 40)]
    (warning,) = warnings(on_machines(machines=old))
    assert warning.text.startswith(f"what is shown of the machines is of {clock_at(NOW - 40)}")
    assert warnings(on_machines(machines=old, state=RunState.FINISHED)) == []


# --- GPUs ------------------------------------------------------------------------------------------------------------


def test_gpus_of_all_machines_are_on_the_gpu_screen_with_a_history_of_their_own() -> None:
    state = state_after(sampled(on_machines()), status=on_machines())
    rows = [row.plain for row in report(state, 118, 5).lines]
    for number in (1, 2, 3):
        assert any(row.startswith(f"─ machine-{number} GPU 1 ·") for row in rows)
        assert any(row.split()[:3] == [f"machine-{number}", "2", "GPUs"] for row in rows)
    of_second = moments_of(state.gpus.moments, "machine-2")[-1]
    figures = of_second.gpu(1)
    assert figures is not None
    assert dict(figures.by_holder) == {"vllm": 41 * GIB, "others": GIB}
    rows = [row.plain for row in report(state_after(status=lost()), 118, 5).lines]
    assert any("machine-2" in row and "its GPUs are unknown" in row for row in rows)


def test_a_gpu_that_several_machines_of_one_host_see_is_told_once_with_all_that_it_holds() -> None:
    first, second = gpu_of(1, 0, "trainer"), gpu_of(1, 0, "vllm")
    status = on_machines(
        machines=[machine(1, "trainer", gpus=[first]), machine(2, "vllm", gpus=[second])],
        gpus=[gpu_of(1, 0).model_copy(update={"other_bytes": 83 * GIB})],
    )
    (only,) = all_gpus(status)
    assert (only.machine, only.gpu.by_service) == ("machine-1", {"trainer": 41 * GIB, "vllm": 41 * GIB})
    assert [len(row.gpus) for row in machine_rows(status)] == [0, 1, 0]


def test_memory_on_other_machines_is_not_counted_as_that_of_this_one() -> None:
    far = [machine(number, name, gpus=[]) for number, name in ((1, "trainer"), (2, "vllm"), (3, "vllm-2"))]
    assert "vllm" not in drawn(GpuPanel(), state_after(status=on_machines(machines=far)))[-1]
    near = [each.model_copy(update={"address": "127.0.0.1"}) for each in far]
    assert "vllm" in drawn(GpuPanel(), state_after(status=on_machines(machines=near)))[-1]


# --- status ----------------------------------------------------------------------------------------------------------


def test_status_and_its_json_have_the_machines_with_their_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "logs" / "r"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    write_json_atomically(folder / "state.json", lost().model_copy(update={"run": "r"}))
    monkeypatch.chdir(tmp_path)
    status_command("r")
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line for line in shown.splitlines() if line.startswith(("supervisor", "machine-"))}
    assert "lost" in rows["machine-2"]
    assert "0 of 1 ready" in rows["machine-2"]
    status_command("r", as_json=True)
    by_name = {each["name"]: each for each in json.loads(capsys.readouterr().out)["machines"]}
    assert by_name["machine-2"]["state"] == "lost"
    assert by_name["machine-2"]["lost_services"] == ["vllm"]
    assert by_name["machine-1"]["num_cpus"] == 64


def test_a_sample_of_an_earlier_supervisor_leaves_the_machines_as_they_are() -> None:
    line = json.loads(to_line(sampled(on_machines())))
    del line["machines"]
    event = read_from_daemon(json.dumps(line).encode())
    assert isinstance(event, UsageSampled)
    assert event.machines is None
    state = reduce(state_after(status=on_machines()), event)
    assert state.status is not None
    assert len(state.status.machines) == 3


def test_a_service_that_another_machine_takes_over_moves_below_it() -> None:
    status = lost()
    machines = [status.machines[0], status.machines[1], machine(3, "vllm-2", "vllm")]
    moved = service("vllm", kind="inference", state=ServiceState.STARTING, machine="machine-3")
    state = state_after(
        sampled(status.model_copy(update={"machines": machines})), changed(3, NOW, moved), status=status
    )
    assert names(state)[7:] == ["machine-2", "machine-3", "vllm", "vllm-2"]


def test_a_service_on_several_machines_stands_below_the_first_and_the_others_say_that_a_part_of_it_is_there() -> None:
    machines = [machine(1, "trainer"), machine(2, "vllm", "trainer"), machine(3, "trainer")]
    services = [
        placed("vllm", 2, kind="inference"),
        placed("trainer", 1, machines=["machine-1", "machine-2", "machine-3"]),
    ]
    state = state_after(status=on_machines(services=services, machines=machines))
    assert names(state) == ["supervisor", "machine-1", "trainer", "machine-2", "vllm", "machine-3"]
    rows = {row.name: ready_words(row) for row in machine_rows(state.status)}
    assert rows["machine-1"] == "1 of 1 ready"
    assert rows["machine-2"] == "1 of 1 ready, part of trainer"
    assert rows["machine-3"] == "part of trainer"
    page = service_page(services[1], None, ServiceHistory(), state, 100).plain
    assert "machine-1 (10.0.0.1), ready; machine-2 (10.0.0.2), ready; machine-3 (10.0.0.3)" in " ".join(page.split())
