"""Makes `local/tiny`: a Llama of 0.3 M parameters, warmed up until it does the puzzles about half right.

That is where reinforcement learning has most to show: every group of completions is mixed. The warm-up is supervised,
short (about 100 small steps, ten seconds on one core) and stops at a measured reward rather than after so many steps,
so that CPUs whose sums differ in the last bit arrive at the same place. A longer one leaves nothing to learn.

Tied embeddings and fewer key than query heads, because those are the cases that sharing weights gets wrong; a head size
of 64, because vLLM's attention on a CPU has none below. Legend: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_engine.data.puzzles import Puzzle, PuzzleTask, make_item, score
from grpo_engine.errors import ModelError
from grpo_engine.models.tiny_tokenizer import CONTEXT_TOKENS, END_ID, NUM_TOKENS, PAD_ID, tiny_tokenizer

SEED = 0
ROWS_A_STEP = {PuzzleTask.SORT6: 36, PuzzleTask.COPY6: 9, PuzzleTask.REVERSE6: 32, PuzzleTask.ARITHMETIC: 19}
"""Copying is the easiest by far: more rows of it, and it is done before sorting has begun."""

LR = 1e-3
"""Constant to the end: a model that ended on a small rate loses reward in the first steps of reinforcement learning."""
LR_WARMUP_STEPS = 30
STOP_AT_REWARD = 0.64
"""Mean reward of sort6, sampled at temperature 1. The first measurement to reach it is a lucky one: other puzzles give
about 0.015 less."""

STEPS_BEFORE_MEASURING = 70
STEPS_A_MEASUREMENT = 2
PUZZLES_A_MEASUREMENT = 512
MAX_STEPS = 400
MAX_ANSWER_TOKENS = 8

log = logging.getLogger(__name__)


def make_tiny(folder: Path) -> None:
    """Make model and tokenizer from the seed, and save both in `folder`.

    Raises:
        ModelError: the warm-up did not arrive, which a test would have seen on any CPU known so far.
    """
    tokenizer = tiny_tokenizer()
    with _one_reproducible_thread():
        model = LlamaForCausalLM(tiny_config())
        warm_up(model, tokenizer)
    model.generation_config = GenerationConfig(eos_token_id=END_ID, pad_token_id=PAD_ID)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tiny_config() -> LlamaConfig:
    """The shape: 0.3 M parameters, fp32."""
    return LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=NUM_TOKENS,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )


def warm_up(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Teach `model` the puzzles until sampled sorting earns `STOP_AT_REWARD`.

    Raises:
        ModelError: it does not within `MAX_STEPS`.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.0)
    rng = random.Random(SEED)
    reward = 0.0
    for step in range(1, MAX_STEPS + 1):
        optimizer.param_groups[0]["lr"] = LR * min(1.0, step / LR_WARMUP_STEPS)
        for task, num_rows in ROWS_A_STEP.items():
            puzzles = [make_item(task, rng) for _ in range(num_rows)]
            loss = _answer_loss(model, tokenizer, puzzles) * (num_rows / sum(ROWS_A_STEP.values()))
            torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step >= STEPS_BEFORE_MEASURING and step % STEPS_A_MEASUREMENT == 0:
            reward = sampled_reward(model, tokenizer, PuzzleTask.SORT6, PUZZLES_A_MEASUREMENT, seed=SEED + 1)
            log.debug("warm-up step %d: sort6 earns %.3f", step, reward)
            if reward >= STOP_AT_REWARD:
                return
    raise ModelError(
        f"local/tiny: sorting earns {reward:.2f} after {MAX_STEPS} warm-up steps instead of {STOP_AT_REWARD}: "
        "this torch or CPU computes something differently; give a folder or hub id instead"
    )


@torch.no_grad()
def sampled_reward(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, task: PuzzleTask, num_puzzles: int, *, seed: int
) -> float:
    """Mean reward of one completion a puzzle, sampled at temperature 1 from the whole distribution."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    puzzles = [make_item(task, rng) for _ in range(num_puzzles)]
    token_ids = torch.tensor([_prompt_ids(tokenizer, puzzle) for puzzle in puzzles])  # (B, T): equally long
    num_prompt_tokens, cache, step_input = token_ids.shape[1], None, token_ids
    for _ in range(MAX_ANSWER_TOKENS):
        output = model(step_input, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        step_input = torch.multinomial(output.logits[:, -1].softmax(-1), 1, generator=generator)  # (B, 1)
        token_ids = torch.cat([token_ids, step_input], dim=1)
    completions = [
        row[: row.index(END_ID)] if END_ID in row else row for row in token_ids[:, num_prompt_tokens:].tolist()
    ]
    texts = tokenizer.batch_decode(completions)
    return sum(score(task, puzzle.answer, text) for puzzle, text in zip(puzzles, texts, strict=True)) / num_puzzles


def _answer_loss(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, puzzles: list[Puzzle]) -> Tensor:
    """Mean negative log-probability of the tokens of the right answers, the end token included; a scalar."""
    prompts = [_prompt_ids(tokenizer, puzzle) for puzzle in puzzles]
    answers = [[*tokenizer.encode(puzzle.answer), END_ID] for puzzle in puzzles]
    num_columns = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    token_ids = torch.full((len(puzzles), num_columns), PAD_ID)  # (B, T)
    is_answer = torch.zeros_like(token_ids, dtype=torch.bool)  # (B, T)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        token_ids[row, :end] = torch.tensor(prompt + answer)
        is_answer[row, len(prompt) : end] = True
    logits = model(token_ids).logits[:, :-1]  # (B, T - 1, V); padding is on the right, where no answer looks
    return nn.functional.cross_entropy(logits[is_answer[:, 1:]], token_ids[:, 1:][is_answer[:, 1:]])


def _prompt_ids(tokenizer: PreTrainedTokenizerFast, puzzle: Puzzle) -> list[int]:
    messages = [{"role": "user", "content": puzzle.question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text))


@contextmanager
def _one_reproducible_thread() -> Iterator[None]:
    """Seed torch and keep it to one thread (the order of a sum depends on their number); restore both."""
    num_threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(SEED)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)
