"""Figures of a recorded run: from `metrics.jsonl` and `rollouts.jsonl` of its folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Annotated, TypeVar

import msgspec
from pydantic import ValidationError

from grpo_engine.errors import ConfigError
from grpo_engine.simulate.figures import BESIDE_SAMPLING, Figures, Lengths, ServerSpeed, TrainerSpeed
from grpo_engine.wire.codec import read_whole
from grpo_engine.wire.run_folder import METRICS_FILE, ROLLOUTS_FILE, speeds_file
from grpo_engine.wire.server_speed import ServerSpeeds

LineT = TypeVar("LineT")
LEAST_STEPS = 8
"""Below, times are those of a start."""
SKIPPED_SHARE = 0.2
"""Of the steps at the start, in which queues fill and caches are cold."""
LEAST_MEASURED, MOST_MEASURED = 1e-9, 1e12
"""Seconds, tokens and shares, besides 0; others are left out, as negative ones are."""
_APART = 2.0
"""Between the least and the most sequences of measured steps."""
MOST_BYTES = 64 << 20
"""Of rollouts that are read: thousands of groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What a run measured, as means over its steps."""

    name: str
    num_steps: int
    """That were counted."""
    interval_s: float
    """From the end of a step to that of the next."""
    wait_s: float
    """From the request for a batch to its arrival."""
    train_s: float
    update_s: float
    """Of the trainer, waiting for servers included."""
    pause_s: float
    """That a weight update alone takes: without the decode step or batch that it waited for."""
    fetch_s: float
    """Of a request for a batch that is there."""
    between_s: float
    num_inputs: float
    """Tokens of a step, prompts included."""
    length_mean: float
    trainer_busy: float
    generation_busy: float | None
    """None from environments that do not say it."""
    staleness_mean: float
    staleness_max: float
    """The mean over steps of the oldest token in each."""
    num_dropped: float
    variation: tuple[float, ...]
    groups: tuple[tuple[int, ...], ...]

    @property
    def generation_s(self) -> float:
        """In which environments have something to do, a step."""
        return self.interval_s * (1.0 if self.generation_busy is None else self.generation_busy)


class _Completion(msgspec.Struct):
    token_ids: list[int]


class _Group(msgspec.Struct):
    completions: list[_Completion]


class _Line(msgspec.Struct):
    time: Annotated[float, msgspec.Meta(ge=-MOST_MEASURED, le=MOST_MEASURED)]
    step: int
    metrics: dict[str, float]


_NEEDED = {"train/step_time", "train/tokens_per_second"}


def read_recording(run_folder: Path) -> Recording:
    """Read a run.

    Raises:
        ConfigError: it is no run, has too few steps, or no lengths.
    """
    steps = {line.step: _plausible(line) for line in _lines(run_folder / METRICS_FILE, _Line) if line.step > 0}
    ordered = [steps[number] for number in sorted(steps)]
    counted = [line for line in ordered[int(len(ordered) * SKIPPED_SHARE) :] if line.metrics.keys() >= _NEEDED]
    if len(counted) < LEAST_STEPS:
        raise ConfigError(
            f"{run_folder}: {len(counted)} steps after the first fifth, and speeds need at least {LEAST_STEPS}: "
            "name the folder of a longer run"
        )
    groups = tuple(
        tuple(len(completion.token_ids) for completion in group.completions)
        for group in _lines(run_folder / ROLLOUTS_FILE, _Group)
        if group.completions and all(completion.token_ids for completion in group.completions)
    )
    if not groups:
        raise ConfigError(f"{run_folder}: {ROLLOUTS_FILE} has no groups, so no lengths: record with rollouts_every 1")

    def values(name: str) -> list[float]:
        return [line.metrics[name] for line in counted if name in line.metrics]

    def mean(name: str) -> float:
        return fmean(values(name) or [0.0])

    fetches, updates = values("train/data_fetch_time"), values("train/sync_time")
    train = [
        line.metrics["train/step_time"]
        - line.metrics.get("train/data_fetch_time", 0.0)
        - line.metrics.get("train/sync_time", 0.0)
        for line in counted
    ]
    inputs = [line.metrics["train/tokens_per_second"] * line.metrics["train/step_time"] for line in counted]
    # Repeats of a resumed run, evaluations and restarts are between two steps too: the median leaves them out.
    intervals = [later.time - earlier.time for earlier, later in pairwise(counted)]
    gaps = [gap - line.metrics["train/step_time"] for gap, line in zip(intervals, counted[1:], strict=True)]
    usual = median(intervals)
    usual_intervals = [each for each in intervals if 0 <= each < 5 * usual]
    if not usual_intervals or min(sum(train), sum(inputs)) <= 0:
        raise ConfigError(f"{run_folder}: its times are no times of steps: name the folder of another run")
    mean_per_token = sum(train) / sum(inputs)
    per_token = [max(0.0, seconds) / count for seconds, count in zip(train, inputs, strict=True) if count]
    busy = values("rollout/busy_fraction")
    interval_s, between_s = fmean(usual_intervals), max(0.0, median(gaps))
    fetch_s = _tenth(fetches)
    if busy and not mean("rollout/staleness_max"):
        # In turns no batch is ever there; sampling begins with the update, and what is left of the wait is the request.
        fetch_s = min(fetch_s, max(0.0, mean("train/data_fetch_time") + between_s - interval_s * fmean(busy)))
    return Recording(
        name=run_folder.name,
        num_steps=len(counted),
        interval_s=interval_s,
        wait_s=mean("train/data_fetch_time"),
        train_s=fmean(train),
        update_s=mean("train/sync_time"),
        pause_s=_tenth(updates),
        fetch_s=fetch_s,
        between_s=between_s,
        num_inputs=fmean(inputs),
        length_mean=mean("rollout/length_mean"),
        trainer_busy=mean("train/busy_fraction"),
        generation_busy=fmean(busy) if busy else None,
        staleness_mean=mean("rollout/staleness_mean"),
        staleness_max=mean("rollout/staleness_max"),
        num_dropped=mean("rollout/stale_groups"),
        variation=tuple(each / mean_per_token for each in per_token),
        groups=groups,
    )


def _plausible(line: _Line) -> _Line:
    """A line without values that no run measures: the folder may be damaged, or somebody else's work."""
    metrics = {
        name: value for name, value in line.metrics.items() if value == 0 or LEAST_MEASURED <= value <= MOST_MEASURED
    }
    return _Line(time=line.time, step=line.step, metrics=metrics)


