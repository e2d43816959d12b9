"""Rows of unequal lengths that a reference service is sent: padding takes neither memory nor time far above theirs."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
import torch
from rank_training import make_model
from torch import Tensor
from training import VOCABULARY

from grpo_engine.data.batching import Batch
from grpo_engine.data.scoring_rows import ScoringRows, decode_rows
from grpo_engine.errors import DataError
from grpo_engine.reference.config import ReferenceConfig
from grpo_engine.reference.scoring import FrozenModel
from grpo_engine.wire.codec import to_line
from grpo_engine.wire.reference import MOST_HEAD_BYTES, MOST_ROWS, ScoringHead

LONG = 1000


def sent(lengths: list[int], groups: list[int]) -> ScoringRows:
    """Rows of these lengths, all of whose tokens but the first are to be scored."""
    head = ScoringHead(lengths=lengths, groups=groups, temperatures=[1.0] * len(lengths))
    num_tokens = sum(lengths)
    tokens = torch.arange(num_tokens, dtype=torch.int32) % VOCABULARY
    wanted = torch.ones(num_tokens, dtype=torch.uint8)
    wanted[[0, *list(accumulate(lengths))[:-1]]] = 0
    body = to_line(head) + tokens.numpy().tobytes() + wanted.numpy().tobytes()
    return decode_rows(body, num_tokens=VOCABULARY, max_tokens=LONG)


@pytest.mark.parametrize("group_of", ["one group", "a group each", "groups with a long row each"])
def test_short_rows_beside_long_ones_are_scored_with_little_padding_and_in_their_order(group_of: str) -> None:
    num_rows = 4000
    lengths = [LONG if row % 400 == 0 else 2 for row in range(num_rows)]
    groups = {"one group": [0] * num_rows, "a group each": list(range(num_rows))}
    rows = sent(lengths, groups.get(group_of, [row // 400 for row in range(num_rows)]))
    num_positions = 0

    def score(batch: Batch) -> Tensor:
        nonlocal num_positions
        num_positions += batch.inputs.numel()
        return batch.labels[batch.mask].float()

    expected = torch.cat([each[1:] for each in rows.tokens]).float()
    assert torch.equal(rows.scored_by(score), expected)
    assert num_positions <= 16 * sum(lengths)  # 4,000,000 where all are padded to the longest


def test_a_group_of_usual_rows_stays_together() -> None:
    rows = sent([20, 22, 40, 21, 35, 38], [0, 1, 1, 0, 1, 0])
    ((numbers, batch),) = rows.batches()
    assert numbers == [2, 4, 1, 5, 3, 0]
    assert batch.inputs.shape == (6, 39)


@pytest.mark.slow
def test_a_reference_service_on_a_cpu_computes_no_padding_beyond_its_micro_batches(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    config = ReferenceConfig(model_name=str(model), device="cpu", dtype="float32", max_model_len=LONG)
    frozen = FrozenModel(config)
    lengths = [LONG, *[2] * 500]
    assert len(sent(lengths, list(range(501))).scored_by(frozen.logprobs)) == sum(lengths) - 501
    assert frozen._scorer.num_positions <= config.tokens_at_once + 2 * sum(lengths)  # 500,000 in one micro-batch


def test_the_first_line_of_a_request_has_room_for_all_rows_and_is_not_parsed_beyond_that() -> None:
    most = ScoringHead(
        lengths=[2**31 - 1] * MOST_ROWS,
        groups=[-(2**53)] * MOST_ROWS,
        temperatures=[1.7976931348623157e308] * MOST_ROWS,
    )
    assert len(to_line(most)) < MOST_HEAD_BYTES
    lists = b'{"lengths": [' + b"[]," * (MOST_HEAD_BYTES // 3) + b"[]]}\n"
    with pytest.raises(DataError, match=r"a first line of 4,\d+,\d+ bytes"):
        decode_rows(lists, num_tokens=VOCABULARY, max_tokens=LONG)
