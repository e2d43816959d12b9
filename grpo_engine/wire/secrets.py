"""What is a secret, and how a person is shown something that may hold one. The only place that decides it.

A value is secret by the name of its variable, flag, header or URL parameter, or as the password in a URL. Names are
judged by their words, so that `MAX_TOKENS`, `--tokenizer` and `TOKEN_FILE` (a path) are no secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

MASK = "***"
MIN_SECRET_CHARS = 8
"""Shorter values are words like `true` and `1`, which would be masked wherever they stand in a text."""

_SECRET = re.compile(
    "SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|AUTHORIZATION"
    "|(?:API|ACCESS|PRIVATE|ENCRYPTION)_?KEY|(?:ACCESS|AUTH|API|BEARER)_?TOKEN"
    r"|(?:KEYS?|TOKEN|COOKIE|JWT|DSN|(?<!BY)(?<!COM)PASS|_PWD|WEBHOOK|WEBHOOK_URL)$|(?:^|_)AUTH$"
    r"|(?:DATABASE|DB|REDIS|POSTGRES\w*|PG|MYSQL|MONGO\w*|AMQP|BROKER)_UR[LI]$"
)
"""Found in a name that is in capitals, its words joined by underscores, without a number at its end."""
_PLACE = re.compile(r"(?:FILE|PATH|DIR|FOLDER)S?$")
"""Where a secret is kept is none."""
_URL_PASSWORD = re.compile(r"(?P<before>\b[a-zA-Z][\w+.-]*://[^\s/:@?#'\"]*:)(?P<secret>[^\s/@'\"]+)(?=@)")
_URL_TOKEN = re.compile(r"(?P<before>\bhttps?://)(?P<secret>[^\s/:@?#'\"]+)(?=@)")
_URL_PARAMETER = re.compile(r"(?P<before>[?&](?P<name>[\w.-]+)=)(?P<secret>[^\s&#'\"]+)")
_IN_SHELL = re.compile(r"(?P<before>\b(?P<name>[A-Z][A-Z0-9_]*)=|(?P<flag>--[\w-]+)[= ])(?P<secret>[^\s'\"]+)")
"""In a command that is one word of another, as after `sh -c`."""
_HEADER = re.compile(r"(?P<name>[\w-]+):\s+(?P<secret>.+)", re.DOTALL)


def is_secret_name(name: str) -> bool:
    """Whether the value of a variable, flag, setting or header of this name is a secret."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip("-"))
    plain = re.sub(r"[^A-Z0-9]+", "_", words.upper()).strip("_")
    plain = re.sub(r"_?\d+$", "", plain)
    return _SECRET.search(plain) is not None and _PLACE.search(plain) is None


def masked_value(name: str, value: str) -> str:
    """The value of a variable or setting, as it may be shown."""
    return MASK if value and is_secret_name(name) else masked_text(value)


def masked_variables(variables: Mapping[str, str], secret: Iterable[str] = ()) -> dict[str, str]:
    """Environment variables as they may be shown; those named in `secret` are masked whatever their name."""
    return {name: MASK if name in set(secret) else masked_value(name, value) for name, value in variables.items()}


def masked_argv(argv: Sequence[str]) -> list[str]:
    """A command line as it may be shown: `--api-key …`, `--token=…`, `SOME_SECRET=…`, headers and URLs masked."""
    return [shown for shown, _ in _words(argv)]


def masked_text(text: str, secrets: Iterable[str] = ()) -> str:
    """A text as it may be shown: passwords in URLs are masked, and each of `secrets`, the longest first."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    for pattern in (_URL_PASSWORD, _URL_TOKEN):
        text = pattern.sub(rf"\g<before>{MASK}", text)
    return _URL_PARAMETER.sub(lambda found: found["before"] + masked_value(found["name"], found["secret"]), text)


def secret_values(variables: Mapping[str, str], argv: Sequence[str] = ()) -> set[str]:
    """Secrets in variables and on a command line that are long enough to be masked wherever they stand."""
    named = {value for name, value in variables.items() if is_secret_name(name)}
    given = {secret for _, secrets in _words(argv) for secret in secrets}
    texts = [*variables.values(), *argv]
    in_urls = {found["secret"] for text in texts for found in _URL_PASSWORD.finditer(text)}
    return {value for value in named | given | in_urls if len(value) >= MIN_SECRET_CHARS}


def longest_first(secrets: Iterable[str]) -> list[str]:
    """In the order in which `masked_text` needs them: one secret may be part of another."""
    return sorted(secrets, key=len, reverse=True)


def _words(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each word of a command line as it may be shown, and the secrets in it."""
    words: list[tuple[str, list[str]]] = []
    is_value = False
    for word in argv:
        name, equals, value = word.partition("=")
        is_flag = is_secret_name(name) and name.startswith("-") and not equals
        header = _HEADER.fullmatch(word)
        if is_value:
            words.append((MASK, [word]))
        elif value and " " not in name and is_secret_name(name):
            words.append((f"{name}={MASK}", [value]))
        elif header and is_secret_name(header["name"]):
            words.append((f"{header['name']}: {MASK}", [header["secret"]]))
        else:
            words.append(_shell_word(word))
        is_value = is_flag and not is_value
    return words


def _shell_word(word: str) -> tuple[str, list[str]]:
    secrets: list[str] = []

    def mask(found: re.Match[str]) -> str:
        if not is_secret_name(found["name"] or found["flag"]):
            return found[0]
        secrets.append(found["secret"])
        return found["before"] + MASK

    return masked_text(_IN_SHELL.sub(mask, word) if " " in word else word), secrets
