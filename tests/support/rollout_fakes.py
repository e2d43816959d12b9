"""What the tests of the rollout API, its clients and the environments share: groups, an API in a thread, a fake server.

The API is the real one on a real socket; only the inference server is a fake, which answers `/generate` in the stock
shape from a fixed rule, because the real one needs a model.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from grpo_engine.rollouts.config import ApiConfig
from grpo_engine.rollouts.coordinator import Coordinator
from grpo_engine.rollouts.http.app import make_app
from grpo_engine.rollouts.stock.connections import WatchedProtocol
from grpo_engine.rollouts.storage.store import Store

RUN: dict[str, Any] = {
    "batch_size": 4,
    "max_token_len": 64,
    "checkpoint_dir": "checkpoints",
    "save_checkpoint_interval": 3,
    "starting_step": 0,
    "num_steps": 30,
}
REGISTRATION: dict[str, Any] = {"wandb_group": "group", "wandb_project": "project", **RUN}
ENVIRONMENT: dict[str, Any] = {"max_token_length": 64, "desired_name": "sums", "weight": 1.0, "group_size": 2}


def group(num_sequences: int = 2, *, tag: int = 7, env_id: int | None = None, **more: Any) -> dict[str, Any]:
    """A group of sequences of four tokens, two of them trained; `tag` is a token to know it by."""
    return {
        "tokens": [[1, 2, tag, 3]] * num_sequences,
        "masks": [[-100, -100, tag, 3]] * num_sequences,
        "scores": [float(index) for index in range(num_sequences)],
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.25]] * num_sequences,
        **({} if env_id is None else {"env_id": env_id}),
        **more,
    }


def tags(batch: list[dict[str, Any]]) -> list[int]:
    """Which groups a batch holds, by their `tag`."""
    return [item["tokens"][0][2] for item in batch]


_idle_apps: dict[str, list[FastAPI]] = {}
"""Applications that nobody uses now, by their settings."""


@contextlib.contextmanager
def rollout_app(config: ApiConfig) -> Iterator[FastAPI]:
    """The application as `make_app` makes it, with the store that `config` names.

    All its state is in the store and in the coordinator, which are new. Its routes are those of an earlier one with the
    same settings where there was one: they take longer to make than most tests to run.
    """
    assert config.store is not None
    store = Store(config.store)
    idle = _idle_apps.setdefault(repr(config.model_copy(update={"store": None})), [])
    app = idle.pop() if idle else make_app(config, store)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        coordinator = app.state.coordinator = Coordinator(config, store, store.load())
        yield
        await coordinator.close_store()

    app.router.lifespan_context = lifespan
    yield app
    idle.append(app)


@contextlib.asynccontextmanager
async def api_client(
    database: Path = Path(":memory:"), *, headers: dict[str, str] | None = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an API in the same event loop, without sockets."""
    with rollout_app(ApiConfig(store=database, **settings)) as app:
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app=app), base_url="http://localhost", headers=headers
            ) as client,
        ):
            yield client


@contextlib.contextmanager
def served(app: FastAPI, port: int = 0, **settings: Any) -> Iterator[str]:
    """Serve `app` on loopback from a thread; yields its URL."""
    settings = {"ws": "none", **settings}
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", timeout_graceful_shutdown=0, **settings)
    )
    is_up = threading.Event()
    startup = server.startup

    async def startup_then_tell(sockets: Any = None) -> None:
        await startup(sockets)
        is_up.set()

    server.startup = startup_then_tell  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        assert is_up.wait(60)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)


@contextlib.contextmanager
def served_api(database: Path = Path(":memory:"), port: int = 0, **settings: Any) -> Iterator[str]:
    """A real API on loopback."""
    with (
        rollout_app(ApiConfig(store=database, **settings)) as app,
        served(app, port, http=WatchedProtocol) as url,
    ):
        yield url


class FakeTokenizer:
    """One token a character; a chat is its texts, each closed by a newline."""

    chat_template = "characters"

    def encode(self, text: str) -> list[int]:
        """Code points."""
        return [ord(character) for character in text]

    def get_vocab(self) -> dict[str, int]:
        """One of the characters: all have the same length."""
        return {"x": ord("x")}

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> dict[str, list[int]]:
        """Code points of all messages, in the mapping that transformers 5 answers with."""
        return {"input_ids": self.encode("".join(message["content"] + "\n" for message in conversation))}


END_TOKEN = 0
"""What ends a completion of the fake server."""

Answer = Callable[[str, int], str]


def fake_inference(answer: Answer, *, stock: bool = False, fail_first: int = 0) -> FastAPI:
    """An inference server that completes a prompt with `answer(prompt, index)` and the end token.

    Args:
        stock: leave out versions and convention, as the stock server does.
        fail_first: answer so many requests with 503.
    """
    app = FastAPI()
    app.state.requests = []
    app.state.authorizations = set()
    app.state.version = 5

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        body = json.loads(await request.body())
        app.state.requests.append(body)
        app.state.authorizations.add(request.headers.get("authorization"))
        if len(app.state.requests) <= fail_first:
            return JSONResponse({"detail": "loading"}, 503)
        prompt = "".join(map(chr, body["prompt"]["prompt_token_ids"]))
        texts = [answer(prompt, index)[: body["max_tokens"]] for index in range(body.get("n", 1))]
        tokens = [[*map(ord, text), END_TOKEN][: body["max_tokens"]] for text in texts]
        ours = {
            "policy_version": app.state.version,
            "policy_versions": [[app.state.version] * len(row) for row in tokens],
            "logprobs_mode": "processed",
        }
        return JSONResponse(
            {
                "text": texts,
                "prompt": prompt,
                "finish_reasons": ["stop" if row[-1] == END_TOKEN else "length" for row in tokens],
                "logprobs": [[[{str(token): -0.5}] for token in row] for row in tokens],
                "token_ids": tokens,
                **({} if stock else ours),
            }
        )

    return app
