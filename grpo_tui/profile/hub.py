"""The model hub, as its clients will use it: its cache, its address, its token, and whether it has a model.

A model in the cache needs no hub. For others, one request each, all at once and together limited to `LIMIT_S`.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from grpo_engine.wire.codec import read_whole

LIMIT_S = 0.8
"""For all answers; what a hub that has not accepted a connection by then would have answered is not known."""
REACHED = 200
TRUE = frozenset({"1", "ON", "YES", "TRUE"})
NO_WAY_THERE = frozenset({errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH})
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""In one file; in several (`…-1-of-2…`), beside an index of this name."""
OWN_VARIABLES = ("HF_", "TRANSFORMERS_OFFLINE", "VLLM_USE_MODELSCOPE")
"""How variables begin that give a process another hub, cache or token."""

CacheState = Literal["complete", "partial", "absent"]


class HubProblem(NamedTuple):
    """Why a model or data set may not load from the hub."""

    text: str
    hint: str
    """What to do."""
    is_certain: bool = True
    """Whether it cannot load; else the hub may only be slow, and may answer when a service asks."""


def cache_state(name: str) -> CacheState:
    """How much of a model, or of a data set (`datasets/owner/name`), is in the cache.

    Judged by the snapshot of `main`, which the clients load without a network. A download that was killed leaves
    `*.incomplete` also after a later one has succeeded.
    """
    if name.startswith("datasets/"):
        owner_and_name = name.removeprefix("datasets/")
        prepared = Path(os.path.expanduser(os.environ.get("HF_DATASETS_CACHE") or hub_home() / "datasets"))
        if (prepared / owner_and_name.replace("/", "___")).is_dir():
            return "complete"
        folder, is_whole = hub_cache() / f"datasets--{owner_and_name.replace('/', '--')}", _has_data
    else:
        folder, is_whole = hub_cache() / f"models--{name.replace('/', '--')}", _has_weights
    try:
        revision = (folder / "refs" / "main").read_text().strip()
    except OSError:
        revision = ""
    if revision and is_whole(folder / "snapshots" / revision):
        return "complete"
    return "partial" if (folder / "blobs").is_dir() else "absent"


def known_config(name: str) -> Mapping[str, Any] | None:
    """The `config.json` of a model that is on this machine: a folder, made here, or in the hub's cache."""
    from grpo_engine.models.config import is_from_hub  # here, since few commands need it
    from grpo_engine.models.local import LOCAL_MODELS, local_model_folder

    if name in LOCAL_MODELS:
        folder = local_model_folder(name)
    elif not is_from_hub(name):
        folder = Path(os.path.expanduser(name))
    else:
        cached = hub_cache() / f"models--{name.replace('/', '--')}"
        try:
            folder = cached / "snapshots" / (cached / "refs" / "main").read_text().strip()
        except OSError:
            return None
    try:
        config = json.loads(read_whole(folder / "config.json"))
    except (OSError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def _has_weights(snapshot: Path) -> bool:
    """Whether there are a config and weights, and every file that the index of the weights names."""
    if not (snapshot / "config.json").exists():
        return False
    for name in WEIGHTS:
        try:
            files = set(json.loads(read_whole(snapshot / f"{name}.index.json"))["weight_map"].values())
        except FileNotFoundError:
            wholes = (path for path in snapshot.glob(f"*{Path(name).suffix}") if "-of-" not in path.name)
            if any(path.exists() for path in wholes):
                return True
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            return False
        else:
            return all((snapshot / file).exists() for file in files)
    return False


def _has_data(snapshot: Path) -> bool:
    """Whether there is a file besides the card; which belong to a data set is not listed in it."""
    return any(path.is_file() and path.name not in ("README.md", ".gitattributes") for path in snapshot.rglob("*"))


def hub_home() -> Path:
    """Folder of the hub's clients."""
    return Path(os.path.expanduser(os.environ.get("HF_HOME") or "~/.cache/huggingface"))


def hub_cache() -> Path:
    """Folder of the models that they have loaded."""
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or hub_home() / "hub"))


