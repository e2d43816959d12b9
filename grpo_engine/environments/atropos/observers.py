"""Observes whether an environment sends requests to the inference servers: its connections, and all servers' counters.

Connections belong to its processes, but a short request is easily missed; counters miss nothing, but include all
clients. Both work with a stock vLLM and a stock `run-api`, which report less.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from grpo_engine.errors import PeerError
from grpo_engine.wire.codec import Message, Whole

_REQUESTS = ("vllm:request_success_total", "vllm:num_requests_running", "vllm:num_requests_waiting")
_GROUPS = "grpo_api_groups_total"
_SAMPLE = re.compile(rf"^(?:{'|'.join((*_REQUESTS, _GROUPS))})[ {{][^\n]*", re.MULTILINE)
"""A line of a sample that is read; the parser takes 400 bytes and 10 µs for each, of which 60 MB have millions."""
_MOST_CHARS = 1 << 20
"""Of such lines: a rollout API has one for each environment."""

Address = tuple[str, int]
"""An IP address and a port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """State of the run in the rollout API."""

    batch_size: int
    """Sequences; below 1 before a trainer has registered."""
    queued: int
    """Sequences in the queue."""
    step: int
    num_steps: int | None
    """None: unknown."""
    environments: tuple[str, ...] | None
    """Names of live environments, the newest of very many; None: unknown."""
    num_left_out: int = 0
    """Live environments that are not among them."""

    def has_environment(self, name: str | None) -> bool | None:
        """Whether an environment of this name, or any, is registered; None: unknown."""
        if self.environments is None:
            return None
        is_named = any(name is None or each.rpartition("_")[0] == name for each in self.environments)
        return None if self.num_left_out and not is_named else is_named

    @property
    def is_short_of_groups(self) -> bool:
        """Whether a trainer waits and less than a batch is queued."""
        is_over = self.num_steps is not None and self.step >= self.num_steps
        return self.batch_size > 0 and self.queued < self.batch_size and not is_over


class _Info(Message):
    """What is read of the answer of `/info`."""

    batch_size: Whole


class _Status(Message):
    """What is read of the answer of `/status`; a stock API has the first two only."""

    current_step: Whole
    queue_size: Whole
    queued_sequences: Whole | None = None
    num_steps: Whole | None = None
    environments: tuple[str, ...] | None = None
    environments_left_out: Whole = 0


@dataclass(slots=True)
class Api:
    """Observes the rollout API."""

    client: httpx.Client
    url: str

    def refuses_token(self) -> bool | None:
        """Whether it requires another token than the client's; None when it does not answer."""
        try:
            return self.client.get(f"{self.url}/wandb_info").status_code == httpx.codes.UNAUTHORIZED
        except (httpx.HTTPError, PeerError):
            return None

    def run_status(self, group_size: int) -> RunStatus | None:
        """State of the run; None when the API does not answer, or with anything else.

        A stock API counts groups, of `group_size` sequences.
        """
        try:
            info = _Info.model_validate_json(self.client.get(f"{self.url}/info").raise_for_status().content)
            status = _Status.model_validate_json(self.client.get(f"{self.url}/status").raise_for_status().content)
        except (httpx.HTTPError, PeerError, ValueError):
            return None
        queued = status.queued_sequences
        return RunStatus(
            batch_size=info.batch_size,
            queued=status.queue_size * group_size if queued is None else queued,
            step=status.current_step,
            num_steps=status.num_steps,
            environments=status.environments,
            num_left_out=status.environments_left_out,
        )

    def num_groups(self, name: str | None) -> float | None:
        """Groups received from an environment of this name, or from all; None if it does not count."""
        of = re.compile(rf"{re.escape(name)}_\d+" if name is not None else ".*")
        counts = [
            sample.value
            for sample in _samples(self.client, self.url)
            if sample.name == _GROUPS and of.fullmatch(sample.labels.get("environment", ""))
        ]
        return sum(counts) if counts else None


@dataclass(slots=True)
class Servers:
    """Observes the inference servers."""

    client: httpx.Client
    urls: Sequence[str]

    def are_healthy(self) -> bool:
        """Whether `/health` of any answers 200."""
        return any(map(self._is_healthy, self.urls))

    def num_requests(self) -> float | None:
        """A number that changes when requests start or end; None if none counts."""
        samples = [sample for url in self.urls for sample in _samples(self.client, url)]
        counts = [sample.value for sample in samples if sample.name in _REQUESTS]
        return sum(counts) if counts else None

    def _is_healthy(self, url: str) -> bool:
        try:
            return self.client.get(f"{url}/health").status_code == httpx.codes.OK
        except (httpx.HTTPError, PeerError):
            return False


@dataclass(slots=True)
class Connections:
    """TCP connections of a process and its descendants."""

    pid: int
    server_urls: Sequence[str]
    api_url: str
    other_peers: set[str] = field(default_factory=set)
    """`address:port` of connections to other servers."""

    def has_connection_to_server(self) -> bool:
        """Whether one is open now; records the peers of others."""
        servers, api = set[Address]().union(*map(addresses, self.server_urls)), addresses(self.api_url)
        found = set(self._peers())
        self.other_peers.update(f"{address}:{port}" for address, port in found - servers - api)
        return bool(found & servers)

    def _peers(self) -> Iterator[Address]:
        with suppress(psutil.Error):
            main = psutil.Process(self.pid)
            for process in (main, *main.children(recursive=True)):
                with suppress(psutil.Error):
                    for connection in process.net_connections(kind="tcp"):
                        if connection.raddr and connection.status in (psutil.CONN_ESTABLISHED, psutil.CONN_SYN_SENT):
                            yield _plain(connection.raddr.ip), connection.raddr.port


def addresses(url: str) -> set[Address]:
    """Addresses of the host and port of a URL."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with suppress(OSError):
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        return {(_plain(str(address[0])), port) for *_, address in found}
    return set()


def _samples(client: httpx.Client, url: str) -> list[Sample]:
    """Samples of the server's `/metrics` that are read here; empty if it has none, no Prometheus text, or very many."""
    try:
        answer = client.get(f"{url}/metrics")
        if answer.is_redirect:  # vLLM has an application of its own there
            answer = client.get(f"{url}/metrics/")
        text = answer.raise_for_status().text
        lines, num_chars = [], 0
        for line in _SAMPLE.finditer(text):
            lines.append(line[0])
            if (num_chars := num_chars + len(line[0])) > _MOST_CHARS:
                return []
        return [sample for family in text_string_to_metric_families("\n".join(lines)) for sample in family.samples]
    except (httpx.HTTPError, PeerError, ValueError):
        return []


def _plain(address: str) -> str:
    """An IPv4-mapped IPv6 address as IPv4."""
    return address.removeprefix("::ffff:")
