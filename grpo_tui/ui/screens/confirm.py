"""Confirmation dialogs that name what will be ended."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen, ScreenResultType
from textual.style import Style
from textual.widgets import Static

from grpo_tui.ui.text_screen import ClosesOnce

NUM_FRAME_ROWS = 8
"""Border, padding, the question (it may take two rows), and the empty rows around what is named."""


class QuestionScreen(ModalScreen[ScreenResultType], ClosesOnce[ScreenResultType]):
    """Base: a question, what it is about, and the keys that answer it."""

    DEFAULT_CSS = """
    QuestionScreen { align: center middle; }
    QuestionScreen > Vertical {
        width: 72; max-width: 90%; height: auto; padding: 1 2; background: $surface; border: round $error;
    }
    QuestionScreen VerticalScroll { height: auto; padding: 0 0 0 2; scrollbar-size-vertical: 1; }
    """

    def __init__(self, question: str, named: Sequence[str], answers: Sequence[Content]) -> None:
        super().__init__()
        self._question = question
        self._named = named
        self._answers = answers

    def compose(self) -> ComposeResult:
        """The question, what it is about, and the answers."""
        with Vertical():
            yield Static(Content.styled(self._question, "bold"))
            yield Static(" ")
            with VerticalScroll():
                for name in self._named:
                    yield Static(Content(name))
            yield Static(" ")
            for answer in self._answers:
                told = Static(answer)
                told.auto_links = False
                yield told

    def on_resize(self, event: events.Resize) -> None:
        """Keep the answers visible; a long list of names scrolls."""
        room = event.size.height - NUM_FRAME_ROWS - len(self._answers)
        self.query_one(VerticalScroll).styles.max_height = max(1, room)


class ConfirmScreen(QuestionScreen[bool]):
    """A yes-or-no question; every key but `y` means no."""

    BINDINGS = [
        Binding("y", "dismiss(True)", "yes", tooltip="do it"),
        Binding("n,escape,q,enter,ctrl+c", "dismiss(False)", "no", tooltip="leave everything as it is"),
    ]

    def __init__(self, question: str, named: Sequence[str]) -> None:
        super().__init__(question, named, [
            _answer("y", " yes", "dismiss(True)") + Content("     ") + _answer("n", " no", "dismiss(False)")
        ])  # fmt: skip


class PortAnswer(StrEnum):
    """What to do about a foreign process on a port of a service."""

    END_IT = "end it"
    TRY_AGAIN = "try again"


class TakePortScreen(QuestionScreen[PortAnswer]):
    """Whether to end a foreign process that holds a port; all keys but two change nothing."""

    BINDINGS = [
        Binding("e", f"answer('{PortAnswer.END_IT}')", "end it", tooltip="end the process on the port, then start"),
        Binding("t", f"answer('{PortAnswer.TRY_AGAIN}')", "try again", tooltip="start if the port is free by now"),
        Binding("n,escape,q,enter,ctrl+c", "dismiss", "cancel", tooltip="leave everything as it is"),
    ]

    def __init__(self, question: str, named: Sequence[str], do: str) -> None:
        """Create the dialog.

        Args:
            do: the action once the port is free: `start vllm`.
        """
        super().__init__(question, named, [
            _answer("e", f"  end it and {do}", f"answer('{PortAnswer.END_IT}')"),
            _answer("t", f"  just try again to {do}", f"answer('{PortAnswer.TRY_AGAIN}')"),
            _answer("n", "  cancel", "dismiss"),
        ])  # fmt: skip

    def action_answer(self, answer: str) -> None:
        """Close with the answer."""
        self.dismiss(PortAnswer(answer))


def _answer(key: str, words: str, action: str) -> Content:
    """A key with its answer; clickable."""
    return Content.assemble((key, "bold"), words).stylize(Style.from_meta({"@click": f"screen.{action}"}))
