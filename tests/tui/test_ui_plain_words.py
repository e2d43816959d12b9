"""What a newcomer reads: log lines instead of JSON, prompts without markup, a restart that was asked for, the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from screen_fakes import STARTED, four_services, run_status
from shown_screen import past_screen, write_timeline

from grpo_engine.wire.supervisor import RunState
from grpo_tui.ui.widgets.frame.activity_line import ActivityLine
from grpo_tui.view.logs.tail import as_text
from grpo_tui.view.rollouts.file import user_part

DELIVERED = {
    "time": "2026-11-22T03:33:31",
    "level": "info",
    "event": "batch delivered",
    "step": 303,
    "groups": 16,
    "environments": {"sort6_0": 16},
    "client": "127.0.0.1 python-httpx",
}


def test_a_log_line_of_the_rollout_api_is_readable() -> None:
    shown_line = '03:33:31 batch delivered  step=303 groups=16 environments=sort6_0:16 client="127.0.0.1 python-httpx"'
    assert as_text(json.dumps(DELIVERED).encode()) == shown_line


def test_a_warning_in_json_keeps_its_level() -> None:
    line = json.dumps({"time": "2026-11-22T03:33:31", "level": "warning", "event": "group refused", "why": ""})
    assert as_text(line.encode()) == '03:33:31 WARNING group refused  why=""'


@pytest.mark.parametrize(
    "line", ["{}", "{not json}", '{"a": 1}', '{"event": 3}', "{'loss': 0.1}", '{"event": "x"', "[1]"]
)
def test_other_lines_are_shown_as_they_are(line: str) -> None:
    assert as_text(line.encode()) == line


def test_control_characters_that_json_escapes_do_not_reach_the_terminal() -> None:
    text = as_text(json.dumps({"event": "a\x1b[2Jb\x07\nc", "d": "\x9b31m"}).encode())
    assert not [letter for letter in text if ord(letter) < 32 or 127 <= ord(letter) < 160]


@pytest.mark.parametrize(
    ("prompt", "user"),
    [
        ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n9 + 4?<|im_end|>\n<|im_start|>a", "9 + 4?"),
        ("<|im_start|>usort 455004<|im_end|><|im_start|>a", "sort 455004"),
        ("<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|><|start_header_id|>", "Why?"),
        ("<start_of_turn>user\nHow?<end_of_turn>\n<start_of_turn>model\n", "How?"),
        ("<s>[INST] One [/INST] a</s>[INST] Two\nrows [/INST]", "Two\nrows"),
        ("no template at all", "no template at all"),
        ("<|im_start|>user\n<|im_end|>", "<|im_start|>user\n<|im_end|>"),
    ],
)  # fmt: skip
def test_of_a_prompt_the_users_part_is_shown(prompt: str, user: str) -> None:
    assert user_part(prompt) == user


@pytest.mark.slow
async def test_t_on_a_run_that_is_over_goes_to_its_end_and_says_so(tmp_path: Path) -> None:
    write_timeline(tmp_path)
    over = run_status(state=RunState.FINISHED, ended_at=STARTED + 700, supervisor=None, services=four_services())
    async with past_screen(tmp_path, over) as screen:
        await screen.until_moment(STARTED + 700)
        await screen.press("left")
        await screen.until_moment(STARTED + 695)
        await screen.press("t")
        await screen.until_moment(STARTED + 700)
        await screen.until_text(ActivityLine, "the run is over: this is its end")
