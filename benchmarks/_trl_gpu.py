"""The peer of `gpu_throughput.py`: TRL 1.16's GRPO trainer on the same model shape, rows and GPU.

    python benchmarks/_trl_gpu.py [--rows 2] [--row-tokens 16384] [--steps 4] [--variants fp32 bf16+liger …]

Prints a JSON object a variant: tokens a second, prompts included, and peak memory, or why it failed. All that is timed
is TRL's own `train()`: its loss and output head, recompute, backward, clipping, fused AdamW, one row a micro-batch.
Generation alone is left out: where TRL would generate and score, it is handed rows made beforehand. Variants are words:

    fp32     what TRL does by default: fp32 weights, computed with in bf16 (autocast). As precise an update as ours.
    bf16     `dtype="bfloat16"`: AdamW steps the bf16 weights themselves and keeps its moments in bf16. 8 bytes a
             parameter, but no fp32 masters: what an update has below bf16's spacing is lost.
    liger    `use_liger_kernel=True`: Liger's norms, rotary embedding and MLP. The head stays TRL's, which is fused.
    cudnn    attention by cuDNN's kernels, as ours on Hopper, instead of those that torch chooses.

What else differs: TRL pads the rows of a step to the longest and never shares a prompt; its old log-probabilities are
the present ones, as without vLLM (with vLLM it adds a forward pass over every row); it copies no weights for inference.
`--rehearse` runs a small model on the CPU, without Liger, to see that everything is in place.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from contextlib import nullcontext
from typing import Any

import torch
from datasets import Dataset
from gpu_throughput import made_up_groups, model, row_flags
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_engine.models.tiny_tokenizer import PAD_ID, tiny_tokenizer

WORDS = {"fp32", "bf16", "liger", "cudnn"}
VARIANTS = ["fp32", "bf16", "bf16+cudnn", "bf16+liger+cudnn", "fp32+liger+cudnn"]
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Clock(TrainerCallback):  # type: ignore[misc]
    """Seconds of every optimizer step, and a peak of memory that starts after the first."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        synchronize()
        if len(self.seconds) == 1 and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        synchronize()
        self.seconds.append(time.perf_counter() - self._began)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def trl_batch(args: argparse.Namespace, seed: int) -> dict[str, Tensor]:
    """A step's rows as TRL's `_generate_and_score_completions` returns them, completions padded on the right."""
    groups = made_up_groups(args, seed)
    rows = [torch.tensor(tokens) for group in groups for tokens in group.tokens]
    completions = [row[args.prompt :] for row in rows]
    prompt_ids = torch.stack([row[: args.prompt] for row in rows])
    lengths = torch.tensor([len(completion) for completion in completions])
    completion_mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": pad_sequence(completions, batch_first=True, padding_value=PAD_ID),
        "completion_mask": completion_mask,
        "advantages": torch.tensor([values[0] for group in groups for values in group.advantages or ()]),
        "num_items_in_batch": completion_mask.sum(),
    }


def measure(variant: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train for `args.steps` steps after one that is not counted."""
    words = set(variant.split("+"))
    dtype = torch.float32 if "fp32" in words else torch.bfloat16
    steps = [trl_batch(args, seed) for seed in range(args.steps + 1)]
    num_rows = len(steps[0]["advantages"])
    batches, clock = iter(steps), Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model(dtype, "cpu", **SMALL) if args.rehearse else model(dtype),
            processing_class=tiny_tokenizer(),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=Dataset.from_list([{"prompt": ""}] * len(steps)),
            callbacks=[clock],
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=num_rows,
                num_generations=num_rows,
                max_completion_length=args.row_tokens - args.prompt,
                max_steps=len(steps),
                learning_rate=1e-6,
                use_liger_kernel="liger" in words,
                use_cpu=args.rehearse,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
        )
        trainer.remove_callback(PrinterCallback)  # stdout is for the figures
        trainer._generate_and_score_completions = lambda _: {
            name: tensor.to(trainer.accelerator.device) for name, tensor in next(batches).items()
        }
        with sdpa_kernel(CUDNN_FIRST, set_priority=True) if "cudnn" in words else nullcontext():
            trained = trainer.train()
    tokens = [int(step["prompt_mask"].sum() + step["completion_mask"].sum()) for step in steps]
    return {
        "variant": variant,
        "tokens_per_s": round(sum(tokens[1:]) / sum(clock.seconds[1:])),
        "peak_gib": None if args.rehearse else round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "first_step_s": round(clock.seconds[0], 1),
        "step_s": [round(s, 3) for s in clock.seconds[1:]],
        "tokens": tokens[1:],
        "loss": trained.training_loss,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[row_flags()]
    )
    parser.add_argument("--variants", nargs="+", default=VARIANTS, help="words joined by +")
    parser.add_argument("--rehearse", action="store_true", help="a small model on the CPU")
    args = parser.parse_args()
    if args.rows < 2:
        parser.error(f"--rows is {args.rows}, but TRL wants at least 2 completions of a prompt; give --rows 2 or more")
    for variant in args.variants:
        words = set(variant.split("+"))
        if not words <= WORDS or len(words & {"fp32", "bf16"}) != 1:
            parser.error(f"--variants has {variant!r}; a variant is fp32 or bf16, then +liger or +cudnn or both")
    for variant in sorted(args.variants, key=lambda variant: "liger" in variant):  # Liger's patches stay in the process
        try:
            print(json.dumps(measure(variant, args)), flush=True)
        except Exception as error:  # any failure: the other variants still give figures
            reason = next(iter(str(error).splitlines()), "")
            print(json.dumps({"variant": variant, "failed": f"{type(error).__name__}: {reason}"}), flush=True)
            print(f"{variant}: {error!r}", file=sys.stderr)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
