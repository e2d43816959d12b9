"""What a verdict on alignment is made from: differences of tokens, settings, noise bands, and tested explanations.

A difference is trainer minus inference, in nats.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile

from grpo_engine.diagnosis.token_differences import MIN_FRESH, AlignmentNumbers, Part, PartAt
from grpo_engine.wire.metrics import HEALTHY_BANDS

USUAL_CLIP = 0.2
MIN_TOKENS = 20
"""Of a kind, for a statement about its mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseBand:
    """What arithmetic alone does to log-probabilities, between two programs with the same weights."""

    dtype: str
    normal: float
    """Mean magnitude up to which the sides agree."""
    tolerable: float
    """Mean magnitude up to which it may still be arithmetic."""
    outlier: float
    """Magnitude of one token that arithmetic does not explain."""


LIMIT = HEALTHY_BANDS["alignment/diff_abs_mean"].high or 0.1
"""The limit of a run, in nats a token; bfloat16 decides it."""
BF16 = NoiseBand(dtype="bfloat16", normal=0.03, tolerable=LIMIT, outlier=1.5)
"""0.005 to 0.02 is usual for models of 1 to 8 billion parameters."""
_BANDS = (
    BF16,
    NoiseBand(dtype="float16", normal=0.006, tolerable=0.04, outlier=0.5),
    NoiseBand(dtype="float32", normal=0.001, tolerable=0.01, outlier=0.05),
)
"""The coarsest first."""


def noise_band(dtypes: Iterable[str]) -> NoiseBand:
    """The band of the coarsest of these types; an unknown one counts as bfloat16."""
    known = {band.dtype: place for place, band in enumerate(_BANDS)}
    return _BANDS[min((known.get(dtype, 0) for dtype in dtypes), default=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A cause that was tested by computing what either side would report if it were so."""

    key: str
    """For programs, as in `temperature:0.7`."""
    label: str
    """As in "it fits, if …"."""
    cause: str
    hint: str
    abs_mean: float
    """Mean magnitude of the differences that remain; infinite where nothing was left to compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """None is unknown."""

    clip_low: float = USUAL_CLIP
    clip_high: float = USUAL_CLIP
    """Ratios outside `1 − clip_low … 1 + clip_high` are clipped."""
    is_clip_known: bool = False
    """Whether the run says so; else it is the usual band."""
    clips_sequences: bool = False
    """Whether the ratio of a whole completion is clipped, as GSPO does, and not that of each token."""
    temperatures: tuple[float, ...] = ()
    """At which the environments sample."""
    top_ps: tuple[float, ...] = ()
    logprobs_mode: str | None = None
    """`raw` or `processed`, of the inference server."""
    bridge_mode: str | None = None
    has_adapter: bool = False
    """Whether the bridge is known to train one, whatever its mode."""
    dtypes: tuple[str, ...] = ()
    """Of the trainer and of inference, each once."""
    model: str | None = None
    eval_prompts: int | None = None
    """Held-out prompts that an evaluation asks each environment for."""
    training_steps: int | None = None
    """At which the run ends."""

    @property
    def trains_adapter(self) -> bool:
        """Whether a LoRA adapter is trained."""
        return self.has_adapter or (self.bridge_mode is not None and self.bridge_mode.startswith("lora"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the rules look at."""

    numbers: AlignmentNumbers
    settings: RunSettings = field(default_factory=RunSettings)
    began: float | None = None
    """Mean magnitude of the differences in the run's first steps; None where it is not known."""
    band: NoiseBand = BF16
    same_weights: bool = False
    """Whether both sides scored with the same weights, as in a check. The tokens of a run may be of older weights."""
    explanations: Sequence[Explanation] = ()
    """What was tested against the differences, the first preferred among equally good ones."""

    @property
    def limit(self) -> float:
        """Nats a token, on average, from which the two sides disagree."""
        return self.band.tolerable

    @property
    def small(self) -> float:
        """From here on a disagreement that has a sign of its own is reported."""
        return self.band.tolerable / 2

    @property
    def is_noise(self) -> bool:
        """Whether arithmetic explains all differences, those of single tokens included."""
        return self.numbers.all.abs_mean <= self.band.normal and self.numbers.quantile(1) <= self.band.outlier

    @property
    def began_well(self) -> bool:
        """Whether the two sides are known to have agreed when the run began."""
        return self.began is not None and self.began < self.small

    @property
    def ages(self) -> list[PartAt]:
        """Ages with enough tokens, from the youngest that is not of the first steps alone.

        At the beginning of a run trainer and inference agree whatever is wrong with handing weights over.
        """
        numbers = self.numbers
        middle = (numbers.first_step + numbers.last_step) / 2
        known = [at for at in numbers.by_age if at.part.num >= MIN_TOKENS]
        return list(dropwhile(lambda at: numbers.age_last_steps[at.low] < middle, known))

    @property
    def has_fresh(self) -> bool:
        """Whether enough tokens are fresh to be judged alone; all count as fresh where ages are not known."""
        fresh, by_age = self.numbers.fresh, self.numbers.by_age
        is_of_now = not by_age or (bool(self.ages) and self.ages[0].low == 0)
        return is_of_now and fresh is not None and fresh.num >= MIN_FRESH

    @property
    def judged(self) -> Part:
        """The fresh tokens where there are enough, else all: what the weights' age does not explain."""
        fresh = self.numbers.fresh
        return fresh if fresh is not None and self.has_fresh else self.numbers.all
