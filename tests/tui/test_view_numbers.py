"""Numbers as they are shown, sparklines, and bars."""

import math

import pytest

from grpo_engine.wire.metrics import EVALUATION_PREFIX, METRIC_NAMES, environment_metric
from grpo_tui.ui.widgets.gpu_bars import split_cells
from grpo_tui.view.format import age_text, bytes_text, clock_text, duration_text, number_text, percent_text, shortened
from grpo_tui.view.metrics.history import bar_heights, bucketed
from grpo_tui.view.metrics.names import printed, value_text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0B"), (812, "812B"), (9 * 1024, "9K"), (int(9.5 * 1024**2), "9.5M"), (180 << 20, "180M"),
     (int(36.2 * 1024**3), "36.2G"), (1 << 40, "1.0T")],
)  # fmt: skip
def test_bytes_are_short_and_unknown_is_a_dash(value: int | None, text: str) -> None:
    assert bytes_text(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.42, "0.4s"), (9.96, "10s"), (59.6, "1m00s"), (185, "3m05s"), (3725, "1h02m"), (183_600, "2d03h")],
)
def test_durations_have_two_units_at_most(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0"), (0.87312, "0.8731"), (1.41, "1.410"), (-0.0213, "-0.0213"), (212.0, "212.0"),
     (11_873.4, "11,873"), (1e-5, "1.0e-05"), (2.5e7, "2.5e+07")],
)  # fmt: skip
def test_metrics_show_four_digits_that_matter(value: float | None, text: str) -> None:
    assert number_text(value) == text
    assert len(text) <= 8


def test_clocks_ages_percentages_and_shortened_texts_by_example() -> None:
    assert [clock_text(seconds) for seconds in (4.9, 12.2, -1)] == ["4s", "12s", "0s"]
    ages = [age_text(seconds) for seconds in (None, 4.2, 59.4, 59.7, 61, 725, 3725)]
    assert ages == ["–", "4s", "59s", "1m", "1m", "12m", "1h02m"]
    assert (percent_text(None), percent_text(0.0), percent_text(1523.4)) == ("–", "0%", "1523%")
    assert [shortened("abcdef", 6), shortened("abcdef", 4), shortened("abcdef", 1)] == ["abcdef", "abc…", "…"]


def test_buckets_are_means_over_equal_spans_of_steps() -> None:
    series = [(1, 1.0), (2, 3.0), (7, 10.0), (8, 20.0)]
    assert bucketed(series, 4) == [2.0, None, None, 15.0]
    assert bucketed(series[:2], 40) == [1.0, 3.0], "a young run has one bucket a step"


def test_a_bucket_with_a_single_spike_shows_it_and_one_of_usual_noise_its_mean() -> None:
    noise = [(step, 1.0 + 0.1 * (step % 3)) for step in range(300)]
    assert {round(value or 0.0, 3) for value in bucketed(noise, 30)} <= {1.09, 1.1, 1.11}
    spiked = bucketed([(step, 7.0 if step == 155 else value) for step, value in noise], 30)
    assert [place for place, value in enumerate(spiked) if value == 7.0] == [15]
    assert max(value for value in spiked if value is not None and value != 7.0) < 1.2


@pytest.mark.parametrize(
    ("values", "band", "heights"),
    [
        ([0.0, None, 0.5, 1.0], [], [0, None, 4, 7]),
        ([0.3, 0.3], [], [0, 0]),
        ([0.99, 1.01, 1.0], [0.8, 1.2], [3, 4, 4]),
    ],
    ids=["from least to greatest", "a flat series", "noise inside a band"],
)
def test_bars_show_the_range_of_values_or_the_band(
    values: list[float | None], band: list[float], heights: list[int | None]
) -> None:
    assert bar_heights(values, 8, shown=band) == heights


@pytest.mark.parametrize(
    ("parts", "total", "num_cells", "cells"),
    [
        ([36, 22, 1], 80, 40, [18, 11, 1]),
        ([1, 79], 80, 10, [1, 9]),
        ([50, 50], 100, 10, [5, 5]),
        ([0, 3], 10, 10, [0, 3]),
        ([5], 0, 10, [0]),
        ([120], 100, 10, [10]),
    ],
)
def test_a_bar_is_shared_out_to_the_cell(parts: list[int], total: int, num_cells: int, cells: list[int]) -> None:
    assert split_cells(parts, total, num_cells) == cells


@pytest.mark.parametrize(
    ("name", "value", "on_screen", "in_a_command"),
    [
        ("eval/num_prompts", 64.0, "64", "64"),
        ("rollout/sort6/num_groups", 3.0, "3", "3"),
        ("rollout/staleness_max", 2.0, "2", "2"),
        ("step", 123_456.0, "123,456", "123456"),
        ("num_tokens", 12_345_678.0, "12.35M", "12345678"),
        ("completions/max_length", 1024.0, "1,024", "1024"),
        ("rollout/staleness_mean", 2.0, "2.000", "2"),
        ("train/step_time", 64.0, "64.00", "64"),
        ("eval/num_prompts", 63.5, "63.50", "63.5"),
        ("num_tokens", math.inf, "inf", "inf"),
    ],
)
def test_what_is_counted_is_a_whole_number(name: str, value: float, on_screen: str, in_a_command: str) -> None:
    assert value_text(name, value) == on_screen
    assert printed(name, value) == in_a_command


def test_every_count_that_the_engine_measures_is_known_as_one() -> None:
    names = [
        "rollout/staleness_max",
        f"{EVALUATION_PREFIX}num_prompts",
        environment_metric("rollout", "a-b", "num_groups"),
    ]
    assert [value_text(name, 64.0) for name in names] == ["64", "64", "64"]
    means = [name for name in METRIC_NAMES if name != "rollout/staleness_max"]
    assert {value_text(name, 64.0) for name in means} == {"64.00"}
