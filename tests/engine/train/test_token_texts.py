"""Texts of single tokens: joined they are the completion, whatever the tokenizer does with bytes and spaces."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from grpo_engine.train.recording import samples
from grpo_engine.train.recording.samples import token_texts

TEXT = "Zwei Äpfel für 5 €: 日本 👩‍👧 done."


def byte_level() -> Tokenizer:
    """One token a byte, and some of several, as GPT-2's and Qwen's are built."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġd", "on", "Ġdon", "e."]
    merges = [("Ġ", "d"), ("o", "n"), ("Ġd", "on"), ("e", ".")]
    tokenizer = Tokenizer(
        models.BPE({text: number for number, text in enumerate([*alphabet, *words])}, merges)  # type: ignore[arg-type]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_pieces() -> Tokenizer:
    """Words that begin with a space which a text does not begin with, and bytes for the rest, as Llama 2's is built."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁done", "Z", "we", "i", "▁5", ".", ":"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.mark.parametrize("tokenizer", [byte_level(), sentence_pieces()], ids=["bytes", "sentencepiece"])
def test_joined_they_are_the_text_and_no_character_is_split(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT).ids
    pieces = token_texts(tokens, tokenizer.decode)
    assert len(pieces) == len(tokens) > len(TEXT) / 2
    assert "".join(pieces) == TEXT
    assert not any(samples.HALF_CHARACTER in piece for piece in pieces)
    euro = next(number for number, piece in enumerate(pieces) if "€" in piece)
    assert pieces[euro - 2 : euro] == ["", ""]


def test_tokens_that_are_text_are_kept_between_bytes_that_are_none() -> None:
    tokenizer, rng = byte_level(), random.Random(0)
    for _ in range(200):
        tokens = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randrange(1, 40))]
        pieces = token_texts(tokens, tokenizer.decode)
        assert len(pieces) == len(tokens)
        assert "".join(pieces).replace("\ufffd", "") == tokenizer.decode(tokens).replace("\ufffd", "")


def test_tokens_that_are_known_are_not_decoded_again() -> None:
    tokenizer, asked = byte_level(), 0

    def decode(tokens: list[int]) -> str:
        nonlocal asked
        asked += 1
        return str(tokenizer.decode(tokens))

    tokens = tokenizer.encode("one done one done.").ids
    token_texts(tokens * 2, decode)
    asked = 0
    token_texts(tokens * 50, decode)
    assert asked == 1  # the first: it may stand differently at the start of a text
