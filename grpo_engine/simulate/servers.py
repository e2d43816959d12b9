"""Inference servers on paper: how long requests take beside each other, and which version samples them."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from grpo_engine.simulate.clock import Clock
from grpo_engine.simulate.figures import ServerSpeed


@dataclass(slots=True, kw_only=True)
class Request:
    """One group at a server."""

    lengths: tuple[int, ...]
    """Tokens of its completions."""
    on_answer: Callable[[Request], None]
    prompt: int = 0
    """Tokens of the prompt, which its completions share."""
    num_left: int = 0
    oldest_version: int | None = None
    """Of any of its tokens."""
    version_tokens: float = 0.0
    """Sum over tokens of the version that sampled each; a completion across updates counts their mean."""

    @property
    def num_tokens(self) -> int:
        """Of all completions."""
        return sum(self.lengths)

    def begun(self, version: int) -> None:
        """One of its completions is decoded from now on."""
        self.oldest_version = version if self.oldest_version is None else min(self.oldest_version, version)


@dataclass(slots=True, kw_only=True)
class _Sequence:
    request: Request
    length: int
    version: int = 0

    def num_cached(self, num_left: float) -> float:
        """Tokens with keys and values where so many are left; those of the prompt are shared by its group."""
        return self.request.prompt / len(self.request.lengths) + self.length - num_left


class Server(ABC):
    """A queue of completions, decoded at a speed that depends on how many are."""

    def __init__(self, clock: Clock, speed: ServerSpeed) -> None:
        self.clock = clock
        self.speed = speed
        self.version = 0
        self.num_tokens = 0
        """Decoded in all."""
        self._decoded_s = 0.0
        self._waiting: deque[_Sequence] = deque()
        self._is_paused = False

    @property
    def is_full(self) -> bool:
        """Whether sequences queue for a place."""
        return bool(self._waiting)

    @abstractmethod
    def decoded_s(self) -> float:
        """Seconds until now in which something was decoded."""

    def submit(self, request: Request) -> None:
        """Take a request; its `on_answer` is called when its last completion has ended."""
        request.num_left = len(request.lengths)
        self._waiting.extend(_Sequence(request=request, length=length) for length in request.lengths)
        self._arrived()

    @abstractmethod
    def pause(self, when_paused: Callable[[], None]) -> None:
        """Stand still for a weight update; `when_paused` is called once that is so."""

    def resume(self, version: int) -> None:
        """Go on with the weights of this version."""
        self.version, self._is_paused = version, False
        self._arrived()

    @abstractmethod
    def _arrived(self) -> None:
        """Requests wait, or the server may go on."""

    def _end(self, sequence: _Sequence) -> None:
        request = sequence.request
        self.num_tokens += sequence.length
        request.version_tokens += sequence.length * (sequence.version + self.version) / 2
        request.num_left -= 1
        if not request.num_left:
            request.on_answer(request)


@dataclass(order=True, slots=True)
class _Ending:
    at_tokens: float
    number: int
    sequence: _Sequence = field(compare=False)


class ContinuousServer(Server):
    """Sequences join and leave at every token, as in vLLM: all that run advance at one rate."""

    def __init__(self, clock: Clock, speed: ServerSpeed, rates: Sequence[float] = ()) -> None:
        """
        Args:
            rates: of the speed, where several servers share them.
        """
        super().__init__(clock, speed)
        self._rates = rates or speed.rates()
        self._endings: list[_Ending] = []
        """Running sequences by where they end, in tokens that one which always ran would have."""
        self._advanced = 0.0
        self._at = 0.0
        self._turn = 0
        self._number = count()

    def pause(self, when_paused: Callable[[], None]) -> None:
        """At once: the rest of the decode step is in the measured pause."""
        self._advance()
        self._is_paused = True
        self._turn += 1
        when_paused()

    def resume(self, version: int) -> None:
        """Go on once the keys and values of all that runs are computed again, under the new weights."""
        self.version = version
        cached = sum(ending.sequence.num_cached(ending.at_tokens - self._advanced) for ending in self._endings)
        recompute_s = cached / self.speed.recomputed_per_s  # 0 where nothing is
        turn = self._turn

        def go_on() -> None:
            if turn == self._turn:  # else it was paused again
                self._at = self.clock.now
                super(ContinuousServer, self).resume(version)

        if recompute_s:
            self.clock.after(recompute_s, go_on)
        else:
            go_on()

    def decoded_s(self) -> float:
        """See `Server`."""
        self._advance()
        return self._decoded_s

    def _rate(self) -> float:
        return self._rates[len(self._endings)]

    def _advance(self) -> None:
        if self._endings and not self._is_paused:
            passed = self.clock.now - self._at
            self._advanced += passed * self._rate()
            self._decoded_s += passed
        self._at = self.clock.now

    def _arrived(self) -> None:
        if self._is_paused:
            return
        self._advance()
        while self._waiting and len(self._endings) < self.speed.max_running:
            sequence = self._waiting.popleft()
            sequence.version = self.version
            sequence.request.begun(self.version)
            heapq.heappush(self._endings, _Ending(self._advanced + sequence.length, next(self._number), sequence))
        self._plan()

    def _plan(self) -> None:
        self._turn += 1
        if self._endings:
            turn = self._turn
            left = max(0.0, self._endings[0].at_tokens - self._advanced)
            self.clock.after(left / self._rate(), lambda: self._next_ends(turn))

    def _next_ends(self, turn: int) -> None:
        if turn != self._turn:
            return  # others joined or left since, or it was paused
        self._advance()
        first = heapq.heappop(self._endings)
        self._advanced = max(self._advanced, first.at_tokens)
        ended = [first.sequence]
        while self._endings and self._endings[0].at_tokens <= self._advanced:
            ended.append(heapq.heappop(self._endings).sequence)
        self._arrived()
        for sequence in ended:
            self._end(sequence)


class WholeBatchServer(Server):
    """A batch is decoded until its longest completion ends, as by the torch engine; an update waits for that."""

    def __init__(self, clock: Clock, speed: ServerSpeed) -> None:
        super().__init__(clock, speed)
        self._batch: list[_Sequence] = []
        self._when_paused: Callable[[], None] | None = None
        self._is_planned = False
        self._ends_at = 0.0

    def decoded_s(self) -> float:
        """See `Server`."""
        return self._decoded_s - max(0.0, self._ends_at - self.clock.now)

    def pause(self, when_paused: Callable[[], None]) -> None:
        """After the batch in progress."""
        self._is_paused = True
        if self._batch:
            self._when_paused = when_paused
        else:
            when_paused()

    def _arrived(self) -> None:
        if not self._is_planned:  # what arrives at the same time is decoded together
            self._is_planned = True
            self.clock.after(0.0, self._begin)

    def _begin(self) -> None:
        self._is_planned = False
        if self._is_paused or self._batch or not self._waiting:
            return
        count = min(len(self._waiting), self.speed.max_running)
        self._batch = [self._waiting.popleft() for _ in range(count)]
        for sequence in self._batch:
            sequence.version = self.version
            sequence.request.begun(self.version)
        longest = max(sequence.length for sequence in self._batch)
        seconds = longest * count / self.speed.tokens_per_s(count)
        self._decoded_s += seconds
        self._ends_at = self.clock.now + seconds
        self.clock.after(seconds, self._ended)

    def _ended(self) -> None:
        ended, self._batch = self._batch, []
        for sequence in ended:
            self._end(sequence)
        if self._when_paused is not None:
            when_paused, self._when_paused = self._when_paused, None
            when_paused()
        self._arrived()


def make_servers(clock: Clock, speed: ServerSpeed, count: int) -> Sequence[Server]:
    """Servers that batch as their speed says."""
    if speed.batching == "whole":
        return [WholeBatchServer(clock, speed) for _ in range(count)]
    rates = speed.rates()
    return [ContinuousServer(clock, speed, rates) for _ in range(count)]
