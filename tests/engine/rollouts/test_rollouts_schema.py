"""What `/openapi.json` says of the rollout API, taken at its word by schemathesis: requests made from it, by rule and
against it, are never a crash, and the answers are what it says. `ROLLOUT_EXAMPLES=500` makes more of them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from rollout_fakes import ENVIRONMENT, REGISTRATION, served_api
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

NUM_EXAMPLES = int(os.environ.get("ROLLOUT_EXAMPLES", "12"))

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def document() -> Iterator[Any]:
    """Of an API with a run and an environment, which still answers at the end."""
    with (
        served_api(max_queued_sequences=256, hold_s=0.0, max_body_bytes=2**20) as url,
        httpx.Client(base_url=url, trust_env=False) as http,
    ):
        http.post("/register", json=REGISTRATION)
        http.get("/batch")
        http.post("/register-env", json=ENVIRONMENT)
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")
        assert http.get("/status").status_code == 200


@pytest.mark.extended(
    "requests by the document are fuzzed; test_rollouts_broken_clients.py and _bodies.py have bad ones"
)
def test_no_request_against_the_schema_causes_a_server_error(document: Any) -> None:
    for operation in document.get_all_operations():
        ask_in_many_ways(operation.ok(), GenerationMode.NEGATIVE, [not_a_server_error])


@pytest.mark.extended("test_rollouts_broken_clients and test_rollouts_bodies")
def test_every_request_by_the_schema_gets_an_answer_by_the_schema(document: Any) -> None:
    checks = [not_a_server_error, content_type_conformance, response_schema_conformance]
    for operation in document.get_all_operations():
        ask_in_many_ways(operation.ok(), GenerationMode.POSITIVE, checks)


def ask_in_many_ways(operation: Any, mode: GenerationMode, checks: list[Any]) -> None:
    """Ask for one operation by the rules of the document or, in the negative mode, against them."""

    @settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        for part in (case.query, case.body):
            if isinstance(part, dict):
                part.pop("wait_s", None)  # asked for, it waits
        answer = case.call()
        if answer.status_code == 503:  # full, since nobody empties the queue here
            assert b"wait" in answer.content
        else:
            case.validate_response(answer, checks=checks)

    with contextlib.suppress(Unsatisfiable):  # what takes nothing cannot be asked wrongly
        ask()
