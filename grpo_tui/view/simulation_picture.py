"""`grpo-tui simulate --svg`: tokens a second and waiting as bars, one pair a row. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_tui.view.comparison_page import CHAR_WIDTH, COLOURS, LEFT, RIGHT, ROW_HEIGHT, WIDTH, safe, svg
from grpo_tui.view.simulation import Simulated, label

TITLE_HEIGHT = 74.0
VALUE_WIDTH = 240.0
"""Of the text after a bar."""
LEGEND = (("tokens/s", COLOURS[0]), ("trainer waits", COLOURS[1]), ("sampling waits", COLOURS[2]))


def to_svg(name: str, all_: Sequence[Simulated]) -> str:
    """A picture of all rows.

    Args:
        name: of the profile.
    """
    labels = [label(each) for each in all_]
    left = LEFT + max(map(len, labels)) * CHAR_WIDTH
    room = WIDTH - RIGHT - VALUE_WIDTH - left
    most = max(each.result.tokens_per_s for each in all_)
    parts = [
        f'<text class="title" x="{LEFT}" y="30">{safe(name)}: simulated</text>',
        f'<text x="{LEFT}" y="52">trainer ranks : servers, S: max_staleness; waiting in shares of the time</text>',
    ]
    for place, (text, colour) in enumerate(LEGEND):
        x = WIDTH - RIGHT - 330 + 110 * place
        parts.append(f'<rect x="{x:.0f}" y="20" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17:.0f}" y="30">{text}</text>')
    y = TITLE_HEIGHT
    for each, text in zip(all_, labels, strict=True):
        result = each.result
        speed = f"{result.tokens_per_s:,.0f} tokens/s, staleness {result.staleness_mean:.2f}"
        parts.append(f'<text class="cell" x="{LEFT}" y="{y + 14:.0f}">{safe(text)}</text>')
        parts.append(_bar(left, y, 12, room * result.tokens_per_s / most, LEGEND[0][1]))
        parts.append(f'<text x="{left + room * result.tokens_per_s / most + 8:.1f}" y="{y + 11:.0f}">{speed}</text>')
        parts.append(_bar(left, y + 14, 4, room * result.trainer_waits, LEGEND[1][1]))
        parts.append(_bar(left, y + 19, 4, room * result.generation_waits, LEGEND[2][1]))
        y += ROW_HEIGHT + 12
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + svg("\n".join(parts), WIDTH, y + 12) + "\n"


def _bar(x: float, y: float, height: float, width: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.0f}" fill="{colour}"/>'
