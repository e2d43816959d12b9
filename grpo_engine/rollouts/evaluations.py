"""Where an evaluation stands: who answered, who is waited for, and when nobody is any more. Pure.

The trainer does not know which environments there are, and neither does the API: they come when they come. So an
evaluation is over when every environment that evaluates and is alive has answered, and none has come in for a moment.
Where none can evaluate, be it that those who could have said goodbye, that is known after a longer moment; where there
is none at all, or one crashed, they are waited for, as they are for a batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from grpo_engine.rollouts.records import EnvironmentRecord, EvaluationRecord
from grpo_engine.wire.rollouts import EvaluationAnswer, EvaluationOrder, EvaluationState, NamedAnswer

SETTLE_S = 1.0
"""Environments wait for the trainer and register within a quarter of a second of each other."""
SETTLE_WITHOUT_ANSWER_S = 10.0
"""One that evaluates may still be loading its tokenizer when one that does not is long there."""


def state_of(
    record: EvaluationRecord,
    environments: Mapping[int, EnvironmentRecord],
    last_seen: Mapping[int, float],
    live: Sequence[EnvironmentRecord],
    *,
    known_since: float,
    newcomer_at: float,
    now: float,
) -> EvaluationState:
    """Where the evaluation stands.

    Args:
        last_seen: when each environment was last heard of, by id; Unix seconds.
        live: those that are there now.
        known_since: an environment that was heard of since then was there when the order came.
        newcomer_at: when the latest of all environments registered; Unix seconds.
    """
    answered = {answer.env_id for answer in record.answers}
    waiting_for = [each for each in live if each.evaluates and each.id not in answered]
    there = {environments[id_].desired_name for id_ in answered} | {each.desired_name for each in waiting_for}
    gone = [
        each
        for each in environments.values()
        if each.evaluates
        and each.desired_name not in there
        and last_seen[each.id] >= (known_since if each.is_connected else record.ordered_at)
    ]
    if record.answers or live:
        settled_at = newcomer_at + (SETTLE_S if record.answers else SETTLE_WITHOUT_ANSWER_S)
    elif environments and not any(each.evaluates and each.is_connected for each in environments.values()):
        settled_at = max(newcomer_at, record.ordered_at) + SETTLE_WITHOUT_ANSWER_S  # those that could have left
    else:
        settled_at = math.inf  # nobody has come yet, or one that crashed will come back
    is_complete = not waiting_for and now >= settled_at
    return EvaluationState(
        order=record.order,
        is_over=record.is_closed or is_complete,
        answers=[
            NamedAnswer(
                environment=environments[answer.env_id].name,
                desired_name=environments[answer.env_id].desired_name,
                answer=answer,
            )
            for answer in record.answers
        ],
        waiting_for=[each.name for each in waiting_for],
        missing=sorted({each.desired_name for each in gone}),
        unable=[each.name for each in live if not each.evaluates],
    )


def fault_of(answer: EvaluationAnswer, order: EvaluationOrder) -> str | None:
    """How an answer does not fit its order, in words."""
    if answer.problem is not None:
        return None
    num_prompts = len(answer.rewards)
    if not 1 <= num_prompts <= order.num_prompts:
        return f"rewards: {num_prompts} prompts where 1 to {order.num_prompts} were ordered"
    tables: dict[str, Sequence[Sequence[object]]] = {
        "rewards": answer.rewards,
        "lengths": answer.lengths,
        "truncated": answer.truncated,
    }
    if answer.policy_versions is not None:
        tables["policy_versions"] = answer.policy_versions
    for name, rows in tables.items():
        if len(rows) != num_prompts:
            return f"{name}: {len(rows)} entries for {num_prompts} prompts"
        for index, row in enumerate(rows):
            if len(row) != order.num_samples:
                return f"{name}: prompt {index} has {len(row)} entries where {order.num_samples} were ordered"
    return None