def hub_token() -> str | None:
    """The token of the user, if there is one; without line ends, as the hub's clients take it."""
    file = Path(os.path.expanduser(os.environ.get("HF_TOKEN_PATH") or hub_home() / "token"))
    try:
        given = "".join(os.environ.get("HF_TOKEN", "").splitlines()).strip()
        return given or "".join(file.read_text().splitlines()).strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def is_offline() -> bool:
    """Whether the clients are told to use their cache alone."""
    return any(os.environ.get(name, "").upper() in TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def has_own_hub(environment: Mapping[str, str]) -> bool:
    """Whether a process with these variables may use another hub, cache or token than this one."""
    return any(name.startswith(OWN_VARIABLES) for name in environment)


def hub_problems(names: Sequence[str]) -> dict[str, HubProblem]:
    """What keeps models and data sets from being loaded, by name. Takes `LIMIT_S` at most."""
    if not names:
        return {}
    instead = "give a folder, or set HF_HOME to a cache that has it"
    if is_offline():
        return {
            name: HubProblem(f"{_shown(name)} is not completely in the hub's cache, and HF_HUB_OFFLINE is set", instead)
            for name in names
        }
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    answers: dict[str, int | _Unreached] = {}
    threads = [threading.Thread(target=_ask, args=(endpoint, name, answers), daemon=True) for name in names]
    deadline = time.monotonic() + LIMIT_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    problems: dict[str, HubProblem] = {}
    for name in names:
        match answers.get(name, _LATE):
            case 401 | 403 | 404 as status:
                token = "" if hub_token() else " (no token is set: `hf auth login`, or export HF_TOKEN=…)"
                text = (
                    f"{_shown(name)}: {endpoint} answers {status}: there is no such repository, or you have no access"
                )
                hint = f"correct the name, or accept its terms on {endpoint}/{name}{token}"
                problems[name] = HubProblem(text, hint)
            case _Unreached(error, is_certain):
                reach = "cannot be reached" if is_certain else "was not reached"
                text = f"{_shown(name)} is not completely in the hub's cache, and {endpoint} {reach} ({error})"
                hint = f"{instead}, or HF_ENDPOINT to a hub that can be reached"
                problems[name] = HubProblem(text, hint, is_certain)
    return problems


class _Unreached(NamedTuple):
    error: str
    is_certain: bool


_LATE = _Unreached(f"no answer within {LIMIT_S:g} s", is_certain=False)


def _unreached(error: BaseException | str) -> _Unreached:
    """An error, which is certain where it says that there is no way to the hub, or no host of that name."""
    match error:
        case socket.gaierror():
            is_certain = error.errno != socket.EAI_AGAIN
        case OSError():
            is_certain = error.errno in NO_WAY_THERE
        case _:
            is_certain = isinstance(error, ValueError)  # the address is none
    return _Unreached(getattr(error, "strerror", None) or str(error) or type(error).__name__, is_certain)


def _shown(name: str) -> str:
    return name.removeprefix("datasets/")


def _ask(endpoint: str, name: str, answers: dict[str, int | _Unreached]) -> None:
    """Ask for a small file of a repository; puts the status, or why there is none, into `answers`.

    A hub that accepts a connection counts as reachable until it answers, which may take longer than the limit. Runs in
    a thread that is left behind then: a look-up of a host name cannot be interrupted.
    """
    import http.client  # here, since most profiles ask nothing
    import ssl
    import urllib.error
    import urllib.request

    class _Stays(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:
            """Where the file is stored does not matter."""

    file = "README.md" if name.startswith("datasets/") else "config.json"
    try:
        request = urllib.request.Request(f"{endpoint}/{name}/resolve/main/{file}", method="HEAD")
        if (token := hub_token()) is not None:
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        proxy = None if urllib.request.proxy_bypass(request.host) else urllib.request.getproxies().get(request.type)
        address = urlsplit(proxy or endpoint)
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), timeout=LIMIT_S).close()
        answers[name] = REACHED
        with urllib.request.build_opener(_Stays).open(request, timeout=LIMIT_S) as answer:
            answers[name] = answer.status
    except urllib.error.HTTPError as error:
        answers[name] = error.code
    except urllib.error.URLError as error:
        # Whether a certificate is valid is decided by the clients, which may have authorities of their own.
        is_reached = isinstance(error.reason, ssl.SSLError | TimeoutError)
        answers[name] = REACHED if is_reached else _unreached(error.reason)
    except TimeoutError:
        answers.setdefault(name, _LATE)
    except (OSError, ValueError, http.client.HTTPException) as error:
        answers[name] = _unreached(error)
