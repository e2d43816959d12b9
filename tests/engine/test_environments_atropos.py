"""What the runner of Atropos environments knows without one: settings file, traps, silence, and whom it asks."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from rollout_fakes import ENVIRONMENT, REGISTRATION, group, served, served_api

from grpo_engine.environments.atropos.config import AtroposEnvConfig
from grpo_engine.environments.atropos.main import run
from grpo_engine.environments.atropos.serve_file import batch_traps, serve_text, traps
from grpo_engine.environments.atropos.silence import AGAIN_AFTER_S, Scene, Silence, words
from grpo_engine.environments.atropos.witnesses import Api, Connections, Server, Want, addresses, samples_of
from grpo_engine.errors import ConfigError, ModelError
from grpo_engine.flags import parse_flags, to_flags

SCENE = Scene(
    file="env.py",
    pid=4711,
    inference_url="http://127.0.0.1:9001",
    rollout_server_url="http://127.0.0.1:8000",
    queued=4,
    batch_size=16,
    is_server_well=True,
    is_registered=True,
    uses_wandb=False,
    elsewhere=(),
    counters=None,
)
VLLM_METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 40.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
"""
"""As `vllm serve` answers, shortened."""


def config(**changes: Any) -> AtroposEnvConfig:
    return AtroposEnvConfig.model_validate(
        {"file": "env.py", "python": "python", "model_name": "some/model", **changes}
    )


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=5, trust_env=False) as client:
        yield client


# --- the settings file ---------------------------------------------------------------------------------------------


def test_what_is_not_said_is_left_to_the_environment_and_it_never_ends_before_the_trainer() -> None:
    document = yaml.safe_load(serve_text(config(), "tokenizer"))
    assert document["env"] == {
        "tokenizer_name": "tokenizer",
        "use_wandb": False,
        "rollout_server_url": "http://localhost:8000",
        "total_steps": 1_000_000_000,
    }


def test_what_is_said_reaches_the_environment_by_the_names_that_atropos_has_for_it() -> None:
    said = {"name": "sums", "weight": 0.5, "min_batch_allocation": 0.25, "total_steps": -1, "worker_timeout": 60}
    environment = yaml.safe_load(serve_text(config(**said, settings={"use_wandb": True, "lr": 1e-5}), "t"))["env"]
    assert (environment["wandb_name"], environment["inference_weight"]) == ("sums", 0.5)
    assert (environment["total_steps"], environment["use_wandb"]) == (-1, True)
    assert environment["lr"] == 1e-5  # which YAML 1.1 reads as a text where it is not written as 1.0e-05


def test_a_setting_that_has_a_name_here_is_not_taken_under_its_other_name() -> None:
    with pytest.raises(ValueError, match=r"settings\.wandb_name is name here: say name = 'sums' instead"):
        config(settings={"wandb_name": "sums"})
    with pytest.raises(ValueError, match=r"server\.base_url is inference_url here"):
        config(server={"base_url": "http://localhost:9001/v1"})


def test_a_command_line_made_of_settings_gives_them_again() -> None:
    asked = config(group_size=4, ensure_scores_are_not_same=False, settings={"a": [1, 2.5, None]}, server={"b": "c"})
    assert parse_flags(AtroposEnvConfig, to_flags(asked), prog="p", description="") == asked


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"settings": {"use_wandb": True}}, "waits, silently and for ever"),
        ({"server": {"server_type": "openai"}}, "without log-probabilities"),
        ({"settings": {"steps_per_eval": 1}}, "never happens"),
    ],
)
def test_a_known_trap_is_named(settings: dict[str, Any], said: str) -> None:
    (found,) = traps(config(**settings))
    assert said in found
    assert not list(traps(config()))


@pytest.mark.parametrize(("batch_size", "said"), [(4, "at which the environment ends"), (20, "does not divide")])
def test_a_batch_that_groups_do_not_fill_is_named(batch_size: int, said: str) -> None:
    (found,) = batch_traps(config(group_size=8), batch_size)
    assert said in found
    assert not list(batch_traps(config(group_size=8), 16))
    assert not list(batch_traps(config(), batch_size))


def test_what_cannot_be_started_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--file env\.py: no such file"):
        run(config())
    with pytest.raises(ConfigError, match=r"--file \$NOWHERE/env\.py: \$NOWHERE is not set: export NOWHERE=…"):
        run(config(file="$NOWHERE/env.py"))
    (tmp_path / "env.py").touch()
    there = {"file": str(tmp_path / "env.py")}
    with pytest.raises(ConfigError, match="--python /nowhere: cannot be run: No such file"):
        run(config(**there, python="/nowhere"))
    with pytest.raises(ConfigError, match=r"has no atroposlib: install it there \(pip install atroposlib==0\.4\.0\)"):
        run(config(**there, python=sys.executable))
    (tmp_path / "atroposlib.py").touch()  # beside the file, where Python looks first
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ModelError, match="local/tiny: not made yet; the inference server makes it"):
        run(config(**there, python=sys.executable, model_name="local/tiny"))


def test_a_file_that_never_calls_cli_is_told_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "atroposlib.py").touch()
    (tmp_path / "env.py").touch()
    with served_api() as api:
        assert run(config(file=tmp_path / "env.py", python=sys.executable, rollout_server_url=api)) == 0
    assert "env.py has ended by itself" in caplog.text
    assert "YourEnv.cli()" in caplog.text


