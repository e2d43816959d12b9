"""The table of `gpu.py`, from its lines: ours beside stock, ratios, and targets."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

PEERS = {
    "stock": None,
    "stock, logprobs": "stock",
    "stock, again": "stock",
    "stock, logprobs, again": "stock, logprobs",
    "ours, /v1/completions": "stock",
    "ours, /generate": "stock, logprobs",
    "ours, /v1/completions, trainer attached": "stock, again",
    "ours, /generate, trainer attached": "stock, logprobs, again",
    "ours, /v1/completions, lora_merged": "stock",
    "ours, /generate, lora_merged": "stock, logprobs",
    "ours, /v1/completions, reloaded": "stock",
    "ours, /generate, reloaded": "stock, logprobs",
    "stock lora, logprobs": None,
    "ours lora, /generate": "stock lora, logprobs",
    "ours lora eager, /generate": "ours lora, /generate",
}
"""Lane → its peer. `/generate` always returns log-probabilities, so its peer does too."""
AT_LEAST = {who: 0.98 for who in PEERS if who.endswith(("trainer attached", "lora_merged"))}
"""Of the peer's speed."""
TIMES_EAGER = 6.0
AT_MOST = {
    ("sharing_extra_mb", "shared_vllm"): 1000.0,
    ("publish_total_ms", "shared_vllm, idle, nothing written"): 5.0,
    ("publish_total_ms", "shared_vllm, idle, from fp32 masters"): 5.0,
    ("publish_total_ms", "shared_vllm, 64 running, nothing written"): 5.0,
    ("publish_total_ms", "shared_vllm, 64 running, from fp32 masters"): 5.0,
    ("publish_total_ms", "lora_merged, idle"): 50.0,
    ("publish_total_ms", "lora_merged, 64 running"): 50.0,
    ("publish_total_ms", "lora_only, idle"): 40.0,
    ("swap_ms", "ours lora"): 40.0,
    ("reload_s", "ours"): 5.0,
    ("end", "ours, SIGTERM"): 1.0,
}
SHOWN_ELSEWHERE = {"tokens_per_s", "failed", "took", "run", "began"}


def print_table(lines: Iterable[str]) -> None:
    """All figures; of repeated ones the newest."""
    said = [json.loads(line) for line in lines if line.startswith("{")]
    records = [record for record in said if "figure" in record]
    _print_speeds({(r["who"], r["requests"]): r["value"] for r in records if r["figure"] == "tokens_per_s"})
    figures = {(r["figure"], r["who"]): r for r in records if r["figure"] not in SHOWN_ELSEWHERE}
    if figures:
        print(f"\n{'figure':<26}{'of':<46}{'value':>12}   target")
    for (figure, who), record in figures.items():
        value, limit = record.get("value"), AT_MOST.get((figure, who))
        print(f"{figure:<26}{who:<46}{_text(value):>12}   {_verdict(value, limit)}{_more(record)}")
    for run in (r for r in records if r["figure"] == "run"):
        print("\n" + _run_line(run))
    for other in said:  # restart.py prints another format
        if "figure" not in other:
            print("\n" + "  ".join(f"{name} {_text(value)}" for name, value in other.items()))
    failures = _latest_failures(records)
    if failures:
        print(f"\n{len(failures)} failed:")
    for failure in failures:
        reason = failure["reason"].strip().splitlines()
        print(f"  {failure['stage']}, {failure['who']}: {reason[0]}{' … ' + reason[-1] if len(reason) > 1 else ''}")


def _latest_failures(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Failures of the newest run of each stage."""
    began = {record["stage"]: place for place, record in enumerate(records) if record["figure"] == "began"}
    return [r for at, r in enumerate(records) if r["figure"] == "failed" and at > began.get(r["stage"], -1)]


def _print_speeds(speeds: dict[tuple[str, int], float]) -> None:
    counts = sorted({count for _, count in speeds})
    if not counts:
        return
    print(f"\n{'tokens/s at … requests':<42}" + "".join(f"{count:>18}" for count in counts))
    for who in dict.fromkeys(who for who, _ in speeds):
        peer, least = PEERS.get(who), AT_LEAST.get(who)
        cells, is_met = [], True
        for count in counts:
            speed, beside = speeds.get((who, count)), speeds.get((peer, count)) if peer else None
            ratio = speed / beside if speed and beside else None
            is_met = is_met and (ratio is None or least is None or ratio >= least)
            text = "-" if speed is None else f"{speed:,.0f}" + (f" ({ratio:.3f})" if ratio else "")
            cells.append(f"{text:>18}")
        target = "" if least is None else f"   ≥ {least} × {peer}: {'met' if is_met else 'MISSED'}"
        print(f"{who:<42}{''.join(cells)}{target}")
    eager = [
        (speeds.get(("ours lora, /generate", count)), speeds.get(("ours lora eager, /generate", count)))
        for count in counts
    ]
    ratios = [quick / slow for quick, slow in eager if quick and slow]
    if ratios:
        said = ", ".join(f"{ratio:.1f}" for ratio in ratios)
        verdict = "met" if min(ratios) >= TIMES_EAGER else "MISSED"
        print(f"ours lora is {said} × as quick as without CUDA graphs (target {TIMES_EAGER:g}: {verdict})")


def _verdict(value: Any, limit: float | None) -> str:
    if limit is None or not isinstance(value, int | float):
        return ""
    return f"≤ {limit:g}: {'met' if value <= limit else 'MISSED'}  "


def _more(record: dict[str, Any]) -> str:
    known = {"stage", "figure", "who", "value"}
    return "  ".join(f"{name} {_text(value)}" for name, value in record.items() if name not in known)


def _run_line(run: dict[str, Any]) -> str:
    words = "  ".join(f"{name} {_text(value)}" for name, value in run["value"].items())
    return f"run {run['who']}: {words}"


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:,.4g}" if isinstance(value, float) else str(value)
