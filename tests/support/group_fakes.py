"""Groups for the rollout screen, as our trainer records them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from screen_fakes import STARTED

from grpo_engine.wire.codec import to_line
from grpo_engine.wire.metrics import RolloutLine, SampledCompletion

LETTERS_A_TOKEN = 3


def completion(text: str, reward: float = 1.0, *, version: int = 3, **changes: Any) -> SampledCompletion:
    """Tokens of three letters; the second is 1.5 times as likely to the trainer, the third half as likely."""
    texts = [text[at : at + LETTERS_A_TOKEN] for at in range(0, len(text), LETTERS_A_TOKEN)] + ["<end>"]
    trainer = [-0.5] * len(texts)
    for place, log_ratio in ((1, 0.405), (2, -0.693)):
        if place < len(texts) - 1:
            trainer[place] += log_ratio
    values: dict[str, Any] = {
        "text": text + "<end>",
        "reward": reward,
        "advantage": 2 * reward - 1,
        "token_ids": list(range(len(texts))),
        "inference_logprobs": [-0.5] * len(texts),
        "training_logprobs": trainer,
        "policy_versions": [version] * len(texts),
        "token_texts": texts,
        "entropies": [0.25 * place for place in range(len(texts))],
        "is_truncated": False,
    }
    return SampledCompletion(**{**values, **changes})


def group(
    step: int,
    rewards: Sequence[float] = (1.0, 0.0),
    *,
    prompt: str = "",
    environment: str | None = "sort6",
    texts: Sequence[str] = (),
) -> RolloutLine:
    """One a step, with a prompt of its own unless one is given."""
    return RolloutLine(
        time=STARTED + 2.4 * step,
        step=step,
        environment=environment,
        prompt=prompt or f"You sort digits. sort {step:06d}",
        completions=[
            completion(texts[place] if place < len(texts) else f"answer {place} of {step}", reward, version=step)
            for place, reward in enumerate(rewards)
        ],
    )


def write_groups(run_folder: Path, *groups: RolloutLine, mode: str = "wb") -> None:
    """Put them into rollouts.jsonl."""
    with (run_folder / "rollouts.jsonl").open(mode) as file:
        file.writelines(map(to_line, groups))
