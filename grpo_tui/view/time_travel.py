"""The run as it was at a moment: what the screens draw while somebody travels in its time. Pure."""

from __future__ import annotations

from grpo_tui.view.state import ViewState


def as_seen(state: ViewState) -> ViewState:
    """The state that is drawn: the newest, unless the screen stands at an earlier moment."""
    return state
