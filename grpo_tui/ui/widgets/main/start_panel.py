"""What a starting run waits for: each service that is starting with its phase, elapsed time, limit and dependants."""

from __future__ import annotations

from rich.cells import cell_len
from textual.content import Content

from grpo_engine.wire.supervisor import ServiceStatus
from grpo_tui.ui.glyphs import SERVICE_GLYPHS
from grpo_tui.ui.widgets.lines import Lines, line, wrapped
from grpo_tui.view.format import clock_text, names_text
from grpo_tui.view.starting import Awaited, awaited_services, preparation
from grpo_tui.view.state import ViewState

INDENT = 2
BAR_WIDTH = 12


class StartPanel(Lines):
    """A few rows below the services while the run starts."""

    DEFAULT_CSS = """
    StartPanel { padding: 0 1; }
    """

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """The service that most others wait for is the first."""
        return [row for awaited in awaited_services(state) for row in _rows(awaited, state.now, width)]


def rows_wanted(state: ViewState, width: int) -> int:
    """Rows that show every awaited service in full."""
    return sum(len(_rows(awaited, state.now, width)) for awaited in awaited_services(state))


def _rows(awaited: Awaited, now: float, width: int) -> list[Content]:
    """`◐ vllm: loading weights, 2 of 4 shards`, then elapsed time and limit, then probe and dependants."""
    service = awaited.service
    does = awaited.phase.words if awaited.phase is not None else service.phase or "starting"
    if awaited.phase is not None and awaited.phase.since is not None:
        does += f" ({clock_text(now - awaited.phase.since)})"
    sign = f"{SERVICE_GLYPHS[service.state]} "
    rows = [line((sign, ".busy"), (service.name, ".strong"), (f"  {does}", ".busy"))]
    rows += [line(" " * INDENT, *_elapsed(awaited))]
    told = [f"probe: {service.health}"] if service.health else []
    if awaited.waiting:
        names = [_waiting(each) for each in awaited.waiting]
        told.append(f"{names_text(names)} {'waits' if len(names) == 1 else 'wait'} for it")
    one_row = " · ".join(told)
    for words in [one_row] if cell_len(one_row) <= width - INDENT else told:
        rows += [line(" " * INDENT, (row, ".muted")) for row in wrapped(words, width - INDENT)]
    return [row.truncate(width, ellipsis=True) for row in rows]


def _waiting(service: ServiceStatus) -> str:
    """`env`, or `env (prepared)`."""
    done = preparation(service)
    return service.name if done is None else f"{service.name} ({done})"


def _elapsed(awaited: Awaited) -> list[str | tuple[str, str]]:
    """`████░░░░  1m12s of at most 5m00s, longer while it makes progress`."""
    elapsed = clock_text(awaited.waited_s)
    if awaited.probe is None:
        return [(f"for {elapsed}", ".muted")]
    limit_s = awaited.probe.within_s
    filled = int(BAR_WIDTH * awaited.waited_s / limit_s) if awaited.waited_s < limit_s else BAR_WIDTH
    longer = "" if awaited.probe.stalled_s is None else ", longer while it makes progress"
    return [
        ("█" * filled, ".busy"),
        ("░" * (BAR_WIDTH - filled), ".rule"),
        f"  {elapsed}",
        (f" of at most {clock_text(limit_s)}{longer}", ".muted"),
    ]
