"""The runner of Atropos environments, without one: settings file, warnings, silence, and observed servers."""

from __future__ import annotations

import json
import math
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
from grpo_engine.environments.atropos.observers import Api, Connections, RunStatus, Servers, addresses
from grpo_engine.environments.atropos.settings_file import batch_warnings, name_for, serve_text, setting_warnings
from grpo_engine.environments.atropos.silence import REPEAT_AFTER_S, Observation, SilenceDetector, silence_message
from grpo_engine.errors import ConfigError, ModelError
from grpo_engine.flags import parse_flags, to_flags

OBSERVATION = Observation(
    file="env.py",
    pid=4711,
    inference_url="http://127.0.0.1:9001",
    rollout_server_url="http://127.0.0.1:8000",
    queued=4,
    batch_size=16,
    is_server_healthy=True,
    is_registered=True,
    uses_wandb=False,
    other_peers=(),
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


def test_unset_settings_are_left_to_the_environment_and_it_runs_without_end() -> None:
    document = yaml.safe_load(serve_text(config(), "tokenizer", None))
    assert document["env"] == {
        "tokenizer_name": "tokenizer",
        "use_wandb": False,
        "rollout_server_url": "http://127.0.0.1:8000",
        "total_steps": 1_000_000_000,
    }


@pytest.mark.parametrize(
    ("settings", "named", "name"),
    [
        ("Config()", "", "Sums"),
        ("Config(wandb_name=None)", "name = 'sums'", "sums"),
        ("Config(wandb_name='mine')", "name = 'sums'", None),
        ("Config(**{'wandb_name': 'mine'})", "", None),
    ],
)
def test_an_environment_without_a_name_gets_that_of_its_class(settings: str, named: str, name: str | None) -> None:
    reads_it = "def log(self): return self.config.wandb_name"
    body = "\n    ".join(["class Sums(Elsewhere):", named, f"def config_init(cls): return {settings}", reads_it])
    assert name_for(f"{body}\nSums.cli()") == name
    assert name_for(f"{body}\nOther.cli()") is None
    assert name_for("class Sums(Elsewhere): pass\nSums.cli()") is None
    assert name_for("class Sums(envs.BaseEnv): pass\nif __name__ == '__main__':\n    Sums.cli()") == "Sums"
    assert name_for("class (") is None


def test_settings_reach_the_environment_under_their_atropos_names() -> None:
    said = {"name": "sums", "weight": 0.5, "min_batch_allocation": 0.25, "total_steps": -1, "worker_timeout": 60}
    environment = yaml.safe_load(serve_text(config(**said, settings={"use_wandb": True, "lr": 1e-5}), "t", "a token"))[
        "env"
    ]
    assert (environment["wandb_name"], environment["inference_weight"]) == ("sums", 0.5)
    assert (environment["total_steps"], environment["use_wandb"]) == (-1, True)
    assert environment["rollout_server_url"] == "http://run:a%20token@127.0.0.1:8000"
    assert environment["lr"] == 1e-5  # which YAML 1.1 reads as a text where it is not written as 1.0e-05


def test_inference_servers_get_the_token_as_key_so_that_they_do_not_take_the_requests_for_those_of_strangers() -> None:
    for token, settings, key in (("a token", {}, "a token"), (None, {}, "x"), ("a token", {"api_key": "k"}, "k")):
        servers = yaml.safe_load(serve_text(config(server=settings), "t", token))["openai"]
        assert {server["api_key"] for server in servers} == {key}
    elsewhere = config(inference_urls=["http://127.0.0.1:9001", "http://10.0.0.7:9001", "http://localhost.evil.com"])
    servers = yaml.safe_load(serve_text(elsewhere, "t", "a token"))["openai"]
    assert [server["api_key"] for server in servers] == ["a token", "x", "x"]


def test_a_setting_that_has_a_name_here_is_not_taken_under_its_other_name() -> None:
    with pytest.raises(ValueError, match=r"settings\.wandb_name is name here: set name = 'sums' instead"):
        config(settings={"wandb_name": "sums"})
    with pytest.raises(ValueError, match=r"server\.base_url is inference_urls here"):
        config(server={"base_url": "http://localhost:9001/v1"})


def test_settings_survive_the_conversion_to_flags() -> None:
    asked = config(group_size=4, ensure_scores_are_not_same=False, settings={"a": [1, 2.5, None]}, server={"b": "c"})
    assert parse_flags(AtroposEnvConfig, to_flags(asked), prog="p", description="") == asked


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        ({"settings": {"use_wandb": True}}, "waits without a message"),
        ({"settings": {"use_wandb": "True"}}, "waits without a message"),  # of `--env.use_wandb True`
        ({"server": {"server_type": "openai"}}, "no log-probabilities"),
        ({"settings": {"steps_per_eval": 1}}, "has no effect"),
    ],
)
def test_a_setting_that_does_harm_is_reported(settings: dict[str, Any], warning: str) -> None:
    (found,) = setting_warnings(config(**settings))
    assert warning in found
    assert not list(setting_warnings(config()))
    assert not list(setting_warnings(config(settings={"use_wandb": "false"})))


