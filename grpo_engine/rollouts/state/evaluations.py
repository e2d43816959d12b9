"""The state of an evaluation: which environments have answered, which are awaited, and when it is over. Pure.

Neither the trainer nor the API knows which environments will register. So an evaluation is over when every live
environment that evaluates has answered, and none has registered for `SETTLE_S`. If all that could evaluate have
disconnected, or none can, it is over after `SETTLE_WITHOUT_ANSWER_S`. If none has registered at all, or one crashed, it
waits, as a batch does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from grpo_engine.rollouts.state.records import EnvironmentRecord, EvaluationRecord
from grpo_engine.wire.rollouts import EvaluationState, NamedAnswer

SETTLE_S = 1.0
"""Environments that wait for the trainer register within a quarter of a second of each other."""
SETTLE_WITHOUT_ANSWER_S = 10.0
"""An environment that evaluates may still load its tokenizer when one that does not has registered."""


def state_of(
    record: EvaluationRecord,
    environments: Mapping[int, EnvironmentRecord],
    last_seen: Mapping[int, float],
    live: Sequence[EnvironmentRecord],
    *,
    known_since: float,
    registered_at: float,
    now: float,
) -> EvaluationState:
    """The state of the evaluation at `now`.

    Args:
        last_seen: time of the last request of each environment, by id; Unix seconds.
        live: environments that are connected now.
        known_since: an environment with a request since then was live when the order came.
        registered_at: time of the latest registration of an environment; Unix seconds.
    """
    answered = {answer.env_id for answer in record.answers}
    waiting_for = [each for each in live if each.evaluates and each.id not in answered]
    present = {environments[id_].desired_name for id_ in answered} | {each.desired_name for each in waiting_for}
    gone = [
        each
        for each in environments.values()
        if each.evaluates
        and each.desired_name not in present
        and last_seen[each.id] >= (known_since if each.is_connected else record.ordered_at)
    ]
    if record.answers or live:
        settled_at = registered_at + (SETTLE_S if record.answers else SETTLE_WITHOUT_ANSWER_S)
    elif environments and not any(each.evaluates and each.is_connected for each in environments.values()):
        settled_at = max(registered_at, record.ordered_at) + SETTLE_WITHOUT_ANSWER_S  # all that could did
    else:
        settled_at = math.inf  # none has registered yet, or one that crashed will be restarted
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
