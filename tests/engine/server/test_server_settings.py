"""The server's settings: vLLM's arguments beside ours, and access to the routes that change weights."""

from __future__ import annotations

import socket

import pytest
from fastapi import HTTPException
from starlette.requests import Request

from grpo_engine.errors import ConfigError
from grpo_engine.flags import parse_flags, to_flags
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.http.requests import only_owner
from grpo_engine.server.main import with_environment
from grpo_engine.serving.access import Token


def parsed(*argv: str) -> ServerConfig:
    return parse_flags(ServerConfig, ["--model", "m", *argv], prog="server", description="")


# --- flags -----------------------------------------------------------------------------------------------------------


def test_flags_that_are_not_ours_are_vllms_and_survive_the_command_line_of_a_profile() -> None:
    argv = ("--block-size", "32", "--port", "7", "--no-enable-prefix-caching", "--vllm.tool-call-parser=hermes")
    config = parsed(*argv, "--middleware", "a.b", "c.d", "--max-num-seqs", "9")
    assert config.vllm == {
        "block_size": "32",
        "no_enable_prefix_caching": True,
        "tool_call_parser": "hermes",
        "middleware": ["a.b", "c.d"],
    }
    assert (config.port, config.max_batch_size) == (7, 9)
    typed = config.model_copy(update={"vllm": {"block_size": 32, "hf_overrides": {"a": [1]}}})
    assert parsed(*to_flags(typed)[2:]) == typed


def test_set_reaches_into_the_table_of_vllms_arguments() -> None:
    assert parsed("--set", "vllm.block_size=32").vllm == {"block_size": 32}


def test_the_torch_engine_takes_no_flag_of_vllm_and_names_the_nearest_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"prot: not a setting here \(did you mean 'port'\?\), and --engine torch"):
        parsed("--engine", "torch", "--prot", "9")


def test_words_that_belong_to_no_flag_are_refused() -> None:
    with pytest.raises(ConfigError, match="unrecognized arguments: stray"):
        parsed("stray")


def test_half_a_certificate_is_refused() -> None:
    with pytest.raises(ConfigError, match="ssl_keyfile and ssl_certfile"):
        parsed("--ssl-keyfile", "/key")


# --- variables of the stock server ---


@pytest.mark.parametrize("variable", [{"VLLM_ENABLE_SHARED_WEIGHTS": "1"}, {"NUM_INFERENCE_NODES": "0"}])
def test_the_stock_servers_variables_share_the_weights_of_a_server_that_is_started_by_hand(
    variable: dict[str, str],
) -> None:
    config = with_environment(parsed(), variable)
    assert config.shared_weights
    assert config.receives_weights
    parallel = with_environment(parsed("--tensor-parallel-size", "2"), variable)
    assert (parallel.shared_weights, parallel.receives_weights) == (False, True)


@pytest.mark.parametrize("flag", [("--handover", "h"), ("--enable-lora",), ("--receives-weights",)])
def test_variables_left_in_a_shell_change_no_server_whose_flags_say_otherwise(
    flag: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    config = parsed(*flag)
    assert with_environment(config, {"VLLM_ENABLE_SHARED_WEIGHTS": "1"}) == config
    assert f"have no effect with {flag[0]}" in caplog.text
    assert not with_environment(parsed("--no-shared-weights"), {"NUM_INFERENCE_NODES": "0"}).shared_weights


def test_variables_left_in_a_shell_change_no_server_of_a_profile() -> None:
    left = {"VLLM_ENABLE_SHARED_WEIGHTS": "1", "NUM_INFERENCE_NODES": "0", "GRPO_TUI_RUN_FOLDER": "/r"}
    assert not with_environment(parsed(), left).shared_weights


# --- only this machine -----------------------------------------------------------------------------------------------


def send_request(*, peer: str = "127.0.0.1", **headers: str) -> None:
    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": "/bridge/pause", "client": (peer, 1), "headers": encoded}
    only_owner(Request({**scope, "grpo_engine.token": Token.NONE_SET}))


@pytest.mark.parametrize("host", ["127.0.0.1:9001", "localhost:9001", "[::1]:9001", "0.0.0.0:9001"])
def test_programs_on_this_machine_are_answered_under_any_of_its_addresses(host: str) -> None:
    send_request(host=host)
    send_request(host=f"{socket.gethostname()}:9001")
    send_request(peer="::1", host=host)


@pytest.mark.parametrize(
    ("origin", "reason"),
    [
        ({"peer": "10.1.2.3"}, "not 10.1.2.3"),
        ({"x_forwarded_for": "127.0.0.1"}, "x-forwarded-for"),
        ({"forwarded": "for=127.0.0.1"}, "forwarded"),
        ({"origin": "http://evil.example", "host": "127.0.0.1:9001"}, "evil.example"),
        ({"sec_fetch_site": "cross-site", "host": "localhost"}, "not web pages"),
        ({"host": "evil.example:9001"}, "not as evil.example"),
    ],
    ids=["elsewhere", "proxy", "standard proxy", "page", "page without origin", "name that resolves to loopback"],
)
def test_a_request_for_a_remote_client_is_refused(origin: dict[str, str], reason: str) -> None:
    with pytest.raises(HTTPException) as refused:
        send_request(**origin)
    assert refused.value.status_code == 403
    assert reason in refused.value.detail
