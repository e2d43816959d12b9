"""The peer of the stage `colocate` of `gpu.py`: TRL's GRPO trainer with vLLM in its own processes, whole steps.

    python -m torch.distributed.run --nproc-per-node 2 benchmarks/_trl_colocate.py --model FOLDER [--steps 20]

Rank 0 prints one JSON object: tokens a second of whole steps (sampling, waking, training; prompts included), seconds a
step and of generation, and peak memory. A rank that fails prints one that says why. Each rank samples and trains
`--rows` sequences a step, in groups of four, of our generated prompts with verifiable instructions; completions have
their full length, since the end token is ignored. TRL as its users set it up for speed: bf16 weights, vLLM's sleep
mode, no recompute, Liger where it is installed. One process steps with bitsandbytes' 8-bit AdamW, several with FSDP2
and torch's fused one in bf16, whose sharded states fit.

What else differs: TRL shares no prompt between rows and adds a forward pass for the old log-probabilities where
vLLM's are corrected for. `--device cpu` rehearses the rest: there Transformers generates, since TRL 1.16 cannot load
weights into the CPU build of vLLM (its parameters have no loader any more once they are packed).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from importlib.util import find_spec
from itertools import islice
from typing import Any

import pyarrow as pa
import torch
import trl
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_engine.environments.tasks.ifeval.task import IFEval

GROUP, ROWS_AT_ONCE = 4, 4
"""Completions of a prompt, and sequences of a micro-batch: those of the colocated profile."""
UNCOUNTED = 2
"""First steps, which compile."""


class Clock(TrainerCallback):  # type: ignore[misc]
    """The moment at which each optimizer step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            if len(self.ends) == UNCOUNTED:
                torch.cuda.reset_peak_memory_stats()
        self.ends.append(time.perf_counter())


def prompts(count: int) -> Dataset:
    """Of the task that the colocated profile has.

    With a fingerprint of its own: datasets would make one of a pickle of the table, and dill (0.4.1) pickles modules by
    value that are neither below `sys.prefix` nor in a folder `site-packages`, as of `pip install --target`; pyarrow's
    (26.0.1) cannot be.
    """
    texts = [item.question for item in islice(IFEval(num_instructions=5).items(0), count)]
    return Dataset(pa.table({"prompt": texts}), fingerprint=f"ifeval-{count}")


def config(options: argparse.Namespace, folder: str) -> GRPOConfig:
    is_cpu, world = options.device == "cpu", int(os.environ.get("WORLD_SIZE", "1"))
    sharded = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2, "reshard_after_forward": True}}
    inference = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
        "vllm_gpu_memory_utilization": options.gpu_memory_utilization,
        "vllm_max_model_length": options.max_model_len,
        "generation_kwargs": {"ignore_eos": True},
    }
    return GRPOConfig(
        output_dir=folder,
        model_init_kwargs={"dtype": "float32" if is_cpu else "bfloat16"},
        bf16=not is_cpu,
        use_cpu=is_cpu,
        per_device_train_batch_size=ROWS_AT_ONCE,
        gradient_accumulation_steps=options.rows // ROWS_AT_ONCE,
        num_generations=GROUP,
        max_completion_length=options.max_tokens,
        max_steps=options.steps + UNCOUNTED,
        learning_rate=1e-6,
        beta=0.0,
        optim="adamw_bnb_8bit" if world == 1 and not is_cpu else "adamw_torch_fused",
        gradient_checkpointing=False,
        use_liger_kernel=not is_cpu and find_spec("liger_kernel") is not None,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **({"generation_kwargs": {"min_new_tokens": options.max_tokens}} if is_cpu else inference),
        **(sharded if world > 1 and not is_cpu else {}),
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train, and read the clock and TRL's own count of tokens."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        settings = config(options, folder)
        trainer = GRPOTrainer(
            model=options.model,
            reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
            train_dataset=prompts(256),
            callbacks=[clock],
            args=settings,
        )
        trainer.remove_callback(PrinterCallback)  # stdout is for the figures
        generating: list[float] = []
        generate = trainer._generate_and_score_completions
        counted: list[int] = []

        def timed(inputs: Any) -> Any:
            began = time.perf_counter()
            outputs = generate(inputs)
            generating.append(time.perf_counter() - began)
            counted.append(int(outputs["prompt_mask"].sum() + outputs["completion_mask"].sum()))
            return outputs

        trainer._generate_and_score_completions = timed
        trainer.train()
    world = trainer.accelerator.num_processes
    seconds = [
        later - sooner for sooner, later in zip(clock.ends[UNCOUNTED - 1 :], clock.ends[UNCOUNTED:], strict=False)
    ]
    tokens = world * sum(counted[UNCOUNTED : UNCOUNTED + len(seconds)])
    return {
        "peer": f"TRL {trl.__version__}, colocated",
        "processes": world,
        "steps": len(seconds),
        "tokens_per_s": round(tokens / sum(seconds)),
        "s_a_step": round(statistics.median(seconds), 3),
        "generation_s": round(statistics.median(generating[UNCOUNTED:]), 3),
        "tokens_a_step": round(tokens / len(seconds)),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else None,
        "liger": settings.use_liger_kernel,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--rows", type=int, default=16, help="sequences of a rank and step; the colocated profile has 16"
    )
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.38)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options, rank = parser.parse_args(), int(os.environ.get("RANK", "0"))
    try:
        figures = measure(options)
    except Exception as error:  # any failure of the peer is a result of the comparison
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        figures = {"failed": reason, "rank": rank}
        traceback.print_exc()
    if rank == 0 or "failed" in figures:  # the launcher ends the others, so rank 0 might print nothing
        sys.stdout.write(json.dumps(figures) + "\n")  # one write: the ranks share the pipe
        sys.stdout.flush()
    sys.exit("failed" in figures)


if __name__ == "__main__":
    main()
