"""What is masked before it is shown, and what is not."""

from __future__ import annotations

import pytest

from grpo_engine.wire.secrets import is_secret_name, masked_argv, masked_text, masked_value, secret_values


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "OPENAI_API_KEY", "WANDB_API_KEY_PROD", "AWS_SECRET_ACCESS_KEY", "API_TOKEN_2", "apikey"),
        *("DB_PASSWD", "PGPASS", "MYSQL_PWD", "MY_PASSWORD", "GOOGLE_CREDENTIALS", "AUTHORIZATION", "REDIS_AUTH"),
        *("DATABASE_URL", "MONGODB_URI", "SENTRY_DSN", "SLACK_WEBHOOK_URL", "SESSION_COOKIE"),
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
        (["--api-token", "--token", "x"], ["--api-token", "***", "x"]),
        (["--password=", "--token"], ["--password=", "--token"]),
        (["--max-tokens", "256", "--tokenizer", "t"], ["--max-tokens", "256", "--tokenizer", "t"]),
        (["curl", "-H", "Authorization: Bearer abc"], ["curl", "-H", "Authorization: ***"]),
        (["curl", "-H", "Accept: text/plain"], ["curl", "-H", "Accept: text/plain"]),
        (
            ["sh", "-c", "env PGPASS=a run --token b --max-tokens 5"],
            ["sh", "-c", "env PGPASS=*** run --token *** --max-tokens 5"],
        ),
        (["--url", "https://u:PW@h/x?a=b"], ["--url", "https://u:***@h/x?a=b"]),
    ],
)
def test_a_command_line_is_shown_without_its_secrets(argv: list[str], shown: list[str]) -> None:
    assert masked_argv(argv) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgres://me:pw@db:5432/x, retrying", "postgres://me:***@db:5432/x, retrying"),
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
    argv = ["serve", "--api-key", "sk-as-one-word", "--token=after-a-sign", "redis://u:in-the-url@h"]
    assert secret_values(variables, argv) == {"longest-of-all", "sk-as-one-word", "after-a-sign", "in-the-url"}
