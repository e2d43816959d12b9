"""What comes in: bytes of a request, decompressed within bounds, and groups that can be trained on.

A group is validated once, here, and stored as the bytes in which it is later handed out, so that nothing on the way to
the trainer reads its numbers again. Says what is wrong with which group of which environment; never repairs one.

There are two readers of one definition: msgspec, which is quick, for groups as they should be; pydantic for all that it
does not take, either because it is more lenient (1.0 for a token, as stock servers accept it) or for its words.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import GenericAlias
from typing import Annotated, Any, get_type_hints

import msgspec
from pydantic import Field, TypeAdapter, ValidationError

from grpo_engine.wire.rollouts import LARGEST_WHOLE, MASKED_LABEL, ScoredGroup

TOKEN_BOUND = 2**31
"""No vocabulary is that large, and a tensor of token ids holds no number beyond."""
LARGEST = 3.4028234663852886e38
"""The largest number of a float32 tensor: beyond, a reward would be infinite for the trainer."""
_GZIP_WINDOW = 31
"""zlib's word for a gzip header."""


class Refusal(Exception):
    """A request that is answered with an error; `reason` is for the log and the counters."""

    def __init__(self, status: int, detail: str | list[dict[str, Any]], reason: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedGroup:
    """A group that was found good."""

    env_id: int | None
    num_sequences: int
    body: bytes
    """JSON with every key of `ScoredGroup`."""
    has_logprobs: bool
    has_labels: bool
    """Whether every trained position of its masks holds the token itself."""
    policy_version: int | None = None
    """Oldest version of the weights that sampled a trained token, where the group says so."""


# Bounds stand twice, once for each reader; each leaves the other's alone.
_Token = Annotated[int, msgspec.Meta(ge=0, lt=TOKEN_BOUND), Field(ge=0, lt=TOKEN_BOUND)]
_Version = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_WHOLE), Field(ge=0, le=LARGEST_WHOLE)]
_Label = Annotated[int, msgspec.Meta(ge=-TOKEN_BOUND, lt=TOKEN_BOUND), Field(ge=-TOKEN_BOUND, lt=TOKEN_BOUND)]
_Id = Annotated[int, msgspec.Meta(ge=-LARGEST_WHOLE, le=LARGEST_WHOLE), Field(ge=-LARGEST_WHOLE, le=LARGEST_WHOLE)]
_Number = Annotated[float, msgspec.Meta(ge=-LARGEST, le=LARGEST), Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]


class _PostedGroup(ScoredGroup):
    """A group of tokens and finite numbers: NaN is no JSON, and nobody downstream could read the batch."""

    tokens: list[list[_Token]]
    masks: list[list[_Label]]
    env_id: _Id | None = None
    policy_versions: list[list[_Version]] | None = None
    distill_token_ids: list[list[list[_Token]]] | None = None
    scores: list[_Number]
    advantages: list[list[_Number]] | None = None
    ref_logprobs: list[list[_Number]] | None = None
    inference_logprobs: list[list[_Number]] | None = None
    distill_logprobs: list[list[list[_Number]]] | None = None


_ONE: TypeAdapter[_PostedGroup] = TypeAdapter(_PostedGroup)
_MANY: TypeAdapter[list[_PostedGroup]] = TypeAdapter(list[_PostedGroup])


def _fast_kind() -> Any:
    """The same fields and types for msgspec."""
    hints = get_type_hints(_PostedGroup, include_extras=True)
    fields = [
        (name, hints[name]) if field.is_required() else (name, hints[name], field.default)
        for name, field in _PostedGroup.model_fields.items()
    ]
    return msgspec.defstruct("_FastGroup", fields, kw_only=True, gc=False)


_fast_group = _fast_kind()
_FAST_ONE: msgspec.json.Decoder[_PostedGroup] = msgspec.json.Decoder(_fast_group)
_FAST_MANY: msgspec.json.Decoder[list[_PostedGroup]] = msgspec.json.Decoder(GenericAlias(list, (_fast_group,)))
_ENCODER = msgspec.json.Encoder()
_NOT_FOR_THE_FAST = (msgspec.MsgspecError, RecursionError, OverflowError, UnicodeError)


def decompressed(body: bytes, encoding: str | None, *, max_bytes: int) -> bytes:
    """The body behind a `Content-Encoding`.

    Raises:
        Refusal: 400 when it is not what the header says, 413 when it unfolds to more than `max_bytes`, 415 for an
            encoding other than gzip.
    """
    if encoding in (None, "", "identity"):
        return body
    if encoding not in ("gzip", "x-gzip"):
        raise Refusal(415, f"Content-Encoding {encoding!r} is not supported: use gzip", "encoding")
    reader = zlib.decompressobj(_GZIP_WINDOW)
    try:
        unfolded = reader.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise Refusal(400, f"the body is not gzip, as its Content-Encoding says: {error}", "gzip") from None
    if len(unfolded) > max_bytes:
        raise Refusal(413, f"the body unfolds to more than {max_bytes} bytes: send fewer groups at once", "too_large")
    if not reader.eof:
        raise Refusal(400, "the gzip body ends in the middle", "gzip")
    return unfolded


def read_group(body: bytes, names: Mapping[int, str]) -> CheckedGroup:
    """Read and check the body of `POST /scored_data`; `names` are those of the environments.

    Raises:
        Refusal: 422, naming environment, group and fault.
    """
    with contextlib.suppress(*_NOT_FOR_THE_FAST):
        return _checked(_FAST_ONE.decode(body), 0, names, _ENCODER.encode)
    try:
        group = _ONE.validate_json(body)
    except ValidationError as error:
        raise _unreadable(error, body, names) from None
    return _checked(group, 0, names, _ONE.dump_json)


