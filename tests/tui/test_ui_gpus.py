"""The GPU screen and the GPU panel of the main screen: what they show on each kind of machine, and what keys do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from screen_fakes import GIB, NOW, drawn, four_services, gpu, run_status, service, state_after
from shown_screen import LARGE, SMALL, Shown, shown

from grpo_engine.wire.supervisor import GpuProcess, GpuStatus, MigInstance, ServiceState, UsageSampled
from grpo_tui.ui.screens.gpus import GpusScreen, ReportScroll
from grpo_tui.ui.widgets.gpu_bars import service_parts
from grpo_tui.ui.widgets.gpu_report import GpuReport, _whole_legend, report
from grpo_tui.ui.widgets.main.gpu_panel import GpuPanel

slow = pytest.mark.slow
RESOLVED = {
    "services": {
        "vllm": {"kind": "inference", "engine": "vllm", "device": "cuda", "gpu_memory_utilization": 0.3, "gpus": [0]},
        "trainer": {"kind": "trainer", "micro_batch_tokens": 4096, "seq_len": 2048, "gpus": [0]},
    }
}


def full_gpu(index: int = 0, **changes: Any) -> GpuStatus:
    """One GPU with vLLM, the trainer, another user and another container on it."""
    processes = [
        GpuProcess(pid=41004, command="VLLM::EngineCore", user="root", service="vllm", memory_bytes=int(36.1 * GIB)),
        GpuProcess(pid=41207, command="python -m grpo_engine train", service="trainer", memory_bytes=int(22.4 * GIB)),
        GpuProcess(pid=31337, command="python finetune.py", user="ann", memory_bytes=9 * GIB),
        GpuProcess(pid=4_000_000, is_visible=False, memory_bytes=2 * GIB),
        GpuProcess(pid=777, command="python -m x", user="me", service="vllm", run="other-run", memory_bytes=None),
    ]
    values: dict[str, Any] = {
        "power_watts": 512.0,
        "power_limit_watts": 700.0,
        "temperature_celsius": 61.0,
        "other_by_user": {"ann": 9 * GIB},
        "processes": processes,
        **changes,
    }
    return gpu(index, other=11 * GIB).model_copy(update=values)


def samples(make: Callable[[int], list[GpuStatus]], num: int = 100) -> list[UsageSampled]:
    """One every two seconds until now."""
    return [
        UsageSampled(
            number=10 + place,
            time=NOW - 2 * (num - 1 - place),
            cpu_percent={},
            rss_bytes={"api": 180 << 20, "vllm": 9 * GIB, "trainer": (2 + place // 50) * GIB},
            gpu_memory_bytes={},
            gpus=make(place),
        )
        for place in range(num)
    ]


def growing(place: int) -> list[GpuStatus]:
    """The trainer grows by 8 GiB at the 80th sample."""
    trainer = int((14.4 + (8 if place >= 80 else 0)) * GIB)
    held = {"vllm": int(36.1 * GIB), "trainer": trainer}
    return [full_gpu(by_service=held, memory_used_bytes=sum(held.values()) + 11 * GIB)]


def report_lines(make: Callable[[int], list[GpuStatus]], num: int = 3, **status: Any) -> list[str]:
    """The report at 78 columns after some samples, without a screen."""
    state = state_after(*samples(make, num), status=run_status(**status))
    return [line.plain for line in report(state, 78, chart_rows=6).lines]


async def open_report(screen: Shown, *events: UsageSampled) -> GpuReport:
    """Open the GPU screen, and send samples."""
    screen.connection.send(*events)
    await screen.go_to("gpus")
    await screen.until(lambda: screen.app.state.gpus.has_past and len(screen.app.state.gpus.moments) == len(events))
    part = screen.part(GpuReport)
    await screen.until(lambda: bool(part.plain_lines) and part.size.height == len(part.plain_lines))
    return part


def text_of(part: GpuReport) -> str:
    return "\n".join(part.plain_lines)


# --- the report ------------------------------------------------------------------------------------------------------


@slow
async def test_a_gpu_is_shown_with_memory_processes_plan_history_and_the_last_growth(tmp_path: Path) -> None:
    (tmp_path / "resolved.json").write_text(json.dumps(RESOLVED))
    async with shown(tmp_path, SMALL, run_status(run=tmp_path.name)) as screen:
        part = await open_report(screen, *samples(growing))
        await screen.until(lambda: "planned" in text_of(part))
        text = text_of(part)
        for words in (
            "97% busy · 512 of 700 W · 61°C",
            "69.5G of 80.0G used, 10.5G free",
            "vllm: 24.0G planned, it uses 36.1G, 12.1G more",
            "vllm 36.1G", "trainer 22.4G", "user ann 9.0G", "other containers 2.0G",
            "the whole run:",
            "trainer grew last (+8.0G in",
            "--micro-batch-tokens (now 4096)",
            "host memory",
        ):  # fmt: skip
            assert words in text
        rows = {line.split()[0]: line for line in part.plain_lines if line.split() and line.split()[0].isdigit()}
        assert "vllm, attempt 1" in rows["41004"]
        assert "36.1G" in rows["41004"]
        assert "user ann" in rows["31337"]
        assert "another container" in rows["4000000"]
        assert "run other-run: vllm" in rows["777"]
        assert " – " in rows["777"]
        await screen.check_widths()
        await screen.resize(LARGE)
        await screen.until(lambda: len(part.starts) == 1)  # the GPU and the host side by side
        assert "69.5G of 80.0G used, 10.5G free" in text_of(part)
        await screen.check_widths()


def test_services_have_their_own_characters_in_the_history() -> None:
    lines = report_lines(growing, num=100)
    top = next(place for place, line in enumerate(lines) if line.strip().startswith("memory   80.0G"))
    chart = "".join(line.partition("┤")[2] or line.partition("│")[2] for line in lines[top : top + 6])
    assert {"▓", "▚", "╳"} <= set(chart)
    assert next(line for line in lines if line.strip().startswith("busy")).count("█") > 50


def test_twelve_services_have_twelve_characters() -> None:
    names = [f"worker-{number}" for number in range(12)]
    one = full_gpu(by_service=dict.fromkeys(names, 5 * GIB), memory_used_bytes=60 * GIB, other_bytes=0,
                   other_by_user={}, processes=[])  # fmt: skip
    lines = report_lines(lambda place: [one], services=[service(name, kind="command") for name in names])
    assert len(set(lines[1].split("·")[0].strip())) == 12
    assert all(f"{name} 5.0G" in "\n".join(lines) for name in names)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"are_shares_known": False, "other_bytes": None, "by_service": {}, "other_by_user": {}},
         ["unknown processes", "▲ the driver does not report the memory of each process",
          "use by process is unknown"]),
        ({"are_shares_known": False, "other_bytes": None, "by_service": {}, "other_by_user": {},
          "processes": [GpuProcess(pid=4_000_000, is_visible=False, memory_bytes=GIB)]},
         ["unknown, may be ours", "▲ the driver lists pids of the host"]),
        ({"stale_s": 37.0}, ["stale 37s", "▲ these figures are 37s old: the driver does not answer"]),
        ({"has_mig": True, "utilization_percent": None, "mig": [MigInstance(
            name="NVIDIA H100 80GB HBM3 MIG 3g.40gb", uuid="MIG-1", gpu_instance=1, memory_used_bytes=24 * GIB,
            memory_total_bytes=40 * GIB)], "processes": [GpuProcess(pid=1, gpu_instance=1, memory_bytes=GIB)]},
         ["MIG, 1 instance", "3g.40gb (MIG 1) 24.0G of 40.0G", "MIG 1"]),
        ({"has_mig": True}, ["MIG is on without any instance"]),
        ({"memory_used_bytes": None, "memory_total_bytes": None}, ["the driver does not report how much"]),
        ({"processes": []}, ["the driver lists no process; the memory may be held by another container"]),
        ({"processes": [], "memory_used_bytes": 0, "by_service": {}, "other_bytes": 0}, ["no process on this GPU"]),
    ],
    ids=["no shares", "pids of the host", "stale", "mig", "mig without instances", "no figures", "unlisted", "idle"],
)  # fmt: skip
def test_the_report_says_what_the_driver_does_not(changes: dict[str, Any], words: list[str]) -> None:
    lines = report_lines(lambda place: [full_gpu(**changes)])
    for word in words:
        assert word in "\n".join(lines)
    assert all(len(line) <= 78 for line in lines)


def test_without_a_driver_the_report_says_why_and_shows_the_history_of_host_memory() -> None:
    text = "\n".join(report_lines(lambda place: [], num=100, gpus=[], services=four_services(on_gpu=False)))
    for words in ("no GPU reported yet", "grpo-tui doctor", "trainer 3.0G", "▓", "the whole run:"):
        assert words in text


def test_the_legend_of_a_run_that_is_over_has_the_order_of_its_services() -> None:
    state = state_after(*samples(lambda place: [], 1), status=run_status(gpus=[], services=four_services()))
    first, then = service_parts({"vllm": GIB}, state), service_parts({"trainer": GIB, "vllm": GIB, "api": GIB}, state)
    legend = [each.plain for each in _whole_legend([], [first, then], state)]
    assert legend == ["█ api none now", "▓ vllm none now", "▚ trainer none now"]


def test_an_out_of_memory_crash_is_shown_with_who_held_the_memory() -> None:
    services = four_services()
    why = "exit code 1; last lines:\n  CUDA out of memory. Tried to allocate 2.00 GiB."
    services[3] = services[3].model_copy(update={"state": ServiceState.FAILED, "why": why})
    text = "\n".join(report_lines(growing, num=100, services=services))
    words = "trainer ran out of memory, asking for 2.00 GiB more; just before, vllm held 36.1G"
    assert f"✗ {words}" in " ".join(text.split())


@slow
async def test_eight_gpus_scroll_block_by_block_and_are_redrawn_when_they_come_into_view(tmp_path: Path) -> None:
    def eight(watts: float) -> list[GpuStatus]:
        return [full_gpu(index, power_watts=watts) for index in range(8)]

    async with shown(tmp_path, SMALL, run_status(run=tmp_path.name, gpus=eight(300.0))) as screen:
        part = await open_report(screen, *samples(lambda _: eight(300.0), 10))
        together = "8 GPUs: 561.6G of 640.0G used · 97% busy on average · fullest"
        assert part.plain_lines[0].strip().startswith(together)
        titles = [line for line in part.plain_lines if line.startswith("─ ")]
        assert [title.split()[2] for title in titles[:-1]] == [str(number) for number in range(8)]
        assert len(part.starts) == 9
        assert text_of(part).count("300 of 700 W") == 8

        now = samples(lambda _: eight(451.0), 1)[0]
        screen.connection.send(now.model_copy(update={"number": 100, "time": NOW + 1}))
        await screen.until(lambda: "451 of 700 W" in text_of(part))
        assert text_of(part).count("451 of 700 W") < 4

        scroll = screen.part(ReportScroll)
        for key, block in (("n", 1), ("n", 2), ("p", 1), *(("n", block) for block in range(2, 8))):
            await screen.press(key)
            await screen.until(lambda block=block: scroll.scroll_offset.y == part.starts[block])  # type: ignore[misc]
        await screen.until(lambda: "451 of 700 W" in part.plain_lines[part.starts[7]])

        await screen.resize(LARGE)
        await screen.until(lambda: len(part.starts) == 5)
        assert any("GPU 0" in line and "GPU 1" in line for line in part.plain_lines)


@slow
async def test_keys_choose_the_span_of_the_history_and_whole_command_lines(tmp_path: Path) -> None:
    long = "python -m grpo_engine train " + " ".join(f"--flag-{number} {number}" for number in range(12))
    one = full_gpu(processes=[GpuProcess(pid=41207, command=long, service="trainer", memory_bytes=GIB)])
    async with shown(tmp_path, SMALL, run_status(run=tmp_path.name)) as screen:
        part = await open_report(screen, *samples(lambda place: [one]))
        assert "--flag-11" not in text_of(part)
        await screen.press("W")
        await screen.until(lambda: "--flag-11 11" in " ".join(text_of(part).split()))
        for words in ("the last hour:", "the last 10 minutes:", "the last minute:", "the whole run:"):
            await screen.press("h")
            await screen.until_text(GpuReport, words)
        gpus = screen.app.screen
        assert isinstance(gpus, GpusScreen)
        await screen.part(ReportScroll).remove()
        gpus.draw(screen.app.state)  # while the screen is taken down: no exception


# --- the panel of the main screen ------------------------------------------------------------------------------------


def test_the_panel_shows_power_temperature_and_a_short_history_where_there_is_room() -> None:
    state = state_after(*samples(growing))
    bar, _ = drawn(GpuPanel(), state, width=118)
    assert "69.5G of 80.0G ▆" in bar
    assert "97% busy █" in bar
    assert bar.rstrip().endswith("512W  61°C")
    assert drawn(GpuPanel(), state)[0].rstrip().endswith("97% busy   512W  61°C")


def test_eight_gpus_share_the_few_rows_of_a_small_terminal() -> None:
    state = state_after(status=run_status(gpus=[full_gpu(index) for index in range(8)]))
    *bars, legend = drawn(GpuPanel(), state, height=3)
    assert [word for bar in bars for word in bar.split() if word.isdigit()] == [str(index) for index in range(8)]
    assert sum(bar.count("97%") for bar in bars) == 8
    assert "vllm 288.8G" in legend
    *bars, _ = drawn(GpuPanel(), state, width=110)
    assert len(bars) == 8
    assert all("97% busy" in bar for bar in bars)


@pytest.mark.parametrize("width", [78, 118, 110], ids=["80x24", "120x36", "200x50"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stale_s": 37.0}, "stale 37s: the driver does not answer"),
        ({"are_shares_known": False, "other_bytes": None, "by_service": {}}, "memory by process unknown"),
        ({"has_mig": True, "utilization_percent": None}, "0 MIG instances"),
    ],
    ids=["stale", "no shares", "mig"],
)
def test_the_panel_says_what_is_stale_or_unknown(width: int, changes: dict[str, Any], words: str) -> None:
    assert words in "\n".join(drawn(GpuPanel(), state_after(status=run_status(gpus=[full_gpu(**changes)])), width))