@pytest.mark.parametrize(("batch_size", "said"), [(4, "so the environment exits"), (20, "does not divide")])
def test_a_batch_that_groups_do_not_fill_is_reported(batch_size: int, said: str) -> None:
    (found,) = batch_warnings(config(group_size=8), batch_size)
    assert said in found
    assert not list(batch_warnings(config(group_size=8), 16))
    assert not list(batch_warnings(config(), batch_size))


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
    with pytest.raises(ModelError, match="local/tiny: not made yet: start the inference server first"):
        run(config(**there, python=sys.executable, model_name="local/tiny"))


def test_a_file_that_never_calls_cli_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "atroposlib.py").touch()
    (tmp_path / "env.py").touch()
    with served_api() as api:
        assert run(config(file=tmp_path / "env.py", python=sys.executable, rollout_server_url=api)) == 0
    assert "env.py exited with code 0" in caplog.text
    assert "YourEnv.cli()" in caplog.text


# --- silence -------------------------------------------------------------------------------------------------------


def test_silence_is_reported_after_its_limit_and_again_much_later() -> None:
    silence = SilenceDetector(60)
    lost = {"is_wanted": True, "has_requested": False, "is_registered": True}
    assert [silence.note(now, **lost) for now in (0, 59, 60, 61)] == [None, None, 60, None]
    assert silence.note(60 + REPEAT_AFTER_S, **lost) == 60 + REPEAT_AFTER_S


@pytest.mark.parametrize("sign", [{"has_requested": True}, {"is_wanted": False}, {"is_registered": None}])
def test_a_request_a_full_queue_and_a_registration_restart_the_silence(sign: dict[str, Any]) -> None:
    silence = SilenceDetector(60)
    lost: dict[str, Any] = {"is_wanted": True, "has_requested": False, "is_registered": True}
    assert silence.note(0, **lost) is None
    assert silence.note(50, **{**lost, **sign}) is None
    assert silence.note(61, **lost) is None
    assert silence.note(122, **lost) is not None


def test_the_warning_has_what_is_wrong_what_was_checked_and_what_to_do() -> None:
    lost = silence_message(
        replace(OBSERVATION, other_peers=("10.0.0.7:9004",), counters="its /metrics still count 41 requests"), 60
    )
    for part in ("no request has reached the inference server http://127.0.0.1:9001 for 60 s", "4 of 16 sequences"):
        assert part in lost
    for part in ("process 4711", "/metrics still count 41", "10.0.0.7:9004", "ServerManager in env.py"):
        assert part in lost
    assert "does not answer /health" in silence_message(replace(OBSERVATION, is_server_healthy=False), 60)
    outside = silence_message(replace(OBSERVATION, is_registered=False, is_server_healthy=False, uses_wandb=True), 60)
    assert "has not registered with the rollout API http://127.0.0.1:8000" in outside
    assert "use_wandb" in outside


