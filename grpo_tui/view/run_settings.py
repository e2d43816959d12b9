"""What a run was started with, as far as its metrics and tokens are judged by it; read from its `resolved.json`.

A run of plain commands, or one whose file is missing or damaged, says nothing: then every setting is unknown, and the
clip is the usual one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from grpo_engine.algo.loss_config import PRESETS_WITH_BANDS, LossConfig, Preset
from grpo_engine.diagnosis.evidence import USUAL_CLIP, RunSettings
from grpo_tui.run_files.resolved import read_resolved
from grpo_tui.view.service_rules import INFERENCE_KIND, TRAINER_KIND

MAX_CLIP, MAX_COUNT = 1e6, 1 << 63
"""Beyond all that a run has: such a clip, or number of steps or prompts, is damage and counts as unknown."""


def read_settings(run_folder: Path) -> RunSettings:
    """Settings of a run; unknown ones where its file does not tell them."""
    try:
        return settings_of(read_resolved(run_folder))
    except (ValueError, TypeError, AttributeError, OverflowError):
        return RunSettings()


def settings_of(resolved: dict[str, Any]) -> RunSettings:
    """Settings in a profile as a run writes it out."""
    services = [one for one in (resolved.get("services") or {}).values() if isinstance(one, dict)]
    trainer: dict[str, Any] = next((one for one in services if one.get("kind") == TRAINER_KIND), {})
    server: dict[str, Any] = next((one for one in services if one.get("kind") == INFERENCE_KIND), {})
    own = trainer.get("environment") or {}  # of a trainer that samples itself
    environments = [one for one in services if one.get("kind") == "environment"] + [own]
    bridge: dict[str, Any] = resolved.get("bridge") or trainer.get("bridge") or {}
    loss = trainer.get("loss", "grpo")
    preset = LossConfig.preset(loss if loss in get_args(Preset) else "grpo")
    width = _number(trainer.get("clip_eps") or None, USUAL_CLIP)
    low, high = (preset.clip_low, preset.clip_high) if loss in PRESETS_WITH_BANDS else (width, width)
    dtypes = [str(one["dtype"]) for one in (trainer, server) if one.get("dtype")]
    return RunSettings(
        clip_low=_number(trainer.get("clip_low"), low),
        clip_high=_number(trainer.get("clip_high"), high),
        is_clip_known=bool(trainer),
        clips_sequences=preset.ratio_level == "sequence",
        temperatures=tuple(sorted({float(one["temperature"]) for one in environments if one.get("temperature")})),
        top_ps=tuple(sorted({float(one["top_p"]) for one in environments if one.get("top_p")})),
        logprobs_mode="processed" if own else _text(server.get("logprobs_mode")),
        bridge_mode=_text(bridge.get("mode")),
        has_adapter=bool(bridge.get("adapter")),
        dtypes=tuple(dict.fromkeys(dtypes)),
        model=_text((resolved.get("model") or {}).get("name")) or _text(trainer.get("model_name")),
        eval_prompts=_count(trainer.get("eval_prompts")),
        training_steps=_count(trainer.get("training_steps")),
    )


def _number(value: object, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) and 0 <= value <= MAX_CLIP else otherwise


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and 0 < value <= MAX_COUNT else None
