"""The rollout screen of a run without a supervisor: what it shows narrow and wide, and what its keys do."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from group_fakes import completion, group, write_groups
from screen_fakes import metrics_line, write_metrics
from shown_screen import Shown, shown

from grpo_engine.wire.metrics import RolloutLine
from grpo_tui.ui.screens.rollouts import Question
from grpo_tui.ui.widgets.frame.activity_line import ActivityLine
from grpo_tui.ui.widgets.rollout_group import RolloutGroup
from grpo_tui.ui.widgets.rollout_list import RolloutList
from grpo_tui.view.rollouts.reader import RolloutReader
from grpo_tui.view.rollouts.state import GroupsRead
from grpo_tui.view.state import MetricsRead

pytestmark = pytest.mark.slow
SMALL, WIDE = (80, 24), (140, 40)


class Rollouts(Shown):
    """The open rollout screen."""

    @property
    def is_list_shown(self) -> bool:
        return self.part(RolloutList).display

    def group_lines(self, selector: str = "#group") -> list[str]:
        return self.part(RolloutGroup, selector).plain_lines

    @property
    def group(self) -> str:
        return "\n".join(self.group_lines())

    async def until_group(self, words: str) -> None:
        await self.until(lambda: words in self.group)


@asynccontextmanager
async def rollouts(folder: Path, *groups: RolloutLine, size: tuple[int, int] = SMALL) -> AsyncIterator[Rollouts]:
    """Open the screen, and wait until it has read the file."""
    if groups:
        write_groups(folder, *groups)
    async with shown(folder, size) as screen:
        opened = Rollouts(screen.app, screen.pilot, screen.connection)
        await opened.go_to("rollouts")
        await opened.until(lambda: opened.app.state.rollouts.read is not None)
        await opened.until(lambda: bool(opened.lines(RolloutList)))
        yield opened


async def test_a_narrow_screen_goes_from_the_list_to_the_group_and_back(tmp_path: Path) -> None:
    async with rollouts(tmp_path, group(1, (1.0, 0.0)), group(2, (0.5, 0.5))) as screen:
        rows = screen.lines(RolloutList)
        assert "2 recorded · newest first · following" in rows[0]
        assert rows[1].split() == ["step", "mean", "spread", "rewards", "prompt"]
        assert rows[2].split() == ["▌", "2", "0.500", "0.000", "▅▅", *["You", "sort", "digits.", "sort", "000002"]]
        assert rows[3].split() == ["1", "0.500", "1.000", "█▁", *["You", "sort", "digits.", "sort", "000001"]]
        await screen.press("down", "enter")
        await screen.until_group("group 2 of 2")
        for words in (
            "prompt: You sort digits. sort 000001",
            "answer 0 of 1<end>",
            '─ token 1 of 6 "ans" ─',
            "ratio 1.000, log-prob -0.500 inference",
        ):
            assert words in screen.group
        assert not screen.is_list_shown
        await screen.press("escape")
        await screen.until(lambda: screen.is_list_shown)


async def test_short_completions_leave_their_rows_to_the_table_of_all_of_them(tmp_path: Path) -> None:
    long = group(2, [1.0] * 12, texts=["abc " * 400])
    async with rollouts(tmp_path, group(1, [1.0] * 12), long, size=(80, 30)) as screen:
        await screen.press("enter")
        await screen.until_group("group 1 of 2")
        assert "more ↑↓" in screen.group
        await screen.press("n")
        await screen.until_group("group 2 of 2")
        assert "more ↑↓" not in screen.group
        assert len([row for row in screen.group_lines() if "complete" in row]) == 12


async def test_a_wide_screen_has_list_and_group_colours_tokens_and_compares_two_completions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ("\x1b]0;gotcha\x07\x1b[2J", "\u202eabc")
    groups = [group(3, prompt="\x1b[31mred\x07", texts=texts), group(4), group(5, environment="0")]
    async with rollouts(tmp_path, *groups, size=WIDE) as screen:
        await screen.until_group("answer 0 of 5")
        assert screen.is_list_shown
        assert "─ step 5 · environment 0 ─" in screen.group
        assert "coloured by ratio" in screen.group
        assert "ratio: <0.8 · 0.8–0.95 · 0.95–1.05 · 1.05–1.2 · >1.2" in screen.group
        await screen.press("right", "C", "C")
        await screen.until_group("coloured by entropy")
        assert '─ token 2 of 6 "wer" ─' in screen.group
        assert "ratio 1.499, " in screen.group
        assert "entropy, nats: <0.02" in screen.group

        await screen.press("m")
        await screen.until(lambda: not screen.is_list_shown)
        before = screen.group_lines()
        may_read = threading.Event()
        look = RolloutReader.look

        def look_later(*args: Any, **more: Any) -> GroupsRead:
            may_read.wait(20)
            return look(*args, **more)

        monkeypatch.setattr(RolloutReader, "look", look_later)
        await screen.press("n")
        await screen.until_group("reading …")
        assert screen.group_lines()[1:] == before[1:]  # until the next group is read
        may_read.set()
        await screen.until_group("─ step 4 · sort6 ─")
        await screen.press("down")
        await screen.until_group("completion 2")
        assert "answer 1 of 4<end>" in screen.group
        marked = "\n".join(screen.group_lines("#marked"))
        assert "compared with: step 5" in marked
        assert "answer 0 of 5<end>" in marked
        await screen.press("m")
        await screen.until(lambda: screen.is_list_shown)

        await screen.press("n", "up")  # control sequences of a model are written out
        await screen.until_group(r"\x1b]0;gotcha\x07\x1b[2J")
        assert r"prompt: \x1b[31mred\x07" in screen.group
        assert r"\x1b[31mred\x07" in screen.text(RolloutList)
        assert not any(letter < " " for row in screen.group_lines() for letter in row)


async def test_filters_are_typed_and_shown_in_the_title(tmp_path: Path) -> None:
    groups = [group(1, (1.0, 1.0)), group(2, (0.0, 0.0)), group(3, (1.0, 0.0))]
    async with rollouts(tmp_path, *groups) as screen:
        await screen.press("greater_than_sign", "x", "enter")
        await screen.until_text(ActivityLine, "'x' is not a number")
        await screen.press("backspace", "0", ".", "4", "enter")
        await screen.until_text(RolloutList, "mean above 0.4: 2 of 3")
        await screen.press("slash", *"of 1", "enter")
        await screen.until_text(RolloutList, "“of 1”: 1 of 3")
        await screen.press("slash", *"!", "enter")
        await screen.until_text(RolloutList, "none of 3 recorded groups matches: mean above 0.4")
        await screen.press("slash", "escape", "x")
        await screen.until_text(RolloutList, "3 recorded")
        assert not screen.part(Question).display


async def test_long_prompts_and_completions_scroll_and_an_empty_completion_says_so(tmp_path: Path) -> None:
    rules = "\n".join(f"Rule {number}." for number in range(60))
    counted = "".join(f"{number:05d}\n" for number in range(300))
    empty = completion("").model_copy(update={"text": "", "token_ids": [], "token_texts": []})
    long = group(1, prompt=f"{rules}\nsort 321").model_copy(update={"completions": [completion(counted), empty]})
    async with rollouts(tmp_path, long) as screen:
        await screen.press("enter")
        await screen.until_group("sort 321")
        assert "Rule 1." not in screen.group
        await screen.press("o")
        await screen.until_group("the whole prompt")
        assert "Rule 1." in screen.group
        await screen.press(*["pagedown"] * 9)
        await screen.until_group("–61 of 61")
        await screen.press("escape")
        await screen.until_group("lines 1–")
        assert "coloured by ratio" in screen.group
        await screen.press("pagedown")
        await screen.until(lambda: "lines 1–" not in screen.group)
        await screen.press("end")
        await screen.until_group("–301 of 301")
        assert r"00299\n" in screen.group
        await screen.press("down")
        await screen.until_group("empty: the model ended without any text")


async def test_an_empty_screen_says_why_and_what_will_fill_it(tmp_path: Path) -> None:
    async with rollouts(tmp_path) as screen:
        assert "No training step yet." in " ".join(screen.lines(RolloutList))
        write_metrics(tmp_path, 3)
        screen.app._apply(MetricsRead(lines=(metrics_line(1),)))
        words = "Other trainers do not record rollouts"
        await screen.until(lambda: words in " ".join(screen.lines(RolloutList)))
        write_groups(tmp_path, group(1))
        await screen.until_text(RolloutList, "1 recorded")
