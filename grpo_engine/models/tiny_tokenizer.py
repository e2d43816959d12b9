"""The tokenizer of the tiny model: a token for every ASCII character, numbered by its code.

Control characters that no text needs are the special tokens (0 padding, 2 and 3 the ChatML marks, as NUL, STX and ETX;
26, SUB, whatever is not ASCII). 128 tokens are a multiple of the 64 to which inference servers pad a vocabulary, so the
server's embedding is the trainer's, row for row.
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

NUM_TOKENS = 128
PAD_ID, START_ID, END_ID, UNKNOWN_ID = 0, 2, 3, 26
SPECIAL_TOKENS = {PAD_ID: "<pad>", START_ID: "<|im_start|>", END_ID: "<|im_end|>", UNKNOWN_ID: "<unk>"}
CONTEXT_TOKENS = 512

# ChatML without its newlines, and with roles cut to their first letter: a prompt costs five tokens more than its text.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'][0] }}{{ message['content'] }}<|im_end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer; `<|im_end|>` ends a completion."""
    tokenizer = Tokenizer(models.WordLevel(_vocabulary(), unk_token=SPECIAL_TOKENS[UNKNOWN_ID]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS.values()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[PAD_ID],
        unk_token=SPECIAL_TOKENS[UNKNOWN_ID],
        eos_token=SPECIAL_TOKENS[END_ID],
        additional_special_tokens=[SPECIAL_TOKENS[START_ID]],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def _vocabulary() -> dict[str, int]:
    vocabulary = {}
    for code in range(NUM_TOKENS):
        is_text = 32 <= code < 127 or chr(code) in "\t\n\r"
        vocabulary[SPECIAL_TOKENS.get(code, chr(code) if is_text else f"<|unused_{code}|>")] = code
    return vocabulary
