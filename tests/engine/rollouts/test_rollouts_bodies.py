"""Malformed bodies: each is refused with the reason or accepted, none causes a server error, and the next valid
request works. `ROLLOUT_EXAMPLES=5000` runs more Hypothesis examples.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import struct
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_fakes import ENVIRONMENT, REGISTRATION, api_client, group, tags
from rollout_processes import api_process

NUM_EXAMPLES = int(os.environ.get("ROLLOUT_EXAMPLES", "50"))
JSON = {"Content-Type": "application/json"}
GZIP = {**JSON, "Content-Encoding": "gzip"}
POSTS = ["/scored_data", "/scored_data_list", "/register", "/register-env", "/disconnect-env", "/evaluations"]
GOOD = json.dumps(group(2))
NESTED = "[" * 100_000 + "]" * 100_000


@contextlib.asynccontextmanager
async def run() -> AsyncIterator[httpx.AsyncClient]:
    """An API with a run and an environment; checks at the end that it works and never answered 5xx."""

    async def note(answer: httpx.Response) -> None:
        await answer.aread()
        request = answer.request
        assert answer.status_code < 500, f"{request.method} {request.url} {request.content[:80]!r}: {answer.text}"

    async with api_client() as api:
        api.event_hooks["response"].append(note)
        await api.post("/register", json=REGISTRATION)
        await api.get("/batch")
        await api.post("/register-env", json=ENVIRONMENT)
        yield api
        await api.get("/reset_data", params={"force": "true"})
        await api.post("/register", json=REGISTRATION)
        assert (await api.post("/scored_data", json=group(4, tag=42))).status_code == 200
        assert tags((await api.get("/batch")).json()["batch"]) == [42]


async def refusal_of(api: httpx.AsyncClient, body: str | bytes, path: str = "/scored_data") -> str:
    """The answer by which a body is refused."""
    answer = await api.post(path, content=body, headers=JSON)
    assert answer.status_code in (400, 413, 422), (answer.status_code, answer.text[:200])
    assert answer.json()["detail"]
    assert len(answer.content) < 20_000, "a refusal does not repeat the body"
    return answer.text


def with_value(field: str, value: str) -> str:
    """A good group with one field replaced by JSON text."""
    return json.dumps({**group(2), field: "HERE"}).replace('"HERE"', value)


async def test_a_gzip_body_is_refused_where_it_is_cut_off_and_accepted_whole() -> None:
    packed = gzip.compress(GOOD.encode())
    async with run() as api:
        for length in range(len(packed)):
            assert (await api.post("/scored_data", content=packed[:length], headers=GZIP)).status_code in (400, 422)
        assert (await api.post("/scored_data", content=packed, headers=GZIP)).status_code == 200
        assert (await api.get("/status")).json()["queue_size"] == 1


async def test_a_gzip_body_with_a_flipped_bit_is_refused_unless_its_content_is_the_same() -> None:
    packed = gzip.compress(GOOD.encode(), mtime=0)
    async with run() as api:
        for position in range(0, 8 * len(packed), 7):
            flipped = bytearray(packed)
            flipped[position // 8] ^= 1 << position % 8
            answer = await api.post("/scored_data", content=bytes(flipped), headers=GZIP)
            if answer.status_code == 200:  # a bit of the header that nobody reads
                assert zlib.decompress(bytes(flipped), 31) == GOOD.encode()
            else:
                assert answer.status_code in (400, 422)


async def test_a_json_body_cut_off_anywhere_is_refused() -> None:
    async with run() as api:
        for length in range(len(GOOD)):
            await refusal_of(api, GOOD[:length])


NO_MESSAGES: dict[str, list[str | bytes]] = {
    "no JSON": ["", " ", '{"a":', "\x00", "'", "{}{}", "9" * 5_000],
    "JSON of another shape": ["null", "true", "0", '""', "[[]]", "[null]", "[{}]"],
    "not UTF-8": [b"\xff\xfe", b"\xef\xbb\xbf{}", b'{"tokens": "\xe9"}', b"{\x80}", GOOD.encode("utf-16")],
    "nested": [NESTED, f'{{"tokens":{NESTED}}}', f'{{"messages":{NESTED}}}', '{"a":' * 100_000],
}


@pytest.mark.parametrize("kind", NO_MESSAGES)
async def test_bodies_that_are_no_message_are_refused_with_the_reason(kind: str) -> None:
    async with run() as api:
        for path in POSTS:
            for body in NO_MESSAGES[kind]:
                await refusal_of(api, body, path)


STRANGE = {
    "beyond JSON": ["1e999", "-1e999", "NaN", "Infinity", "-Infinity"],
    "enormous": ["9" * 400, "-" + "9" * 30, "9" * 5_000],
    "half a character": ['"\\ud800"'],
    "of another type": ["null", '"1"', "{}", "[1]", "true", "1.5"],
    "nested": [NESTED],
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("path", ["/register", "/register-env"])
async def test_a_registration_with_a_strange_value_causes_no_server_error(kind: str, path: str) -> None:
    good = REGISTRATION if path == "/register" else {**ENVIRONMENT, "min_batch_allocation": None}
    async with run() as api:
        for field in good:
            for value in STRANGE[kind]:
                body = json.dumps({**good, field: "HERE"}).replace('"HERE"', value)
                await api.post(path, content=body, headers=JSON)
                for asked in ("/info", "/wandb_info", "/status", "/batch", "/metrics"):
                    await api.get(asked)
                await api.request("GET", "/status-env", json={"env_id": 0})


@pytest.mark.parametrize("kind", [kind for kind in STRANGE if "enormous" not in kind])
async def test_a_status_request_with_a_strange_value_causes_no_server_error(kind: str) -> None:
    async with run() as api:
        for value in STRANGE[kind]:
            await api.request("GET", "/status-env", content=f'{{"env_id": {value}}}', headers=JSON)
            await api.post("/disconnect-env", content=f'{{"env_id": {value}}}', headers=JSON)
            body = f'{{"env_id": 0, "wait_s": {value}, "current_step": 1, "queue_size": 0}}'
            await api.request("GET", "/status-env", content=body, headers=JSON)


BAD_PARTS = [
    *(("tokens", value) for value in ("null", '"abc"', "[1, 2]", "[[], []]", '[["a"]]')),
    *(("tokens", f"[[1, 2, 7, {token}], [1, 2, 7, 3]]") for token in ("-1", "2147483648", "1.5", "1e999", "NaN")),
    *(("tokens", f"[[1, 2, 7, {token}], [1, 2, 7, 3]]") for token in ("null", '"x"', "{}")),
    *(("masks", value) for value in ("null", "[]", "[[]]", "[[-100, -100, 7], [-100, -100, 7, 3]]")),
    *(("scores", value) for value in ("null", "1", "[]", "[1]", "[1, 2, 3]", "[[1], [2]]", '["a", "b"]')),
    *(("scores", f"[0, {score}]") for score in STRANGE["beyond JSON"]),
    *(("inference_logprobs", value) for value in ("[[-0.5]]", "[[], []]", '"x"', "{}", "[[null]]")),
    *(("env_id", value) for value in ('"a"', "1.5", "1e999", "{}", "[0]")),
    *(("overrides", value) for value in ("[1, 2]", "{}", "[{}]", "[{}, {}, {}]")),
    *(("messages", value) for value in ("{}", "[1, 2]", "[[1], [2]]", '[[{"role": "user"}], []]')),
    *(("generation_params", value) for value in ("[]", "1", '"a"')),
]


async def test_a_group_with_a_part_that_does_not_fit_is_refused_by_name() -> None:
    async with run() as api:
        for field, value in BAD_PARTS:
            assert field in await refusal_of(api, with_value(field, value))
        assert (await api.get("/status")).json()["queue_size"] == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("env_id", "null"),
        ("env_id", "-1"),
        ("env_id", "77"),
        ("scores", "[-0, -0.0]"),
        ("scores", "[3e38, -3e38]"),
        ("scores", "[5e-324, 0.1]"),
        ("generation_params", '{"note": "\\u0000 \\ud83d\\ude00 \\u2028"}'),
        ("images", "[" * 50 + "]" * 50),
        ("something_unknown", "[1, 2, 3]"),
        ("tokens", "[[1, 2, 7, 2147483647], [0, 0, 7, 3]]"),
    ],
    ids=lambda value: value[:40],
)
async def test_an_unusual_group_that_can_be_trained_on_is_delivered_unchanged(field: str, value: str) -> None:
    body = json.loads(with_value(field, value))
    async with run() as api:
        answer = await api.post("/scored_data", content=with_value(field, value), headers=JSON)
        assert answer.status_code == 200, answer.text
        await api.post("/scored_data", json=group(2))
        first, _ = (await api.get("/batch")).json()["batch"]
        sent = {key: item for key, item in body.items() if key != "something_unknown"}
        assert {key: item for key, item in first.items() if item is not None} == {
            key: item for key, item in sent.items() if item is not None
        }


async def test_numbers_as_text_floats_or_booleans_are_stored_as_integers() -> None:
    """As the reference server understands them; the trainer sees integers."""
    async with run() as api:
        for value in ('[["1", "2", "7", "3"], [1, 2, 7, 3]]', "[[1.0, 2, 7, 3], [true, 2, 7, 3]]"):
            answer = await api.post("/scored_data", content=with_value("tokens", value), headers=JSON)
            assert answer.status_code == 200, answer.text
        for item in (await api.get("/batch")).json()["batch"]:
            assert [[type(token) for token in row] for row in item["tokens"]] == [[int] * 4] * 2
            assert item["tokens"] == [[1, 2, 7, 3]] * 2


async def test_a_number_too_large_for_the_store_is_not_a_server_error() -> None:
    async with run() as api:
        for number in (2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400):
            for field, value in (("env_id", str(number)), ("policy_versions", json.dumps([[number] * 4] * 2))):
                answer = await api.post("/scored_data", content=with_value(field, value), headers=JSON)
                assert answer.status_code in (200, 422), answer.text


async def test_the_last_value_of_a_repeated_key_counts() -> None:
    async with run() as api:
        body = GOOD[:-1] + ', "scores": [3.0, 4.0]}'
        assert (await api.post("/scored_data", content=body, headers=JSON)).status_code == 200
        assert (await api.get("/latest_example")).json()["scores"] == [3.0, 4.0]


async def test_megabytes_of_white_space_around_a_group_are_accepted() -> None:
    async with run() as api:
        body = b" \n" * 2_500_000 + GOOD.encode() + b"\t" * 1000
        assert (await api.post("/scored_data", content=body, headers=JSON)).status_code == 200
        await refusal_of(api, b" " * 5_000_000)


@pytest.mark.parametrize("encoding", ["gzip, gzip", "GZIP", "deflate", "zstd", "identity", "\xff", "x" * 5_000, ","])
async def test_an_unknown_encoding_causes_no_server_error(encoding: str) -> None:
    async with run() as api:
        headers = {**JSON, "Content-Encoding": encoding.encode("latin-1")}
        answer = await api.post("/scored_data", content=gzip.compress(GOOD.encode()), headers=headers)
        assert answer.status_code in (200, 400, 415, 422)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(2**70),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(
            st.sampled_from([*group(2), "overrides", "messages", "truncated", "env_id", "policy_versions"]), anything
        ),
        max_size=3,
    )
)
async def test_a_group_of_arbitrary_values_is_accepted_or_refused(changes: list[tuple[str, Any]]) -> None:
    async with run() as api:
        body = json.dumps({**group(2), **dict(changes)})
        assert (await api.post("/scored_data", content=body, headers=JSON)).status_code in (200, 422)
        assert (await api.post("/scored_data_list", content=f"[{body}]", headers=JSON)).status_code in (200, 422)
        for path in ("/batch", "/latest_example", "/status", "/metrics"):
            assert (await api.get(path)).status_code == 200


# --- bombs ----------------------------------------------------------------------------------------------------------


def gigabyte_of(character: bytes) -> bytes:
    """A gzip of some megabytes that unfolds to a gigabyte: one block, a thousand times over."""
    packer, block = zlib.compressobj(9, wbits=-15), character * 2**20
    packed = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    checksum = 0
    for _ in range(1024):
        checksum = zlib.crc32(block, checksum)
    header = gzip.compress(b"")[:10]
    return header + 1024 * packed + packer.flush() + struct.pack("<II", checksum, 2**30)


@pytest.mark.slow
def test_bombs_are_refused_in_bounded_memory(tmp_path: Path) -> None:
    zeros, brackets = gigabyte_of(b"\0"), gigabyte_of(b"[")
    with api_process(tmp_path, "--max-body-bytes", str(32 * 2**20), is_forked=False) as api, api.client() as http:
        http.post("/register", json=REGISTRATION)
        before = api.peak_rss_bytes()
        for path in ("/scored_data", "/scored_data_list", "/evaluations/a/answers"):
            for bomb in (zeros, brackets, gzip.compress(zeros, 1)):
                answer = http.post(path, content=bomb, headers=GZIP)
                assert answer.status_code in (400, 413, 422)
                assert answer.json()["detail"]
        long = http.post("/scored_data", content=(b" " * 2**20 for _ in range(64)), headers=JSON)
        assert long.status_code == 413
        assert api.peak_rss_bytes() - before < 250 * 2**20
        assert http.post("/scored_data", json=group(4, tag=42)).status_code == 200
        assert tags(http.get("/batch").json()["batch"]) == [42]


@pytest.mark.slow
def test_no_route_reads_a_body_beyond_the_limit(tmp_path: Path) -> None:
    posts = ["/register", "/register-env", "/disconnect-env", "/evaluations", "/acknowledge?lease=a"]
    routes = [("POST", path) for path in posts] + [("GET", path) for path in ("/status-env", "/batch", "/info")]
    greedy = []
    with api_process(tmp_path, "--max-body-bytes", str(2**20), is_forked=False) as api:
        for method, path in routes:
            api.forget_peak_rss()
            before = api.peak_rss_bytes()
            with api.client() as http, contextlib.suppress(httpx.TransportError):  # it may hang up in the middle
                answer = http.request(method, path, content=(b" " * 2**20 for _ in range(40)), headers=JSON)
                assert answer.status_code < 500
            if api.peak_rss_bytes() - before > 20 * 2**20:
                greedy.append((method, path))
    assert greedy == []
