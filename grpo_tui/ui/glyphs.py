"""Signs of the screen, and their ASCII replacements for terminals without UTF-8.

Widgets write Unicode. Without a UTF-8 locale, `AsciiOnly` replaces characters one for one on output, so columns stay
aligned.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from grpo_engine.wire.supervisor import ProbeOutcome, RunState, ServiceState
from grpo_tui.view.format import SPARK_BARS as SPARK_BARS

SERVICE_GLYPHS = {
    ServiceState.WAITING: "○",
    ServiceState.STARTING: "◐",
    ServiceState.READY: "●",
    ServiceState.UNHEALTHY: "▲",
    ServiceState.BACKOFF: "↻",
    ServiceState.STOPPING: "◑",
    ServiceState.STOPPED: "■",
    ServiceState.FINISHED: "✓",
    ServiceState.FAILED: "✗",
}
PROBE_SIGNS = {
    ProbeOutcome.SILENT: ("◌", "hanging"),
    ProbeOutcome.ENGINE_STALLED: ("◍", "stalled"),
}
"""Sign and word of probe outcomes that refine the state of a service."""
MACHINE_GLYPHS = {"ready": "●", "joining": "◐", "silent": "◌", "lost": "✗", "released": "■"}
MACHINE_STYLES = {"ready": ".ok", "joining": ".busy", "silent": ".error", "lost": ".error", "released": ".muted"}
FOLDED, UNFOLDED = "+", "−"
"""Before what has rows below it, on the board too."""
RUN_GLYPHS = {
    RunState.STARTING: "◐",
    RunState.RUNNING: "●",
    RunState.RESTARTING: "↻",
    RunState.DEGRADED: "▲",
    RunState.FINISHED: "✓",
    RunState.FAILED: "✗",
    RunState.STOPPED: "■",
}
RUN_STYLES = {
    RunState.STARTING: ".busy",
    RunState.RUNNING: ".ok",
    RunState.RESTARTING: ".busy",
    RunState.DEGRADED: ".warning",
    RunState.FINISHED: ".ok",
    RunState.FAILED: ".error",
    RunState.STOPPED: ".muted",
}
SEVERITY_STYLES = {"error": ".error", "warning": ".warning", "info": ".muted"}
"""Styles of `grpo_tui.ui.widgets.lines`."""
SEVERITY_GLYPHS = {"error": "✗", "warning": "▲", "info": "·"}
SHARE_FILLS = "█▓▒▚▞▤▥▦▧▨▩▣"
"""One per service, so that a bar can be read without colours."""
OTHERS_FILL = "╳"
REST_FILL = "░"
FREE_FILL = "·"

_ASCII = str.maketrans(
    {
        "◀": "<", "▪": "'", "◇": "$",
        "◌": "?", "◍": "=",
        "○": "o", "◐": "(", "●": "*", "▲": "!", "↻": "@", "◑": ")", "■": "#", "✓": "+", "✗": "x", "▼": "v",
        "◆": "*", "×": "x",
        "▁": "_", "▂": ".", "▃": "-", "▄": "-", "▅": "=", "▆": "=", "▇": "%", "█": "#",
        "▓": "=", "▒": "+", "▚": "%", "▞": "$", "▤": "-", "▥": ":", "▦": "&", "▧": "/", "▨": "\\", "▩": "@", "▣": "H",
        "°": "'", "╳": "x", "░": "~", "·": ".",
        "–": "-", "—": "-", "−": "-", "…": "~", "→": ">", "←": "<", "↑": "^", "↓": "v", "≤": "<", "≥": ">", "±": "~",
        "─": "-", "━": "-", "│": "|", "┃": "|", "▌": "|", "▎": "|", "▊": "|",
        "┌": "+", "┐": "+", "└": "+", "┘": "+", "╭": "+", "╮": "+", "╰": "+", "╯": "+", "├": "+", "┤": "+",
        "┄": "-", "┈": "-", "┬": "+", "┴": "+", "┼": "+", "⇧": "^",
        "“": '"', "”": '"', "‘": "'", "’": "'",
    }
)  # fmt: skip

_DOTS_BY_ROW = (0x09, 0x12, 0x24, 0xC0)
"""Of a braille character, from its top."""


def _ascii_of_dots(dots: int) -> str:
    """An ASCII character with ink at about the same height."""
    rows = [row for row, mask in enumerate(_DOTS_BY_ROW) if dots & mask]
    if not rows:
        return " "
    if rows[-1] - rows[0] >= 2:
        return "|"
    return {0: "'", 1: "-", 2: "-"}.get(rows[0], ".")


_ASCII.update({0x2800 + dots: _ascii_of_dots(dots) for dots in range(256)})


def wants_ascii(environ: Mapping[str, str]) -> bool:
    """Whether the locale excludes UTF-8; without any locale setting (containers) UTF-8 is assumed.

    Python sets `LC_CTYPE=C.UTF-8` itself if it finds the C locale, so that value alone does not count.
    """
    if "TEXTUAL_DRIVER" in environ:
        return False  # a browser, whatever the server's locale is
    spoken = environ.get("LC_ALL") or environ.get("LC_CTYPE") or environ.get("LANG") or ""
    if spoken in ("C.UTF-8", "C.utf8", "UTF-8") and not environ.get("LC_ALL"):
        spoken = environ.get("LANG") or ""
    return bool(spoken) and "utf" not in spoken.lower()


class AsciiOnly(LineFilter):
    """Replace every character that is not ASCII by one that is and as wide."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Transform the segments of one line."""
        return [
            segment if segment.text.isascii() else Segment(as_ascii(segment.text), segment.style, segment.control)
            for segment in segments
        ]


def as_ascii(text: str) -> str:
    """`text` in ASCII, with a question mark for characters without a replacement."""
    replaced = text.translate(_ASCII)
    if replaced.isascii():
        return replaced
    return "".join(letter if letter.isascii() else "?" * cell_len(letter) for letter in replaced)
