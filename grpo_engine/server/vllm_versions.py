"""Which version of the weights each token of the running requests comes from.

Weights may change while requests are frozen between two steps. What they had until then is of the old version, what
follows of the new one, so it is enough to know at each change how long every completion was. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Lengths = Mapping[tuple[str, int], int]
"""`(request, index of the completion) -> tokens so far`, of every completion that is not at its end."""


@dataclass(slots=True)
class TokenVersions:
    """Of one request."""

    first: int
    """Version that it began with."""
    changes: list[tuple[int, dict[int, int]]] = field(default_factory=list)
    """A version that followed, and how many tokens each unfinished completion (by its index) had before it."""

    def of(self, index: int, num_tokens: int) -> list[int]:
        """The version of each token of a completion that has ended with so many."""
        versions = [self.first] * num_tokens
        for version, lengths in self.changes:
            if index in lengths:  # one that had ended already got nothing of the new version
                start = lengths[index]
                versions[start:] = [version] * (num_tokens - start)
        return versions


class RunningVersions:
    """Of all requests that run."""

    def __init__(self) -> None:
        self._running: dict[str, TokenVersions] = {}

    @contextmanager
    def request(self, request_id: str, version: int) -> Iterator[TokenVersions]:
        """Within, the request runs, begun under `version`."""
        versions = self._running[request_id] = TokenVersions(version)
        try:
            yield versions
        finally:
            del self._running[request_id]

    def change(self, version: int, lengths: Lengths) -> None:
        """Every further token comes from `version`."""
        for (request_id, index), length in lengths.items():
            if (versions := self._running.get(request_id)) is not None:
                if not versions.changes or versions.changes[-1][0] != version:
                    versions.changes.append((version, {}))
                versions.changes[-1][1][index] = length


def lengths_so_far(output_processor: Any) -> dict[tuple[str, int], int]:
    """How long the completions are that vLLM's `OutputProcessor` is assembling (0.26 to 0.33)."""
    return {
        (state.external_req_id, state.request_index): state.detokenizer.num_output_tokens()
        for state in output_processor.request_states.values()
        if state.detokenizer is not None
    }
