"""The alignment screen over recorded groups: what it shows at several sizes, and what its keys ask for."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from alignment_fakes import completion, group, healthy_group, write_groups
from screen_fakes import NOW, metrics_line
from shown_screen import Shown, shown

from grpo_engine.wire.metrics import RolloutLine
from grpo_tui.ui.glyphs import as_ascii
from grpo_tui.ui.widgets.alignment_body import AlignmentBody, visible
from grpo_tui.ui.widgets.charts import LEVELS, axis_lines, bar, columns_chart, count_labels, short_count
from grpo_tui.view.alignment.reader import AlignmentReader
from grpo_tui.view.alignment.state import AlignmentView, Page, Window
from grpo_tui.view.state import ViewState

SMALL, MIDDLE, LARGE = (80, 24), (120, 36), (200, 50)
SIZES = pytest.mark.parametrize("size", [SMALL, MIDDLE, LARGE], ids=["80x24", "120x36", "200x50"])


class Alignment(Shown):
    """The open alignment screen."""

    @property
    def body(self) -> AlignmentBody:
        assert self.app.shown is not None
        return self.app.shown.query_one(AlignmentBody)

    @property
    def rows(self) -> list[str]:
        return self.body.plain_lines

    @property
    def words(self) -> str:
        return "\n".join(self.rows)

    async def until_told(self, words: str) -> None:
        await self.until(lambda: words in self.words)


@asynccontextmanager
async def alignment(
    run_folder: Path,
    groups: Sequence[RolloutLine],
    size: tuple[int, int] = MIDDLE,
    num_measured: int = 12,
    **metrics: float | None,
) -> AsyncIterator[Alignment]:
    """Open the screen on a run that recorded these groups; `metrics` are those of its last five measured steps."""
    write_groups(run_folder, groups)
    async with shown(run_folder, size, num_steps=num_measured, **metrics) as screen:
        await screen.pilot.press("3")
        opened = Alignment(screen.app, screen.pilot, screen.connection)
        await opened.until(lambda: opened.app.state.alignment.measured is not None)
        yield opened


def healthy(num_steps: int = 12) -> list[RolloutLine]:
    return [
        healthy_group(step=step, version=step - 1, noise=0.02, num=4, seed=step) for step in range(1, num_steps + 1)
    ]


def scaled(num_steps: int = 12) -> list[RolloutLine]:
    return [
        healthy_group(step=step, version=step - 1, num=4, seed=step, change=lambda logprob, place: 0.7 * logprob)
        for step in range(1, num_steps + 1)
    ]


@pytest.mark.slow
@SIZES
async def test_the_verdict_the_charts_and_the_steps_are_shown(tmp_path: Path, size: tuple[int, int]) -> None:
    async with alignment(tmp_path, healthy(), size) as screen:
        await screen.until_told("trainer and inference agree")
        assert "steps 3–12 of 12 · 10 groups · 800 tokens" in screen.rows[0]
        assert "w: last 10 steps" in screen.rows[0]
        for words in ("trainer − inference", "ratio", "clip 0.8 – 1.2 (assumed)", "outside:", "└"):
            assert words in screen.words, words
        for row in screen.rows:
            assert len(row) <= screen.body.size.width
        assert len(screen.rows) <= screen.body.size.height


@pytest.mark.slow
@pytest.mark.parametrize("size", [MIDDLE, LARGE], ids=["120x36", "200x50"])
async def test_a_wide_screen_shows_tokens_positions_and_versions_beside_the_charts(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    apart: dict[str, float | None] = {"alignment__diff_abs_mean": 0.49}  # since the first step, as the groups are
    async with alignment(tmp_path, scaled(), size, num_measured=5, **apart) as screen:
        await screen.until_told("worst tokens")
        for words in (
            "likely: one side applies the temperature",
            "--logprobs-mode",
            "by position",
            "by age",
            "infer→train",
        ):
            assert words in screen.words, words
        assert ("over the run" in screen.words) is (size == LARGE)


@pytest.mark.slow
async def test_what_is_measured_first_is_for_the_state_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a second after it was opened, the verdict could be that of a run without metrics."""
    num_lines = list[int]()
    look = AlignmentReader.look

    def noted(reader: AlignmentReader, window: Window, until_step: int | None, lines: Any, **more: Any) -> Any:
        num_lines.append(len(lines))
        return look(reader, window, until_step, lines, **more)

    monkeypatch.setattr(AlignmentReader, "look", noted)
    write_groups(tmp_path, scaled())
    async with shown(tmp_path, MIDDLE, num_steps=12) as screen:
        monkeypatch.setattr(screen.app, "_draw", lambda: None)  # whatever comes first
        await screen.pilot.press("3")
        async with asyncio.timeout(20):
            while not num_lines:
                await screen.pilot.pause(0.01)
    assert num_lines[0] == 12


