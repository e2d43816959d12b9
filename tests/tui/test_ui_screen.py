"""The main screen without a supervisor: what its parts show, and which commands its keys send."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from screen_fakes import (
    GIB,
    NOW,
    changed,
    drawn,
    four_services,
    gpu,
    gpu_short,
    metrics_line,
    port_taken,
    run_status,
    service,
    state_after,
    without_gpus,
)
from shown_screen import LARGE, SMALL, shown
from textual.geometry import Region

from grpo_engine.diagnosis.evidence import RunSettings
from grpo_engine.wire.supervisor import Bye, Notice, ProbeOutcome, RunChanged, RunState, RunStatus, Snapshot, WaitsFor
from grpo_tui.supervisor.keeper.proc import user_name
from grpo_tui.ui.app import GrpoScreen, exit_message, next_commands, title_of
from grpo_tui.ui.keys import EVERYWHERE
from grpo_tui.ui.palette import RunCommands
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
from grpo_tui.view.format import age_text
from grpo_tui.view.state import Connection, SettingsRead, Ticked, ViewState, reduce

slow = pytest.mark.slow
SIZES = pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "200x50"])
WIDTHS = pytest.mark.parametrize("width", [78, 110], ids=["80x24", "200x50"])
"""Of the panels of the main screen at these sizes."""
ME = user_name(os.getuid())


# --- what is shown ---------------------------------------------------------------------------------------------------


@slow
@SIZES
async def test_services_gpus_metrics_warnings_keys_and_the_log_are_shown(tmp_path: Path, size: tuple[int, int]) -> None:
    shared = gpu(other=12 * GIB).model_copy(update={"other_by_user": {"ann": 9 * GIB}})
    status = run_status(run=tmp_path.name, gpus=[shared])
    async with shown(tmp_path, size, status, num_steps=123, grpo__mean_ratio=1.41) as screen:
        await screen.check_widths()
        header = screen.text(HeaderLine)
        assert tmp_path.name in header
        assert "● running" in header
        assert "step 123" in header
        assert header.rstrip().endswith("up 12m05s")

        rows = screen.lines(ServicesTable)
        assert [row.split()[:3] for row in rows[1:4]] == [[name, "●", "ready"] for name in ("api", "vllm", "env")]
        assert rows[4].split()[:4] == ["▌", "trainer", "●", "ready"]
        for number in ("12m", "88%", "9.2G", "36.1G", "9001"):
            assert number in rows[2]

        bar, legend = screen.lines(GpuPanel)
        assert bar.startswith("GPU 0")
        assert "╳" in bar
        for words in ("71.2G of 80.0G", "97% busy"):
            assert words in bar
        for words in ("vllm 36.1G", "trainer 22.4G", "user ann 9.0G", *(["others 3.0G"] if size == LARGE else [])):
            assert words in legend

        metrics = screen.text(MetricsPanel)
        assert "1.410 ▲" in next(line for line in screen.lines(MetricsPanel) if "mean_ratio" in line)
        names = ["reward/mean", "clipped_fraction", "diff_mean", "diff_abs_mean", "loss", "grad_norm", "entropy"]
        if size == LARGE:
            names += ["0.8 – 1.2", "rollout/staleness_mean"]
        for words in (*names, "tokens"):
            assert words in metrics
        assert "mean_ratio is 1.41" in screen.text(WarningsBar)

        for label in ("v restart vLLM", "q detach", "D end", "? help"):
            assert label in screen.text(KeysBar)

        assert "90%" in screen.text(LogLines)
        with (tmp_path / "trainer.log").open("a") as file:
            file.write("\nthe newest line\n")
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(metrics_line(124).model_dump_json() + "\n")
        await screen.until_text(LogLines, "the newest line")
        await screen.until_text(HeaderLine, "step 124")


def service_row(state: ViewState, name: str, width: int = 110) -> str:
    return next(line for line in drawn(ServicesTable(), state, width) if name in line.split()[:2])


def test_what_a_service_waits_for_has_room_in_80_columns_where_there_is_no_gpu() -> None:
    waiting = service("trainer", state="waiting", pid=None, why="waits for vllm")
    state = state_after(status=without_gpus().model_copy(update={"services": [service("api"), waiting]}))
    assert "port" in drawn(ServicesTable(), state, 78)[0]
    assert service_row(state, "trainer", 78).endswith("  waits for vllm          ")


def test_a_trainer_that_rehearses_a_step_says_so_whole_in_80_columns_with_a_gpu() -> None:
    rehearsing = service("trainer", waits_for=WaitsFor.REHEARSAL, gpu_memory_bytes=22 * GIB)
    state = state_after(status=run_status(gpus=[gpu()], services=[service("api"), rehearsing]))
    assert drawn(ServicesTable(), state, 78)[0].split()[-2:] == ["port", "health"]
    assert service_row(state, "trainer", 78).endswith("  rehearsing a step")
    assert service_row(state, "trainer", 118).rstrip().endswith("  rehearsing a step, kernels are compiled…")


def test_memory_of_foreign_processes_without_a_user_is_that_of_others() -> None:
    _, legend = drawn(GpuPanel(), state_after(status=run_status(gpus=[gpu(other=12 * GIB)])))
    assert "others 12.0G" in legend


def test_a_missing_metric_is_a_dash() -> None:
    state = state_after(steps=[metrics_line(1), metrics_line(2, grpo__entropy=None)])
    [line] = [line for line in drawn(MetricsPanel(), state) if "entropy" in line]
    assert line.split("entropy")[1].split()[0] == "–"


@WIDTHS
def test_a_starting_service_shows_its_phase_and_its_seconds_once(width: int) -> None:
    why = "starting for 12 s, loading weights, port 9001 is closed (limit 300 s)"
    health, probe = "port 9001 is closed", ProbeOutcome.CLOSED
    starting = service("vllm", state="starting", phase="loading weights", health=health, probe=probe, why=why)
    row = service_row(state_after(changed(2, NOW - 12, starting)), "vllm", width)
    assert row.count("loading") == 1
    assert "starting for" not in row
    assert "◐ starting 12s" in row


@WIDTHS
@pytest.mark.parametrize(
    ("probe", "sign"), [(ProbeOutcome.SILENT, "◌ hanging"), (ProbeOutcome.ENGINE_STALLED, "◍ stalled")]
)
def test_a_hanging_or_stalled_server_is_called_so(width: int, probe: ProbeOutcome, sign: str) -> None:
    ready = service("vllm", probe=probe, health="/health: no answer")
    row = service_row(state_after(changed(2, NOW, ready)), "vllm", width)
    assert "● ready" in row
    assert sign in row
    unhealthy = service("vllm", state="unhealthy", probe=probe, health="/health: no answer", why="no good answer")
    row = service_row(state_after(changed(2, NOW, unhealthy)), "vllm", width)
    assert row.split()[1:3] == sign.split()
    assert "/health: no" in row


def test_the_reason_of_an_unhealthy_or_failed_service_is_the_first_line_of_its_explanation() -> None:
    why = "no liveness for 60 s: 500"
    unhealthy = service("vllm", state="unhealthy", probe=ProbeOutcome.BAD_STATUS, why=why)
    failed = service("env", state="failed", why="exit code 3; last lines:\n  Traceback\n  RuntimeError: no data")
    state = state_after(status=run_status(services=[unhealthy, failed]))
    assert "▲ unhealthy" in service_row(state, "vllm")
    assert why in service_row(state, "vllm")
    assert service_row(state, "env").rstrip().endswith("exit code 3")
    assert "env failed: exit code 3" in drawn(WarningsBar(), state)[0]


def test_a_warning_that_does_not_fit_with_its_hint_has_all_rows_for_its_text() -> None:
    why = "exit code 2: grpo-engine env: task.functions: /home/ann/rewards.py:right failed: KeyError: 'contnt'"
    state = state_after(status=run_status(services=[service("env", state="failed", why=why)]))
    first, second = drawn(WarningsBar(), state, width=78, height=2)
    assert first.startswith("✗ env failed: exit code 2: grpo-engine env: task.functions:")
    assert "/home/ann/rewards.py:right failed: KeyError: 'contnt'" in second
    assert second.rstrip().endswith("w: what to do")
    (row,) = drawn(WarningsBar(), state, width=78, height=1)
    assert row.startswith("✗ env failed: exit code 2: ")
    assert row.rstrip().endswith("… w: what to do")


def test_as_many_warnings_as_fit_are_shown_in_full() -> None:
    names = ("a", "b", "c", "d", "e")
    state = state_after(
        status=run_status(services=[service(name, state="failed", why="exit code 1") for name in names])
    )
    lines = drawn(WarningsBar(), state, width=98, height=8)
    assert len(lines) == 8
    assert lines[-1].rstrip().endswith("w: what to do")
    assert [line[:10] for line in lines if line.startswith("✗")] == [f"✗ {name} failed" for name in names]
    assert lines[1].startswith("  → ")


def activity(state: ViewState, width: int = 78) -> str:
    [line] = drawn(ActivityLine(chooses_services=True), state, width)
    return line.rstrip()


def test_the_phases_of_a_start_are_shown_while_they_last_and_summed_up_when_it_is_ready() -> None:
    start = [
        changed(2, NOW - 40, service("vllm", state="stopping")),
        changed(3, NOW - 39.6, service("vllm", state="waiting")),
        changed(4, NOW - 37.6, service("vllm", state="starting")),
        changed(5, NOW - 37, service("vllm", state="starting", phase="importing vLLM")),
        changed(6, NOW - 12, service("vllm", state="starting", phase="loading weights, 1 of 4 shards")),
        changed(7, NOW - 6, service("vllm", state="starting", phase="loading weights, 2 of 4 shards")),
    ]
    assert activity(state_after(*start), width=198) == (
        "vllm  ◑ stopping 0.4s → ○ waiting 2.0s → ◐ starting 38s: loading weights, 2 of 4 shards (12s) …"
    )
    assert activity(state_after(*start, changed(8, NOW, service("vllm"))), width=198) == (
        "vllm  ◑ stopping 0.4s → ○ waiting 2.0s → ◐ starting 38s → ● ready   in 40s"
        " · importing vLLM 25s · loading weights 12s"
    )


def test_a_notice_of_the_supervisor_is_shown() -> None:
    notice = Notice(number=2, time=NOW, severity="info", service=None, text="vllm ended in 0.3 s")
    assert "vllm ended in 0.3 s" in activity(state_after(notice))


@slow
async def test_ascii_terminals_get_ascii_only(tmp_path: Path) -> None:
    async with shown(tmp_path, num_steps=40, options={"is_ascii": True}) as screen:
        svg = screen.app.export_screenshot()
        assert all(glyph not in svg for glyph in "●▌▓█▁─…↑·")
        assert "ready" in svg


@slow
async def test_only_what_changes_is_painted(tmp_path: Path) -> None:
    async with shown(tmp_path, LARGE, num_steps=40) as screen:
        await screen.pilot.pause()
        painted: list[Region] = []
        for part in screen.app.main.query(Lines):
            part.refresh = lambda *regions, **_: painted.extend(regions)  # type: ignore[method-assign]
        screen.app.main.draw(screen.app.state)
        assert painted == []
        screen.app._apply(Ticked(now=NOW + 1))
        await screen.until_text(HeaderLine, "12m06s")
        assert painted
        assert all(region.width <= 2 for region in painted), painted  # the digits of the clock


@slow
async def test_garbage_is_collected_again_once_the_screen_is_open(tmp_path: Path) -> None:
    gc.disable()  # as the command line does while it loads
    try:
        async with shown(tmp_path):
            assert gc.isenabled()
    finally:
        gc.unfreeze()
        gc.enable()


# --- what keys do ----------------------------------------------------------------------------------------------------


@slow
async def test_v_r_and_s_restart_stop_and_start_services(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        await screen.press("v")  # whatever is selected
        await screen.until_commands(("restart", "vllm"))
        await screen.press("up", "r", "s")
        await screen.until_commands(("restart", "vllm"), ("restart", "env"), ("stop", "env"))
        screen.connection.send(changed(2, NOW, service("env", state="stopped", pid=None)))
        await screen.until_text(ServicesTable, "■ stopped")
        assert "s start" in screen.text(KeysBar)
        await screen.press("K")
        await screen.until_text(ActivityLine, "nothing to kill")
        screen.connection.commands.clear()
        await screen.press("s")
        await screen.until_commands(("start", "env"))
        screen.connection.refusal = "vllm is being restarted already"
        await screen.press("v")
        await screen.until_text(ActivityLine, "refused")
        assert "vllm is being restarted already" in screen.text(ActivityLine)


@slow
async def test_a_run_without_an_inference_server_offers_no_key_to_restart_it(tmp_path: Path) -> None:
    status = run_status(run=tmp_path.name, services=[service("web", kind="command")])
    async with shown(tmp_path, status=status) as screen:
        assert "vLLM" not in screen.text(KeysBar)
        assert "r restart" in screen.text(KeysBar)
        await screen.press("v")
        await screen.until_text(ActivityLine, "no inference server")
        assert screen.connection.commands == []


@slow
async def test_stopping_the_trainer_killing_and_ending_the_run_ask_first_and_name_the_processes(tmp_path: Path) -> None:
    async with shown(tmp_path, num_steps=7) as screen:
        for key in ("s", "K", "D"):
            await screen.press(key)
            await screen.until_screen(ConfirmScreen)
            assert f"trainer, ready, pid {4000 + len('trainer')}" in screen.picture
            assert key != "K" or "step 7" in screen.picture
            for one in four_services() if key == "D" else ():
                assert f"{one.name}, ready, pid {one.pid}" in screen.picture
            await screen.press("n")
            await screen.until_screen(MainScreen)
        assert screen.connection.commands == []
        await screen.press("K", "y", "D", "y")
        await screen.until_commands(("kill", "trainer"), ("down", None))


def test_a_service_that_still_waits_is_asked_about_as_one_without_a_process() -> None:
    trainer = service("trainer", kind="trainer", state="waiting", pid=None)
    question = about_stopping([trainer], state_after(status=run_status(services=[trainer])))
    assert question is not None
    assert question.named[0] == "trainer, waiting, no process yet, after step 0"


def status_with_taken_port(name: str, user: str) -> RunStatus:
    """A run in which a foreign process holds the port of a service."""
    others = [one for one in four_services() if one.name != name]
    return run_status(services=[port_taken(name, user), *others])


@slow
async def test_a_foreign_process_on_the_port_is_named_and_ended_only_by_e(tmp_path: Path) -> None:
    async with shown(tmp_path, status=status_with_taken_port("vllm", ME)) as screen:
        await screen.until(lambda: screen.app.state.selected == "vllm")
        for key in ("n", "escape", "enter", "q"):
            await screen.press("s")
            await screen.until_screen(TakePortScreen)
            await screen.press(key)
            await screen.until_screen(MainScreen)
            assert screen.connection.commands == []
        for key, do, answer, takes_port in (
            ("s", "start", "e", True),
            ("r", "restart", "t", False),
            ("v", "restart", "e", True),
        ):
            await screen.press(key)
            await screen.until_screen(TakePortScreen)
            assert f"port 9001 is held by pid 4242 (user {ME}): python app.py" in screen.picture
            await screen.press(answer)
            await screen.until(lambda: bool(screen.connection.commands))
            assert (screen.connection.commands.pop(), screen.connection.took_ports.pop()) == ((do, "vllm"), takes_port)


@slow
async def test_what_this_user_cannot_end_is_tried_again_without_a_question(tmp_path: Path) -> None:
    services = [port_taken("vllm", f"not-{ME}"), gpu_short("env", ME)]
    async with shown(tmp_path, status=run_status(services=services)) as screen:
        await screen.until(lambda: screen.app.state.selected == "vllm")
        await screen.press("s", "down", "s")
        await screen.until_commands(("start", "vllm"), ("start", "env"))
        assert screen.connection.took_ports == [False, False]


@slow
async def test_c_opens_the_newest_crash_report_of_the_selected_service(tmp_path: Path) -> None:
    for name, attempt in (("trainer", 2), ("trainer", 10), ("trainer-b", 11), ("env", 12)):
        (tmp_path / f"crash-{name}-{attempt}.txt").write_text(f"this is [b]attempt {attempt} of {name}")
    async with shown(tmp_path) as screen:
        await screen.press("c")
        await screen.until_screen(ReadingScreen)
        await screen.until(lambda: "this is [b]attempt 10 of trainer" in screen.picture)
        assert "crash-trainer-10.txt" in screen.picture
        await screen.press("c")
        await screen.until_screen(MainScreen)
        screen.connection.send(changed(2, NOW - 1, service("vllm", state="stopping")))
        await screen.until_text(ActivityLine, "◑ stopping 1s …")
        await screen.press("up", "up", "c")  # the answer replaces the restart that is shown
        await screen.until_text(ActivityLine, "vllm has no crash report")
        assert isinstance(screen.app.screen, MainScreen)
        screen.connection.send(changed(3, NOW, service("env", state="failed")))
        await screen.until(lambda: any(each.state == "failed" for each in screen.app.state.services))
        await screen.press("c")
        await screen.until_screen(ReadingScreen)
        assert "crash-env-12.txt" in screen.picture


@slow
async def test_the_log_is_of_the_selected_service_and_can_be_held_shifted_and_zoomed(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        log = screen.part(LogLines)
        await screen.press("pageup")
        await screen.until(lambda: not screen.app.state.is_following)
        before = screen.lines(LogLines)
        with (tmp_path / "trainer.log").open("a") as file:
            file.write("\nnews\n")
        await screen.until(lambda: "news" in screen.app.state.log.lines)
        assert screen.lines(LogLines) == before
        await screen.press("f")
        await screen.until_text(LogLines, "news")
        assert screen.lines(LogLines)[0].endswith("…")
        await screen.press("right", "right")
        await screen.until_text(LogLines, "ratio 1.00")
        height = log.size.height
        for expected in (20, height):
            await screen.press("z")
            await screen.until(lambda expected=expected: log.size.height == expected)  # type: ignore[misc]
        await screen.press("up")
        await screen.until_text(LogLines, "env: step 39")
        assert "trainer: step" not in screen.text(LogLines)


@slow
@pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
async def test_leaving_detaches_and_sends_no_command(tmp_path: Path, key: str) -> None:
    async with shown(tmp_path) as screen:
        await screen.press(key)
        assert screen.app._exit
        assert screen.connection.commands == []


def test_every_key_has_a_word_and_a_sentence_and_one_meaning_on_each_screen() -> None:
    bindings = [
        *(binding for screen in SCREENS.values() for binding in screen.BINDINGS),
        *ConfirmScreen.BINDINGS,
        *TakePortScreen.BINDINGS,
        *ReadingScreen.BINDINGS,
        *GrpoScreen.BINDINGS,
    ]
    assert all(binding.description and binding.tooltip for binding in bindings)
    for screen in SCREENS.values():
        keys = [key for each in (*EVERYWHERE, *screen.KEYS) for key in each.key.split(",")]
        assert len(set(keys)) == len(keys), screen.PLACE


# --- when the supervisor exits, and comes back -----------------------------------------------------------------------


@slow
async def test_a_lost_supervisor_leaves_the_stored_state_until_it_comes_back(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        screen.connection.stored = run_status(run=tmp_path.name, services=[service("trainer", state="unhealthy")])
        screen.connection.is_reachable = False
        screen.connection.disconnect()
        await screen.until(lambda: screen.app.state.connection is Connection.LOST)
        await screen.until_text(ServicesTable, "unhealthy")
        assert "last known state, reconnecting" in screen.text(ActivityLine)
        assert "no supervisor" in screen.text(HeaderLine)
        screen.connection.send(Snapshot(number=1, status=run_status(run=tmp_path.name, state=RunState.DEGRADED)))
        screen.connection.is_reachable = True
        await screen.until(lambda: screen.app.state.connection is Connection.LIVE)
        assert "degraded" in screen.text(HeaderLine)


@slow
async def test_a_run_that_is_over_stays_on_the_screen_and_its_keys_say_why_they_do_nothing(tmp_path: Path) -> None:
    status = status_with_taken_port("vllm", ME).model_copy(update={"run": tmp_path.name})
    async with shown(tmp_path, status=status, num_steps=30) as screen:
        assert all(words in screen.text(KeysBar) for words in ("v restart", "r restart", "s start", "D end"))
        over = {"state": RunState.FINISHED, "ended_at": NOW}
        screen.connection.stored = status.model_copy(update=over)
        screen.connection.is_reachable = False
        screen.connection.send(RunChanged(number=2, time=NOW, state=RunState.FINISHED), Bye(state=RunState.FINISHED))
        screen.connection.disconnect()
        await screen.until_text(ActivityLine, "q leaves")
        assert "✓ finished" in screen.text(HeaderLine)
        assert exit_message(screen.app.state).startswith(f"{tmp_path.name} finished after 12m05s, step 30")
        assert not {"v", "r", "s", "D"} & set(screen.text(KeysBar).split())
        assert {"t", "f", "z", "?", "q"} <= set(screen.text(KeysBar).split())
        again, resume = "`grpo-tui up` starts another", f"`grpo-tui resume {tmp_path.name[:20]}"  # 80 columns
        for key, answer in (("s", again), ("r", resume), ("v", resume), ("D", "ended already")):
            await screen.press(key)
            await screen.until_text(ActivityLine, answer)
            await screen.press("c")  # replaces the answer
            await screen.until_text(ActivityLine, "no crash report")
            (tmp_path / "settings.json").touch()  # only a run that has its settings is resumed
        words = [command.words for command in RunCommands(screen.app.screen)._commands()]
        assert not [each for each in words if each.startswith(("restart", "stop", "start/stop", "kill", "end  "))]
        assert screen.connection.commands == []
        assert screen.app.is_running


@slow
async def test_the_legend_of_memory_leaves_no_empty_row_when_the_run_is_over(tmp_path: Path) -> None:
    status = without_gpus().model_copy(update={"run": tmp_path.name})
    async with shown(tmp_path, status=status, num_steps=30) as screen:
        panel = screen.part(GpuPanel)
        await screen.until(lambda: panel.size.height == 2)
        stopped = [service(each.name, state="stopped", pid=None, rss_bytes=None) for each in status.services]
        over = status.model_copy(update={"state": RunState.FINISHED, "ended_at": NOW, "services": stopped})
        screen.connection.stored = over
        screen.connection.is_reachable = False
        screen.connection.send(Snapshot(number=3, status=over), Bye(state=RunState.FINISHED))
        screen.connection.disconnect()
        await screen.until(lambda: panel.size.height == 1)


def test_the_title_of_the_terminal_says_how_far_the_run_is_and_how_long_it_will_take() -> None:
    steps = [metrics_line(step) for step in range(1, 31)]
    state = reduce(state_after(steps=steps), SettingsRead(settings=RunSettings(training_steps=90)))
    usual_s = steps[-1].time - steps[-2].time
    assert title_of(state) == f"30/90  {age_text(60 * usual_s)} left  run"
    assert title_of(state_after(status=run_status(state=RunState.FINISHED), steps=steps)) == "finished  30  run"


def test_after_the_screen_a_failed_service_has_one_line_and_a_run_that_is_over_the_commands_that_come_next() -> None:
    why = "exit code 3; last lines:\n  Traceback\n  RuntimeError: no data"
    failed = run_status(state=RunState.FAILED, services=[service("env", state="failed", why=why)])
    assert exit_message(state_after(status=failed)).endswith("; env: exit code 3; its files are in run")
    assert next_commands(state_after(status=failed)) == "`grpo-tui up` starts another"
    finished = state_after(status=run_status(state=RunState.FINISHED))
    assert next_commands(finished).endswith("`grpo-tui resume run --steps +100` trains on")
    assert next_commands(state_after()) == ""


def test_detaching_from_a_live_run_says_how_to_reconnect() -> None:
    assert exit_message(state_after()) == (
        "detached from run; grpo-tui attach run reconnects, grpo-tui down run ends it"
    )
