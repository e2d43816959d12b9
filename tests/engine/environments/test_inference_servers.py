"""Several inference servers of one environment: where requests go, and what happens while one does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from environment_runs import RUN, settings
from ports import free_port
from rollout_fakes import FakeTokenizer, fake_inference, served, served_api

from grpo_engine.data.source import RolloutApiSource
from grpo_engine.environments import peers
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.inference_servers import InferenceServers, Session
from grpo_engine.environments.main import work
from grpo_engine.environments.server_queues import ServerQueues
from grpo_engine.errors import PeerError
from grpo_engine.wire.inference import GenerateRequest, TokenPrompt
from grpo_engine.wire.rollouts import SamplingLimit


class Fake:
    """A server that answers, holds its answers, fails or refuses; it counts what reaches it."""

    def __init__(self) -> None:
        self.is_away = False
        self.status = 200
        self.health = 200
        self.body: dict[str, Any] = {
            "text": ["x", "x"],
            "prompt": "",
            "finish_reasons": ["stop", "stop"],
            "logprobs": [[[{"7": -0.5}]]] * 2,
            "policy_version": 1,
        }
        self.num_requests = 0
        self.arrivals = asyncio.Queue[None]()
        self.was_asked = asyncio.Event()
        """Whether its health was asked while it was away."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()

        self.bodies: list[dict[str, Any]] = []
        """Answers to the next requests, instead of `body`."""
        self.sent: list[dict[str, Any]] = []

    async def answer(self, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0)  # as with a socket, other tasks go on
        if self.is_away:
            if request.url.path == "/health":
                self.was_asked.set()
            raise httpx.ConnectError("refused", request=request)
        if request.url.path == "/health":
            return httpx.Response(self.health)
        self.num_requests += 1
        self.arrivals.put_nowait(None)
        await self.may_answer.wait()
        if self.is_away:
            raise httpx.ReadError("reset", request=request)
        self.sent.append(json.loads(request.content))
        return httpx.Response(self.status, json=self.bodies.pop(0) if self.bodies else self.body)


@contextlib.asynccontextmanager
async def clients_of(fakes: Sequence[Fake], first: int = 0) -> AsyncIterator[InferenceServers]:
    """A client of fake servers, of which each is healthy that answers."""
    async with contextlib.AsyncExitStack() as stack:
        https = [
            await stack.enter_async_context(
                httpx.AsyncClient(transport=httpx.MockTransport(fake.answer), base_url=f"http://server-{index}")
            )
            for index, fake in enumerate(fakes)
        ]
        yield await stack.enter_async_context(InferenceServers(https, timeout_s=5, first=first))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_MIN_PAUSE_S", 0.0)
    monkeypatch.setattr(peers, "_MAX_PAUSE_S", 0.001)


def request(num_prompt_tokens: int = 4, max_tokens: int = 8) -> GenerateRequest:
    prompt = TokenPrompt(prompt_token_ids=[1] * num_prompt_tokens)
    return GenerateRequest(prompt=prompt, n=2, max_tokens=max_tokens, logprobs=0)


async def test_a_request_goes_to_the_server_with_the_fewest_open_tokens() -> None:
    large, small = Fake(), Fake()
    async with clients_of([large, small]) as servers:
        for fake in (large, small):
            fake.may_answer.clear()
        work = [asyncio.create_task(servers.generate(request(max_tokens=100)))]
        async with asyncio.timeout(60):
            await large.arrivals.get()
            for _ in range(3):  # together fewer tokens than the large one
                work.append(asyncio.create_task(servers.generate(request())))
                await small.arrivals.get()
            assert servers.num_open == 4
            for fake in (large, small):
                fake.may_answer.set()
            await asyncio.gather(*work)
        assert (large.num_requests, small.num_requests, servers.num_open) == (1, 3, 0)


async def test_requests_one_after_the_other_are_spread_evenly() -> None:
    fakes = [Fake(), Fake(), Fake()]
    async with clients_of(fakes) as servers:
        for _ in range(12):
            await servers.generate(request())
        assert [fake.num_requests for fake in fakes] == [4, 4, 4]
        assert servers.progress().startswith("http://server-0: 4 requests answered, 0 open, http://server-1: 4 ")


