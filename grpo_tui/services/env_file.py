"""Files of `NAME=value` lines, as `env_files` names them.

Values are taken as they stand, as systemd's `EnvironmentFile` and `docker run --env-file` do: a password may hold `${`,
and a profile's own `env` puts nothing in either. Quotes, `export`, comments and values of several lines are read as
Docker Compose reads them.
"""

from __future__ import annotations

from pathlib import Path

from grpo_engine.errors import ConfigError


def read_env_file(path: Path, *, where: str) -> dict[str, str]:
    """The variables of a file. A bare `NAME` adds none, since a service inherits what the supervisor has.

    Raises:
        ConfigError: missing, unreadable, or with a line that means nothing; never with the line itself, which may hold
            a secret.
    """
    from dotenv.parser import parse_stream  # here, since most profiles have no such file; it alone names a bad line

    try:
        with path.open(encoding="utf-8-sig") as file:
            bindings = list(parse_stream(file))
    except OSError as error:
        raise ConfigError(f"{where}: {path}: cannot be read: {error.strerror or error}; mend the path") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: {path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    for binding in bindings:
        if binding.error:
            text = binding.original.string
            line = binding.original.line + text[: len(text) - len(text.lstrip())].count("\n")
            raise ConfigError(f"{where}: {path}, line {line}: no NAME=value line; mend it, or put a # before it")
        if "\0" in binding.original.string:
            line = binding.original.line
            raise ConfigError(f"{where}: {path}, line {line}: a NUL character, which no variable can hold: take it out")
    return {each.key: each.value for each in bindings if each.key is not None and each.value is not None}
