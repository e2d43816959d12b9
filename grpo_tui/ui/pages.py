"""The pages that are read over a screen: help, warnings, messages, and all that is known of a service. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from rich.cells import cell_len
from textual.content import Content

from grpo_engine.wire.codec import shortened
from grpo_engine.wire.metrics import HEALTHY_BANDS
from grpo_engine.wire.secrets import masked_argv, masked_text
from grpo_engine.wire.supervisor import ServiceStatus, Warning
from grpo_engine.wire.terminal_text import printable
from grpo_tui.profile.plan_file import shown_command, shown_env
from grpo_tui.services.base import Launch, Probe, RestartPolicy, pattern_words
from grpo_tui.ui.glyphs import FOLDED, MACHINE_GLYPHS, PROBE_SIGNS, SERVICE_GLYPHS, SEVERITY_GLYPHS, UNFOLDED
from grpo_tui.ui.keys import EVERYWHERE, ON_TRAVEL, Key
from grpo_tui.ui.widgets.frame.travel_bar import MARKS_LEGEND
from grpo_tui.ui.widgets.lines import wrapped
from grpo_tui.ui.widgets.main.metrics_panel import band_text
from grpo_tui.ui.widgets.main.services_table import state_text
from grpo_tui.view.format import UNKNOWN, bytes_text, clock_text, count_text, duration_text, percent_text
from grpo_tui.view.machines import MachineRow, machine_facts
from grpo_tui.view.metrics.names import MEANINGS, meaning_of
from grpo_tui.view.rank_rows import rank_rows
from grpo_tui.view.service_details import Attempt, ServiceHistory
from grpo_tui.view.service_rules import reason
from grpo_tui.view.state import ViewState
from grpo_tui.view.timeline.state import clock_at

KEY_WIDTH = 7
FACT_WIDTH = 12
MAX_ROWS, MAX_WORDS = 1000, 16_384
"""Of a command or environment, and characters of a paragraph: a plan may be somebody else's work."""
MAX_COPIED = 9
"""As many keys as there are digits."""
PAGE_COLUMNS, PAGE_SHARE = 100, 0.94
BAND_NAME_WIDTH = 25
METRIC_NAME_WIDTH = 28
MACHINES_TOLD = (
    f"{UNFOLDED} and {FOLDED} stand before machines that are unfolded and folded. CPU is of one core, as for services, "
    "and memory that of the whole machine. A machine is silent when it has not answered for a few seconds, and lost "
    "when the cluster has given it up; the row and the warnings show what ran there and what happens next. Where there "
    "is little room, 2:0 is GPU 0 of machine-2."
)
MOUSE_TOLD = (
    "Click tabs, keys in the last line, services, warnings, metrics, the timeline, log names, rows, tokens and "
    "answers. The wheel scrolls what is under the pointer, and zooms a plot."
)


def page_width(columns: int) -> int:
    """Columns for the text of a page: without frame, padding and scrollbar."""
    return min(PAGE_COLUMNS, int(PAGE_SHARE * columns)) - 7


def help_page(place: str, keys: Sequence[Key], width: int) -> Content:
    """The help: keys of this screen, keys of every screen, signs, healthy bands, mouse, files."""
    rows: list[Content] = []
    along_time = [key for key in ON_TRAVEL if key.label]
    for heading, group in (
        (f"keys of this screen ({place})", keys),
        ("keys on every screen", EVERYWHERE),
        ("keys of the timeline (t opens it)", along_time),
    ):
        rows += [_heading(heading)]
        rows += [row for key in group for row in _key_rows(key, width)]
        rows += [Content("")]
    rows.pop()
    rows += [Content(""), _heading("services")]
    signs = [*((glyph, str(state)) for state, glyph in SERVICE_GLYPHS.items()), *PROBE_SIGNS.values()]
    for start in range(0, len(signs), 3):
        rows.append(Content("  " + "".join(f"{glyph} {word:<18}" for glyph, word in signs[start : start + 3])))
    machines = "  ".join(f"{glyph} {word}" for word, glyph in MACHINE_GLYPHS.items())
    rows += [Content(""), _heading("machines, where a run is on several"), Content(f"  {machines}")]
    rows += [Content(f"  {row}") for row in wrapped(MACHINES_TOLD, width - 2)]
    rows += [Content(""), _heading("signs on the timeline"), Content(f"  {MARKS_LEGEND}")]
    rows += [
        Content(""),
        _heading("healthy bands: ✓ inside, ▲ above, ▼ below"),
        Content("  Bars on a coloured background are scaled from the lower to the upper end of the band."),
    ]
    rows += [Content(f"  {name:<{BAND_NAME_WIDTH}}{band_text(band)}") for name, band in HEALTHY_BANDS.items()]
    rows += [Content(""), _heading("metrics in words")]
    words = {**MEANINGS, "eval/avg@4": meaning_of("eval/avg@4"), "eval/pass@4": meaning_of("eval/pass@4")}
    rows += [row for name, told in words.items() for row in _hanging(f"  {name:<{METRIC_NAME_WIDTH}}", told, width)]
    rows += [Content(f"  {'policy version':<{METRIC_NAME_WIDTH}}number of optimizer steps in the weights")]
    rows += [Content(""), _heading("mouse"), *(Content(f"  {row}") for row in wrapped(MOUSE_TOLD, width - 2))]
    rows += [
        Content(""),
        _heading("files"),
        Content("  Logs, metrics.jsonl and state.json are in the run's folder; tail -f works on them."),
    ]
    return Content("\n").join(rows)


