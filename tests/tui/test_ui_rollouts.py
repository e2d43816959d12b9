"""The rollout screen over a run without a daemon: what it shows narrow and wide, and what its keys do."""

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
from grpo_tui.ui.screens.rollouts import Question, RolloutsScreen
from grpo_tui.ui.widgets.frame.activity_line import ActivityLine
from grpo_tui.ui.widgets.lines import Lines
from grpo_tui.ui.widgets.rollout_group import RolloutGroup
from grpo_tui.ui.widgets.rollout_list import RolloutList
from grpo_tui.view.rollouts.reader import RolloutReader
from grpo_tui.view.rollouts.state import GroupsRead
from grpo_tui.view.state import MetricsRead

pytestmark = pytest.mark.slow
SMALL, WIDE = (80, 24), (140, 40)


@asynccontextmanager
async def rollouts(folder: Path, *groups: RolloutLine, size: tuple[int, int] = SMALL) -> AsyncIterator[Shown]:
    """The screen, once it has looked at the file."""
    if groups:
        write_groups(folder, *groups)
    async with shown(folder, size) as screen:
        await screen.pilot.press("4")
        await screen.until(lambda: screen.app.state.rollouts.read is not None)
        await screen.until(lambda: bool(part(screen, RolloutList).plain_lines))
        yield screen


def part(screen: Shown, kind: type[Lines], selector: str = "") -> Lines:
    assert isinstance(screen.app.screen, RolloutsScreen)
    return screen.app.screen.query_one(selector or kind.__name__, kind)


def text(screen: Shown, kind: type[Lines], selector: str = "") -> str:
    return "\n".join(part(screen, kind, selector).plain_lines)


def group_text(screen: Shown) -> str:
    return text(screen, RolloutGroup, "#group")


async def test_a_narrow_screen_goes_from_the_list_to_the_group_and_back(tmp_path: Path) -> None:
    async with rollouts(tmp_path, group(1, (1.0, 0.0)), group(2, (0.5, 0.5))) as screen:
        rows = part(screen, RolloutList).plain_lines
        assert "2 recorded · newest first · following" in rows[0]
        assert rows[1].split() == ["step", "mean", "spread", "rewards", "prompt"]
        assert rows[2].split() == ["▌", "2", "0.500", "0.000", "▅▅", "…000002"]
        assert rows[3].split() == ["1", "0.500", "1.000", "█▁", "…000001"]
        await screen.pilot.press("down", "enter")
        await screen.until(lambda: "group 2 of 2" in group_text(screen))
        shown_group = group_text(screen)
        assert "prompt: You sort digits. sort 000001" in shown_group
        assert "answer 0 of 1<end>" in shown_group
        assert '─ token 1 of 6 "ans" ─' in shown_group
        assert "ratio 1.000, log-prob -0.500 inference" in shown_group
        assert not part(screen, RolloutList).display
        await screen.pilot.press("escape")
        await screen.until(lambda: part(screen, RolloutList).display)


async def test_a_group_stays_in_sight_until_the_next_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rollouts(tmp_path, group(1, (1.0, 0.0)), group(2, (0.5, 0.5)), size=WIDE) as screen:
        before = part(screen, RolloutGroup, "#group").plain_lines
        is_read = threading.Event()
        read = RolloutReader.look

        def slowly(*args: Any, **more: Any) -> GroupsRead:
            is_read.wait(20)
            return read(*args, **more)

        monkeypatch.setattr(RolloutReader, "look", slowly)
        await screen.pilot.press("n")
        await screen.until(lambda: "reading …" in group_text(screen))
        assert part(screen, RolloutGroup, "#group").plain_lines[1:] == before[1:]
        is_read.set()
        await screen.until(lambda: "group 2 of 2" in group_text(screen))


async def test_short_completions_leave_their_rows_to_the_table_of_all_of_them(tmp_path: Path) -> None:
    long = group(2, [1.0] * 12, texts=["abc " * 400])
    async with rollouts(tmp_path, group(1, [1.0] * 12), long, size=(80, 30)) as screen:
        await screen.pilot.press("enter")
        await screen.until(lambda: "group 1 of 2" in group_text(screen))
        assert "more ↑↓" in group_text(screen)
        await screen.pilot.press("n")
        await screen.until(lambda: "group 2 of 2" in group_text(screen))
        assert "more ↑↓" not in group_text(screen)
        assert len([row for row in group_text(screen).splitlines() if "complete" in row]) == 12


async def test_a_wide_screen_has_both_and_two_completions_side_by_side(tmp_path: Path) -> None:
    async with rollouts(tmp_path, *(group(step) for step in range(1, 6)), size=WIDE) as screen:
        await screen.until(lambda: "answer 0 of 5" in group_text(screen))
        assert part(screen, RolloutList).display
        await screen.pilot.press("m", "n", "down")
        await screen.until(lambda: "completion 2" in group_text(screen))
        assert "step 4" in group_text(screen)
        assert "answer 1 of 4<end>" in group_text(screen)
        marked = text(screen, RolloutGroup, "#marked")
        assert "compared with: step 5" in marked
        assert "answer 0 of 5<end>" in marked
        await screen.pilot.press("m")
        await screen.until(lambda: part(screen, RolloutList).display)


