"""Chat templates of a checkpoint from elsewhere: the check of an export neither hangs by them nor fills the memory."""

from __future__ import annotations

import resource
import signal
from typing import Any

import pytest

from grpo_engine.export import model as export
from grpo_engine.models.tiny_tokenizer import tiny_tokenizer

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (LOOPS, "longer than 1 s"),
        ("{{ 'x' * 20000000000 }}", "too much memory"),
        ("{{ 'x' * 5000 }}", "5,000 characters"),
    ],
    ids=["loops", "product", "text"],
)
def test_the_check_of_an_export_uses_plain_text_where_the_template_has_no_end(
    template: str, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(export, "RENDER_S", 1)
    before = (resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGALRM))
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = template
    prompt = export._prompt(tokenizer)
    assert tokenizer.decode(prompt["input_ids"][0]) == tokenizer.decode(tokenizer(export.PROMPT)["input_ids"])
    assert why in caplog.text
    assert (resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGALRM)) == before
