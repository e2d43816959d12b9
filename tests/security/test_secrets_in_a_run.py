"""Secrets of a run are in none of the files and outputs that people share."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
from workplace import Workplace, service

from grpo_engine import cli
from grpo_engine.environments.atropos.config import AtroposEnvConfig
from grpo_engine.errors import ConfigError
from grpo_tui.profile.loading import load
from grpo_tui.profile.plan import describe, make_plan

IN_ARGV, IN_VARIABLE, IN_FILE, IN_URL = "argv-Eb5tYqKx", "variable-8sTq0PzL", "file-Wm2Ra7Nc", "url-kJ4hVu6D"
PROGRAM = "import os, sys; print(sys.argv, os.environ['DB_PASSWD'], os.environ['FROM_FILE'], flush=True); sys.exit(3)"
MAY_HOLD_SECRETS = {"plan.json", "resolved.json", "settings.json"}
"""They start the services again; readable by their owner only. A service's own log is what it printed."""


def failed_run(place: Workplace) -> Path:
    """A run whose service prints all of its secrets, and fails."""
    place.profile(
        service(
            "trainer", PROGRAM, "--api-token", IN_ARGV, f"https://user:{IN_URL}@host/", restart='"never"',
            env=f'{{DB_PASSWD = "{IN_VARIABLE}"}}', env_files='["secrets.env"]',
        ),
        f'[[hooks]]\non = ["failed"]\nargv = ["true", "--password={IN_ARGV}"]\n',
    )  # fmt: skip
    (place.folder / "profiles" / "secrets.env").write_text(f"FROM_FILE={IN_FILE}\n")
    failed = place.grpo("up", "--profile", "p", "--wait", "finished", "--detach")
    assert failed.returncode == 1, failed.stderr
    for secret in (IN_ARGV, IN_VARIABLE, IN_FILE, IN_URL):
        assert secret not in failed.stdout + failed.stderr
    return place.run_folder()


@pytest.mark.slow
def test_no_file_of_a_run_shows_a_secret_but_the_plan_and_what_the_service_printed(workplace: Workplace) -> None:
    folder = failed_run(workplace)
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in MAY_HOLD_SECRETS]
    assert {"state.json", "events.jsonl", "supervisor.log", "trainer.log", "crash-trainer-1.txt"} <= {
        path.name for path in files
    }
    for path in files:
        text = path.read_text(errors="replace")
        if path.name == "trainer.log":
            header, _, printed = text.partition("\n")
            assert "--api-token" in header
            assert IN_FILE in printed
            text = header
        if path.name.endswith(".spec.json"):  # the keeper needs the command as it is
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            continue
        for secret in (IN_ARGV, IN_VARIABLE, IN_FILE, IN_URL):
            assert secret not in text, (path.name, secret)


@pytest.mark.slow
def test_no_command_shows_a_secret(workplace: Workplace) -> None:
    failed_run(workplace)
    for command in (("status",), ("status", "--json"), ("ps",), ("plan", "-p", "p"), ("plan", "-p", "p", "--json")):
        done = workplace.grpo(*command)
        for secret in (IN_ARGV, IN_VARIABLE, IN_FILE, IN_URL):
            assert secret not in done.stdout + done.stderr, (command, secret)


def test_a_secret_of_the_wrong_type_is_not_in_the_message(tmp_path: Path) -> None:
    profile = tmp_path / "p.toml"
    profile.write_text(
        '[services.a]\nkind = "command"\nargv = ["true"]\nstop_grace_s = "soon"\n'
        f'env = {{ OPENAI_API_KEY = ["{IN_VARIABLE}"] }}\n'
    )
    with pytest.raises(ConfigError) as refused:
        load(str(profile))
    said = str(refused.value)
    assert "OPENAI_API_KEY: input should be a valid string, but this is a list" in said
    assert "but this is 'soon'" in said
    assert IN_VARIABLE not in said


OWN_SERVICES = f"""
[model]
name = "local/tiny"
[services.vllm]
kind = "inference"
port = 9111
vllm = {{ hf_token = "{IN_VARIABLE}" }}
[services.env]
kind = "atropos_environment"
file = "env.py"
python = "python"
rollout_server_url = "http://run:{IN_URL}@127.0.0.1:8111"
settings = {{ judge = "***", keys = {{ a = {{ id = 1 }}, b = "{IN_FILE}" }}, args = ["--api-key", "{IN_ARGV}"] }}
server = {{ api_key = "{IN_FILE}" }}
ready = {{ command = ["true", "--api-key", "{IN_ARGV}"] }}
"""


def test_command_lines_of_our_services_and_the_plan_have_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every user could read the key of a judge, and the passwords of URLs, in /proc."""
    (tmp_path / "p.toml").write_text(OWN_SERVICES)
    loaded = load(str(tmp_path / "p.toml"))
    plan = make_plan(loaded, run_folder=tmp_path / "run", python=sys.executable)
    shown = json.dumps([describe(plan, loaded), [launch.argv for launch in plan.launches]])
    assert [secret for secret in (IN_ARGV, IN_VARIABLE, IN_FILE, IN_URL) if secret in shown] == []
    (launch,) = [each for each in plan.launches if each.name == "env"]
    for name, value in launch.env.items():
        monkeypatch.setenv(name, value)
    config = cli._parsed(AtroposEnvConfig, launch.argv[5:], "atropos-env", cli._atropos_env)
    assert config.rollout_server_url == f"http://run:{IN_URL}@127.0.0.1:8111"
    keys = {"a": {"id": 1}, "b": IN_FILE}
    assert config.settings == {"judge": "***", "keys": keys, "args": ["--api-key", IN_ARGV]}
    assert config.server == {"api_key": IN_FILE}


def test_a_refused_override_is_named_without_its_secret(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text('[services.a]\nkind = "command"\nargv = ["true"]\n')
    with pytest.raises(ConfigError) as refused:
        load(str(tmp_path / "p.toml"), [f"services.a.envv.API_KEY={IN_VARIABLE}"])
    assert "--set services.a.envv.API_KEY=***: services.a.envv: unknown setting" in str(refused.value)
