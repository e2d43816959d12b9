"""Colours with enough contrast in every theme of ours, plain characters for every sign, and what is remembered."""

from __future__ import annotations

import ast
import asyncio
import json
from pathlib import Path

import pytest
from screen_fakes import NOW, FakeConnection, run_status
from textual.color import Color

import grpo_tui
from grpo_engine.wire.supervisor import Snapshot
from grpo_tui.ui import themes
from grpo_tui.ui.app import GrpoScreen
from grpo_tui.ui.glyphs import as_ascii
from grpo_tui.ui.preferences import Preferences, preferences_file, read_preferences, write_preferences
from grpo_tui.ui.themes import ANSI, DARK, LIGHT, known_themes, theme_to_open
from grpo_tui.ui.widgets.frame.header import HeaderLine
from grpo_tui.ui.widgets.frame.keys_bar import KeysBar
from grpo_tui.ui.widgets.lines import STYLES
from grpo_tui.ui.widgets.main.services_table import ServicesTable

MIN_WORDS, MIN_BARS = 4.5, 3.0
"""WCAG 2: words, and graphics."""
BARS = {"spark", "others", *(style for style in STYLES if style.startswith("share-"))}
LINES_ONLY = {"rule"}
"""Carries nothing that anybody must read."""


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
async def test_every_style_can_be_told_from_its_ground(tmp_path: Path, theme: str) -> None:
    app = GrpoScreen(tmp_path, FakeConnection(), clock=lambda: NOW, theme=theme)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
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
async def test_the_ansi_theme_leaves_the_ground_and_the_words_to_the_terminal(tmp_path: Path) -> None:
    app = GrpoScreen(tmp_path, FakeConnection(), clock=lambda: NOW, theme=ANSI)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        table = app.main.query_one(ServicesTable)
        colours = {style: table.get_component_styles(style).color.ansi for style in STYLES - {"strong", "selected"}}
        assert None not in colours.values()
        unreadable = {0, 4, 8}  # black, blue and bright black, as most terminals have them on a dark ground
        assert not set(colours.values()) & unreadable


@pytest.mark.slow
@pytest.mark.parametrize("theme", [DARK, LIGHT, ANSI])
async def test_with_no_color_no_colour_leaves_for_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theme: str
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "trainer.log").write_text("first\n\n\x1b[31mred\x1b[0m\n")
    connection = FakeConnection()
    connection.say(Snapshot(number=1, status=run_status(run=tmp_path.name)))
    app = GrpoScreen(tmp_path, connection, clock=lambda: NOW, theme=theme)
    async with app.run_test(size=(80, 24)) as pilot:
        async with asyncio.timeout(20):
            while "red" not in "".join(app.main.log_lines.plain_lines):
                await pilot.pause(0.01)
        await pilot.pause()
        strips = app.screen._compositor.render_strips()
        styles = [segment.style for strip in strips for segment in strip if segment.style is not None]
        colours = {colour.name for style in styles for colour in (style.color, style.bgcolor) if colour is not None}
        assert colours <= {"default"}


def drawn_characters() -> set[str]:
    """Every character that is not ASCII in a text of the screen's code, docstrings left out."""
    found: set[str] = set()
    package = Path(grpo_tui.__file__).parent
    for path in [*(package / "ui").rglob("*.py"), *(package / "view").rglob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        spoken = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in spoken:
                found |= {letter for letter in node.value if not letter.isascii()}
    return found


def test_every_sign_that_the_screen_can_draw_has_a_plain_character_as_wide() -> None:
    drawn = drawn_characters()
    assert {"●", "▌", "→", "…"} <= drawn
    without = sorted(letter for letter in drawn if "?" in as_ascii(letter) and letter not in "◌")
    assert not without, f"add to the map in ui/glyphs.py: {' '.join(without)}"


# --- which theme, and what is remembered -----------------------------------------------------------------------------


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
def test_the_theme_is_what_was_asked_for_then_what_was_chosen_then_what_the_terminal_can_show(
    asked: str | None, remembered: str | None, environ: dict[str, str], opened: str
) -> None:
    assert theme_to_open(asked, remembered, environ) == opened


def test_ours_and_textuals_themes_may_be_chosen() -> None:
    assert known_themes()[:3] == [theme.name for theme in themes.OWN_THEMES] == [DARK, LIGHT, ANSI]
    assert {"nord", "gruvbox", "textual-light"} <= set(known_themes())


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["textual-light", "gruvbox", "ansi-light", "monokai"])
async def test_a_theme_of_textuals_draws_our_screen_as_well(tmp_path: Path, theme: str) -> None:
    app = GrpoScreen(tmp_path, FakeConnection(), clock=lambda: NOW, theme=theme)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert tmp_path.name in app.export_screenshot().replace("&#160;", " ")


def test_what_is_remembered_is_read_back(tmp_path: Path) -> None:
    path = preferences_file({"XDG_CONFIG_HOME": str(tmp_path)})
    assert path == tmp_path / "grpo-tui" / "screen.json"
    assert read_preferences(path) == Preferences()
    write_preferences(path, Preferences(theme="nord", has_read_hint=True))
    assert read_preferences(path) == Preferences(theme="nord", has_read_hint=True)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", json.dumps({"theme": 3}), "\x00"])
def test_a_broken_file_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "screen.json"
    path.write_text(content)
    assert read_preferences(path) == Preferences()
