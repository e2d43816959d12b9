"""What a metric is, said where it is plotted and in the help."""

from __future__ import annotations

from pathlib import Path

import pytest
from screen_fakes import metrics_line
from shown_screen import shown

from grpo_engine.wire.metrics import HEALTHY_BANDS
from grpo_tui.ui.pages import help_page
from grpo_tui.ui.widgets.main.metrics_panel import MetricsPanel
from grpo_tui.ui.widgets.plot_panel import PlotPanel
from grpo_tui.view.metrics.names import meaning_of


def test_words_that_a_newcomer_did_not_understand_are_explained_in_the_help() -> None:
    page = " ".join(help_page("run", (), 90).plain.split())
    for words in (
        "effective sample size",
        "natural logarithm",
        "share of groups whose rewards are all equal",
        "avg@4 mean score of 4 answers",
        "policy version number of optimizer steps",
        "scaled from the lower to the upper end of the band",
    ):
        assert words in page, words


@pytest.mark.parametrize("name", [*HEALTHY_BANDS, "grpo/ess", "reward/frac_zero_std", "eval/pass@8", "ppo_kl"])
def test_every_metric_with_a_band_or_a_short_name_has_a_meaning(name: str) -> None:
    assert meaning_of(name)


def test_the_standard_error_of_a_score_is_called_that() -> None:
    assert meaning_of("eval/sums/avg@4_se") == "standard error of the mean score of 4 answers to each held-out prompt"
    assert meaning_of("something/else") == ""


@pytest.mark.slow
async def test_a_plotted_metric_is_explained_below_its_plot_and_the_version_is_called_one(tmp_path: Path) -> None:
    async with shown(tmp_path, num_steps=20) as screen:
        assert f"policy version {metrics_line(20).policy_version}" in screen.text(MetricsPanel)
        await screen.go_to("metrics")
        await screen.press("slash", *"ess", "enter")
        await screen.until_text(PlotPanel, "effective sample size")
