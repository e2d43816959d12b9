"""The model card of an exported model: base model, task, settings, curve, evaluations, versions. Pure.

It is meant for people elsewhere: it has no secrets, no paths, ports or environment variables of the machine of the run,
and no control characters.
"""

from __future__ import annotations

import html
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.secrets import masked_text
from grpo_engine.wire.terminal_text import printable
from grpo_tui.view.format import SPARK_BARS, shortened, span_text
from grpo_tui.view.metrics.history import bar_heights
from grpo_tui.view.metrics.names import measured_as, printed
from grpo_tui.view.metrics.summary import (
    REWARD,
    Score,
    evaluated_names,
    names_of,
    reward_name,
    score_at,
    score_text,
    summarized,
)
from grpo_tui.view.settings import changed_settings, services_of, without_folder

CURVES = (
    REWARD,
    "reward/std",
    "grpo/entropy",
    "grpo/clipped_fraction",
    "alignment/diff_abs_mean",
    "rollout/length_mean",
)
MAX_ROWS = 12
NUM_BARS = 40
MAX_VALUE_CHARS = 300
_HUB_ID = re.compile(r"(?!local/)[A-Za-z0-9][\w.-]*/[\w.-]+")
_TRAINS = {"environment": "task", "atropos_environment": "environment"}
"""Kinds of service that say what is trained on, with the setting that does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What a card is made of."""

    name: str
    """Of the exported folder."""
    run: str
    resolved: Mapping[str, Any]
    """The profile of the run after overlays; empty where it cannot be read."""
    lines: Sequence[MetricsLine]
    """Of every step up to the exported one."""
    step: int
    is_adapter: bool
    has_chat_template: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)


def model_card(facts: CardFacts) -> str:
    """The card, as Markdown with the header that a model hub reads."""
    base = _base_of(facts.resolved)
    parts = [
        _header(base, is_adapter=facts.is_adapter),
        f"# {_cell(facts.name)}\n\n{_cell(base)}, trained with GRPO for {facts.step} steps by grpo-tui.",
        _use(facts, base),
        _training(facts, base),
        _curve(facts.lines),
        _evaluations(facts.lines),
        _settings(facts.resolved),
        "## Versions\n\n" + _table([("package", "version"), *facts.versions.items()]) if facts.versions else "",
    ]
    return printable(masked_text("\n\n".join(part for part in parts if part) + "\n"), keep="\n")


def _base_of(resolved: Mapping[str, Any]) -> str:
    """The name of the base model, without the folder that it is in."""
    table = resolved.get("model") or {}
    names = [table.get("name"), *(service.get("model_name") for service in services_of(resolved).values())]
    return without_folder(next((str(name) for name in names if name), "unknown model"))


def _header(base: str, *, is_adapter: bool) -> str:
    lines = [f"library_name: {'peft' if is_adapter else 'transformers'}", "pipeline_tag: text-generation"]
    if _HUB_ID.fullmatch(base):
        lines.append(f"base_model: {json.dumps(base)}")
    tags = ["grpo", "reinforcement-learning", *(["lora"] if is_adapter else [])]
    return "\n".join(["---", *lines, "tags:", *(f"- {tag}" for tag in tags), "---"])


def _use(facts: CardFacts, base: str) -> str:
    if facts.is_adapter:
        how = f"""from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained("{_word(facts.name)}")  # loads the base model too
tokenizer = AutoTokenizer.from_pretrained("{_word(facts.name)}")"""
        note = f"\n\nThe folder holds a LoRA adapter; its base model is {_cell(base)}."
    else:
        how = f"""from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{_word(facts.name)}")
tokenizer = AutoTokenizer.from_pretrained("{_word(facts.name)}")"""
        note = ""
    if facts.has_chat_template:
        inputs = """messages = [{"role": "user", "content": "…"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)"""
    else:
        inputs = 'inputs = tokenizer("…", return_tensors="pt")'
    sample = "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=256)[0], skip_special_tokens=True))"
    return f"## Use\n\n```python\n{how}\n\n{inputs}\n{sample}\n```{note}"


