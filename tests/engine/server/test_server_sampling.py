"""Penalties, temperature, truncation and sampling, against hand-worked numbers."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from grpo_engine.server.torch.decoding import Decoder, Work
from grpo_engine.server.torch.sampling import RowTable, TokenCounts, draw, process_logits
from grpo_engine.wire.inference import GenerateRequest

EOS = frozenset({3})


def table(*rows: dict[str, object]) -> RowTable:
    requests = [GenerateRequest(prompt="", **row) for row in rows]
    return RowTable.of(requests, [8] * len(rows), EOS, torch.device("cpu"))


def kept(logits: list[float], **row: object) -> list[int]:
    processed = process_logits(torch.tensor([logits]), table(row), None, 0)
    return [index for index, value in enumerate(processed[0].tolist()) if value > -math.inf]


def test_rows_without_settings_are_unchanged() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert torch.equal(process_logits(logits, table({}), None, 0), logits)


def test_temperature_divides_row_by_row() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0, 0.0]] * 3)
    processed = process_logits(logits, table({"temperature": 0.5}, {"temperature": 2.0}, {"temperature": 0}), None, 0)
    assert processed[0].tolist() == [2, 4, 8, 0]
    assert processed[1].tolist() == [0.5, 1, 2, 0]
    assert processed[2].tolist() == [1, 2, 4, 0]


LOG = [math.log(p) for p in (0.5, 0.25, 0.15, 0.1)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.51}, [0, 1]),
        ({"top_p": 0.76}, [0, 1, 2]),
        ({"min_p": 0.3}, [0, 1, 2]),
        ({"min_p": 0.31}, [0, 1]),
        ({"top_k": 3, "top_p": 0.83}, [0, 1]),  # 0.5 + 0.25 of the 0.9 that top_k leaves is 0.833
        ({"top_k": 3, "top_p": 0.84}, [0, 1, 2]),
        ({"top_p": 0.01}, [0]),
        ({"top_k": 100}, [0, 1, 2, 3]),
    ],
)
def test_truncation_keeps_the_most_probable(row: dict[str, float], expected: list[int]) -> None:
    assert kept(LOG, **row) == expected
    assert sorted(3 - i for i in kept(LOG[::-1], **row)) == expected


def test_min_tokens_forbid_every_stop_token_until_then() -> None:
    logits = torch.zeros(2, 5)
    rows = table({"min_tokens": 2, "stop_token_ids": [1]}, {"stop_token_ids": [1]})
    early = process_logits(logits, rows, None, 1)
    assert early[0].tolist() == [0, -math.inf, 0, -math.inf, 0]
    assert early[1].tolist() == [0] * 5
    assert process_logits(logits, rows, None, 2)[0].tolist() == [0] * 5


def test_penalties_count_generated_tokens() -> None:
    counts = TokenCounts([[0, 0, 1]], 4, torch.device("cpu"))
    counts.add(torch.tensor([1]))
    counts.add(torch.tensor([2]))
    counts.add(torch.tensor([2]))
    logits = torch.tensor([[2.0, -2.0, 1.0, 5.0]])

    def penalised(**row: float) -> list[float]:
        return process_logits(logits, table(row), counts, 3)[0].tolist()

    assert penalised(repetition_penalty=2.0) == [1.0, -4.0, 0.5, 5.0]
    assert penalised(presence_penalty=0.5) == [2.0, -2.5, 0.5, 5.0]
    assert penalised(frequency_penalty=0.5) == [2.0, -2.5, 0.0, 5.0]


def test_sampling_inverts_the_cumulative_distribution() -> None:
    logits = torch.tensor([LOG] * 6)
    uniforms = torch.tensor([0.0, 0.4999, 0.5001, 0.7499, 0.9001, 0.999999], dtype=torch.float64)
    assert draw(logits, table(*[{}] * 6), uniforms).tolist() == [0, 0, 1, 1, 3, 3]


def test_excluded_tokens_are_never_sampled() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]] * 3)
    uniforms = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits, table(*[{}] * 3), uniforms).tolist() == [1, 3, 3]


def test_greedy_rows_take_the_largest_beside_sampled_rows() -> None:
    logits = torch.tensor([LOG[::-1]] * 2)
    uniforms = torch.tensor([0.0, 0.0], dtype=torch.float64)
    assert draw(logits, table({"temperature": 0}, {}), uniforms).tolist() == [3, 0]


def test_a_row_that_has_ended_stays_within_the_positions_of_the_model() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=12, n_embd=8, n_layer=1, n_head=1)).eval()
    decoder = Decoder(
        model, None, eos_ids=frozenset(), logprobs_mode="processed", generator=torch.Generator().manual_seed(0)
    )
    works = [
        Work(
            prompt=[1] * length,
            params=GenerateRequest(prompt="", ignore_eos=True),
            first_copy=0,
            num_copies=1,
            max_new_tokens=12 - length,
            is_cancelled=lambda: False,
        )
        for length in (11, 2, 2, 2, 2)  # one of five does not make the batch smaller
    ]
    assert [len(rows[0].token_ids) for rows in decoder.decode(works)] == [1, 10, 10, 10, 10]


def test_settings_of_dropped_rows_are_dropped() -> None:
    rows = table({"temperature": 0.5}, {"temperature": 2.0, "stop_token_ids": [1]}, {"temperature": 4.0})
    rows.select(torch.tensor([1, 2]))
    assert rows.temperature_B.tolist() == [2.0, 4.0]
    assert rows.id_B.tolist() == [1, 2]
    assert rows.stop_ids_S.tolist() == [1, 3]
    assert rows.stops_BS.tolist() == [[True, True], [False, True]]
    uniforms = torch.tensor([0.0, 0.9999, 0.0], dtype=torch.float64)
    assert draw(torch.tensor([LOG] * 2), rows, uniforms).tolist() == [3, 0]