async def test_environments_that_begin_with_different_servers_are_not_all_at_the_same_one() -> None:
    fakes = [Fake(), Fake(), Fake()]
    for first in range(3):
        async with clients_of(fakes, first) as servers:
            await servers.generate(request())
    assert [fake.num_requests for fake in fakes] == [1, 1, 1]


async def test_a_conversation_stays_on_its_server_until_that_one_does_not_answer() -> None:
    fakes = [Fake(), Fake()]
    async with clients_of(fakes) as servers:
        sessions = [Session() for _ in range(4)]
        for _ in range(3):
            for session in sessions:
                await servers.generate(request(), session)
        assert [fake.num_requests for fake in fakes] == [6, 6]
        fakes[0].is_away = True
        for session in sessions:
            await servers.generate(request(), session)
        assert [fake.num_requests for fake in fakes] == [6, 10]
        fakes[0].is_away = False
        await servers.wait_until_healthy()
        for session in sessions:
            await servers.generate(request(), session)
        assert [fake.num_requests for fake in fakes] == [6, 14], "its prefix cache is on the other now"


async def test_an_open_request_of_a_server_that_dies_goes_to_another_at_once_and_the_server_joins_again() -> None:
    dies, lives = Fake(), Fake()
    async with clients_of([dies, lives]) as servers:
        dies.may_answer.clear()
        open_requests = [asyncio.create_task(servers.generate(request())) for _ in range(2)]
        async with asyncio.timeout(60):
            await dies.arrivals.get()
            dies.is_away = True
            dies.may_answer.set()
            await asyncio.gather(*open_requests)
            assert lives.num_requests == 2
            await dies.was_asked.wait()
            for _ in range(5):
                await servers.generate(request())
            assert (dies.num_requests, lives.num_requests) == (1, 7), "it is asked for its health alone"
            assert "http://server-0: 0 requests answered, 0 open (does not answer)" in servers.progress()
            dies.is_away = False
            while dies.num_requests == 1:
                await servers.generate(request())


async def test_while_no_server_answers_requests_wait_and_nothing_is_lost() -> None:
    fakes = [Fake(), Fake()]
    for fake in fakes:
        fake.is_away = True
    async with clients_of(fakes) as servers:
        waiting = [asyncio.create_task(servers.generate(request())) for _ in range(4)]
        async with asyncio.timeout(60):
            await asyncio.gather(*(fake.was_asked.wait() for fake in fakes))
            assert servers.num_open == 4
            fakes[1].is_away = False
            assert len(await asyncio.gather(*waiting)) == 4
        assert [fake.num_requests for fake in fakes] == [0, 4]


async def test_a_server_that_answers_with_errors_is_asked_by_no_request_while_another_works() -> None:
    broken, works = Fake(), Fake()
    broken.status = broken.health = 503
    async with clients_of([broken, works]) as servers:
        async with asyncio.timeout(60):
            await servers.wait_until_healthy()
        for _ in range(4):
            await servers.generate(request())
        assert (broken.num_requests, works.num_requests) == (0, 4)
        works.status = 400
        with pytest.raises(PeerError, match=r"inference server http://server-1: .* was refused with 400"):
            await servers.generate(request())


async def test_a_server_without_generate_is_refused_with_the_command_of_one_that_has_it() -> None:
    stock = Fake()
    stock.status = 404
    async with clients_of([stock]) as servers:
        await servers.wait_until_healthy()
        with pytest.raises(PeerError, match=r"POST /generate answered 404: .*stock vLLM.*`grpo-engine server --model"):
            await servers.generate(request())


def test_several_servers_are_a_list_or_separated_by_commas() -> None:
    table = {"task": "sort6", "model_name": "unused"}
    urls = ("http://a:1", "http://b:2")
    for written in (["http://a:1", "http://b:2/v1"], "http://a:1/v1, http://b:2", ["http://a:1,http://b:2"]):
        assert EnvironmentConfig.model_validate({**table, "inference_url": written}).inference_urls == urls
    for wrong, message in {"http://a:1,http://a:1/v1": "http://a:1 is named twice", "": "at least 1"}.items():
        with pytest.raises(ValueError, match=message):
            EnvironmentConfig.model_validate({**table, "inference_url": wrong})


