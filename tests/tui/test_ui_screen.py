"""The screen over a run without a daemon: what it shows at two sizes, and what each key asks for."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
from screen_fakes import (
    GIB,
    NOW,
    changed,
    four_services,
    gpu,
    gpu_short,
    metrics_line,
    port_taken,
    run_status,
    service,
    without_gpus,
)
from shown_screen import LARGE, SMALL, shown

from grpo_engine.wire.supervisor import Bye, Notice, ProbeOutcome, RunChanged, RunState, RunStatus, Snapshot
from grpo_tui.supervisor.keeper.proc import user_name
from grpo_tui.ui.app import GrpoScreen, exit_message
from grpo_tui.ui.keys import EVERYWHERE
from grpo_tui.ui.questions import about_stopping
from grpo_tui.ui.screens import SCREENS
from grpo_tui.ui.screens.confirm import ConfirmScreen, TakePortScreen
from grpo_tui.ui.screens.main import MainScreen
from grpo_tui.ui.screens.reading import ReadingScreen
from grpo_tui.ui.widgets.frame.activity_line import ActivityLine
from grpo_tui.ui.widgets.frame.header import HeaderLine
from grpo_tui.ui.widgets.frame.keys_bar import KeysBar
from grpo_tui.ui.widgets.lines import Lines
from grpo_tui.ui.widgets.main.gpu_panel import GpuPanel
from grpo_tui.ui.widgets.main.log_panel import LogLines
from grpo_tui.ui.widgets.main.metrics_panel import MetricsPanel
from grpo_tui.ui.widgets.main.services_table import ServicesTable
from grpo_tui.ui.widgets.main.warnings_bar import WarningsBar
from grpo_tui.view.state import Connection, ViewState

pytestmark = pytest.mark.slow
SIZES = pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "200x50"])


# --- what is shown ---------------------------------------------------------------------------------------------------


@SIZES
async def test_every_service_has_a_row_with_its_state_in_words(tmp_path: Path, size: tuple[int, int]) -> None:
    async with shown(tmp_path, size) as screen:
        rows = screen.lines(ServicesTable)
        assert [row.split()[:3] for row in rows[1:4]] == [
            ["api", "●", "ready"],
            ["vllm", "●", "ready"],
            ["env", "●", "ready"],
        ]
        assert rows[4].split()[:4] == ["▌", "trainer", "●", "ready"]
        for number in ("12m", "88%", "9.2G", "36.1G", "9001"):
            assert number in rows[2]


@SIZES
async def test_no_line_is_wider_than_its_part(tmp_path: Path, size: tuple[int, int]) -> None:
    async with shown(tmp_path, size, num_steps=123) as screen:
        for part in screen.app.main.query(Lines):
            for line in part.plain_lines:
                assert len(line) <= part.size.width, (type(part).__name__, line)


@SIZES
async def test_gpu_memory_is_shown_by_service(tmp_path: Path, size: tuple[int, int]) -> None:
    status = run_status(run=tmp_path.name, gpus=[gpu(other=12 << 30)])
    async with shown(tmp_path, size, status) as screen:
        bar, legend = screen.lines(GpuPanel)
        assert bar.startswith("GPU 0")
        assert "71.2G of 80.0G" in bar
        assert "97% busy" in bar
        for words in ("vllm 36.1G", "trainer 22.4G", "others 12.0G"):
            assert words in legend


@SIZES
async def test_without_a_driver_the_hosts_memory_is_shown_and_the_reason(tmp_path: Path, size: tuple[int, int]) -> None:
    async with shown(tmp_path, size, without_gpus()) as screen:
        assert "no NVIDIA driver" in screen.text(GpuPanel)
        assert "vllm 9.2G" in screen.text(GpuPanel)
        assert "gpu" not in screen.lines(ServicesTable)[0]


@SIZES
async def test_metrics_show_value_and_verdict(tmp_path: Path, size: tuple[int, int]) -> None:
    async with shown(tmp_path, size, num_steps=40, grpo__mean_ratio=1.41) as screen:
        text = screen.text(MetricsPanel)
        ratio = next(line for line in screen.lines(MetricsPanel) if "mean_ratio" in line)
        assert "1.410 ▲" in ratio
        for name in ("reward/mean", "clipped_fraction", "diff_mean", "diff_abs_mean", "loss", "grad_norm", "entropy"):
            assert name in text
        assert "tokens" in text
        assert "mean_ratio is 1.41" in screen.text(WarningsBar)


async def test_a_large_screen_shows_bands_and_more_metrics(tmp_path: Path) -> None:
    async with shown(tmp_path, LARGE, num_steps=40) as screen:
        text = screen.text(MetricsPanel)
        assert "0.8 – 1.2" in text
        assert "rollout/staleness_mean" in text
        assert screen.app.main.has_class("-wide")


async def test_before_the_first_step_the_metrics_say_so(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        assert "no step yet" in screen.text(MetricsPanel)


async def test_a_missing_metric_is_a_dash(tmp_path: Path) -> None:
    async with shown(tmp_path, num_steps=6, grpo__entropy=None) as screen:
        line = next(line for line in screen.lines(MetricsPanel) if "entropy" in line)
        assert line.split("entropy")[1].split()[0] == "–"


@SIZES
async def test_the_log_follows_its_end(tmp_path: Path, size: tuple[int, int]) -> None:
    async with shown(tmp_path, size) as screen:
        assert "step 39" in screen.text(LogLines)
        assert "90%" in screen.text(LogLines)
        with (tmp_path / "trainer.log").open("a") as file:
            file.write("\nthe newest line\n")
        await screen.until(lambda: "the newest line" in screen.text(LogLines))


async def test_the_first_line_says_which_run_and_how_it_stands(tmp_path: Path) -> None:
    async with shown(tmp_path, num_steps=123) as screen:
        header = screen.text(HeaderLine)
        assert tmp_path.name in header
        assert "● running" in header
        assert header.rstrip().endswith("up 12m05s")
        assert "step 123" in header


async def test_a_terminal_that_is_resized_is_arranged_anew(tmp_path: Path) -> None:
    async with shown(tmp_path, SMALL, num_steps=40) as screen:
        await screen.pilot.resize_terminal(*LARGE)
        await screen.until(lambda: screen.app.main.has_class("-wide"))
        assert screen.app.main.query_one(LogLines).region.x > 100
        await screen.pilot.resize_terminal(*SMALL)
        await screen.until(lambda: not screen.app.main.has_class("-wide"))
        assert "step 39" in screen.text(LogLines)


@SIZES
async def test_a_start_shows_once_what_it_is_at_and_not_twice_its_seconds(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    starting = service(
        "vllm",
        state="starting",
        phase="loading weights",
        health="port 9001 is closed",
        probe=ProbeOutcome.CLOSED,
        why="starting for 12 s, loading weights, port 9001 is closed (limit 300 s)",
    )
    async with shown(tmp_path, size) as screen:
        screen.connection.say(changed(2, NOW - 12, starting))
        await screen.until(lambda: "loading" in screen.row("vllm"))
        assert screen.row("vllm").count("loading") == 1
        assert "starting for" not in screen.row("vllm")
        assert "◐ starting 12s" in screen.row("vllm")


@SIZES
@pytest.mark.parametrize(
    ("probe", "sign"), [(ProbeOutcome.SILENT, "◌ hanging"), (ProbeOutcome.ENGINE_STALLED, "◍ stalled")]
)
async def test_what_hangs_or_stalls_is_called_so(
    tmp_path: Path, size: tuple[int, int], probe: ProbeOutcome, sign: str
) -> None:
    async with shown(tmp_path, size) as screen:
        screen.connection.say(changed(2, NOW, service("vllm", probe=probe, health="/health: so it is")))
        await screen.until(lambda: sign in screen.row("vllm"))
        assert "● ready" in screen.row("vllm")
        unhealthy = service("vllm", state="unhealthy", probe=probe, health="/health: so it is", why="no good answer")
        screen.connection.say(changed(3, NOW, unhealthy))
        await screen.until(lambda: "● ready" not in screen.row("vllm"))
        assert screen.row("vllm").split()[1:3] == sign.split()
        assert "/health: so" in screen.row("vllm")


async def test_an_unhealthy_service_that_answers_badly_is_called_unhealthy(tmp_path: Path) -> None:
    why = "no liveness for 60 s: 500"
    status = run_status(
        run=tmp_path.name, services=[service("vllm", state="unhealthy", probe=ProbeOutcome.BAD_STATUS, why=why)]
    )
    async with shown(tmp_path, LARGE, status) as screen:
        assert "▲ unhealthy" in screen.row("vllm")
        assert why in screen.row("vllm")


async def test_the_explanation_of_a_failure_is_its_first_line(tmp_path: Path) -> None:
    why = "exit code 3; last lines:\n  Traceback\n  RuntimeError: no data"
    status = run_status(run=tmp_path.name, services=[service("env", state="failed", why=why, pid=None)])
    async with shown(tmp_path, LARGE, status) as screen:
        assert screen.row("env").rstrip().endswith("exit code 3")
        assert "env failed: exit code 3" in screen.lines(WarningsBar)[0]


@SIZES
async def test_memory_of_strangers_is_named_by_user(tmp_path: Path, size: tuple[int, int]) -> None:
    shared = gpu(other=12 * GIB).model_copy(update={"other_by_user": {"ann": 9 * GIB}})
    async with shown(tmp_path, size, run_status(run=tmp_path.name, gpus=[shared])) as screen:
        bar, legend = screen.lines(GpuPanel)
        assert bar.count("╳") > 0
        assert "user ann 9.0G" in legend
        if size == LARGE:
            assert "others 3.0G" in legend


async def test_as_many_warnings_as_fit_are_told_in_full(tmp_path: Path) -> None:
    names = ("a", "b", "c", "d", "e")
    services = [service(name, state="failed", why="exit code 1") for name in names]
    async with shown(tmp_path, (100, 30), run_status(run=tmp_path.name, services=services)) as screen:
        bar = screen.app.main.query_one(WarningsBar)
        assert len(bar.plain_lines) == bar.size.height
        assert bar.plain_lines[-1].rstrip().endswith("w: what to do")
        assert [line[:10] for line in bar.plain_lines if line.startswith("✗")] == [f"✗ {name} failed" for name in names]
        assert bar.plain_lines[1].startswith("  → ")


async def test_twelve_services_and_eight_gpus_leave_room_for_the_log(tmp_path: Path) -> None:
    services = [service(f"worker{number:02d}", kind="command") for number in range(12)]
    status = run_status(run=tmp_path.name, services=services, gpus=[gpu(index) for index in range(8)])
    async with shown(tmp_path, SMALL, status) as screen:
        assert screen.app.main.query_one(LogLines).size.height >= 4
        assert "worker11" in screen.text(ServicesTable)
        for _ in range(12):
            await screen.pilot.press("up")
        await screen.until(lambda: screen.app.state.selected == "worker00")
        assert "worker00" in screen.text(ServicesTable)


async def test_ascii_terminals_get_ascii_only(tmp_path: Path) -> None:
    async with shown(tmp_path, is_ascii=True, num_steps=40) as screen:
        svg = screen.app.export_screenshot()
        assert all(glyph not in svg for glyph in "●▌▓█▁─…↑·")
        assert "ready" in svg


async def test_garbage_is_collected_again_once_the_screen_stands(tmp_path: Path) -> None:
    gc.disable()  # as the command line does while it loads
    try:
        async with shown(tmp_path):
            assert gc.isenabled()
    finally:
        gc.unfreeze()
        gc.enable()


async def test_a_tick_without_news_repaints_nothing(tmp_path: Path) -> None:
    async with shown(tmp_path, num_steps=40) as screen:
        await screen.pilot.pause()
        painted: list[Any] = []
        for part in screen.app.main.query(Lines):
            part.refresh = lambda *regions, **_: painted.append(regions)  # type: ignore[method-assign]
        screen.app.main.draw(screen.app.state)
        assert painted == []


# --- what keys do ----------------------------------------------------------------------------------------------------


async def test_v_restarts_the_inference_server_at_once_whatever_is_selected(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        await screen.pilot.press("v")
        await screen.until(lambda: bool(screen.connection.asked))
        assert screen.connection.asked == [("restart", "vllm")]


async def test_the_phases_of_a_restart_are_shown_with_their_seconds(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        screen.connection.say(
            changed(2, NOW - 37, service("vllm", state="stopping")),
            changed(3, NOW - 36.6, service("vllm", state="starting")),
        )
        await screen.until(lambda: "starting" in screen.text(ActivityLine))
        assert "◑ stopping 0.4s → ◐ starting 37s …" in screen.text(ActivityLine)
        assert "◐ starting 37s" in screen.text(ServicesTable)
        screen.connection.say(changed(4, NOW, service("vllm")))
        await screen.until(lambda: "ready" in screen.text(ActivityLine))
        assert "◐ starting 37s → ● ready   in 37s" in screen.text(ActivityLine)


async def test_the_phases_of_a_start_are_shown_while_they_last_and_summed_up_when_it_is_ready(tmp_path: Path) -> None:
    async with shown(tmp_path, LARGE) as screen:
        screen.connection.say(
            changed(2, NOW - 40, service("vllm", state="stopping")),
            changed(3, NOW - 39.6, service("vllm", state="waiting")),
            changed(4, NOW - 37.6, service("vllm", state="starting")),
            changed(5, NOW - 37, service("vllm", state="starting", phase="importing vLLM")),
            changed(6, NOW - 12, service("vllm", state="starting", phase="loading weights, 1 of 4 shards")),
            changed(7, NOW - 6, service("vllm", state="starting", phase="loading weights, 2 of 4 shards")),
        )
        await screen.until(lambda: "2 of 4" in screen.text(ActivityLine))
        assert screen.text(ActivityLine).rstrip() == (
            "vllm  ◑ stopping 0.4s → ○ waiting 2.0s → ◐ starting 38s: loading weights, 2 of 4 shards (12s) …"
        )
        screen.connection.say(changed(8, NOW, service("vllm")))
        await screen.until(lambda: "● ready" in screen.text(ActivityLine))
        assert screen.text(ActivityLine).rstrip() == (
            "vllm  ◑ stopping 0.4s → ○ waiting 2.0s → ◐ starting 38s → ● ready   in 40s"
            " · importing vLLM 25s · loading weights 12s"
        )


async def test_v_without_an_inference_server_says_so(tmp_path: Path) -> None:
    status = run_status(run=tmp_path.name, services=[service("web", kind="command")])
    async with shown(tmp_path, status=status) as screen:
        await screen.pilot.press("v")
        await screen.until(lambda: "no inference server" in screen.text(ActivityLine))
        assert screen.connection.asked == []


async def test_r_restarts_the_selected_service(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        await screen.pilot.press("up", "r")
        await screen.until(lambda: bool(screen.connection.asked))
        assert screen.connection.asked == [("restart", "env")]


async def test_s_stops_what_runs_and_starts_what_does_not(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        await screen.pilot.press("up", "s")
        await screen.until(lambda: bool(screen.connection.asked))
        screen.connection.say(changed(2, NOW, service("env", state="stopped", pid=None)))
        await screen.until(lambda: "■ stopped" in screen.text(ServicesTable))
        assert "s start" in screen.text(KeysBar)
        await screen.pilot.press("s")
        await screen.until(lambda: len(screen.connection.asked) == 2)
        assert screen.connection.asked == [("stop", "env"), ("start", "env")]


async def test_stopping_the_trainer_is_asked_about_first(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        await screen.pilot.press("s")
        await screen.until(lambda: isinstance(screen.app.screen, ConfirmScreen))
        await screen.pilot.press("n")
        await screen.until(lambda: isinstance(screen.app.screen, MainScreen))
        assert screen.connection.asked == []


def test_a_service_that_still_waits_is_asked_about_as_one_without_a_process() -> None:
    trainer = service("trainer", kind="trainer", state="waiting", pid=None)
    state = ViewState(run_folder=Path("run"), now=NOW, status=run_status(services=[trainer]))
    question = about_stopping([trainer], state)
    assert question is not None
    assert question.named[0] == "trainer, waiting, no process yet, after step 0"


def refused(name: str, user: str) -> RunStatus:
    """A run in which a foreign process holds the port of a service."""
    others = [one for one in four_services() if one.name != name]
    return run_status(services=[port_taken(name, user), *others])


ME = user_name(os.getuid())


@pytest.mark.parametrize(("key", "do"), [("s", "start"), ("r", "restart"), ("v", "restart")])
@pytest.mark.parametrize(("answer", "took_ports"), [("e", True), ("t", False)])
async def test_a_stranger_on_the_port_is_named_and_ended_only_on_the_word(
    tmp_path: Path, key: str, do: str, answer: str, took_ports: bool
) -> None:
    async with shown(tmp_path, status=refused("vllm", ME)) as screen:
        await screen.until(lambda: screen.app.state.selected == "vllm")
        await screen.pilot.press(key)
        await screen.until(lambda: isinstance(screen.app.screen, TakePortScreen))
        assert f"port 9001 is held by pid 4242 (user {ME}): python app.py" in screen.picture
        assert screen.connection.asked == []
        await screen.pilot.press(answer)
        await screen.until(lambda: bool(screen.connection.asked))
        assert screen.connection.asked == [(do, "vllm")]
        assert screen.connection.took_ports == [took_ports]


@pytest.mark.parametrize("key", ["n", "escape", "enter", "q"])
async def test_a_stranger_on_the_port_is_left_alone_by_every_other_key(tmp_path: Path, key: str) -> None:
    async with shown(tmp_path, status=refused("vllm", ME)) as screen:
        await screen.pilot.press("s")
        await screen.until(lambda: isinstance(screen.app.screen, TakePortScreen))
        await screen.pilot.press(key)
        await screen.until(lambda: isinstance(screen.app.screen, MainScreen))
        assert screen.connection.asked == []


async def test_another_users_process_is_not_offered_to_be_ended(tmp_path: Path) -> None:
    async with shown(tmp_path, status=refused("vllm", f"not-{ME}")) as screen:
        await screen.pilot.press("s")
        await screen.until(lambda: bool(screen.connection.asked))
        assert (screen.connection.asked, screen.connection.took_ports) == ([("start", "vllm")], [False])


async def test_a_lack_of_gpu_memory_is_tried_again_without_a_question(tmp_path: Path) -> None:
    async with shown(tmp_path, status=run_status(services=[gpu_short("vllm", ME)])) as screen:
        await screen.pilot.press("s")
        await screen.until(lambda: bool(screen.connection.asked))
        assert (screen.connection.asked, screen.connection.took_ports) == ([("start", "vllm")], [False])


async def test_kill_asks_first_and_names_the_process(tmp_path: Path) -> None:
    async with shown(tmp_path, num_steps=7) as screen:
        await screen.pilot.press("K")
        await screen.until(lambda: isinstance(screen.app.screen, ConfirmScreen))
        assert f"trainer, ready, pid {4000 + len('trainer')}" in screen.picture
        assert "step 7" in screen.picture
        await screen.pilot.press("n")
        await screen.until(lambda: isinstance(screen.app.screen, MainScreen))
        assert screen.connection.asked == []
        await screen.pilot.press("K", "y")
        await screen.until(lambda: bool(screen.connection.asked))
        assert screen.connection.asked == [("kill", "trainer")]


async def test_what_does_not_run_is_not_killed(tmp_path: Path) -> None:
    status = run_status(run=tmp_path.name, services=[service("env", state="stopped", pid=None)])
    async with shown(tmp_path, status=status) as screen:
        await screen.pilot.press("K")
        await screen.until(lambda: "nothing to kill" in screen.text(ActivityLine))
        assert screen.connection.asked == []


async def test_c_opens_the_newest_crash_report_of_the_selected_service(tmp_path: Path) -> None:
    for name, attempt in (("trainer", 2), ("trainer", 10), ("trainer-b", 11), ("env", 12)):
        (tmp_path / f"crash-{name}-{attempt}.txt").write_text(f"this is [b]attempt {attempt} of {name}")
    async with shown(tmp_path) as screen:
        await screen.pilot.press("c")
        await screen.until(lambda: isinstance(screen.app.screen, ReadingScreen))
        await screen.until(lambda: "this is [b]attempt 10 of trainer" in screen.picture)
        assert "crash-trainer-10.txt" in screen.picture
        await screen.pilot.press("c")
        await screen.until(lambda: isinstance(screen.app.screen, MainScreen))


async def test_c_without_a_crash_report_says_so(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        await screen.pilot.press("c")
        await screen.until(lambda: "trainer has no crash report" in screen.text(ActivityLine))
        assert isinstance(screen.app.screen, MainScreen)


async def test_a_restart_in_view_does_not_hide_what_a_key_is_answered(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        screen.connection.say(changed(2, NOW - 1, service("vllm", state="stopping")))
        await screen.until(lambda: "◑ stopping 1s …" in screen.text(ActivityLine))
        await screen.pilot.press("c")
        await screen.until(lambda: "trainer has no crash report" in screen.text(ActivityLine))


async def test_ending_the_run_asks_first_and_names_every_process(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        await screen.pilot.press("D")
        await screen.until(lambda: isinstance(screen.app.screen, ConfirmScreen))
        for one in four_services():
            assert f"{one.name}, ready, pid {one.pid}" in screen.picture
        await screen.pilot.press("y")
        await screen.until(lambda: bool(screen.connection.asked))
        assert screen.connection.asked == [("down", None)]


async def test_a_refused_command_is_explained(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        screen.connection.refusal = "vllm is being restarted already"
        await screen.pilot.press("v")
        await screen.until(lambda: "refused" in screen.text(ActivityLine))
        assert "vllm is being restarted already" in screen.text(ActivityLine)


async def test_another_service_shows_another_log(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        await screen.pilot.press("up")
        await screen.until(lambda: "env: step 39" in screen.text(LogLines))
        assert "trainer: step" not in screen.text(LogLines)


async def test_a_click_selects_a_service(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        await screen.pilot.click(ServicesTable, offset=(6, 2))
        await screen.until(lambda: screen.app.state.selected == "vllm")


async def test_reading_back_holds_the_log_and_f_follows_again(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        await screen.pilot.press("pageup")
        await screen.until(lambda: not screen.app.state.is_following)
        before = screen.lines(LogLines)
        with (tmp_path / "trainer.log").open("a") as file:
            file.write("\nnews\n")
        await screen.until(lambda: "news" in screen.app.state.log.lines)
        assert screen.lines(LogLines) == before
        await screen.pilot.press("f")
        await screen.until(lambda: "news" in screen.text(LogLines))


async def test_long_lines_can_be_shifted(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        assert screen.lines(LogLines)[0].endswith("…")
        await screen.pilot.press("right", "right")
        await screen.until(lambda: "ratio 1.00" in screen.text(LogLines))


async def test_zoom_gives_the_body_to_the_log_and_back(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        log = screen.app.main.query_one(LogLines)
        before = log.size.height
        await screen.pilot.press("z")
        await screen.until(lambda: log.size.height == 20)
        await screen.pilot.press("z")
        await screen.until(lambda: log.size.height == before)


@pytest.mark.parametrize("key", ["question_mark", "w"])
async def test_pages_open_and_close(tmp_path: Path, key: str) -> None:
    async with shown(tmp_path) as screen:
        await screen.pilot.press(key)
        await screen.until(lambda: isinstance(screen.app.screen, ReadingScreen))
        await screen.pilot.press("escape")
        await screen.until(lambda: isinstance(screen.app.screen, MainScreen))


@pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
async def test_leaving_detaches_and_asks_the_daemon_for_nothing(tmp_path: Path, key: str) -> None:
    async with shown(tmp_path) as screen:
        await screen.pilot.press(key)
        assert screen.app._exit
        assert screen.connection.asked == []


def test_every_key_has_a_word_and_a_sentence() -> None:
    bindings = [
        *(binding for screen in SCREENS.values() for binding in screen.BINDINGS),
        *ConfirmScreen.BINDINGS,
        *TakePortScreen.BINDINGS,
        *ReadingScreen.BINDINGS,
        *GrpoScreen.BINDINGS,
    ]
    assert all(binding.description and binding.tooltip for binding in bindings)
    for screen in SCREENS.values():
        pressed = [key for each in (*EVERYWHERE, *screen.KEYS) for key in each.key.split(",")]
        assert len(set(pressed)) == len(pressed), screen.PLACE


@SIZES
async def test_every_key_of_the_last_line_fits(tmp_path: Path, size: tuple[int, int]) -> None:
    async with shown(tmp_path, size) as screen:
        for label in ("v restart vLLM", "q detach", "D end", "? help"):
            assert label in screen.text(KeysBar)


# --- when the daemon goes, and comes back ----------------------------------------------------------------------------


async def test_a_daemon_that_dies_leaves_the_last_state_from_the_files(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        last = run_status(run=tmp_path.name, services=[service("trainer", state="unhealthy")])
        screen.connection.stored = last
        screen.connection.is_there = False
        screen.connection.hang_up()
        await screen.until(lambda: screen.app.state.connection is Connection.LOST)
        await screen.until(lambda: "unhealthy" in screen.text(ServicesTable))
        assert "last known state, reconnecting" in screen.text(ActivityLine)
        assert "no supervisor" in screen.text(HeaderLine)


async def test_a_daemon_that_comes_back_is_heard_again(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        screen.connection.is_there = False
        screen.connection.hang_up()
        await screen.until(lambda: screen.app.state.connection is Connection.LOST)
        screen.connection.say(Snapshot(number=1, status=run_status(run=tmp_path.name, state=RunState.DEGRADED)))
        screen.connection.is_there = True
        await screen.until(lambda: screen.app.state.connection is Connection.LIVE)
        assert "degraded" in screen.text(HeaderLine)


async def test_the_end_of_the_run_is_shown_and_the_screen_stays(tmp_path: Path) -> None:
    async with shown(tmp_path, num_steps=30) as screen:
        over = run_status(run=tmp_path.name, state=RunState.FINISHED, ended_at=NOW)
        screen.connection.stored = over
        screen.connection.is_there = False
        screen.connection.say(RunChanged(number=2, time=NOW, state=RunState.FINISHED), Bye(state=RunState.FINISHED))
        screen.connection.hang_up()
        await screen.until(lambda: "q leaves" in screen.text(ActivityLine))
        assert "✓ finished" in screen.text(HeaderLine)
        assert screen.app.is_running
        assert exit_message(screen.app.state).startswith(f"{tmp_path.name} finished after 12m05s, step 30")


@pytest.mark.parametrize("key", ["s", "r", "v"])
async def test_in_a_run_that_is_over_nothing_is_started_and_nobody_is_ended(tmp_path: Path, key: str) -> None:
    over = refused("vllm", ME).model_copy(update={"state": RunState.FAILED, "ended_at": NOW})
    async with shown(tmp_path, status=over) as screen:
        screen.connection.stored = over
        screen.connection.is_there = False
        screen.connection.say(Bye(state=RunState.FAILED))
        screen.connection.hang_up()
        await screen.until(lambda: "q leaves" in screen.text(ActivityLine))
        await screen.pilot.press(key)
        await screen.until(lambda: "grpo-tui --profile hermes8b-shared starts another" in screen.text(ActivityLine))
        assert screen.connection.asked == []


async def test_detaching_from_a_live_run_says_how_to_come_back(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        assert exit_message(screen.app.state) == (
            f"detached from {tmp_path.name}; grpo-tui attach {tmp_path.name} reconnects, "
            f"grpo-tui down {tmp_path.name} ends it"
        )


async def test_stages_of_the_teardown_are_read_out(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        screen.connection.say(Notice(number=2, time=NOW, severity="info", service=None, text="vllm ended in 0.3 s"))
        await screen.until(lambda: "vllm ended in 0.3 s" in screen.text(ActivityLine))


async def test_a_run_folder_that_is_deleted_under_it_is_survived(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    async with shown(folder, num_steps=5) as screen:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        await screen.until(lambda: screen.app.state.history.last is None)
        await screen.until(lambda: screen.app.state.log.lines == ())
        assert screen.app.is_running


async def test_steps_that_the_trainer_does_while_one_looks_appear(tmp_path: Path) -> None:
    async with shown(tmp_path, num_steps=5) as screen:
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(metrics_line(6).model_dump_json() + "\n")
        await screen.until(lambda: "step 6" in screen.text(HeaderLine))
