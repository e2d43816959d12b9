"""What is masked before it is shown, and what is not."""

from __future__ import annotations

import pytest

from grpo_engine.wire.secrets import (
    is_secret_name,
    masked_argv,
    masked_settings,
    masked_text,
    masked_value,
    secret_values,
    with_secrets,
    without_secrets,
)


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "OPENAI_API_KEY", "WANDB_API_KEY_PROD", "AWS_SECRET_ACCESS_KEY", "API_TOKEN_2", "apikey"),
        *("DB_PASSWD", "PGPASS", "MYSQL_PWD", "MY_PASSWORD", "GOOGLE_CREDENTIALS", "AUTHORIZATION", "REDIS_AUTH"),
        *("DATABASE_URL", "MONGODB_URI", "SENTRY_DSN", "SLACK_WEBHOOK_URL", "SESSION_COOKIE"),
        *("DB_PW", "SNOWFLAKE_PAT", "SLACK_HOOK", "--db-pw", "--pw", "--pat"),
        *("--api-token", "--token", "-key", "wandb.apiKey", "githubToken", "Proxy-Authorization"),
    ],
)
def test_values_of_these_names_are_secret(name: str) -> None:
    assert is_secret_name(name)
    assert masked_value(name, "value") == "***"
    assert masked_value(name, "") == ""


@pytest.mark.parametrize(
    "name",
    [
        *("MAX_TOKENS", "--max-token-length", "--tokenizer", "TOKENIZERS_PARALLELISM", "KEYBOARD", "BYPASS", "COMPASS"),
        *("PWD", "OLDPWD", "XAUTHORITY", "SSH_AUTH_SOCK", "HF_TOKEN_PATH", "--token-file", "SSL_KEY_DIR", "PATH"),
        *("MASTER_ADDR", "HF_ENDPOINT", "SERVER_URL", "--author"),
        *("--path", "PATTERN", "--patience", "PRE_COMMIT_HOOK", "eos_token", "--pad-token"),
    ],
)
def test_values_of_these_names_are_shown(name: str) -> None:
    assert not is_secret_name(name)
    assert masked_value(name, "value") == "value"


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["env", "HF_TOKEN=hf_1", "train"], ["env", "HF_TOKEN=***", "train"]),
        (["--api-key", "sk-1", "--wandb_key=k"], ["--api-key", "***", "--wandb_key=***"]),
        (["--api-token", "--token", "x"], ["--api-token", "--token", "***"]),
        (["--no-password", "--api-key", "sk-1"], ["--no-password", "--api-key", "***"]),
        (["--use-auth-token", "--hf-token=X"], ["--use-auth-token", "--hf-token=***"]),
        (["--no-password", "-key", "X"], ["--no-password", "***", "***"]),
        (["--password", "-dash", "run"], ["--password", "***", "run"]),
        (["--password=", "--token"], ["--password=", "--token"]),
        (["--max-tokens", "256", "--tokenizer", "t"], ["--max-tokens", "256", "--tokenizer", "t"]),
        (["curl", "-H", "Authorization: Bearer abc"], ["curl", "-H", "Authorization: ***"]),
        (["curl", "-H", "Accept: text/plain"], ["curl", "-H", "Accept: text/plain"]),
        (
            ["sh", "-c", "env PGPASS=a run --token b --max-tokens 5"],
            ["sh", "-c", "env PGPASS=*** run --token *** --max-tokens 5"],
        ),
        (["sh", "-c", "x --no-password --api-key X -n 1"], ["sh", "-c", "x --no-password --api-key *** -n 1"]),
        (["sh", "-c", "curl -H 'Authorization: Bearer X' h"], ["sh", "-c", "curl -H 'Authorization: ***' h"]),
        (["sh", "-c", 'x --api-key "X Y" -n 1'], ["sh", "-c", 'x --api-key "***" -n 1']),
        (["sh", "-c", 'x --api-key "cut off'], ["sh", "-c", 'x --api-key "***']),
        (["sh", "-c", "x 'HF_TOKEN=X Y' z"], ["sh", "-c", "x 'HF_TOKEN=***' z"]),
        (["sh", "-c", "run hf_token=X -n 1"], ["sh", "-c", "run hf_token=*** -n 1"]),
        (["sh", "-c", "curl -u me:X h"], ["sh", "-c", "curl -u me:*** h"]),
        (["sh", "-c", 'curl -u "me:X Y" h'], ["sh", "-c", 'curl -u "me:***" h']),
        (["sh", "-c", 'curl -d "{\\"api_key\\": \\"X\\"}"'], ["sh", "-c", 'curl -d "{\\"api_key\\": \\"***\\"}"']),
        (["curl", "-u", "me:X", "--user", "me:it's"], ["curl", "-u", "me:***", "--user", "me:***"]),
        (["-HAuthorization: Bearer X", "Authorization:Bearer X"], ["-HAuthorization: ***", "Authorization:***"]),
        (['{"api_key":"X","n":1}', "api_key:X"], ['{"api_key":"***","n":1}', "api_key:***"]),
        (['{"keys": ["X", "Y"], "n": 1}', '{"token": "a\\"X"}'], ['{"keys": ***, "n": 1}', '{"token": "***"}']),
        (['{"credentials": {"a": {"n": 1}, "b": "X"}}'], ['{"credentials": ***, "b": "***"}}']),
        (['--of={"keys":["]","X"]}', 'OF=["-u","a:X"]'], ['--of={"keys":***}', 'OF=["-u","a:***"]']),
        (['{"keys":["]","X"],"args":["--token","Y"]}'], ['{"keys":***,"args":["--token","***"]}']),
        (["http://me:it's-X@h", '{"judge.api.key":"X"}'], ["http://me:***@h", '{"judge.api.key":"***"}']),
        (["Uid=me;Pwd=X;Port=1", "Uid=me;PWD={a;X};Port=1"], ["Uid=me;Pwd=***;Port=1", "Uid=me;PWD=***;Port=1"]),
        (["--url", "https://u:PW@h/x?a=b"], ["--url", "https://u:***@h/x?a=b"]),
    ],
)
def test_a_command_line_is_shown_without_its_secrets(argv: list[str], shown: list[str]) -> None:
    assert masked_argv(argv) == shown


