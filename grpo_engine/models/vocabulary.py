"""Whether two tokenizers have one vocabulary, without sending it."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of the tokens with their ids, which tokenizers of one vocabulary have in common.

    Added tokens are left out: fine-tuned models give other names to reserved ones (`<|reserved_special_token_2|>` of
    Llama 3 is `<|im_start|>` of Hermes 3), and are compared with their base models all the same.
    """
    added = tokenizer.get_added_vocab()
    plain = sorted((number, token) for token, number in tokenizer.get_vocab().items() if token not in added)
    return hashlib.sha256(json.dumps(plain, ensure_ascii=False).encode()).hexdigest()
