"""How rows are shared out, and which terminals get plain characters."""

import pytest

from grpo_tui.ui.glyphs import as_ascii, wants_ascii
from grpo_tui.ui.layout import MIN_LOG_ROWS, NUM_FRAME_ROWS, NUM_GAPS, Wanted, arrange
from grpo_tui.ui.widgets.main.warnings_bar import wrapped


def wanted(num_services: int = 4, num_gpus: int = 1, num_warnings: int = 0) -> Wanted:
    return Wanted(
        num_services=num_services,
        gpu_rows=num_gpus + 1,
        num_primary_metrics=9,
        num_metrics=22,
        warning_rows=max(1, 4 * num_warnings),
        num_warnings=num_warnings,
    )


def test_a_small_terminal_shows_the_usual_stack_whole() -> None:
    layout = arrange(80, 24, wanted())
    assert (layout.services_rows, layout.gpu_rows, layout.metrics_rows, layout.warning_rows) == (5, 2, 6, 1)
    assert layout.metrics_columns == 2
    assert not layout.is_wide


def test_a_large_terminal_puts_the_log_beside_and_shows_every_metric() -> None:
    layout = arrange(200, 50, wanted())
    assert layout.is_wide
    assert layout.left_columns == 112
    assert layout.metrics_rows == 23


def test_several_troubles_get_rows_from_the_log() -> None:
    assert arrange(80, 24, wanted(num_warnings=4)).warning_rows >= 2


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("height", [10, 16, 24, 32, 50, 80])
@pytest.mark.parametrize("num_services", [1, 4, 12])
@pytest.mark.parametrize("num_gpus", [1, 8])
@pytest.mark.parametrize("num_warnings", [0, 1, 9])
def test_the_parts_never_take_more_rows_than_there_are(
    width: int, height: int, num_services: int, num_gpus: int, num_warnings: int
) -> None:
    layout = arrange(width, height, wanted(num_services, num_gpus, num_warnings))
    used = layout.services_rows + layout.gpu_rows + layout.metrics_rows + layout.warning_rows + NUM_GAPS * layout.gap
    log = 0 if layout.is_wide else MIN_LOG_ROWS + 1
    assert used + log + NUM_FRAME_ROWS <= max(height, 14)
    assert min(layout.services_rows, layout.warning_rows) >= 1


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
def test_the_locale_decides_about_plain_characters(environ: dict[str, str], is_ascii: bool) -> None:
    assert wants_ascii(environ) is is_ascii


def test_plain_characters_keep_their_columns() -> None:
    assert as_ascii("● ready ─ ▁█ é 漢") == "* ready - _# ? ??"


def test_text_wraps_at_words_and_cuts_words_that_do_not_fit() -> None:
    assert wrapped("a bb ccc dddddddd e", 4) == ["a bb", "ccc", "dddd", "dddd", "e"]
