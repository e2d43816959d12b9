"""HTTP bodies of the inference server: sent by environments and bridges, answered by `grpo_engine.server`.

The formats are those of the stock Atropos server (`/generate`, `/bridge/*`, `/lora/*`), with the policy version and the
log-prob convention added to every answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, FiniteFloat

from grpo_engine.wire.bridge_file import SharedTensor
from grpo_engine.wire.codec import Message, Reason, Whole

LogprobsMode = Literal["raw", "processed"]
"""`raw`: before temperature, penalties and truncation. `processed`: after all of them, as sampled."""


def wrong_server(url: str, model_name: str = "MODEL") -> str:
    """What to say of a server that does not know our routes."""
    port = urlsplit(url).port or 80
    return (
        f"{url} is not our inference server: stock vLLM (vllm.entrypoints.openai.api_server) has only /v1/…, and the "
        f"rollout API has another port; start `grpo-engine server --model {model_name} --port {port}` there, which has "
        "/generate, or correct the address"
    )


Penalty = Annotated[float, Field(ge=-2, le=2)]
"""Presence and frequency, with OpenAI's bounds; larger ones overflow the logits."""
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100)]
MAX_TEMPERATURE = 1000.0
LEAST_TEMPERATURE = 1e-4
"""Of what is trained on: far below it logits overflow in float32. vLLM samples at 0.01 at least."""


class TokenPrompt(Message):
    """A prompt as tokens."""

    prompt_token_ids: list[int] = Field(min_length=1)


StopString = Annotated[str, Field(max_length=1024)]
Stop = StopString | Annotated[list[StopString], Field(max_length=64)] | None
StopTokens = Annotated[list[int], Field(max_length=1024)] | None
"""Each is looked for at every token of every completion, so there is a bound."""


class GenerateRequest(Message):
    """Body of `POST /generate`: a prompt and vLLM `SamplingParams`; an unknown key is refused by name."""

    model_config = ConfigDict(extra="forbid")

    prompt: TokenPrompt | str
    n: int = Field(1, ge=1, lt=2**31)
    max_tokens: int = Field(16, ge=1, lt=2**31)
    min_tokens: int = Field(0, ge=0, lt=2**31)
    temperature: float = Field(1.0, ge=0, le=MAX_TEMPERATURE)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop = None
    stop_token_ids: StopTokens = None
    ignore_eos: bool = False
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logprobs: int | None = Field(0, ge=0)
    """0, and absent: the sampled token only, as Atropos's server; k: up to k more; null: none in the answer."""
    prompt_logprobs: int | None = Field(None, ge=0)
    skip_special_tokens: bool = True
    stream: bool = False
    interrupt: bool = False
    """Whether completions that a weight update finds half sampled end there, with the finish reason `abort`."""


class GenerateResponse(Message):
    """Answer of `POST /generate`. Every list has one entry per completion."""

    text: list[str]
    prompt: str
    finish_reasons: list[Literal["stop", "length", "abort"]]
    """`abort`: cut off by the server, and not to be trained on."""
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


SleepState = Literal["awake", "asleep", "weights"]
"""`asleep`: without weights and cache; `weights`: taking its weights from a trainer. It samples in neither."""


ShortText = Annotated[str, Field(max_length=256)]
"""Of a state that messages show."""


class BridgeInfo(Message):
    """Answer of `GET /bridge/info`."""

    enabled: bool
    shared_weights: bool
    update_count: int
    last_update_time: float
    """Unix seconds; 0 before the first update."""
    model_name: str = Field(max_length=4096)
    device: ShortText
    policy_version: int = Field(ge=0, le=2**62)
    """With room for those of the steps that a trainer adds to it."""
    logprobs_mode: LogprobsMode
    paused: bool
    instance: ShortText
    """Differs for every start of the server, so that a trainer detects a restart."""
    receives_weights: bool = False
    """Whether it can join a weight group."""
    num_ranks: int = Field(1, ge=1, le=2**16)
    """Processes that hold weights."""
    dtype: ShortText = ""
    """Of the weights, e.g. `bfloat16`."""
    can_sleep: bool = False
    """Whether it was started with sleep mode."""
    sleep_state: SleepState = "awake"


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


