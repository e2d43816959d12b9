"""Contrast of every theme of ours, an ASCII character for every other one, and saved preferences."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from shown_screen import shown
from textual.color import Color

import grpo_tui
from grpo_tui.ui.glyphs import as_ascii
from grpo_tui.ui.preferences import Preferences, preferences_file, read_preferences, write_preferences
from grpo_tui.ui.themes import ANSI, DARK, LIGHT, theme_to_open
from grpo_tui.ui.widgets.frame.header import HeaderLine
from grpo_tui.ui.widgets.frame.keys_bar import KeysBar
from grpo_tui.ui.widgets.lines import STYLES
from grpo_tui.ui.widgets.main.services_table import ServicesTable

MIN_WORDS, MIN_BARS = 4.5, 3.0
"""WCAG 2: words, and graphics."""
BARS = {"spark", "others", *(style for style in STYLES if style.startswith("share-"))}
LINES_ONLY = {"rule"}
"""Carries no information."""


def contrast(one: Color, other: Color) -> float:
    """The ratio of WCAG 2; Textual's own function leaves out the gamma of sRGB."""

    def luminance(colour: Color) -> float:
        parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour.normalized]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    lower, higher = sorted((luminance(one), luminance(other)))
    return (higher + 0.05) / (lower + 0.05)


def test_black_on_white_has_the_highest_contrast_there_is() -> None:
    assert contrast(Color(0, 0, 0), Color(255, 255, 255)) == pytest.approx(21)


@pytest.mark.slow
@pytest.mark.parametrize("theme", [DARK, LIGHT])
async def test_every_style_has_enough_contrast(tmp_path: Path, theme: str) -> None:
    async with shown(tmp_path, options={"theme": theme}) as screen:
        app = screen.app
        for part in (ServicesTable, HeaderLine, KeysBar):
            widget = app.main.query_one(part)
            ground = widget.background_colors[1]
            selected = widget.get_component_styles("selected").background
            for style in STYLES - LINES_ONLY - {"selected"}:
                styles = widget.get_component_styles(style)
                colour = styles.color if styles.has_rule("color") else Color.parse(app.theme_variables["foreground"])
                least = MIN_BARS if style in BARS else MIN_WORDS
                for below in (ground, selected) if part is ServicesTable else (ground,):
                    seen = contrast(below + colour, below)
                    assert seen >= least, (theme, part.__name__, style, colour.hex, below.hex, round(seen, 2))
        assert contrast(app.main.query_one(ServicesTable).background_colors[1], selected) > 1.1


@pytest.mark.slow
async def test_the_ansi_theme_leaves_background_and_text_to_the_terminal_and_themes_of_textual_draw_the_screen(
    tmp_path: Path,
) -> None:
    async with shown(tmp_path, options={"theme": ANSI}) as screen:
        table = screen.part(ServicesTable)
        colours = {style: table.get_component_styles(style).color.ansi for style in STYLES - {"strong", "selected"}}
        assert None not in colours.values()
        unreadable = {0, 4, 8}  # black, blue and bright black, as most terminals have them on a dark background
        assert not set(colours.values()) & unreadable
        for theme in ("textual-light", "gruvbox", "ansi-light", "monokai"):
            screen.app.theme = theme
            await screen.until(lambda: tmp_path.name in screen.picture)


@pytest.mark.slow
async def test_with_no_color_no_colour_is_sent_to_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with shown(tmp_path) as screen:  # its log has colours
        for theme in (DARK, LIGHT, ANSI):
            screen.app.theme = theme
            await screen.pilot.pause()
            strips = screen.app.screen._compositor.render_strips()
            styles = [segment.style for strip in strips for segment in strip if segment.style is not None]
            colours = {colour.name for style in styles for colour in (style.color, style.bgcolor) if colour is not None}
            assert colours <= {"default"}, theme


def drawn_characters() -> set[str]:
    """Every character that is not ASCII in a text of the screen's code, docstrings left out."""
    found: set[str] = set()
    package = Path(grpo_tui.__file__).parent
    for path in [*(package / "ui").rglob("*.py"), *(package / "view").rglob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                found |= {letter for letter in node.value if not letter.isascii()}
    return found


def test_every_character_that_the_screen_draws_has_an_ascii_one() -> None:
    drawn = drawn_characters()
    assert {"●", "▌", "→", "…"} <= drawn
    without = sorted(letter for letter in drawn if "?" in as_ascii(letter) and letter not in "◌")
    assert not without, f"add to the map in ui/glyphs.py: {' '.join(without)}"


# --- which theme, and saved preferences ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "remembered", "environ", "opened"),
    [
        ("light", "nord", {}, "light"),
        (None, "nord", {"TERM": "xterm"}, "nord"),
        (None, "no such theme", {"TERM": "xterm-256color"}, DARK),
        (None, None, {}, DARK),
        (None, None, {"TERM": "xterm", "COLORTERM": "truecolor"}, DARK),
        (None, None, {"TERM": "screen"}, ANSI),
        (None, None, {"TERM": "linux"}, ANSI),
        (None, None, {"TERM": "dumb", "TEXTUAL_COLOR_SYSTEM": "truecolor"}, DARK),
    ],
)
def test_the_theme_is_the_one_of_the_flag_then_the_saved_one_then_what_the_terminal_can_show(
    asked: str | None, remembered: str | None, environ: dict[str, str], opened: str
) -> None:
    assert theme_to_open(asked, remembered, environ) == opened


def test_saved_preferences_are_read_back(tmp_path: Path) -> None:
    path = preferences_file({"XDG_CONFIG_HOME": str(tmp_path)})
    assert path == tmp_path / "grpo-tui" / "screen.json"
    assert read_preferences(path) == Preferences()
    write_preferences(path, Preferences(theme="nord", has_read_hint=True))
    assert read_preferences(path) == Preferences(theme="nord", has_read_hint=True)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", json.dumps({"theme": 3}), "\x00"])
def test_a_damaged_preferences_file_is_ignored(tmp_path: Path, content: str) -> None:
    path = tmp_path / "screen.json"
    path.write_text(content)
    assert read_preferences(path) == Preferences()
