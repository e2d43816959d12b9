"""What a trainer and a reference service send each other; written by the one, read by the other.

A request is one line of JSON (`ScoringHead`) and then the tokens of all rows as little-endian int32 and, for each of
them, a byte that says whether its log-probability is wanted. The answer is one line of JSON (`ScoresHead`) and then the
wanted log-probabilities as little-endian fp32, row after row.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from grpo_engine.wire.codec import Message, Whole

MODEL_ROUTE, SCORE_ROUTE, HEALTH_ROUTE = "/model", "/logprobs", "/health"
MOST_ROWS = 65536
"""Of one request."""
MOST_HEAD_BYTES = 64 * MOST_ROWS
"""Of the first line of one request: with all digits a row has 55."""
MOST_TOKENS = 8 << 20
"""Of one request: 40 MB."""
MOST_BODY_BYTES = 64 << 20
"""Of a request, or of an answer."""
TOKEN_BYTES, LOGPROB_BYTES = 4, 4


class ReferenceModel(Message):
    """Answer of `MODEL_ROUTE`: which model the service holds."""

    model_name: str
    vocabulary: str
    """`grpo_engine.models.vocabulary.vocabulary_digest` of its tokenizer."""
    num_tokens: Whole
    """Rows of its output layer."""
    dtype: str
    max_tokens: Whole
    """Longest sequence."""


class ScoringHead(Message):
    """The first line of a request: rows of tokens, in which every token but the first may be scored."""

    lengths: Annotated[list[Annotated[int, Field(ge=2, lt=2**31)]], Field(min_length=1, max_length=MOST_ROWS)]
    """Tokens of each row."""
    groups: list[Whole]
    """Of each row; rows of one group often have one prompt, which is then computed once."""
    temperatures: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]]
    """Of each row: logits are divided by it."""


class ScoresHead(Message):
    """The first line of an answer."""

    model_name: str
    vocabulary: str
    request: str
    """SHA-256 of the body that is answered, in hex."""
    num_logprobs: Whole


class ReferenceRefusal(Message):
    """Body of an error."""

    detail: str
