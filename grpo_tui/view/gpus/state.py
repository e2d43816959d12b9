"""What the GPU screen knows beyond the status document: memory over the run, what the profile planned, the span shown.

The newest moments are kept one by one; older ones are thinned evenly to the fullest of each few, so that a peak
stays to be seen and a day costs what an hour does. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import assert_never

from grpo_engine.wire.supervisor import GpuStatus, UsageSampled
from grpo_tui.view.machines import gpus_of

MAX_MOMENTS = 600
RECENT_MOMENTS = 150
"""Never thinned; with a sample a second, two and a half minutes."""
NUM_OLD = 300
"""Of the older ones, after they were thinned."""
SPANS_S: tuple[float | None, ...] = (None, 3600.0, 600.0, 60.0)
"""What the history may show, the whole run first."""
OTHERS = "others"
UNKNOWN_HOLDER = "unknown processes"
"""Memory that is used without a known process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFigures:
    """One GPU at a moment. Unknown is None."""

    index: int
    used_bytes: int | None
    total_bytes: int | None
    by_holder: Mapping[str, int]
    """Our services by their names, then `OTHERS`, or `UNKNOWN_HOLDER` where the driver does not tell."""
    utilization_percent: float | None
    power_watts: float | None
    temperature_celsius: float | None
    machine: str | None = None
    """Of a cluster; None: that of the supervisor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMoment:
    """All GPUs at a moment, and what the services hold of the machine's memory."""

    time: float
    gpus: tuple[GpuFigures, ...]
    rss_bytes: Mapping[str, int]
    _by_machine: dict[str | None, dict[int, GpuFigures]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Made when it is asked for: a report asks for every GPU of every moment."""

    def of_machine(self, machine: str | None) -> Mapping[int, GpuFigures]:
        """The figures of the GPUs of one machine, by their index."""
        if not self._by_machine:
            for gpu in self.gpus:
                self._by_machine.setdefault(gpu.machine, {}).setdefault(gpu.index, gpu)
        return self._by_machine.get(machine, {})

    def gpu(self, index: int, machine: str | None = None) -> GpuFigures | None:
        """The figures of one GPU, if it was there."""
        if 0 <= index < len(self.gpus) and self.gpus[index].index == index and self.gpus[index].machine == machine:
            return self.gpus[index]  # nearly always, and asked thousands of times
        return self.of_machine(machine).get(index)

    @property
    def fullness(self) -> int:
        """Bytes held on all GPUs, or of the machine where there is none; a peak has more than its neighbours."""
        return sum(gpu.used_bytes or 0 for gpu in self.gpus) or sum(self.rss_bytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedShare:
    """What the profile gives a service of each of its GPUs."""

    share: float | None
    gpus: tuple[int, ...]
    """Empty where the profile names none."""
    memory_bytes: int | None = None
    """Takes the place of a share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What the resolved profile says of GPU memory, by service."""

    shares: Mapping[str, PlannedShare] = field(default_factory=lambda: MappingProxyType({}))
    remedies: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The flag to lower, with the value that it has."""
    note: str = ""
    """Why nothing is known, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuView:
    """What the GPU screen knows beyond the status document."""

    moments: tuple[GpuMoment, ...] = ()
    """In the order of time."""
    span_s: float | None = None
    """How much of the history is shown, back from its end; None: all of it."""
    has_whole_commands: bool = False
    plan: MemoryPlan = MemoryPlan()
    has_past: bool = False
    """Whether what was sampled before the screen was there has been read."""


class GpuChange:
    """Base of all that changes it."""


@dataclass(frozen=True, slots=True)
class SpanTurned(GpuChange):
    """The next longer or shorter span was asked for."""


@dataclass(frozen=True, slots=True)
class CommandsTurned(GpuChange):
    """Whole command lines were asked for, or one line each again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRead(GpuChange):
    """The resolved profile was read."""

    plan: MemoryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRead(GpuChange):
    """What was sampled before the screen was there, in the order of time."""

    samples: tuple[UsageSampled, ...]


def after(gpus: GpuView, change: GpuChange) -> GpuView:
    """What it is after a change."""
    match change:
        case SpanTurned():
            place = SPANS_S.index(gpus.span_s) if gpus.span_s in SPANS_S else 0
            return replace(gpus, span_s=SPANS_S[(place + 1) % len(SPANS_S)])
        case CommandsTurned():
            return replace(gpus, has_whole_commands=not gpus.has_whole_commands)
        case PlanRead():
            return replace(gpus, plan=change.plan)
        case PastRead():
            return replace(gpus, moments=_with_past(gpus.moments, change.samples), has_past=True)
        case GpuChange():
            return gpus
        case _:
            assert_never(change)


def sampled(gpus: GpuView, sample: UsageSampled) -> GpuView:
    """Remember a sample; figures that are stale are no news of their GPU."""
    moment = moment_of(sample)
    earlier = gpus.moments
    if earlier and earlier[-1].time >= moment.time:  # the clock was set back
        earlier = tuple(each for each in earlier if each.time < moment.time)
    return replace(gpus, moments=_bounded((*earlier, moment)))


def moment_of(sample: UsageSampled) -> GpuMoment:
    """A sample as it is remembered."""
    return GpuMoment(
        time=sample.time,
        gpus=tuple(
            _figures(each.gpu, each.machine)
            for each in gpus_of(sample.gpus, sample.machines or ())
            if each.gpu.stale_s is None
        ),
        rss_bytes=sample.rss_bytes,
    )


def moments_until(gpus: GpuView, until: float | None) -> Sequence[GpuMoment]:
    """The moments up to a time; None: all of them."""
    return gpus.moments if until is None else [each for each in gpus.moments if each.time <= until]


def moments_of(moments: Sequence[GpuMoment], machine: str | None) -> Sequence[GpuMoment]:
    """The moments with the GPUs of one machine alone, as if it were the only one."""
    if machine is None and all(gpu.machine is None for moment in moments for gpu in moment.gpus):
        return moments
    return [_of_machine(moment, machine) for moment in moments]


def _of_machine(moment: GpuMoment, machine: str | None) -> GpuMoment:
    return replace(moment, gpus=tuple(replace(gpu, machine=None) for gpu in moment.of_machine(machine).values()))


def _with_past(moments: tuple[GpuMoment, ...], samples: Iterable[UsageSampled]) -> tuple[GpuMoment, ...]:
    begin = moments[0].time if moments else float("inf")
    past: tuple[GpuMoment, ...] = ()
    for sample in samples:
        if sample.time < begin:
            past = _bounded((*past, moment_of(sample)))
    return _bounded((*past, *moments))


def _figures(gpu: GpuStatus, machine: str | None) -> GpuFigures:
    held = sum(gpu.by_service.values())
    rest = OTHERS if gpu.other_bytes is not None else UNKNOWN_HOLDER
    rest_bytes = max(0, (gpu.memory_used_bytes or 0) - held)
    return GpuFigures(
        index=gpu.index,
        used_bytes=gpu.memory_used_bytes,
        total_bytes=gpu.memory_total_bytes,
        by_holder={**gpu.by_service, rest: rest_bytes} if rest_bytes else gpu.by_service,
        utilization_percent=gpu.utilization_percent,
        power_watts=gpu.power_watts,
        temperature_celsius=gpu.temperature_celsius,
        machine=machine,
    )


def _bounded(moments: tuple[GpuMoment, ...]) -> tuple[GpuMoment, ...]:
    if len(moments) <= MAX_MOMENTS:
        return moments
    old, recent = moments[:-RECENT_MOMENTS], moments[-RECENT_MOMENTS:]
    begin, end = old[0].time, old[-1].time
    fullest: dict[int, GpuMoment] = {}
    for moment in old:  # evenly over the run, however often it was thinned before
        place = int((moment.time - begin) / max(end - begin, 1.0) * NUM_OLD)
        fullest[place] = max(fullest.get(place, moment), moment, key=lambda each: each.fullness)
    return (*fullest.values(), *recent)
