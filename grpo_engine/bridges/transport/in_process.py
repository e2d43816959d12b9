"""Transport `in process`: each rank of the trainer has an inference engine, which sleeps while the rank trains.

    awake ── sleep ──► asleep ── wake_weights ──► weights ── wake_cache ──► awake
    samples           the rank trains            takes the new weights      samples again, by the new version

Weights of an engine that sleeps are dropped if all are written anyway (vLLM's level 2), and else kept in main memory
(level 1): where adapters are trained, and between two weight updates that are several steps apart. Torch-free to
import.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from grpo_engine.bridges.engine import InProcessEngine, Layer
from grpo_engine.bridges.protocol import BridgeModel, Placement, Update
from grpo_engine.bridges.transport.served_file import Repetition
from grpo_engine.errors import BridgeError
from grpo_engine.processes import resident_bytes
from grpo_engine.wire.metrics import PHASE_MEMORY_METRICS, PHASE_METRICS, SLEEP_METRICS

if TYPE_CHECKING:
    from grpo_engine.ranks.group import RankGroup


class EngineState(StrEnum):
    """What an engine can do."""

    AWAKE = "awake"
    """Sample."""
    ASLEEP = "asleep"
    """Nothing; its memory is the trainer's."""
    WEIGHTS = "weights"
    """Take weights."""


PHASES = dict(zip(EngineState, PHASE_METRICS, strict=True))
"""Metric of the seconds that are spent in each state."""
PHASE_MEMORY = dict(zip(EngineState, PHASE_MEMORY_METRICS, strict=True))
"""Metric of the memory in use at the end of each state."""


class PhaseClock:
    """Seconds that an engine spends in each state, and the memory in use at its end."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._state: EngineState | None = None
        self._since = clock()
        self._seconds = dict.fromkeys(EngineState, 0.0)
        self._memory_gb: dict[EngineState, float] = {}

    def ending(self) -> None:
        """Note the memory in use: what comes next frees or allocates some, for another state."""
        if self._state is not None:
            self._memory_gb[self._state] = _used_bytes() / 1e9

    def enter(self, state: EngineState | None) -> None:
        """It is in this state from now on; None: in none yet."""
        now = self._clock()
        if self._state is not None:
            self._seconds[self._state] += now - self._since
        self._state, self._since = state, now

    def take(self) -> dict[str, float]:
        """Seconds and memory of each state since the last call, by the names of `metrics.jsonl`."""
        self.enter(self._state)
        times = {PHASES[state]: seconds for state, seconds in self._seconds.items()}
        memory = {PHASE_MEMORY[state]: used for state, used in self._memory_gb.items()}
        self._seconds, self._memory_gb = dict.fromkeys(EngineState, 0.0), {}
        return {**times, **memory}


class SleepMeter:
    """What the last sleep took and freed."""

    def __init__(self) -> None:
        self._figures: tuple[float, ...] = ()
        self.freed_bytes = 0
        """By the last sleep; 0 where that is unknown."""

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Within, inference is put to sleep."""
        began, free_before = time.perf_counter(), _free_bytes()
        yield
        seconds, free_after = time.perf_counter() - began, _free_bytes()
        self._figures = (seconds,)
        if free_before is not None and free_after is not None:
            self.freed_bytes = free_after - free_before
            self._figures = (seconds, self.freed_bytes / 1e9)

    def take(self) -> dict[str, float]:
        """The figures by the names of `metrics.jsonl`, once."""
        figures, self._figures = self._figures, ()
        return dict(zip(SLEEP_METRICS, figures, strict=False))  # on a CPU without the last


def _free_bytes() -> int | None:
    """Free memory of this process's GPU; None where it uses none yet."""
    free_and_total = _gpu_memory()
    return free_and_total[0] if free_and_total else None


def _used_bytes() -> int:
    """Memory in use on this process's GPU; where it uses none, the process's own."""
    free_and_total = _gpu_memory()
    return free_and_total[1] - free_and_total[0] if free_and_total else resident_bytes()


def _gpu_memory() -> tuple[int, int] | None:
    """(free, total) bytes of this process's GPU; None where it uses none yet."""
    import torch

    is_used = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.mem_get_info() if is_used else None