@pytest.mark.slow
@pytest.mark.extended("test_an_open_request_of_a_server_that_dies_goes_to_another_at_once_and_the_server_joins_again")
async def test_every_group_arrives_once_though_a_server_ends_and_another_takes_its_place() -> None:
    """Against a real API and servers with sockets: one ends under load, and starts again on its port."""
    num_batches = 12
    fakes = [fake_inference(lambda prompt, index: prompt), fake_inference(lambda prompt, index: prompt)]

    def train(url: str, second: contextlib.ExitStack, port: int) -> list[str]:
        """The prompts of all groups in the order of batches; ends a server and starts it again between them."""
        prompts: list[str] = []
        with RolloutApiSource(url) as source:
            source.register(**{**RUN, "num_steps": num_batches})
            for number in range(num_batches):
                if number == 3:
                    second.close()
                if number == 7:
                    second.enter_context(served(fakes[1], port))
                batch = source.next_batch(timeout_s=60)
                assert batch is not None
                prompts += ["".join(map(chr, group.tokens[0])).partition("\n")[0] for group in batch]
        return prompts

    with served_api() as api, served(fakes[0]) as first, contextlib.ExitStack() as stack:
        second = stack.enter_context(contextlib.ExitStack())
        url = second.enter_context(served(fakes[1], free_port()))  # no connection has it while the server is away
        config = settings(api, f"{first},{url}", total_steps=num_batches)
        training = asyncio.create_task(asyncio.to_thread(train, api, second, int(url.rpartition(":")[2])))
        async with asyncio.timeout(60):
            assert await work(config, FakeTokenizer()) == 0
            prompts = await training
    sent = Counter(
        bytes(each["prompt"]["prompt_token_ids"]).decode().partition("\n")[0]
        for fake in fakes
        for each in fake.state.requests
    )
    assert len(prompts) == 2 * num_batches
    assert max(Counter(prompts).values()) == 1, "no group arrives twice"
    assert set(prompts) <= set(sent)
    assert all(fake.state.requests for fake in fakes)


@pytest.mark.parametrize(
    ("malformed", "words"),
    [
        ({"text": ["x"]}, "answered 1 text to a request for 2 completions"),
        ({"finish_reasons": []}, "answered 0 finish_reasons to a request for 2 completions"),
        ({"logprobs": [[[{"7": -0.5}]]]}, "answered 1 logprobs to a request for 2 completions"),
        ({"logprobs": None}, "answered without logprobs"),
        ({"logprobs": [[[]], [[]]]}, "completion 0, token 0: its log-probability is of '', which is no token id"),
        ({"logprobs": [[[{}]], [[]]]}, "is of '', which is no token id"),
        ({"logprobs": [[[{"a": -0.5}]]] * 2}, "is of 'a', which is no token id"),
        ({"logprobs": [[[{"-7": -0.5}]]] * 2}, "is of '-7', which is no token id"),
        ({"logprobs": [[[{"9" * 5000: -0.5}]]] * 2}, "which is no token id"),
        ({"logprobs": [[[{"7": -0.5}]], []]}, "completion 1 is empty"),
        ({"token_ids": [[7]]}, "answered 1 token_ids"),
        ({"policy_versions": [[1]]}, "answered 1 policy_versions"),
        (
            {"policy_versions": [[1], []]},
            "the 1 tokens of completion 1 need a policy version each, from 0 up; it has 0",
        ),
        ({"policy_versions": [[1], [-1]]}, "need a policy version each, from 0 up"),
        ({"prompt": 5}, "not a Completions"),
    ],
)
async def test_a_malformed_answer_is_an_error_that_names_the_server(malformed: dict[str, Any], words: str) -> None:
    fake = Fake()
    fake.body |= malformed
    async with clients_of([fake]) as servers:
        with pytest.raises(PeerError, match=f"http://server-0.*{words}"):
            await servers.generate(request())


