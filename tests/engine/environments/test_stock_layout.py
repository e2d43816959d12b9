"""Settings as environments of Atropos write them: YAML files with `env` and `openai`, dotted flags, `serve`."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_engine.environments.atropos.config import AtroposEnvConfig
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.errors import ConfigError
from grpo_engine.flags import parse_flags

FILE = """
env:
  tokenizer_name: "some/model"
  rollout_server_url: "http://localhost:8002"
  group_size: 8
  total_steps: -1
  wandb_name: math-zero
  max_num_workers_per_node: 24
  use_wandb: yes
  steps_per_eval: 20
openai:
  base_url: "http://localhost:9002/v1"
  model_name: "some/model"
  server_type: vllm
  api_key: x
  health_check: false
slurm: false
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "stock.yaml"
    path.write_text(FILE)
    return str(path)


def env(*argv: str) -> EnvironmentConfig:
    return parse_flags(EnvironmentConfig, argv, prog="env", description="")


def test_a_stock_yaml_file_sets_an_environment_of_ours(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = env("--config", file, "--task", "sort6")
    assert (config.model_name, config.group_size, config.name, config.max_workers) == ("some/model", 8, "math-zero", 24)
    assert (config.rollout_server_url, config.inference_urls) == ("http://127.0.0.1:8002", ("http://127.0.0.1:9002",))
    assert (config.total_steps, config.use_wandb, config.steps_per_eval, config.api_key) == (None, True, 20, "x")
    assert capsys.readouterr().err.startswith("warning: openai.health_check has no effect here: ")


def test_dotted_flags_of_stock_environments_go_over_their_file_and_ours_over_both(file: str) -> None:
    stock = ["--env.group_size", "4", "--env.use_wandb", "false", "--openai.base_url", "http://localhost:9001/v1"]
    config = env("--config", file, "--task", "sort6", *stock)
    assert (config.group_size, config.use_wandb, config.inference_urls) == (4, False, ("http://127.0.0.1:9001",))
    assert env("--config", file, "--task", "sort6", *stock, "--group-size", "6").group_size == 6


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--env.grup_size", "4"], r"env\.grup_size: unknown setting \(did you mean 'group_size'\?\)"),
        (["--openai.server_type", "openai"], r"server_type: 'openai': only 'vllm' asks /generate"),
        (["--openai.modle_name", "x"], r"openai\.modle_name: unknown setting \(did you mean 'model_name'"),
        (["--slurm.x", "1"], r"--slurm\.x: unknown flag"),
    ],
)
def test_a_wrong_stock_setting_is_refused_by_its_name(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        env("--task", "sort6", "--model-name", "m", *flags)


def test_a_stock_file_for_an_atropos_environment_keeps_every_setting(file: str) -> None:
    flags = [
        "--config",
        file,
        "--file",
        "x.py",
        "--python",
        "python",
        "--openai.timeout",
        "30",
        "--env.batch_size",
        "64",
    ]
    config = parse_flags(AtroposEnvConfig, flags, prog="env", description="")
    assert (config.model_name, config.group_size, config.name) == ("some/model", 8, "math-zero")
    own = {"max_num_workers_per_node": 24, "use_wandb": True, "steps_per_eval": 20, "batch_size": "64"}
    assert config.settings == own
    assert config.server == {"server_type": "vllm", "api_key": "x", "health_check": False, "timeout": "30"}


def test_servers_of_a_list_are_one_setting_each_with_one_key(tmp_path: Path) -> None:
    path = tmp_path / "two.yml"
    path.write_text("openai: [{base_url: http://a:1/v1, api_key: k}, {base_url: http://b:2/v1, api_key: other}]")
    with pytest.raises(ConfigError, match=r"openai\.api_key: differs between servers"):
        env("--config", str(path), "--task", "sort6", "--model-name", "m")
    config = env("--config", str(path), "--task", "sort6", "--model-name", "m", "--openai.api_key", "k")
    assert config.inference_urls == ("http://a:1", "http://b:2")