@pytest.mark.slow
async def test_a_narrow_screen_turns_pages(tmp_path: Path) -> None:
    async with alignment(tmp_path, scaled(), SMALL) as screen:
        await screen.until_told("[charts]")
        await screen.pilot.press("p")
        await screen.until_told("[worst tokens]")
        assert "infer→train" in screen.words
        assert "[w" in screen.words  # the token itself, in its text
        await screen.pilot.press("p")
        await screen.until_told("by age of the sampling weights")
        assert screen.app.state.alignment.page is Page.PLACES
        body = screen.app.screen.query_one(AlignmentBody)
        y = next(number for number, row in enumerate(body.plain_lines) if row.startswith(" p: "))
        await screen.pilot.click(body, offset=(body.plain_lines[y].index("charts") + 2, y))
        await screen.until_told("[charts]")


@pytest.mark.slow
async def test_keys_choose_the_steps_that_are_looked_at(tmp_path: Path) -> None:
    async with alignment(tmp_path, healthy()) as screen:
        await screen.until_told("steps 3–12 of 12")
        await screen.pilot.press("w")
        await screen.until_told("─ step 12 of 12 ·")
        await screen.pilot.press("left", "left")
        await screen.until_told("─ step 10 of 12 ·")
        await screen.pilot.press("right")
        await screen.until_told("─ step 11 of 12 ·")
        await screen.pilot.press("w")
        await screen.until_told("steps 1–11 of 12 ·")
        assert screen.app.state.alignment.window is Window.ALL
        await screen.pilot.press("end")
        await screen.until_told("steps 1–12 of 12 ·")


@pytest.mark.slow
async def test_new_groups_are_followed(tmp_path: Path) -> None:
    async with alignment(tmp_path, healthy()) as screen:
        await screen.until_told("of 12 ·")
        write_groups(tmp_path, healthy(13)[-1:])
        await screen.until_told("steps 4–13 of 13 ·")


@pytest.mark.slow
async def test_the_list_of_tokens_scrolls(tmp_path: Path) -> None:
    async with alignment(tmp_path, scaled()) as screen:
        await screen.until_told("worst tokens")
        first = next(row for row in screen.rows if "of 40" in row)
        await screen.pilot.press("down", "pagedown")
        await screen.until(lambda: first not in screen.rows)
        assert screen.app.state.alignment.first_token == 9


@pytest.mark.slow
async def test_without_recorded_groups_the_metrics_stand_in_and_the_reason_is_told(tmp_path: Path) -> None:
    async with alignment(tmp_path, [], alignment__diff_abs_mean=0.4, alignment__diff_mean=-0.38) as screen:
        await screen.until_told("alignment/diff_abs_mean")
        assert "there is no rollouts.jsonl yet" in screen.words
        assert "since the first step" in screen.words or "drift apart" in screen.words
        assert "0.8 – 1.2" in screen.words


@pytest.mark.slow
async def test_the_clip_of_the_run_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "resolved.json").write_text(
        '{"services": {"t": {"kind": "trainer", "clip_low": 0.1, "clip_high": 0.4}}}'
    )
    async with alignment(tmp_path, healthy()) as screen:
        await screen.until_told("clip 0.9 – 1.4")
        assert "assumed" not in screen.words


