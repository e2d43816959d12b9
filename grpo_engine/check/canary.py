"""The canary: one weight is changed, handed over as training does, and put back; did inference notice, both times?

Pure and torch-free: readings go in, a finding comes out.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_engine.check.alignment import CLEARLY, NoiseBand, Reading, Values, difference
from grpo_engine.check.findings import Finding, Line

_NOTICED = 0.1
"""Share of the expected change below which nothing has arrived."""
CAUSES = {
    "shared_vllm": "inference does not read the memory that the trainer writes: it computes with a copy (repacked or "
    "compiled-in weights), or the bridge file is another server's",
    "lora_merged": "inference does not read the memory that adapters are folded into: it computes with a copy, or the "
    "bridge file is another server's",
    "lora_only": "requests do not use the adapter that was loaded",
    "lora_restart": "the server answered the reload and went on with its old weights",
    "none": "the server answered the reload and went on with its old weights",
}
ADVICE = {
    "shared_vllm": "restart the server with --shared-weights and without quantization, and point --vllm-config-path at "
    "its bridge file",
    "lora_merged": "restart the server with --shared-weights and without quantization or --enable-lora, and point "
    "--vllm-config-path at its bridge file",
    "lora_only": "look at /lora/status; start the server with --enable-lora and a --max-lora-rank of at least --lora-r",
    "lora_restart": "look at the server's log; restart it",
    "none": "look at the server's log; restart it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReading:
    """Log-probabilities of the same fixed tokens, at temperature 1."""

    parameter: str
    server_before: Values
    server_repeated: Values
    """Asked a second time before anything changed: how far the server repeats itself."""
    server_changed: Values
    server_after: Values
    trainer_before: Values
    trainer_changed: Values
    sampled_before: Reading
    """Completions of a prompt of some length."""
    sampled_changed: Reading
    """Completions of the same prompt after the change, with the trainer's changed weights."""
    sampled_old: Values
    """The same completions, with the weights before the change."""
    sampled_after: Reading
    """Completions of the same prompt after the weight was put back."""
    versions: tuple[int, int]
    """Versions that were handed over: the changed weight, and the weight put back."""
    served: tuple[int, int]
    """Versions that the answers then named."""


def judge_canary(reading: CanaryReading, *, bridge: str, band: NoiseBand) -> Finding:
    """Whether a change of the weights arrives, whole and at once, and leaves again."""
    expected = difference(reading.trainer_changed, reading.trainer_before).abs_mean
    moved = difference(reading.server_changed, reading.server_before).abs_mean
    left = difference(reading.trainer_changed, reading.server_changed).abs_mean
    returned = difference(reading.server_after, reading.server_before)
    repeats = difference(reading.server_repeated, reading.server_before).largest
    line = Line("canary", {"expected": expected, "moved": moved, "left": left, "not_returned": returned.largest})
    # Steeper logits are noisier by as much as they are steeper, so what was there before counts double.
    limit = max(band.normal, 2 * difference(reading.trainer_before, reading.server_before).abs_mean)
    if moved < _NOTICED * expected:
        return line.fail(
            f"{reading.parameter} was changed and inference did not notice: its log-probs moved by {moved:.2g}, the "
            f"trainer's by {expected:.2g}",
            cause=CAUSES[bridge],
            advice=ADVICE[bridge],
        )
    if left > 2 * limit:
        return line.fail(
            f"{reading.parameter} was changed and something else arrived: log-probs moved by {moved:.2g} (trainer "
            f"{expected:.2g}), and are {left:.2g} from the trainer's now",
            cause="part of the weights arrived, or they were mapped to other places or scaled on the way",
            advice=f"{ADVICE[bridge]}; check that trainer and server have the same model, dtype and adapter rank",
        )
    if (unfollowed := _unfollowed(reading, limit)) is not None:
        return line.fail(
            unfollowed,
            cause="keys and values of the prompt, computed with the old weights, are still used: the prefix cache "
            "outlives them",
            advice="restart the server; a stock vLLM needs reset_prefix_cache after each hand-over, or "
            "--no-enable-prefix-caching",
        )
    if reading.served != reading.versions:
        return line.fail(
            f"versions {reading.versions[0]} and {reading.versions[1]} were handed over, and answers said "
            f"{reading.served[0]} and {reading.served[1]}",
            cause="another trainer uses the same server, or it mislabels what it serves",
            advice="end the other trainer; a server serves one",
        )
    text = (
        f"{reading.parameter} changed: log-probs moved by {moved:.2g} (trainer {expected:.2g}), {left:.1g} apart then"
    )
    if returned.largest == 0:
        return line.ok(f"{text}; put back: the same as before, bit for bit")
    if returned.largest <= 2 * repeats:
        return line.ok(
            f"{text}; put back: within {returned.largest:.2g}, and the server repeats itself within {repeats:.2g}"
        )
    if returned.abs_mean <= band.normal:
        return line.warn(
            f"{text}; put back: {returned.largest:.2g} from before, though an unchanged server repeats itself "
            f"within {repeats:.2g}",
            cause="the way there and back changes numbers a little: another kernel with an adapter than without, or "
            "weights that are rounded on the way",
            advice="harmless where alignment stays in its band; the same --dtype on both sides rules rounding out",
        )
    return line.fail(
        f"{text}; but put back it is still {returned.abs_mean:.2g} from before",
        cause="weights that were served before are not what the trainer started from, or the last hand-over is late",
        advice="restart the inference server, and check again",
    )


def _unfollowed(reading: CanaryReading, limit: float) -> str | None:
    """What was seen, where answers to a known prompt do not follow the weights."""
    before, changed, after = (
        difference(each.trainer, each.server).abs_mean
        for each in (reading.sampled_before, reading.sampled_changed, reading.sampled_after)
    )
    most = max(2 * limit, CLEARLY * before)  # what disagreed before is not the cache's fault
    if changed > most:
        old = difference(reading.sampled_old, reading.sampled_changed.server).abs_mean
        near = f", and {old:.2g} from its old ones" if old < changed else ""
        return (
            f"a prompt that was asked before the change is answered {changed:.2g} from the trainer's new weights{near}"
        )
    if after > most:
        return f"after the weight was put back, a known prompt is answered {after:.2g} from the trainer"
    return None
