"""Settings of a parameter service. Torch-free: the terminal side builds command lines from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from grpo_engine.config import Config, LogLevel, checked_url
from grpo_engine.flags import Flag

Url = Annotated[str, AfterValidator(checked_url)]


class ParametersConfig(Config):
    """The parameter service: address, servers, and where versions are."""

    host: str = "127.0.0.1"
    """Address to listen on; on any but loopback other machines can read the weights, so set a token too."""
    port: int = Field(9201, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    server_urls: Annotated[tuple[Url, ...], Flag(("--server-urls", "--server-url"))] = ()
    """URLs of the inference servers of this machine, which are given each version one after another."""
    source: Url | None = None
    """URL of the parameter service of the trainer's machine, where this is another one: versions are fetched there."""
    machine: str | None = Field(None, min_length=1, max_length=255)
    """Name of this machine in a cluster. Of server_urls, which are then those of all machines, it takes those whose
    ports `ports.json` in the handover folder has, as the broker of the cluster writes it; and it reports to source,
    whose service then answers for all machines."""
    handover: Path = Path("handover")
    """Folder in which `current` is the newest version; servers that are given the same --handover read it as they
    start."""
    storage: Annotated[Path | None, Flag(("--storage",))] = None
    """Where versions are written, two at most; unset: /dev/shm, where they take three quarters at most of what is free
    there and in main memory; else the --handover folder."""
    allow_without_token: bool = False
    """Require no token, also under a supervisor."""
    log_level: LogLevel = "info"
    """Least severe level of the lines that are logged."""