# --- silence -------------------------------------------------------------------------------------------------------


def test_silence_is_told_after_its_limit_and_again_much_later() -> None:
    silence = Silence(60)
    lost = {"is_wanted": True, "has_asked": False, "is_registered": True}
    assert [silence.note(now, **lost) for now in (0, 59, 60, 61)] == [None, None, 60, None]
    assert silence.note(60 + AGAIN_AFTER_S, **lost) == 60 + AGAIN_AFTER_S


@pytest.mark.parametrize("sign", [{"has_asked": True}, {"is_wanted": False}, {"is_registered": None}])
def test_a_sign_of_life_a_full_queue_and_a_registration_begin_it_anew(sign: dict[str, Any]) -> None:
    silence = Silence(60)
    lost: dict[str, Any] = {"is_wanted": True, "has_asked": False, "is_registered": True}
    assert silence.note(0, **lost) is None
    assert silence.note(50, **{**lost, **sign}) is None
    assert silence.note(61, **lost) is None
    assert silence.note(122, **lost) is not None


def test_words_say_what_is_wrong_where_it_was_looked_and_what_to_do() -> None:
    lost = words(replace(SCENE, elsewhere=("10.0.0.7:9004",), counters="its /metrics still count 41 requests"), 60)
    for part in ("no request has reached the inference server http://127.0.0.1:9001 for 60 s", "4 of 16 sequences"):
        assert part in lost
    for part in ("process 4711", "/metrics still count 41", "10.0.0.7:9004", "ServerManager in env.py"):
        assert part in lost
    assert "does not answer /health" in words(replace(SCENE, is_server_well=False), 60)
    outside = words(replace(SCENE, is_registered=False, is_server_well=False, uses_wandb=True), 60)
    assert "has not registered with the rollout API http://127.0.0.1:8000" in outside
    assert "use_wandb" in outside


# --- whom it asks --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_our_api_tells_when_groups_are_wanted_and_who_sent_some(client: httpx.Client) -> None:
    with served_api() as url:
        api = Api(client, url)
        assert api.asks_for_a_token() is False
        unregistered = api.want(2)
        assert unregistered is not None
        assert not unregistered.is_starving
        client.post(f"{url}/register", json=REGISTRATION)
        client.get(f"{url}/batch")
        number = client.post(f"{url}/register-env", json=ENVIRONMENT).json()["env_id"]
        wanted = api.want(2)
        assert wanted is not None
        assert (wanted.is_starving, wanted.knows("sums"), wanted.knows("others")) == (True, True, False)
        client.post(f"{url}/scored_data", json=group(2, env_id=number)).raise_for_status()
        assert (api.num_groups("sums"), api.num_groups(None), api.num_groups("others")) == (1, 1, None)
        client.post(f"{url}/scored_data", json=group(2, env_id=number)).raise_for_status()
        full = api.want(2)
        assert full is not None
        assert (full.queued, full.is_starving) == (4, False)
    assert api.want(2) is None
    assert api.asks_for_a_token() is None


@pytest.mark.slow
def test_a_stock_api_which_says_less_is_understood(client: httpx.Client) -> None:
    app = FastAPI()
    app.get("/info")(lambda: {"batch_size": 8, "max_token_len": 64})
    app.get("/status")(lambda: {"current_step": 3, "queue_size": 1})
    with served(app) as url:
        want = Api(client, url).want(4)
        assert want == Want(batch_size=8, queued=4, step=3, num_steps=None, environments=None)
        assert want.is_starving
        assert want.knows("sums") is None
        assert Api(client, url).num_groups(None) is None


@pytest.mark.slow
def test_a_stock_vllm_tells_its_requests_and_a_server_without_counters_none(client: httpx.Client) -> None:
    app = FastAPI()
    app.get("/metrics")(lambda: PlainTextResponse(VLLM_METRICS))
    app.get("/health")(lambda: None)
    with served(app) as url, served(FastAPI()) as without:
        assert (Server(client, url).num_requests(), Server(client, url).is_well()) == (43, True)
        assert (Server(client, without).num_requests(), Server(client, without).is_well()) == (None, False)


def test_lines_that_are_no_numbers_are_passed_over() -> None:
    assert list(samples_of('# TYPE a counter\na 1\nb{c="d e"} NaN x\n\nf 2.5 1700000000\n')) == [
        ("a", "", 1.0),
        ("f", "", 2.5),
    ]


@pytest.mark.slow
def test_connections_of_a_process_and_those_below_it_are_told_apart_by_where_they_lead() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [listener.getsockname()[1] for listener in (server, other)]
        connects = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); sys.stdin.read()"
        through = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"

        def look(*argv: str) -> tuple[bool, set[str]]:
            process = subprocess.Popen([sys.executable, "-c", *argv], stdin=subprocess.PIPE)
            listener = server if argv[-1] == str(ports[0]) else other
            with listener.accept()[0]:
                connections = Connections(process.pid, f"http://localhost:{ports[0]}", "http://localhost:1")
                found = connections.has_one_to_the_server()
                process.communicate(b"")
            return found, connections.elsewhere

        assert look(connects, str(ports[0])) == (True, set())
        assert look(through, connects, str(ports[0])) == (True, set())
        assert look(connects, str(ports[1])) == (False, {f"127.0.0.1:{ports[1]}"})
    assert addresses("https://127.0.0.1/v1") == {("127.0.0.1", 443)}