def read_groups(body: bytes, names: Mapping[int, str]) -> list[CheckedGroup]:
    """Read and check the body of `POST /scored_data_list`; one bad group refuses all.

    Raises:
        Refusal: 422, naming environment, group and fault.
    """
    with contextlib.suppress(*_NOT_FOR_THE_FAST):
        return [_checked(g, number, names, _ENCODER.encode) for number, g in enumerate(_FAST_MANY.decode(body))]
    try:
        groups = _MANY.validate_json(body)
    except ValidationError as error:
        raise _unreadable(error, body, names) from None
    return [_checked(group, number, names, _ONE.dump_json) for number, group in enumerate(groups)]


def faults_of(error: ValidationError) -> list[dict[str, Any]]:
    """The first faults of a body, in FastAPI's shape and without the input: that may be megabytes, or no text."""
    faults = error.errors(include_input=False, include_url=False, include_context=False)[:10]
    return [
        {"type": f["type"], "loc": ["body", *f["loc"]], "msg": f"{'.'.join(map(str, f['loc']))}: {f['msg']}"}
        for f in faults
    ]


def _checked(
    group: _PostedGroup, number: int, names: Mapping[int, str], to_json: Callable[[_PostedGroup], bytes]
) -> CheckedGroup:
    fault = _fault(group)
    if fault is not None:
        where, text = fault
        message = f"{_sender(group.env_id, names)}, group {number}: {where}: {text}"
        raise Refusal(422, [{"type": "value_error", "loc": ["body", number, where], "msg": message}], "malformed")
    return CheckedGroup(
        env_id=group.env_id,
        num_sequences=len(group.tokens),
        body=to_json(group),
        has_logprobs=bool(group.inference_logprobs),
        has_labels=all(map(_are_labels, group.masks, group.tokens)),
        policy_version=_oldest_version(group),
    )


def _oldest_version(group: _PostedGroup) -> int | None:
    if not group.policy_versions:
        return None
    trained = (
        version
        for versions, labels in zip(group.policy_versions, group.masks, strict=True)
        for version, label in zip(versions, labels, strict=True)
        if label != MASKED_LABEL
    )
    return min(trained, default=None)


def _are_labels(labels: Sequence[int], tokens: Sequence[int]) -> bool:
    num_masked = labels.count(MASKED_LABEL)
    if labels[num_masked:] == tokens[num_masked:]:  # prompt and completion: almost always, and quick
        return True
    return all(label in (MASKED_LABEL, token) for label, token in zip(labels, tokens, strict=True))


def _fault(group: _PostedGroup) -> tuple[str, str] | None:
    """The first field that does not fit the tokens, and how."""
    num_sequences = len(group.tokens)
    if num_sequences == 0:
        return "tokens", "the group is empty: it needs at least one sequence"
    lengths = [len(tokens) for tokens in group.tokens]
    for index, tokens in enumerate(group.tokens):
        if not tokens:
            return "tokens", f"sequence {index} is empty"
    required: tuple[tuple[str, Sequence[Any]], ...] = (("masks", group.masks), ("scores", group.scores))
    for name, values in required:
        if len(values) != num_sequences:
            return name, f"{len(values)} entries for {num_sequences} sequences"
    # An empty list says "none", as stock environments send it.
    per_sequence: tuple[tuple[str, Sequence[Any] | None], ...] = (
        ("overrides", group.overrides),
        ("truncated", group.truncated),
    )
    for name, optional in per_sequence:
        if optional and len(optional) != num_sequences:
            return name, f"{len(optional)} entries for {num_sequences} sequences"
    per_token: tuple[tuple[str, Sequence[Sequence[Any]] | None], ...] = (
        ("masks", group.masks),
        ("inference_logprobs", group.inference_logprobs),
        ("advantages", group.advantages),
        ("ref_logprobs", group.ref_logprobs),
        ("policy_versions", group.policy_versions),
        ("distill_token_ids", group.distill_token_ids),
        ("distill_logprobs", group.distill_logprobs),
    )
    for name, rows in per_token:
        if not rows:
            continue
        if len(rows) != num_sequences:
            return name, f"{len(rows)} entries for {num_sequences} sequences"
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if len(row) != length:
                return name, f"sequence {index} has {len(row)} entries for {length} tokens"
    return _fault_of_messages(group.messages)


def _fault_of_messages(messages: Sequence[Any] | None) -> tuple[str, str] | None:
    for index, conversation in enumerate(messages or ()):
        if not isinstance(conversation, list):
            return "messages", f"sequence {index} has no list of messages but {type(conversation).__name__}"
        for message in conversation:
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                return "messages", f"sequence {index} has a message without role and content"
    return None


def _unreadable(error: ValidationError, body: bytes, names: Mapping[int, str]) -> Refusal:
    """A 422 in FastAPI's shape, without the input, which may be megabytes."""
    detail = faults_of(error)
    for fault in detail:
        location = fault["loc"][1:]
        number = location[0] if location and isinstance(location[0], int) else 0
        fault["msg"] = f"{_sender(_env_id(body, number), names)}, group {number}: {fault['msg']}"
    return Refusal(422, detail, "malformed")


def _env_id(body: bytes, number: int) -> int | None:
    """Who sent a group that could not be read, where that can still be made out."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    group = value[number] if isinstance(value, list) and number < len(value) else value
    env_id = group.get("env_id") if isinstance(group, dict) else None
    return env_id if isinstance(env_id, int) else None


def _sender(env_id: int | None, names: Mapping[int, str]) -> str:
    if env_id is None:
        return "environment without an id"
    return f"environment {env_id} ({names.get(env_id, 'unknown here')})"
