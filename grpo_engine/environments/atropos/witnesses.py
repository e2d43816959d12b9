"""Who knows whether an environment asks the inference server: its own connections, and counters of both its servers.

Connections are those of its processes alone, but a request that is over at once is easily missed; counters miss
nothing, but count everybody. Both work with a stock vLLM and a stock `run-api`, which count and tell less.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?$")
"""One line of Prometheus' text format: name, labels, value, and maybe a time."""
_REQUESTS = ("vllm:request_success_total", "vllm:num_requests_running", "vllm:num_requests_waiting")
_GROUPS = "grpo_api_groups_total"
_ENVIRONMENT = re.compile(r'environment="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What the rollout API says about the run."""

    batch_size: int
    """Sequences; below 1 before a trainer has registered."""
    queued: int
    """Sequences that wait."""
    step: int
    num_steps: int | None
    """None: the API does not say."""
    environments: tuple[str, ...] | None
    """Names of those that were heard of lately; None: the API does not say."""

    def knows(self, name: str | None) -> bool | None:
        """Whether an environment of a name, or any, is registered; None when the API does not say."""
        if self.environments is None:
            return None
        return any(name is None or each.rpartition("_")[0] == name for each in self.environments)

    @property
    def is_starving(self) -> bool:
        """Whether less than a batch is there for a trainer that is."""
        is_over = self.num_steps is not None and self.step >= self.num_steps
        return self.batch_size > 0 and self.queued < self.batch_size and not is_over


@dataclass(slots=True)
class Api:
    """The rollout API, as anybody may ask it."""

    client: httpx.Client
    url: str

    def asks_for_a_token(self) -> bool | None:
        """Whether it refuses those without one; None when it does not answer."""
        try:
            return self.client.get(f"{self.url}/status").status_code == httpx.codes.UNAUTHORIZED
        except httpx.HTTPError:
            return None

    def want(self, group_size: int) -> Want | None:
        """Where the run stands; None when it does not answer. A stock API counts groups, of `group_size` sequences."""
        try:
            info: dict[str, Any] = self.client.get(f"{self.url}/info").raise_for_status().json()
            status: dict[str, Any] = self.client.get(f"{self.url}/status").raise_for_status().json()
            return Want(
                batch_size=int(info["batch_size"]),
                queued=int(status.get("queued_sequences", status["queue_size"] * group_size)),
                step=int(status["current_step"]),
                num_steps=status.get("num_steps"),
                environments=tuple(status["environments"]) if "environments" in status else None,
            )
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None

    def num_groups(self, name: str | None) -> float | None:
        """Groups that came from an environment of a name, or from all; None where it does not count."""
        of = re.compile(rf"{re.escape(name)}_\d+" if name is not None else ".*")
        counts = [
            value
            for sample, labels, value in _samples(self.client, self.url)
            if sample == _GROUPS and (found := _ENVIRONMENT.search(labels)) and of.fullmatch(found[1])
        ]
        return sum(counts) if counts else None


@dataclass(slots=True)
class Server:
    """The inference server, as anybody may ask it."""

    client: httpx.Client
    url: str

    def is_well(self) -> bool:
        """Whether `/health` answers 200, which environments wait for."""
        try:
            return self.client.get(f"{self.url}/health").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def num_requests(self) -> float | None:
        """A number that changes when requests come or end; None where it does not count."""
        counts = [value for name, _, value in _samples(self.client, self.url) if name in _REQUESTS]
        return sum(counts) if counts else None


@dataclass(slots=True)
class Connections:
    """Of a process and those below it."""

    pid: int
    server_url: str
    api_url: str
    elsewhere: set[str] = field(default_factory=set)
    """`address:port` of connections to neither."""

    def has_one_to_the_server(self) -> bool:
        """Whether one is open now; notes where the others lead."""
        server, api = addresses(self.server_url), addresses(self.api_url)
        found = set(self._peers())
        self.elsewhere.update(f"{address}:{port}" for address, port in found - server - api)
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
    """Where the host and port of a URL may lead."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with suppress(OSError):
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        return {(_plain(str(address[0])), port) for *_, address in found}
    return set()


def samples_of(text: str) -> Iterator[tuple[str, str, float]]:
    """`(name, labels, value)` of each line of Prometheus' text format."""
    for line in text.splitlines():
        if found := _SAMPLE.match(line):
            with suppress(ValueError):
                yield found[1], found[2] or "", float(found[3])


def _samples(client: httpx.Client, url: str) -> Iterable[tuple[str, str, float]]:
    try:
        return list(samples_of(client.get(f"{url}/metrics", follow_redirects=True).raise_for_status().text))
    except httpx.HTTPError:
        return []


def _plain(address: str) -> str:
    """An IPv4 address that is written as one of IPv6, without that."""
    return address.removeprefix("::ffff:")
