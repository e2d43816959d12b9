"""The canary: one weight is changed, published as in training, and restored; inference must follow both times.

Pure and torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_engine.check.alignment import Reading, Values, difference
from grpo_engine.diagnosis.alignment import CLEARLY
from grpo_engine.diagnosis.evidence import NoiseBand
from grpo_engine.diagnosis.finding import Check, Finding

_NOTICED = 0.1
"""Share of the expected change below which the update did not arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReading:
    """Log-probabilities of the same fixed tokens, at temperature 1."""

    parameter: str
    server_before: Values
    server_repeated: Values
    """A second request before any change: how well the server reproduces its numbers."""
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
    """Completions of the same prompt after the weight was restored."""
    versions: tuple[int, int]
    """Versions that were published: the changed weight, and the restored one."""
    served: tuple[int, int]
    """Versions that the answers then declared."""


def judge_canary(reading: CanaryReading, *, if_not_served: tuple[str, str], band: NoiseBand) -> Finding:
    """Whether a change of the weights arrives completely and at once, and is reverted."""
    cause, advice = if_not_served
    expected = difference(reading.trainer_changed, reading.trainer_before).abs_mean
    moved = difference(reading.server_changed, reading.server_before).abs_mean
    left = difference(reading.trainer_changed, reading.server_changed).abs_mean
    returned = difference(reading.server_after, reading.server_before)
    repeats = difference(reading.server_repeated, reading.server_before).largest
    line = Check("canary", {"expected": expected, "moved": moved, "left": left, "not_returned": returned.largest})
    # Noise grows with the scale of the logits, so the differences before the change count double.
    limit = max(band.normal, 2 * difference(reading.trainer_before, reading.server_before).abs_mean)
    if moved < _NOTICED * expected:
        return line.fail(
            f"{reading.parameter} was changed and inference did not follow: its log-probs moved by {moved:.2g}, the "
            f"trainer's by {expected:.2g}",
            cause=cause,
            hint=advice,
        )
    if left > 2 * limit:
        return line.fail(
            f"{reading.parameter} was changed and inference differs: log-probs moved by {moved:.2g} (trainer "
            f"{expected:.2g}), and are {left:.2g} from the trainer's now",
            cause="part of the weights arrived, or they were mapped to other parameters or scaled in transit",
            hint=f"{advice}; check that trainer and server have the same model, dtype and adapter rank",
        )
    if (unfollowed := _unfollowed(reading, limit)) is not None:
        return line.fail(
            unfollowed,
            cause="keys and values of the prompt, computed with the old weights, are still used: the prefix cache "
            "was not reset",
            hint="restart the server; a stock vLLM needs reset_prefix_cache after each weight update, or "
            "--no-enable-prefix-caching",
        )
    if reading.served != reading.versions:
        return line.fail(
            f"versions {reading.versions[0]} and {reading.versions[1]} were published, and the answers declare "
            f"{reading.served[0]} and {reading.served[1]}",
            cause="another trainer uses the same server, or the server declares a wrong version",
            hint="stop the other trainer; a server serves one",
        )
    text = f"{reading.parameter} changed: log-probs moved by {moved:.2g} (trainer {expected:.2g}), {left:.1g} apart"
    if returned.largest == 0:
        return line.ok(f"{text}; restored: the same as before, bit for bit")
    if returned.largest <= 2 * repeats:
        return line.ok(
            f"{text}; restored: within {returned.largest:.2g}, and an unchanged server is within {repeats:.2g}"
        )
    if returned.abs_mean <= band.normal:
        return line.warn(
            f"{text}; restored: {returned.largest:.2g} from before, though an unchanged server is within {repeats:.2g}",
            cause="a round trip changes numbers a little: different kernels with and without an adapter, or rounded "
            "weights",
            hint="harmless while alignment stays in its band; the same --dtype on both sides avoids rounding",
        )
    return line.fail(
        f"{text}; but after it was restored, still {returned.abs_mean:.2g} from before",
        cause="weights that were served before are not the initial weights of the trainer, or the last update is late",
        hint="restart the inference server, and check again",
    )


def _unfollowed(reading: CanaryReading, limit: float) -> str | None:
    """The message where answers to a known prompt do not follow the weights; else None."""
    before, changed, after = (
        difference(each.trainer, each.server).abs_mean
        for each in (reading.sampled_before, reading.sampled_changed, reading.sampled_after)
    )
    most = max(2 * limit, CLEARLY * before)  # differences from before are not due to the cache
    if changed > most:
        old = difference(reading.sampled_old, reading.sampled_changed.server).abs_mean
        near = f", and {old:.2g} from its old ones" if old < changed else ""
        return (
            f"answers to a prompt known from before the change are {changed:.2g} from the trainer's new weights{near}"
        )
    if after > most:
        return f"after the weight was restored, answers to a known prompt are {after:.2g} from the trainer"
    return None
