"""What is a secret, and how a person is shown something that may hold one. The only place that decides it.

A value is secret by the name of its variable, flag, header, JSON key or URL parameter, inside a shell command too,
or as the password of a URL, a login (`-u user:password`) or an ODBC string. Names are judged by their words, so that
`MAX_TOKENS`, `--tokenizer` and `TOKEN_FILE` (a path) are no secrets.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from grpo_engine.wire.environment_variables import SECRET_ARGUMENT_PREFIX

MASK = "***"
MIN_SECRET_CHARS = 8
"""Shorter values are words like `true` and `1`, which would be masked wherever they stand in a text."""

MAX_NAME_CHARS = 512
"""Longer names are no program's: what they name is masked, and no pattern is tried on them. All patterns take time in
proportion to the text: command lines of other users' processes are shown, too."""

_SECRET = re.compile(
    "SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|AUTHORIZATION"
    "|(?:API|ACCESS|PRIVATE|ENCRYPTION)_?KEY|(?:ACCESS|AUTH|API|BEARER)_?TOKEN"
    r"|(?:KEYS?|TOKEN|COOKIE|JWT|DSN|(?<!BY)(?<!COM)PASS|_PWD|WEBHOOK|WEBHOOK_URL)$|(?:^|_)(?:AUTH|PW|PAT)$"
    r"|(?:SLACK|DISCORD|TEAMS|MATTERMOST)_HOOK(?:_URL)?$"
    r"|(?:DATABASE|DB|REDIS|POSTGRES\w*|PG|MYSQL|MONGO\w*|AMQP|BROKER)_UR[LI]$"
)
"""Found in a name that is in capitals, its words joined by underscores, without a number at its end."""
_HARMLESS = re.compile(r"(?:FILE|PATH|DIR|FOLDER)S?$|^(?:BOS|EOS|PAD|UNK|STOP)_TOKEN$")
"""Where a secret is kept is none, nor is what a tokenizer calls a token."""
_URL_PASSWORD = re.compile(r"(?P<before>\b[a-zA-Z][\w+.-]{0,31}://[^\s/:?#'\"]*:)(?P<secret>[^\s/'\"]+)(?=@)")
_URL_WORD = re.compile(r"\A[a-zA-Z][\w+.-]{0,31}://[^\s/:?#@]*:(?P<secret>[^\s/?#@]+)(?=@)")
"""A word that is a URL: quotes are part of it."""
_URL_TOKEN = re.compile(r"(?P<before>\bhttps?://)(?P<secret>[^\s/:@?#'\"]+)(?=@)")
_URL_HOOK = re.compile(
    r"(?P<before>\bhttps://(?:hooks\.[\w.-]+|[\w.-]+/(?:api/)?(?:web)?hooks?)/)(?P<secret>[^\s'\"]+)"
)
_URL_PARAMETER = re.compile(r"(?P<before>[?&](?P<name>[\w.-]+)=)(?P<secret>[^\s&#'\"]+)")
_NAMED = re.compile(
    r"(?<![\w-])(?P<flag>--?[a-zA-Z][\w.-]{0,63})\\*['\"]?(?P<sign>=|\s+)"
    r"|(?<![\w.?&-])(?!(?:auth|keys?)=)(?P<variable>[a-zA-Z_][\w.-]{0,63})="
    r"|(?<![\w./:-])(?:-H)?(?!(?:auth|keys?):)(?P<header>[a-zA-Z_][\w-]{0,63})\\*['\"]?\s*:(?!/)\s*"
    r"|;(?P<odbc>[pP][wW][dD])=(?!/)"
)
"""What stands before a value. `key=len` and `auth:app` are code; capitals, a flag or quotes make secrets of them."""
_JSON_WORD = re.compile(r"(?P<name>(?:-{0,2}[a-zA-Z_][\w.-]{0,63}=)?)(?P<json>[{\[].*)", re.DOTALL)
_LOGIN = re.compile(
    r"(?P<before>(?<![\w-])(?:-u\s*|--(?:proxy-)?user[=\s]\s*)(?P<quote>['\"])?(?!\d+:\d+(?!\S))[^\s:/='\"]{1,255}:)"
    r"(?P<secret>(?(quote)[^'\"]+|[^\s'\"]+))"
)
"""`-u user:password`, as curl takes it; `--user 1000:1000` are the numbers of a user and a group."""
_LOGIN_WORD = re.compile(r"(?!\d+:\d+$)(?P<before>[^\s:/=]+:)(?P<secret>.+)", re.DOTALL)
_LOGIN_FLAGS = ("-u", "--user", "--proxy-user")
_VALUE = re.compile(
    r"(?P<quote>\\{0,32}['\"])(?P<quoted>(?:(?!(?P=quote))(?:\\.|.))*)(?:(?P=quote)|\Z)"
    r"|(?P<bare>\\{33}\S*|[\[{][^\]}]*(?:[\]}]|\Z)|(?:(?i:basic|bearer|token)\s+)?[^\s'\";]+)",
    re.DOTALL,
)
"""Before a quote JSON in JSON has some backslashes; of thousands each comparison with them would take as long."""
_UNTIL = {quote: re.compile(rf"(?:[^\\{quote}]|\\++(?!{quote}))+") for quote in ("'", '"')}
_FLAG_NAME = re.compile(r"-[\w.-]+")
_FLAG = re.compile(r"--[a-zA-Z][\w.-]*(?:=.*)?", re.DOTALL)