class StatefulEngine:
    """An engine with its state; refuses what is out of order, since engines would crash or serve garbage."""

    def __init__(self, engine: InProcessEngine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine = engine
        self._phases = PhaseClock(clock)
        self.state: EngineState | None = None
        """None before the start."""
        self.policy_version = 0
        """Of the weights that it samples from."""
        self.num_bytes_loaded = 0
        """Since the start."""
        self._missing: set[str] = set()
        """Weights without a value."""

    @property
    def has_weights(self) -> bool:
        """Whether its weights have values, on the device or in main memory."""
        return not self._missing

    def start(self) -> None:
        """Load the engine; it sleeps from then on."""
        self._require(None, "start")
        self._engine.start()
        self._enter(EngineState.AWAKE)

    def sleep(self, *, keeps_weights: bool) -> None:
        """Give its memory to the trainer."""
        self._require(EngineState.AWAKE, "sleep")
        self._phases.ending()
        self._engine.sleep(keeps_weights=keeps_weights)
        if not keeps_weights:
            self._missing = set(self._engine.parameter_names())
        self._enter(EngineState.ASLEEP)

    def wake_weights(self) -> None:
        """Take its memory for weights back."""
        self._require(EngineState.ASLEEP, "wake_weights")
        self._phases.ending()
        self._engine.wake_weights()
        self._enter(EngineState.WEIGHTS)

    def load(self, layer: Layer) -> None:
        """Copy new values over weights."""
        self._require(EngineState.WEIGHTS, "load")
        self._engine.load(layer)
        self._missing.difference_update(layer)
        self.num_bytes_loaded += sum(int(tensor.nbytes) for tensor in layer.values())

    def wake_cache(self, policy_version: int) -> None:
        """Sample again, from weights of this version."""
        self._require(EngineState.WEIGHTS, "wake_cache")
        if self._missing:
            some = ", ".join(sorted(self._missing)[:3])
            raise BridgeError(
                f"the engine in this process has no values for {len(self._missing)} of its weights ({some} …), so it "
                "would sample garbage: the trained model lacks them; please report this model"
            )
        self._phases.ending()
        self._engine.wake_cache()
        self.policy_version = policy_version
        self._enter(EngineState.AWAKE)

    def require_awake(self) -> None:
        """Refuse to sample in any other state."""
        self._require(EngineState.AWAKE, "sample")

    def take_phase_times(self) -> dict[str, float]:
        """Seconds and memory of each state since the last call, by the names of `metrics.jsonl`."""
        return self._phases.take()

    def _enter(self, state: EngineState) -> None:
        self._phases.enter(state)
        self.state = state

    def _require(self, state: EngineState | None, action: str) -> None:
        if self.state is not state:
            raise BridgeError(
                f"the engine in this process is {self.state or 'not started'}, and {action} needs it "
                f"{state or 'not started'}: a bug, please report it"
            )


@dataclass(frozen=True, slots=True)
class StartEngine:
    """Work of all ranks: `EngineOfRanks.start`, the first that rank 0 announces."""

    def __str__(self) -> str:
        return "starting the inference engine"


@dataclass(frozen=True, slots=True)
class SleepEngine:
    """Work of all ranks: `EngineOfRanks.sleep`."""

    keeps_weights: bool

    def __str__(self) -> str:
        return "putting the inference engine to sleep"


@dataclass(frozen=True, slots=True)
class WakeEngine:
    """Work of all ranks: `EngineOfRanks.wake`."""

    policy_version: int
    is_written: bool

    def __str__(self) -> str:
        return f"waking the inference engine with version {self.policy_version}"


Stream = Callable[[Callable[[Layer], None]], None]
"""Calls what it is given with all changed weights, a layer at a time, which are valid until that returns; on all ranks
at once."""


class EngineOfRanks:
    """The engine of this rank, which does what the others do."""

    def __init__(
        self,
        engine: InProcessEngine,
        stream: Stream,
        ranks: RankGroup,
        *,
        is_partial: bool,
    ) -> None:
        """Start nothing yet.

        Args:
            stream: the trainer's weights.
            is_partial: whether it leaves out weights that never change, which the engine must then keep.
        """
        self.engine = StatefulEngine(engine)
        self.ranks = ranks
        self.meter = SleepMeter()
        self._stream = stream
        self._is_partial = is_partial

    @property
    def works(self) -> dict[type, Callable[[Any], None]]:
        """What ranks other than 0 do, by what rank 0 announces."""
        return {
            StartEngine: lambda work: self.start(),
            SleepEngine: lambda work: self.sleep(keeps_weights=work.keeps_weights),
            WakeEngine: lambda work: self.wake(work.policy_version, is_written=work.is_written),
        }

    def start(self) -> None:
        """Load the engine and put it to sleep, so that the trainer finds its memory free."""
        with self.ranks.together(StartEngine()):
            self.engine.start()
            with self.meter.measuring():
                self.engine.sleep(keeps_weights=self._is_partial)

    def sleep(self, *, keeps_weights: bool) -> None:
        """Give the engine's memory to the trainer; an engine that sleeps already is left as it is."""
        if self.engine.state is EngineState.ASLEEP:
            return
        with self.ranks.together(SleepEngine(keeps_weights)), self.meter.measuring():
            self.engine.sleep(keeps_weights=keeps_weights or self._is_partial)

    def wake(self, policy_version: int, *, is_written: bool) -> None:
        """Make the engine sample again.

        Args:
            is_written: with the trainer's weights, which are then of this version.
        """
        if self.engine.state is EngineState.AWAKE:  # between two weight updates without a step
            self.sleep(keeps_weights=True)
        with self.ranks.together(WakeEngine(policy_version, is_written)):
            self.engine.wake_weights()
            if is_written:
                self._stream(self.engine.load)
            self.engine.wake_cache(policy_version)


class InProcessBridge:
    """See `grpo_engine.bridges.protocol.Bridge`; on rank 0."""

    def __init__(self, placement: Placement, engines: EngineOfRanks, *, every_steps: int) -> None:
        self._placement = placement
        self.engines = engines
        self._every_steps = every_steps
        self._written = 0
        """Version of the trainer's weights."""
        self._served: int | None = None
        self._repetition = Repetition()

    def attach(self) -> BridgeModel:
        """Start the engines, which then sleep, and load the model."""
        self.engines.start()
        model = self._placement.load()
        placement = self._placement
        return BridgeModel(
            model=model,
            is_shared=False,
            policy_version=0,
            save=placement.save,
            tensors=placement.tensors,
            asleep_bytes=lambda: self.engines.meter.freed_bytes,
            repeat=self._repetition.begin,
        )

    def publish(self, version: int, write: Callable[[], None]) -> Update | None:
        """Write the new values, and wake the engines; with them, if an update is due.

        While steps are repeated nothing is sampled, so the engines sleep.
        """
        write()
        self._written = version
        if self._repetition.goes_on_after(version):
            return None
        engine, began = self.engines.engine, time.perf_counter()
        before, is_due = engine.num_bytes_loaded, self._is_due(version)
        if is_due:
            self._send()
        else:
            self.wake()
        return Update(
            pause_s=time.perf_counter() - began,
            num_bytes=engine.num_bytes_loaded - before,
            num_servers=self.engines.ranks.size if is_due else 0,
            phase_times={**engine.take_phase_times(), **self.engines.meter.take()},
        )

    def wake(self) -> None:
        """Make the engines sample; those that have lost their weights get the trainer's."""
        engine = self.engines.engine
        if engine.state is EngineState.AWAKE:
            return
        if engine.has_weights and self._served is not None:
            self.engines.wake(self._served, is_written=False)
        else:
            self._send()

    def poll_server(self) -> None:
        """Nothing to look after: an engine ends with its rank."""

    def prepare_step(self) -> None:
        """Put the engines to sleep, so that the step finds their memory free."""
        self.engines.sleep(keeps_weights=not self._is_due(self._written + 1))

    def close(self) -> None:
        """Nothing is left by an engine that ends with its process."""

    def _is_due(self, version: int) -> bool:
        return self._served is None or version - self._served >= self._every_steps

    def _send(self) -> None:
        self.engines.wake(self._written, is_written=True)
        self._served = self._written