def keys_page(groups: Mapping[str, Sequence[Key]], width: int, notes: Sequence[str] = ()) -> Content:
    """Keys in words, below their headings, and what else is to be said."""
    rows: list[Content] = []
    for heading, keys in groups.items():
        rows += [_heading(heading), *(row for key in keys if key.label for row in _key_rows(key, width)), Content("")]
    rows += [row for note in notes for row in _hanging("", note, width)]
    return Content("\n").join(rows)


def warnings_page(warnings: Sequence[Warning], width: int) -> Content:
    """Every warning with its cause and hint, and the commands of that with the keys that copy them."""
    if not warnings:
        return Content("No warnings: no service has failed, every metric is in its band.")
    rows: list[Content] = []
    commands = copied_commands(warnings)
    for warning in warnings:
        rows += _hanging((f"{SEVERITY_GLYPHS[warning.severity]} ", "bold"), warning.text, width, "bold")
        rows += _hanging("  → ", warning.hint, width) if warning.hint else []
        for command in _commands_in(warning):
            if command in commands:
                rows += _hanging(f"    {commands.index(command) + 1} copies ", command, width, "bold")
        rows.append(Content(""))
    return Content("\n").join(rows[:-1])


def copied_commands(warnings: Sequence[Warning]) -> list[str]:
    """What the keys 1 to 9 copy on the page of warnings: the commands in their hints, in order."""
    found = [command for warning in warnings for command in _commands_in(warning)]
    return list(dict.fromkeys(found))[:MAX_COPIED]


def _commands_in(warning: Warning) -> list[str]:
    """What stands between backticks in its hint, on one line: it may be pasted into a shell."""
    return [printable(each) for each in re.findall("`([^`]+)`", warning.hint or "")]


def messages_page(state: ViewState, width: int) -> Content:
    """Every message that is kept, the newest first."""
    if not state.messages:
        return Content("No messages yet: answers to keys and notices of the supervisor will stand here.")
    rows: list[Content] = []
    for message in reversed(state.messages):
        start = f"{clock_at(message.time)}  {SEVERITY_GLYPHS[message.severity]} "
        rows += _hanging(start, message.text, width, "" if message.severity == "info" else "bold")
    return Content("\n").join(rows)


def service_page(
    service: ServiceStatus, launch: Launch | None, history: ServiceHistory, state: ViewState, width: int
) -> Content:
    """All that is known of a service; `launch` is None where the plan cannot be read. Secrets are masked."""
    rows = [row for name, fact in _facts(service, launch, state) for row in _fact_rows(name, fact, width)]
    if ranks := rank_rows([service], state.now):
        rows += [Content(""), _heading("ranks"), *(Content(f"  {each}") for each in ranks)]
    rows += [Content(""), _heading("attempts")]
    rows += [row for attempt in history.attempts for row in _attempt_rows(attempt, state.now, width)]
    rows += [] if history.attempts else [Content("  none recorded")]
    rows += [Content(""), _heading("last answers of its probe")]
    rows += [row for each in history.answers for row in _hanging(f"  {clock_at(each.time)}  ", each.words, width)]
    rows += [] if history.answers else [Content("  none recorded")]
    if launch is not None:
        rows += [Content(""), _heading("command")]
        written = islice(shown_command(launch).splitlines(), MAX_ROWS)
        rows += [Content(f"  {row}") for each in written for row in _command_rows(each, width - 2)]
        rows += [Content(""), _heading("environment besides the inherited one; values of secrets and files are masked")]
        told = [f"{name}={value}" for name, value in islice(shown_env(launch).items(), MAX_ROWS)]
        rows += [row for each in told or ["none"] for row in _hanging("  ", each, width)]
    return Content("\n").join(rows)


def machine_page(row: MachineRow, now: float, width: int) -> Content:
    """All that is known of a machine, and each of its GPUs."""
    since = clock_at(row.machine.since) if row.machine is not None else ""
    rows = [line for name, fact in machine_facts(row, now, since) for line in _fact_rows(name, fact, width)]
    for gpu in row.gpus:
        used = f"{bytes_text(gpu.memory_used_bytes)} of {bytes_text(gpu.memory_total_bytes)}"
        held = [f"{name} {bytes_text(held_bytes)}" for name, held_bytes in gpu.by_service.items()]
        told = ", ".join([gpu.name, used, f"{percent_text(gpu.utilization_percent)} busy", *held])
        rows += _fact_rows(f"GPU {gpu.index}", told, width)
    return Content("\n").join(rows)


