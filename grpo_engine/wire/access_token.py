"""The token of a run, without which its services refuse what would steer it.

Made when a run is opened, and left in a file of the run folder that only its owner can read. The supervisor gives every
service the path of that file in its environment; the services and their clients read it here.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from grpo_engine.errors import ConfigError
from grpo_engine.wire.codec import write_atomically
from grpo_engine.wire.environment_variables import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from grpo_engine.wire.run_folder import TOKEN_FILE

_NUM_BYTES = 32


def write_token(run_folder: Path, token: str | None = None) -> None:
    """Write the token of a run, a new one where none is given."""
    content = token or secrets.token_urlsafe(_NUM_BYTES)
    write_atomically(run_folder / TOKEN_FILE, f"{content}\n".encode(), mode=0o600)


def find_token(environment: Mapping[str, str]) -> str | None:
    """The token of this process: `$GRPO_API_TOKEN`, else that in the file of `$GRPO_API_TOKEN_FILE`; None without both.

    Raises:
        ConfigError: the file cannot be read, or is empty; or no header can carry the token.
    """
    if token := environment.get(TOKEN_VARIABLE, "").strip():
        return _sendable(token, where=f"${TOKEN_VARIABLE}")
    file = environment.get(TOKEN_FILE_VARIABLE)
    return read_token(Path(file), where=f"${TOKEN_FILE_VARIABLE}") if file else None


def read_token(file: Path, *, where: str) -> str:
    """The token in the first line of a file; `where` is the setting that names it.

    Raises:
        ConfigError: the file cannot be read, or is empty; or no header can carry the token.
    """
    try:
        token = file.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{where} {file}: cannot be read: {why}; correct the path") from None
    if not token:
        raise ConfigError(f"{where} {file}: the first line is empty: write the token there")
    return _sendable(token, where=f"{where} {file}")


def authorization(token: str | None) -> dict[str, str]:
    """The headers that carry a token.

    Raises:
        ConfigError: they cannot.
    """
    return {"Authorization": f"Bearer {_sendable(token, where='token or api_key')}"} if token else {}


def _sendable(token: str, *, where: str) -> str:
    """The token, of which the errors of HTTP libraries, which are logged, would show one that is no header."""
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"{where}: has a line end or another character that no HTTP header carries: remove it")
    return token


def url_with_token(url: str, token: str | None) -> str:
    """A URL from which clients that cannot set headers send the token, as the password of HTTP's basic scheme."""
    if not token:
        return url
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"run:{quote(token, safe='')}@{host}"))
