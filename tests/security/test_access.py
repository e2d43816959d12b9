"""Whom the HTTP services answer: by the token of the run, the origin of a web page, and the name that was asked for."""

from __future__ import annotations

import base64
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ports import free_port
from rollout_fakes import REGISTRATION, api_client
from serving import running_server, save_tiny_model
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from workplace import Workplace, open_workplace, service

from grpo_engine.bridges.transport.server_client import ServerClient
from grpo_engine.config import Config, checked_url
from grpo_engine.environments.atropos.config import AtroposEnvConfig
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.errors import ConfigError, PeerError
from grpo_engine.parameters.config import ParametersConfig
from grpo_engine.serving.access import AccessControl
from grpo_engine.train.config import TrainConfig
from grpo_engine.wire.access_token import authorization, find_token, url_with_token, write_token
from grpo_tui.supervisor.keeper.proc import command_line

TOKEN = {"Authorization": "Bearer secret"}
PAGE = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
REBOUND = {"Host": "evil.example:8000"}


def guarded(**settings: Any) -> httpx.AsyncClient:
    app = Starlette(routes=[Route("/{path:path}", lambda request: PlainTextResponse("done"), methods=["GET", "POST"])])
    access = AccessControl(app, **{"host": "127.0.0.1", "token": None, **settings})
    return httpx.AsyncClient(transport=httpx.ASGITransport(access), base_url="http://127.0.0.1:8000")


# --- the name that was asked for -------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [REBOUND, {**REBOUND, "Origin": "http://evil.example:8000"}])
async def test_a_name_that_a_page_made_resolve_to_loopback_is_refused_with_the_name(headers: dict[str, str]) -> None:
    async with guarded() as client:
        answer = await client.post("/generate", headers=headers)
        assert (answer.status_code, "'evil.example:8000' is not a name of this machine" in answer.text) == (403, True)
        assert "127.0.0.1 or localhost" in answer.json()["detail"]
        for host in ("[::1].evil.example", "[::1]evil", "localhost:80.evil.example"):
            assert (await client.post("/generate", headers={"Host": host})).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "[::1]:8000", "10.0.0.7:8000"])
async def test_an_address_or_this_machines_name_is_answered(host: str) -> None:
    async with guarded() as client:
        assert (await client.get("/", headers={"Host": host})).status_code == 200


async def test_the_second_of_two_host_headers_is_looked_at_too() -> None:
    async with guarded() as client:
        headers = [("Host", "localhost"), ("Host", "evil.example")]
        assert (await client.get("/", headers=headers)).status_code == 403


async def test_with_the_token_any_name_is_answered_and_with_another_none() -> None:
    async with guarded(token="secret") as client:
        assert (await client.get("/", headers={**REBOUND, **TOKEN})).status_code == 200
        assert (await client.get("/", headers={**REBOUND, "Authorization": "Bearer guess"})).status_code == 403


async def test_beyond_loopback_any_name_is_answered_and_no_web_page_is() -> None:
    async with guarded(host="0.0.0.0") as client:
        assert (await client.get("/", headers={"Host": "gpu-7.example"})).status_code == 200
        assert (await client.get("/", headers={"Host": "gpu-7.example", **PAGE})).status_code == 403


async def test_a_web_page_is_refused_even_with_the_token_since_browsers_store_passwords() -> None:
    async with guarded(token="secret") as client:
        assert (await client.get("/", headers={**PAGE, **TOKEN})).status_code == 403


@pytest.mark.parametrize(("origin", "status"), [("http", 200), ("https", 200), ("evil", 403), ("file", 403)])
async def test_the_scheme_of_an_origin_is_compared_too(origin: str, status: int) -> None:
    async with guarded() as client:
        headers = {"Host": "localhost:19001", "Origin": f"{origin}://localhost:19001"}
        assert (await client.get("/v1/models", headers=headers)).status_code == status


