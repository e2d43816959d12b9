"""The user of this screen: tagged services, read-only mode, and whether to show the hint for new users. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """State of one open screen that is not part of the run."""

    tagged: frozenset[str] = frozenset()
    """Names of services that the next key acts on."""
    is_read_only: bool = False
    """Whether keys that act on the run are refused."""
    is_new: bool = False
    """Whether to show the hint for new users."""
    has_board: bool = False
    """Whether the screen was opened from the board, to which `q` leads back."""
    machine: str | None = None
    """The machine whose row is selected; None while that of a service is."""
    folded: frozenset[str] = frozenset()
    """Machines whose services are not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewerChange:
    """Base of what changes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagToggled(ViewerChange):
    """A service was tagged, or its tag taken away."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TagsCleared(ViewerChange):
    """No service is tagged any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HintRead(ViewerChange):
    """The user pressed a first key."""


def after(viewer: Viewer, change: ViewerChange) -> Viewer:
    """The viewer after `change`."""
    match change:
        case TagToggled():
            return replace(viewer, tagged=viewer.tagged ^ {change.name})
        case TagsCleared():
            return replace(viewer, tagged=frozenset())
        case HintRead():
            return replace(viewer, is_new=False)
        case _:
            return viewer