def _training(facts: CardFacts, base: str) -> str:
    services = services_of(facts.resolved)
    trainer = next((one for one in services.values() if one.get("kind") == "trainer"), {})
    rows = [("base model", base), ("steps", str(facts.step)), ("run", facts.run)]
    rows += [("task", _task_text(one[_TRAINS[one["kind"]]])) for one in services.values() if _names_task(one)]
    if own := trainer.get("environment"):  # of a trainer that samples itself
        rows.append(("task", _task_text(own["task"])))
    if trainer:
        size = int(trainer.get("batch_size", 0)) * int(trainer.get("gradient_accumulation_steps", 1))
        rows += [("loss", str(trainer.get("loss"))), ("completions per step", str(size))]
        rows += [("learning rate", f"{float(trainer.get('lr', 0)):g}, {trainer.get('lr_schedule')}")]
    if bridge := facts.resolved.get("bridge") or trainer.get("bridge"):
        layers = trainer.get("train_layer_indices")
        whole = f"layers {layers}" if layers else "all weights"
        has_adapter = str(bridge.get("mode")).startswith("lora") or bridge.get("adapter")
        rows += [("trained", "a LoRA adapter" if has_adapter else whole)]
    return "## Training\n\n" + _table([("", ""), *rows])


def _names_task(service: Mapping[str, Any]) -> bool:
    return bool(service.get(_TRAINS.get(str(service.get("kind")), "")))


def _task_text(task: Any) -> str:
    return without_folder(str(task.get("name") if isinstance(task, dict) else task))


def _curve(lines: Sequence[MetricsLine]) -> str:
    trained = [line for line in lines if line.step > 0]
    if not trained:
        return ""
    known = names_of(trained)
    names = [name for ours in CURVES if (name := measured_as(ours, known)) is not None]
    spans = _spans(trained, MAX_ROWS)
    rows = [("steps", *names)]
    for span in spans:
        values = (_mean_of(span, name) for name in names)
        shown = ["–" if value is None else printed(name, value) for name, value in zip(names, values, strict=True)]
        rows.append((span_text(span[0].step, span[-1].step), *shown))
    reward = reward_name(trained)
    bars = "" if reward is None else f"{_cell(reward)} `{_sparkline(trained, reward)}`\n\n"
    return f"## Curve\n\nMeans over the steps of each row.\n\n{bars}{_table(rows)}"


def _sparkline(lines: Sequence[MetricsLine], name: str) -> str:
    means = [_mean_of(span, name) for span in _spans(lines, NUM_BARS)]
    return "".join(" " if height is None else SPARK_BARS[height] for height in bar_heights(means, len(SPARK_BARS)))


def _spans(lines: Sequence[MetricsLine], most: int) -> list[Sequence[MetricsLine]]:
    """The steps in at most so many parts of about equal length."""
    num = min(most, len(lines))
    edges = [place * len(lines) // num for place in range(num + 1)]
    return [lines[begin:end] for begin, end in itertools.pairwise(edges)]


def _mean_of(lines: Iterable[MetricsLine], name: str) -> float | None:
    values = [line.metrics[name] for line in lines if name in line.metrics]
    return fmean(values) if values else None


def _evaluations(lines: Sequence[MetricsLine]) -> str:
    names = evaluated_names(names_of(lines))
    if not names:
        return ""
    rows = [("score", "first", "best", "last")]
    for name in names:
        if found := summarized(lines, name):
            rows.append((name, _at_step(found.first), _at_step(found.best), _at_step(found.final)))
    last = next(line for line in reversed(lines) if score_at(line, names[0]) is not None)
    num = last.metrics.get("eval/num_prompts")
    size = "" if num is None else f"{num:.0f} "
    return f"## Evaluation\n\nOn {size}held-out prompts; ± is the standard error over the prompts.\n\n{_table(rows)}"


def _at_step(score: Score) -> str:
    return f"{score_text(score)} (step {score.step})"


def _settings(resolved: Mapping[str, Any]) -> str:
    changed = changed_settings(resolved)
    if not changed:
        return ""
    rows = [(key, json.dumps(value, ensure_ascii=False)) for key, value in changed.items()]
    return "## Settings\n\nThose that differ from the defaults.\n\n" + _table([("setting", "value"), *rows])


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *body])


def _cell(text: str) -> str:
    """Text of a run as it may stand in a table: no markup, no line end."""
    plain = html.escape(shortened(" ".join(text.split()), MAX_VALUE_CHARS), quote=False)
    return re.sub(r"([|`\\\[\]*])", r"\\\1", plain)


def _word(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)