async def test_a_page_of_an_origin_that_is_allowed_by_name_is_answered() -> None:
    async with guarded(allowed_origins=lambda: ["http://evil.example"]) as client:
        assert (await client.get("/", headers=PAGE)).status_code == 200
        assert (await client.get("/", headers={**PAGE, "Origin": "http://other.example"})).status_code == 403


# --- the token -------------------------------------------------------------------------------------------------------


async def test_the_rollout_api_answers_probes_and_nothing_else_without_the_token() -> None:
    async with api_client(token="secret") as api:
        for path in ("/", "/info", "/health", "/status", "/metrics"):
            assert (await api.get(path)).status_code == 200, path
        refused = await api.post("/register", json=REGISTRATION)
        assert refused.status_code == 401
        assert "access.token" in refused.json()["detail"]
        for path in ("/batch", "/latest_example", "/wandb_info", "/reset_data", "/docs", "/openapi.json"):
            assert (await api.get(path)).status_code == 401, path
        assert (await api.post("/register", json=REGISTRATION, headers=TOKEN)).status_code == 200


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("Bearer secret", 200),
        ("bearer secret", 200),
        ("Basic " + base64.b64encode(b"run:secret").decode(), 200),
        ("Basic " + base64.b64encode(b"secret:run").decode(), 401),
        ("Basic secret", 401),
        ("secret", 401),
        ("Bearer ", 401),
        ("Bearer s\xe9cret", 401),
    ],
)
async def test_a_token_is_a_bearers_or_the_password_of_a_url(authorization: str, status: int) -> None:
    async with guarded(token="secret", needs_token=lambda path: True) as client:
        answer = await client.get("/", headers={b"Authorization": authorization.encode("latin-1")})
        assert answer.status_code == status