def is_secret_name(name: str) -> bool:
    """Whether the value of a variable, flag, setting or header of this name is a secret."""
    if len(name) > MAX_NAME_CHARS:
        return True
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip("-"))
    plain = re.sub(r"[^A-Z0-9]+", "_", words.upper()).strip("_")
    plain = re.sub(r"_?\d+$", "", plain)
    return _SECRET.search(plain) is not None and _HARMLESS.search(plain) is None


def masked_value(name: str, value: str) -> str:
    """The value of a variable or setting, as it may be shown."""
    return MASK if value and is_secret_name(name) else _word(value)[0]


def masked_variables(variables: Mapping[str, str], secret: Iterable[str] = ()) -> dict[str, str]:
    """Environment variables as they may be shown; those named in `secret` are masked whatever their name."""
    hidden = frozenset(secret)
    return {name: MASK if name in hidden else masked_value(name, value) for name, value in variables.items()}


def masked_argv(argv: Sequence[str]) -> list[str]:
    """A command line as it may be shown: `--api-key …`, `--token=…`, `SOME_SECRET=…`, headers, JSON and URLs masked."""
    return [shown for shown, _ in _words(argv)]


def without_secrets(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """A command line that every user may read, and the words masked in it, as variables for `with_secrets`."""
    shown = masked_argv(argv)
    hidden = [word for word, public in zip(argv, shown, strict=True) if MASK in public]
    return shown, {f"{SECRET_ARGUMENT_PREFIX}{number}": word for number, word in enumerate(hidden)}


def with_secrets(argv: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """The command line that `without_secrets` was given; others as they are."""
    numbers = itertools.count()
    return [variables.get(f"{SECRET_ARGUMENT_PREFIX}{next(numbers)}", word) if MASK in word else word for word in argv]


def masked_settings(document: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name, tables nested, as they may be shown."""
    return _table(document, [])


def _table(document: Mapping[str, Any], secrets: list[str]) -> dict[str, Any]:
    """As `masked_settings`; adds the secrets to `secrets`."""
    return {key: _setting(key, value, secrets) for key, value in document.items()}


def _setting(key: str, value: Any, secrets: list[str]) -> Any:
    match value:
        case "":
            return value
        case str() if is_secret_name(key):
            secrets.append(value)
            return MASK
        case str():
            return _noted([_word(value)], secrets)[0]
        case dict() if is_secret_name(key):
            return {name: _setting(key, each, secrets) for name, each in value.items()}
        case dict():
            return _table(value, secrets)
        case list() if all(isinstance(each, str) for each in value) and not is_secret_name(key):
            return _noted(_words(value), secrets)
        case list():
            return [_setting(key, each, secrets) for each in value]
        case _:
            return value


def _noted(words: Iterable[tuple[str, list[str]]], secrets: list[str]) -> list[str]:
    """The words as they may be shown; adds the secrets in them to `secrets`."""
    shown: list[str] = []
    for word, found in words:
        shown.append(word)
        secrets += found
    return shown


def masked_text(text: str, secrets: Iterable[str] = ()) -> str:
    """A text as it may be shown: passwords in URLs are masked, and each of `secrets`, the longest first."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    for pattern in (_URL_PASSWORD, _URL_TOKEN, _URL_HOOK):
        text = pattern.sub(rf"\g<before>{MASK}", text)
    return _URL_PARAMETER.sub(lambda found: found["before"] + MASK if is_secret_name(found["name"]) else found[0], text)


def secret_values(variables: Mapping[str, str], argv: Sequence[str] = ()) -> set[str]:
    """Secrets in variables and on a command line that are long enough to be masked wherever they stand."""
    named = {value for name, value in variables.items() if is_secret_name(name)}
    words = [*_words(argv), *map(_word, variables.values())]
    given = {secret for _, secrets in words for secret in secrets}
    texts = [*variables.values(), *argv]
    in_urls = {found["secret"] for text in texts for found in _URL_PASSWORD.finditer(text)}
    return {value for value in named | given | in_urls if len(value) >= MIN_SECRET_CHARS}


def longest_first(secrets: Iterable[str]) -> list[str]:
    """In the order in which `masked_text` needs them: one secret may be part of another."""
    return sorted(secrets, key=len, reverse=True)


def _words(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each word of a command line as it may be shown, and the secrets in it."""
    words: list[tuple[str, list[str]]] = []
    before = ""
    for word in argv:
        is_value = _FLAG_NAME.fullmatch(before) and is_secret_name(before)
        if is_value and not _FLAG.fullmatch(word):  # a flag may have a secret's name and take no value
            words.append((MASK, [word]))
        elif before in _LOGIN_FLAGS and (login := _LOGIN_WORD.fullmatch(word)):
            words.append((login["before"] + MASK, [login["secret"]]))
        else:
            words.append(_word(word))
        before = word
    return words


def _word(text: str) -> tuple[str, list[str]]:
    """A word, which may be a command, a header, JSON or a connection string, as it may be shown; the secrets in it."""
    text, secrets = _json(text)
    shown: list[str] = []
    end = 0
    spans = [found.span("secret") for pattern in (_LOGIN, _URL_WORD) for found in pattern.finditer(text)]
    for start, behind in sorted([*_named_values(text), *spans]):
        if start < end or start == behind:
            continue
        shown += [text[end:start], MASK]
        secrets.append(text[start:behind])
        end = behind
    return masked_text("".join([*shown, text[end:]])), secrets


def _json(text: str) -> tuple[str, list[str]]:
    """A word that is JSON, or has it behind a name, with the secrets masked that its structure shows, and these."""
    found = _JSON_WORD.fullmatch(text)
    if found is None:
        return text, []
    secrets: list[str] = []
    try:
        given = json.loads(found["json"])
        shown = _setting("", given, secrets)
        separators = (", ", ": ") if '": ' in text else (",", ":")
        return (text if shown == given else found["name"] + json.dumps(shown, separators=separators)), secrets
    except (ValueError, RecursionError):
        return text, []


def _named_values(text: str) -> Iterator[tuple[int, int]]:
    """Where the values behind names of secrets are."""
    end = 0
    for found in _NAMED.finditer(text):
        name = found["flag"] or found["variable"] or found["header"]
        if found.start() < end or not (found["odbc"] or name == "Pwd" or is_secret_name(name)):
            continue
        is_next_word = (found["sign"] or "=") != "="
        quote = text[max(0, found.start() - 1) : found.start()]
        if found.start() == 0 and not is_next_word:
            span = found.end(), len(text)
        elif quote in _UNTIL and quote not in found[0] and not is_next_word:
            value = _UNTIL[quote].match(text, found.end())
            span = value.span() if value else (0, 0)
        else:
            value = _VALUE.match(text, found.end())
            is_flag = is_next_word and value is not None and _FLAG.fullmatch(value[0])
            span = (0, 0) if value is None or is_flag else value.span("bare" if value["bare"] else "quoted")
        yield span
        end = span[1]
