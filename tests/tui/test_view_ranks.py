"""The ranks of a trainer on the screens: a row each, figures from samples, and a warning about one that hangs."""

from __future__ import annotations

import re
from pathlib import Path

from screen_fakes import STARTED, metrics_line, run_status, service
from textual.content import Content

from grpo_engine.wire.supervisor import RankStall, RankStatus, RankUsage, UsageSampled
from grpo_tui.run_files.timeline import after_event
from grpo_tui.ui.pages import service_page
from grpo_tui.ui.widgets.gpu_report import report
from grpo_tui.ui.widgets.main.services_table import explanation
from grpo_tui.view.diagnosis import diagnose
from grpo_tui.view.rank_rows import rank_rows
from grpo_tui.view.service_details import ServiceHistory
from grpo_tui.view.state import StatusRead, ViewState, reduce

MB = 1 << 20
STALL = RankStall(
    ranks=[1], since=STARTED + 60, text="rank 1 is in the loss, step 3; rank 0 waits for it in the all-reduce, step 3"
)
RANKS = [
    RankStatus(rank=0, pid=4101, gpu=0, place="the all-reduce, step 3", since=STARTED + 60, is_waiting=True),
    RankStatus(rank=1, pid=4102, gpu=1),
]
SAMPLE = UsageSampled(
    number=1,
    time=STARTED + 100,
    cpu_percent={"trainer": 101.0},
    rss_bytes={"trainer": 900 * MB},
    gpu_memory_bytes={},
    gpus=[],
    ranks={"trainer": [RankUsage(rank=0, cpu_percent=99.0, rss_bytes=500 * MB, gpu_memory_bytes=40_000 * MB)]},
)


def shown() -> ViewState:
    status = after_event(run_status(services=[service("trainer", ranks=RANKS, rank_stall=STALL)], gpus=[]), SAMPLE)
    return reduce(ViewState(run_folder=Path(), now=STARTED + 100), StatusRead(status=status))


def text_of(rows: list[Content]) -> str:
    return "\n".join(row.plain.rstrip() for row in rows)


def test_each_rank_has_a_row_with_its_process_gpu_figures_and_place_on_the_gpu_page_and_the_service_page() -> None:
    state = shown()
    trainer = state.service("trainer")
    assert trainer is not None
    for text in (
        text_of(report(state, 120, 6).lines),
        service_page(trainer, None, ServiceHistory(), state, 120).plain,
    ):
        titles, first, second = re.findall(r"^  (?:pid|\d+)  .*rank.*$", text, flags=re.MULTILINE)[:3]
        assert re.sub(" +", " ", titles) == " pid rank gpu memory gpu memory cpu place"
        assert re.sub(" +", " ", first) == " 4101 trainer rank 0 0 500M 39.1G 99% waits 40s in the all-reduce, step 3"
        assert re.sub(" +", " ", second) == " 4102 trainer rank 1 1 – – – running"


def test_a_rank_that_hangs_is_one_warning_with_the_seconds_and_stands_beside_its_service() -> None:
    state = shown()
    trainer = state.service("trainer")
    assert trainer is not None
    lines = [metrics_line(1)]
    [warning] = diagnose(lines, run_status(services=[trainer]), now=STARTED + 1000)
    assert (warning.id, warning.severity) == ("rank-stalled:trainer", "warning")
    assert warning.text == f"trainer: no progress for 15m40s: {STALL.text}"
    assert "grpo-tui logs trainer" in (warning.hint or "")
    assert explanation(trainer, state) == (STALL.text, ".warning")
    assert diagnose(lines, run_status(services=[service("trainer", ranks=RANKS)]), now=lines[0].time) == []


def test_ranks_on_machines_of_a_cluster_have_a_column_for_these() -> None:
    ranks = [rank.model_copy(update={"machine": f"machine-{1 + rank.rank}"}) for rank in RANKS]
    titles, first, second = rank_rows([service("trainer", ranks=ranks)], STARTED)
    assert titles.split()[:4] == ["pid", "rank", "machine", "gpu"]
    assert "trainer rank 0  machine-1" in first
    assert "trainer rank 1  machine-2" in second


def test_on_a_machine_without_gpus_ranks_have_no_columns_for_them() -> None:
    ranks = [rank.model_copy(update={"gpu": None}) for rank in RANKS]
    titles, *_ = rank_rows([service("trainer", ranks=ranks)], STARTED)
    assert titles.split() == ["pid", "rank", "memory", "cpu", "place"]