# --- observers -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_our_api_reports_the_queue_and_groups_per_environment(client: httpx.Client) -> None:
    with served_api() as url:
        api = Api(client, url)
        assert api.refuses_token() is False
        unregistered = api.run_status(2)
        assert unregistered is not None
        assert not unregistered.is_short_of_groups
        client.post(f"{url}/register", json=REGISTRATION)
        client.get(f"{url}/batch")
        number = client.post(f"{url}/register-env", json=ENVIRONMENT).json()["env_id"]
        wanted = api.run_status(2)
        assert wanted is not None
        assert (wanted.is_short_of_groups, wanted.has_environment("sums"), wanted.has_environment("others")) == (
            True,
            True,
            False,
        )
        client.post(f"{url}/scored_data", json=group(2, env_id=number)).raise_for_status()
        assert (api.num_groups("sums"), api.num_groups(None), api.num_groups("others")) == (1, 1, None)
        client.post(f"{url}/scored_data", json=group(2, env_id=number)).raise_for_status()
        full = api.run_status(2)
        assert full is not None
        assert (full.queued, full.is_short_of_groups) == (4, False)
    assert api.run_status(2) is None
    assert api.refuses_token() is None


@pytest.mark.slow
def test_a_stock_api_that_reports_less_is_supported(client: httpx.Client) -> None:
    app = FastAPI()
    app.get("/info")(lambda: {"batch_size": 8, "max_token_len": 64})
    app.get("/status")(lambda: {"current_step": 3, "queue_size": 1})
    with served(app) as url:
        want = Api(client, url).run_status(4)
        assert want == RunStatus(batch_size=8, queued=4, step=3, num_steps=None, environments=None)
        assert want.is_short_of_groups
        assert want.has_environment("sums") is None
        assert Api(client, url).num_groups(None) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"batch_size": math.inf},
        {"current_step": math.inf},
        {"num_steps": "many"},
        {"queued_sequences": 10**400},
        {"environments": [7, None]},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_status_with_other_than_whole_numbers_and_names_is_no_answer(changed: dict[str, Any]) -> None:
    whole = {"batch_size": 8, "current_step": 3, "queue_size": 1, "num_steps": 9, "environments": ["sums_0"]}

    def status(values: dict[str, Any]) -> RunStatus | None:
        body = json.dumps(values)
        with httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200, text=body))) as client:
            return Api(client, "http://api").run_status(4)

    known = status(whole)
    assert known is not None
    assert known.has_environment("sums")
    assert status({**whole, **changed}) is None


@pytest.mark.slow
def test_requests_are_counted_where_the_server_has_metrics(client: httpx.Client) -> None:
    app = FastAPI()
    app.get("/metrics")(lambda: PlainTextResponse(VLLM_METRICS))
    app.get("/health")(lambda: None)
    page = FastAPI()
    page.get("/metrics")(lambda: PlainTextResponse("<html>no numbers</html>"))
    with served(app) as url, served(FastAPI()) as without, served(page) as no_metrics:
        assert (Servers(client, [url]).num_requests(), Servers(client, [url]).are_healthy()) == (43, True)
        assert Servers(client, [no_metrics]).num_requests() is None
        assert (Servers(client, [without]).num_requests(), Servers(client, [without]).are_healthy()) == (None, False)
        several = Servers(client, [without, url, url])
        assert (several.num_requests(), several.are_healthy()) == (86, True)


@pytest.mark.slow
def test_connections_of_a_process_tree_are_classified_by_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [listener.getsockname()[1] for listener in (server, other)]
        connects = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); sys.stdin.read()"
        through = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"

        def look(*argv: str) -> tuple[bool, set[str]]:
            process = subprocess.Popen([sys.executable, "-c", *argv], stdin=subprocess.PIPE)
            listener = server if argv[-1] == str(ports[0]) else other
            with listener.accept()[0]:
                connections = Connections(process.pid, [f"http://localhost:{ports[0]}"], "http://localhost:1")
                found = connections.has_connection_to_server()
                process.communicate(b"")
            return found, connections.other_peers

        assert look(connects, str(ports[0])) == (True, set())
        assert look(through, connects, str(ports[0])) == (True, set())
        assert look(connects, str(ports[1])) == (False, {f"127.0.0.1:{ports[1]}"})
    assert addresses("https://127.0.0.1/v1") == {("127.0.0.1", 443)}
