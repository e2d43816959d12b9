"""Names with control characters, which a terminal would carry out, are refused where they enter."""

from __future__ import annotations

from pathlib import Path

import pytest
from rollout_fakes import ENVIRONMENT, REGISTRATION, api_client

from grpo_engine.errors import ConfigError
from grpo_tui.profile.loading import load

ESCAPE = "sort6\x1b[2J"


@pytest.mark.parametrize("name", [ESCAPE, "a\nb", "a\x9bb", "a\u202eb", "\x7f"])
async def test_an_environment_has_a_printable_name(name: str) -> None:
    async with api_client() as api:
        await api.post("/register", json=REGISTRATION)
        await api.get("/batch")
        refused = await api.post("/register-env", json={**ENVIRONMENT, "desired_name": name})
        assert refused.status_code == 422
        assert "desired_name: Value error, a control character" in refused.json()["detail"][0]["msg"]
        assert name not in refused.text
        assert (await api.post("/register-env", json={**ENVIRONMENT, "desired_name": "größe 6"})).status_code == 200


@pytest.mark.parametrize("key", ["wandb_group", "wandb_project"])
async def test_a_run_registers_under_printable_names(key: str) -> None:
    async with api_client() as api:
        refused = await api.post("/register", json={**REGISTRATION, key: ESCAPE})
        assert (refused.status_code, key in refused.text) == (422, True)


async def test_an_evaluation_has_a_plain_id() -> None:
    order = {"step": 1, "policy_version": 1, "num_prompts": 1, "num_samples": 1}
    async with api_client() as api:
        await api.post("/register", json=REGISTRATION)
        assert (await api.post("/evaluations", json={**order, "id": ESCAPE})).status_code == 422


def test_a_service_has_a_plain_name_and_the_message_shows_another_as_text(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('[services."a\\u001b[2J"]\nkind = "command"\nargv = ["true"]\n')
    with pytest.raises(ConfigError, match="is no service name") as refused:
        load(str(path))
    assert str(refused.value).replace("\n", "").isprintable()
