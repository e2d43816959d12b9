"""The alignment screen over recorded groups: what it shows at several sizes, and what its keys do."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from unittest import mock

import pytest
from alignment_fakes import completion, group, healthy_group, write_groups
from screen_fakes import NOW
from shown_screen import LARGE, SMALL, Shown, shown

from grpo_engine.wire.metrics import RolloutLine
from grpo_tui.ui.widgets.alignment_body import AlignmentBody, visible
from grpo_tui.ui.widgets.charts import LEVELS, axis_lines, bar, columns_chart, count_labels, short_count
from grpo_tui.view.alignment.reader import AlignmentReader
from grpo_tui.view.alignment.state import AlignmentView, Page, Window
from grpo_tui.view.state import ViewState

slow = pytest.mark.slow
MIDDLE = (120, 36)


class Alignment(Shown):
    """The open alignment screen."""

    @property
    def rows(self) -> list[str]:
        return self.lines(AlignmentBody)

    @property
    def body(self) -> str:
        return self.text(AlignmentBody)

    async def until_body(self, words: str) -> None:
        await self.until_text(AlignmentBody, words)


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
        opened = Alignment(screen.app, screen.pilot, screen.connection)
        await opened.go_to("alignment")
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


@slow
async def test_the_verdict_the_charts_and_the_chosen_steps_are_shown(tmp_path: Path) -> None:
    (tmp_path / "resolved.json").write_text(
        '{"services": {"t": {"kind": "trainer", "clip_low": 0.1, "clip_high": 0.4}}}'
    )
    async with alignment(tmp_path, healthy(), SMALL) as screen:
        await screen.until_body("trainer and inference agree")
        assert "steps 3–12 of 12 · 10 groups · 800 tokens" in screen.rows[0]
        assert "h: last 10 steps" in screen.rows[0]
        for words in ("trainer − inference", "ratio", "clip 0.9 – 1.4", "outside:", "└"):
            assert words in screen.body, words
        assert "assumed" not in screen.body
        assert len(screen.rows) <= screen.part(AlignmentBody).size.height
        await screen.check_widths()


@slow
@pytest.mark.parametrize("size", [MIDDLE, LARGE], ids=["120x36", "200x50"])
async def test_a_wide_screen_shows_tokens_positions_and_versions_beside_the_charts(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    apart: dict[str, float | None] = {"alignment__diff_abs_mean": 0.49}  # since the first step, as the groups are
    async with alignment(tmp_path, scaled(), size, num_measured=5, **apart) as screen:
        await screen.until_body("worst tokens")
        cause = ("likely: one side applies the temperature", "--logprobs-mode", "clip 0.8 – 1.2 (assumed)")
        for words in (*cause, "by position", "by age", "infer→train"):
            assert words in screen.body, words
        assert ("over the run" in screen.body) is (size == LARGE)
        if size == MIDDLE:
            first = next(row for row in screen.rows if "of 40" in row)
            await screen.press("down", "pagedown")
            await screen.until(lambda: first not in screen.rows)
            assert screen.app.state.alignment.first_token == 9


@slow
async def test_what_is_measured_first_is_for_the_current_metrics(tmp_path: Path) -> None:
    """The verdict could be that of a run without metrics for a second after the screen was opened."""
    write_groups(tmp_path, scaled())
    with mock.patch.object(AlignmentReader, "look", autospec=True, side_effect=AlignmentReader.look) as look:
        async with shown(tmp_path, MIDDLE, num_steps=12) as screen:
            with mock.patch.object(screen.app, "_draw"):  # whatever comes first
                await screen.press("3")
                async with asyncio.timeout(60):
                    while not look.called:
                        await screen.pilot.pause(0.01)
    _, _, _, lines = look.call_args_list[0].args
    assert len(lines) == 12


@slow
async def test_a_narrow_screen_turns_pages(tmp_path: Path) -> None:
    async with alignment(tmp_path, scaled(), SMALL) as screen:
        await screen.until_body("[charts]")
        await screen.press("tab")
        await screen.until_body("[worst tokens]")
        assert "infer→train" in screen.body
        assert "[w" in screen.body  # the token itself, in its text
        await screen.press("tab")
        await screen.until_body("by age of the sampling weights")
        assert screen.app.state.alignment.page is Page.PLACES
        y = next(number for number, row in enumerate(screen.rows) if row.startswith(" tab: "))
        await screen.pilot.click(screen.part(AlignmentBody), offset=(screen.rows[y].index("charts") + 2, y))
        await screen.until_body("[charts]")


@slow
async def test_keys_choose_the_steps_that_are_measured_and_new_groups_are_followed(tmp_path: Path) -> None:
    async with alignment(tmp_path, healthy()) as screen:
        await screen.until_body("steps 3–12 of 12")
        await screen.press("h")
        await screen.until_body("─ step 12 of 12 ·")
        await screen.press("left", "left")
        await screen.until_body("─ step 10 of 12 ·")
        await screen.press("right")
        await screen.until_body("─ step 11 of 12 ·")
        await screen.press("h")
        await screen.until_body("steps 1–11 of 12 ·")
        assert screen.app.state.alignment.window is Window.ALL
        await screen.press("end")
        await screen.until_body("steps 1–12 of 12 ·")
        write_groups(tmp_path, healthy(13)[-1:])
        await screen.until_body("steps 1–13 of 13 ·")


@slow
async def test_without_recorded_groups_the_metrics_and_the_reason_are_shown(tmp_path: Path) -> None:
    async with alignment(tmp_path, [], alignment__diff_abs_mean=0.4, alignment__diff_mean=-0.38) as screen:
        await screen.until_body("alignment/diff_abs_mean")
        assert "there is no rollouts.jsonl yet" in screen.body
        assert "since the first step" in screen.body or "drift apart" in screen.body
        assert "0.8 – 1.2" in screen.body


@slow
async def test_odd_text_and_damaged_or_missing_files_are_survived(tmp_path: Path) -> None:
    odd = completion([-1.0] * 4, [-3.0, -1.0, -4.0, -1.2], texts=["\n\t", "[b]日本", "\x1b[2J", "🙂"])
    write_groups(tmp_path, [group(odd, prompt="[/red]\n")])
    with (tmp_path / "rollouts.jsonl").open("ab") as file:
        file.write(b"garbage\n")
    async with alignment(tmp_path, [group(odd, step=2)]) as screen:
        await screen.until_body("steps 1–2 of 2")
        assert "\\n\\t" in screen.body
        assert "\x1b" not in screen.body
        (tmp_path / "rollouts.jsonl").unlink()
        await screen.until_body("no rollouts.jsonl")
        untrained = group(completion([], [-1.0]), step=7)
        write_groups(tmp_path, [healthy_group(step=7), untrained])
        await screen.until_body("of 7")


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
@pytest.mark.parametrize(
    "groups",
    [healthy(3), [group(completion([-1.0], [-1.0]))], [group(completion([-1.0, -900.0], [-700.0, -0.0]))], []],
    ids=["healthy", "one token", "extreme", "none"],
)
def test_any_numbers_are_drawn_at_any_size(tmp_path: Path, groups: list[RolloutLine], loss: str) -> None:
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


def test_columns_start_at_their_axis_and_a_small_value_is_visible() -> None:
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


def test_bars_have_half_cells_and_a_small_share_is_visible() -> None:
    assert [bar(share, 4) for share in (0, 0.001, 0.5, 0.6, 1, 7)] == ["", "▌", "██", "██▌", "████", "████"]


def test_control_characters_of_a_token_are_written_out() -> None:
    assert visible("a\nb\x07") == "a\\nb·"
