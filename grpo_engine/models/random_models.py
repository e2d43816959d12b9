"""Makes `local/…-random`: the exact shape of a published model with random weights, for runs that need no hub.

Throughput and memory are those of the real model, and every part of a training run works; nothing sensible is said.
Weights are normal with the deviation that the published models began with, norms are 1. What is sampled is text of
random words: tokens that the tokenizer does not have are never sampled, as the first of the hidden dimensions sees to
(`_fill`). Written shard by shard, so that memory for one shard is enough; on a GPU where there is one with room.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import torch
from accelerate import init_empty_weights
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
)

from grpo_engine.models.local import smollm2_gguf
from grpo_engine.models.tiny_tokenizer import tiny_tokenizer

SEED = 0
STD = 0.02
"""What Llama and Qwen are initialised with."""
DTYPE = torch.bfloat16
SHARD_BYTES = 1_100_000_000
"""The largest tensor, an embedding of 128,256 × 4,096, fits in one."""
ROOM_ON_GPU_BYTES = 3 * SHARD_BYTES
UNKNOWN = -1000.0
"""In the first column of the output layer, for a token that the tokenizer does not have."""


def make_random(name: str, folder: Path) -> None:
    """Write the weights, the configuration and a tokenizer of the model `name` into `folder`."""
    tokenizer = _tokenizer()
    config = published_shape(name)
    config.bos_token_id = tokenizer.bos_token_id
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    write_random(config, len(tokenizer), folder)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def published_shape(name: str) -> PreTrainedConfig:
    """Llama-3.1-8B's for `local/llama-8b-random`, Llama-3.2-1B's and Qwen2.5-3B's for the others."""
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    match name:
        case "local/llama-8b-random":
            return LlamaConfig(
                vocab_size=128_256,
                hidden_size=4096,
                intermediate_size=14_336,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=8,
                head_dim=128,
                max_position_embeddings=131_072,
                rope_parameters={**llama3, "factor": 8.0},
                rms_norm_eps=1e-5,
                tie_word_embeddings=False,
            )
        case "local/llama-1b-random":
            return LlamaConfig(
                vocab_size=128_256,
                hidden_size=2048,
                intermediate_size=8192,
                num_hidden_layers=16,
                num_attention_heads=32,
                num_key_value_heads=8,
                head_dim=64,
                max_position_embeddings=131_072,
                rope_parameters={**llama3, "factor": 32.0},
                rms_norm_eps=1e-5,
                tie_word_embeddings=True,
            )
        case _:
            return Qwen2Config(
                vocab_size=151_936,
                hidden_size=2048,
                intermediate_size=11_008,
                num_hidden_layers=36,
                num_attention_heads=16,
                num_key_value_heads=2,
                max_position_embeddings=32_768,
                rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
                rms_norm_eps=1e-6,
                tie_word_embeddings=True,
            )


def write_random(config: PreTrainedConfig, num_tokens: int, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write weights of a shape, as any library reads them: shards, their index, and the configuration.

    Args:
        num_tokens: tokens of the tokenizer; the others of the vocabulary are never sampled.
    """
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    shapes = {name: parameter.to("meta", DTYPE) for name, parameter in model.named_parameters()}
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=shard_bytes)
    device = _device()
    for file, names in split.filename_to_tensors.items():
        tensors = {name: random_tensor(name, shapes[name].shape, num_tokens, device).cpu() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    config.architectures = [type(model).__name__]
    config.dtype = DTYPE
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)


def random_tensor(name: str, shape: torch.Size, num_tokens: int, device: str) -> Tensor:
    """The parameter `name`, in bf16: the same at every call on the same kind of device, in whatever order."""
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=DTYPE, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{SEED}/{name}".encode()))
    tensor = torch.empty(shape, dtype=DTYPE, device=device).normal_(0.0, STD, generator=generator)
    _fill(name, tensor, num_tokens)
    return tensor


def _fill(name: str, tensor: Tensor, num_tokens: int) -> None:
    """Have the first hidden dimension be 1 after every layer, and let it push down the logits of unknown tokens.

    Every embedding begins with 1, nothing is added to it by a layer, and the output layer has `UNKNOWN` for it where
    the tokenizer has no such token. The logits of all others stay as random as they are: they get the same sum.
    """
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        tensor[0] = 0.0
    elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
        tensor[:num_tokens, 0] = 1.0
        tensor[num_tokens:, 0] = UNKNOWN


def _device() -> str:
    has_room = torch.cuda.is_available() and torch.cuda.mem_get_info()[0] >= ROOM_ON_GPU_BYTES
    return "cuda" if has_room else "cpu"


def _tokenizer() -> PreTrainedTokenizerBase:
    """That of SmolLM2 where its package is installed, with 49,152 tokens; else the one of ASCII characters."""
    source = smollm2_gguf()
    if source is None:
        return tiny_tokenizer()
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    return tokenizer
