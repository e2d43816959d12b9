"""How the rows are divided among the panels, and which terminals get ASCII characters."""

import itertools

import pytest

from grpo_tui.ui.glyphs import as_ascii, wants_ascii
from grpo_tui.ui.layout import MIN_LOG_ROWS, NUM_FRAME_ROWS, NUM_GAPS, Wanted, arrange
from grpo_tui.ui.widgets.lines import wrapped


def wanted(num_services: int = 4, num_gpus: int = 1, num_warnings: int = 0) -> Wanted:
    return Wanted(
        num_services=num_services,
        gpu_rows=num_gpus + 1,
        num_primary_metrics=9,
        num_metrics=22,
        warning_rows=max(1, 4 * num_warnings),
        num_warnings=num_warnings,
    )


def test_several_warnings_get_rows_from_the_log() -> None:
    assert arrange(80, 24, wanted(num_warnings=4)).warning_rows >= 2


def test_services_come_before_further_metrics() -> None:
    layout = arrange(120, 36, wanted(num_services=9))  # six services on two machines, and the supervisor's
    assert layout.services_rows == 1 + 9
    assert layout.metrics_rows == 1 + 5  # the nine primary ones in two columns


def test_the_panels_never_take_more_rows_than_there_are() -> None:
    sizes = itertools.product([40, 80, 120, 200], [10, 16, 24, 32, 50, 80])
    contents = itertools.product([1, 4, 12], [1, 8], [0, 1, 9])
    for (width, height), content in itertools.product(sizes, contents):
        layout = arrange(width, height, wanted(*content))
        used = layout.services_rows + layout.gpu_rows + layout.metrics_rows + layout.warning_rows
        used += NUM_GAPS * layout.gap + (0 if layout.is_wide else MIN_LOG_ROWS + 1)
        assert used + NUM_FRAME_ROWS <= max(height, 14), (width, height, content)
        assert min(layout.services_rows, layout.warning_rows) >= 1, (width, height, content)


@pytest.mark.parametrize(
    ("environ", "is_ascii"),
    [
        ({}, False),
        ({"LANG": "en_US.UTF-8"}, False),
        ({"LANG": "C.utf8"}, False),
        ({"LANG": "en_US.ISO-8859-1"}, True),
        ({"LC_ALL": "C"}, True),
        ({"LANG": "POSIX"}, True),
        ({"LC_CTYPE": "C.UTF-8"}, False),
        ({"LC_CTYPE": "C.UTF-8", "LANG": "C"}, True),
        ({"LC_ALL": "de_DE.UTF-8", "LANG": "C"}, False),
        ({"LANG": "C", "TEXTUAL_DRIVER": "textual.drivers.web_driver:WebDriver"}, False),
    ],
)
def test_a_locale_without_utf_8_gets_ascii(environ: dict[str, str], is_ascii: bool) -> None:
    assert wants_ascii(environ) is is_ascii


def test_ascii_characters_keep_their_columns() -> None:
    assert as_ascii("● ready ─ ▁█ é 漢") == "* ready - _# ? ??"


def test_text_wraps_at_words_and_cuts_words_that_do_not_fit() -> None:
    assert wrapped("a bb ccc dddddddd e", 4) == ["a bb", "ccc", "dddd", "dddd", "e"]
    assert wrapped("a 日本語 b", 4) == ["a", "日本", "語 b"]  # of two cells each
    assert wrapped("日本 b", 1) == ["日", "本", "b"]