class TensorShape(Message):
    """A tensor of the model, by its name in transformers."""

    name: str
    shape: tuple[int, ...]


class GroupMeeting(Message):
    """How the members of a weight group find each other."""

    epoch: int
    """Number of the group: another one has other members."""
    store: Path
    """An empty file of the user's own, through which members exchange their addresses."""
    size: int = Field(ge=2)
    """Members: the trainer and every process that receives."""
    timeout_s: float = Field(gt=0, allow_inf_nan=False)
    """Longest time for the meeting, and for each transfer."""


class JoinRequest(Message):
    """Body of `POST /bridge/join`: take places in a weight group."""

    meeting: GroupMeeting
    first_rank: int = Field(ge=1)
    """Place of the server's first process; the others follow."""
    sender_pid: int
    """Of the trainer, on its machine."""
    sender_file: Path | None = None
    """The note of the trainer, where members may be on several machines; None: all are on this one."""
    dtype: str
    """Of the tensors as they are sent, e.g. `bfloat16`."""
    layers: list[list[TensorShape]]
    """What is sent, in this order; the tensors of a layer together."""


class JoinAnswer(Message):
    """Answer of `POST /bridge/join`; the meeting itself goes on after it."""

    instance: ShortText
    problem: Reason | None = None
    """Why these tensors cannot be received."""


class ReceiveRequest(Message):
    """Body of `POST /bridge/receive`: take what the group's sender sends now as the served weights."""

    epoch: int
    policy_version: PolicyVersion
    with_checksum: bool = False


class ReceiveAnswer(Message):
    """Answer of `POST /bridge/receive`, when the new weights are served."""

    instance: ShortText
    policy_version: Whole
    problem: Reason | None = None
    """Why they are not; the old ones may be overwritten in part, and nothing is served until the next update."""
    checksums: list[Whole] = []
    """Of each process, over the tensors as they were received."""
    paused_s: FiniteFloat = 0.0
    """How long no request was served."""


class SleepRequest(Message):
    """Body of `POST /bridge/sleep`: free weights and cache; requests wait until a trainer wakes the server."""

    owner_pid: int
    """Of the trainer, on this machine."""


class StagedWeights(Message):
    """Memory through which a trainer hands over its weights, a full one after another."""

    memory: SharedTensor
    """One dimension, in the dtype of the weights; on the GPU of the server, or in POSIX shared memory."""
    layers: list[list[TensorShape]]
    """What is handed over, in this order: all elements of all tensors, one after another."""


class WakeRequest(Message):
    """Body of `POST /bridge/wake_up`: allocate the weights again, and make ready to take their values."""

    owner_pid: int
    staged: StagedWeights


class TakeRequest(Message):
    """Body of `POST /bridge/take`: copy what is in the staging memory now."""

    number: int = Field(ge=0)
    """Of the memory's contents, from 0 on in each weight update."""


class WokenRequest(Message):
    """Body of `POST /bridge/woken`: all was handed over; allocate the cache and answer requests."""

    policy_version: PolicyVersion
    with_checksum: bool = False


class SleepAnswer(Message):
    """Answer of `POST /bridge/sleep`, `wake_up`, `take` and `woken`."""

    instance: ShortText
    policy_version: Whole
    state: SleepState
    problem: Reason | None = None
    """Why it was not done; the server is in `state`."""
    checksum: Whole | None = None
    """Over the served weights, if it was asked for."""


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
    adapter_dtype: ShortText | None = None
    """Type to which the server rounds adapters, e.g. `bfloat16`; None: no rounding."""
    active_adapter_path: str | None = None
    active_adapter_name: str | None = None
    active_adapter_id: int | None = None
    load_count: int = 0
    available_adapters: list[str] = []
    """Folders below $LOGDIR that contain adapters."""
