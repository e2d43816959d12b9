"""Made-up groups for the alignment screen, each with one trouble; in the wire's own types."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from screen_fakes import STARTED

from grpo_engine.wire.codec import to_line
from grpo_engine.wire.metrics import RolloutLine, SampledCompletion


def completion(
    training: Sequence[float],
    inference: Sequence[float],
    *,
    versions: Sequence[int] | None = None,
    texts: Sequence[str] = (),
    is_cut: bool = False,
) -> SampledCompletion:
    """A completion with these log-probabilities; token ids count from 100."""
    return SampledCompletion(
        text="".join(texts),
        reward=0.5,
        advantage=0.1,
        token_ids=[100 + place for place in range(len(inference))],
        inference_logprobs=list(inference),
        training_logprobs=list(training),
        policy_versions=list(versions) if versions is not None else [0] * len(inference),
        token_texts=list(texts),
        is_truncated=is_cut,
    )


def group(*completions: SampledCompletion, step: int = 1, prompt: str = "sort 3 1 2: ") -> RolloutLine:
    """A group of them; steps take two seconds."""
    time = STARTED + 2 * step
    return RolloutLine(time=time, step=step, environment="sort6", prompt=prompt, completions=list(completions))


def healthy_group(
    *,
    step: int = 1,
    version: int = 0,
    num: int = 24,
    length: int = 20,
    noise: float = 0.0,
    shift: int = 0,
    change: Callable[[float, int], float] | None = None,
    seed: int = 0,
) -> RolloutLine:
    """A group on which both sides agree, up to what is asked for.

    Args:
        version: of the policy that sampled it.
        noise: mean magnitude of a normal difference, in nats.
        shift: how many tokens further back the inference log-probabilities stand.
        change: the trainer's log-probability, given inference's and its position (-1 for the last).
    """
    chance = random.Random(seed)
    completions = []
    for number in range(num):
        true = [-min(12.0, chance.expovariate(1.0) ** 2) for _ in range(length + 1)]
        inference = [true[(place + shift) % (length + 1)] for place in range(length)]
        training = [
            (change(true[place], -1 if place == length - 1 else place) if change else true[place])
            + chance.gauss(0, noise * 1.25)
            for place in range(length)
        ]
        one = completion(training, inference, versions=[version] * length, texts=[f"w{p} " for p in range(length)])
        completions.append(one.model_copy(update={"token_ids": [1000 * number + place for place in range(length)]}))
    return group(*completions, step=step)


def write_groups(run_folder: Path, groups: Sequence[RolloutLine]) -> None:
    """Append them to `rollouts.jsonl` of a run; without any there is no such file."""
    if not groups:
        return
    with (run_folder / "rollouts.jsonl").open("ab") as file:
        file.writelines(to_line(one) for one in groups)
