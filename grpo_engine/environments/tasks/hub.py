"""Rows of data sets from the Hugging Face hub, for the tasks that have one."""

from __future__ import annotations

import logging
import os
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from grpo_engine.errors import ConfigError, PeerError
from grpo_engine.wire.token_clients import open_client

log = logging.getLogger(__name__)

_HUB_WITHIN_S = 5.0


def hub_rows(name: str, *, split: str, task: str, instead: str, config: str | None = None) -> list[Mapping[str, Any]]:
    """Every row of a split of a published data set, from the hub or its cache.

    Args:
        config: name of the data set's configuration, if it has several.
        task: for the message.
        instead: what to do without the hub, for the message.

    Raises:
        ConfigError: `datasets` is not installed, or the data set cannot be loaded.
    """
    set_offline_if_unreachable()
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"task {task}: task.path is not set and the package `datasets` is not installed: {instead}"
        ) from None
    _close_locks(Path(datasets.config.HF_DATASETS_CACHE), name)
    try:
        return list(datasets.load_dataset(name, config, split=split))
    # The hub's client raises errors of requests, huggingface_hub and its own; each means that it cannot be loaded.
    except Exception as error:
        raise ConfigError(f"task {task}: {name} cannot be loaded ({error}): {instead}") from error


def _close_locks(cache: Path, name: str) -> None:
    """Remove lock files of ours that others may read: whoever may open one can hold it, and `datasets` waits.

    Other programs made them, with the usual umask; ours are for this user alone. What a group may write to stays: it
    shares the cache.
    """
    owner_and_name = name.replace("/", "___")
    for lock in (*cache.glob("*.lock"), *(cache / owner_and_name).rglob("*.lock")):
        with suppress(OSError):
            status = lock.lstat()
            is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if is_ours and status.st_mode & 0o044 and not status.st_mode & 0o022:
                lock.unlink()


def set_offline_if_unreachable() -> None:
    """Set HF_HUB_OFFLINE if the hub is unreachable: its client would retry for half a minute. The cache still works.

    The client reads the variable once, at import.
    """
    if "huggingface_hub" in sys.modules or os.environ.get("HF_HUB_OFFLINE"):
        return
    hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    url = urlsplit(hub)
    proxy = None if proxy_bypass(url.netloc) else getproxies().get(url.scheme)
    try:
        with open_client(None, transport=httpx.HTTPTransport(proxy=proxy), timeout=_HUB_WITHIN_S) as client:
            client.head(hub)
    except httpx.ConnectError as error:
        log.warning("%s cannot be reached (%s): using only cached data", hub, error)
        os.environ["HF_HUB_OFFLINE"] = "1"
    except (httpx.HTTPError, httpx.InvalidURL, PeerError, ValueError):
        return  # reachable, or no URL; its client reports any error