async def test_tokens_are_coloured_by_what_is_asked_for_and_told_in_words(tmp_path: Path) -> None:
    async with rollouts(tmp_path, group(1), size=WIDE) as screen:
        await screen.until(lambda: "coloured by ratio" in group_text(screen))
        assert "ratio: <0.8 · 0.8–0.95 · 0.95–1.05 · 1.05–1.2 · >1.2" in group_text(screen)
        await screen.pilot.press("right", "c", "c")
        await screen.until(lambda: "coloured by entropy" in group_text(screen))
        assert '─ token 2 of 6 "wer" ─' in group_text(screen)
        assert "ratio 1.499, " in group_text(screen)
        assert "entropy, nats: <0.02" in group_text(screen)


async def test_filters_are_typed_and_told_in_the_title(tmp_path: Path) -> None:
    groups = [group(1, (1.0, 1.0)), group(2, (0.0, 0.0)), group(3, (1.0, 0.0))]
    async with rollouts(tmp_path, *groups) as screen:
        await screen.pilot.press("greater_than_sign", "x", "enter")
        await screen.until(lambda: "'x' is not a number" in screen.app.screen.query_one(ActivityLine).plain_lines[0])
        await screen.pilot.press("backspace", "0", ".", "4", "enter")
        await screen.until(lambda: "mean above 0.4: 2 of 3" in text(screen, RolloutList))
        await screen.pilot.press("slash", *"of 1", "enter")
        await screen.until(lambda: "“of 1”: 1 of 3" in text(screen, RolloutList))
        await screen.pilot.press("slash", *"!", "enter")
        await screen.until(lambda: "none of 3 recorded groups matches: mean above 0.4" in text(screen, RolloutList))
        await screen.pilot.press("slash", "escape", "x")
        await screen.until(lambda: "3 recorded" in text(screen, RolloutList))
        assert not screen.app.screen.query_one(Question).display


async def test_nothing_that_a_model_wrote_reaches_the_terminal_as_a_command(tmp_path: Path) -> None:
    rude = group(1, (1.0, 0.0), prompt="\x1b[31mred\x07", texts=("\x1b]0;gotcha\x07\x1b[2J", "\u202eabc"))
    async with rollouts(tmp_path, rude, size=WIDE) as screen:
        await screen.until(lambda: r"\x1b]0;gotcha\x07\x1b[2J" in group_text(screen))
        assert r"prompt: \x1b[31mred\x07" in group_text(screen)
        assert r"\x1b[31mred\x07" in text(screen, RolloutList)
        assert not any(letter < " " for row in part(screen, RolloutGroup, "#group").plain_lines for letter in row)


async def test_of_a_long_prompt_the_end_is_shown_and_all_of_it_on_a_key(tmp_path: Path) -> None:
    rules = "\n".join(f"Rule {number}." for number in range(60))
    async with rollouts(tmp_path, group(1, prompt=f"{rules}\nsort 321")) as screen:
        await screen.pilot.press("enter")
        await screen.until(lambda: "sort 321" in group_text(screen))
        assert "Rule 1." not in group_text(screen)
        await screen.pilot.press("o")
        await screen.until(lambda: "the whole prompt" in group_text(screen))
        assert "Rule 1." in group_text(screen)
        await screen.pilot.press(*["pagedown"] * 9)
        await screen.until(lambda: "–61 of 61" in group_text(screen))
        await screen.pilot.press("escape")
        await screen.until(lambda: "coloured by ratio" in group_text(screen))


async def test_a_long_completion_scrolls_and_an_empty_one_says_so(tmp_path: Path) -> None:
    counted = "".join(f"{number:05d}\n" for number in range(300))
    nothing = completion("").model_copy(update={"text": "", "token_ids": [], "token_texts": []})
    long = RolloutLine(time=1.0, step=1, environment=None, prompt="count", completions=[completion(counted), nothing])
    async with rollouts(tmp_path, long) as screen:
        await screen.pilot.press("enter")
        await screen.until(lambda: "lines 1–" in group_text(screen))
        await screen.pilot.press("pagedown")
        await screen.until(lambda: "lines 1–" not in group_text(screen))
        await screen.pilot.press("end")
        await screen.until(lambda: "–301 of 301" in group_text(screen))
        assert r"00299\n" in group_text(screen)
        await screen.pilot.press("down")
        await screen.until(lambda: "empty: the model ended without any text" in group_text(screen))


async def test_an_empty_screen_says_why_and_what_will_fill_it(tmp_path: Path) -> None:
    async with rollouts(tmp_path) as screen:
        assert "No training step yet." in " ".join(part(screen, RolloutList).plain_lines)
        write_metrics(tmp_path, 3)
        screen.app._apply(MetricsRead(lines=(metrics_line(1),)))
        words = "Other trainers do not record rollouts"
        await screen.until(lambda: words in " ".join(part(screen, RolloutList).plain_lines))
        write_groups(tmp_path, group(1))
        await screen.until(lambda: "1 recorded" in text(screen, RolloutList))


async def test_the_title_of_a_group_names_its_environment_or_says_what_the_number_is(tmp_path: Path) -> None:
    async with rollouts(tmp_path, group(1, environment="sort6"), group(2, environment="0"), size=WIDE) as screen:
        await screen.until(lambda: "─ step 2 · environment 0 ─" in group_text(screen))
        await screen.pilot.press("n")
        await screen.until(lambda: "─ step 1 · sort6 ─" in group_text(screen))
