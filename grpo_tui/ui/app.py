"""The screen of one run, in the order in which things happen: open, read, reduce, draw, act on keys.

Workers (`news.py`) post changes; one handler reduces them into the state; the shown screen draws the state. The run
does not depend on this process: any number of screens may be open, and quitting one only detaches.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import psutil
from textual import on
from textual.binding import Binding
from textual.command import CommandPalette
from textual.content import Content
from textual.screen import Screen

from grpo_engine.errors import GrpoError
from grpo_engine.wire.run_folder import newest_crash_report
from grpo_engine.wire.supervisor import RunState, ServiceState, ServiceStatus, how_to_go_on, what_comes_next
from grpo_engine.wire.terminal_text import printable
from grpo_tui.exit_codes import TO_BOARD, ExitCode
from grpo_tui.run_files.whole_file import read_whole
from grpo_tui.supervisor.keeper.proc import user_name
from grpo_tui.ui import messages, questions
from grpo_tui.ui.connection import LocalRun, RunConnection
from grpo_tui.ui.glyphs import wants_ascii
from grpo_tui.ui.keys import EVERYWHERE, bindings
from grpo_tui.ui.news import RunNews
from grpo_tui.ui.pages import (
    copied_commands,
    help_page,
    machine_page,
    messages_page,
    page_width,
    service_page,
    warnings_page,
)
from grpo_tui.ui.palette import Palette, RunCommands
from grpo_tui.ui.preferences import Preferences, preferences_file, read_preferences, write_preferences
from grpo_tui.ui.screens import SCREENS
from grpo_tui.ui.screens.base import RunScreen
from grpo_tui.ui.screens.confirm import ConfirmScreen, PortAnswer, TakePortScreen
from grpo_tui.ui.screens.main import MainScreen
from grpo_tui.ui.screens.reading import ReadingScreen
from grpo_tui.ui.themes import DARK, ThemedApp, theme_to_open
from grpo_tui.ui.widgets.frame.keys_bar import STOPPED_STATES
from grpo_tui.ui.widgets.frame.travel_bar import TravelBar
from grpo_tui.view import state as view
from grpo_tui.view import viewer
from grpo_tui.view.format import duration_text
from grpo_tui.view.machine_selection import MachineFolded
from grpo_tui.view.machines import machine_rows
from grpo_tui.view.service_details import read_history
from grpo_tui.view.service_rules import reason
from grpo_tui.view.timeline import state as travel
from grpo_tui.view.timeline.past import displayed

TICK_S = 1.0
MIN_COLUMNS, MIN_ROWS = 40, 10
"""Smaller terminals show only that they are too small."""


class GrpoScreen(ThemedApp[None]):
    """Shows one run, and sends commands to its supervisor when keys are pressed."""

    TITLE = "grpo-tui"
    CSS_PATH = "grpo.tcss"
    ENABLE_COMMAND_PALETTE = True
    COMMANDS = {RunCommands}
    HORIZONTAL_BREAKPOINTS = [(0, "-too-narrow"), (MIN_COLUMNS, "-has-columns")]
    VERTICAL_BREAKPOINTS = [(0, "-too-low"), (MIN_ROWS, "-has-rows")]
    BINDINGS = [
        *bindings(EVERYWHERE),
        Binding("ctrl+q", "quit", "leave", show=False, priority=True, tooltip="leave; the run keeps running"),
        Binding("ctrl+c", "copy_or_leave", "copy", show=False, priority=True, tooltip="copy the selection, or leave"),
    ]

    def __init__(
        self,
        run_folder: Path,
        connection: RunConnection,
        *,
        clock: Callable[[], float] = time.time,
        is_ascii: bool = False,
        is_read_only: bool = False,
        theme: str = DARK,
        preferences: Preferences | None = None,
        remember: Callable[[Preferences], None] = lambda _: None,
        has_board: bool = False,
    ) -> None:
        """Watch a run.

        Args:
            has_board: whether it was opened from the board, which `q` leads back to.
            is_read_only: refuse every key that acts on the run.
            theme: a name of `themes.known_themes()`.
            preferences: saved preferences; None skips the hint for new users.
            remember: saves changed preferences for the next start.
        """
        super().__init__(theme=theme, is_ascii=is_ascii)
        self._preferences = preferences or Preferences(has_read_hint=True)
        self._remember = remember
        who = viewer.Viewer(is_read_only=is_read_only, is_new=not self._preferences.has_read_hint, has_board=has_board)
        self.state = view.ViewState(run_folder=run_folder, now=clock(), viewer=who)
        self._connection = connection
        self._clock = clock
        self._is_draw_due = False
        self._news = RunNews(connection, state=lambda: self.state, post=self.post_message)
        self._screens_of_run: dict[str, RunScreen] = {}
        self.goes_back = False
        """Whether the user left for the board that this screen was opened from."""

    def get_default_screen(self) -> Screen[None]:
        """The main screen; it composes the parts."""
        return MainScreen(self.state)

    # --- read -------------------------------------------------------------------------------------------------------

    def on_mount(self) -> None:
        """Create the other screens and start the workers that read the run."""
        for place, screen in SCREENS.items():
            if place != MainScreen.PLACE:  # kept while another screen is shown
                self._screens_of_run[place] = screen(self.state)
                self.install_screen(self._screens_of_run[place], name=place)
        for name, task in self._news.tasks().items():
            self.run_worker(task, name=name)
        self.set_interval(TICK_S, self._tick)
        self._tick()

    def _tick(self) -> None:
        memory = psutil.virtual_memory()
        host = view.HostMemory(total_bytes=memory.total, available_bytes=memory.available)
        self.post_message(messages.SecondPassed(view.Ticked(now=self._clock(), host_memory=host)))

    # --- reduce and draw -------------------------------------------------------------------------------------------

    @on(messages.StateChanged)
    def _apply_change(self, came: messages.StateChanged) -> None:
        self._apply(came.change)
        if isinstance(came, messages.EventReceived):
            came.applied.set()

    def _apply(self, change: view.Change) -> None:
        """Reduce a change into the state, and schedule one draw for all pending changes."""
        before, self.state = self.state, view.reduce(self.state, change)
        self._news.look_again(before, self.state)
        if not self._is_draw_due:
            self._is_draw_due = True
            self.call_later(self._draw)

    def _draw(self) -> None:
        if not self.is_running:  # widgets are being removed
            return
        shown = self.shown
        if shown is not None and not shown.is_mounted:
            shown.call_later(self._draw)  # runs once it is mounted
            return
        self._is_draw_due = False
        if shown is not None:
            shown.draw(displayed(self.state))
        self.show_title(title_of(self.state))

    @property
    def shown(self) -> RunScreen | None:
        """The screen of the run in front, perhaps below a dialog; None before the first is shown."""
        return next((screen for screen in reversed(self.screen_stack) if isinstance(screen, RunScreen)), None)

    @property
    def main(self) -> MainScreen:
        """The first screen, below all others."""
        main = self.screen_stack[0]
        assert isinstance(main, MainScreen)
        return main

    # --- act on keys -----------------------------------------------------------------------------------------------

    async def action_show(self, place: str) -> None:
        """Switch to another screen of the run; the main one stays at the bottom of the stack."""
        if self.shown is None or place == self.shown.PLACE:
            return
        async with self.painted_once():  # without painting the main screen in between
            if self.shown is not self.main:
                await self.pop_screen()
            if place != self.main.PLACE:
                screen = self._screens_of_run[place]
                screen.set_state(displayed(self.state))
                await self.push_screen(screen)
            self._draw()

    def action_restart_inference(self) -> None:
        """Restart the inference server; without asking only where the main screen shows what happens."""
        if self._refuses_actions():
            return
        service = view.inference_service(self.state)
        if service is None:
            self._show_message("warning", "this run has no inference server; r restarts the selected service")
            return
        if self.shown is None or self.shown is self.main:
            self._start_or_restart("restart", service)
            return
        question = questions.about_restarting(service, self.state)
        self.push_screen(
            ConfirmScreen(question.text, question.named),
            lambda is_yes: self._start_or_restart("restart", service) if is_yes else None,
        )

    def action_restart_chosen(self) -> None:
        """Restart the tagged services, or the selected one."""
        if self._has_chosen():
            self.restart(self.state.chosen)

    def action_start_or_stop(self) -> None:
        """Start the chosen services if none of them runs, else stop those that do."""
        if self._has_chosen():
            self.start_or_stop(self.state.chosen)

    def action_kill_chosen(self) -> None:
        """Kill the chosen services after confirmation."""
        if self._has_chosen():
            self.kill(self.state.chosen)

    def _has_chosen(self) -> bool:
        """Whether keys have services to act on; says what to do where a machine is selected instead."""
        if self.state.viewer.machine is not None and not self.state.chosen:
            words = f"{self.state.viewer.machine} is a machine: select a service of it, or tag some with space"
            self._show_message("warning", words)
            return False
        return True

    def restart(self, services: Sequence[ServiceStatus]) -> None:
        """Restart each of `services`."""
        if self._refuses_actions():
            return
        for service in services:
            self._start_or_restart("restart", service.name)

    def start_or_stop(self, services: Sequence[ServiceStatus]) -> None:
        """Start services if none of them runs, else stop those that do; asks before it stops the trainer."""
        if self._refuses_actions():
            return
        up = [service for service in services if service.state not in STOPPED_STATES]
        if not up:
            for service in services:
                self._start_or_restart("start", service.name)
            return
        self._confirm(questions.about_stopping(up, self.state), "stop", [service.name for service in up])

    def kill(self, services: Sequence[ServiceStatus]) -> None:
        """Kill those of `services` that have a process, after confirmation."""
        if self._refuses_actions():
            return
        alive = [service for service in services if service.state in questions.KILLABLE_STATES]
        if alive:
            self._confirm(questions.about_killing(alive, self.state), "kill", [service.name for service in alive])
        elif services:
            states = ", ".join(f"{service.name} is {service.state}" for service in services)
            self._show_message("info", f"nothing to kill: {states}")

    def action_tag(self) -> None:
        """Tag or untag the selected service."""
        if self.state.viewer.machine is not None:
            self._show_message("warning", "space tags services: select one below the machine")
        elif self.state.selected is not None and not self._refuses_actions():
            self._apply(viewer.TagToggled(name=self.state.selected))

    def action_clear_tags(self) -> None:
        """Remove all tags."""
        if self.state.viewer.tagged:
            self._apply(viewer.TagsCleared())

    def action_end_run(self) -> None:
        """End the run after a confirmation that names every process that will end."""
        if self._refuses_actions():
            return
        if self.state.has_ended:
            self._show_message("info", "the run has ended already; q leaves")
            return
        self._confirm(questions.about_ending_the_run(self.state), "down", [None])

    def action_travel(self) -> None:
        """Open the timeline at the past, or return to the present."""
        self._apply(travel.Closed() if self.state.travel.is_open else travel.Opened())
        if self.state.travel.is_open and self.shown is not None and self.shown.is_mounted:
            self.shown.query_one(TravelBar).take_keys()

    def action_detach(self) -> None:
        """Leave the screen, to the board if it was opened from there; the run keeps running."""
        self.goes_back = self.state.viewer.has_board
        self.leave()

    def action_copy_or_leave(self) -> None:
        """Copy the selected text; without any close what is in front of the screens, or leave."""
        screen = self.screen
        if isinstance(screen, RunScreen):
            if not screen.copy_selection():
                self.action_detach()
        elif isinstance(screen, ReadingScreen) and screen.get_selected_text():
            screen.action_copy()
        else:
            screen.dismiss()

    async def action_quit(self) -> None:
        """Leave the program, also if it was opened from the board; the run keeps running."""
        self.leave()

    def action_select(self, by: int) -> None:
        """Move the selection by `by` rows."""
        self._apply(view.SelectionMoved(by=by))

    def action_follow(self) -> None:
        """Toggle following the end of the log."""
        self._apply(view.FollowChanged(is_following=not self.state.is_following))

    def action_scroll_log(self, pages: int) -> None:
        """Scroll the log by pages."""
        lines = self.main.log_lines
        lines.scroll_relative(y=pages * max(1, lines.size.height - 1), animate=False)

    def action_scroll_log_to_start(self) -> None:
        """Scroll to the oldest line in memory."""
        self.main.log_lines.scroll_home(animate=False)

    def action_scroll_log_to_end(self) -> None:
        """Go to the newest line, and follow."""
        self._apply(view.FollowChanged(is_following=True))

    def action_shift_log(self, by: int) -> None:
        """Scroll long lines sideways; on the row of a machine fold or unfold it."""
        if self.state.viewer.machine is None:
            self.main.log_lines.shift(by)
        else:
            self._apply(MachineFolded(name=self.state.viewer.machine, is_folded=by < 0))

    def action_fold(self) -> None:
        """Fold all machines, or unfold them."""
        if self.state.status is not None and self.state.status.machines:
            self._apply(MachineFolded(name=None))
        else:
            self._show_message("info", "this run is on one machine: there is nothing to fold")

    def action_zoom(self) -> None:
        """Show the log on the whole screen, or with the other panels again."""
        self.main.toggle_zoom()

    def action_command_palette(self) -> None:
        """Open the command palette."""
        if not isinstance(self.screen, CommandPalette):
            self.push_screen(Palette(placeholder="restart env, log of vllm, metrics, theme light …"))

    def action_help(self) -> None:
        """Open the help page."""
        shown = self.shown or self.main
        self.push_screen(ReadingScreen("grpo-tui", help_page(shown.PLACE, shown.KEYS, page_width(self.size.width))))

    def action_warnings(self) -> None:
        """Open every warning in full."""
        warnings = displayed(self.state).warnings
        page = warnings_page(warnings, page_width(self.size.width))
        self.push_screen(ReadingScreen("warnings", page, commands=copied_commands(warnings)))

    def action_messages(self) -> None:
        """Open the past messages in full."""
        self.push_screen(ReadingScreen("messages", messages_page(displayed(self.state), page_width(self.size.width))))

    async def action_details(self) -> None:
        """Open all that is known of the selected service or machine."""
        state = displayed(self.state)
        row = next((row for row in machine_rows(state.status) if row.name == state.viewer.machine), None)
        if row is not None:
            page = machine_page(row, state.now, page_width(self.size.width))
            self.push_screen(ReadingScreen(f"{row.name} of {state.run}", page))
            return
        service = state.service(state.selected)
        if service is None:
            return
        history = await asyncio.to_thread(read_history, state.run_folder, service.name, state.until)
        page = service_page(service, state.launches.get(service.name), history, state, page_width(self.size.width))
        self.push_screen(ReadingScreen(f"{service.name} of {state.run}", page))

    async def action_crash_report(self) -> None:
        """Open the newest crash report of the selected service, else of one that has failed, which warnings name."""
        service = self.state.service(self.state.selected)
        if service is None:
            return
        failed = [each.name for each in self.state.services if each.state is ServiceState.FAILED]
        try:
            for name in (service.name, *failed):
                path = await asyncio.to_thread(newest_crash_report, self.state.run_folder, name)
                if path is not None:
                    break
            text = "" if path is None else (await asyncio.to_thread(read_whole, path)).decode(errors="replace")
        except OSError as error:
            self._show_message("error", f"the crash report of {service.name} cannot be read: {error}")
            return
        if path is None:
            self._show_message("info", f"{service.name} has no crash report in {self.state.run}: no attempt failed")
            return
        self.push_screen(ReadingScreen(path.name, Content(text), is_wide=True))

    def select(self, service: str) -> None:
        """Select a service and show its log."""
        self._apply(view.ServiceSelected(name=service))

    def choose_theme(self, name: str) -> None:
        """Switch the theme and save it for the next start."""
        self.theme = name
        self._keep(self._preferences.model_copy(update={"theme": name}))

    def on_key(self) -> None:
        """Remove the hint for new users at the first key."""
        if self.state.viewer.is_new:
            self._apply(viewer.HintRead())
            self._keep(self._preferences.model_copy(update={"has_read_hint": True}))

    def _keep(self, preferences: Preferences) -> None:
        self._preferences = preferences
        try:
            self._remember(preferences)
        except OSError as error:
            self._show_message("warning", f"preferences are not saved: {error}")

    def _refuses_actions(self) -> bool:
        """Whether this screen may not act on the run; shows why if so."""
        if self.state.travel.is_open and not self.state.has_ended:
            at = travel.clock_at(self.state.travel.moment)
            self._show_message("warning", f"the screen shows {at}: press t for the present, then repeat the key")
            return True
        if self.state.viewer.is_read_only:
            self._show_message("warning", "read-only screen (opened with --read-only): the key does nothing")
        return self.state.viewer.is_read_only

    def _confirm(self, question: questions.Question | None, do: view.Do, services: Sequence[str | None]) -> None:
        """Send a command for each of `services`, after confirmation if there is a question."""

        def act(is_yes: bool | None) -> None:
            if is_yes:
                for service in services:
                    self._ask(do, service)

        if question is None:
            act(True)
        else:
            self.push_screen(ConfirmScreen(question.text, question.named), act)

    def _start_or_restart(self, do: Literal["start", "restart"], name: str) -> None:
        """Start or restart a service; if a foreign process holds its port, ask first whether to end that."""
        service = self.state.service(name)
        if self.state.status is not None and self.state.has_ended:
            self._show_message("info", f"the run is over; {how_to_go_on(self.state.run_folder)}")
            return
        question = None if service is None else questions.about_a_taken_port(service, user_name(os.getuid()))
        if question is None:
            self._ask(do, name)
            return

        def act(answer: PortAnswer | None) -> None:
            if answer is not None:
                self._ask(do, name, take_ports=answer is PortAnswer.END_IT)

        self.push_screen(TakePortScreen(question.text, question.named, f"{do} {name}"), act)

    def _ask(self, do: view.Do, service: str | None, *, take_ports: bool = False) -> None:
        """Send a command without waiting for it; its effects arrive as events."""
        self._apply(view.CommandSent(do=do, service=service, time=self._clock(), takes_ports=take_ports))
        self.run_worker(self._command(do, service, take_ports), name=f"{do} {service or ''}")

    async def _command(self, do: view.Do, service: str | None, take_ports: bool) -> None:
        try:
            reply = await self._connection.command(do, service, take_ports=take_ports)
            error = None if reply.ok else (reply.error or "no reason given")
        except (GrpoError, OSError) as unreachable:
            error = str(unreachable)
        if error is not None:
            refused = view.CommandRefused(do=do, service=service, error=error, time=self._clock())
            self.post_message(messages.CommandFailed(refused))

    def _show_message(self, severity: Literal["info", "warning", "error"], text: str) -> None:
        self._apply(view.MessageShown(severity=severity, text=text, time=self._clock()))


def open_screen(
    run_folder: Path, *, theme: str | None = None, is_read_only: bool = False, has_board: bool = False
) -> int:
    """Show a run until the user leaves; the run keeps running.

    Args:
        has_board: whether it was opened from the board.
        theme: the theme to open with; None for the saved one.
        is_read_only: refuse every key that acts on the run.

    Returns:
        The exit code: 1 if the run has failed, else 0; `TO_BOARD` if the user went back to the board.
    """
    folder = run_folder.resolve()
    file = preferences_file()
    preferences = read_preferences(file)
    app = GrpoScreen(
        folder,
        LocalRun(folder),
        is_ascii=wants_ascii(os.environ),
        is_read_only=is_read_only,
        theme=theme_to_open(theme, preferences.theme, os.environ),
        preferences=preferences,
        remember=lambda changed: write_preferences(file, changed),
        has_board=has_board,
    )
    app.run_on_terminal()
    if app.goes_back:
        return TO_BOARD
    if app.return_code:
        return app.return_code
    for text in filter(None, (exit_message(app.state), next_commands(app.state))):
        sys.stderr.write(printable(text) + "\n")
    has_failed = app.state.status is not None and app.state.status.state is RunState.FAILED
    return ExitCode.FAILED if has_failed else ExitCode.OK


def title_of(state: view.ViewState) -> str:
    """The title of the terminal: `12/150  3m left  tiny-cpu-1122-033239-b9f4`; what changes comes first."""
    progress, status = state.progress, state.status
    run_state = None if status is None or status.state is RunState.RUNNING else status.state
    return "  ".join(filter(None, (run_state, progress.of_steps, progress.left, state.run)))


def exit_message(state: view.ViewState) -> str:
    """The line that is printed after the screen: how to reconnect, or how the run ended."""
    if state.status is None or not state.has_ended:
        return f"detached from {state.run}; grpo-tui attach {state.run} reconnects, grpo-tui down {state.run} ends it"
    status = state.status
    lasted = ""
    if status.started_at is not None and status.ended_at is not None:
        lasted = f" after {duration_text(status.ended_at - status.started_at)}"
    step = f", step {state.history.last.step}" if state.history.last else ""
    failed = [service for service in status.services if service.state is ServiceState.FAILED]
    causes = "".join(f"; {service.name}: {reason(service) or 'failed'}" for service in failed)
    return f"{state.run} {status.state}{lasted}{step}{causes}; its files are in {state.run_folder}"


def next_commands(state: view.ViewState) -> str:
    """The line after it, of a run that is over: the commands that go on with it, or with what it has trained."""
    if state.status is None or not state.has_ended:
        return ""
    has_finished = state.status.state is RunState.FINISHED
    return what_comes_next(state.run_folder) if has_finished else how_to_go_on(state.run_folder)