@pytest.mark.parametrize(
    "argv",
    [
        *(["docker", "-u", "1000:1000", "--user", "0:0"], ["python", "-u", "train.py"], ["uvicorn", "auth:app"]),
        *(["python", "-c", "sorted(a, key=len)"], ["--task", "python:auth:reward"], ["-v", "secrets:/run/secrets"]),
        *(
            ["sh", "-c", "cd /x;PWD=/y run"],
            ['{"max_tokens": 5, "eos_token": "<end>"}'],
            ["--path", "p", "--pattern=x"],
        ),
    ],
)
def test_a_command_line_without_secrets_is_shown_as_it_is(argv: list[str]) -> None:
    assert masked_argv(argv) == argv


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("Driver={ODBC 18};Server=s;Uid=u;Pwd=X;", "Driver={ODBC 18};Server=s;Uid=u;Pwd=***;"),
        ('{"Authorization": "Bearer X"}', '{"Authorization": "***"}'),
        ("https://hooks.slack.com/services/T0/B0/X", "https://hooks.slack.com/***"),
        ("https://discord.com/api/webhooks/1/X", "https://discord.com/api/webhooks/***"),
        ("/usr/token:/x", "/usr/token:/x"),
        ("*.key=00;36:*.jwt=1", "*.key=00;36:*.jwt=1"),
    ],
)
def test_a_variable_with_a_harmless_name_is_shown_without_the_secrets_in_it(value: str, shown: str) -> None:
    assert masked_value("SETTING", value) == shown


@pytest.mark.parametrize("text", ["a.", "token=[", "--token ", "-u a", "'token=", '"token":', ";Pwd={", "-u,"])
def test_a_long_text_costs_time_in_proportion_to_its_length(text: str) -> None:
    assert masked_argv([text * (60_000 // len(text))])  # quadratic, it would take minutes


def test_a_value_of_many_backslashes_and_a_long_name_cost_time_in_proportion_to_their_length() -> None:
    many = 1_000_000  # quadratic, it would take hours
    assert masked_argv(["'token=" + many * "\\"]) == ["'token=***"]
    assert masked_argv([rf"'token=a{many * chr(92)}'"]) == [rf"'token=***{many * chr(92)}'"]
    assert masked_argv([f"--key{many * '1'}_x", "value"])[1] == "***"
    assert masked_argv([f'a token: {many * chr(92)}"{many * chr(92)}b']) == ["a token: ***"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgres://me:pw@db:5432/x, retrying", "postgres://me:***@db:5432/x, retrying"),
        ("postgres://u:p@ss:X@h/db and postgres://u@corp:X@h", "postgres://u:***@h/db and postgres://u@corp:***@h"),
        ("clone https://ghp_abc@github.com/a/b", "clone https://***@github.com/a/b"),
        ("GET http://h/x?api_key=abc&page=2#top", "GET http://h/x?api_key=***&page=2#top"),
        ("ssh://git@host/x and http://127.0.0.1:9001/info", "ssh://git@host/x and http://127.0.0.1:9001/info"),
        ("mail a@b.c at 12:30", "mail a@b.c at 12:30"),
    ],
)
def test_passwords_in_urls_are_masked_in_any_text(text: str, shown: str) -> None:
    assert masked_text(text) == shown


def test_secrets_that_a_text_repeats_are_those_of_names_flags_and_urls_and_not_short_words() -> None:
    variables = {"MY_PASSWORD": "longest-of-all", "DEBUG_TOKEN": "short", "HOME": "/home/ann", "MODE": "not-a-secret"}
    variables["ODBC"] = "Server=s;Pwd=in-a-variable;"
    argv = [
        "sh",
        "-c",
        "curl -u 'me:as-a-login' -H 'x-api-key: in-a-header'",
        "serve",
        "--api-key",
        "sk-as-one-word",
        "--token=after-a-sign",
        "redis://u:in-the-url@h",
    ]
    found = {"longest-of-all", "sk-as-one-word", "after-a-sign", "in-the-url"}
    assert secret_values(variables, argv) == found | {"in-a-variable", "as-a-login", "in-a-header"}


def test_what_a_list_or_table_with_the_name_of_a_secret_holds_is_masked() -> None:
    given = {"api_keys": ["a", {"of": "b"}], "credentials": {"id": "c", "port": 1}, "words": ["d", "--token", "e"]}
    shown = {"api_keys": ["***", {"of": "***"}], "credentials": {"id": "***", "port": 1}}
    assert masked_settings(given) == {**shown, "words": ["d", "--token", "***"]}


def test_words_that_were_masked_are_found_again_among_words_that_are_masks() -> None:
    argv = ["--url", "http://u:pw@h", "***", "--table", '{"api_key": "k", "x": 1}', "--n", "2"]
    shown, hidden = without_secrets(argv)
    assert shown == ["--url", "http://u:***@h", "***", "--table", '{"api_key": "***", "x": 1}', "--n", "2"]
    assert with_secrets(["serve", *shown, "--more"], hidden) == ["serve", *argv, "--more"]
    assert with_secrets(shown, {}) == shown
