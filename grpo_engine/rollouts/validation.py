"""Reads and checks what clients post: decompression within bounds, and groups that can be trained on.

A group is validated once, here, and stored as the bytes in which it is later handed out, so that nothing on the way to
the trainer parses its numbers again. An invalid group is refused with its environment, its number and the field; it is
never repaired. What only stock clients send is converted in `stock.scored_data` first.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import GenericAlias
from typing import Annotated, Any, get_type_hints

import msgspec
from pydantic import ValidationError

from grpo_engine.rollouts.stock.scored_data import parse_json, with_numbers
from grpo_engine.wire.codec import shortened
from grpo_engine.wire.rollouts import LARGEST_NUMBER, LARGEST_WHOLE, MASKED_LABEL, TOKEN_BOUND, ScoredGroup

MAX_GROUPS_A_POST = 1024
"""Ours have 64. A post is queued in one go, which holds the event loop: for 40 s by 250,000 groups, 44 kB of gzip."""
_GZIP_WINDOW = 31
"""`wbits` value by which zlib expects a gzip header."""


class Refusal(Exception):
    """A request that is answered with an HTTP error; `reason` labels the log line and the counter."""

    def __init__(self, status: int, detail: str | list[dict[str, Any]], reason: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedGroup:
    """A valid group."""

    env_id: int | None
    num_sequences: int
    body: bytes
    """JSON with every key of `ScoredGroup`."""
    has_logprobs: bool
    has_labels: bool
    """Whether every trained position of its masks holds the token itself."""
    num_sampled: int
    """Trained tokens."""
    policy_version: int | None = None
    """Oldest policy version that sampled a trained token; None where the group carries no versions."""
    spread: float = 0.0
    """Mean absolute advantage: that of its `advantages`, else of its scores, less their mean."""


_Token = Annotated[int, msgspec.Meta(ge=0, lt=TOKEN_BOUND)]
_Version = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_WHOLE)]
_Label = Annotated[int, msgspec.Meta(ge=-TOKEN_BOUND, lt=TOKEN_BOUND)]
_Id = Annotated[int, msgspec.Meta(ge=-LARGEST_WHOLE, le=LARGEST_WHOLE)]
_Number = Annotated[float, msgspec.Meta(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]  # refuses NaN and infinities too
_BOUNDED: dict[str, Any] = {
    "tokens": list[list[_Token]],
    "masks": list[list[_Label]],
    "env_id": _Id | None,
    "policy_versions": list[list[_Version]] | None,
    "distill_token_ids": list[list[list[_Token]]] | None,
    "scores": list[_Number],
    "advantages": list[list[_Number]] | None,
    "ref_logprobs": list[list[_Number]] | None,
    "inference_logprobs": list[list[_Number]] | None,
    "distill_logprobs": list[list[list[_Number]]] | None,
}
"""Types of the numeric fields of `ScoredGroup` with the bounds that the trainer's tensors have."""


def _bounded_group() -> Any:
    """`ScoredGroup` as a msgspec struct: it decodes a group of some thousand tokens in a third of pydantic's time."""
    hints = get_type_hints(ScoredGroup) | _BOUNDED
    fields = [
        (name, hints[name]) if field.is_required() else (name, hints[name], field.default)
        for name, field in ScoredGroup.model_fields.items()
    ]
    return msgspec.defstruct("ScoredGroup", fields, kw_only=True, gc=False)


_GROUP = _bounded_group()
_ONE: msgspec.json.Decoder[ScoredGroup] = msgspec.json.Decoder(_GROUP)
_MANY: msgspec.json.Decoder[list[ScoredGroup]] = msgspec.json.Decoder(GenericAlias(list, (_GROUP,)))
_ENCODER = msgspec.json.Encoder()
_UNREADABLE = (msgspec.MsgspecError, RecursionError, OverflowError, ValueError)
"""Errors of JSON that is malformed, nested too deeply, or holds a number or a text that cannot be represented."""


def decompressed(body: bytes, encoding: str | None, *, max_bytes: int) -> bytes:
    """Decompress a body according to its `Content-Encoding`.

    Raises:
        Refusal: 400 when it is not what the header says, 413 when it decompresses to more than `max_bytes`, 415 for an
            encoding other than gzip.
    """
    if encoding in (None, "", "identity"):
        return body
    if encoding not in ("gzip", "x-gzip"):
        raise Refusal(415, f"Content-Encoding {encoding!r} is not supported: use gzip", "encoding")
    reader = zlib.decompressobj(_GZIP_WINDOW)
    try:
        content = reader.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise Refusal(400, f"Content-Encoding is gzip, but the body is not: {error}", "gzip") from None
    if len(content) > max_bytes:
        raise Refusal(413, f"the decompressed body exceeds {max_bytes} bytes: send fewer groups at once", "too_large")
    if not reader.eof:
        raise Refusal(400, "the gzip body is truncated", "gzip")
    return content


def read_group(body: bytes, names: Mapping[int, str]) -> CheckedGroup:
    """Read and check the body of `POST /scored_data`; `names` are those of the environments by id.

    Raises:
        Refusal: 422, naming environment, group and field.
    """
    try:
        group = _ONE.decode(body)
    except _UNREADABLE:
        group = _converted(_parsed(body), 0, names)
    return _checked(group, 0, names)


