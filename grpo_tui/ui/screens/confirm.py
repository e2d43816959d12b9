"""Ask before something is destroyed, and name what that is."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static


class ConfirmScreen(ModalScreen[bool]):
    """A question; `y` is yes, every other way out is no."""

    BINDINGS = [
        Binding("y", "answer(True)", "yes", tooltip="do it"),
        Binding("n,escape,q,enter,ctrl+c", "answer(False)", "no", tooltip="leave everything as it is"),
    ]
    DEFAULT_CSS = """
    ConfirmScreen { align: center middle; }
    ConfirmScreen > Vertical {
        width: 72; max-width: 90%; height: auto; max-height: 90%; overflow-y: auto;
        padding: 1 2; background: $surface; border: round $error;
    }
    """

    def __init__(self, question: str, named: Sequence[str]) -> None:
        super().__init__()
        self._question = question
        self._named = named

    def compose(self) -> ComposeResult:
        """The question, what it is about, and the two answers."""
        with Vertical():
            yield Static(Content.styled(self._question, "bold"))
            yield Static(Content("\n".join(["", *(f"  {name}" for name in self._named), ""])))
            yield Static(Content.assemble(("y", "bold"), " yes     ", ("n", "bold"), " no"))

    def action_answer(self, is_yes: bool) -> None:
        """Close with the answer."""
        self.dismiss(is_yes)
