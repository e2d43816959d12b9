"""Forms the next batch from waiting requests: first come, first served, as many copies as fit.

Pure functions: the queue and the thread are in `engine.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from grpo_engine.server.engine import Generation
from grpo_engine.server.torch.decoding import Decoded, Work
from grpo_engine.wire.inference import GenerateRequest

MAX_TOKENS_WITHOUT_TOKEN = 16384
"""Of a batch of requests without the token, where the server has one: its prompts are computed without a break."""


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One request with the copies that are decoded already."""

    prompt: list[int]
    params: GenerateRequest
    max_new_tokens: int
    future: Future[Generation] = field(default_factory=Future)
    is_cancelled: bool = False
    is_cut: bool = False
    """Whether the copies that are being decoded end where they are, because the weights are about to change or,
    without the token, others wait."""
    is_without_token: bool = False
    """Whether the server has a token and the request has not; such requests wait for all others."""
    finished: list[tuple[Decoded, int]] = field(default_factory=list)
    """Decoded copies in order, each with its policy version."""
    prompt_logprobs: list[list[tuple[int, float]] | None] | None = None

    @property
    def num_left(self) -> int:
        """Copies that are not decoded yet."""
        return self.params.n - len(self.finished)

    def work(self, num_copies: int) -> Work:
        """The next copies."""
        return Work(
            prompt=self.prompt,
            params=self.params,
            first_copy=len(self.finished),
            num_copies=num_copies,
            max_new_tokens=self.max_new_tokens,
            is_cancelled=lambda: self.is_cancelled or self.is_cut,
        )


def next_batch(waiting: Sequence[Job], *, max_rows: int, max_tokens: int) -> list[tuple[Job, int]]:
    """The jobs of the next batch with the number of copies of each; at least one copy of the first.

    Requests without the token have batches of their own, once no other request waits: all rows of a batch are answered
    when the longest has ended.

    Args:
        max_tokens: limits the cache: rows times the longest prompt and completion together.
    """
    own = [job for job in waiting if not job.is_without_token]
    if not own:
        max_tokens = min(max_tokens, MAX_TOKENS_WITHOUT_TOKEN)
    waiting = own or waiting
    chosen: list[tuple[Job, int]] = []
    rows = longest = 0
    for job in waiting:
        longest = max(longest, len(job.prompt) + job.max_new_tokens)
        room = max(min(max_rows, max_tokens // longest), 0 if chosen else 1) - rows
        copies = min(job.num_left, room)
        if copies <= 0:
            break
        chosen.append((job, copies))
        rows += copies
        if copies < job.num_left:
            break
    return chosen
