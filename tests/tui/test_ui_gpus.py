"""The GPU inspector and the strip of the first screen: what they show on each kind of machine, and what keys do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from screen_fakes import GIB, NOW, four_services, gpu, run_status, service, without_gpus
from shown_screen import LARGE, SMALL, Shown, shown

from grpo_engine.wire.supervisor import GpuProcess, GpuStatus, MigInstance, RunStatus, ServiceState, UsageSampled
from grpo_tui.ui.screens.gpus import GpusScreen, ReportScroll
from grpo_tui.ui.widgets.gpu_report import GpuReport
from grpo_tui.ui.widgets.lines import Lines
from grpo_tui.ui.widgets.main.gpu_panel import GpuPanel

pytestmark = pytest.mark.slow
SIZES = pytest.mark.parametrize("size", [SMALL, (120, 36), LARGE], ids=["80x24", "120x36", "200x50"])
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


async def inspected(screen: Shown, *told: UsageSampled) -> GpuReport:
    """Open the inspector, and let the daemon tell samples."""
    screen.connection.say(*told)
    await screen.pilot.press("2")
    await screen.until(lambda: isinstance(screen.app.screen, GpusScreen) and screen.app.screen.is_mounted)
    await screen.until(lambda: screen.app.state.gpus.has_past and len(screen.app.state.gpus.moments) == len(told))
    report = screen.app.screen.query_one(GpuReport)
    await screen.until(lambda: bool(report.plain_lines) and report.size.height == len(report.plain_lines))
    return report


def text_of(report: GpuReport) -> str:
    return "\n".join(report.plain_lines)


@SIZES
async def test_a_gpu_is_told_in_full_and_no_line_is_too_wide(tmp_path: Path, size: tuple[int, int]) -> None:
    (tmp_path / "resolved.json").write_text(json.dumps(RESOLVED))
    async with shown(tmp_path, size, run_status(run=tmp_path.name)) as screen:
        report = await inspected(screen, *samples(growing))
        await screen.until(lambda: "planned" in text_of(report))
        text = text_of(report)
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
        rows = {line.split()[0]: line for line in report.plain_lines if line.split() and line.split()[0].isdigit()}
        assert "vllm, attempt 1" in rows["41004"]
        assert "36.1G" in rows["41004"]
        assert "user ann" in rows["31337"]
        assert "another container" in rows["4000000"]
        assert "run other-run: vllm" in rows["777"]
        assert " – " in rows["777"]
        for part in screen.app.screen.query(Lines):
            for line in part.plain_lines:
                assert len(line) <= part.size.width, (type(part).__name__, line)


async def test_the_history_tells_services_apart_without_colours(tmp_path: Path) -> None:
    async with shown(tmp_path, (120, 36), run_status(run=tmp_path.name)) as screen:
        report = await inspected(screen, *samples(growing))
        lines = report.plain_lines
        top = next(place for place, line in enumerate(lines) if line.strip().startswith("memory   80.0G"))
        chart = "".join(line.partition("┤")[2] or line.partition("│")[2] for line in lines[top : top + 8])
        assert {"▓", "▚", "╳"} <= set(chart)
        assert next(line for line in lines if line.strip().startswith("busy")).count("█") > 50


async def test_eight_gpus_scroll_and_n_and_p_go_from_one_to_the_next(tmp_path: Path) -> None:
    async with shown(tmp_path, SMALL, run_status(run=tmp_path.name)) as screen:
        told = samples(lambda place: [full_gpu(index) for index in range(8)], num=5)
        report = await inspected(screen, *told)
        together = "8 GPUs: 561.6G of 640.0G used · 97% busy on average · fullest"
        assert report.plain_lines[0].strip().startswith(together)
        titles = [line for line in report.plain_lines if line.startswith("─ ")]
        assert [title.split()[2] for title in titles[:-1]] == [str(number) for number in range(8)]
        assert len(report.starts) == 9
        scroll = screen.app.screen.query_one(ReportScroll)
        for key, block in (("n", 1), ("n", 2), ("p", 1)):
            await screen.pilot.press(key)
            await screen.until(lambda block=block: scroll.scroll_offset.y == report.starts[block])  # type: ignore[misc]
        await screen.pilot.resize_terminal(*LARGE)
        await screen.until(lambda: len(report.starts) == 5)
        assert any("GPU 0" in line and "GPU 1" in line for line in report.plain_lines)


async def test_news_that_comes_while_the_screen_is_taken_down_breaks_nothing(tmp_path: Path) -> None:
    async with shown(tmp_path, SMALL, run_status(run=tmp_path.name)) as screen:
        await inspected(screen, *samples(growing, num=3))
        gpus = screen.app.screen
        assert isinstance(gpus, GpusScreen)
        await gpus.query_one(ReportScroll).remove()
        gpus.draw(screen.app.state)


async def test_twelve_services_have_twelve_looks(tmp_path: Path) -> None:
    names = [f"worker-{number}" for number in range(12)]
    status = run_status(run=tmp_path.name, services=[service(name, kind="command") for name in names])
    held = dict.fromkeys(names, 5 * GIB)
    one = full_gpu(by_service=held, memory_used_bytes=60 * GIB, other_bytes=0, other_by_user={}, processes=[])
    async with shown(tmp_path, (120, 36), status) as screen:
        report = await inspected(screen, *samples(lambda place: [one], num=3))
        bar = report.plain_lines[1].split("·")[0].strip()
        assert len(set(bar)) == 12
        assert all(f"{name} 5.0G" in text_of(report) for name in names)


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
    ids=["no shares", "foreign pids", "hanging", "mig", "mig without instances", "no figures", "unlisted", "idle"],
)  # fmt: skip
async def test_what_the_driver_does_not_tell_is_said(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    async with shown(tmp_path, SMALL, run_status(run=tmp_path.name)) as screen:
        report = await inspected(screen, *samples(lambda place: [full_gpu(**changes)], num=3))
        for word in words:
            assert word in text_of(report)
        assert all(len(line) <= report.size.width for line in report.plain_lines)


async def test_without_a_driver_the_machines_memory_has_the_same_history_and_the_reason_is_said(tmp_path: Path) -> None:
    async with shown(tmp_path, SMALL, without_gpus()) as screen:
        report = await inspected(screen, *samples(lambda place: []))
        text = text_of(report)
        assert "no GPU reported yet" in text  # these samples say no reason
        assert "grpo-tui doctor" in text
        assert "trainer 3.0G" in text
        assert "▓" in text
        assert "the whole run:" in text


async def test_a_crash_is_blamed_with_the_flag_to_lower(tmp_path: Path) -> None:
    (tmp_path / "resolved.json").write_text(json.dumps(RESOLVED))
    services = four_services()
    why = "exit code 1; last lines:\n  CUDA out of memory. Tried to allocate 2.00 GiB."
    services[3] = services[3].model_copy(update={"state": ServiceState.FAILED, "why": why})
    async with shown(tmp_path, (120, 36), run_status(run=tmp_path.name, services=services)) as screen:
        report = await inspected(screen, *samples(growing))
        await screen.until(lambda: "now 4096" in text_of(report))
        assert "✗ trainer ran out of memory, asking for 2.00 GiB more; just before, vllm held 36.1G" in text_of(report)


async def test_keys_turn_the_span_of_the_history_and_the_command_lines(tmp_path: Path) -> None:
    long = "python -m grpo_engine train " + " ".join(f"--flag-{number} {number}" for number in range(12))
    one = full_gpu(processes=[GpuProcess(pid=41207, command=long, service="trainer", memory_bytes=GIB)])
    async with shown(tmp_path, SMALL, run_status(run=tmp_path.name)) as screen:
        report = await inspected(screen, *samples(lambda place: [one]))
        assert "--flag-11" not in text_of(report)
        await screen.pilot.press("w")
        await screen.until(lambda: "--flag-11 11" in " ".join(text_of(report).split()))
        for words in ("the last hour:", "the last 10 minutes:", "the last minute:", "the whole run:"):
            await screen.pilot.press("h")
            await screen.until(lambda words=words: words in text_of(report))  # type: ignore[misc]


async def test_the_strip_shows_power_temperature_and_a_short_history_where_there_is_room(tmp_path: Path) -> None:
    async with shown(tmp_path, (120, 36), run_status(run=tmp_path.name)) as screen:
        screen.connection.say(*samples(growing))
        await screen.until(lambda: len(screen.app.state.gpus.moments) == 100)
        bar, _ = screen.lines(GpuPanel)
        assert "69.5G of 80.0G ▆" in bar
        assert "97% busy █" in bar
        assert bar.rstrip().endswith("512W  61°C")
        await screen.pilot.resize_terminal(*SMALL)
        await screen.until(lambda: "█" not in screen.lines(GpuPanel)[0].partition("busy")[2])
        assert screen.lines(GpuPanel)[0].rstrip().endswith("97% busy   512W  61°C")


async def test_eight_gpus_share_the_few_rows_of_a_small_terminal(tmp_path: Path) -> None:
    status = run_status(run=tmp_path.name, gpus=[full_gpu(index) for index in range(8)])
    async with shown(tmp_path, SMALL, status) as screen:
        *bars, legend = screen.lines(GpuPanel)
        assert [word for bar in bars for word in bar.split() if word.isdigit()] == [str(index) for index in range(8)]
        assert sum(bar.count("97%") for bar in bars) == 8
        assert "vllm 288.8G" in legend
        await screen.pilot.resize_terminal(*LARGE)
        await screen.until(lambda: len(screen.lines(GpuPanel)) == 9)
        assert all("97% busy" in bar for bar in screen.lines(GpuPanel)[:8])


@SIZES
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stale_s": 37.0}, "stale 37s: the driver does not answer"),
        ({"are_shares_known": False, "other_bytes": None, "by_service": {}}, "memory by process unknown"),
        ({"has_mig": True, "utilization_percent": None}, "0 MIG instances"),
    ],
)
async def test_the_strip_says_what_is_stale_or_not_known(
    tmp_path: Path, size: tuple[int, int], changes: dict[str, Any], words: str
) -> None:
    status: RunStatus = run_status(run=tmp_path.name, gpus=[full_gpu(**changes)])
    async with shown(tmp_path, size, status) as screen:
        assert words in screen.text(GpuPanel)
        width = screen.app.main.query_one(GpuPanel).size.width
        assert all(len(line) <= width for line in screen.lines(GpuPanel))


async def test_gpus_out_of_sight_are_drawn_when_they_come_into_sight_and_not_with_each_sample(tmp_path: Path) -> None:
    def eight(watts: float) -> list[GpuStatus]:
        return [full_gpu(index, power_watts=watts) for index in range(8)]

    async with shown(tmp_path, SMALL, run_status(run=tmp_path.name, gpus=eight(300.0))) as screen:
        before, now = samples(lambda _: eight(300.0), 10), samples(lambda _: eight(451.0), 1)[0]
        report = await inspected(screen, *before)
        assert text_of(report).count("300 of 700 W") == 8
        screen.connection.say(now.model_copy(update={"number": 100, "time": NOW + 1}))
        await screen.until(lambda: "451 of 700 W" in text_of(report))
        assert text_of(report).count("451 of 700 W") < 4
        await screen.pilot.press(*"nnnnnnn")
        last = report.starts[7]
        await screen.until(lambda: "451 of 700 W" in report.plain_lines[last])
