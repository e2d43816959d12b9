"""HTTP bodies of the inference server: sent by environments and bridges, answered by `grpo_engine.server`.

The formats are those of the stock Atropos server (`/generate`, `/bridge/*`, `/lora/*`), with the policy version and the
log-prob convention added to every answer.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, FiniteFloat

from grpo_engine.wire.codec import Message

LogprobsMode = Literal["raw", "processed"]
"""`raw`: before temperature, penalties and truncation. `processed`: after all of them, as sampled."""


class TokenPrompt(Message):
    """A prompt as tokens."""

    prompt_token_ids: list[int] = Field(min_length=1)


class GenerateRequest(Message):
    """Body of `POST /generate`: a prompt and vLLM `SamplingParams`; an unknown key is refused by name."""

    model_config = ConfigDict(extra="forbid")

    prompt: TokenPrompt | str
    n: int = Field(1, ge=1, lt=2**31)
    max_tokens: int = Field(16, ge=1, lt=2**31)
    min_tokens: int = Field(0, ge=0, lt=2**31)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = Field(1.0, gt=0)
    logprobs: int | None = Field(None, ge=0)
    """0: the sampled token only; k: up to k more; absent: none in the answer."""
    prompt_logprobs: int | None = Field(None, ge=0)
    skip_special_tokens: bool = True
    stream: bool = False


class GenerateResponse(Message):
    """Answer of `POST /generate`. Every list has one entry per completion."""

    text: list[str]
    prompt: str
    finish_reasons: list[Literal["stop", "length", "abort"]]
    logprobs: list[list[list[dict[str, FiniteFloat]]]] | None = None
    """`[completion][position] -> [{"token id": logprob}]`, the sampled token first, the end token included."""
    prompt_token_ids: list[int] | None = None
    token_ids: list[list[int]] | None = None
    prompt_logprobs: list[dict[str, FiniteFloat] | None] | None = None
    policy_version: int
    """Policy version at the last generated token."""
    policy_versions: list[list[int]] | None = None
    """Policy version at every generated token; sent with `logprobs`."""
    logprobs_mode: LogprobsMode


class BridgeInfo(Message):
    """Answer of `GET /bridge/info`."""

    enabled: bool
    shared_weights: bool
    update_count: int
    last_update_time: float
    """Unix seconds; 0 before the first update."""
    model_name: str
    device: str
    policy_version: int
    logprobs_mode: LogprobsMode
    paused: bool
    instance: str
    """Differs for every start of the server, so that a trainer detects a restart."""


class PauseRequest(Message):
    """Body of `POST /bridge/pause`; an empty body selects the defaults."""

    owner_pid: int | None = None
    """Process that will resume; the server resumes when that process exits."""
    timeout_s: float = Field(300.0, gt=0, allow_inf_nan=False)
    """Longest pause; after it the server resumes and logs it."""


PolicyVersion = Annotated[int, Field(ge=0, lt=2**63)]
"""As stored in the weight lock, an int64."""


class ResumeRequest(Message):
    """Body of `POST /bridge/resume`."""

    policy_version: PolicyVersion | None = None
    """Version that is served from now on; absent: unchanged."""


class ReloadRequest(Message):
    """Body of `POST /bridge/reload`: load a checkpoint into the served weights."""

    path: str
    policy_version: PolicyVersion


class LoraLoadRequest(Message):
    """Body of `POST /lora/load`."""

    adapter_path: str
    adapter_name: str | None = None
    policy_version: PolicyVersion | None = None


class LoraStatus(Message):
    """Answer of `GET /lora/status`."""

    lora_available: bool
    max_lora_rank: int = 0
    """Largest supported rank."""
    adapter_dtype: str | None = None
    """Type to which the server rounds adapters, e.g. `bfloat16`; None: no rounding."""
    active_adapter_path: str | None = None
    active_adapter_name: str | None = None
    active_adapter_id: int | None = None
    load_count: int = 0
    available_adapters: list[str] = []
    """Folders below $LOGDIR that contain adapters."""
