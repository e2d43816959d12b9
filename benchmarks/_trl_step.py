"""The peer of `trainer_step.py`: TRL's GRPO trainer on the same model and task, one process, CPU seconds a step.

Runs in its own interpreter, so that neither side pays for the other's imports. Prints one JSON object.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_engine.data.puzzles import make_item, score
from grpo_engine.models.loading import load_model, load_tokenizer

PROMPTS, GROUP = 16, 8
MODEL, TASK = "local/tiny", "sort6"


class CpuClock(TrainerCallback):  # type: ignore[misc]
    """CPU seconds of the process at the end of every step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.times.append(time.process_time())


def main(steps: int, warm_up: int) -> None:
    torch.set_num_threads(1)
    rng = random.Random(0)
    items = [make_item(TASK, rng) for _ in range(PROMPTS * (steps + 1))]
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": q}], "answer": a} for q, a in items])

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [score(TASK, a, c[0]["content"]) for c, a in zip(completions, answer, strict=True)]

    clock = CpuClock()
    generating = 0.0
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=load_model(MODEL, dtype="float32", device="cpu"),
            processing_class=load_tokenizer(MODEL),
            reward_funcs=reward,
            train_dataset=dataset,
            callbacks=[clock],
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=PROMPTS * GROUP,
                num_generations=GROUP,
                max_completion_length=12,
                max_steps=steps,
                learning_rate=3e-4,
                beta=0.0,
                temperature=1.0,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
        )
        generate = trainer._generate

        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal generating
            began = time.process_time()
            result = generate(*args, **kwargs)
            if len(clock.times) >= warm_up:
                generating += time.process_time() - began
            return result

        trainer._generate = timed
        trainer.train()
    counted = len(clock.times) - warm_up
    whole = (clock.times[-1] - clock.times[warm_up - 1]) / counted
    print(json.dumps({"steps": counted, "whole": whole, "training": whole - generating / counted}))


if __name__ == "__main__":
    main(steps=int(sys.argv[1]), warm_up=int(sys.argv[2]))