def _tenth(values: Sequence[float]) -> float:
    """The value below which a tenth of them are; 0 where there are too few."""
    return quantiles(values, n=10)[0] if len(values) > 1 else 0.0


def figures_of(
    recording: Recording, shape: ServerSpeed, *, num_ranks: int, batch_size: int, shares_device: bool = False
) -> Figures:
    """What a run measured, with a server speed that is yet to be scaled to it.

    Args:
        shape: how the speed of a server depends on the number of sequences.
        batch_size: sequences of a recorded step.
        shares_device: whether servers decoded on the devices of the trainer.
    """
    decoding = 0.0  # share of the trainer's steps in which servers decode on its devices: none of them by turns
    if shares_device and recording.staleness_max > 0:
        decoding = 1.0 if recording.generation_busy is None else recording.generation_busy
    alone_s = recording.train_s / (1 + (BESIDE_SAMPLING - 1) * decoding)
    prompt = max(0, round(recording.num_inputs / batch_size - recording.length_mean))
    return Figures(
        server=shape,
        trainer=TrainerSpeed(
            tokens_per_s=recording.num_inputs / alone_s / num_ranks,
            fetch_s=recording.fetch_s,
            between_s=recording.between_s,
            variation=recording.variation,
        ),
        lengths=Lengths(groups=recording.groups, prompt=prompt),
        update_s=recording.pause_s,
        sources=(
            f"{recording.name}: {recording.num_steps} steps; training {recording.train_s:.3g} s a step, weight update "
            f"{recording.pause_s:.3g} s, {len(recording.groups)} groups of "
            f"{fmean(length for group in recording.groups for length in group):.0f} tokens a completion",
        ),
    )


def measured_speed(run_folder: Path, shape: ServerSpeed) -> ServerSpeed:
    """How fast the servers of a run said that they were; the shape where they did not.

    Between and beyond the numbers of sequences that they had, a step takes a time of its own and the same further time
    for each sequence, fitted to what was measured.
    """
    files = [_read_speeds(path) for path in sorted(run_folder.glob(speeds_file(run_folder, "*").name))]
    steps = [
        (point.sequences, point.sequences / point.tokens_per_s)
        for speeds in files
        for point in speeds.points
        if point.sequences >= 1 and point.tokens_per_s >= LEAST_MEASURED
    ]
    recomputed_s = sum(speeds.recomputed_s for speeds in files)
    if recomputed_s > 0:
        recomputed = sum(speeds.recomputed_tokens for speeds in files)
        shape = replace(shape, recomputed_per_s=max(recomputed / recomputed_s, LEAST_MEASURED))
    if not steps:
        return shape
    middle, mean_s = fmean(count for count, _ in steps), fmean(seconds for _, seconds in steps)
    if max(steps)[0] < _APART * min(steps)[0]:  # too close to each other to tell the two times apart
        return shape.scaled(middle / mean_s / shape.tokens_per_s(round(middle)))
    spread = sum((count - middle) ** 2 for count, _ in steps)
    slope = sum((count - middle) * (seconds - mean_s) for count, seconds in steps) / spread
    slope = min(max(slope, 0.0), mean_s / middle)
    counts = [*(1 << power for power in range(shape.max_running.bit_length())), shape.max_running]
    points = {count: count / (mean_s + slope * (count - middle)) for count in counts}
    return replace(shape, points=tuple(sorted(points.items())))


def _read_speeds(path: Path) -> ServerSpeeds:
    try:
        return ServerSpeeds.model_validate_json(read_whole(path, max_bytes=1 << 20))
    except (OSError, ValidationError):  # damaged, or somebody else's work: as of a server that did not measure
        return ServerSpeeds()


def _lines(path: Path, kind: type[LineT]) -> Iterator[LineT]:
    """Lines of a file, without those that are damaged."""
    decoder = msgspec.json.Decoder(kind)
    try:
        if path.exists() and not path.is_file():  # a pipe would hang the reader
            raise ConfigError(f"{path}: not a regular file")
        with path.open("rb") as file:
            for line in file.read(MOST_BYTES).splitlines():
                try:
                    yield decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    continue
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}: name the folder of a run, as logs/tiny-cpu-…, or leave --from out"
        ) from None