@pytest.mark.slow
async def test_odd_text_and_odd_files_do_no_harm(tmp_path: Path) -> None:
    odd = completion([-1.0] * 4, [-3.0, -1.0, -4.0, -1.2], texts=["\n\t", "[b]日本", "\x1b[2J", "🙂"])
    write_groups(tmp_path, [group(odd, prompt="[/red]\n")])
    with (tmp_path / "rollouts.jsonl").open("ab") as file:
        file.write(b"garbage\n")
    async with alignment(tmp_path, [group(odd, step=2)], MIDDLE) as screen:
        await screen.until_told("steps 1–2 of 2")
        assert "\\n\\t" in screen.words
        assert "\x1b" not in screen.words
        (tmp_path / "rollouts.jsonl").unlink()
        await screen.until_told("no rollouts.jsonl")
        write_groups(tmp_path, [healthy_group(step=7), metrics_group()])
        await screen.until_told("of 7")


def metrics_group() -> RolloutLine:
    """A group of which nothing was trained."""
    return group(completion([], [-1.0]), step=metrics_line(7).step)


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
@pytest.mark.parametrize(
    "groups",
    [healthy(3), [group(completion([-1.0], [-1.0]))], [group(completion([-1.0, -900.0], [-700.0, -0.0]))], []],
    ids=["healthy", "one token", "extreme", "none"],
)
def test_any_numbers_are_drawn_in_any_room(tmp_path: Path, groups: list[RolloutLine], loss: str) -> None:
    write_groups(tmp_path, groups)
    (tmp_path / "resolved.json").write_text(json.dumps({"services": {"t": {"kind": "trainer", "loss": loss}}}))
    reader = AlignmentReader(tmp_path)
    measured = reader.look(Window.ALL, None, ())
    for page in Page:
        view = AlignmentView(measured=measured, page=page, settings=reader.settings, first_token=3)
        state = ViewState(run_folder=tmp_path, now=NOW, alignment=view)
        for width, height in itertools.product((1, 20, 61, 80, 110, 200), (1, 3, 8, 20, 46)):
            for row in AlignmentBody().lines(state, width, height):
                assert width < 61 or row.cell_length <= width, (width, height, row.plain)


# --- charts ----------------------------------------------------------------------------------------------------------


def test_columns_stand_on_their_axis_and_what_is_not_nothing_shows() -> None:
    rows = [row.plain for row in columns_chart([1.0, 0.5, 1e-9, 0.0], ["", "", "", ""], 2, {0: "12"}, marks={3: ""})]
    assert rows == ["    12┤█  │", "      │██▁│"]
    assert LEVELS == 8


def test_ticks_that_would_meet_are_left_out() -> None:
    strokes, words = (row.plain for row in axis_lines(20, {0: "-1", 1: "wide", 9: "0", 19: "1 nats"}))
    assert strokes == "      └┴┴───────┴─────────┴"
    assert words.split() == ["-1", "0", "1", "nats"]
    assert len(words) <= len(strokes) + 1


def test_counts_are_short_and_their_scale_reaches_the_greatest() -> None:
    assert [short_count(count) for count in (7, 999, 1100, 36_400, 2_500_000)] == ["7", "999", "1.1k", "36k", "2.5M"]
    labels = count_labels(947, 10)
    assert labels[0] == "947"
    assert {"100", "10", "1"} <= set(labels.values())


def test_bars_have_half_cells_and_never_vanish() -> None:
    assert [bar(share, 4) for share in (0, 0.001, 0.5, 0.6, 1, 7)] == ["", "▌", "██", "██▌", "████", "████"]


def test_everything_that_is_drawn_has_a_likeness_in_ascii() -> None:
    assert "?" not in as_ascii("│┤└┴─▁▂▃▄▅▆▇█▌→–−×·…✓✗▲↑↓")
    assert visible("a\nb\x07") == "a\\nb·"