def read_groups(body: bytes, names: Mapping[int, str]) -> list[CheckedGroup]:
    """Read and check the body of `POST /scored_data_list`; one bad group refuses all.

    Raises:
        Refusal: 422, naming environment, group and field; 413 for more than `MAX_GROUPS_A_POST`.
    """
    try:
        groups = _MANY.decode(body)
        _check_number(groups)
    except _UNREADABLE:
        posted = _parsed(body)
        if not isinstance(posted, list):
            raise _malformed(["body"], f"expected a list of groups, got {type(posted).__name__}") from None
        _check_number(posted)
        groups = [_converted(group, number, names) for number, group in enumerate(posted)]
    return [_checked(group, number, names) for number, group in enumerate(groups)]


def _check_number(groups: list[Any]) -> None:
    if len(groups) > MAX_GROUPS_A_POST:
        detail = f"the body has {len(groups):,} groups: send at most {MAX_GROUPS_A_POST:,} at once"
        raise Refusal(413, detail, "too_large")


def faults_of(error: ValidationError) -> list[dict[str, Any]]:
    """The first faults of a body in FastAPI's format, without the input: that may be megabytes, or not text."""
    faults = error.errors(include_input=False, include_url=False, include_context=False)[:10]
    return [
        {
            "type": fault["type"],
            "loc": ["body", *(shortened(part) if isinstance(part, str) else part for part in fault["loc"])],
            "msg": shortened(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"),
        }
        for fault in faults
    ]


def _parsed(body: bytes) -> Any:
    try:
        return parse_json(body)
    except (ValueError, RecursionError) as error:
        raise _malformed(["body"], f"the body is not valid JSON: {error}") from None


def _converted(posted: Any, number: int, names: Mapping[int, str]) -> ScoredGroup:
    """A group that the strict decoder refused, with text and booleans read as numbers."""
    try:
        group: ScoredGroup = msgspec.convert(with_numbers(posted), _GROUP, strict=False)
    except _UNREADABLE as error:
        text, _, path = str(error).partition(" - at `$.")
        env_id = posted.get("env_id") if isinstance(posted, dict) else None
        raise _invalid(env_id, number, path.rstrip("`") or "group", text, names) from None
    return group


def _checked(group: ScoredGroup, number: int, names: Mapping[int, str]) -> CheckedGroup:
    fault = _fault(group)
    if fault is not None:
        raise _invalid(group.env_id, number, *fault, names)
    try:
        body = _ENCODER.encode(group)
    except _UNREADABLE as error:  # half a surrogate pair in a text
        raise _invalid(group.env_id, number, "group", str(error), names) from None
    return CheckedGroup(
        env_id=group.env_id,
        num_sequences=len(group.tokens),
        body=body,
        has_logprobs=bool(group.inference_logprobs),
        has_labels=all(map(_are_labels, group.masks, group.tokens)),
        num_sampled=sum(len(labels) - labels.count(MASKED_LABEL) for labels in group.masks),
        policy_version=_oldest_version(group),
        spread=_spread(group),
    )


def _spread(group: ScoredGroup) -> float:
    advantages = [value for row in group.advantages or [] for value in row]
    if not advantages:
        mean = sum(group.scores) / len(group.scores)
        advantages = [score - mean for score in group.scores]
    return sum(map(abs, advantages)) / len(advantages)


def _oldest_version(group: ScoredGroup) -> int | None:
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
    if labels[num_masked:] == tokens[num_masked:]:  # prompt, then completion: nearly every sequence
        return True
    return all(label in (MASKED_LABEL, token) for label, token in zip(labels, tokens, strict=True))


def _fault(group: ScoredGroup) -> tuple[str, str] | None:
    """The first field that does not match the tokens, and the fault."""
    num_sequences = len(group.tokens)
    if num_sequences == 0:
        return "tokens", "the group has no sequence"
    lengths = [len(tokens) for tokens in group.tokens]
    for index, tokens in enumerate(group.tokens):
        if not tokens:
            return "tokens", f"sequence {index} is empty"
    required: tuple[tuple[str, Sequence[Any]], ...] = (("masks", group.masks), ("scores", group.scores))
    for name, values in required:
        if len(values) != num_sequences:
            return name, f"{len(values)} entries for {num_sequences} sequences"
    # Stock environments send an empty list for "absent".
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
            return "messages", f"sequence {index} must be a list of messages, not {type(conversation).__name__}"
        for message in conversation:
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                return "messages", f"sequence {index} has a message without role and content"
    return None


def _invalid(env_id: Any, number: int, where: str, text: str, names: Mapping[int, str]) -> Refusal:
    message = f"{_sender(env_id, names)}, group {number}: {where}: {text}"
    return _malformed(["body", number, where], message)


def _malformed(loc: list[str | int], message: str) -> Refusal:
    """A 422 in FastAPI's format."""
    return Refusal(422, [{"type": "value_error", "loc": loc, "msg": message}], "malformed")


def _sender(env_id: Any, names: Mapping[int, str]) -> str:
    if not isinstance(env_id, int):
        return "environment without an id"
    return f"environment {env_id} ({names.get(env_id, 'not registered')})"
