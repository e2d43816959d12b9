"""Observes whether an environment sends requests to the inference server: its connections, and both servers' counters.

Connections belong to its processes, but a short request is easily missed; counters miss nothing, but include all
clients. Both work with a stock vLLM and a stock `run-api`, which report less.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_REQUESTS = ("vllm:request_success_total", "vllm:num_requests_running", "vllm:num_requests_waiting")
_GROUPS = "grpo_api_groups_total"


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
    """Names of live environments; None: unknown."""

    def has_environment(self, name: str | None) -> bool | None:
        """Whether an environment of this name, or any, is registered; None: unknown."""
        if self.environments is None:
            return None
        return any(name is None or each.rpartition("_")[0] == name for each in self.environments)

    @property
    def is_short_of_groups(self) -> bool:
        """Whether a trainer waits and less than a batch is queued."""
        is_over = self.num_steps is not None and self.step >= self.num_steps
        return self.batch_size > 0 and self.queued < self.batch_size and not is_over


@dataclass(slots=True)
class Api:
    """Observes the rollout API."""

    client: httpx.Client
    url: str

    def refuses_token(self) -> bool | None:
        """Whether it requires another token than the client's; None when it does not answer."""
        try:
            return self.client.get(f"{self.url}/wandb_info").status_code == httpx.codes.UNAUTHORIZED
        except httpx.HTTPError:
            return None

    def run_status(self, group_size: int) -> RunStatus | None:
        """State of the run; None when the API does not answer. A stock API counts groups, of `group_size` sequences."""
        try:
            info: dict[str, Any] = self.client.get(f"{self.url}/info").raise_for_status().json()
            status: dict[str, Any] = self.client.get(f"{self.url}/status").raise_for_status().json()
            return RunStatus(
                batch_size=int(info["batch_size"]),
                queued=int(status.get("queued_sequences", status["queue_size"] * group_size)),
                step=int(status["current_step"]),
                num_steps=status.get("num_steps"),
                environments=tuple(status["environments"]) if "environments" in status else None,
            )
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None

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
class Server:
    """Observes the inference server."""

    client: httpx.Client
    url: str

    def is_healthy(self) -> bool:
        """Whether `/health` answers 200."""
        try:
            return self.client.get(f"{self.url}/health").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def num_requests(self) -> float | None:
        """A number that changes when requests start or end; None if it does not count."""
        counts = [sample.value for sample in _samples(self.client, self.url) if sample.name in _REQUESTS]
        return sum(counts) if counts else None


@dataclass(slots=True)
class Connections:
    """TCP connections of a process and its descendants."""

    pid: int
    server_url: str
    api_url: str
    other_peers: set[str] = field(default_factory=set)
    """`address:port` of connections to other servers."""

    def has_connection_to_server(self) -> bool:
        """Whether one is open now; records the peers of others."""
        server, api = addresses(self.server_url), addresses(self.api_url)
        found = set(self._peers())
        self.other_peers.update(f"{address}:{port}" for address, port in found - server - api)
        return bool(found & server)

    def _peers(self) -> Iterator[tuple[str, int]]:
        with suppress(psutil.Error):
            main = psutil.Process(self.pid)
            for process in (main, *main.children(recursive=True)):
                with suppress(psutil.Error):
                    for connection in process.net_connections(kind="tcp"):
                        if connection.raddr and connection.status in (psutil.CONN_ESTABLISHED, psutil.CONN_SYN_SENT):
                            yield _plain(connection.raddr.ip), connection.raddr.port


def addresses(url: str) -> set[tuple[str, int]]:
    """Addresses of the host and port of a URL."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with suppress(OSError):
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        return {(_plain(str(address[0])), port) for *_, address in found}
    return set()


def _samples(client: httpx.Client, url: str) -> list[Sample]:
    """Samples of the server's `/metrics`; empty if it has none, or no Prometheus text."""
    try:
        text = client.get(f"{url}/metrics", follow_redirects=True).raise_for_status().text
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except (httpx.HTTPError, ValueError):
        return []


def _plain(address: str) -> str:
    """An IPv4-mapped IPv6 address as IPv4."""
    return address.removeprefix("::ffff:")