def _facts(service: ServiceStatus, launch: Launch | None, state: ViewState) -> Iterator[tuple[str, str]]:
    yield "state", f"{state_text(service, state)}, kind {service.kind}"
    if why := reason(service) or service.health:
        yield "why", why
    if service.rank_stall is not None:
        yield "stalled", f"for {duration_text(state.now - service.rank_stall.since)}: {service.rank_stall.text}"
    if service.pid is not None:
        up = UNKNOWN if service.started_at is None else clock_text(max(0.0, state.now - service.started_at))
        yield (
            "process",
            f"pid {service.pid}, attempt {service.attempt}, up {up}, restarted {count_text(service.restarts, 'time')}",
        )
        held = [f"CPU {percent_text(service.cpu_percent)} of one core", f"memory {bytes_text(service.rss_bytes)}"]
        held += [f"GPU memory {bytes_text(service.gpu_memory_bytes)}"] if service.gpu_memory_bytes is not None else []
        yield "uses", ", ".join(held)
    yield "ports", ", ".join(map(str, service.ports)) or "none"
    yield "GPUs", ", ".join(map(str, service.gpus)) or "none set"
    machines = state.status.machines if state.status is not None else []
    own = {*service.machines, service.machine}
    told = [f"{each.name} ({each.address}), {each.state}" for each in machines if each.name in own]
    if told:
        yield "machine" if len(told) == 1 else "machines", "; ".join(told)
    yield "log", service.log
    if launch is None:
        yield "plan", "plan.json of the run cannot be read: needs, probes, command and environment are not known"
        return
    yield "needs", ", ".join(f"{name} {condition}" for name, condition in launch.needs.items()) or "nothing"
    needed_by = [name for name, other in state.launches.items() if service.name in other.needs]
    yield "needed by", ", ".join(needed_by) or "nothing"
    yield "ready when", _probe_words(launch.ready) if launch.ready is not None else "its process runs (no probe)"
    if launch.live is not None:
        yield "alive while", _probe_words(launch.live)
    limit = f", at most {count_text(launch.max_restarts, 'time')} in {clock_text(launch.restart_window_s)}"
    yield "restart", f"{launch.restart}{'' if launch.restart is RestartPolicy.NEVER else limit}"
    yield "stop", f"{launch.stop_signal.name}, SIGKILL after {duration_text(launch.stop_grace_s)}"
    yield "folder", str(launch.cwd)


def _probe_words(probe: Probe) -> str:
    """`GET http://127.0.0.1:9001/health answers 200, checked every 0.2s; limit 5m00s`."""
    if probe.http is not None:
        answers = " or ".join(map(str, probe.status))
        asked = f"GET {masked_text(probe.http)} answers {answers}"
        asked += f", then GET {masked_text(probe.then_http)}" if probe.then_http is not None else ""
    elif probe.command is not None:
        asked = f"`{' '.join(masked_argv(probe.command))}` exits with 0"
    elif probe.tcp is not None:
        asked = f"{probe.tcp} accepts a connection"
    elif probe.log is not None:
        asked = f"a line of its log matches {pattern_words(probe.log)}"
    else:
        asked = f"the file {probe.file} exists"
    stalled = "" if probe.stalled_s is None else (
        f", longer while it makes progress (until {duration_text(probe.stalled_s)} without any)"
    )  # fmt: skip
    return f"{asked}, checked every {duration_text(probe.interval_s)}; limit {clock_text(probe.within_s)}{stalled}"


def _attempt_rows(attempt: Attempt, now: float, width: int) -> list[Content]:
    start = f"  {attempt.number:>3}  {clock_at(attempt.started_at)}  "
    lasted = duration_text((attempt.ended_at or now) - attempt.started_at)
    if attempt.ended_at is None:
        return _hanging(start, f"running for {lasted}", width)
    code = "exit code unknown" if attempt.exit_code is None else f"exit code {attempt.exit_code}"
    why = f": {attempt.why}" if attempt.why and attempt.why != code else ""
    return _hanging(start, f"ran for {lasted}, {code}{why}", width)


def _fact_rows(name: str, fact: str, width: int) -> list[Content]:
    return _hanging((f"{name:<{FACT_WIDTH}}", "bold"), fact, width)


def _key_rows(key: Key, width: int) -> list[Content]:
    return _hanging((f"  {key.shown:<{KEY_WIDTH}}", "bold"), key.help, width)


def _hanging(start: str | tuple[str, str], text: str, width: int, style: str = "") -> list[Content]:
    """A paragraph with hanging indent."""
    first = Content.assemble(start)
    rows = wrapped(shortened(text, MAX_WORDS), width - first.cell_length)
    starts = [first, *(Content(" " * first.cell_length) for _ in rows[1:])]
    return [begin + Content.styled(row, style) for begin, row in zip(starts, rows, strict=False)]


def _command_rows(row: str, width: int) -> list[str]:
    """A row of a command, its value below its flag where both do not fit; it can still be pasted into a shell."""
    flag, _, value = row.lstrip().partition(" ")
    if cell_len(row) <= width or not flag.startswith("--") or value in ("", "\\"):
        return [row]
    indent = " " * (len(row) - len(row.lstrip()))
    below = f"{indent}  {value}"
    return [f"{indent}{flag} \\", below if cell_len(below) <= width else value]


def _heading(text: str) -> Content:
    return Content.styled(text, "bold underline")
