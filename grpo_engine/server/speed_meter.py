"""How fast an engine decodes, by how many sequences a step has, and what it computes again after updates. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_engine.wire.server_speed import ServerSpeeds, SpeedPoint

_LEAST_STEPS = 16
"""Below, a number of sequences is left out: a few steps are those of a start or an end."""
_FORGET_AFTER = 4096
"""Steps of one size after which earlier ones count half."""
_ABOUT_ALL = 0.9
"""Share of the sequences before an update that have tokens again once what was dropped is computed."""


@dataclass(slots=True)
class _Steps:
    """Of about as many sequences: up to a power of two."""

    num_steps: float = 0.0
    sequences: float = 0.0
    seconds: float = 0.0

    def add(self, sequences: int, seconds: float) -> None:
        if self.num_steps >= _FORGET_AFTER:
            self.num_steps, self.sequences, self.seconds = self.num_steps / 2, self.sequences / 2, self.seconds / 2
        self.num_steps += 1
        self.sequences += sequences
        self.seconds += seconds


class SpeedMeter:
    """Told of every step of an engine. A step that no decoding step precedes has no length, and is left out."""

    def __init__(self) -> None:
        self._steps: dict[int, _Steps] = {}
        self._last: float | None = None
        """When the step before ended; None where the engine had nothing to decode since."""
        self._num_before = self._num_cached = 0
        self._updated_at: float | None = None
        """When weights changed, until what runs has its keys and values again."""
        self._recomputed_tokens = self._recomputed_s = 0.0

    def stepped(self, num_sequences: int, *, num_running: int, num_cached: int, now: float) -> None:
        """A step has ended.

        Args:
            num_sequences: that got a token in it.
            num_running: that are unfinished after it.
            num_cached: tokens with keys and values in memory.
            now: in seconds.
        """
        if self._updated_at is not None:
            if num_sequences < _ABOUT_ALL * self._num_before:
                return
            self._recomputed_tokens += self._num_cached
            self._recomputed_s += now - self._updated_at
            self._updated_at = None
        elif self._last is not None and num_sequences:
            self._steps.setdefault(num_sequences.bit_length(), _Steps()).add(num_sequences, now - self._last)
        self._last = now if num_running else None
        self._num_before, self._num_cached = num_running, num_cached

    def updated(self, now: float) -> None:
        """Weights have changed, and decoding goes on now."""
        self._updated_at = now if self._num_before else None
        self._last = None

    def speeds(self) -> ServerSpeeds:
        """What was measured until now."""
        sizes = [steps for _, steps in sorted(self._steps.items()) if steps.num_steps >= _LEAST_STEPS and steps.seconds]
        return ServerSpeeds(
            points=[
                SpeedPoint(
                    sequences=steps.sequences / steps.num_steps,
                    tokens_per_s=steps.sequences / steps.seconds,
                    num_steps=steps.num_steps,
                )
                for steps in sizes
            ],
            recomputed_tokens=self._recomputed_tokens,
            recomputed_s=self._recomputed_s,
        )
