"""Figures that no plan or profile has, in a run folder from elsewhere, end neither a screen nor an export."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from machine_fakes import machine
from pydantic import ValidationError
from screen_fakes import NOW, run_status, service
from textual.content import Content
from usual_plan import four_launches, write_plan

from grpo_engine.config import Config, validated
from grpo_engine.diagnosis.alignment_rules import MIXTURE
from grpo_engine.errors import ConfigError, PeerError
from grpo_engine.wire.run_folder import PLAN_FILE, STATE_FILE
from grpo_engine.wire.supervisor import MAX_SERVICES, DiskSpace, MachinesReport, RunState, RunStatus, WriteFault
from grpo_tui.cli.export import _card
from grpo_tui.client.local import Run
from grpo_tui.profile.hub import known_config
from grpo_tui.profile.loading import load
from grpo_tui.profile.plan_file import Plan
from grpo_tui.services.base import Probe
from grpo_tui.supervisor.state_file import read_state
from grpo_tui.ui.pages import MAX_ROWS, service_page
from grpo_tui.ui.screens.reading import MAX_CHARACTERS, MAX_LINES, beginning
from grpo_tui.ui.widgets.main.start_panel import rows_wanted
from grpo_tui.view.disk_rules import MAX_FAULTS, disks
from grpo_tui.view.gpus.rules import ASKED_FOR, memory_plan
from grpo_tui.view.model_card import CardFacts
from grpo_tui.view.service_details import ServiceHistory
from grpo_tui.view.state import LaunchesRead, ViewState, reduce

STARTING = service("vllm", state="starting", started_at=NOW - 72, ready_at=None)
RUN = Run(folder=Path("/runs/sent"), has_daemon=False, has_services=False)
DISK = DiskSpace(folder="/runs", device=1, free_bytes=0, total_bytes=1, is_full=True)
FAULT = WriteFault(path="/p", error="full", effect="none", since=NOW)
FAR = (math.inf, math.nan, 1e308, -math.inf, 1e-320)


def test_of_settings_with_a_thousand_faults_the_first_hundred_are_named() -> None:
    class Settings(Config):
        steps: int = 1

    with pytest.raises(ConfigError) as refused:
        validated(Settings, {f"key{number}": 1 for number in range(1000)}, where="sent.json")
    lines = str(refused.value).splitlines()
    assert (len(lines), lines[0]) == (100, "sent.json: key0: unknown setting")


@pytest.mark.parametrize("seconds", FAR)
def test_limits_that_no_plan_has_end_neither_the_page_of_a_service_nor_that_of_a_start(seconds: float) -> None:
    limits = {"within_s": seconds, "interval_s": seconds, "stalled_s": seconds}
    probe = Probe(tcp="127.0.0.1:1").model_copy(update=limits)
    launches = {each.name: each for each in four_launches()}
    launches["vllm"] = replace(launches["vllm"], ready=probe, restart_window_s=seconds, stop_grace_s=seconds)
    status = run_status(state=RunState.STARTING, services=[STARTING])
    state = reduce(replace(ViewState(run_folder=RUN.folder, now=NOW), status=status), LaunchesRead(launches=launches))
    assert rows_wanted(state, 80) > 0
    page = service_page(STARTING, launches["vllm"], ServiceHistory(), state, 80).plain
    assert "SIGKILL after" in page


def test_of_a_page_longer_than_any_its_beginning_is_laid_out() -> None:
    """A crash report of 11 MB held the screen for more than 45 s and took 2 GB; 100,000 variables of a plan, 20 s."""
    (launch,) = (each for each in four_launches() if each.name == "vllm")
    many = {f"A{number}": "1" for number in range(9_000)}
    launch = replace(launch, env=many, env_from_files=tuple(many), argv=("a", *("--x" for _ in range(9_000))))
    state = replace(ViewState(run_folder=RUN.folder, now=NOW), status=run_status())
    page = service_page(STARTING, launch, ServiceHistory(), state, 80).plain
    assert page.count("=***") == page.count("--x") + 1 == MAX_ROWS
    for whole in (Content("line\n" * 2 * MAX_LINES), Content("x" * 2 * MAX_CHARACTERS)):
        shown = beginning(whole).plain
        assert (len(shown) < MAX_CHARACTERS + 50, shown.count("\n") <= MAX_LINES) == (True, True)
        assert shown.endswith("further characters")
    assert len(run_status(gpu_note="word " * 1_000_000).gpu_note or "") < 20_000


def test_more_machines_than_a_status_may_have_are_no_report() -> None:
    with pytest.raises(ValidationError, match="machines"):
        MachinesReport(machines=[machine(1)] * (MAX_SERVICES + 1))


def test_a_plan_of_a_service_without_a_command_is_damaged(tmp_path: Path) -> None:
    write_plan(tmp_path)
    plan = json.loads((tmp_path / PLAN_FILE).read_text())
    plan["launches"][0]["argv"] = []
    (tmp_path / PLAN_FILE).write_text(json.dumps(plan))
    with pytest.raises(PeerError, match="damaged"):
        Plan.of(tmp_path)


@pytest.mark.parametrize("value", [math.inf, math.nan, pytest.param(10**400, id="long"), "abc", 5, [1], {"a": 1}, True])
def test_settings_that_no_profile_has_end_neither_the_page_of_gpus_nor_an_export(value: object) -> None:
    names = (
        "gpus",
        "gpu_memory_gb",
        "gpu_memory_share",
        "gpu_memory_utilization",
        "batch_size",
        "lr",
        "bridge",
        "kind",
    )
    for name in names:
        trainer = {"kind": "trainer", "batch_size": 8, "environment": {"task": "sort"}, name: value}
        for resolved in ({"services": {"trainer": trainer}}, {"services": {"trainer": trainer}, name: value}):
            memory_plan(resolved)
            facts = CardFacts(
                name="m", run="r", resolved=resolved, lines=[], step=1, is_adapter=False, has_chat_template=False,
                versions={},
            )  # fmt: skip
            assert "## Training" in _card(RUN, facts)


def test_a_state_of_more_services_machines_or_disks_than_a_run_may_have_is_damaged() -> None:
    """Readers would take minutes for it; 64 MiB have room for a hundred thousand."""
    for part, many in (
        ("services", [STARTING]),
        ("machines", [machine(1)]),
        ("gpus", machine(1).gpus[:1]),
        ("low_disks", [DISK]),
        ("write_faults", [FAULT]),
    ):
        assert many
        status = run_status().model_copy(update={part: many * MAX_SERVICES})
        assert RunStatus.model_validate_json(status.model_dump_json()) == status
        with pytest.raises(ValidationError, match=part):
            RunStatus.model_validate_json(status.model_copy(update={part: many * (MAX_SERVICES + 1)}).model_dump_json())


def test_a_state_of_a_hundred_thousand_of_anything_is_damaged(tmp_path: Path) -> None:
    """A screen looks through all of it several times a second: 12 MB of what cannot be written held it for minutes."""
    document = json.loads(run_status().model_dump_json())
    document["services"][0]["write_faults"] = [FAULT.model_dump()] * 60_000
    (tmp_path / STATE_FILE).write_text(json.dumps(document))
    status = read_state(tmp_path)
    assert status is not None
    assert len(list(disks(status))) == MAX_FAULTS
    document["services"][1]["write_faults"] = [FAULT.model_dump()] * 40_000
    (tmp_path / STATE_FILE).write_text(json.dumps(document))
    with pytest.raises(PeerError, match="damaged"):
        read_state(tmp_path)


def test_a_reason_or_a_name_of_a_model_of_a_million_characters_is_searched_in_linear_time() -> None:
    assert ASKED_FOR.search("a" * 1_000_000) is None  # quadratic, it would take hours
    assert MIXTURE.search("0" * 1_000_000) is None


@pytest.mark.parametrize("needs", [[["api"]], [[[]]], [1]], ids=str)
def test_needs_that_are_no_names_are_an_error_of_the_settings(needs: list[object]) -> None:
    with pytest.raises(ConfigError, match="is no name of a service"):
        load("tiny-cpu", [f"services.env.needs={json.dumps(needs)}"])


def test_a_pipe_or_endless_nesting_in_place_of_the_config_of_a_model_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000)
    assert known_config(str(tmp_path)) is None
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")  # held `doctor` and `plan`
    assert known_config(str(tmp_path)) is None
