"""The workers of the screen: they receive the supervisor's events and follow the growing files of the run.

Each worker reads in threads, posts changes as messages, and runs until it is cancelled. The state is only read here,
to decide what to read next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path

from grpo_engine.errors import GrpoError
from grpo_engine.wire.run_folder import METRICS_FILE
from grpo_engine.wire.supervisor import ENDED_RUN_STATES, Bye, RunState, how_to_go_on
from grpo_tui.run_files.metrics import MetricsTail
from grpo_tui.ui import messages
from grpo_tui.ui.connection import RunConnection
from grpo_tui.ui.waiting import wait_at_most
from grpo_tui.view import state as view
from grpo_tui.view.folder_watch import FolderWatch
from grpo_tui.view.logs.tail import LogTail
from grpo_tui.view.run_settings import read_settings
from grpo_tui.view.service_details import read_launches
from grpo_tui.view.timeline import state as travel
from grpo_tui.view.timeline.file import TimelineFile

RECONNECT_S = 1.0
REPLACE_AGAIN_S = 5.0
"""Between two tries to start a supervisor."""
METRICS_POLL_S = 0.5
TIMELINE_POLL_S = 1.0
LOG_POLL_BUSY_S = 0.1
"""Between two reads of a log that is being written; limits redraws to ten a second."""
LOG_POLL_QUIET_S = 0.5
NO_TIMELINE = "no events.jsonl: services are in their last state, metrics as of this moment"


class RunNews:
    """Follows one run for its screen."""

    def __init__(
        self,
        connection: RunConnection,
        *,
        state: Callable[[], view.ViewState],
        post: Callable[[messages.StateChanged], object],
    ) -> None:
        """Read nothing yet.

        Args:
            state: returns the current view state.
            post: receives the changes.
        """
        self._connection = connection
        self._state = state
        self._post = post
        self._log_wanted = asyncio.Event()
        self._past_wanted = asyncio.Event()

    def tasks(self) -> dict[str, Coroutine[None, None, None]]:
        """The workers by name; each is to be run once."""
        return {
            "listen": self._listen(),
            "plan": self._read_plan(),
            "metrics": self._read_metrics(),
            "log": self._read_log(),
            "past": self._read_past(),
        }

    def look_again(self, before: view.ViewState, now: view.ViewState) -> None:
        """Wake the workers whose input changed between two states."""
        if now.selected != before.selected:
            self._log_wanted.set()
        if _wanted_of_the_past(now) != _wanted_of_the_past(before):
            self._past_wanted.set()

    # --- the supervisor --------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Receive the supervisor's events; while none answers, show the state file and reconnect every second."""
        is_lost = False
        while True:
            note = "the supervisor closed the connection"
            try:
                async for event in self._connection.events():
                    received = messages.EventReceived(event)
                    self._post(received)
                    await received.applied.wait()
                    is_lost = not isinstance(event, Bye)
                    if isinstance(event, Bye):
                        note = f"the run is over: {event.state}"
            except (GrpoError, OSError) as error:
                note = str(error)
            await self._look_at_files(note)
            if is_lost and not self._state().viewer.is_read_only and await self._replace_supervisor():
                continue
            await asyncio.sleep(RECONNECT_S)

    async def _replace_supervisor(self) -> bool:
        """Start a supervisor in the place of one that exited during the run; returns whether one answers now."""
        try:
            is_replaced = await self._connection.replace_supervisor()
        except (GrpoError, OSError) as error:
            self._post(messages.SupervisorLost(view.ConnectionLost(note=f"no new supervisor: {error}")))
            await asyncio.sleep(REPLACE_AGAIN_S)
            return False
        if is_replaced:
            words = "the supervisor exited; a new one has taken the run over"
            shown = view.MessageShown(severity="warning", text=words, time=self._state().now)
            self._post(messages.StateChanged(shown))
        return is_replaced

    async def _look_at_files(self, note: str) -> None:
        """Read the status from the run's files, because no supervisor answers."""
        try:
            status = await asyncio.to_thread(self._connection.stored_status)
        except (GrpoError, OSError) as error:
            self._post(messages.SupervisorLost(view.ConnectionLost(note=f"{note}; {error}")))
            return
        self._post(messages.StatusArrived(view.StatusRead(status=status)))
        is_over = status.state in ENDED_RUN_STATES
        if is_over and self._state().status is None:  # already over when the screen opened
            self._post(messages.MovedInTime(travel.Opened()))
        further = "" if status.state is RunState.FINISHED else f"{how_to_go_on(self._state().run_folder)}, "
        words = (
            f"the run is over: {status.state}; {further}t goes back in time, q leaves"
            if is_over
            else f"last known state, reconnecting: {note}"
        )
        self._post(messages.SupervisorLost(view.ConnectionLost(note=words, is_over=is_over)))

    async def _read_plan(self) -> None:
        """Read once what the plan says of each service, and the settings; they do not change while the run lasts."""
        settings = await asyncio.to_thread(read_settings, self._state().run_folder)
        self._post(messages.StateChanged(view.SettingsRead(settings=settings)))
        with suppress(GrpoError):  # a run without one shows less
            launches = await asyncio.to_thread(read_launches, self._state().run_folder)
            self._post(messages.StateChanged(view.LaunchesRead(launches=launches)))

    # --- files that grow -------------------------------------------------------------------------------------------

    async def _read_metrics(self) -> None:
        """Follow `metrics.jsonl`, and check whether the run folder still exists."""
        tail = MetricsTail(self._state().run_folder / METRICS_FILE)
        folder = FolderWatch(self._state().run_folder)
        while True:
            chunk, state = await asyncio.to_thread(lambda: (tail.read(), folder.look()))
            if state is not self._state().folder_state:
                self._post(messages.StateChanged(view.FolderChecked(state=state)))
            if chunk.lines or chunk.is_restarted or chunk.num_bad_lines:
                read = view.MetricsRead(
                    lines=chunk.lines, is_restarted=chunk.is_restarted, num_bad_lines=chunk.num_bad_lines
                )
                self._post(messages.MetricsArrived(read))
            if not chunk.has_more:
                await asyncio.sleep(METRICS_POLL_S)

    async def _read_log(self) -> None:
        """Follow the log of the selected service."""
        tail: LogTail | None = None
        service: str | None = None
        pause_s = LOG_POLL_QUIET_S
        while True:
            if self._state().selected != service or tail is None:
                service, tail = self._state().selected, self._open_log(self._state().selected)
                pause_s = LOG_POLL_BUSY_S
            chunk = await asyncio.to_thread(tail.read) if tail else None
            if chunk is not None and service is not None and chunk.has_changed and service == self._state().selected:
                read = view.LogRead(
                    service=service,
                    lines=chunk.lines,
                    open_line=chunk.open_line,
                    is_restarted=chunk.is_restarted,
                )
                self._post(messages.LogArrived(read))
                pause_s = LOG_POLL_BUSY_S
            else:
                pause_s = min(LOG_POLL_QUIET_S, pause_s * 1.5)
            self._log_wanted.clear()
            if self._state().selected == service:
                await wait_at_most(self._log_wanted, pause_s)

    def _open_log(self, service: str | None) -> LogTail | None:
        known = self._state().service(service)
        if known is None:
            return None
        return LogTail(self._state().run_folder / Path(known.log).name)

    async def _read_past(self) -> None:
        """While the timeline is open, follow its file and read the state at the chosen moment."""
        timeline = TimelineFile(self._state().run_folder)
        read: tuple[object, ...] = ()
        while True:
            self._past_wanted.clear()
            if self._state().travel.is_open:
                while await asyncio.to_thread(timeline.read):
                    self._learn_from(timeline, await asyncio.to_thread(timeline.marks))
                self._learn_from(timeline, await asyncio.to_thread(timeline.marks))
                moment, selected = self._state().travel.moment, self._state().selected
                newest = timeline.num_lines if moment >= (timeline.ends or 0.0) else 0
                if read != (moment, selected, newest):
                    read = (moment, selected, newest)
                    past = await asyncio.to_thread(timeline.past, moment, selected)
                    self._post(messages.TimelineArrived(travel.PastRead(past=past)))
            else:
                read = ()
            await wait_at_most(self._past_wanted, TIMELINE_POLL_S if self._state().travel.is_open else None)

    def _learn_from(self, timeline: TimelineFile, marks: tuple[travel.Mark, ...]) -> None:
        note = "" if timeline.num_lines else NO_TIMELINE
        before = self._state().travel
        is_silent = not timeline.num_lines and not before.note
        if (timeline.begins, timeline.ends, marks) != (before.begins, before.ends, before.marks) or is_silent:
            learned = travel.Learned(begins=timeline.begins, ends=timeline.ends, marks=marks, note=note)
            self._post(messages.TimelineArrived(learned))


def _wanted_of_the_past(state: view.ViewState) -> tuple[object, ...]:
    return state.travel.is_open, state.travel.moment, state.selected