def answered(*completions: tuple[int, str], version: int) -> dict[str, Any]:
    """An answer of `/generate`: a token and a finish reason for each completion; what was cut off may have no token."""
    return {
        "text": [chr(64 + token) for token, _ in completions],
        "prompt": "",
        "finish_reasons": [reason for _, reason in completions],
        "logprobs": [[[{str(token): -0.5}]] if token else [] for token, _ in completions],
        "token_ids": [[token] if token else [] for token, _ in completions],
        "policy_version": version,
        "policy_versions": [[version] if token else [] for token, _ in completions],
    }


async def test_completions_that_a_weight_update_cut_off_are_sampled_again_and_the_others_kept() -> None:
    fake = Fake()
    fake.bodies = [
        answered((1, "stop"), (2, "abort"), (3, "length"), (0, "abort"), version=4),
        answered((5, "abort"), (6, "stop"), version=5),
        answered((7, "length"), version=6),
    ]
    async with clients_of([fake]) as servers:
        got = await servers.generate(request().model_copy(update={"n": 4, "interrupt": True}))
        assert servers.num_cut == 3
    assert [each["n"] for each in fake.sent] == [4, 2, 1]
    assert all(each["interrupt"] for each in fake.sent)
    assert got.finish_reasons == ["stop", "length", "stop", "length"]
    assert got.token_ids == [[1], [3], [6], [7]]
    assert got.policy_versions == [[4], [4], [5], [6]]
    assert got.text == ["A", "C", "F", "G"]


async def test_a_server_that_reports_one_version_keeps_it_for_what_it_had_finished() -> None:
    fake = Fake()
    fake.bodies = [answered((1, "stop"), (2, "abort"), version=4), answered((3, "stop"), version=5)]
    for body in fake.bodies:
        del body["policy_versions"]
    async with clients_of([fake]) as servers:
        got = await servers.generate(request())
    assert got.policy_versions == [[4], [5]]


async def test_a_request_with_a_seed_is_repeated_as_a_whole() -> None:
    """Two copies would get the random numbers of the first two, which are kept."""
    fake = Fake()
    fake.bodies = [
        answered((1, "stop"), (2, "abort"), version=4),
        answered((3, "stop"), (4, "stop"), version=5),
    ]
    async with clients_of([fake]) as servers:
        got = await servers.generate(request().model_copy(update={"seed": 7}))
    assert got.token_ids == [[3], [4]]


async def test_an_answer_whose_lists_do_not_fit_is_refused_also_where_completions_were_cut_off() -> None:
    fake = Fake()
    fake.bodies = [{**answered((1, "stop"), (2, "abort"), version=4), "text": ["A"]}]
    async with clients_of([fake]) as servers:
        with pytest.raises(PeerError, match="answered 1 text to a request for 2 completions"):
            await servers.generate(request())


@pytest.mark.parametrize(
    ("answers", "limit"),
    [
        ([("0", "0"), ("2", "1")], None),  # they may have arrived just now
        ([("2", "1"), ("2", "1")], SamplingLimit.SERVERS),
        ([("2", "0"), ("2", "0")], None),  # the other server has room
        ([("2", "1"), ("2", "1"), ("2", "0")], None),
        ([("2", None), ("2", None)], SamplingLimit.UNKNOWN),  # a server without vLLM's metrics
        ([("0", None), ("0", None)], None),
        ([(None, None)], SamplingLimit.UNKNOWN),
    ],
)
async def test_servers_are_full_where_requests_queue_at_each_twice_in_a_row(
    answers: list[tuple[str | None, str | None]], limit: SamplingLimit | None
) -> None:
    current: tuple[str | None, str | None] = answers[0]

    def answer(request: httpx.Request) -> httpx.Response:
        count = current[int(request.url.host[-1])]
        if count is None:
            return httpx.Response(404)
        return httpx.Response(200, text=f'# HELP x y\nvllm:num_requests_waiting{{engine="0"}} {count}.0\nother 9\n')

    async with contextlib.AsyncExitStack() as stack:
        https = [
            await stack.enter_async_context(
                httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url=f"http://server-{number}")
            )
            for number in range(2)
        ]
        queues = ServerQueues(https)
        for each in answers:
            current = each
            await queues.ask()
        assert queues.limit() is limit
