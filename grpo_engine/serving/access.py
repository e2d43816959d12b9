"""Access control of the HTTP services, by the headers of a request; the same for all of them.

Every program of every user on the machine reaches a loopback port, and so does every web page in a browser there. Other
users are refused by the token of the run, which only its owner can read; web pages by the origin that browsers send.
A page whose own host name resolves to loopback (DNS rebinding) is of the same origin, so a service that listens on
loopback answers under names of this machine only, unless the request carries the token.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import re
import socket
from collections.abc import Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, auto
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from grpo_engine.wire.environment_variables import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from grpo_engine.wire.run_folder import TOKEN_FILE

TOKEN_REQUIRED = (
    "this route requires a token: send Authorization: Bearer <token>. That of a run is in the file "
    f"{TOKEN_FILE} of its folder, and our own commands read the file that ${TOKEN_FILE_VARIABLE} names. For clients "
    "that can send none, set allow_without_token in the profile"
)
TOKEN_HEADERS = {"WWW-Authenticate": "Bearer"}
"""Of an answer with status 401."""
_HOST = re.compile(r"(?:\[(?P<bracketed>[^]]*)\]|(?P<plain>[^:]*))(?::\d*)?")
TOKEN_KEY = "grpo_engine.token"
ON_TOKEN_KEY = "grpo_engine.on_token"
"""Of a scope: what is called with the `Token` of the request, by which its connection knows who is at the other end."""


class Token(Enum):
    """What a request has of the service's token."""

    NONE_SET = auto()
    """The service has none."""
    RIGHT = auto()
    WRONG = auto()
    """Another one, or none."""


@dataclass(slots=True, kw_only=True)
class Caller:
    """Who sent the request that is being answered."""

    token: Token = Token.NONE_SET
    num_logprobs: int = 0
    """Log-probabilities that it has asked for so far, in all of its prompts."""
    logprob_cost: int = 1
    """As how many each counts, by the time that an answer of this route takes for it."""


_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)


def caller() -> Caller:
    """The sender of the request that this task answers; outside of `AccessControl` one of a service without a token."""
    return _caller.get() or Caller()


def token_of(scope: Scope) -> Token:
    """What the request has of the token, as `AccessControl` found it."""
    found: Token = scope[TOKEN_KEY]
    return found


def is_loopback(host: str) -> bool:
    """Whether an address to listen on, or that of a peer, can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def token_for(url: str, token: str | None) -> str | None:
    """The token of a run, where an inference server at this URL may have it: on loopback, not on another machine."""
    return token if is_loopback(urlsplit(url).hostname or "") else None


def is_name_of_this_machine(host: str) -> bool:
    """Whether a Host header, which may have a port, is an IP address or this machine's name.

    No web page can have such a name: a browser looks up neither.
    """
    parts = _HOST.fullmatch(host)
    if parts is None:
        return False
    name = parts["bracketed"] or parts["plain"] or ""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.lower() in ("", "localhost", socket.gethostname().lower())
    return True


class AccessControl:
    """ASGI middleware that refuses requests of web pages, under a foreign name, and without a token."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        token: str | None,
        needs_token: Callable[[str], bool] = lambda path: False,
        allowed_origins: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """
        Args:
            host: address on which the application listens.
            token: the service's token; None: no request needs one.
            needs_token: whether requests of a path need it; routes may also ask `token_of` themselves.
            allowed_origins: of web pages that may ask nevertheless, `*` for all; called when a page asks.
        """
        self._app = app
        self._is_on_loopback = is_loopback(host)
        self._token = token.encode() if token else None
        self._needs_token = needs_token
        self._allowed_origins = allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or refuse it."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            token = self._token_in(headers)
            scope.get(ON_TOKEN_KEY, _ignore)(token)
            refusal = self._refusal(scope["path"], headers, token)
            if refusal is not None:
                await refusal(scope, receive, send)
                return
            scope[TOKEN_KEY] = token
            _caller.set(Caller(token=token))
        await self._app(scope, receive, send)

    def _token_in(self, headers: Headers) -> Token:
        if self._token is None:
            return Token.NONE_SET
        given = _credential(headers.get("authorization", ""))
        return Token.RIGHT if hmac.compare_digest(given, self._token) else Token.WRONG

    def _refusal(self, path: str, headers: Headers, token: Token) -> JSONResponse | None:
        origin, site, hosts = headers.get("origin"), headers.get("sec-fetch-site"), headers.getlist("host")
        is_own = origin is None or origin in {f"{scheme}://{host}" for scheme in ("http", "https") for host in hosts}
        is_foreign = not is_own or site not in (None, "none", "same-origin")
        if is_foreign and not {origin, "*"}.intersection(self._allowed_origins()):
            return JSONResponse({"detail": f"requests from web pages of {origin or 'another site'} are refused"}, 403)
        foreign = next((host for host in hosts if not is_name_of_this_machine(host)), None)
        if foreign is not None and self._is_on_loopback and token is not Token.RIGHT:
            detail = (
                f"Host {foreign!r} is not a name of this machine, so a web page may be behind it: ask for 127.0.0.1 or "
                f"localhost; or set ${TOKEN_VARIABLE} for this service and send the token"
            )
            return JSONResponse({"detail": detail}, 403)
        if token is Token.WRONG and self._needs_token(path):
            return JSONResponse({"detail": TOKEN_REQUIRED}, 401, TOKEN_HEADERS)
        return None


def _credential(authorization: str) -> bytes:
    """The token in an Authorization header; stock clients send it as the password in a URL, hence `Basic`."""
    scheme, _, value = authorization.partition(" ")
    given = value.strip().encode("latin-1")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(given, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return given if scheme.lower() == "bearer" else b""


def _ignore(token: Token) -> None:
    """Of requests that come from no connection of ours."""
