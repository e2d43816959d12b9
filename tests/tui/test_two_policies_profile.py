"""A profile that trains two policies in one game: who is connected to whom, which files are whose, what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from grpo_engine.errors import ConfigError
from grpo_tui.profile.loading import load
from grpo_tui.profile.plan import make_plan

PROFILE = "tiny-two-policies"


def flag(argv: tuple[str, ...], name: str) -> str | None:
    """The value of a flag."""
    return argv[argv.index(name) + 1] if name in argv else None


def test_services_of_a_policy_are_connected_and_have_a_folder_of_their_own(tmp_path: Path) -> None:
    plan = make_plan(
        load(PROFILE, ["bridge.mode=none", "bridge.every_steps=1"]), run_folder=tmp_path, python=sys.executable
    )
    argv = {launch.name: launch.argv for launch in plan.launches}
    of_mafia = tmp_path / "policies" / "mafia"
    # No flag where the value is the default: the first API and server.
    for api, server, trainer, folder, url, port in (
        ("api", "vllm", "trainer", tmp_path, None, None),
        ("api-mafia", "vllm-mafia", "trainer-mafia", of_mafia, "http://127.0.0.1:8001", "9002"),
    ):
        assert flag(argv[api], "--store") == str(folder / "rollouts.sqlite")
        assert flag(argv[server], "--handover") == flag(argv[trainer], "--handover") == str(folder / "handover")
        assert flag(argv[trainer], "--run-folder") == str(folder)
        assert flag(argv[trainer], "--atropos-url") == url
        assert flag(argv[trainer], "--vllm-port") == port
    env = argv["env"]
    assert flag(env, "--rollout-server-url") is None
    assert flag(env, "--inference-url") is None
    assert flag(env, "--opponent-url") == "http://127.0.0.1:9002"
    assert flag(env, "--opponent-rollout-server-url") == "http://127.0.0.1:8001"


def test_shared_weights_of_two_policies_have_a_bridge_file_each(tmp_path: Path) -> None:
    plan = make_plan(load(PROFILE), run_folder=tmp_path, python=sys.executable)
    argv = {launch.name: launch.argv for launch in plan.launches}
    for server, trainer, folder in (
        ("vllm", "trainer", tmp_path),
        ("vllm-mafia", "trainer-mafia", tmp_path / "policies" / "mafia"),
    ):
        file = str(folder / "vllm_bridge_config.json")
        assert flag(argv[server], "--bridge-file") == flag(argv[trainer], "--vllm-config-path") == file


def test_the_reference_and_parameter_service_of_a_policy_are_those_of_its_trainer(tmp_path: Path) -> None:
    services = {"ref": ("reference", 9101), "par": ("parameters", 9102)}
    overrides = [
        f"services.{name}.{key}={value}"
        for name, (kind, port) in services.items()
        for key, value in {"kind": kind, "policy": "mafia", "port": port}.items()
    ]
    plan = make_plan(
        load(PROFILE, [*overrides, "bridge.mode=parameter_service", "services.trainer-mafia.kl_coef=0.1"]),
        run_folder=tmp_path,
        python=sys.executable,
    )
    argv = {launch.name: " ".join(launch.argv) for launch in plan.launches}
    for port in ("9101", "9102"):
        assert port in argv["trainer-mafia"]
        assert port not in argv["trainer"]


def test_an_opponent_of_another_model_is_asked_with_its_tokenizer(tmp_path: Path) -> None:
    overrides = [f"services.{name}.model_name=local/qwen-3b-random" for name in ("vllm-mafia", "trainer-mafia")]
    plan = make_plan(load(PROFILE, overrides), run_folder=tmp_path, python=sys.executable)
    [env] = [launch.argv for launch in plan.launches if launch.name == "env"]
    assert flag(env, "--opponent-model-name") == "local/qwen-3b-random"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["services.env.opponent=maffia"], r"'maffia' is no policy here \(did you mean 'mafia'\?\); there are mafia"),
        (["services.trainer-mafia.policy=other"], "'other', and no rollout_api is of it: set its policy to the same"),
        (["services.trainer-mafia.policy=other"], "'other', and no inference service is: set its policy to the same"),
        (
            [
                *("services.api-x.kind=rollout_api", "services.api-x.port=8002", "services.api-x.policy=x"),
                *("services.vllm-x.kind=inference", "services.vllm-x.port=9003", "services.vllm-x.policy=x"),
                "services.env.opponent=x",
            ],
            "'x' has a rollout_api and no trainer, for which the environment would wait endlessly",
        ),
        (["services.env.task.policy_plays=all"], "other_objective has no effect with policy_plays all"),
        (
            ["services.api-two.kind=rollout_api", "services.api-two.port=8002"],
            "services.api-two.store: unset, as for services.api, so both would write one file",
        ),
        (
            ["services.second.kind=trainer"],
            "services.second: metrics.jsonl has one writer, which is services.trainer .* name that in `policy`",
        ),
        (
            ["services.vllm-two.kind=inference", "services.vllm-two.port=9003", "services.vllm-two.policy=mafia"],
            "updates one server, and there are vllm-mafia, vllm-two",
        ),
    ],
)
def test_policies_that_do_not_fit_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(PROFILE, overrides)
