"""Rounds of sampling: all prompts that wait for completions, split over the ranks, sampled together.

Rank 0 runs the problems of a task concurrently. Once none of them goes on without a completion, their prompts are
sampled, by the engines of all ranks at once. A question takes one round, a conversation one for each turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_engine.bridges.transport.in_process import EngineOfRanks
from grpo_engine.environments.inference_servers import Session
from grpo_engine.environments.sampling.groups import Completions
from grpo_engine.errors import GrpoError
from grpo_engine.ranks.group import RankGroup
from grpo_engine.retrying import never
from grpo_engine.server.engine import Generation
from grpo_engine.server.in_process import SamplingEngine, prompt_of
from grpo_engine.wire.inference import GenerateRequest

QUIET_S = 0.002
"""A round begins when no prompt has come for so long: those of one step come together."""


class SamplingFailed(GrpoError):
    """An engine could not sample; the message has the rank."""


class SamplingStopped(GrpoError):
    """Training stops, so that no further round begins."""


@dataclass(frozen=True, slots=True)
class SampleRound:
    """Work of all ranks: `Rounds.sample`."""

    shares: tuple[tuple[GenerateRequest, ...], ...]
    """By rank."""

    def __str__(self) -> str:
        return f"sampling {sum(map(len, self.shares))} prompts"


class Rounds:
    """The engines of all ranks, seen from one of them."""

    def __init__(self, engine: SamplingEngine, engines: EngineOfRanks, ranks: RankGroup) -> None:
        self._engine = engine
        self._engines = engines
        self._ranks = ranks

    @property
    def works(self) -> dict[type, Callable[[Any], None]]:
        """What ranks other than 0 do, by what rank 0 announces."""
        return {SampleRound: self._take_part}

    def sample(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """The completions of every prompt, in order; on rank 0.

        Raises:
            SamplingFailed: a request is invalid, or an engine has failed.
        """
        places = shares(requests, self._ranks.size)
        work = SampleRound(tuple(tuple(requests[place] for place in share) for share in places))
        with self._ranks.together(work):
            answers = self._gathered(work)
        done: dict[int, Generation] = {}
        for rank, (share, (generations, problem)) in enumerate(zip(places, answers, strict=True)):
            if problem:
                raise SamplingFailed(f"rank {rank} could not sample: {problem}")
            done.update(zip(share, generations, strict=True))
        return [done[place] for place in range(len(requests))]

    def _take_part(self, work: SampleRound) -> None:
        self._gathered(work)

    def _gathered(self, work: SampleRound) -> list[tuple[list[Generation], str]]:
        """What every rank has sampled, or why it could not; on every rank."""
        engine = self._engines.engine
        engine.require_awake()
        generations, problem = [], ""
        try:
            generations = self._engine.generate(work.shares[self._ranks.rank], engine.policy_version)
        except GrpoError as error:  # the other ranks wait for an answer
            problem = str(error)
        return self._ranks.gather((generations, problem))


def shares(requests: Sequence[GenerateRequest], num_ranks: int) -> list[list[int]]:
    """Places of the requests that each rank samples: about as many tokens each, the longest first.

    >>> from grpo_engine.wire.inference import TokenPrompt
    >>> asked = [GenerateRequest(prompt=TokenPrompt(prompt_token_ids=[1]), max_tokens=size) for size in (5, 9, 3)]
    >>> shares(asked, 2)
    [[1], [0, 2]]
    """
    tokens = [len(prompt_of(request)) + request.n * request.max_tokens for request in requests]
    loads, places = [0] * num_ranks, [list[int]() for _ in range(num_ranks)]
    for place in sorted(range(len(requests)), key=lambda place: -tokens[place]):
        rank = loads.index(min(loads))
        loads[rank] += tokens[place]
        places[rank].append(place)
    return places


class RoundInference:
    """See `grpo_engine.environments.sampling.policy.Inference`: collects prompts for the next round."""

    def __init__(self, sample: Callable[[Sequence[GenerateRequest]], list[Generation]]) -> None:
        """
        Args:
            sample: makes a round; it may block the event loop, since nothing goes on without its completions.
        """
        self._sample = sample
        self._stop: Callable[[], bool] = never
        self._waiting: list[tuple[GenerateRequest, asyncio.Future[Completions]]] = []
        self._rounds: asyncio.Task[None] | None = None
        self.num_tokens = 0
        """Tokens that were sampled."""

    def begin(self, stop: Callable[[], bool] = never) -> None:
        """Begin a batch or an evaluation.

        Args:
            stop: whether no further round may begin.
        """
        self._stop = stop

    async def generate(self, request: GenerateRequest, session: Session | None = None) -> Completions:
        """Sample completions in the next round.

        Raises:
            SamplingFailed: the request is invalid, or an engine has failed.
            SamplingStopped: training stops.
        """
        answer: asyncio.Future[Completions] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if self._rounds is None or self._rounds.done():
            self._rounds = asyncio.create_task(self._make_rounds())
        return await answer

    async def _make_rounds(self) -> None:
        while self._waiting:
            num_seen = 0
            while len(self._waiting) > num_seen:
                num_seen = len(self._waiting)
                await asyncio.sleep(QUIET_S)
            batch = [(request, answer) for request, answer in self._waiting if not answer.done()]
            self._waiting = []
            try:
                if self._stop():
                    raise SamplingStopped("training stops")
                generations = self._sample([request for request, _ in batch])
            except Exception as error:  # raised where the completions are awaited, who would wait forever otherwise
                for _, answer in batch:
                    answer.set_exception(error)
                return
            for (_, answer), generation in zip(batch, generations, strict=True):
                self.num_tokens += sum(len(each.token_ids) for each in generation.completions)
                answer.set_result(completions_of(generation))


def completions_of(generation: Generation) -> Completions:
    """An answer of `/generate`, without the way over HTTP."""
    completions = generation.completions
    return Completions.model_construct(
        text=[each.text for each in completions],
        prompt="",
        finish_reasons=[each.finish_reason for each in completions],
        logprobs=[
            [[{str(token): logprob}] for token, logprob in zip(each.token_ids, each.logprobs, strict=True)]
            for each in completions
        ],
        token_ids=[each.token_ids for each in completions],
        policy_versions=[each.policy_versions for each in completions],
        logprobs_mode="processed",
    )