def test_a_url_carries_the_token_for_clients_that_set_no_header() -> None:
    assert url_with_token("http://localhost:8000", "a/b") == "http://run:a%2Fb@localhost:8000"
    assert url_with_token("http://localhost:8000", None) == "http://localhost:8000"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("http://localhost:8000", "http://127.0.0.1:8000"),
        ("http://run:localhost@LocalHost/v1", "http://run:localhost@127.0.0.1/v1"),
        ("https://localhost:8000", "https://localhost:8000"),
        ("http://localhost.example:8000/localhost", "http://localhost.example:8000/localhost"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_localhost_in_a_url_is_the_address_at_which_services_listen(given: str, meant: str) -> None:
    """Clients try ::1 first, where any user may listen; an environment of Atropos sent the token there."""
    assert checked_url(given) == meant
    assert TrainConfig(model_name="m", training_steps=1, atropos_url=given, server_urls=(given,)).server_urls == (
        meant,
    )


@pytest.mark.parametrize("kind", [TrainConfig, EnvironmentConfig, AtroposEnvConfig, ParametersConfig])
def test_no_default_names_localhost(kind: type[Config]) -> None:
    assert "localhost" not in repr([field.default for field in kind.model_fields.values()])


def test_the_variable_wins_over_the_file_and_a_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    write_token(tmp_path)
    file = tmp_path / "access.token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    named = {"GRPO_API_TOKEN_FILE": str(file)}
    assert find_token(named) == file.read_text().strip()
    assert find_token({**named, "GRPO_API_TOKEN": "mine"}) == "mine"
    assert find_token({}) is None
    file.unlink()
    with pytest.raises(ConfigError, match=r"\$GRPO_API_TOKEN_FILE .*access.token: cannot be read: No such file"):
        find_token(named)


def test_a_token_that_no_header_carries_is_refused_and_not_shown() -> None:
    """Before, it stood in the log of an environment, in httpx's error: `Illegal header value b'Bearer …'`."""
    assert find_token({"GRPO_API_TOKEN": "SECRET\r\n"}) == "SECRET"
    for ask in (lambda: find_token({"GRPO_API_TOKEN": "SEC\rRET"}), lambda: authorization("SEC\0RET")):
        with pytest.raises(ConfigError, match="no HTTP header carries") as refused:
            ask()
        assert "SEC" not in str(refused.value)


def test_the_inference_server_pauses_and_reloads_for_the_token_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_token(tmp_path)
    monkeypatch.setenv("GRPO_API_TOKEN_FILE", str(tmp_path / "access.token"))
    with running_server(save_tiny_model(tmp_path / "model", seed=0), folder=tmp_path) as server:
        with server.client as other:
            for path in ("/bridge/pause", "/bridge/reload", "/lora/load", "/lora/unload"):
                assert other.post(path, json={}).status_code == 401, path
            assert other.get("/bridge/info").status_code == 401
            assert other.post("/generate", json={"prompt": "a", "max_tokens": 1}).status_code == 200
            assert other.get("/v1/models").status_code == 200
            assert other.get("/health", headers=REBOUND).status_code == 403
            assert other.post("/generate", json={"prompt": "a"}, headers=PAGE).status_code == 403
            assert other.get("/v1/models", headers=REBOUND).status_code == 403
        ours = ServerClient(server.url, patience_s=30)
        ours.pause(30)
        ours.resume()
        ours.close()
        monkeypatch.delenv("GRPO_API_TOKEN_FILE")
        without = ServerClient(server.url, patience_s=30)
        with pytest.raises(PeerError, match="requires a token"):
            without.pause(30)
        without.close()


API = """
[services.api]
kind = "rollout_api"
port = {port}
{more}
"""
TELLS = "import os, signal; print(open(os.environ['GRPO_API_TOKEN_FILE']).read(), flush=True); signal.pause()"
TOLD = "{ log = '.', interval_s = 0.02 }"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    with open_workplace(tmp_path) as workplace:
        yield workplace


def register(port: int, token: str | None = None) -> int:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    url = f"http://127.0.0.1:{port}/register"
    return httpx.post(url, json=REGISTRATION, headers=headers, timeout=60, trust_env=False).status_code


def test_a_run_has_a_token_that_survives_restarts_of_services_and_of_the_supervisor(place: Workplace) -> None:
    port = free_port()
    place.profile(API.format(port=port, more=""), service("tells", TELLS, ready=TOLD))
    place.up()
    folder = place.run_folder()
    file = folder / "access.token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    token = file.read_text().strip()
    assert len(token) >= 43
    assert token in (folder / "tells.log").read_text()
    assert (register(port), register(port, token)) == (401, 200)
    place.kill_supervisor()
    assert place.grpo("restart", "api", "--wait").returncode == 0
    assert (register(port), register(port, token)) == (401, 200)
    assert place.grpo("upgrade").returncode == 0
    assert place.grpo("restart", "api", "--wait").returncode == 0
    assert (register(port), register(port, token)) == (401, 200)
    assert file.read_text().strip() == token
    assert place.grpo("down").returncode == 0


def test_a_token_of_the_profile_is_that_of_the_run_and_is_on_no_command_line(place: Workplace) -> None:
    port = free_port()
    place.profile(API.format(port=port, more='token = "chosen-by-hand"'), service("tells", TELLS, ready=TOLD))
    place.up()
    folder = place.run_folder()
    assert "chosen-by-hand" in (folder / "tells.log").read_text()
    assert "chosen-by-hand" not in command_line(place.pid("api"))
    assert "chosen-by-hand" not in (folder / "api.log").read_text()
    assert (register(port), register(port, "chosen-by-hand")) == (401, 200)
    assert place.grpo("down").returncode == 0


def test_a_profile_may_admit_stock_clients_without_a_token_and_the_plan_says_so(place: Workplace) -> None:
    port = free_port()
    place.profile(API.format(port=port, more=""), name="q")
    assert "only with the token of the run" in place.grpo("plan", "--profile", "q").stdout
    place.profile(API.format(port=port, more="allow_without_token = true"))
    assert "open to every user of this machine" in place.grpo("plan", "--profile", "p").stdout
    place.up()
    assert register(port) == 200
    assert place.grpo("down").returncode == 0
